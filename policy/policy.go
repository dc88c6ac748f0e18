// Package policy decides which block leaves a tier, which may come, and what
// is worth fetching. A policy is pure: facts come in, choices go out; it has no
// clock, no lock, no goroutine and does no I/O. The policy owns order; the
// store owns residency.
package policy

import "github.com/kvtier/kvtier/index/block"

// Block is what a policy may know of a block.
type Block struct {
	Hash      uint64       // fingerprint of the key, by which ghosts are known
	Parent    block.Handle // 0 for a root
	Depth     uint32       // tokens before this block
	Tokens    uint16
	Partial   bool // the last block of a prompt, not full
	Bytes     uint32
	Recompute float32 // ns to recompute it at its position
}

// Policy orders the blocks of one tier. One goroutine calls it, the tier's
// evictor. Handles are dense, and are used again after Remove.
//
// No method allocates on the hot path. Unknown handles in Hit, Leaf and Remove
// are ignored, since a hint may arrive after the block has left. Insert of a
// resident handle is a Hit.
type Policy interface {
	// Name is the name by which flags know the policy.
	Name() string
	// Request tells of one request's whole path, root first, by fingerprint,
	// resident or not; the first hits of it are resident. class is the client's
	// hint.
	Request(path []uint64, hits int, class uint8)
	// Hit tells that a resident block was used. The blocks of one request come
	// leaf to root.
	Hit(h block.Handle)
	// Insert tells that a block came into the tier. The blocks of one request
	// come leaf to root, when its batch ends.
	Insert(h block.Handle, b Block)
	// Leaf tells whether a block has no child resident in this tier (true: it
	// may be evicted) or has one. An inserted block is a leaf until told otherwise.
	Leaf(h block.Handle, leaf bool)
	// Remove tells that a block left, also when others chose it.
	Remove(h block.Handle, why block.Reason)
	// Victims appends to dst blocks of at least need bytes altogether, best
	// victims first and children before parents, of which ok says that they are
	// not pinned or leased; fewer when there are not enough. A parent may follow
	// its last child in the same answer. Nothing changes until Remove: a victim
	// that the store refuses stays.
	Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle
	// Len is the number of resident blocks.
	Len() int
}
