package tiers_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// diskFault lets a file system fail: from the n-th call of some kinds on, or at
// random, while it is on.
type diskFault struct {
	kinds  []errorfs.OpKind
	errno  syscall.Errno
	from   int     // the n-th call and all after it; 0: by chance
	chance float64 // of each call
	mu     struct {
		sync.Mutex
		on     bool
		calls  int
		struck int
		rand   *rand.Rand
	}
}

func (d *diskFault) MaybeError(op errorfs.Op) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.mu.on || !slices.Contains(d.kinds, op.Kind) {
		return nil
	}
	d.mu.calls++
	if d.from > 0 && d.mu.calls >= d.from || d.from == 0 && d.mu.rand.Float64() < d.chance {
		d.mu.struck++
		return d.errno
	}
	return nil
}

func (d *diskFault) set(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.on = on
}

var (
	diskWrites = []errorfs.OpKind{errorfs.OpFileWrite}
	diskSyncs  = []errorfs.OpKind{errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo}
)

// TestCatalogDiskFaults lets the disk under the catalog fail for a while, under
// durable puts, deletes and gets. Meanwhile what cannot be recorded is refused with
// the reason, and all else goes on. Afterwards what was acknowledged is there, and
// what was deleted is not.
func TestCatalogDiskFaults(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		fault *diskFault
	}{
		{"FirstWrite", &diskFault{kinds: diskWrites, errno: syscall.EIO, from: 1}},
		{"NoSpace", &diskFault{kinds: diskWrites, errno: syscall.ENOSPC, from: 20}},
		{"FirstSync", &diskFault{kinds: diskSyncs, errno: syscall.EIO, from: 1}},
		{"LaterSync", &diskFault{kinds: diskSyncs, errno: syscall.EIO, from: 12}},
		{"RandomWrites", &diskFault{kinds: diskWrites, errno: syscall.ENOSPC, chance: 0.1}},
		{"RandomSyncs", &diskFault{kinds: diskSyncs, errno: syscall.EIO, chance: 0.2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.fault.mu.rand = rand.New(rand.NewPCG(1, 0))
			catalogDiskFault(t, c.fault)
		})
	}
}

func catalogDiskFault(t *testing.T, fault *diskFault) {
	const size, before, workers = 3000, 10, 3
	dir := t.TempDir()
	o := tiers.Options{
		Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t), Slabs: slabIn(t, 64<<20),
		Logger: slog.New(slog.DiscardHandler),
	}
	o.Catalog = &index.CatalogOptions{FS: errorfs.Wrap(crashableDir(t, o.Dir), errorfs.InjectorFunc(fault.MaybeError))}
	s, ns := openOn(t, o)
	for i := range before {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	fault.set(true)
	acked, deleted := make([]map[int]bool, workers), make([]map[int]bool, workers)
	var wg sync.WaitGroup
	for w := range workers {
		acked[w], deleted[w] = map[int]bool{}, map[int]bool{}
		wg.Go(func() {
			failed := 0
			for i := 100 * (w + 1); i < 100*(w+2) && failed < 3; i++ {
				if err := put(s, ns, i, payload(i, size), block.PutOptions{Durable: block.G3}); err == nil {
					acked[w][i] = true
				} else if failed++; !refused(err) {
					t.Errorf("durable put: %v", err)
				}
				if i%3 == 0 && acked[w][i] {
					delete(acked[w], i) // gone, or by a delete that failed as good as gone
					if _, err := s.Delete(within(t, 10*time.Second), ns.ID, hashLen, pack(hashOf(i))); err == nil {
						deleted[w][i] = true
					} else if failed++; !refused(err) {
						t.Errorf("delete: %v", err)
					}
				}
				wantHit(t, s, ns, i%before, size)
				mustPut(t, s, ns, 1000+i, size, block.PutOptions{})
				wantHit(t, s, ns, 1000+i, size)
			}
		})
	}
	wg.Wait()
	if fault.mu.struck == 0 {
		t.Error("the disk did not fail")
	}
	if fault.from > 0 {
		if err := put(s, ns, 900, payload(900, size), block.PutOptions{Durable: block.G3}); !refused(err) {
			t.Errorf("durable put while the disk fails: %v", err)
		}
	}
	fault.set(false)
	judge := func(when string) {
		t.Helper()
		for i := range before {
			wantHit(t, s, ns, i, size)
		}
		for w := range workers {
			for i := range acked[w] {
				if where := tiersOf(t, s, ns, i); where != "g3" && where != "g2g3" {
					t.Errorf("%s: block %d was acknowledged as durable and is in %q", when, i, where)
				} else {
					wantHit(t, s, ns, i, size)
				}
			}
			for i := range deleted[w] {
				wantMiss(t, s, ns, i, block.MissAbsent)
			}
		}
	}
	eventually(t, "a durable put succeeds again", func() bool {
		return put(s, ns, 901, payload(901, size), block.PutOptions{Durable: block.G3}) == nil
	})
	judge("after the fault")
	_ = s.Close() // a catalog that has failed says so once more
	s, ns = openOn(t, o)
	judge("after a restart")
	mustPut(t, s, ns, 902, size, block.PutOptions{Durable: block.G3})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, ns = openOn(t, o)
	judge("after another restart")
	wantHit(t, s, ns, 902, size)
	wantEmpty(t, s)
}

// openOn opens a store and its namespace. How the store closes is the caller's to
// judge.
func openOn(t *testing.T, o tiers.Options) (*tiers.Store, block.Namespace) {
	t.Helper()
	s, err := tiers.Open(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, space(t, s, "a", 1<<20)
}

// refused says whether a call failed because nothing can be recorded.
func refused(err error) bool {
	return errors.Is(err, block.ErrNoSpace) || errors.Is(err, block.ErrUnavailable)
}

// TestCrashableDir: what is not synced is lost with a crash, and the directory stays.
func TestCrashableDir(t *testing.T) {
	fs := crashableDir(t, "/a/b")
	write := func(name string, sync bool) {
		f, err := fs.Create("/a/b/"+name, vfs.WriteCategoryUnspecified)
		if err == nil {
			_, err = f.Write([]byte("x"))
		}
		if err == nil && sync {
			err = f.Sync()
		}
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	write("kept", true)
	d, err := fs.OpenDir("/a/b")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		t.Fatal(err)
	}
	write("lost", false)
	names, err := fs.CrashClone(vfs.CrashCloneCfg{}).List("/a/b")
	if err != nil || !slices.Equal(names, []string{"kept"}) {
		t.Errorf("after a crash: %q, %v", names, err)
	}
}
