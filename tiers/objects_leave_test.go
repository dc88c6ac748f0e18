package tiers_test

import (
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestLeaveForObjects: a block that was acknowledged as durable goes into an object before it
// leaves G3, also while G2 has it: what is in memory does not outlive a crash.
func TestLeaveForObjects(t *testing.T) {
	t.Parallel()
	const size = 70_000
	b := newFakeBucket()
	o := farOptions(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	mustPut(t, s, ns, 1, size, block.PutOptions{Durable: block.G3})
	if got := tiersOf(t, s, ns, 1); got != "g2g3" {
		t.Fatalf("block 1 is in %s", got)
	}
	eventually(t, "the block has left g3", func() bool {
		tiers.Evict(s, block.G3, tiers.HandleOf(s, keyOf(ns, 1)))
		got := tiersOf(t, s, ns, 1)
		return got != "g2g3" && got != "g2g3g4"
	})
	if got := tiersOf(t, s, ns, 1); got != "g2g4" {
		t.Errorf("block 1 is in %s", got)
	}
	tiers.CloseUnclean(t, s)
	s = openStore(t, o)
	wantHit(t, s, ns, 1, size)
}
