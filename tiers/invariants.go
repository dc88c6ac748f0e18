package tiers

import (
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// What must hold, and is looked at in programs built with the tag invariants.

// poisonSlot fills a slot of G2 that is given back. Whoever reads it still has no
// reference to it any more.
func (d *device) poisonSlot(off, n int64) {
	if invariants.Enabled && d.mem != nil {
		invariants.Poison(d.mem.Slice(off, n))
	}
}

// wantPoisoned panics when a free slot of G2 was written to.
func (d *device) wantPoisoned(off, n int64) {
	if invariants.Enabled && d.mem != nil && !invariants.Poisoned(d.mem.Slice(off, n)) {
		panic(fmt.Sprintf("tiers: slot of %d bytes at %d of g2 was written to while it was free", n, off))
	}
}

// known wants the handle to have found an entry: the caller holds something that
// keeps it, until the store is closed.
func (s *Store) known(h block.Handle, found bool) {
	if invariants.Enabled && !found && s.life.Err() == nil {
		panic(fmt.Sprintf("tiers: stale handle %d", h))
	}
}

// wantCounts panics when something of an entry was given back more often than it
// was taken.
func wantCounts(h block.Handle, e *index.Entry) {
	if invariants.Enabled && (int32(e.Refs) < 0 || int16(e.Ops) < 0 || int32(e.Named) < 0 || int32(e.Kids[ixG2]) < 0 || int32(e.Kids[ixG3]) < 0) {
		panic(fmt.Sprintf("tiers: counts below zero: handle %d: refs %d, ops %d, named %d, kids %d", h, int32(e.Refs), int16(e.Ops), int32(e.Named), e.Kids))
	}
}
