package policy_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

func BenchmarkPolicies(b *testing.B) {
	const blocks, depth = 1 << 20, 16
	fill := func(b *testing.B, name string) policy.Policy {
		p := newPolicy(b, name)
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
	for _, name := range policy.Names() {
		b.Run(name+"/hit", func(b *testing.B) {
			p := fill(b, name)
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
			b.Run(name+"/"+c.name, func(b *testing.B) {
				p := fill(b, name)
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
}
