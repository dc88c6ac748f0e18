// Package policytest checks that a policy keeps the contract of policy.Policy.
// Each policy's own test runs the suite.
package policytest

import (
	"slices"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// Run runs the suite on policies that make returns, each of them empty and used
// by one subtest alone.
func Run(t *testing.T, make func() policy.Policy) {
	t.Helper()
	for _, c := range []struct {
		name string
		run  func(*testing.T, policy.Policy)
	}{
		{"Empty", empty},
		{"UnknownHandles", unknownHandles},
		{"InsertTwiceIsHit", insertTwice},
		{"ChildrenBeforeParents", childrenBeforeParents},
		{"ParentAfterLastChild", parentAfterLastChild},
		{"ParentInsertedAfterChild", parentAfterChild},
		{"LeafIsTold", leafIsTold},
		{"NeedInBytes", needInBytes},
		{"AppendsToDst", appendsToDst},
		{"NothingChangesUntilRemove", nothingChanges},
		{"PinnedAreRespected", pinned},
		{"UnpinnedComeBack", unpinned},
		{"ForeignVictims", foreignVictims},
		{"HandlesAreReused", handlesReused},
		{"Model", modelCheck},
		{"SameFingerprints", sameFingerprints},
		{"NoAllocation", noAllocation},
		{"PinnedTail", pinnedTail},
		{"PinnedTenth", pinnedTenth},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, make()) })
	}
}

func free(block.Handle) bool { return true }

func empty(t *testing.T, p policy.Policy) {
	if p.Name() == "" {
		t.Error("Name is empty")
	}
	if p.Len() != 0 {
		t.Errorf("Len of an empty policy = %d", p.Len())
	}
	if v := p.Victims(nil, 1, free); len(v) != 0 {
		t.Errorf("Victims of an empty policy = %v", v)
	}
	p.Request(nil, 0, 0)
	p.Request([]uint64{1, 2, 3}, 0, 255)
}

func unknownHandles(t *testing.T, p policy.Policy) {
	unknown := []block.Handle{0, 1, 7, 1 << 20}
	touch := func() {
		for _, h := range unknown {
			p.Hit(h)
			p.Leaf(h, true)
			p.Leaf(h, false)
			p.Remove(h, block.Deleted)
		}
	}
	touch()
	p.Insert(0, policy.Block{Bytes: 1}) // zero is no block
	if p.Len() != 0 {
		t.Fatalf("Len = %d after unknown handles", p.Len())
	}
	p.Insert(5, policy.Block{Hash: 5, Bytes: 1})
	touch()
	if p.Len() != 1 {
		t.Fatalf("Len = %d after one Insert and unknown handles", p.Len())
	}
	if v := p.Victims(nil, 10, free); !slices.Equal(v, []block.Handle{5}) {
		t.Errorf("Victims = %v, want the one block", v)
	}
}

func insertTwice(t *testing.T, p policy.Policy) {
	for range 3 {
		p.Insert(1, policy.Block{Hash: 1, Bytes: 1})
		p.Insert(2, policy.Block{Hash: 2, Bytes: 1})
	}
	if p.Len() != 2 {
		t.Errorf("Len = %d, want 2", p.Len())
	}
	v := p.Victims(nil, 10, free)
	slices.Sort(v)
	if !slices.Equal(v, []block.Handle{1, 2}) {
		t.Errorf("Victims = %v, want each block once", v)
	}
	p.Remove(1, block.Evicted)
	p.Remove(1, block.Evicted)
	if p.Len() != 1 {
		t.Errorf("Len = %d after one block was removed twice, want 1", p.Len())
	}
}

func childrenBeforeParents(t *testing.T, p policy.Policy) {
	s := newStore(p)
	for b := range 8 { // eight branches of length five under one root
		s.request(t, []uint64{0, uint64(10*b + 1), uint64(10*b + 2), uint64(10*b + 3), uint64(10*b + 4)})
	}
	for s.blocks > 0 {
		if s.evict(t, 3, free) == 0 {
			t.Fatalf("%d blocks are left and none is a victim", s.blocks)
		}
	}
}

