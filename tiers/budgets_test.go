package tiers_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestBudgetSurvives: what was spent of a budget is spent after a restart, too, also of one
// that has another size now.
func TestBudgetSurvives(t *testing.T) {
	t.Parallel()
	o := tiers.Options{Dir: t.TempDir(), DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(leastBudget)}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	overdraw(t, s, ns)
	close := func() {
		t.Helper()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	reopen := func(bytes int64) {
		t.Helper()
		o.WriteBudgets = budget(bytes)
		s = openStore(t, o)
	}
	close()
	reopen(leastBudget)
	// An hour brings 8 MiB.
	if n := available(t, s); n > -(2<<20) || n < -(6<<20) {
		t.Errorf("%d bytes are available after a restart", n)
	}
	close()
	reopen(10 * leastBudget)
	if n := available(t, s); n > -(2 << 20) {
		t.Errorf("%d bytes are available after a restart with a larger budget", n)
	}
	mustPut(t, s, ns, 1, 4<<10, block.PutOptions{})
	tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1)))
	wantMiss(t, s, ns, 1, block.MissAbsent)
	close()

	// A file that cannot be read does not fill the bucket.
	file := filepath.Join(o.Dir, "write-budgets.json")
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	reopen(leastBudget)
	if n := available(t, s); n < 0 || n > 1<<20 {
		t.Errorf("%d bytes are available after the loss of what was saved", n)
	}
	close()
	if err := os.WriteFile(file, []byte(`{"version":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	o.Agent = newAgent(t)
	if s, err := tiers.Open(t.Context(), o); !errors.Is(err, index.ErrVersion) {
		if err == nil {
			s.Close()
		}
		t.Errorf("open with a file of another version: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	reopen(leastBudget)
	if n := available(t, s); n < 4<<20 || n > 5<<20 {
		t.Errorf("%d bytes are available without what was saved, want half an hour's", n)
	}
}

// TestBudgetChanges: a budget that is set while the store works is kept from then on, and
// one that is taken away bounds nothing any more.
func TestBudgetChanges(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20)})
	ns := space(t, s, "a", 1<<20)
	evict := func(i int, want string) {
		t.Helper()
		mustPut(t, s, ns, i, 4<<10, block.PutOptions{})
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		if got := tiersOf(t, s, ns, i); got != want {
			t.Errorf("block %d is in %q, want %q", i, got, want)
		}
	}
	evict(1, "g3")
	if st := s.Stats(); st.Tiers[1].Admission != nil {
		t.Errorf("admission without a budget: %+v", st.Tiers[1].Admission)
	}
	if err := s.SetWriteBudget(budget(leastBudget)[0]); err != nil {
		t.Fatal(err)
	}
	evict(2, "g3")
	overdraw(t, s, ns)
	evict(3, "")
	if err := s.SetWriteBudget(block.WriteBudget{Tier: block.G3}); err != nil {
		t.Fatal(err)
	}
	evict(4, "g3")
}

// TestBudgetOfNamespaces: a namespace has what its own budget and that of all allow.
func TestBudgetOfNamespaces(t *testing.T) {
	t.Parallel()
	o := tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), WriteBudgets: budget(1 << 50)}
	o.WriteBudgets = append(o.WriteBudgets, block.WriteBudget{Tier: block.G3, Namespaces: "small-*", Bytes: leastBudget},
		block.WriteBudget{Tier: block.G3, Namespaces: "small-2", Bytes: 1 << 50})
	s := openStore(t, o)
	one, two, other := space(t, s, "small-1", 1<<20), space(t, s, "small-2", 1<<20), space(t, s, "other", 1<<20)
	evict := func(ns block.Namespace, i int, want string) {
		t.Helper()
		mustPut(t, s, ns, i, 4<<10, block.PutOptions{})
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		if got := tiersOf(t, s, ns, i); got != want {
			t.Errorf("block %d of %s is in %q, want %q", i, ns.Desc.Name, got, want)
		}
	}
	evict(one, 1, "g3")
	for i := 900; i < 906; i++ {
		mustPut(t, s, one, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	evict(one, 2, "")
	evict(two, 3, "") // the first that matches counts
	evict(other, 4, "g3")
	if err := s.SetWriteBudget(block.WriteBudget{Tier: block.G3, Namespaces: "small-*"}); err != nil {
		t.Fatal(err)
	}
	evict(one, 5, "g3")
	if b := admissionOf(t, s).Budgets; len(b) != 2 || b[1].Namespaces != "small-2" {
		t.Errorf("budgets %+v", b)
	}
}

// TestObjectBudget: what the budget of G4 is not enough for leaves NVMe without being
// written to a bucket; what is turned away once and comes back is, and so is what a
// block that goes up needs.
func TestObjectBudget(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.WriteBudgets = []block.WriteBudget{{Tier: block.G4, Bytes: leastBudget, Requests: 24 * 4}}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	far := func() *block.AdmissionStats {
		ts := s.Stats().Tiers
		return ts[len(ts)-1].Admission
	}
	if a := far(); a == nil || a.Budgets[0].AvailableRequests != 2 {
		t.Fatalf("admission %+v", a)
	}
	evict := func(i int, want string) {
		t.Helper()
		for _, id := range []block.TierID{block.G2, block.G3} {
			tiers.Evict(s, id, tiers.HandleOf(s, keyOf(ns, i)))
		}
		if got := tiersOf(t, s, ns, i); got != want {
			t.Errorf("block %d is in %q, want %q", i, got, want)
		}
	}
	put := func(i int) {
		t.Helper()
		mustPut(t, s, ns, i, 4<<10, block.PutOptions{})
	}
	for i := 1; i <= 3; i++ {
		put(i)
	}
	evict(1, "g4") // one request of four is left: pressure
	evict(2, "")
	put(2)
	evict(2, "g4")
	evict(3, "")
	if a := far(); a.Admitted != 2 || a.Rejected["used_once"]+a.Rejected["over_budget"] != 2 || a.Budgets[0].AvailableRequests != 0 {
		t.Errorf("admission %+v", a)
	}
	if n := s.Stats().Removed["rejected"]; n != 2 {
		t.Errorf("%d blocks were removed as rejected", n)
	}
}

// TestNotWorth: with a budget, what the engines compute faster than G4 gives it back is not
// written there.
func TestNotWorth(t *testing.T) {
	t.Parallel()
	o := farOptions(t, newFakeBucket())
	o.Slabs, o.NoSlabs = nil, true
	o.WriteBudgets = []block.WriteBudget{{Tier: block.G4, Bytes: 1 << 50}}
	o.Prefill = func(name string) block.Prefill {
		if name == "fast" {
			return block.Prefill{Token: time.Nanosecond}
		}
		return block.Prefill{Token: time.Second}
	}
	s := openStore(t, o)
	for name, want := range map[string]string{"fast": "", "slow": "g4"} {
		ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: name, MaxBlockBytes: 1 << 20, TokensPerBlock: 16}, 0)
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, ns, 1, 1<<20, block.PutOptions{})
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1)))
		if got := tiersOf(t, s, ns, 1); got != want {
			t.Errorf("%s: the block is in %q, want %q", name, got, want)
		}
	}
}
