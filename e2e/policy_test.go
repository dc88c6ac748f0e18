package e2e

import (
	"fmt"
	"math"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// TestReplayIsAsSimulated: the store with real bytes hits what kvtier sim says that
// a tier of its size and watermarks does, with each policy. On a machine that is busy
// the evictor comes late, and a policy misses hints: then it is tried again.
func TestReplayIsAsSimulated(t *testing.T) {
	withoutRace(t)
	const (
		traceRequests = 5606
		tries         = 5
	)
	limit := requests(traceRequests)
	for _, name := range []string{"lru-leaf", "s3-ghost", "arc", "gdsf", "switch"} {
		t.Run(name, func(t *testing.T) {
			for try := 1; ; try++ {
				got, want, capacity := replayed(t, name, limit)
				if math.Abs(got-want) <= 0.005 {
					return
				}
				t.Logf("prefix hit rate %.4f at %d blocks, simulated %.4f", got, capacity, want)
				if try == tries {
					t.Fatalf("not as simulated, %d times", tries)
				}
			}
		})
	}
}

// replayed is the prefix hit rate of a daemon and of a simulation of the same size.
func replayed(t *testing.T, policy, limit string) (got, simulated float64, capacity int64) {
	t.Helper()
	d := serve(t, "--data", t.TempDir(), "--nvme", "none", "--dram", "32MiB", "--grace", "0s", "--policy", policy)
	r := replay(t, d, conversation, "--block-bytes", "4KiB", "--limit", limit)
	g2 := tierStats(t, dial(t, d), block.G2)
	d.stop(0)
	if *r.Evictions == 0 {
		t.Error("nothing was evicted")
	}
	capacity = g2.Capacity / (g2.Used / g2.Blocks)
	var sim struct {
		PrefixHitRate float64 `json:"prefix_hit_rate"`
	}
	decode(t, must(t, "sim", conversation, "--policy", policy, "--capacity", fmt.Sprint(capacity), "--high", "0.98", "--low", "0.96", "--limit", limit, "--json"), &sim)
	return *r.PrefixHitRate, sim.PrefixHitRate, capacity
}

// TestRecordIsAsTheTrace: what a daemon records of a replay gives the rates of the trace
// that was replayed, and is whole when the daemon has stopped.
func TestRecordIsAsTheTrace(t *testing.T) {
	withoutRace(t)
	record := filepath.Join(t.TempDir(), "record.jsonl")
	d := serve(t, "--data", t.TempDir(), "--nvme", "none", "--dram", "32MiB", "--record", record)
	replay(t, d, smallTrace, "--block-bytes", "4KiB")
	d.stop(0)
	type rates struct {
		Requests      int64   `json:"requests"`
		BlockRefs     int64   `json:"block_refs"`
		UniqueBlocks  int64   `json:"unique_blocks"`
		PrefixHitRate float64 `json:"prefix_hit_rate"`
		HitRate       float64 `json:"hit_rate"`
	}
	for _, policy := range []string{"lru-leaf", "belady"} {
		var got, want rates
		args := []string{"--policy", policy, "--capacity", "5%", "--json"}
		decode(t, must(t, append([]string{"sim", record}, args...)...), &got)
		decode(t, must(t, append([]string{"sim", smallTrace}, args...)...), &want)
		if got != want || want.PrefixHitRate == 0 {
			t.Errorf("%s: recorded %+v, replayed %+v", policy, got, want)
		}
	}
}
