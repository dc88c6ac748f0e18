package index

import (
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// wrongReads is a disk some of whose reads come with a flipped bit, or with half of the
// bytes, as from a file that has been cut: those from the n-th on, or only that one. What is
// on it is right.
type wrongReads struct {
	vfs.FS
	count atomic.Int64
	from  atomic.Int64 // 0: none is wrong
	once  bool
	short bool
	seed  uint64
}

func (d *wrongReads) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &wrongFile{f, d}, nil
}

func (d *wrongReads) Open(name string, o ...vfs.OpenOption) (vfs.File, error) {
	return d.wrap(d.FS.Open(name, o...))
}

func (d *wrongReads) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	return d.wrap(d.FS.OpenReadWrite(name, c, o...))
}

// came counts a read of n bytes and spoils it when it is its turn.
func (d *wrongReads) came(b []byte, n int, err error) (int, error) {
	if n == 0 {
		return n, err
	}
	now, from := d.count.Add(1), d.from.Load()
	switch {
	case from == 0 || now < from || now > from && d.once:
	case d.short:
		return n / 2, io.EOF
	default:
		r := rand.New(rand.NewPCG(d.seed, uint64(now)))
		b[r.IntN(n)] ^= 1 << r.IntN(8)
	}
	return n, err
}

type wrongFile struct {
	vfs.File
	disk *wrongReads
}

func (f *wrongFile) Read(b []byte) (int, error) {
	n, err := f.File.Read(b)
	return f.disk.came(b, n, err)
}

func (f *wrongFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(b, off)
	return f.disk.came(b, n, err)
}

// scanned is what a catalog says it has, if it says so.
func scanned(c *Catalog) (map[block.Key]Record, error) {
	got := make(map[block.Key]Record)
	err := c.Scan(func(r *Record) error { got[r.Key] = *r; return nil })
	return got, err
}

// TestWrongReads opens and reads a catalog on a disk that gives wrong bytes somewhere, or too
// few. It is an error, or all is there: never a catalog that lacks records, nor a record that
// nobody wrote. Nor does what was read wrongly cost anything of what is on the disk.
func TestWrongReads(t *testing.T) {
	withoutRace(t)
	for name, short := range map[string]bool{"Wrong": false, "Short": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spoiledReads(t, short)
		})
	}
}

func spoiledReads(t *testing.T, short bool) {
	left, want := written(t)
	opened, failed, step := 0, 0, int64(32)
	if short {
		step = 8
	}
	for _, once := range []bool{true, false} {
		for from, more := int64(1), true; more; from += 1 + from/step {
			what := fmt.Sprintf("read %d is wrong, once %v", from, once)
			disk := vfs.NewMem()
			if ok, err := vfs.Clone(left, disk, "", ""); err != nil || !ok {
				t.Fatalf("copy the disk: %v", err)
			}
			d := &wrongReads{FS: disk, once: once, short: short, seed: uint64(from)}
			d.from.Store(from)
			c, err := OpenCatalog("cat", &CatalogOptions{FS: d})
			if err != nil {
				failed++
			} else {
				opened++
				if got, err := scanned(c); err == nil {
					wantAll(t, what, got, want)
				}
				// Before more is said: a compaction of wrong bytes must write none.
				_ = c.now().db.Compact(t.Context(), []byte{0}, []byte{0xff}, false)
				d.from.Store(0)
				if got, err := scanned(c); err == nil {
					wantAll(t, what+", well again", got, want)
				}
				_ = c.Close() // Pebble may know by now that it read something wrong
			}
			more = d.count.Load() >= from
			again, err := OpenCatalog("cat", &CatalogOptions{FS: disk})
			if err != nil {
				t.Errorf("%s, opened again: %v", what, err)
				continue
			}
			wantAll(t, what+", opened again", scan(t, again), want)
			closeCatalog(t, again)
		}
	}
	t.Logf("%d times opened, %d times refused", opened, failed)
	if opened == 0 || failed == 0 {
		t.Error("the reads that were wrong were all of one kind")
	}
}
