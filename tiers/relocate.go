package tiers

import (
	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// relocate moves a block of G2 to another slot of G2, so that its extent can be
// given to another size without evicting anything. It does nothing to a block
// that anybody uses, and reports the bytes of the slot that came free.
func (s *Store) relocate(h block.Handle) int64 {
	var from block.Place
	var ns block.NamespaceID
	var size int64
	s.table.Update(h, func(e *index.Entry) {
		if e.Refs == 0 && live(e, ixG2) {
			e.Refs++ // keeps it where it is while it is copied
			from, ns = e.Place[ixG2], e.NS
			size, _ = SlotBytes(int64(e.Len))
		}
	})
	if size == 0 {
		return 0
	}
	defer s.release(h)
	to, ok := s.g2.tryAlloc(s.shareIn(s.g2, ns), size, h)
	if !ok {
		return 0
	}
	copy(s.g2.slot(to, size), s.g2.slot(from, size))
	moved := false
	s.table.Update(h, func(e *index.Entry) {
		// A reader or a writer that came meanwhile holds the old slot's address.
		if moved = e.Refs == 1 && live(e, ixG2); moved {
			s.pinMoved(e, from, to)
			e.Place[ixG2] = to
		}
	})
	if !moved {
		s.g2.free(to)
		return 0
	}
	return s.g2.free(from)
}
