package tiers_test

import (
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestPrefetchUse: what a prefetch has brought up is useful when it is read once or more,
// and wasted when it leaves before.
func TestPrefetchUse(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20)})
	ns := space(t, s, "a", 1<<20)
	for i := range 4 {
		mustPut(t, s, ns, i, 4<<10, block.PutOptions{Durable: block.G3})
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		if got := tiersOf(t, s, ns, i); got != "g3" {
			t.Fatalf("block %d is in %q", i, got)
		}
	}
	want := func(useful, wasted int64) {
		t.Helper()
		if p := s.Stats().Prefetch; p.Useful != useful || p.Wasted != wasted {
			t.Errorf("%+v, want %d useful and %d wasted", p, useful, wasted)
		}
	}
	wantHit(t, s, ns, 3, 4<<10) // comes up by itself
	err := s.Prefetch(t.Context(), ns.ID, hashLen, pack(hashOf(0), hashOf(1), hashOf(2), hashOf(3)), block.PrefetchOptions{}, func(p block.Progress) error {
		if p.Reason != block.Hit {
			t.Errorf("block %d: %v", p.Index, p.Reason)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want(0, 0)
	wantHit(t, s, ns, 0, 4<<10)
	wantHit(t, s, ns, 0, 4<<10)
	wantHit(t, s, ns, 3, 4<<10)
	want(1, 0)
	for i := range 4 {
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
	}
	want(1, 2)
	wantHit(t, s, ns, 1, 4<<10)
	want(1, 2)
}
