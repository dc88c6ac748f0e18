package tiers_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestRejectedGoesToObjects: what the write budget of NVMe turns away goes past it into G4.
func TestRejectedGoesToObjects(t *testing.T) {
	t.Parallel()
	o := farOptions(t, newFakeBucket())
	o.Slabs, o.WriteBudgets = slabIn(t, 64<<20), budget(leastBudget)
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	overdraw(t, s, ns)
	mustPut(t, s, ns, 1, 1<<20, block.PutOptions{})
	if n := tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1))); n < 1<<20 {
		t.Fatalf("%d bytes came free", n)
	}
	if a := admissionOf(t, s); a.Rejected["over_budget"] != 1 {
		t.Errorf("%+v", a)
	}
	if got := tiersOf(t, s, ns, 1); got != "g4" {
		t.Errorf("the block is in %q", got)
	}
	wantHit(t, s, ns, 1, 1<<20)
	if st := s.Stats(); st.Removed["rejected"] != 0 {
		t.Errorf("removed %v", st.Removed)
	}
}

// TestPlanOfObjects: a plan knows how fast G4 is, and a get by a plan reaches it.
func TestPlanOfObjects(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	s := openStore(t, farOptions(t, b))
	const n, size = 6, 1 << 20
	ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: "a", MaxBlockBytes: size, TokensPerBlock: 256}, 0)
	if err != nil {
		t.Fatal(err)
	}
	is := chain(t, s, ns, n, size)
	sendDown(t, s, ns, is...)
	var want []block.Wanted
	for _, i := range is {
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	for _, c := range []struct {
		token  time.Duration
		hits   int
		reason block.MissReason
	}{
		{time.Nanosecond, 0, block.MissRecompute},
		{time.Minute, n, block.Hit},
	} {
		asked, hits := b.asked("get"), 0
		err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{NoPromote: true, Plan: &block.PlanOptions{Prefill: block.Prefill{Token: c.token}}}, func(i int, p block.Payload) error {
			if p.Reason != c.reason {
				t.Errorf("at %v a token block %d is %v", c.token, i, p.Reason)
			}
			if p.Reason == block.Hit {
				hits++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if hits != c.hits || (b.asked("get") > asked) != (c.hits > 0) {
			t.Errorf("at %v a token %d hits, and %d requests", c.token, hits, b.asked("get")-asked)
		}
	}
}

// TestObjectShared: blocks that are read where they are, and lie one behind the other in an
// object, are read together, and one that is damaged is no reason to miss the others.
func TestObjectShared(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	s := openStore(t, farOptions(t, b))
	ns := space(t, s, "a", 1<<20)
	const n, size = 24, 700_000
	is := chain(t, s, ns, n, size)
	sendDown(t, s, ns, is...)
	var want []block.Wanted
	for _, i := range is {
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	read := func() (missed []int, requests int) {
		t.Helper()
		before := b.asked("get")
		err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{NoPromote: true}, func(i int, p block.Payload) error {
			switch {
			case p.Reason != block.Hit:
				missed = append(missed, i)
			case p.Tier != block.G4 || !bytes.Equal(p.Bytes, payload(i, size)):
				t.Errorf("block %d: from %v, right bytes: %v", i, p.Tier, bytes.Equal(p.Bytes, payload(i, size)))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return missed, b.asked("get") - before
	}
	// sendDown has made an object of each block but for those that left by themselves.
	if missed, _ := read(); len(missed) > 0 {
		t.Fatalf("missed %v", missed)
	}
	// By themselves they leave together.
	mustDelete(t, s, ns, n, is...)
	eventually(t, "all objects are removed", func() bool { return b.count("blocks/") == 0 })
	chain(t, s, ns, n, size)
	tiers.EvictAll(s, block.G2, keysOf(ns, is))
	tiers.EvictAll(s, block.G3, keysOf(ns, is))
	for _, i := range is {
		if got := tiersOf(t, s, ns, i); got != "g4" {
			t.Fatalf("block %d is in %q", i, got)
		}
	}
	if missed, requests := read(); len(missed) > 0 || requests > n/3 {
		t.Errorf("missed %v, %d requests for %d blocks", missed, requests, n)
	}
	b.damage(func(o []byte) { o[500]++ }) // of the first block of each object
	objects := b.count("blocks/")
	if missed, _ := read(); len(missed) != objects {
		t.Errorf("missed %v, of %d objects the first block is damaged", missed, objects)
	}
	eventually(t, "all staging buffers have come back", func() bool { return tiers.StagingFree(s) == tiers.StagingSlots })
}

func keysOf(ns block.Namespace, is []int) (keys []block.Key) {
	for _, i := range is {
		keys = append(keys, keyOf(ns, i))
	}
	return keys
}
