package tiers_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers"
)

// The policies of both tiers are changed, again and again, while blocks come, are used
// and leave. Afterwards every block is still known to the last policy: each leaves
// when others need the room, and those with children too.
func TestSetPolicyUnderLoad(t *testing.T) {
	t.Parallel()
	const size = 4<<10 - 512
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20), NoSync: true})
	ns := space(t, s, "s", 1<<20)
	var next atomic.Int64
	chain := func() { // three blocks behind each other
		var o block.PutOptions
		for range 3 {
			i := int(next.Add(1))
			mustPut(t, s, ns, i, size, o)
			o.Parent, o.HasParent = hashOf(i), true
		}
	}
	for next.Load() < 6000 { // more than G2 has room for
		chain()
	}
	stop := make(chan struct{})
	var load sync.WaitGroup
	load.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				chain()
				if _, _, err := get(s, ns, 1+i*7%int(next.Load()), block.GetOptions{}); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for range 2 {
		for _, name := range policy.Names() {
			if err := s.SetPolicy(t.Context(), block.NoTier, name); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(stop)
	load.Wait()
	for _, p := range s.Policies() {
		if p.Policy != "switch" || p.Start != "lru-leaf" || p.Moving != 0 {
			t.Errorf("in the end: %+v", p)
		}
	}
	old := int(next.Load())
	if raceEnabled {
		return // the rest is no longer beside the changes
	}
	for int(next.Load()) < old+24_000 { // more than all tiers have room for, twice
		chain()
	}
	var left []int
	for i := 1; i <= old; i++ {
		if _, p, err := get(s, ns, i, block.GetOptions{Quiet: true, NoPromote: true}); err != nil || p.Reason == block.Hit {
			left = append(left, i)
		}
	}
	if len(left) > 0 {
		t.Errorf("%d of %d blocks have not left, the first is %d", len(left), old, left[0])
	}
}

// What a new policy evicts first is what the old one would have: blocks that were used
// lately stay.
func TestSetPolicyKeepsTheOrder(t *testing.T) {
	t.Parallel()
	const size, used = 4<<10 - 512, 500
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "s", 1<<20)
	tier := func() block.TierStats { return s.Stats().Tiers[0] }
	n := int(tier().High / (4 << 10))
	for i := range n {
		mustPut(t, s, ns, i, size, block.PutOptions{})
	}
	for i := range used {
		wantHit(t, s, ns, i, size)
	}
	if err := s.SetPolicy(t.Context(), block.G2, "s3-ghost"); err != nil {
		t.Fatal(err)
	}
	for i := 0; tier().Evictions < 500; i++ {
		mustPut(t, s, ns, n+i, size, block.PutOptions{})
	}
	for i := range used {
		wantHit(t, s, ns, i, size)
	}
}
