package index

import (
	"errors"
	"maps"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index/block"
)

// TestCrash commits batches one after the other, synced or not, and looks at
// what a crash would leave after each: always the state after some batch, and
// never one before the last that was synced.
func TestCrash(t *testing.T) {
	withoutRace(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	fs := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: fs})
	// Each batch writes its number into this record.
	counter := &Record{Key: small(9, 0), HashLen: 8}
	states := []map[block.Key]Record{{}}
	synced := 0
	b := c.NewBatch()
	for i := 1; i <= 200; i++ {
		next := maps.Clone(states[i-1])
		counter.Gen = uint64(i)
		b.Put(counter)
		next[counter.Key] = *counter
		for range r.IntN(50) {
			rec := recordOf(1, r.Uint64N(500))
			rec.Epoch = uint32(i)
			if r.IntN(3) == 0 {
				b.Drop(rec.Key, rec.HashLen)
				delete(next, rec.Key)
			} else {
				b.Put(rec)
				next[rec.Key] = *rec
			}
		}
		states = append(states, next)
		sync := r.IntN(4) == 0
		if err := c.Commit(b, sync); err != nil {
			t.Fatal(err)
		}
		if sync {
			synced = i
		}
		if r.IntN(40) == 0 {
			if err := c.now().db.Flush(); err != nil {
				t.Fatal(err)
			}
			synced = i // a flush puts all before it on disk
		}
		for _, percent := range []int{0, 50, 100}[:1+r.IntN(3)] {
			clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: r})
			after, err := OpenCatalog("cat", &CatalogOptions{FS: clone})
			if err != nil {
				t.Fatalf("open after a crash at batch %d: %v", i, err)
			}
			got := scan(t, after)
			at := int(got[counter.Key].Gen)
			if at < synced || at > i {
				t.Fatalf("crash at batch %d leaves the state after %d; %d was synced", i, at, synced)
			}
			if !maps.Equal(got, states[at]) {
				t.Fatalf("crash at batch %d leaves %d records, which is not the state after %d", i, len(got), at)
			}
			closeCatalog(t, after)
		}
	}
}

// TestCrashAroundNamespaces checks that what the calls on namespaces and slabs
// answered is on disk.
func TestCrashAroundNamespaces(t *testing.T) {
	fs := vfs.NewCrashableMem()
	crash := func() *Catalog {
		t.Helper()
		return openCatalog(t, "cat", &CatalogOptions{FS: fs.CrashClone(vfs.CrashCloneCfg{})})
	}
	c := openCatalog(t, "cat", &CatalogOptions{FS: fs})
	if got := crash(); got.Boot() != c.Boot()+1 || got.StoreID() != c.StoreID() {
		t.Error("the opening was not synced")
	}
	n := sampleSpace()
	var err error
	if n.ID, err = c.NewNamespaceID(); err != nil {
		t.Fatal(err)
	}
	if id, err := crash().NewNamespaceID(); err != nil || id <= n.ID {
		t.Errorf("id %d is given again: %d, %v", n.ID, id, err)
	}
	if err := c.PutNamespace(n); err != nil {
		t.Fatal(err)
	}
	if all, err := crash().Namespaces(); err != nil || len(all) != 1 || all[0] != n {
		t.Errorf("namespaces %+v, %v", all, err)
	}
	if err := c.PutSlab(sampleSlab()); err != nil {
		t.Fatal(err)
	}
	if all, err := crash().Slabs(); err != nil || len(all) != 1 || all[0] != sampleSlab() {
		t.Errorf("slabs %+v, %v", all, err)
	}
	commit(t, c, false, recordOf(n.ID, 1), recordOf(n.ID, 2))
	n.Epoch++
	if err := c.ClearNamespace(n); err != nil {
		t.Fatal(err)
	}
	after := crash()
	if all, err := after.Namespaces(); err != nil || all[0] != n || len(scan(t, after)) != 0 {
		t.Errorf("after clear: %+v, %v", all, err)
	}
	if err := c.DropNamespace(n.ID); err != nil {
		t.Fatal(err)
	}
	after = crash()
	if all, err := after.Namespaces(); err != nil || len(all) != 0 {
		t.Errorf("after drop: %+v, %v", all, err)
	}
	if e, err := after.FirstEpoch(n.Desc); err != nil || e != n.Epoch+1 {
		t.Errorf("first epoch %d, %v", e, err)
	}
}

// TestDiskErrors lets the disk fail at some operation on the write-ahead log,
// while goroutines commit. What was answered without an error must be there
// when the catalog is opened again, and nothing may hang or end the process.
func TestDiskErrors(t *testing.T) {
	for _, c := range []struct {
		name  string
		kinds []errorfs.OpKind
		after []int64 // the operation that fails first
		short bool    // half of what is to be written is on the disk all the same
	}{
		{"write", []errorfs.OpKind{errorfs.OpFileWrite}, []int64{1, 2, 30, 100, 300}, false},
		{"short write", []errorfs.OpKind{errorfs.OpFileWrite}, []int64{1, 2, 30, 100}, true},
		{"sync", []errorfs.OpKind{errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo}, []int64{1, 2, 30, 100}, false},
		{"create", []errorfs.OpKind{errorfs.OpCreate, errorfs.OpReuseForWrite}, []int64{1, 2, 3, 8}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if raceEnabled {
				c.after = c.after[2:3]
			}
			for _, after := range c.after {
				diskError(t, c.kinds, after, c.short)
			}
		})
	}
}

