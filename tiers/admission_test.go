package tiers_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// With the least budget the bucket holds half a largest block at first and grows by one
// in an hour, so what happens does not depend on how fast the machine is.
const leastBudget = tiers.MinWriteBudget

// budget is one of G3 for all.
func budget(bytes int64) []block.WriteBudget {
	return []block.WriteBudget{{Tier: block.G3, Bytes: bytes}}
}

// available is what may be written to G3 now.
func available(t testing.TB, s *tiers.Store) int64 {
	return admissionOf(t, s).Budgets[0].AvailableBytes
}

// admissionOf is what the store says of its admission.
func admissionOf(t testing.TB, s *tiers.Store) *block.AdmissionStats {
	t.Helper()
	a := s.Stats().Tiers[1].Admission
	if a == nil {
		t.Fatal("the store has no admission")
	}
	return a
}

// overdraw takes what is in the bucket, and more than comes in while the test runs.
func overdraw(t testing.TB, s *tiers.Store, ns block.Namespace) {
	t.Helper()
	for i := 900; i < 908; i++ {
		mustPut(t, s, ns, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	if n := available(t, s); n > -(3 << 20) {
		t.Fatalf("%d bytes are available after durable puts of 8 MiB", n)
	}
}

// TestRejected: what the budget is not enough for is dropped with its reason, and told.
func TestRejected(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(leastBudget)})
	ns := space(t, s, "a", 1<<20)
	overdraw(t, s, ns)
	mustPut(t, s, ns, 1, 1<<20, block.PutOptions{})

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := make(chan block.Event, 16)
	ready := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- s.Watch(ctx, block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}, func(ev block.Event) error {
			told <- ev
			return nil
		})
	}()
	<-ready
	if n := tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1))); n < 1<<20 {
		t.Fatalf("%d bytes came free", n)
	}
	ev := <-told
	if ev.Kind != block.EventRemoved || ev.Reason != block.Rejected || !ev.Last || ev.Tier != block.G2 || ev.Hash != hashOf(1) {
		t.Errorf("told %+v", ev)
	}
	cancel()
	<-ended
	wantMiss(t, s, ns, 1, block.MissAbsent)
	st := s.Stats()
	if a := admissionOf(t, s); a.Rejected["over_budget"] != 1 || a.Admitted != 0 || a.Budgets[0].WriteBudget != budget(leastBudget)[0] {
		t.Errorf("admission: %+v", a)
	}
	if st.Removed["rejected"] != 1 || st.Removed["evicted"] != 0 || st.ByNamespace[0].Misses["rejected"] != 1 || st.Tiers[0].Dropped != 1 {
		t.Errorf("stats: %+v", st)
	}
}

// TestAdmissionKeeps: what is promised to be on NVMe, pinned, or needed by children there
// is written whatever the budget is.
func TestAdmissionKeeps(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(leastBudget)})
	ns := space(t, s, "a", 1<<20)
	overdraw(t, s, ns)
	mustPut(t, s, ns, 1, 1<<20, block.PutOptions{})
	mustPut(t, s, ns, 2, 1<<20, block.PutOptions{Parent: hashOf(1), HasParent: true, Durable: block.G3})
	mustPut(t, s, ns, 3, 1<<20, block.PutOptions{})
	if errs, err := s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(3))); err != nil || errs[0] != nil {
		t.Fatal(errs, err)
	}
	for _, i := range []int{2, 1, 3, 900} {
		if n := tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i))); n < 1<<20 {
			t.Errorf("block %d: %d bytes came free", i, n)
		}
		if got := tiersOf(t, s, ns, i); got != "g3" {
			t.Errorf("block %d is in %q", i, got)
		}
		wantHit(t, s, ns, i, 1<<20)
	}
	if a := admissionOf(t, s); a.Admitted != 1 || a.Budgets[0].AvailableBytes > -(5<<20) {
		t.Errorf("the parent alone is asked for, and all pay: %+v", a)
	}
}

// TestAdmissionGrace: a block that is too young to be lost stays when it is turned away,
// and being offered twice does not make it one that was used twice.
func TestAdmissionGrace(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(leastBudget), Grace: time.Hour})
	ns := space(t, s, "a", 1<<20)
	overdraw(t, s, ns)
	mustPut(t, s, ns, 1, 1<<20, block.PutOptions{})
	for range 3 {
		if n := tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1))); n != 0 {
			t.Fatalf("%d bytes came free", n)
		}
	}
	wantHit(t, s, ns, 1, 1<<20)
	if a := admissionOf(t, s); a.Rejected["over_budget"] != 0 {
		t.Errorf("counted although it stayed: %+v", a)
	}
}

