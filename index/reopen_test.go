package index

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index/block"
)

// fullDisk is a disk that is full at times: from some operation on, for the kind
// of files that it is told.
type fullDisk struct {
	vfs.FS
	mem   *vfs.MemFS
	full  atomic.Pointer[func(op errorfs.Op) bool] // for which operations, or nil
	after atomic.Int64                             // how many of them still go well
}

func newFullDisk() *fullDisk { return newFullDiskOn(vfs.NewCrashableMem()) }

func newFullDiskOn(mem *vfs.MemFS) *fullDisk {
	d := &fullDisk{mem: mem}
	d.FS = errorfs.Wrap(d.mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if full := d.full.Load(); full != nil && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && (*full)(op) && d.after.Add(-1) < 0 {
			return syscall.ENOSPC
		}
		return nil
	}))
	return d
}

// fill makes the disk full for some operations, after a number of them.
func (d *fullDisk) fill(after int64, hits func(op errorfs.Op) bool) {
	d.after.Store(after)
	d.full.Store(&hits)
}

func (d *fullDisk) free() { d.full.Store(nil) }

func everything(op errorfs.Op) bool { return op.Kind != errorfs.OpRemove }

func isLog(op errorfs.Op) bool   { return strings.HasSuffix(op.Path, ".log") }
func isTable(op errorfs.Op) bool { return strings.HasSuffix(op.Path, ".sst") }

func isDir(op errorfs.Op) bool { return op.Path == "cat" }

func isManifest(op errorfs.Op) bool { return strings.HasPrefix(path.Base(op.Path), "MANIFEST-") }

func ofKind(match func(errorfs.Op) bool, kinds ...errorfs.OpKind) func(errorfs.Op) bool {
	return func(op errorfs.Op) bool {
		for _, k := range kinds {
			if op.Kind == k {
				return match(op)
			}
		}
		return false
	}
}

// TestReopen lets the disk be full at one kind of operation, and checks that the
// catalog fails, stays failed while the disk is full, and is whole afterwards.
func TestReopen(t *testing.T) {
	for _, c := range []struct {
		name string
		hits func(op errorfs.Op) bool
	}{
		{"write of the log", ofKind(isLog, errorfs.OpFileWrite, errorfs.OpFileWriteAt)},
		{"sync of the log", ofKind(isLog, errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo)},
		{"creation of a log", ofKind(isLog, errorfs.OpCreate, errorfs.OpReuseForWrite)},
		{"write of a table", ofKind(isTable, errorfs.OpFileWrite)},
		{"creation of a table", ofKind(isTable, errorfs.OpCreate)},
		{"write of Pebble's manifest", ofKind(isManifest, errorfs.OpFileWrite)},
		{"sync of Pebble's manifest", ofKind(isManifest, errorfs.OpFileSync)},
		{"sync of the directory", ofKind(isDir, errorfs.OpFileSync)},
		{"anything", everything},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := newFullDisk()
			cat := openCatalog(t, "cat", &CatalogOptions{FS: disk})
			store, boot := cat.StoreID(), cat.Boot()
			n := putSpace(t, cat, "ns")
			acked := make(map[block.Key]Record)
			for i := range uint64(100) {
				commit(t, cat, true, recordOf(n.ID, i))
				acked[recordOf(n.ID, i).Key] = *recordOf(n.ID, i)
			}
			old := cat.NewBatch()
			old.Put(recordOf(n.ID, 5000))
			disk.fill(0, c.hits)
			failCatalog(t, cat)
			if err := cat.Err(); !errors.Is(err, block.ErrNoSpace) {
				t.Fatalf("the catalog failed with %v", err)
			}
			if err := cat.Reopen(); !errors.Is(err, block.ErrNoSpace) {
				t.Fatalf("reopened on a full disk: %v", err)
			}
			if err := cat.Err(); !errors.Is(err, block.ErrNoSpace) || !cat.Metrics().Failed {
				t.Errorf("after it could not be opened again: %v", err)
			}
			if _, _, err := cat.Get(recordOf(n.ID, 1).Key, 32); !errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrNoSpace) {
				t.Errorf("get: %v", err)
			}
			if _, err := cat.NewNamespaceID(); !errors.Is(err, block.ErrNoSpace) {
				t.Errorf("namespace id: %v", err)
			}
			disk.free()
			if err := cat.Reopen(); err != nil {
				t.Fatal(err)
			}
			if err := cat.Err(); err != nil || cat.StoreID() != store || cat.Boot() != boot {
				t.Errorf("err %v, store %x, boot %d", err, cat.StoreID(), cat.Boot())
			}
			if err := cat.Commit(old, true); err != nil {
				t.Errorf("batch from before: %v", err)
			}
			acked[recordOf(n.ID, 5000).Key] = *recordOf(n.ID, 5000)
			if all, err := cat.Namespaces(); err != nil || len(all) != 1 || all[0] != n {
				t.Errorf("namespaces %+v, %v", all, err)
			}
			if again := putSpace(t, cat, "again"); again.ID <= n.ID {
				t.Errorf("id %d after %d", again.ID, n.ID)
			}
			has(t, cat, acked)
			after := openCatalog(t, "cat", &CatalogOptions{FS: disk.mem.CrashClone(vfs.CrashCloneCfg{})})
			has(t, after, acked)
			if after.Boot() <= boot+1 || after.StoreID() != store || after.Clean() {
				t.Errorf("after a crash: boot %d, was %d, clean %v", after.Boot(), boot, after.Clean())
			}
			closeCatalog(t, cat)
			closeCatalog(t, openCatalog(t, "cat", &CatalogOptions{FS: disk}))
		})
	}
}

