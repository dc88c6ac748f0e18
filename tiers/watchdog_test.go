package tiers_test

import (
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// A tier that stays above its high watermark because nothing may leave is told of, and
// so is that it does not any more.
func TestEvictionBehindIsTold(t *testing.T) {
	t.Parallel()
	const size = 64<<10 - 512
	s := openStore(t, tiers.Options{DRAM: 16 << 20, High: 0.5, Low: 0.4})
	ns := space(t, s, "s", 1<<20)
	tier := func() block.TierStats { return s.Stats().Tiers[0] }
	var leases []uint64
	for i := 0; tier().Used <= tier().High; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{})
		var r block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, pack(hashOf(i)), block.MatchOptions{Lease: time.Hour}, &r); err != nil || r.Prefix != 1 {
			t.Fatal(r, err)
		}
		leases = append(leases, r.Lease.ID)
	}
	eventually(t, "the evictor is behind", func() bool { return tier().Behind > 0 })
	if n := tier().FellBehind; n != 1 {
		t.Errorf("it fell behind %d times", n)
	}
	for _, id := range leases {
		if err := s.ReleaseLease(id); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "it keeps up again", func() bool { st := tier(); return st.Behind == 0 && st.Used <= st.High })
}
