package policy_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/policytest"
)

func TestContract(t *testing.T) {
	for _, name := range policy.Names() {
		t.Run(name, func(t *testing.T) {
			policytest.Run(t, func() policy.Policy { return newPolicy(t, name) })
		})
	}
}

func newPolicy(t testing.TB, name string) policy.Policy {
	t.Helper()
	p, err := policy.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNew(t *testing.T) {
	for _, name := range policy.Names() {
		p, err := policy.New(name)
		if err != nil {
			t.Fatal(err)
		}
		if p.Name() != name {
			t.Errorf("New(%q).Name() = %q", name, p.Name())
		}
	}
	_, err := policy.New("mru")
	if !errors.Is(err, block.ErrInvalid) {
		t.Fatalf("New(mru) = %v, want ErrInvalid", err)
	}
	for _, want := range append(policy.Names(), "mru") {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %q", err, want)
		}
	}
}

// lru is leaf-first LRU by the book: it looks at all blocks for each victim.
type lru struct {
	clock  int
	blocks map[block.Handle]*lruBlock
}

type lruBlock struct {
	used   int
	parent block.Handle
}

func (l *lru) victims(need int) []block.Handle {
	var chosen []block.Handle
	for len(chosen) < need {
		kids := make(map[block.Handle]bool)
		for h, b := range l.blocks {
			if !slices.Contains(chosen, h) {
				kids[b.parent] = true
			}
		}
		var best block.Handle
		for h, b := range l.blocks {
			if !kids[h] && !slices.Contains(chosen, h) && (best == 0 || b.used < l.blocks[best].used) {
				best = h
			}
		}
		if best == 0 {
			break
		}
		chosen = append(chosen, best)
	}
	return chosen
}

// TestLRULeafOrder uses blocks without their parents and parents without their
// children, so that parents move in anywhere.
func TestLRULeafOrder(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 2))
		p := policy.NewLRULeaf()
		ref := lru{blocks: make(map[block.Handle]*lruBlock)}
		for step := range 2000 {
			h := block.Handle(1 + rng.IntN(120))
			b := ref.blocks[h]
			switch k := rng.IntN(10); {
			case b != nil && k < 7:
				ref.clock++
				b.used = ref.clock
				p.Hit(h)
			case b != nil && k < 9 && len(ref.blocks) > 60: // others chose it
				p.Remove(h, block.Deleted)
				delete(ref.blocks, h)
			case b != nil:
				want := ref.victims(1 + rng.IntN(6))
				got := p.Victims(nil, int64(len(want)), func(block.Handle) bool { return true })
				if !slices.Equal(got, want) {
					t.Fatalf("seed %d, step %d: Victims = %v, want %v", seed, step, got, want)
				}
				for _, v := range got[:rng.IntN(len(got)+1)] { // the store refuses the others
					p.Remove(v, block.Evicted)
					delete(ref.blocks, v)
				}
			default:
				ref.clock++
				parent := block.Handle(rng.IntN(int(h))) // a lower handle: no circle
				ref.blocks[h] = &lruBlock{used: ref.clock, parent: parent}
				p.Insert(h, policy.Block{Hash: uint64(h), Parent: parent, Bytes: 1})
			}
		}
	}
}

func BenchmarkLRULeaf(b *testing.B) {
	const blocks, depth = 1 << 20, 16
	fill := func() *policy.LRULeaf {
		p := policy.NewLRULeaf()
		for h := block.Handle(1); h <= blocks; h++ { // leaf to root, paths of depth blocks
			parent := h + 1
			if h%depth == 0 {
				parent = 0
			}
			p.Insert(h, policy.Block{Hash: uint64(h), Parent: parent, Bytes: 1})
		}
		return p
	}
	free := func(block.Handle) bool { return true }
	tenth := func(h block.Handle) bool { return h/depth%10 != 0 }
	b.Run("hit", func(b *testing.B) {
		p := fill()
		rng := rand.New(rand.NewPCG(1, 1))
		b.ReportAllocs()
		for b.Loop() {
			p.Hit(block.Handle(1 + rng.Uint32N(blocks)))
		}
	})
	for _, c := range []struct {
		name string
		ok   func(block.Handle) bool
	}{{"evict", free}, {"evict_tenth_pinned", tenth}} {
		b.Run(c.name, func(b *testing.B) {
			p := fill()
			dst := make([]block.Handle, 0, 64)
			rng := rand.New(rand.NewPCG(1, 1))
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				if n == len(dst) {
					for _, h := range slices.Backward(dst) { // comes back somewhere in the tree
						parent := block.Handle(1 + rng.Uint32N(blocks))
						if parent <= h {
							parent = 0
						}
						p.Insert(h, policy.Block{Hash: uint64(h), Parent: parent, Bytes: 1})
					}
					dst, n = p.Victims(dst[:0], 64, c.ok), 0
				}
				p.Remove(dst[n], block.Evicted)
				n++
			}
		})
	}
}