// putSpace makes a namespace.
func putSpace(t *testing.T, c *Catalog, name string) block.Namespace {
	t.Helper()
	n := sampleSpace()
	n.Desc.Name = name
	var err error
	if n.ID, err = c.NewNamespaceID(); err != nil {
		t.Fatal(err)
	}
	if err := c.PutNamespace(n); err != nil {
		t.Fatal(err)
	}
	return n
}

// failCatalog commits and flushes until the catalog has noticed that the disk is
// full.
func failCatalog(t *testing.T, c *Catalog) {
	t.Helper()
	b := c.NewBatch()
	for i := uint64(10000); c.Err() == nil; i++ {
		b.Put(recordOf(1, i))
		if err := c.Commit(b, true); err == nil && i%20 == 0 {
			if _, err := c.now().db.AsyncFlush(); err != nil {
				t.Fatal(err)
			}
		}
		runtime.Gosched()
	}
}

// has checks that the catalog has all of these records.
func has(t *testing.T, c *Catalog, want map[block.Key]Record) {
	t.Helper()
	all := scan(t, c)
	for k, r := range want {
		if all[k] != r {
			t.Fatalf("record %v was acknowledged and is lost", k)
		}
	}
}

// TestReopenAtRandomMoments has a disk that is full at random moments, for random
// files and for a random time, while goroutines commit, read and reopen.
func TestReopenAtRandomMoments(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	disk := newFullDisk()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	acked := make(map[block.Key]Record)
	kinds := []func(errorfs.Op) bool{isLog, isTable, isManifest, everything}
	for round := range uint64(50) {
		disk.fill(r.Int64N(300), kinds[r.IntN(len(kinds))])
		var (
			wg, watch sync.WaitGroup
			mu        sync.Mutex
			stop      atomic.Bool
		)
		for n := range uint64(3) {
			wg.Go(func() {
				b := c.NewBatch()
				for i := range uint64(60) {
					rec := recordOf(1, round<<32|n<<16|i)
					b.Put(rec)
					if c.Commit(b, true) != nil {
						continue
					}
					mu.Lock()
					acked[rec.Key] = *rec
					mu.Unlock()
					// A reopening under way may fail it, and may not change the answer.
					if got, ok, err := c.Get(rec.Key, 32); err == nil && (!ok || got != *rec) {
						t.Errorf("record %d of round %d was acknowledged and is lost", i, round)
					}
				}
			})
		}
		watch.Go(func() {
			for !stop.Load() {
				c.Metrics()
				_, _ = c.NewNamespaceID() // may fail
				runtime.Gosched()
			}
		})
		for range r.IntN(3) {
			flush(c)
			_ = c.Reopen() // may fail
		}
		if r.IntN(3) == 0 {
			flush(c)
		}
		if r.IntN(2) == 0 {
			disk.free()
		}
		wg.Wait()
		disk.free()
		stop.Store(true)
		watch.Wait()
		if err := c.Reopen(); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		rec := recordOf(2, round)
		commit(t, c, true, rec)
		acked[rec.Key] = *rec
		has(t, c, acked)
		if round%5 == 0 {
			after := openCatalog(t, "cat", &CatalogOptions{FS: disk.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: r})})
			has(t, after, acked)
			closeCatalog(t, after)
		}
	}
	t.Logf("%d records were acknowledged", len(acked))
	closeCatalog(t, c)
}

