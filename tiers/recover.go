package tiers

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// recover fills the table from the catalog: it reads records, not media, so it
// takes as long as there are blocks, however large they are. What the records
// say is verified against slot headers and checksums when a block is read.
//
// Records that stand for nothing any more (of an older epoch, of a namespace
// that is gone, past their time, or of a slot that another record has) are
// dropped; those of a slab that is not here now stay for when it comes back. v is
// the evictor of G3, which does not run yet.
func (s *Store) recover(v *evictor) error {
	devs := map[uint16]*device{}
	if s.g3 != nil {
		for i, d := range s.g3.devs {
			devs[s.slabNo[i]] = d
		}
	}
	now := nowUnix()
	type seated struct {
		gen uint64
		h   block.Handle
	}
	var order []seated
	var dropped, absent, misfit int
	var lines logRate
	drop := func(r *index.Record) {
		dropped++
		s.commits.add(catalogOp{key: r.Key, hlen: r.HashLen, fin: func(error) {}})
	}
	err := s.catalog.Scan(func(r *index.Record) error {
		ns, err := s.names.byID(r.Key.NS)
		if err != nil || ns.state.Load().Epoch != r.Epoch || r.Expires != 0 && int64(now) >= r.Expires {
			drop(r)
			return nil
		}
		d := devs[r.Slab]
		if d == nil {
			absent++
			return nil
		}
		var parent block.Handle
		if r.HasParent {
			parent = s.table.Upsert(block.Key{NS: r.Key.NS, Hash: r.Parent}, r.HashLen, func(_ block.Handle, e *index.Entry, _ bool) {
				e.Named++
				e.Kids[ixG3]++
			})
		}
		h := s.table.Upsert(r.Key, r.HashLen, func(_ block.Handle, e *index.Entry, _ bool) {
			e.Sum, e.Len, e.Gen, e.Expires = r.Sum, r.Len, r.Gen, uint32(r.Expires)
			e.Place[ixG3], e.State[ixG3] = block.PlaceAt(d.number, r.Offset), index.SlotResident
			e.Parent = parent
		})
		if h == 0 || r.HasParent && parent == 0 {
			return fmt.Errorf("%w: the resident table cannot grow beyond %d blocks", block.ErrNoSpace, s.table.Len())
		}
		if err := d.slots.Take(r.Offset, int64(r.Slot), h); err != nil {
			// Two records for one place: at most one can be right, and a read would
			// tell. The one that came first keeps it.
			misfit++
			if more, ok := lines.next(); ok {
				s.log.Error("record dropped", "key", r.Key, "slab", d.slab.Path(), "err", err, "more", more)
			}
			s.unseat(h, parent)
			drop(r)
			return nil
		}
		if r.Pinned {
			s.pins.slots.Add(int64(r.Slot))
			s.table.Update(h, func(e *index.Entry) { s.setPin(h, e) })
		}
		if r.Expires != 0 {
			s.mortal.Store(true)
		}
		s.g3.mu.used += int64(r.Slot)
		s.g3.blocks.Add(1)
		s.g3.payload.Add(int64(r.Len))
		ns.blocks.Add(1)
		ns.bytes.Add(int64(r.Len))
		order = append(order, seated{r.Gen, h})
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the catalog: %w", err)
	}
	// The policy meets the blocks in the order in which they were written, which
	// is the best guess at their age.
	slices.SortFunc(order, func(a, b seated) int { return cmp.Compare(a.gen, b.gen) })
	for _, o := range order {
		v.insert(o.h)
	}
	if len(order) > 0 || dropped > 0 {
		s.log.Info("recovered", "blocks", len(order), "dropped", dropped, "misfit", misfit)
	}
	if absent > 0 {
		s.log.Warn("blocks are on slabs that are not here, and are not served until those are back", "blocks", absent)
	}
	return nil
}

// unseat takes back what recover did for a record that has no place.
func (s *Store) unseat(h, parent block.Handle) {
	s.settle(h, func(e *index.Entry) { e.State[ixG3], e.Parent = index.SlotNone, 0 })
	if parent != 0 {
		s.settle(parent, func(e *index.Entry) {
			e.Named--
			e.Kids[ixG3]--
		})
	}
}
