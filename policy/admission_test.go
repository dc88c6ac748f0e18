package policy_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

func newAdmission(t testing.TB, o policy.AdmissionOptions) *policy.Admission {
	t.Helper()
	a, err := policy.NewAdmission(o)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestAdmission(t *testing.T) {
	type step struct {
		now  int64
		o    policy.Offer
		want policy.Verdict
	}
	const admitted, noRoom, tail, once, over = policy.Admitted, policy.NoRoom, policy.TailOnly, policy.UsedOnce, policy.OverBudget
	block := func(hash uint64) policy.Offer { return policy.Offer{Hash: hash, Bytes: 10} }
	used := policy.Offer{Hash: 1000, Bytes: 10, Used: true}
	for _, c := range []struct {
		name  string
		o     policy.AdmissionOptions
		steps []step
	}{
		{"no budget", policy.AdmissionOptions{Ghosts: 4}, []step{
			{0, block(1), admitted},
			{0, block(1), admitted},
			{0, policy.Offer{Hash: 2, Bytes: 10, Partial: true}, tail},
			{0, policy.Offer{Hash: 2, Bytes: 10, Partial: true, Used: true}, tail},
			{0, policy.Offer{Hash: 3, Bytes: 10, Full: true}, noRoom},
			{0, policy.Offer{Hash: 3, Bytes: 10, Full: true, Needed: true}, noRoom},
		}},
		{"empty at first", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 100}, Ghosts: 4}, []step{
			{0, used, over},
			{1, used, admitted},
			{1, used, over}, // 9 are owed
			{10, used, over},
			{11, used, admitted},
		}},
		{"pressure", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 100}, Ghosts: 4}, []step{
			{49, block(1), once},
			{49, block(1), admitted}, // it came back; 39 are left
			{49, block(1), once},     // and is remembered no more
			{49, used, admitted},
			{70, block(2), admitted}, // 50
			{70, block(3), once},
		}},
		{"no more than the burst", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 20}, Ghosts: 4}, []step{
			{1e9, block(1), admitted},
			{1e9, block(2), admitted}, // 10 are half of it
			{1e9, block(3), over},
		}},
		{"what others need", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 20}, Ghosts: 4}, []step{
			{0, policy.Offer{Hash: 1, Bytes: 10, Needed: true}, admitted},
			{0, policy.Offer{Hash: 2, Bytes: 10, Needed: true, Partial: true}, admitted},
			{20, used, over}, // it is paid for
			{21, used, admitted},
		}},
		{"latest ghosts", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 1000}, Ghosts: 2}, []step{
			{100, block(1), once},
			{100, block(2), once},
			{100, block(3), once},
			{100, block(1), once}, // forgotten; in place of 2
			{100, block(3), admitted},
			{100, block(2), once},
			{100, block(1), admitted},
		}},
		{"no ghosts", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 1000}}, []step{
			{100, block(1), once},
			{100, block(1), once},
		}},
		{"not worth", policy.AdmissionOptions{Ghosts: 2}, []step{
			{0, policy.Offer{Hash: 1, Bytes: 10, Worthless: true, Used: true}, policy.NotWorth},
			{0, policy.Offer{Hash: 1, Bytes: 10, Worthless: true, Needed: true}, admitted},
		}},
		{"bytes and requests", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 100, Start: 100}, Requests: policy.Budget{Rate: 0.1, Burst: 4}, Ghosts: 4}, []step{
			{0, used, over},      // no request
			{10, block(1), once}, // 1 of 4
			{20, block(2), admitted},
		}},
		{"time that goes back", policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 1000}}, []step{
			{10, used, admitted},
			{5, used, over},
			{10, used, over},
			{11, used, admitted},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newAdmission(t, c.o)
			for i, s := range c.steps {
				if got := a.Admit(s.o, s.now); got != s.want {
					t.Fatalf("step %d, block %d at %d: %v, want %v", i, s.o.Hash, s.now, got, s.want)
				}
			}
		})
	}
}

func TestAdmissionCharge(t *testing.T) {
	a := newAdmission(t, policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 100}})
	a.Charge(50, 0)
	used := policy.Offer{Hash: 1, Bytes: 1, Used: true}
	if got := a.Admit(used, 50); got != policy.OverBudget {
		t.Errorf("%v when all is owed, want %v", got, policy.OverBudget)
	}
	if got := a.Admit(used, 51); got != policy.Admitted {
		t.Errorf("%v when it is paid, want %v", got, policy.Admitted)
	}
}

