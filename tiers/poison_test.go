//go:build invariants

package tiers_test

import (
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/tiers"
)

// TestLentMemoryIsPoisoned: whoever keeps bytes beyond the call that lent them
// finds poison there: of a staging buffer that a block of G3 was read into, and of
// a slot of G2 whose block is gone.
func TestLentMemoryIsPoisoned(t *testing.T) {
	s := openStore(t, tiers.Options{Dir: filepath.Join(t.TempDir(), "data"), Slabs: slabIn(t, 64<<20), DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	const size = 100_000
	mustPut(t, s, ns, 1, size, block.PutOptions{Durable: block.G3})
	kept := func() (mem []byte, tier block.TierID) {
		want := []block.Wanted{{Hash: hashOf(1)}}
		err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{NoPromote: true}, func(_ int, p block.Payload) error {
			if p.Reason != block.Hit || invariants.Poisoned(p.Bytes) {
				t.Fatalf("%v, poisoned %v", p.Reason, invariants.Poisoned(p.Bytes))
			}
			mem, tier = p.Bytes, p.Tier
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return mem, tier
	}
	slot, tier := kept()
	if tier != block.G2 || invariants.Poisoned(slot) {
		t.Fatalf("a block that is there: from %v, poisoned %v", tier, invariants.Poisoned(slot))
	}
	eventually(t, "the block leaves g2", func() bool {
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1)))
		return tiersOf(t, s, ns, 1) == "g3"
	})
	if !invariants.Poisoned(slot) {
		t.Error("the slot of a block that left still has its bytes")
	}
	staged, tier := kept()
	if tier != block.G3 {
		t.Fatalf("from %v", tier)
	}
	if !invariants.Poisoned(staged) {
		t.Error("a staging buffer still has the bytes of a call that is over")
	}
}