// TestAdmissionTail: the partial last block of a prompt is not written, a full one is.
func TestAdmissionTail(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(1 << 50)})
	ns := space(t, s, "a", 1<<20)
	under := func(i int) block.PutOptions { return block.PutOptions{Parent: hashOf(i), HasParent: true} }
	mustPut(t, s, ns, 1, 512<<10, block.PutOptions{})
	mustPut(t, s, ns, 2, 512<<10, under(1))
	mustPut(t, s, ns, 3, 100<<10, under(2)) // shorter, and the last
	for _, c := range []struct {
		i    int
		want string
	}{{3, ""}, {2, "g3"}, {1, "g3"}} {
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, c.i)))
		if got := tiersOf(t, s, ns, c.i); got != c.want {
			t.Errorf("block %d is in %q, want %q", c.i, got, c.want)
		}
	}
	if a := admissionOf(t, s); a.Rejected["tail"] != 1 || a.Admitted != 2 {
		t.Errorf("admission: %+v", a)
	}
}

// TestAdmissionUsed: while little is left of the budget, a block goes down that was read
// since it came, and one that comes back.
func TestAdmissionUsed(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(leastBudget)})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 900, 1<<20, block.PutOptions{Durable: block.G3}) // from now on the bucket is less than half full
	for i := 1; i <= 3; i++ {
		mustPut(t, s, ns, i, 4<<10, block.PutOptions{})
	}
	wantHit(t, s, ns, 2, 4<<10)
	eventually(t, "the evictor knows of the read", func() bool { return tiers.Used(s, keyOf(ns, 2)) })
	evict := func(i int, want string) {
		t.Helper()
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		if got := tiersOf(t, s, ns, i); got != want {
			t.Errorf("block %d is in %q, want %q", i, got, want)
		}
	}
	evict(1, "")
	evict(2, "g3")
	mustPut(t, s, ns, 1, 4<<10, block.PutOptions{})
	evict(1, "g3")
	evict(3, "")
	if a := admissionOf(t, s); a.Rejected["used_once"] != 2 || a.Admitted != 2 {
		t.Errorf("admission: %+v", a)
	}
}

// TestBudgetIsKept: however much is put, no more is written than the budget says.
func TestBudgetIsKept(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(leastBudget)})
	ns := space(t, s, "a", 64<<10)
	n := 0
	for ; s.Stats().Tiers[0].Evictions < 500; n++ {
		mustPut(t, s, ns, n, 64<<10, block.PutOptions{})
	}
	st := s.Stats()
	// What was there, what came since, and one block that may overdraw it.
	most := 4<<20 + int64(st.Uptime.Seconds()*leastBudget/86400) + 68<<10
	if got := st.Tiers[1].BytesIn; got > most {
		t.Errorf("%d bytes were written in %v, at most %d may be", got, st.Uptime, most)
	}
	if st.Removed["rejected"] < 400 {
		t.Errorf("removed: %v", st.Removed)
	}
}

func TestBadWriteBudget(t *testing.T) {
	t.Parallel()
	b := func(tier block.TierID, glob string, bytes, requests int64) block.WriteBudget {
		return block.WriteBudget{Tier: tier, Namespaces: glob, Bytes: bytes, Requests: requests}
	}
	for _, c := range []struct {
		bs      []block.WriteBudget
		noSlabs bool
		slabs   []tiers.SlabSpec
		want    string
	}{
		{budget(-1), false, slabIn(t, 64<<20), "write budget of g3: -1 bytes a day, at least"},
		{budget(1), false, slabIn(t, 64<<20), "write budget of g3: 1 bytes a day, at least"},
		{budget(leastBudget), true, nil, "for a store without NVMe tier"},
		{budget(leastBudget), false, nil, "write budget of g3: there is no such tier"},
		{[]block.WriteBudget{b(block.G4, "", leastBudget, 0)}, false, slabIn(t, 64<<20), "write budget of g4: there is no such tier"},
		{[]block.WriteBudget{b(block.G2, "", leastBudget, 0)}, false, nil, "write budget of g2: there are budgets of g3 and g4"},
		{[]block.WriteBudget{b(block.G3, "a[", leastBudget, 0)}, false, slabIn(t, 64<<20), "write budget of g3/a[: syntax error in pattern"},
		{[]block.WriteBudget{b(block.G3, "", leastBudget, 100)}, false, slabIn(t, 64<<20), "write budget of g3: requests are for g4"},
		{[]block.WriteBudget{b(block.G4, "a*", leastBudget, 23)}, false, nil, "write budget of g4/a*: 23 requests a day, at least 24"},
		{append(budget(leastBudget), budget(leastBudget)...), false, slabIn(t, 64<<20), "write budget of g3: given twice"},
	} {
		s, err := tiers.Open(t.Context(), tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), DRAM: 16 << 20, Slabs: c.slabs, NoSlabs: c.noSlabs, WriteBudgets: c.bs})
		if err == nil {
			s.Close()
		}
		if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.bs, err, c.want)
		}
	}
}
