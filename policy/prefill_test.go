package policy_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// took is how long an engine takes of that cost, exactly.
func took(c block.Prefill, position, tokens int64) time.Duration {
	a, b := float64(position), float64(position+tokens)
	return time.Duration(float64(c.Token)*(b-a) + c.Position*(b*b-a*a)/2)
}

// TestPrefillsLearn: the cost comes out of exact reports exactly, and out of reports that
// are noisy, or wrong one in five, nearly; it follows an engine that changes.
func TestPrefillsLearn(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	exact := func(d time.Duration) time.Duration { return d }
	noisy := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) * math.Exp(r.NormFloat64()*0.1))
	}
	wrong := func(d time.Duration) time.Duration {
		if r.IntN(5) == 0 {
			return d*time.Duration(2+r.IntN(50)) + time.Second // other work came between
		}
		return noisy(d)
	}
	for _, c := range []struct {
		name  string
		cost  block.Prefill
		most  int64 // tokens before what is computed
		as    func(time.Duration) time.Duration
		share float64 // by which the time of 8k tokens may be off
	}{
		{"exact", block.Prefill{Token: 33 * time.Microsecond, Position: 1.1}, 32_000, exact, 0.001},
		{"position costs nothing", block.Prefill{Token: 33 * time.Microsecond}, 32_000, exact, 0.001},
		{"position costs all", block.Prefill{Position: 3}, 32_000, exact, 0.001},
		{"all at the beginning", block.Prefill{Token: 33 * time.Microsecond, Position: 1.1}, 1, exact, 0.02},
		{"fast", block.Prefill{Token: 90}, 1000, exact, 0.02},
		{"noisy", block.Prefill{Token: 33 * time.Microsecond, Position: 1.1}, 32_000, noisy, 0.1},
		{"wrong", block.Prefill{Token: 33 * time.Microsecond, Position: 1.1}, 32_000, wrong, 0.15},
	} {
		var p policy.Prefills
		report := func(n int, cost block.Prefill) {
			for range n {
				position, tokens := r.Int64N(c.most), 16+r.Int64N(8192)
				if c.most == 1 {
					tokens = 4096 + r.Int64N(100)
				}
				p.Add(block.PrefillReport{Position: position, Tokens: tokens, Took: max(c.as(took(cost, position, tokens)), 1)})
			}
		}
		check := func(when string, want block.Prefill) {
			t.Helper()
			got := p.Cost()
			if err := got.Check(); err != nil {
				t.Errorf("%s, %s: %v", c.name, when, err)
			}
			from := c.most / 2 // where there were reports
			if c.most == 1 {
				from = 0
			}
			n := int64(4096)
			if g, w := took(got, from, n).Seconds(), took(want, from, n).Seconds(); math.Abs(g-w) > c.share*w {
				t.Errorf("%s, %s: %+v, want %+v: %d tokens from %d on take %.4f s, want %.4f", c.name, when, got, want, n, from, g, w)
			}
		}
		report(7, c.cost)
		if got := p.Cost(); got != (block.Prefill{}) {
			t.Errorf("%s: after 7 reports %+v", c.name, got)
		}
		report(57, c.cost)
		check("after 64", c.cost)
		report(500, c.cost)
		check("after 564", c.cost)
		twice := block.Prefill{Token: 2 * c.cost.Token, Position: 2 * c.cost.Position}
		report(64, twice)
		check("after a change", twice)
	}
}

// Whatever is reported, the cost is one that can be, and is more than nothing.
func TestPrefillsSane(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		var p policy.Prefills
		for range 8 + r.IntN(100) {
			rep := block.PrefillReport{Position: r.Int64N(1 << r.IntN(25)), Tokens: 1 + r.Int64N(1<<r.IntN(25)), Took: time.Duration(1 + r.Int64N(1<<r.IntN(50)))}
			if err := rep.Check(); err != nil {
				t.Fatal(err)
			}
			p.Add(rep)
		}
		if c := p.Cost(); c.Check() != nil || c == (block.Prefill{}) {
			t.Fatalf("%+v, %v", c, c.Check())
		}
	}
}
