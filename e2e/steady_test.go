package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// footprint is what a daemon holds of the machine.
type footprint struct {
	rss         int64 // bytes
	heap        int64 // bytes in use after a collection
	goroutines  int64
	descriptors int64
}

func (f footprint) String() string {
	return fmt.Sprintf("%d MiB resident, %d MiB heap, %d goroutines, %d descriptors", f.rss>>20, f.heap>>20, f.goroutines, f.descriptors)
}

var (
	metricsAddr    = regexp.MustCompile(`msg="metrics listen" address=(\S+)`)
	goroutineCount = regexp.MustCompile(`goroutine profile: total (\d+)`)
	heapInUse      = regexp.MustCompile(`# HeapInuse = (\d+)`)
)

// number is what a page of the daemon's monitor says.
func number(t *testing.T, d *daemon, path string, re *regexp.Regexp) int64 {
	t.Helper()
	m := metricsAddr.FindStringSubmatch(d.stderr.String())
	if m == nil {
		t.Fatalf("the daemon does not say where its metrics are:\n%s", d.stderr)
	}
	req, err := http.NewRequestWithContext(timeout(t), http.MethodGet, "http://"+m[1]+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	found := re.FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s says no %v: %.500s", path, re, text)
	}
	n, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// measure asks the kernel and the daemon itself. The heap is collected first.
func measure(t *testing.T, d *daemon) (f footprint) {
	t.Helper()
	f.heap = number(t, d, "/debug/pprof/heap?gc=1&debug=1", heapInUse)
	f.goroutines = number(t, d, "/debug/pprof/goroutine?debug=1", goroutineCount)
	proc := filepath.Join("/proc", strconv.Itoa(d.cmd.Process.Pid))
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	f.descriptors = int64(len(fds))
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseInt(strings.Fields(kib)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			f.rss = n << 10
		}
	}
	return f
}

// flat compares two footprints under the same load. The slack is for what a
// moment holds: buffers of calls under way, tables that Pebble compacts, and
// memory that was freed and that the runtime gives back later.
func flat(t *testing.T, before, after footprint) {
	t.Helper()
	rss, heap := int64(64<<20), int64(32<<20)
	if raceEnabled {
		rss, heap = 8*rss, 4*heap // its shadow memory grows with the addresses used
	}
	if after.rss > before.rss+before.rss/5+rss || after.heap > before.heap+before.heap/5+heap ||
		after.goroutines > before.goroutines+20 || after.descriptors > before.descriptors+20 {
		t.Errorf("it grows: %v, then %v", before, after)
	}
}

// TestSteady: under traffic of all kinds that evicts all the time, what the
// daemon holds does not grow.
func TestSteady(t *testing.T) {
	length := 16 * time.Second
	switch {
	case soak:
		length = 30 * time.Minute
	case raceEnabled, testing.Short():
		length = 6 * time.Second
	}
	dir := t.TempDir()
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=128MiB", "--metrics", "127.0.0.1:0")
	h := newHistory(8000, true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var clients sync.WaitGroup
	var ending atomic.Bool
	for i := range 4 {
		c := dial(t, d)
		w := &traffic{t: t, c: c, ns: open(t, c, "steady", largestBlock), h: h, r: rand.New(rand.NewPCG(uint64(i), 0)), ending: &ending}
		clients.Go(func() { w.run(ctx) })
	}
	// The first half fills the tiers, the pools and the table.
	time.Sleep(length / 2)
	middle := measure(t, d)
	c, _ := h.totals()
	time.Sleep(length / 2)
	end := measure(t, d)
	flat(t, middle, end)
	last, _ := h.totals()
	cancel()
	clients.Wait()
	if last.durable <= c.durable || last.deleted <= c.deleted || last.read <= c.read {
		t.Errorf("the second half did nothing: %+v, then %+v", c, last)
	}
	t.Attr("did", fmt.Sprintf("%v of traffic, %d durable puts, %d blocks read; in the middle %v, at the end %v",
		length, last.durable, last.read, middle, end))
	d.stop(0, 3) // NVMe may have no room left for blocks of one size or another
}

// TestPrefetchesEnd: thousands of prefetches that are cancelled, or fail for want
// of room or of the block, leave nothing behind.
func TestPrefetchesEnd(t *testing.T) {
	n := 1000
	switch {
	case soak:
		n = 10_000
	case raceEnabled, testing.Short():
		n = 200
	}
	dir := t.TempDir()
	const blocks = 2000
	args := []string{"--data", filepath.Join(dir, "data"), "--dram", "32MiB", "--nvme", filepath.Join(dir, "slab") + "=512MiB", "--metrics", "127.0.0.1:0"}
	d := serve(t, args...)
	c := dial(t, d)
	ns := open(t, c, "prefetch", stopBytes)
	put(t, c, ns, 0, blocks, stopBytes, block.G3)

	var sent atomic.Int64
	batch := func(n int) {
		var workers sync.WaitGroup
		for w := range 4 {
			r := rand.New(rand.NewPCG(uint64(w), uint64(n)))
			workers.Go(func() {
				for range n / 4 {
					sent.Add(1)
					if err := spoiltPrefetch(t.Context(), c, ns, r, blocks, fmt.Sprintf("%d-%d", w, sent.Load())); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		workers.Wait()
		until(t, "no prefetch is left", func() bool {
			s, err := c.Stats(timeout(t))
			if err != nil {
				t.Fatal(err)
			}
			p := s.Prefetch
			return p.Queued == p.Done+p.Displaced+p.Stale+p.Cancelled && s.Reservations == 0 && s.Leases == 0
		})
	}
	batch(n / 4)
	before := measure(t, d)
	batch(n)
	after := measure(t, d)
	flat(t, before, after)
	s, err := c.Stats(timeout(t))
	if err != nil {
		t.Fatal(err)
	}
	if s.Prefetch.Cancelled == 0 {
		t.Errorf("no prefetch was cancelled: %+v", s.Prefetch)
	}
	if missed := get(timeout(t), t, c, ns, numbers(0, blocks), sameSize); len(missed) != 0 {
		t.Errorf("%d blocks are gone", len(missed))
	}
	t.Attr("did", fmt.Sprintf("%d prefetches, %+v; before %v, after %v", sent.Load(), s.Prefetch, before, after))
	d.stop(0)
}

// spoiltPrefetch asks for blocks of which some are not there, and gives up in
// one of several ways.
func spoiltPrefetch(ctx context.Context, c *api.Client, ns block.Namespace, r *rand.Rand, blocks int, id string) error {
	var hashes []block.Hash
	for range 32 {
		hashes = append(hashes, hashOf(r.IntN(blocks+blocks/4)))
	}
	mine, cancel := context.WithCancel(ctx)
	defer cancel()
	stop, way := r.IntN(len(hashes)), r.IntN(4)
	gaveUp := fmt.Errorf("prefetch %s: gave up", id)
	o := block.PrefetchOptions{ID: id, Priority: uint8(r.IntN(3)), Within: time.Duration(r.IntN(2)*r.IntN(50)) * time.Millisecond}
	err := c.Prefetch(mine, ns, hashes, o, func(p block.Progress) error {
		switch {
		case p.Index != stop:
		case way == 0:
			cancel()
		case way == 1:
			return gaveUp
		case way == 2:
			// It may have ended meanwhile.
			_ = c.CancelPrefetch(ctx, id)
		}
		return nil
	})
	if err != nil && way == 3 {
		return err
	}
	return nil
}
