package policy_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

func TestPlan(t *testing.T) {
	const ms = time.Millisecond
	memory, disk := policy.Source{Bandwidth: 10e9}, policy.Source{Latency: ms, Bandwidth: 1e9}
	slow := policy.Source{Bandwidth: 20e6}
	flat := block.Prefill{Token: ms} // 10 ms a block of 10 tokens
	// A block at the beginning takes 0.5 ms, the hundredth 99.5 ms.
	steep := block.Prefill{Position: 1e4}
	for _, c := range []struct {
		name    string
		runs    []policy.Run
		sources []policy.Source
		o       block.PlanOptions
		want    block.Plan
	}{
		{"nothing", nil, nil, block.PlanOptions{Prefill: flat}, block.Plan{}},
		{
			"all of it",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{disk},
			block.PlanOptions{Prefill: flat},
			block.Plan{To: 10, Load: 11 * ms, Total: 11 * ms, Recompute: 100 * ms},
		},
		{
			"recompute",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{slow},
			block.PlanOptions{Prefill: flat},
			block.Plan{Compute: 100 * ms, Total: 100 * ms, Recompute: 100 * ms},
		},
		{
			"what is in memory",
			[]policy.Run{{0, 4, 1e6}, {1, 6, 1e6}},
			[]policy.Source{memory, slow},
			block.PlanOptions{Prefill: flat},
			block.Plan{To: 4, Load: 400 * time.Microsecond, Compute: 60 * ms, Total: 60*ms + 400*time.Microsecond, Recompute: 100 * ms},
		},
		{
			"until the deadline",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{disk},
			block.PlanOptions{Prefill: flat, Deadline: 5500 * time.Microsecond},
			block.Plan{To: 4, Load: 5 * ms, Compute: 60 * ms, Total: 65 * ms, Recompute: 100 * ms},
		},
		{
			"no time",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{disk},
			block.PlanOptions{Prefill: flat, Deadline: 1},
			block.Plan{Compute: 100 * ms, Total: 100 * ms, Recompute: 100 * ms},
		},
		{
			"behind others",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{{Bandwidth: 1e9, Queue: 89e6}},
			block.PlanOptions{Prefill: flat},
			block.Plan{To: 10, Load: 99 * ms, Total: 99 * ms, Recompute: 100 * ms},
		},
		{
			"too long a queue",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{{Bandwidth: 1e9, Queue: 91e6}},
			block.PlanOptions{Prefill: flat},
			block.Plan{Compute: 100 * ms, Total: 100 * ms, Recompute: 100 * ms},
		},
		{
			"both at once",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{slow},
			block.PlanOptions{Prefill: flat, Overlap: true},
			block.Plan{From: 9, To: 10, Load: 50 * ms, Compute: 90 * ms, Total: 90 * ms, Recompute: 100 * ms},
		},
		{
			"later blocks cost more",
			[]policy.Run{{0, 100, 1e6}},
			[]policy.Source{slow},
			block.PlanOptions{Prefill: steep, Overlap: true},
			block.Plan{From: 62, To: 100, Load: 1900 * ms, Compute: 1922 * ms, Total: 1922 * ms, Recompute: 5000 * ms},
		},
		{
			"a tier that does not answer",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{{}},
			block.PlanOptions{Prefill: flat, Overlap: true},
			block.Plan{Compute: 100 * ms, Total: 100 * ms, Recompute: 100 * ms},
		},
		{
			"a prompt that costs nothing",
			[]policy.Run{{0, 10, 1e6}},
			[]policy.Source{memory},
			block.PlanOptions{},
			block.Plan{},
		},
	} {
		if got := policy.Plan(c.runs, c.sources, 10, c.o); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// TestPlanIsBest compares with all that can be done.
func TestPlanIsBest(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 9))
	for range 500 {
		var sources []policy.Source
		for range 3 {
			sources = append(sources, policy.Source{Latency: time.Duration(rng.Int64N(1e7)), Bandwidth: math.Pow(10, 6+4*rng.Float64()), Queue: rng.Int64N(1e7)})
		}
		var runs []policy.Run
		var blocks []policy.Run // one by one
		for range 1 + rng.IntN(4) {
			r := policy.Run{Source: rng.IntN(3), Blocks: 1 + rng.IntN(5), Bytes: 1 + rng.Int64N(1e6)}
			runs = append(runs, r)
			for range r.Blocks {
				blocks = append(blocks, r)
			}
		}
		o := block.PlanOptions{Prefill: block.Prefill{Token: time.Duration(rng.Int64N(1e6)), Position: rng.Float64() * 1e3}, Overlap: rng.IntN(2) == 0}
		if rng.IntN(2) == 0 {
			o.Deadline = time.Duration(1 + rng.Int64N(1e8))
		}
		const tokens = 16
		compute := func(from, to int) (ns float64) {
			for i := from * tokens; i < to*tokens; i++ {
				ns += float64(o.Prefill.Token) + o.Prefill.Position*(float64(i)+0.5)
			}
			return ns
		}
		load := func(from, to int) (ns float64) {
			used := map[int]bool{}
			for _, b := range blocks[from:to] {
				s := sources[b.Source]
				if !used[b.Source] {
					ns += float64(s.Latency) + float64(s.Queue)/s.Bandwidth*1e9
				}
				used[b.Source] = true
				ns += float64(b.Bytes) / s.Bandwidth * 1e9
			}
			return ns
		}
		n := len(blocks)
		all := compute(0, n)
		best := all
		for i := range n + 1 {
			if l := load(0, i); o.Deadline == 0 || l <= float64(o.Deadline) {
				best = min(best, l+compute(i, n))
			}
			if l := load(i, n); o.Overlap && (o.Deadline == 0 || l <= float64(o.Deadline)) {
				best = min(best, max(l, compute(0, i)))
			}
		}
		got := policy.Plan(runs, sources, tokens, o)
		if math.Abs(float64(got.Total)-best) > 1e-6*best+10 || math.Abs(float64(got.Recompute)-all) > 1e-6*all+10 || got.Total > got.Recompute {
			t.Fatalf("%+v of %v, %+v, %+v: best %v, all computed %v", got, runs, sources, o, time.Duration(best), time.Duration(all))
		}
		if got.From > 0 && !o.Overlap || o.Deadline > 0 && got.Load > o.Deadline {
			t.Fatalf("%+v with %+v", got, o)
		}
	}
}
