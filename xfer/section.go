package xfer

import (
	"cmp"
	"slices"
	"sort"
	"sync/atomic"
)

// registration is one piece of memory that one backend has accepted.
type registration struct {
	desc   Desc // as the caller gave it: what Deregister matches
	start  uint64
	end    uint64 // first address behind it; the largest value when unbounded
	region Region
	info   []byte       // how a peer addresses it, if one can: what RegionInfo said
	refs   atomic.Int64 // requests and prepared lists that point here, and of != nil's section
	of     *peerBackend // whose it is when it is a peer's
}

func newRegistration(t MemType, d Desc, region Region) *registration {
	reg := &registration{desc: d, start: d.Addr, end: d.Addr + d.Len, region: region}
	if d.Len == 0 && t.Unbounded() {
		reg.start, reg.end = 0, ^uint64(0)
	}
	return reg
}

// covers says whether d, which must not wrap around, lies inside.
func (r *registration) covers(d Desc) bool {
	return r.desc.Dev == d.Dev && r.start <= d.Addr && d.Addr+d.Len <= r.end
}

// unpin undoes a pin. The last one unloads what is a peer's.
func (r *registration) unpin() {
	if r.refs.Add(-1) == 0 && r.of != nil {
		r.of.unload(r)
	}
}

// section is what one backend has registered of one memory type. Its user
// locks it.
//
// The covering rule is NIXL's: a descriptor lies inside one registration, never
// across two adjacent ones. NIXL looks only at the element before the lower
// bound of (dev, addr, len), which misses a covering registration when a
// shorter one starts between it and the descriptor. Here each element also
// knows which one up to it, on its device, reaches furthest: if that one does
// not cover, none does.
type section struct {
	regs     []*registration // by device, start, end
	furthest []int32         // furthest[i]: index of the furthest reaching of regs[:i+1] on that device
	bytes    uint64          // of the bounded ones
}

func compareRegistrations(a, b *registration) int {
	return cmp.Or(
		cmp.Compare(a.desc.Dev, b.desc.Dev),
		cmp.Compare(a.start, b.start),
		cmp.Compare(a.end, b.end),
	)
}

// find gives the registration that covers d, or nil.
func (s *section) find(d Desc) *registration {
	// The first element behind everything that starts at or before d.
	i := sort.Search(len(s.regs), func(i int) bool {
		r := s.regs[i]
		return r.desc.Dev > d.Dev || (r.desc.Dev == d.Dev && r.start > d.Addr)
	})
	if i == 0 {
		return nil
	}
	if r := s.regs[i-1]; r.covers(d) {
		return r
	}
	if r := s.regs[s.furthest[i-1]]; r.covers(d) {
		return r
	}
	return nil
}

// exact gives the registrations made with exactly d. One piece may be
// registered several times, by users who do not know of each other.
func (s *section) exact(t MemType, d Desc) []*registration {
	probe := newRegistration(t, d, nil)
	i, _ := slices.BinarySearchFunc(s.regs, probe, compareRegistrations)
	j := i
	for j < len(s.regs) && compareRegistrations(s.regs[j], probe) == 0 {
		j++
	}
	var found []*registration
	for _, r := range s.regs[i:j] {
		if r.desc == d {
			found = append(found, r)
		}
	}
	return found
}

func (s *section) insert(regs []*registration) {
	from := 0
	if len(regs) == 1 {
		// Adding one by one, mostly at growing addresses, stays cheap.
		from, _ = slices.BinarySearchFunc(s.regs, regs[0], compareRegistrations)
		s.regs = slices.Insert(s.regs, from, regs[0])
	} else {
		s.regs = append(s.regs, regs...)
		slices.SortFunc(s.regs, compareRegistrations)
	}
	for _, r := range regs {
		s.bytes += r.desc.Len
	}
	s.index(from)
}

func (s *section) remove(gone map[*registration]bool) {
	s.regs = slices.DeleteFunc(s.regs, func(r *registration) bool {
		if gone[r] {
			s.bytes -= r.desc.Len
		}
		return gone[r]
	})
	s.index(0)
}

// index recomputes furthest for regs[from:].
func (s *section) index(from int) {
	s.furthest = slices.Grow(s.furthest[:from], len(s.regs)-from)[:len(s.regs)]
	for i := from; i < len(s.regs); i++ {
		s.furthest[i] = int32(i)
		if i == 0 || s.regs[i-1].desc.Dev != s.regs[i].desc.Dev {
			continue
		}
		if before := s.furthest[i-1]; s.regs[before].end > s.regs[i].end {
			s.furthest[i] = before
		}
	}
}

// pins keeps registrations from being deregistered or unloaded. Runs of descriptors in the
// same registration count once, so that a list of thousands costs little.
type pins struct {
	regs []*registration
	few  [2]*registration // backs regs in the common case
}

func (p *pins) add(r *registration) {
	if n := len(p.regs); n > 0 && p.regs[n-1] == r {
		return
	}
	if p.regs == nil {
		p.regs = p.few[:0]
	}
	r.refs.Add(1)
	p.regs = append(p.regs, r)
}

func (p *pins) drop() {
	for _, r := range p.regs {
		r.unpin()
	}
	p.few = [2]*registration{}
	p.regs = nil
}
