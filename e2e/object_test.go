package e2e

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// bucketOf is a new server of objects with a bucket, and the URL of a prefix in it.
func bucketOf(t *testing.T) (server *servers.VersityGW, url string) {
	t.Helper()
	server = servers.StartVersityGW(t)
	server.Bucket(t, "kvtier")
	server.Login(t)
	return server, "s3://kvtier/some/prefix?path_style=true&region=us-east-1&endpoint=" + server.Endpoint
}

// endless is the prefix hit rate of a cache that holds all of a trace's first requests.
func endless(t *testing.T, trace, limit string) float64 {
	t.Helper()
	var r struct {
		PrefixHitRate *float64 `json:"prefix_hit_rate"`
	}
	decode(t, must(t, "sim", trace, "--capacity", "100%", "--policy", "lru-leaf", "--limit", limit, "--json"), &r)
	if r.PrefixHitRate == nil {
		t.Fatal("sim tells no prefix hit rate")
	}
	return *r.PrefixHitRate
}

// TestObjectTier: traffic through local tiers that are far too small for it finds in a bucket
// what an endless cache would have, right; a daemon that is killed amid that loses nothing that
// was committed; and another one of the cluster may use the prefix, of another cluster not.
func TestObjectTier(t *testing.T) {
	withoutRace(t)
	_, url := bucketOf(t)
	dir := t.TempDir()
	trace, limit, dram, nvme := smallTrace, "300", "64MiB", "96MiB"
	if soak {
		trace, limit, dram, nvme = conversation, "0", "128MiB", "512MiB"
	}
	args := []string{"--data", filepath.Join(dir, "data"), "--dram", dram, "--nvme", filepath.Join(dir, "slab") + "=" + nvme, "--object", url, "--cluster", "west"}
	d := serve(t, args...)
	want := endless(t, trace, limit)
	r := replay(t, d, trace, "--limit", limit)
	if got := *r.PrefixHitRate; math.Abs(got-want) > 0.005 {
		t.Errorf("prefix hit rate %.4f, an endless cache has %.4f", got, want)
	}
	if r.HitsByTier["g4"] == 0 {
		t.Errorf("nothing came from the bucket: %v", r.HitsByTier)
	}
	c := dial(t, d)
	st := tierStats(t, c, block.G4)
	t.Logf("%d blocks of %d bytes went into the bucket", st.Blocks, st.Payload)

	// Killed while blocks go into the bucket, by durable puts of another namespace.
	second := start(t, nil, "replay", trace, "--server", d.addr, "--block-bytes", "64KiB", "--verify", "--durable", "g3", "--namespace", "second", "--json")
	until(t, "uploads", func() bool { return tierStats(t, c, block.G4).BytesIn > st.BytesIn+32<<20 })
	d.kill()
	second.wait()
	d = serve(t, args...)
	if after := tierStats(t, dial(t, d), block.G4); after.Blocks < st.Blocks {
		t.Errorf("after the kill there are %d blocks in the bucket, before %d", after.Blocks, st.Blocks)
	}
	if n := check(t, d, trace); n < st.Blocks {
		t.Errorf("%d blocks are listed, %d were in the bucket", n, st.Blocks)
	}
	r = replay(t, d, trace, "--limit", limit)
	if *r.PrefixHitRate < 0.9 {
		t.Errorf("a second pass has a prefix hit rate of %.4f", *r.PrefixHitRate)
	}

	other := []string{"--data", filepath.Join(dir, "other"), "--dram", "64MiB", "--nvme", "none", "--object", url}
	serve(t, append(other, "--cluster", "west")...).kill()
	for name, c := range map[string]struct {
		url, cluster string
		says         []string
	}{
		"another cluster": {url, "east", []string{`"east"`, `"west"`}},
		"no bucket":       {strings.Replace(url, "kvtier/", "nobody/", 1), "west", []string{"nobody"}},
		"bad endpoint":    {"s3://kvtier/p?path_style=true&region=us-east-1&endpoint=http://127.0.0.1:1", "west", []string{"endpoint"}},
		"not a bucket":    {"ftp://kvtier/p", "west", []string{"--object", "s3://"}},
	} {
		args := append([]string{"serve", "--listen", "127.0.0.1:0"}, other[:6]...)
		r := command(t, nil, append(args, "--data", filepath.Join(dir, fmt.Sprint(len(name))), "--object", c.url, "--cluster", c.cluster)...)
		if r.code == 0 {
			t.Errorf("%s: it serves", name)
		}
		for _, s := range c.says {
			if !strings.Contains(r.stderr, s) {
				t.Errorf("%s: the error does not say %s:\n%s", name, s, r.stderr)
			}
		}
	}
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong")
	r2 := command(t, nil, onLoopback("--data", filepath.Join(dir, "fresh"), "--dram", "64MiB", "--nvme", "none", "--object", url, "--cluster", "west")...)
	if r2.code == 0 || !strings.Contains(r2.stderr, "AWS_") {
		t.Errorf("wrong credentials: exit code %d:\n%s", r2.code, r2.stderr)
	}
}
