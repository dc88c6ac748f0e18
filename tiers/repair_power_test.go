package tiers_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// TestRepairAfterPowerLoss takes the power away behind puts and deletes that were answered,
// loses the catalog, and has it made anew from what the slab has kept: what was stored is
// there, and a header that was erased stays erased. On a slab that is never flushed the same
// has to fail, or the loss of power is none.
func TestRepairAfterPowerLoss(t *testing.T) {
	withoutRace(t)
	for _, deaf := range []bool{false, true} {
		t.Run(fmt.Sprintf("deaf=%v", deaf), func(t *testing.T) {
			t.Parallel()
			wrong := 0
			for seed := range uint64(2) {
				wrong += powerLost(t, seed, deaf)
			}
			if deaf != (wrong > 0) {
				t.Errorf("%d blocks are not what they should be", wrong)
			}
		})
	}
}

// powerLost returns how many blocks are lost or back after a repair.
func powerLost(t *testing.T, seed uint64, deaf bool) (wrong int) {
	t.Helper()
	const n = 24
	size := func(i int) int { return []int{700, 5000, 70_000}[i%3] }
	var v *xfertest.Volatile
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 32<<20), DRAM: 16 << 20}
	o.Agent = agentWith(t, func(b xfer.Backend) xfer.Backend {
		v = xfertest.NewVolatile(b)
		return v
	})
	s, err := tiers.Open(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !deaf {
		tiers.WrapFlush(s, func(_ int, path string, flush func() error) error { return v.Flush(path, flush) })
	}
	ns := space(t, s, "a", 1<<20)
	gone := map[int]bool{}
	var is []int
	for i := range n {
		mustPut(t, s, ns, i, size(i), block.PutOptions{Durable: block.G3})
		if i%4 == 1 {
			gone[i] = true
			is = append(is, i)
		}
	}
	mustDelete(t, s, ns, len(is), is...)
	if _, _, err := v.PowerLoss(rand.New(rand.NewPCG(seed, 0))); err != nil {
		t.Fatal(err)
	}
	_ = s.Close() // it has nothing to write to

	loseCatalog(t, o.Dir, "lost")
	repair(t, o, nil)
	o.Agent = newAgent(t)
	s = openStore(t, o)
	for i := range n {
		got, p, err := get(s, ns, i, block.GetOptions{Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		hit := p.Reason == block.Hit
		if hit && string(got) != string(payload(i, size(i))) {
			t.Errorf("block %d: other bytes", i)
		}
		if hit == gone[i] {
			wrong++
		}
	}
	return wrong
}
