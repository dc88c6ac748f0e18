package e2e

import (
	"fmt"
	"math"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// TestReplayIsAsSimulated: the store with real bytes hits what kvtier sim says that
// a tier of its size and watermarks does, with each policy.
func TestReplayIsAsSimulated(t *testing.T) {
	const traceRequests = 5606
	limit := requests(traceRequests)
	for _, name := range []string{"lru-leaf", "s3-ghost", "arc", "gdsf", "switch"} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "--data", t.TempDir(), "--nvme", "none", "--dram", "32MiB", "--grace", "0s", "--policy", name)
			r := replay(t, d, conversation, "--block-bytes", "4KiB", "--limit", limit)
			g2 := tierStats(t, dial(t, d), block.G2)
			capacity := g2.Capacity / (g2.Used / g2.Blocks)

			var want struct {
				PrefixHitRate float64 `json:"prefix_hit_rate"`
			}
			decode(t, must(t, "sim", conversation, "--policy", name, "--capacity", fmt.Sprint(capacity), "--high", "0.98", "--low", "0.96", "--limit", limit, "--json"), &want)
			if got := *r.PrefixHitRate; math.Abs(got-want.PrefixHitRate) > 0.005 {
				t.Errorf("prefix hit rate %.4f at %d blocks, simulated %.4f", got, capacity, want.PrefixHitRate)
			}
			if *r.Evictions == 0 && !raceEnabled {
				t.Error("nothing was evicted")
			}
		})
	}
}