// halfWrites is a disk that has half of what it fails to write.
type halfWrites struct {
	vfs.FS
	fails func(name string) bool // whether the next write of a file does
}

func (d *halfWrites) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.Create(name, c)
	return &halfFile{f, name, d}, err
}

func (d *halfWrites) ReuseForWrite(from, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.ReuseForWrite(from, name, c)
	return &halfFile{f, name, d}, err
}

type halfFile struct {
	vfs.File
	name string
	disk *halfWrites
}

func (f *halfFile) Write(p []byte) (int, error) {
	if !f.disk.fails(f.name) {
		return f.File.Write(p)
	}
	n, err := f.File.Write(p[:len(p)/2])
	return n, errors.Join(syscall.ENOSPC, err)
}

func diskError(t *testing.T, kinds []errorfs.OpKind, after int64, short bool) {
	t.Helper()
	mem := vfs.NewCrashableMem()
	var armed atomic.Bool
	var count atomic.Int64
	var fs vfs.FS = errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if !armed.Load() || !strings.HasSuffix(op.Path, ".log") {
			return nil
		}
		for _, k := range kinds {
			if op.Kind == k && count.Add(1) >= after {
				return syscall.ENOSPC
			}
		}
		return nil
	}))
	if short {
		fs = &halfWrites{FS: mem, fails: func(name string) bool {
			return armed.Load() && strings.HasSuffix(name, ".log") && count.Add(1) >= after
		}}
	}
	c := openCatalog(t, "cat", &CatalogOptions{FS: fs})
	armed.Store(true)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		acked = make(map[block.Key]Record)
	)
	for n := range uint64(6) {
		wg.Go(func() {
			b := c.NewBatch()
			for i := uint64(0); ; i++ { // until the disk fails
				r := recordOf(1, n<<32+i)
				b.Put(r)
				if err := c.Commit(b, true); err != nil {
					if !errors.Is(err, block.ErrNoSpace) {
						t.Errorf("commit: %v", err)
					}
					return
				}
				mu.Lock()
				acked[r.Key] = *r
				mu.Unlock()
				if n == 0 && i%16 == 0 && i < 16*20 {
					// Rotates the log, in the middle of the others' commits. Many more
					// tables than these would make commits wait for compactions.
					if _, err := c.now().db.AsyncFlush(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := c.Err(); !errors.Is(err, block.ErrNoSpace) || !c.Metrics().Failed {
		t.Fatalf("the disk failed, the catalog has not: %v", err)
	}
	b := c.NewBatch()
	b.Put(recordOf(2, 1))
	if err := c.Commit(b, false); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("commit to a failed catalog: %v", err)
	}
	if _, err := c.NewNamespaceID(); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("id from a failed catalog: %v", err)
	}
	some := 0
	for k, want := range acked {
		if got, ok, err := c.Get(k, 32); err != nil || !ok || got != want {
			t.Fatalf("read from a failed catalog: %v, %v", ok, err)
		}
		if some++; some == 100 {
			break
		}
	}
	crashed := mem.CrashClone(vfs.CrashCloneCfg{})
	if err := c.Close(); err != nil {
		t.Logf("close: %v", err)
	}
	// Both without and with what came to the disk while it was closed.
	for _, left := range []vfs.FS{crashed, mem} {
		again := openCatalog(t, "cat", &CatalogOptions{FS: left})
		all := scan(t, again)
		for k, want := range acked {
			if all[k] != want {
				t.Fatalf("record %v was acknowledged and is lost", k)
			}
		}
		closeCatalog(t, again)
	}
}

// TestFullDiskBelowTables lets flushes fail for a while.
func TestFullDiskBelowTables(t *testing.T) {
	var full atomic.Bool
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if full.Load() && strings.HasSuffix(op.Path, ".sst") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpRemove {
			return syscall.ENOSPC
		}
		return nil
	}))
	c := openCatalog(t, "cat", &CatalogOptions{FS: fs})
	commit(t, c, true, recordOf(1, 1))
	full.Store(true)
	if _, err := c.now().db.AsyncFlush(); err != nil {
		t.Fatal(err)
	}
	for c.Err() == nil {
		runtime.Gosched() // the flush runs in the background, and tries again and again
	}
	b := c.NewBatch()
	b.Put(recordOf(1, 2))
	if err := c.Commit(b, true); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("commit on a full disk: %v", err)
	}
	full.Store(false)
	for c.Err() != nil {
		runtime.Gosched()
	}
	commit(t, c, true, recordOf(1, 3))
	if got := len(scan(t, c)); got != 2 {
		t.Errorf("%d records, want 2", got)
	}
}
