package e2e

import (
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
	if soak {
		objectTier(t, url, conversation, "0", "128MiB", "512MiB")
	} else {
		objectTier(t, url, smallTrace, "300", "64MiB", "96MiB")
	}
	refusesBuckets(t, url, "west", map[string]badBucket{
		"another cluster": {url, "east", []string{`"east"`, `"west"`}},
		"no bucket":       {strings.Replace(url, "kvtier/", "nobody/", 1), "west", []string{"nobody"}},
		"bad endpoint":    {"s3://kvtier/p?path_style=true&region=us-east-1&endpoint=http://127.0.0.1:1", "west", []string{"endpoint"}},
		"not a bucket":    {"ftp://kvtier/p", "west", []string{"--object", "s3://"}},
	})
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong")
	refusesBuckets(t, url, "", map[string]badBucket{"wrong credentials": {url, "west", []string{"AWS_"}}})
}

// azurite is shared by the tests that need it, and stopped by TestMain.
var azurite servers.Azurite

// TestObjectTierAzure is TestObjectTier over Azure's service, with less of the trace.
func TestObjectTierAzure(t *testing.T) {
	withoutRace(t)
	azurite.Start(t)
	azurite.Login(t)
	azurite.Container(t, "kvtier")
	url := "azure://kvtier/some/prefix?endpoint=" + azurite.Endpoint(azurite.Addr())
	if soak {
		objectTier(t, url, conversation, "1500", "128MiB", "512MiB")
	} else {
		objectTier(t, url, smallTrace, "200", "32MiB", "48MiB")
	}
	refusesBuckets(t, url, "west", map[string]badBucket{
		"another cluster": {url, "east", []string{`"east"`, `"west"`}},
		"no container":    {strings.Replace(url, "kvtier/", "nobody/", 1), "west", []string{"nobody"}},
	})
	t.Setenv("AZURE_STORAGE_KEY", "d3Jvbmc=")
	refusesBuckets(t, url, "", map[string]badBucket{"wrong credentials": {url, "west", []string{"AZURE_"}}})
}

// objectTier replays a trace over a bucket, which is the cluster west's then.
func objectTier(t *testing.T, url, trace, limit, dram, nvme string) {
	t.Helper()
	dir := t.TempDir()
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
	second := start(t, nil, "replay", trace, "--server", d.addr, "--block-bytes", "64KiB", "--verify", "--durable", "g3", "--namespace", "second", "--limit", limit, "--json")
	until(t, "uploads", func() bool { return tierStats(t, c, block.G4).BytesIn > st.BytesIn+16<<20 })
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
	d.kill()
}

// badBucket is one that a daemon does not serve, and what it says then.
type badBucket struct {
	url, cluster string
	says         []string
}

// refusesBuckets starts daemons with buckets that none may use. Another daemon of the cluster
// that is named may use url.
func refusesBuckets(t *testing.T, url, cluster string, bad map[string]badBucket) {
	t.Helper()
	dir := t.TempDir()
	with := func(name, url, cluster string) []string {
		return []string{"--data", filepath.Join(dir, name), "--dram", "64MiB", "--nvme", "none", "--object", url, "--cluster", cluster}
	}
	if cluster != "" {
		serve(t, with("other", url, cluster)...).kill()
	}
	for name, b := range bad {
		r := command(t, nil, onLoopback(with(name, b.url, b.cluster)...)...)
		if r.code == 0 {
			t.Errorf("%s: it serves", name)
		}
		for _, s := range b.says {
			if !strings.Contains(r.stderr, s) {
				t.Errorf("%s: the error does not say %s:\n%s", name, s, r.stderr)
			}
		}
	}
}
