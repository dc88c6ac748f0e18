package tiers_test

import (
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestCurvesOfTier: a tier says what others would have had of the matches that it was
// asked for, and not of those that a tool asks for.
func TestCurvesOfTier(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	const n = 10
	var hs []byte
	for i := range n {
		mustPut(t, s, ns, i, 4<<10, block.PutOptions{})
		hs = append(hs, pack(hashOf(i))...)
	}
	match := func(o block.MatchOptions) {
		t.Helper()
		if err := s.Match(t.Context(), ns.ID, hashLen, hs, o, new(block.MatchResult)); err != nil {
			t.Fatal(err)
		}
	}
	match(block.MatchOptions{})
	match(block.MatchOptions{Quiet: true})
	match(block.MatchOptions{})
	var curves []block.Curve
	eventually(t, "the evictor knows of both matches", func() bool {
		curves = s.Stats().Tiers[0].Curves
		return len(curves) > 0 && curves[len(curves)-1].Asked == 2*n
	})
	for _, k := range curves {
		if k.Asked != 2*n || k.Hits != n {
			t.Errorf("%q of size %v: %d of %d, want %d of %d", k.Policy, k.Size, k.Hits, k.Asked, n, 2*n)
		}
	}
}
