package tiers

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// A header that no record claims may lie where it cannot be erased now: on a slab
// that is not here, on a device that failed, or where nobody knows it, since the
// store has crashed and its free room is not swept yet. As long as there may be
// such headers, each key that is deleted gets a tombstone, and so does each record
// of an absent slab that another one takes the place of: a repair leaves out what
// was written of the key until then. When the slabs are back and all is swept, no
// such header is left, and the tombstones go.

// tombstones has them written. It belongs to the committer's goroutine.
type tombstones struct {
	file *index.Tombstones
	log  *slog.Logger
	away map[uint16]bool // the slabs that are not here, by number
	// suspects are the slabs that may have such a header, each with the highest
	// generation that it may be of.
	suspects func() []index.Floor
}

// openTombstones reads the tombstones, when the slabs are open. In the place of
// those that are damaged or lost all that was written before counts as dead in a
// repair, until it is swept. known are the slabs of the catalog.
func (s *Store) openTombstones(known []index.SlabRecord) error {
	t := &tombstones{log: s.log, away: map[uint16]bool{}, suspects: s.suspects}
	var all []index.Floor
	for _, r := range known {
		f := index.Floor{Slab: r.ID, Gen: s.firstGen}
		all = append(all, f)
		if !slices.Contains(s.slabNo, r.Number) {
			t.away[r.Number] = true
			s.absent = append(s.absent, f)
		}
	}
	var err error
	t.file, err = s.catalog.Tombstones()
	if errors.Is(err, block.ErrCorrupt) {
		s.log.Error("tombstones are damaged or lost: until free room is swept a repair would leave out all that was written before this start", "err", err)
		s.unsweep()
		t.file = s.catalog.NewTombstones()
		err = t.file.Raise(all)
	}
	if err != nil {
		return err
	}
	s.tombstones = t
	return nil
}

// unserved reports whether the catalog has records of slabs that are not here now.
func (s *Store) unserved() bool { return len(s.absent) > 0 }

// suspects is described at tombstones.
func (s *Store) suspects() []index.Floor {
	floors := s.absent[:len(s.absent):len(s.absent)]
	for i, slab := range s.slabs {
		if s.suspect(i) {
			floors = append(floors, index.Floor{Slab: slab.ID(), Gen: s.gen.Load()})
		}
	}
	return floors
}

// suspect reports whether a slab may have a header that no record claims. What is
// unclean is looked at first, since it becomes unswept before it is clean again.
func (s *Store) suspect(dev int) bool {
	return s.commits.unclean[dev].Load() || s.g3.devs[dev].unswept.Load()
}

// supersede finds out whether a record to be put takes the place of one of an absent
// slab. It comes before the commit: afterwards nobody knows.
func (t *tombstones) supersede(c *index.Catalog, op *catalogOp) error {
	if len(t.away) == 0 || op.rewrite {
		return nil
	}
	old, there, err := c.Get(op.put.Key, op.put.HashLen)
	if err != nil {
		return fmt.Errorf("look for an older record: %w", err)
	}
	if there && t.away[old.Slab] {
		op.stones = []index.Tombstone{{Key: old.Key, Gen: old.Gen}}
		op.trace.away = &old
	}
	return nil
}

// write writes the tombstones of operations, if they are needed, and removes those
// that are not. It comes behind the erasures of the same round: one that fails makes
// tombstones needed.
func (t *tombstones) write(ops []catalogOp) {
	var stones []index.Tombstone
	lifts := false
	for i := range ops {
		if op := &ops[i]; op.err == nil {
			stones = append(stones, op.stones...)
			lifts = lifts || op.lifts
		}
	}
	if len(stones) > 0 {
		t.add(ops, stones)
	}
	if lifts {
		t.lift()
	}
}

func (t *tombstones) add(ops []catalogOp, stones []index.Tombstone) {
	floors := t.suspects()
	if t.file.Reached(floors) {
		return // there are no such headers, or all on those slabs is dead already
	}
	raised, err := t.file.Add(stones, floors)
	if raised {
		t.log.Warn("so many blocks were deleted while slabs are not here or not swept that a repair would leave out all that is on them now", "slabs", len(floors), "at most", index.MaxTombstones)
	}
	if err == nil {
		return
	}
	t.log.Error("tombstones not written", "blocks", len(stones), "err", err)
	for i := range ops {
		if op := &ops[i]; op.err == nil && len(op.stones) > 0 {
			op.err = err
		}
	}
}

// lift removes tombstones that no such header can lie under any more.
func (t *tombstones) lift() {
	var err error
	if floors := t.suspects(); len(floors) > 0 {
		err = t.file.Keep(floors)
	} else if t.file.Len() > 0 {
		err = t.file.Clear()
	}
	if err != nil {
		t.log.Warn("tombstones that are not needed any more stay", "err", err)
	}
}
