package sim

import (
	"slices"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// store is one tier or two, and owns residency as tiers.Store does: blocks come into
// the upper tier, what leaves it goes down unless the lower one has it, and a hit below
// comes up and keeps its copy. Every block has one byte.
type store struct {
	w         *Workload
	upper     *tier
	lower     *tier // nil: none
	admission *policy.Admission
	clock     int64 // block references so far, which the admission has as time

	handles []block.Handle // by block; 0: none
	slots   []slot         // by handle
	unused  []block.Handle
	stamp   uint32   // of the request under way
	seen    []uint32 // by block, stamp of the last request with it

	// Of the request under way.
	path   []uint32 // its blocks, each once
	fresh  []fresh  // by place in path
	prints []uint64

	hits    int64
	written int64 // to the lower tier
}

// slot is what the store knows of a handle, which belongs to one block while that is
// in any tier.
type slot struct {
	id     uint32
	depth  uint32
	parent block.Handle
	in     [2]residency // by tier
	used   bool         // since it came into the upper tier
}

// residency is what a slot says of one tier.
type residency struct {
	resident bool
	kids     uint32 // resident blocks that name it as parent
}

// resident reports whether any tier has it.
func (e *slot) resident() bool { return e.in[upperTier].resident || e.in[lowerTier].resident }

// fresh says where a block of the request is inserted.
type fresh struct{ upper, lower bool }

func newStore(w *Workload) *store {
	return &store{
		w:       w,
		handles: make([]block.Handle, w.Unique()),
		seen:    make([]uint32, w.Unique()),
		slots:   make([]slot, 1), // handle 0 is no block
	}
}

// request replays one request.
func (s *store) request(refs []uint32) error {
	s.stamp++
	s.clock += int64(len(refs))
	hits, misses := s.lookup(refs)
	u := s.upper
	if s.lower != nil {
		s.lower.full = false
	}
	room := max(0, u.capacity-hits) // for misses, beside the pinned hits
	insert := min(misses, room)
	if err := s.evict(u, u.resident+insert-u.capacity); err != nil {
		return err
	}
	if err := s.admit(min(insert, u.capacity-u.resident)); err != nil {
		return err
	}
	s.stamp++ // the request is over, and so are its pins
	for _, t := range []*tier{s.upper, s.lower} {
		if t != nil && t.high > 0 && t.resident > t.high {
			if err := s.evict(t, t.resident-t.low); err != nil {
				return err
			}
		}
	}
	return nil
}

// lookup counts hits, pins the blocks of the request, and tells the policies of it. It
// returns how many different blocks are in the upper tier and how many are not.
func (s *store) lookup(refs []uint32) (hits, misses int64) {
	s.path, s.prints = s.path[:0], s.prints[:0]
	prefix, unbroken := 0, true
	for _, id := range refs {
		s.prints = append(s.prints, s.w.prints[id])
		e := &s.slots[s.handles[id]]
		above, below := e.in[upperTier].resident, e.in[lowerTier].resident
		unbroken = unbroken && (above || below)
		if above || below {
			s.hits++
		}
		if unbroken {
			prefix++
			if above {
				s.upper.prefixHits++
			} else {
				s.lower.prefixHits++
			}
		}
		if s.seen[id] == s.stamp {
			continue // a second time in one request
		}
		s.seen[id] = s.stamp
		s.path = append(s.path, id)
		if above {
			hits++
		} else {
			misses++
		}
	}
	s.upper.p.Request(s.prints, prefix, 0)
	if s.lower != nil {
		s.lower.p.Request(s.prints, prefix, 0)
	}
	return hits, misses
}

// admit inserts the first misses of the path, counted from the root, offers the others
// to the lower tier, and tells the hits: all leaf to root.
func (s *store) admit(insert int64) error {
	s.fresh = s.fresh[:0]
	for i, id := range s.path {
		var f fresh
		e := &s.slots[s.handles[id]]
		switch {
		case e.in[upperTier].resident:
		case insert > 0:
			insert--
			f.upper = true
			s.take(id)
		case e.in[lowerTier].resident:
		default:
			var err error
			if f.lower, err = s.refused(id); err != nil {
				return err
			}
			if !f.lower {
				s.path = s.path[:i] // what is behind an absent block is no use
			}
		}
		if i == len(s.path) {
			break
		}
		s.fresh = append(s.fresh, f)
	}
	for i, id := range slices.Backward(s.path) {
		h := s.handles[id]
		f := s.fresh[i]
		e := &s.slots[h]
		if !e.resident() {
			if e.depth = uint32(i); i > 0 {
				e.parent = s.handles[s.path[i-1]]
			}
		}
		for _, t := range []*tier{s.upper, s.lower} {
			switch {
			case t == nil:
			case e.in[t.ix].resident:
				t.p.Hit(h)
				e.used = true
			case t.ix == upperTier && f.upper:
				s.insert(t, h)
			case t.ix == lowerTier && f.lower:
				t.coming--
				s.insert(t, h)
			}
		}
	}
	return nil
}

// refused decides about a block that the upper tier has no room for.
func (s *store) refused(id uint32) (written bool, err error) {
	if s.lower == nil || !s.admits(id, false, false) {
		return false, nil
	}
	if fits, err := s.makeRoom(); !fits {
		return false, err
	}
	s.take(id)
	s.lower.coming++
	return true, nil
}

// admits asks whether a block may be written to the lower tier.
func (s *store) admits(id uint32, used, needed bool) bool {
	o := policy.Offer{Hash: s.w.prints[id], Bytes: 1, Partial: s.w.tails[id], Used: used, Needed: needed, Full: s.lower.full}
	return s.admission.Admit(o, s.clock) == policy.Admitted
}

// makeRoom makes room in the lower tier for one block, if it can.
func (s *store) makeRoom() (fits bool, err error) {
	t := s.lower
	err = s.evict(t, t.resident+t.coming+1-t.capacity)
	t.full = t.resident+t.coming >= t.capacity
	return err == nil && !t.full, err
}

// insert makes a block resident in a tier.
func (s *store) insert(t *tier, h block.Handle) {
	e := &s.slots[h]
	e.in[t.ix].resident = true
	t.resident++
	if t.ix == lowerTier {
		s.written++
	} else {
		e.used = e.in[lowerTier].resident // it is here because it was asked for again
	}
	t.p.Insert(h, policy.Block{Hash: s.w.prints[e.id], Parent: e.parent, Depth: e.depth, Tokens: 1, Bytes: 1})
	if e.in[t.ix].kids > 0 {
		t.p.Leaf(h, false)
	}
	if e.parent == 0 {
		return
	}
	up := &s.slots[e.parent].in[t.ix]
	up.kids++
	if up.kids == 1 && up.resident {
		t.p.Leaf(e.parent, false)
	}
}

// evict removes need blocks, or as many as may leave.
func (s *store) evict(t *tier, need int64) error {
	for need > 0 {
		t.victims = t.p.Victims(t.victims[:0], need, t.ok)
		before := need
		for _, h := range t.victims {
			if err := t.check(s, h); err != nil {
				return err
			}
			gone, err := s.leave(t, h)
			if err != nil {
				return err
			}
			if gone {
				need--
			}
		}
		if need == before {
			return nil
		}
	}
	return nil
}

// leave takes a block out of a tier, after it went down if it should and is not there
// yet. A block stays whose children below would be left without it.
func (s *store) leave(t *tier, h block.Handle) (gone bool, err error) {
	if e := &s.slots[h]; t == s.upper && s.lower != nil && !e.in[lowerTier].resident {
		needed := e.in[lowerTier].kids > 0
		written := s.admits(e.id, e.used, needed)
		if written {
			if written, err = s.makeRoom(); err != nil {
				return false, err
			}
		}
		switch {
		case written:
			s.insert(s.lower, h)
		case needed:
			return false, nil
		}
	}
	s.remove(t, h)
	t.evictions++
	return true, nil
}

func (s *store) remove(t *tier, h block.Handle) {
	e := &s.slots[h]
	e.in[t.ix].resident = false
	t.resident--
	why := block.Evicted
	if e.resident() {
		why = block.Moved
	}
	t.p.Remove(h, why)
	if e.parent != 0 {
		up := &s.slots[e.parent].in[t.ix]
		up.kids--
		if up.kids == 0 && up.resident {
			t.p.Leaf(e.parent, true)
		}
	}
	if e.resident() {
		return
	}
	// Its children left before it, so nothing names the handle any more.
	s.handles[e.id] = 0
	s.unused = append(s.unused, h)
}

// take gives a block a handle, if it has none.
func (s *store) take(id uint32) {
	if s.handles[id] != 0 {
		return
	}
	if n := len(s.unused); n > 0 {
		s.handles[id] = s.unused[n-1]
		s.unused = s.unused[:n-1]
	} else {
		s.handles[id] = block.Handle(len(s.slots))
		s.slots = append(s.slots, slot{})
	}
	s.slots[s.handles[id]] = slot{id: id}
}