func parentAfterLastChild(t *testing.T, p policy.Policy) {
	s := newStore(p)
	s.request(t, []uint64{1, 2, 3, 4})
	s.request(t, []uint64{1, 2, 5})
	v := s.victims(t, 100, free)
	if len(v) != 5 {
		t.Errorf("%d victims for the need of more than there is, want all 5", len(v))
	}
}

func parentAfterChild(t *testing.T, p policy.Policy) {
	// Leaf to root: a child names a parent that is told only later.
	p.Insert(3, policy.Block{Hash: 3, Parent: 2, Bytes: 1})
	p.Insert(2, policy.Block{Hash: 2, Parent: 1, Bytes: 1})
	p.Leaf(2, false)
	p.Insert(1, policy.Block{Hash: 1, Bytes: 1})
	p.Leaf(1, false)
	if v := p.Victims(nil, 1, free); !slices.Equal(v, []block.Handle{3}) {
		t.Fatalf("Victims = %v, want the leaf", v)
	}
	if v := p.Victims(nil, 3, free); !slices.Equal(v, []block.Handle{3, 2, 1}) {
		t.Fatalf("Victims = %v, want the path from its leaf", v)
	}
}

func leafIsTold(t *testing.T, p policy.Policy) {
	// The store may know of a child that named no parent.
	p.Insert(1, policy.Block{Hash: 1, Bytes: 1})
	p.Insert(2, policy.Block{Hash: 2, Bytes: 1})
	p.Leaf(1, false)
	if v := p.Victims(nil, 2, free); !slices.Equal(v, []block.Handle{2}) {
		t.Errorf("Victims = %v, want only the leaf 2", v)
	}
	p.Hit(1)
	if v := p.Victims(nil, 2, free); !slices.Equal(v, []block.Handle{2}) {
		t.Errorf("Victims after a hit = %v, want only the leaf 2", v)
	}
	p.Leaf(1, true)
	p.Leaf(1, true)
	v := p.Victims(nil, 2, free)
	slices.Sort(v)
	if !slices.Equal(v, []block.Handle{1, 2}) {
		t.Errorf("Victims = %v, want both", v)
	}
	p.Leaf(1, false)
	p.Remove(1, block.Deleted)
	p.Insert(1, policy.Block{Hash: 3, Bytes: 1})
	if v := p.Victims(nil, 2, free); len(v) != 2 {
		t.Errorf("Victims = %v, want both: an inserted block is a leaf", v)
	}
}

func needInBytes(t *testing.T, p policy.Policy) {
	sizes := []uint32{0, 100, 1, 4096, 50, 7, 8 << 20}
	for h := 1; h < len(sizes); h++ {
		p.Insert(block.Handle(h), policy.Block{Hash: uint64(h), Bytes: sizes[h]})
	}
	for _, need := range []int64{-1, 0} {
		if v := p.Victims(nil, need, free); len(v) != 0 {
			t.Errorf("Victims for need %d = %v", need, v)
		}
	}
	for _, need := range []int64{1, 2, 101, 5000, 8 << 20, 1 << 40} {
		var got, last int64
		v := p.Victims(nil, need, free)
		for _, h := range v {
			last = int64(sizes[h])
			got += last
		}
		switch {
		case got < need && len(v) != len(sizes)-1:
			t.Errorf("need %d: %d blocks of %d bytes, though there are more", need, len(v), got)
		case got-last >= need:
			t.Errorf("need %d: %d blocks of %d bytes, one more than needed", need, len(v), got)
		}
	}
}

func appendsToDst(t *testing.T, p policy.Policy) {
	p.Insert(1, policy.Block{Hash: 1, Bytes: 1})
	v := p.Victims([]block.Handle{9, 1}, 1, free)
	if !slices.Equal(v, []block.Handle{9, 1, 1}) {
		t.Errorf("Victims = %v, want dst and the block behind it", v)
	}
}