// TestSetBudgets: a budget that changes keeps what is in its bucket, as far as there is room.
func TestSetBudgets(t *testing.T) {
	a := newAdmission(t, policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 100, Start: 80}})
	set := func(bytes, requests policy.Budget, wantBytes, wantRequests float64) {
		t.Helper()
		if err := a.SetBudgets(bytes, requests); err != nil {
			t.Fatal(err)
		}
		if b, r := a.Levels(0); b != wantBytes || r != wantRequests {
			t.Errorf("%v and %v are available, want %v and %v", b, r, wantBytes, wantRequests)
		}
	}
	set(policy.Budget{Rate: 2, Burst: 200, Start: 100}, policy.Budget{Rate: 1, Burst: 10, Start: 5}, 80, 5)
	a.Charge(0, 6)
	set(policy.Budget{Rate: 2, Burst: 50, Start: 25}, policy.Budget{Rate: 1, Burst: 20, Start: 10}, 50, -1)
	a.Charge(60, 0)
	set(policy.Budget{}, policy.Budget{Rate: 1, Burst: 20, Start: 10}, -10, -1)
	if got := a.Admit(policy.Offer{Hash: 1, Bytes: 1, Used: true}, 2); got != policy.Admitted {
		t.Errorf("%v without a budget of bytes", got)
	}
	a.SetLevels(1, 30)
	if _, r := a.Levels(2); r != 20 {
		t.Errorf("%v requests are available in a bucket of 20", r)
	}
	if err := a.SetBudgets(policy.Budget{Rate: 1}, policy.Budget{}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("budget without a burst: %v", err)
	}
	if _, r := a.Levels(2); r != 20 {
		t.Errorf("%v requests after a change that failed", r)
	}
}

func TestAdmissionOptions(t *testing.T) {
	for _, o := range []policy.AdmissionOptions{
		{Bytes: policy.Budget{Rate: -1, Burst: 1}},
		{Requests: policy.Budget{Rate: -1, Burst: 1}},
		{Bytes: policy.Budget{Rate: math.NaN(), Burst: 1}},
		{Requests: policy.Budget{Rate: math.NaN(), Burst: 1}},
		{Bytes: policy.Budget{Rate: math.Inf(1), Burst: 1}},
		{Requests: policy.Budget{Rate: math.Inf(1), Burst: 1}},
		{Bytes: policy.Budget{Rate: 1}},
		{Bytes: policy.Budget{Rate: 1, Burst: 1, Start: 2}},
		{Bytes: policy.Budget{Rate: 1, Burst: math.NaN()}},
		{Requests: policy.Budget{Rate: 1, Burst: math.NaN()}},
		{Ghosts: -1},
	} {
		if _, err := policy.NewAdmission(o); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%+v: %v, want ErrInvalid", o, err)
		}
	}
}

// TestAdmissionKeepsTheBudget: in any span of time no more is written than the budget
// allows and the burst, and one block that overdraws it.
func TestAdmissionKeepsTheBudget(t *testing.T) {
	const budget, burst, most = 3., 500., 40
	rng := rand.New(rand.NewPCG(1, 2))
	a := newAdmission(t, policy.AdmissionOptions{Bytes: policy.Budget{Rate: budget, Burst: burst}, Ghosts: 100})
	var now int64
	var excess, least float64 // written less allowed: so far, and the least it was
	for i := range 20000 {
		gap := rng.Int64N(20)
		now += gap
		excess -= budget * float64(gap)
		least = min(least, excess)
		o := policy.Offer{Hash: rng.Uint64N(300), Bytes: 1 + rng.Int64N(most), Used: rng.IntN(2) == 0}
		if a.Admit(o, now) == policy.Admitted {
			excess += float64(o.Bytes)
		}
		if excess-least > burst+most {
			t.Fatalf("offer %d: %v bytes above the budget since some time before", i, excess-least)
		}
	}
}

func TestAdmissionAllocates(t *testing.T) {
	a := newAdmission(t, policy.AdmissionOptions{Bytes: policy.Budget{Rate: 1, Burst: 1e6}, Ghosts: 1000})
	var hash uint64
	offer := func() {
		hash++
		a.Admit(policy.Offer{Hash: hash, Bytes: 1}, int64(hash/10))
	}
	for range 10000 {
		offer()
	}
	if n := testing.AllocsPerRun(1000, offer); n != 0 {
		t.Errorf("%v allocations an offer", n)
	}
}
