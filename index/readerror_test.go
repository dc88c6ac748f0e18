package index

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index/block"
)

// brokenReads is a disk some of whose reads fail: those from the n-th on, or only that
// one.
type brokenReads struct {
	vfs.FS
	count atomic.Int64
	from  atomic.Int64 // 0: none fails
	once  bool
}

func newBrokenReads(fs vfs.FS) *brokenReads {
	d := &brokenReads{}
	d.FS = errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind != errorfs.OpFileRead && op.Kind != errorfs.OpFileReadAt {
			return nil
		}
		n, from := d.count.Add(1), d.from.Load()
		if from > 0 && (n == from || n > from && !d.once) {
			return syscall.EIO
		}
		return nil
	}))
	return d
}

// written is a disk with a catalog that has tables and, behind them, a log. A crash has
// left it.
func written(t *testing.T) (vfs.FS, map[block.Key]Record) {
	t.Helper()
	mem := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: mem})
	for round := range uint64(4) {
		for i := range uint64(100) {
			commit(t, c, true, recordOf(1, round*50+i))
		}
		if round < 3 {
			if err := c.now().db.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return mem.CrashClone(vfs.CrashCloneCfg{}), scan(t, c)
}

func wantAll(t *testing.T, what string, got, want map[block.Key]Record) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d records, want %d", what, len(got), len(want))
	}
	for k, r := range want {
		if got[k] != r {
			t.Errorf("%s: record %v: %+v, want %+v", what, k, got[k], r)
			return
		}
	}
}

// TestReadErrors opens and reads a catalog on a disk whose reads fail somewhere. It is an
// error, or all is there: never a catalog that lacks records. When the disk is well again,
// so is the catalog.
func TestReadErrors(t *testing.T) {
	withoutRace(t)
	left, want := written(t)
	opened, failed := 0, 0
	for _, once := range []bool{true, false} {
		for from, more := int64(1), true; more; from += 1 + from/16 {
			what := fmt.Sprintf("read %d fails, once %v", from, once)
			disk := vfs.NewMem()
			if ok, err := vfs.Clone(left, disk, "", ""); err != nil || !ok {
				t.Fatalf("copy the disk: %v", err)
			}
			d := newBrokenReads(disk)
			d.once = once
			d.from.Store(from)
			c, err := OpenCatalog("cat", &CatalogOptions{FS: d})
			if err != nil {
				failed++
			} else {
				opened++
				got := make(map[block.Key]Record)
				if err := c.Scan(func(r *Record) error { got[r.Key] = *r; return nil }); err == nil {
					wantAll(t, what, got, want)
				}
				d.from.Store(0)
				wantAll(t, what+", well again", scan(t, c), want)
				commit(t, c, true, recordOf(2, 1))
				closeCatalog(t, c)
			}
			more = d.count.Load() >= from
			again := openCatalog(t, "cat", &CatalogOptions{FS: disk})
			all := scan(t, again)
			delete(all, recordOf(2, 1).Key)
			wantAll(t, what+", opened again", all, want)
			closeCatalog(t, again)
		}
	}
	t.Logf("%d times opened, %d times refused", opened, failed)
	if opened == 0 || failed == 0 {
		t.Error("the reads that failed were all of one kind")
	}
}

// TestReadErrorsBelowTables lets a compaction and gets fail to read for a while.
func TestReadErrorsBelowTables(t *testing.T) {
	left, want := written(t)
	d := newBrokenReads(left)
	c := openCatalog(t, "cat", &CatalogOptions{FS: d})
	d.from.Store(1)
	if err := c.now().db.Compact(t.Context(), []byte{0}, []byte{0xff}, false); err == nil {
		t.Error("a compaction does not notice that it cannot read")
	}
	for k, r := range want {
		if got, ok, err := c.Get(k, 32); err == nil && (!ok || got != r) {
			t.Fatalf("get %v while reads fail: there %v", k, ok)
		}
	}
	commit(t, c, true, recordOf(2, 1))
	d.from.Store(0)
	all := scan(t, c)
	delete(all, recordOf(2, 1).Key)
	wantAll(t, "well again", all, want)
	if err := c.now().db.Compact(t.Context(), []byte{0}, []byte{0xff}, false); err != nil {
		t.Errorf("a compaction when the disk is well again: %v", err)
	}
	closeCatalog(t, c)
}

// TestMetricsBesideStuckRead: who asks what the catalog does does not wait for a disk, also
// while the catalog is to be closed, which waits for a read.
func TestMetricsBesideStuckRead(t *testing.T) {
	left, want := written(t)
	var stuck atomic.Bool
	reads, resume := make(chan struct{}, 100), make(chan struct{})
	c := openCatalog(t, "cat", &CatalogOptions{CacheBytes: 1, FS: errorfs.Wrap(left, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if stuck.Load() && (op.Kind == errorfs.OpFileRead || op.Kind == errorfs.OpFileReadAt) {
			reads <- struct{}{}
			<-resume
		}
		return nil
	}))})
	stuck.Store(true)
	ended, closed := make(chan error, 1), make(chan error, 1)
	go func() {
		for k := range want {
			_, _, err := c.Get(k, 32)
			ended <- err
			return
		}
	}()
	<-reads
	go func() { closed <- c.Close() }()
	for c.gate.TryRLock() { // until it waits for the read
		c.gate.RUnlock()
		runtime.Gosched()
	}
	if m := c.Metrics(); m.Failed {
		t.Errorf("metrics: %+v", m)
	}
	stuck.Store(false)
	close(resume)
	if err := errors.Join(<-ended, <-closed); err != nil {
		t.Error(err)
	}
}