func nothingChanges(t *testing.T, p policy.Policy) {
	s := newStore(p)
	for b := range 20 {
		s.request(t, []uint64{0, uint64(b%4 + 1), uint64(b + 100), uint64(b + 200)})
	}
	odd := func(h block.Handle) bool { return h%2 == 1 }
	for _, ok := range []func(block.Handle) bool{free, odd, free} {
		for need := int64(1); need < 60; need += 7 {
			a := slices.Clone(s.victims(t, need, ok))
			b := s.victims(t, need, ok)
			if !slices.Equal(a, b) {
				t.Fatalf("need %d: Victims = %v, and then %v", need, a, b)
			}
			if p.Len() != s.blocks {
				t.Fatalf("Len = %d after Victims, want %d", p.Len(), s.blocks)
			}
		}
	}
}

func pinned(t *testing.T, p policy.Policy) {
	s := newStore(p)
	s.request(t, []uint64{1, 2, 3})
	s.request(t, []uint64{1, 4})
	pin := s.handles[2]
	ok := func(h block.Handle) bool { return h != pin }
	for s.evict(t, 1, ok) > 0 { // s.evict fails on a pinned victim
	}
	if s.blocks != 2 {
		t.Errorf("%d blocks are left, want the pinned one and its parent", s.blocks)
	}
	if v := p.Victims(nil, 1, func(block.Handle) bool { return false }); len(v) != 0 {
		t.Errorf("Victims = %v while all is pinned", v)
	}
}

func unpinned(t *testing.T, p policy.Policy) {
	s := newStore(p)
	for i := range uint64(1000) {
		s.request(t, []uint64{i / 10, 10000 + i})
	}
	third := func(h block.Handle) bool { return h%3 != 0 }
	for s.evict(t, 20, third) > 0 {
	}
	// Few pins end, and nothing but these blocks may leave.
	few := func(h block.Handle) bool { return h%3 != 0 || h%60 == 0 }
	for s.evict(t, 1, few) > 0 {
	}
	for s.evict(t, 20, free) > 0 {
	}
	if s.blocks != 0 || p.Len() != 0 {
		t.Errorf("%d blocks never left after their pins had ended", s.blocks)
	}
}

func foreignVictims(t *testing.T, p policy.Policy) {
	s := newStore(p)
	for b := range uint64(10) {
		s.request(t, []uint64{0, b + 1, b + 101, b + 201})
	}
	proposed := s.victims(t, 5, free)
	if len(proposed) != 5 {
		t.Fatalf("%d victims, want 5", len(proposed))
	}
	for i, why := range []block.Reason{block.Expired, block.Deleted, block.Moved, block.Damaged, block.Discarded} {
		s.remove(s.handles[uint64(i)+201], why)
	}
	s.victims(t, 3, free)
	for s.evict(t, 4, free) > 0 {
	}
	if s.blocks != 0 {
		t.Errorf("%d blocks are left", s.blocks)
	}

	// A deleted block may be a parent: its children stay and leave later.
	s.request(t, []uint64{1, 2, 3})
	s.remove(s.handles[2], block.Deleted)
	for s.evict(t, 1, free) > 0 {
	}
	if s.blocks != 0 {
		t.Errorf("%d blocks are left after a parent was deleted", s.blocks)
	}
}

func handlesReused(t *testing.T, p policy.Policy) {
	for round := range uint64(50) {
		for h := block.Handle(1); h <= 10; h++ {
			p.Insert(h, policy.Block{Hash: round*100 + uint64(h), Bytes: 1})
		}
		for h := block.Handle(1); h <= 5; h++ {
			p.Hit(h)
		}
		if v := p.Victims(nil, 100, free); len(v) != 10 {
			t.Fatalf("round %d: %d victims, want 10", round, len(v))
		}
		for h := block.Handle(1); h <= 10; h++ {
			p.Remove(h, block.Evicted)
		}
		if p.Len() != 0 {
			t.Fatalf("round %d: Len = %d, want 0", round, p.Len())
		}
	}
}
