package policytest

import (
	"slices"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// store is the simplest owner of residency: it knows which blocks are in the
// tier and tells the policy of it as tiers.Store does. Blocks have one byte.
type store struct {
	p       policy.Policy
	handles map[uint64]block.Handle
	entries map[block.Handle]*entry
	blocks  int            // resident entries
	unused  []block.Handle // given back, used again latest first
	next    block.Handle   // latest handle that was made
	buf     []block.Handle
	prints  []uint64
	print   func(id uint64) uint64 // fingerprint of a block; nil: its id
}

// entry is a block that is resident, or is named as parent by one that is: its
// handle is not given to another block before both have ended.
type entry struct {
	id       uint64
	parent   block.Handle
	kids     int // resident blocks that name it as parent
	resident bool
}

func newStore(p policy.Policy) *store {
	return &store{p: p, handles: make(map[uint64]block.Handle), entries: make(map[block.Handle]*entry)}
}

func (s *store) hash(id uint64) uint64 {
	if s.print != nil {
		return s.print(id)
	}
	return id
}

// enter returns the handle and entry of a block, resident or not.
func (s *store) enter(id uint64) (block.Handle, *entry) {
	h, known := s.handles[id]
	if !known {
		if n := len(s.unused); n > 0 {
			h, s.unused = s.unused[n-1], s.unused[:n-1]
		} else {
			s.next++
			h = s.next
		}
		s.handles[id] = h
		s.entries[h] = &entry{id: id}
	}
	return h, s.entries[h]
}

// release gives a handle back when nothing needs it any more.
func (s *store) release(h block.Handle) {
	if e := s.entries[h]; !e.resident && e.kids == 0 {
		delete(s.handles, e.id)
		delete(s.entries, h)
		s.unused = append(s.unused, h)
	}
}

// request uses a path: the whole of it is resident afterwards.
func (s *store) request(t *testing.T, path []uint64) {
	t.Helper()
	hits, prefix := 0, true
	for _, id := range path {
		if _, e := s.enter(id); prefix && e.resident {
			hits++
		} else {
			prefix = false
		}
	}
	s.prints = s.prints[:0]
	for _, id := range path {
		s.prints = append(s.prints, s.hash(id))
	}
	s.p.Request(s.prints, hits, 0)
	for i, id := range slices.Backward(path) {
		h, e := s.enter(id)
		if e.resident {
			s.p.Hit(h)
			continue
		}
		e.resident = true
		e.parent = 0
		s.blocks++
		if i > 0 {
			e.parent = s.handles[path[i-1]]
		}
		s.p.Insert(h, policy.Block{Hash: s.hash(id), Parent: e.parent, Depth: uint32(16 * i), Tokens: 16, Bytes: 1})
		if e.kids > 0 {
			s.p.Leaf(h, false)
		}
		if up := s.entries[e.parent]; up != nil {
			up.kids++
			if up.kids == 1 {
				s.p.Leaf(e.parent, false)
			}
		}
	}
	s.checkLen(t)
}

// victims asks the policy and checks the answer against the contract.
func (s *store) victims(t *testing.T, need int64, ok func(block.Handle) bool) []block.Handle {
	t.Helper()
	s.buf = s.p.Victims(s.buf[:0], need, ok)
	chosen := make(map[block.Handle]bool)
	below := make(map[block.Handle]int) // chosen children
	for _, h := range s.buf {
		e := s.entries[h]
		switch {
		case e == nil || !e.resident:
			t.Fatalf("victim %d is not resident", h)
		case chosen[h]:
			t.Fatalf("victim %d is twice in one answer: %v", h, s.buf)
		case !ok(h):
			t.Fatalf("victim %d is pinned", h)
		case e.kids != below[h]:
			t.Fatalf("victim %d has %d resident children, of which %d come before it: %v", h, e.kids, below[h], s.buf)
		}
		chosen[h] = true
		below[e.parent]++
	}
	if n := int64(len(s.buf)); n > max(need, 0) {
		t.Fatalf("%d victims of one byte for a need of %d", n, need)
	} else if most := int64(s.evictable(ok)); n < need && n != most {
		t.Fatalf("%d victims for a need of %d, but %d blocks may leave", n, need, most)
	}
	return s.buf
}

// evictable counts the blocks that neither are pinned nor have a pinned
// descendant.
func (s *store) evictable(ok func(block.Handle) bool) int {
	held := make(map[block.Handle]bool)
	n := 0
	for h, e := range s.entries {
		if !e.resident || ok(h) {
			continue
		}
		for h != 0 && !held[h] {
			held[h] = true
			if !s.entries[h].resident {
				break // its parent may leave before its children do
			}
			n++
			h = s.entries[h].parent
		}
	}
	return s.blocks - n
}

// evict removes the victims that the policy chooses, and returns how many.
func (s *store) evict(t *testing.T, need int64, ok func(block.Handle) bool) int {
	t.Helper()
	v := slices.Clone(s.victims(t, need, ok))
	for _, h := range v {
		s.remove(h, block.Evicted)
	}
	s.checkLen(t)
	return len(v)
}

// remove takes a block out of the tier, whoever chose it.
func (s *store) remove(h block.Handle, why block.Reason) {
	e := s.entries[h]
	e.resident = false
	s.blocks--
	s.p.Remove(h, why)
	if up := s.entries[e.parent]; up != nil {
		up.kids--
		if up.kids == 0 {
			if up.resident {
				s.p.Leaf(e.parent, true)
			}
			s.release(e.parent)
		}
	}
	s.release(h)
}

func (s *store) checkLen(t *testing.T) {
	t.Helper()
	if s.p.Len() != s.blocks {
		t.Fatalf("Len = %d, want %d", s.p.Len(), s.blocks)
	}
}