// flush asks for a flush, if the catalog is open.
func flush(c *Catalog) {
	if c.enter() == nil {
		_, _ = c.now().db.AsyncFlush() // fails when the disk is full
		c.leave()
	}
}

// TestOpenOnFullDisk opens what a crash left while there is no room to flush what
// is in the log, or for something else.
func TestOpenOnFullDisk(t *testing.T) {
	for name, hits := range map[string]func(op errorfs.Op) bool{
		"table": isTable, "log": isLog, "manifest": isManifest, "directory": isDir, "anything": everything,
	} {
		disk := newFullDisk()
		c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
		commit(t, c, true, recordOf(1, 1))
		clone := newFullDiskOn(disk.mem.CrashClone(vfs.CrashCloneCfg{}))
		clone.fill(0, hits)
		for range 2 {
			if _, err := OpenCatalog("cat", &CatalogOptions{FS: clone}); !errors.Is(err, block.ErrNoSpace) {
				t.Errorf("%s: %v", name, err)
			}
		}
		clone.free()
		has(t, openCatalog(t, "cat", &CatalogOptions{FS: clone}), map[block.Key]Record{recordOf(1, 1).Key: *recordOf(1, 1)})
	}
}

// TestReopenWhatIsWhole does nothing.
func TestReopenWhatIsWhole(t *testing.T) {
	o := &CatalogOptions{FS: vfs.NewMem()}
	c := openCatalog(t, "cat", o)
	engine := c.now()
	if err := c.Reopen(); err != nil || c.now() != engine {
		t.Errorf("reopened: %v", err)
	}
	closeCatalog(t, c)
	if err := c.Reopen(); !errors.Is(err, block.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	c = openCatalog(t, "cat", &CatalogOptions{FS: o.FS, ReadOnly: true})
	if err := c.Reopen(); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("read-only: %v", err)
	}
}

// TestReopenFindsNothing is about a directory that is gone: a new catalog in its
// place would forget all there was.
func TestReopenFindsNothing(t *testing.T) {
	disk := newFullDisk()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	disk.fill(0, isLog)
	failCatalog(t, c)
	disk.free()
	names, err := disk.mem.List("cat")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := disk.mem.Remove(disk.mem.PathJoin("cat", name)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := c.Reopen(); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("reopened: %v", err)
		}
	}
	if err := c.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// TestStalledCommitsEnd fills the memory tables while no table can be written, so
// that commits wait in Pebble, and looks that Close and Reopen do not.
func TestStalledCommitsEnd(t *testing.T) {
	for _, end := range []string{"close", "reopen"} {
		t.Run(end, func(t *testing.T) {
			disk := newFullDisk()
			c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
			disk.fill(0, isTable)
			// Straight to Pebble, which the catalog does not do once flushes fail.
			e, b := c.now(), c.now().db.NewBatch()
			var wg sync.WaitGroup
			if err := c.enter(); err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				defer c.leave()
				value := make([]byte, 1<<20)
				for i := 0; e.failed.Load() == nil; i++ {
					b.Reset()
					if err := errors.Join(b.Set(fmt.Appendf(nil, "x%d", i), value, nil), e.commit(b, false)); err != nil && e.failed.Load() == nil {
						t.Error(err)
					}
				}
			})
			for !e.stalling.Load() || c.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			if end == "close" {
				if err := c.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			} else if err := c.Reopen(); !errors.Is(err, block.ErrNoSpace) {
				t.Errorf("reopen: %v", err)
			}
			wg.Wait()
		})
	}
}
