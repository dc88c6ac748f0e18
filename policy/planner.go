package policy

import (
	"math"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Source is how fast blocks come from a tier.
type Source struct {
	Latency   time.Duration // until the first byte
	Bandwidth float64       // bytes a second
	Queue     int64         // bytes that come before
}

// Run is blocks of a prompt that follow each other, come from one source and have the
// same size.
type Run struct {
	Source int
	Blocks int
	Bytes  int64 // of each
}

// Plan says what of a prompt's prefix is worth loading: everything, a part, or nothing,
// whichever has all of it there first. The runs are in the prompt's order and begin with
// its first block; each block has that many tokens. Blocks are taken to come one
// after the other, also those of different sources, so it promises rather too
// little.
func Plan(runs []Run, sources []Source, tokens int64, o block.PlanOptions) block.Plan {
	n := 0
	for _, r := range runs {
		n += r.Blocks
	}
	end := int64(n) * tokens
	all := prefill(o.Prefill, 0, end)
	best := block.Plan{Compute: all, Total: all, Recompute: all}
	consider := func(p block.Plan) {
		late := o.Deadline > 0 && p.Load > o.Deadline
		// Of those that take as long the one that computes less.
		if !late && (p.Total < best.Total || p.Total == best.Total && p.Compute < best.Compute) {
			p.Recompute = all
			best = p
		}
	}
	// The head is loaded, then the rest is computed.
	l := newLoading(sources)
	to := 0
	for _, r := range runs {
		for range r.Blocks {
			to++
			load := l.add(r)
			rest := prefill(o.Prefill, int64(to)*tokens, end)
			consider(block.Plan{To: to, Load: load, Compute: rest, Total: add(load, rest)})
		}
	}
	if !o.Overlap {
		return best
	}
	// The head is computed while the rest is loaded.
	l = newLoading(sources)
	from := n
	for i := len(runs) - 1; i >= 0; i-- {
		for range runs[i].Blocks {
			from--
			load := l.add(runs[i])
			head := prefill(o.Prefill, 0, int64(from)*tokens)
			consider(block.Plan{From: from, To: n, Load: load, Compute: head, Total: max(load, head)})
		}
	}
	return best
}

// Worth says whether the blocks of a prompt up to one of them are sooner there when they are
// loaded than when they are computed, from a source that nobody else uses. They have
// that many tokens each.
func Worth(upTo Run, from Source, tokens int64, cost block.Prefill) bool {
	load := duration(float64(from.Latency) + float64(upTo.Blocks)*float64(upTo.Bytes)/from.Bandwidth*float64(time.Second))
	return load < prefill(cost, 0, int64(upTo.Blocks)*tokens)
}

// prefill is how long the tokens take from one position to another.
func prefill(p block.Prefill, from, to int64) time.Duration {
	a, b := float64(from), float64(to)
	return duration(float64(p.Token)*(b-a) + p.Position*(b*b-a*a)/2)
}

// loading adds up how long blocks take to come.
type loading struct {
	sources []Source
	used    []bool
	ns      float64
}

func newLoading(sources []Source) *loading {
	return &loading{sources: sources, used: make([]bool, len(sources))}
}

// add loads one more block, and returns how long all take.
func (l *loading) add(r Run) time.Duration {
	s := &l.sources[r.Source]
	bytes := float64(r.Bytes)
	if !l.used[r.Source] {
		l.used[r.Source] = true
		l.ns += float64(s.Latency)
		bytes += float64(s.Queue)
	}
	l.ns += bytes / s.Bandwidth * float64(time.Second)
	return duration(l.ns)
}

// duration is that many ns, or, without a bandwidth, as long as can be.
func duration(ns float64) time.Duration {
	if !(ns < math.MaxInt64) {
		return math.MaxInt64
	}
	return time.Duration(ns)
}

func add(a, b time.Duration) time.Duration {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
