package policy_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/policy"
)

// conversation makes the paths of prompts that share a beginning, and of which every
// other comes back longer.
type conversation struct {
	rng   *rand.Rand
	fresh uint64
	path  []uint64
}

func (c *conversation) next() []uint64 {
	if c.rng.IntN(2) == 0 || len(c.path) > 60 {
		c.path = append(c.path[:0], 1, 2, 3)
	}
	for range 8 {
		c.fresh++
		c.path = append(c.path, c.fresh<<8)
	}
	return c.path
}

func TestCurvesAllocateNothing(t *testing.T) {
	c := policy.NewCurves("switch")
	talk := conversation{rng: rand.New(rand.NewPCG(1, 1))}
	many := func() {
		for range 2000 {
			c.Request(talk.next(), 20000)
		}
	}
	for range 20 { // until the shadows are full, and their ghosts as many as there may be
		many()
	}
	if n := testing.AllocsPerRun(3, many); n > 2 {
		t.Errorf("%v allocations in 2000 requests", n)
	}
}

// TestCurvesFollow: what half and twice the room would do is counted anew under another
// policy, when the shadows are full; a tier of another size makes all begin anew, and
// what was counted stays.
func TestCurvesFollow(t *testing.T) {
	const capacity = 100
	c := policy.NewCurves("arc")
	ask := func(n, capacity int) {
		for range n {
			c.Request([]uint64{1, 2}, int64(capacity))
		}
	}
	want := func(name string, one, other int64) {
		t.Helper()
		for _, k := range c.Curves(nil) {
			refs := one
			if k.Size == 0.5 || k.Size == 2 {
				refs = other
				if k.Policy != name {
					t.Errorf("policy %q of size %v, want %q", k.Policy, k.Size, name)
				}
			}
			if k.Size == 0 {
				continue
			}
			if k.Refs != refs || refs > 0 && (k.Hits > refs || k.Hits < refs-2) {
				t.Errorf("%q of size %v: %d of %d, want %d", k.Policy, k.Size, k.Hits, k.Refs, refs)
			}
		}
	}
	c.Request([]uint64{1, 2}, 0) // no capacity is known: nothing can be said
	want("arc", 0, 0)
	ask(200, capacity)
	want("arc", 400, 400)
	c.Follow("arc")
	want("arc", 400, 400)
	c.Follow("gdsf")
	want("gdsf", 400, 0)
	ask(100, capacity) // they fill
	want("gdsf", 600, 0)
	ask(100, capacity)
	want("gdsf", 800, 200)
}

func BenchmarkCurves(b *testing.B) {
	for _, capacity := range []int64{4096, 1 << 20} {
		b.Run(fmt.Sprint(capacity), func(b *testing.B) {
			c := policy.NewCurves("switch")
			talk := conversation{rng: rand.New(rand.NewPCG(1, 1))}
			b.ReportAllocs()
			refs := 0
			for b.Loop() {
				path := talk.next()
				refs += len(path)
				c.Request(path, capacity)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(refs), "ns/block")
		})
	}
}
