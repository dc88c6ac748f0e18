package main

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"

	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer"
)

// aSnapshot has every part filled in.
func aSnapshot() storeSnapshot {
	return storeSnapshot{
		stats:   aStats(),
		catalog: index.CatalogMetrics{DiskBytes: 1 << 20, WALSyncs: 3, WALSyncTime: 1500 * time.Millisecond},
		ready:   true,
	}
}

func aStats() block.Stats {
	return block.Stats{
		Uptime:     90 * time.Second,
		Namespaces: 2,
		Blocks:     30,
		Tiers: []block.TierStats{
			{
				Tier: block.G2, Capacity: 1 << 30, Used: 1 << 20, Blocks: 10, Hits: 7, Evictions: 3, Policy: "arc",
				Curves:  []block.Curve{{Policy: "arc", Size: 0.5, Asked: 8, Hits: 2}, {Asked: 8, Hits: 6}, {Policy: "gdsf", Size: 2}},
				Devices: []block.DeviceStats{{Path: "memory", Bytes: 1 << 30, PageBytes: 2 << 20, Locked: 1 << 29, State: "healthy"}},
			},
			{
				Tier: block.G3, Capacity: 4 << 30, BytesIn: 99, Policy: "lru-leaf", Behind: 3 * time.Second, FellBehind: 1,
				Admission: &block.AdmissionStats{Budgets: []block.BudgetStats{{WriteBudget: block.WriteBudget{Tier: block.G3, Bytes: 1 << 40}, AvailableBytes: -4096}}, Admitted: 7, Rejected: map[string]int64{"used_once": 5, "tail": 0}},
				Devices: []block.DeviceStats{
					{
						Path: "/a", ID: "0a", Bytes: 2 << 30, FreeOnFS: 5, Engine: "io_uring", State: "healthy",
						Wear: &block.DeviceWear{Device: "nvme0n1", UsedPercent: 12, SparePercent: 99, SpareThreshold: 10, CriticalWarning: 1<<1 | 1<<3, WrittenBytes: 3 << 40},
					},
					{
						Path: "/b", ID: "0b", Bytes: 2 << 30, Engine: "io_uring", State: block.Down, Reason: "write: input/output error",
						Since: time.Unix(1_700_000_000, 0), Errors: 12,
					},
				},
			},
			{
				Tier: block.G4, Blocks: 12,
				Uploads: &block.UploadStats{Blocks: 3, Bytes: 12288, HeldBack: 5, Dropped: 1, Through: 2, Failed: 4},
				Devices: []block.DeviceStats{{Path: "s3://b/p", State: "healthy"}},
			},
		},
		Misses:    map[string]int64{"absent": 5, "corrupt": 1},
		Removed:   map[string]int64{"evicted": 4},
		Conflicts: 1, Corrupt: 1, Leases: 2, Reservations: 3, Watchers: 1, EventsLost: 8, TableBytes: 1 << 20,
		Prefetch:    block.PrefetchStats{Queued: 9, Done: 2, Dropped: 1, Displaced: 4, Stale: 2, Cancelled: 1, Useful: 1},
		Incarnation: 0x0a0b0c0d0e0f1011, EventSeq: 99, Pinned: 2, PinnedBytes: 4096,
		Scrub: block.ScrubStatus{
			State: block.ScrubDone, Started: time.Unix(1_700_000_000, 0), Ended: time.Unix(1_700_000_060, 0), Done: 4 << 30, Total: 4 << 30,
			Blocks: 20, Damaged: 3, Repaired: 2, Dropped: 1, Stale: 4,
		},
		ByNamespace: []block.NamespaceStats{{Name: "llama", Asked: 100, Matched: 60, Prefill: &block.PrefillCost{Prefill: block.Prefill{Token: 33000}, Learned: true, Reports: 12}, Misses: map[string]int64{"never_stored": 7, "evicted": 3, "pending": 0}}},
		Catalog:     block.CatalogStats{State: block.Degraded, Reason: "write: no space left on device", Since: time.Unix(1_700_000_000, 0), Errors: 2},
	}
}

func someXferStats() xfer.Stats {
	return xfer.Stats{Requests: 5, InFlight: 2, PostWaits: 1, Backends: []xfer.BackendStats{
		{Name: "mem", Regions: 1, RegisteredBytes: 1 << 30, Transfers: 10, Descs: 20, BytesRead: 7, BytesWritten: 8},
		{Name: "posix", Regions: 2, Transfers: 3, Failed: 2, Canceled: 1},
	}}
}

func somePosixStats() posix.Stats {
	return posix.Stats{Engine: "goroutines", Note: "no io_uring", Reads: 1, Writes: 2, Joined: 3, Waits: 4, RegisteredBytes: 5}
}

// The names and helps pass Prometheus' own linter.
func TestMetricsLint(t *testing.T) {
	reg := newRegistry(newStoreCollector(func() (storeSnapshot, bool) { return aSnapshot(), true }), newXferCollector(someXferStats, somePosixStats))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// The store's metrics are those of the golden file: a name that changes breaks
// dashboards.
func TestMetricsGolden(t *testing.T) {
	reg := newRegistry(newStoreCollector(func() (storeSnapshot, bool) { return aSnapshot(), true }), newXferCollector(someXferStats, somePosixStats))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "kvtier_") || f.GetName() == "kvtier_build_info" {
			continue
		}
		if _, err := expfmt.MetricFamilyToText(&got, f); err != nil {
			t.Fatal(err)
		}
	}
	compareGolden(t, "testdata/metrics.golden", got.String())
}

func compareGolden(t *testing.T, golden, got string) {
	t.Helper()
	if os.Getenv("KVTIER_UPDATE") != "" {
		write(t, golden, got)
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("differs from %s (KVTIER_UPDATE=1 writes it anew):\n%s", golden, got)
	}
}

func TestMonitor(t *testing.T) {
	open := false
	reg := newRegistry(newStoreCollector(func() (storeSnapshot, bool) {
		if !open {
			return storeSnapshot{}, false
		}
		return aSnapshot(), true
	}))
	notYet := errors.New("opening the store")
	ready := func() error {
		if open {
			return nil
		}
		return notYet
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	m := startMonitor(l, monitorHandler(reg, log, ready), log)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	get := func(path string, status int, want string) {
		t.Helper()
		resp, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != status || !strings.Contains(string(body), want) {
			t.Errorf("%s: status %d, want %d with %q in\n%s", path, resp.StatusCode, status, want, body)
		}
	}
	get("/healthz", 200, "ok")
	get("/readyz", 503, notYet.Error())
	get("/metrics", 200, "kvtier_ready 0\n")
	open = true
	get("/readyz", 200, "ready")
	get("/metrics", 200, "kvtier_ready 1\n")
	get("/metrics", 200, `kvtier_tier_hits_total{tier="g2"} 7`)
	get("/metrics", 200, "go_goroutines ")
	get("/debug/pprof/", 200, "goroutine")
	get("/", 404, "")
}
