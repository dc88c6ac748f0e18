package policytest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// modelCheck drives the policy with random requests, pins, evictions and
// deletions, and lets the store check every answer.
func modelCheck(t *testing.T, p policy.Policy) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { model(t, newStore(p), rand.New(rand.NewPCG(seed, 1))) })
	}
}

// sameFingerprints does the same while many blocks have the same fingerprint.
func sameFingerprints(t *testing.T, p policy.Policy) {
	for seed := range uint64(20) {
		s := newStore(p)
		s.print = func(id uint64) uint64 { return id % (seed + 1) }
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { model(t, s, rand.New(rand.NewPCG(seed, 5))) })
	}
}

func model(t *testing.T, s *store, rng *rand.Rand) {
	paths := newPaths(rng)
	pinned := make(map[block.Handle]bool)
	ok := func(h block.Handle) bool { return !pinned[h] }
	for range 400 {
		switch k := rng.IntN(20); {
		case k < 10:
			s.request(t, paths.next())
		case k < 13:
			for _, h := range s.sorted() {
				pinned[h] = rng.IntN(5) == 0
			}
		case k < 14:
			clear(pinned)
		case k < 15:
			if all := s.sorted(); len(all) > 0 {
				s.remove(all[rng.IntN(len(all))], block.Deleted)
			}
		case k < 16:
			s.victims(t, int64(rng.IntN(2*s.blocks+2)), ok)
		case s.blocks > 60:
			s.evict(t, int64(1+rng.IntN(40)), ok)
		default:
			s.evict(t, int64(1+rng.IntN(5)), ok)
		}
	}
	for s.evict(t, 7, free) > 0 {
	}
	if s.blocks != 0 {
		t.Fatalf("%d blocks are left and none is a victim", s.blocks)
	}
}

// sorted lists the resident blocks in an order that does not change from run to run.
func (s *store) sorted() []block.Handle {
	var all []block.Handle
	for h, e := range s.entries {
		if e.resident {
			all = append(all, h)
		}
	}
	slices.Sort(all)
	return all
}

// paths makes the prompts of conversations that grow, branch and come back.
type paths struct {
	rng    *rand.Rand
	recent [][]uint64
	fresh  uint64
}

func newPaths(rng *rand.Rand) *paths { return &paths{rng: rng} }

func (g *paths) next() []uint64 {
	var path []uint64
	if len(g.recent) > 0 && g.rng.IntN(4) > 0 {
		old := g.recent[g.rng.IntN(len(g.recent))]
		path = slices.Clone(old[:1+g.rng.IntN(len(old))])
	}
	for n := g.rng.IntN(6); n > 0 || len(path) == 0; n-- {
		g.fresh++
		path = append(path, g.fresh)
	}
	g.recent = append(g.recent, path)
	if len(g.recent) > 40 {
		g.recent = g.recent[1:]
	}
	return path
}

// noAllocation runs what a tier in its steady state does.
func noAllocation(t *testing.T, p policy.Policy) {
	const blocks = 4096
	for h := block.Handle(1); h <= blocks; h++ {
		p.Insert(h, policy.Block{Hash: uint64(h), Parent: parentOf(h), Bytes: 1})
		p.Leaf(parentOf(h), false)
	}
	var (
		dst  = make([]block.Handle, 0, blocks)
		away = make([]block.Handle, 0, blocks) // removed by the step before
		path = make([]uint64, 64)
		rng  = rand.New(rand.NewPCG(1, 1))
		ok   = func(h block.Handle) bool { return h%10 != 0 }
		kids [blocks + 1]int

		fresh uint64 = blocks
	)
	for h := block.Handle(1); h <= blocks; h++ {
		kids[parentOf(h)]++
	}
	step := func() {
		for i := range path {
			path[i] = rng.Uint64N(blocks)
		}
		p.Request(path, 3, 1)
		for range 64 {
			p.Hit(block.Handle(1 + rng.IntN(blocks)))
		}
		dst = p.Victims(dst[:0], 32, ok)
		for _, h := range dst {
			p.Remove(h, block.Evicted)
			if kids[parentOf(h)]--; kids[parentOf(h)] == 0 {
				p.Leaf(parentOf(h), true)
			}
		}
		for _, h := range slices.Backward(away) {
			hash := uint64(h)
			if h%2 == 0 { // a block that was never there
				fresh++
				hash = fresh
			}
			p.Insert(h, policy.Block{Hash: hash, Parent: parentOf(h), Bytes: 1})
			p.Leaf(h, kids[h] == 0)
			if kids[parentOf(h)]++; kids[parentOf(h)] == 1 {
				p.Leaf(parentOf(h), false)
			}
		}
		dst, away = away, dst
	}
	many := func() { // so that what allocates now and then shows in the whole average
		for range 100 {
			step()
		}
	}
	for range 10 { // until there are as many ghosts as there may be
		many()
	}
	if n := testing.AllocsPerRun(10, many); n != 0 {
		t.Errorf("%v allocations in 100 steps of 64 hits, 32 evictions and 32 insertions, want none", n)
	}
}

