package sim

import (
	"fmt"
	"math"
	"testing"

	"github.com/kvtier/kvtier/policy"
)

// TestCurves: what the curves say of a tier is within a point of what a simulation of
// the whole says, at capacities of which the sample is all, and of which it is not.
func TestCurves(t *testing.T) {
	for _, c := range []struct {
		file   string
		share  float64
		limit  int
		follow string
	}{
		{conversation, 0.1, 0, "lru-leaf"},
		{conversation, 0.3, 0, "switch"},
		{airline, 0.3, 0, "s3-ghost"},
		{airline, 0.05, 300, "arc"},
	} {
		t.Run(fmt.Sprintf("%s %v", c.file, c.share), func(t *testing.T) {
			w := load(t, c.file, c.limit)
			checkCurves(t, w, int64(c.share*float64(w.Unique())), c.follow)
		})
	}
}

func checkCurves(t *testing.T, w *Workload, capacity int64, follow string) {
	c := policy.NewCurves(follow)
	var path []uint64
	for i := range w.Requests() {
		path = path[:0]
		for _, id := range w.path(i) {
			path = append(path, w.prints[id])
		}
		c.Request(path, capacity)
	}
	curves := c.Curves(nil)
	if len(curves) != len(policy.Names())+3 {
		t.Fatalf("%d curves: %+v", len(curves), curves)
	}
	for _, got := range curves {
		o, p := Options{Capacity: int64(got.Size * float64(capacity))}, got.Policy
		if got.Size == 0 {
			o.Capacity, p = int64(w.Unique()), "lru-leaf"
		}
		want := run(t, w, p, o).PrefixHitRate
		rate := float64(got.Hits) / float64(got.Refs)
		t.Logf("%10q of %v: %.4f, simulated whole %.4f", got.Policy, got.Size, rate, want)
		if got.Refs != int64(len(w.refs)) || math.Abs(rate-want) > 0.01 {
			t.Errorf("%q of %v capacities of %d: %.4f of %d, simulated whole %.4f", got.Policy, got.Size, capacity, rate, got.Refs, want)
		}
	}
}
