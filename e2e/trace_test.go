package e2e

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// replayReport and checkReport are the names that scripts rely on.
type replayReport struct {
	Requests      *int64           `json:"requests"`
	BlockRefs     *int64           `json:"block_refs"`
	PrefixHitRate *float64         `json:"prefix_hit_rate"`
	HitRate       *float64         `json:"hit_rate"`
	BytesPut      *int64           `json:"bytes_put"`
	BytesGot      *int64           `json:"bytes_got"`
	WrongBytes    *int64           `json:"wrong_bytes"`
	Refused       *int64           `json:"refused"`
	Errors        *int64           `json:"errors"`
	HitsByTier    map[string]int64 `json:"hits_by_tier"`
	Evictions     *int64           `json:"evictions"`
	Seconds       *float64         `json:"seconds"`
	Way           string           `json:"way"`
}

// replay runs kvtier replay --verify, which must find nothing wrong.
func replay(t *testing.T, d *daemon, trace string, args ...string) replayReport {
	t.Helper()
	var r replayReport
	decode(t, must(t, append([]string{"replay", trace, "--server", d.addr, "--block-bytes", "64KiB", "--verify", "--json"}, args...)...), &r)
	for name, v := range map[string]*int64{
		"requests": r.Requests, "block_refs": r.BlockRefs, "bytes_put": r.BytesPut, "bytes_got": r.BytesGot,
		"wrong_bytes": r.WrongBytes, "refused": r.Refused, "errors": r.Errors, "evictions": r.Evictions,
	} {
		if v == nil {
			t.Fatalf("the report lacks %s", name)
		}
	}
	if r.PrefixHitRate == nil || r.HitRate == nil || r.HitsByTier == nil || r.Seconds == nil {
		t.Fatalf("the report lacks a name: %+v", r)
	}
	if *r.WrongBytes != 0 || *r.Errors != 0 {
		t.Errorf("replay %v: %d wrong bytes, %d errors, want none", args, *r.WrongBytes, *r.Errors)
	}
	return r
}

type checkReport struct {
	Listed     *int64 `json:"listed"`
	Present    *int64 `json:"present"`
	Missed     *int64 `json:"missed"`
	WrongBytes *int64 `json:"wrong_bytes"`
}

// check runs kvtier replay --check-only, which must find every block that the
// daemon lists, and returns how many those are.
func check(t *testing.T, d *daemon, trace string) int64 {
	t.Helper()
	var r checkReport
	decode(t, must(t, "replay", trace, "--server", d.addr, "--check-only", "--json"), &r)
	if r.Listed == nil || r.Present == nil || r.Missed == nil || r.WrongBytes == nil {
		t.Fatalf("the report lacks a name: %+v", r)
	}
	if *r.WrongBytes != 0 || *r.Missed != 0 || *r.Present != *r.Listed {
		t.Errorf("check: listed %d, present %d, missed %d, wrong bytes %d, want all present and none wrong", *r.Listed, *r.Present, *r.Missed, *r.WrongBytes)
	}
	return *r.Listed
}

// verify runs kvtier verify, which must find every committed block right, and
// returns how many there are.
func verify(t *testing.T, data string) int64 {
	t.Helper()
	var r struct{ Records, Good, Bad int64 }
	decode(t, must(t, "verify", "--data", data, "--json"), &r)
	if r.Bad != 0 || r.Good != r.Records {
		t.Errorf("verify: %d records, %d good, %d bad", r.Records, r.Good, r.Bad)
	}
	return r.Records
}

// requests is how much of a trace of n requests there is time for.
func requests(n int) string {
	switch {
	case raceEnabled && !soak:
		n /= 14
	case testing.Short():
		n /= 5
	}
	return fmt.Sprint(n)
}

// TestConversation is the main job: real traffic through tiers that are much
// smaller than it, every byte verified, a daemon killed in the middle of durable
// puts, and everything that the next one lists is there and right.
func TestConversation(t *testing.T) {
	withoutRace(t)
	const traceRequests = 5606
	dir := t.TempDir()
	data, slab := filepath.Join(dir, "data"), filepath.Join(dir, "slab")
	args := []string{"--data", data, "--dram", "256MiB", "--nvme", slab + "=2GiB"}

	d := serve(t, args...)
	r := replay(t, d, conversation, "--limit", requests(traceRequests))
	if *r.BytesPut == 0 || *r.BytesGot == 0 || r.HitsByTier["g2"] == 0 || r.HitsByTier["g3"] == 0 || *r.Evictions == 0 {
		t.Errorf("the replay did not use both tiers: %+v", r)
	}

	// The second replay meets what the first has left. It is killed amid its
	// durable puts: not before some are answered, and long before the last.
	c := dial(t, d)
	written := tierStats(t, c, block.G3).BytesIn
	second := start(t, nil, "replay", conversation, "--server", d.addr, "--block-bytes", "64KiB", "--verify", "--durable", "g3", "--json")
	until(t, "durable puts", func() bool { return tierStats(t, c, block.G3).BytesIn > written+64<<20 })
	d.kill()
	if code := second.wait(); code != 1 {
		t.Errorf("replay against a daemon that was killed: exit code %d, want 1:\n%s", code, second.stderr)
	}
	var cut replayReport
	decode(t, second.stdout.String(), &cut)
	if *cut.WrongBytes != 0 {
		t.Errorf("the second replay read %d wrong bytes", *cut.WrongBytes)
	}

	d = serve(t, args...)
	if listed := check(t, d, conversation); listed == 0 {
		t.Error("nothing is left after the kill")
	}
	replay(t, d, conversation, "--limit", requests(traceRequests/10))
	d.stop(0)
	if verify(t, data) == 0 {
		t.Error("nothing is committed after the stop")
	}
}
