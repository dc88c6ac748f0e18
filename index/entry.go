package index

import (
	"fmt"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// Entry is what the resident table knows of one block. It holds no pointers,
// lives outside the Go heap, and is read and written only under the lock of its
// shard, that is inside Table's callbacks; a copy of it may leave them.
//
// Times are coarse and belong to the owner of the table: the table itself sets
// only NS, Hash and HashLen, which the owner must not change, and interprets no
// other field. What a match reads comes first, so that it is mostly one cache
// line; the whole is 120 bytes.
type Entry struct {
	NS      block.NamespaceID
	Len     uint32 // payload bytes
	Expires uint32 // Unix seconds; 0: never
	State   [LocalTiers]SlotState
	Flags   uint8
	HashLen uint8
	Hash    block.Hash
	Place   [LocalTiers]block.Place // where it lies, per local tier
	Gen     uint64                  // generation of the G3 slot, as in its header
	Sum     block.Sum
	Parent  block.Handle       // 0: none
	Born    uint32             // when it was committed, in the owner's unit
	Refs    uint32             // leases and transfers under way: it may not leave a tier
	Kids    [LocalTiers]uint32 // resident children, per local tier
	Named   uint32             // entries whose Parent this is; the entry stays while there are any
	Depth   uint32             // tokens before this block, as far as its ancestors are known
	Ops     uint16             // catalog records and bookkeeping on their way: the entry stays while there are any
}

// LocalTiers is the number of tiers whose blocks the table lists: G2 and G3.
const LocalTiers = 2

// TierIndex maps G2 to 0 and G3 to 1. It panics on any other tier.
func TierIndex(t block.TierID) int {
	switch t {
	case block.G2:
		return 0
	case block.G3:
		return 1
	}
	panic("index: tier " + t.String() + " is not in the resident table")
}

// SlotState is the state of a block in one tier.
type SlotState uint8

// The states of a block in a tier.
//
//	SlotNone -> SlotFilling -> SlotResident -> SlotLeaving -> SlotNone
const (
	SlotNone     SlotState = iota
	SlotFilling            // a slot is taken, bytes are on their way
	SlotResident           // committed: readable
	SlotLeaving            // on its way out: not found any more, its slot not free yet
)

// freed is what a free entry holds, but for its hash, in programs built with the
// tag invariants: whoever keeps a pointer to an entry is found out.
var freed = Entry{
	NS: 0xdbdbdbdb, Len: 0xdbdbdbdb, Expires: 0xdbdbdbdb, State: [LocalTiers]SlotState{0xdb, 0xdb}, Flags: 0xdb, HashLen: 0xdb,
	Gen: 0xdbdbdbdbdbdbdbdb, Refs: 0xdbdbdbdb, Kids: [LocalTiers]uint32{0xdbdbdbdb, 0xdbdbdbdb}, Named: 0xdbdbdbdb, Ops: 0xdbdb,
}

func poison(e *Entry) {
	if invariants.Enabled {
		*e = freed
	}
}

// wantPoisoned panics when a free entry was written to.
func wantPoisoned(e *Entry) {
	if !invariants.Enabled {
		return
	}
	now := *e
	now.Hash = freed.Hash // leads to the next free one
	if now != freed {
		panic(fmt.Sprintf("index: entry was written to while it was free: %+v", *e))
	}
}