// parentOf makes a tree of chains of length four.
func parentOf(h block.Handle) block.Handle {
	if h%4 == 1 {
		return 0
	}
	return h - 1
}

// pinnedTail pins the best victims. They may be met once, not by every call.
func pinnedTail(t *testing.T, p policy.Policy) {
	const blocks, held = 20000, 2000
	for h := block.Handle(1); h <= blocks; h++ {
		p.Insert(h, policy.Block{Hash: uint64(h), Bytes: 1})
	}
	pins := make([]bool, blocks+1)
	for _, h := range p.Victims(nil, held, free) {
		pins[h] = true
	}
	asked := 0
	ok := func(h block.Handle) bool { asked++; return !pins[h] }
	var dst []block.Handle
	const calls = blocks - held
	for i := range calls {
		dst = p.Victims(dst[:0], 1, ok)
		if len(dst) != 1 {
			t.Fatalf("call %d: Victims = %v, want one", i, dst)
		}
		p.Remove(dst[0], block.Evicted)
	}
	if most := held + 32*calls; asked > most {
		t.Errorf("asked %d times whether a block is pinned to find %d victims behind %d pinned blocks, want at most %d", asked, calls, held, most)
	}
}

// pinnedTenth holds the work of one call down while a tenth of the blocks, not
// always the same, is pinned. Work is counted, since time is noisy.
func pinnedTenth(t *testing.T, p policy.Policy) {
	const blocks, calls, need = 20000, 5000, 4
	rng := rand.New(rand.NewPCG(3, 3))
	for h := block.Handle(1); h <= blocks; h++ {
		p.Insert(h, policy.Block{Hash: uint64(h), Bytes: 1})
	}
	pins := make([]bool, blocks+1)
	var held []block.Handle
	for len(held) < blocks/10 {
		if h := block.Handle(1 + rng.IntN(blocks)); !pins[h] {
			pins[h] = true
			held = append(held, h)
		}
	}
	asked := 0
	ok := func(h block.Handle) bool { asked++; return !pins[h] }
	work := make([]int, 0, calls)
	var dst []block.Handle
	for range calls {
		asked = 0
		dst = p.Victims(dst[:0], need, ok)
		work = append(work, asked)
		if len(dst) != need {
			t.Fatalf("%d victims, want %d", len(dst), need)
		}
		for _, h := range dst {
			p.Remove(h, block.Evicted)
			p.Insert(h, policy.Block{Hash: rng.Uint64(), Bytes: 1})
		}
		i, h := rng.IntN(len(held)), block.Handle(1+rng.IntN(blocks))
		if !pins[h] {
			pins[held[i]], pins[h] = false, true
			held[i] = h
		}
	}
	slices.Sort(work)
	if p99 := work[calls*99/100]; p99 > 16*need {
		t.Errorf("p99 of one call for %d victims is %d questions whether a block is pinned, want at most %d", need, p99, 16*need)
	}
}
