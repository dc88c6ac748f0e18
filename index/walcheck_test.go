package index

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// TestLogFlips flips a bit in one place of a log after the other. The catalog is
// refused, or has all but the last commit, of which nothing says that it was synced.
func TestLogFlips(t *testing.T) {
	withoutRace(t)
	for _, n := range []uint64{12, 400} { // in one block, and in two
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			disk := vfs.NewCrashableMem()
			c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
			ns := putSpace(t, c, "a")
			for i := range n {
				commit(t, c, true, recordOf(ns.ID, i))
			}
			size := 0
			inFiles(t, disk.CrashClone(vfs.CrashCloneCfg{}), "cat", ".log", func(_ string, data []byte) []byte {
				for i := range data {
					if data[i] != 0 {
						size = max(size, i+1)
					}
				}
				return data
			})
			if blocks := (size + logBlock - 1) / logBlock; blocks > 1 != (n > 12) {
				t.Fatalf("%d commits take %d bytes", n, size)
			}
			refused, step := 0, size/49+1
			for at := 0; at < size; at += step {
				crashed := disk.CrashClone(vfs.CrashCloneCfg{})
				inFiles(t, crashed, "cat", ".log", func(_ string, data []byte) []byte {
					if at < len(data) {
						data[at] ^= 1 << (at % 8)
					}
					return data
				})
				o := &CatalogOptions{FS: crashed}
				after, err := OpenCatalog("cat", o)
				if errors.Is(err, block.ErrCorrupt) {
					refused++
					if _, err := OpenCatalog("cat", &CatalogOptions{FS: crashed, ReadOnly: true}); err == nil {
						t.Errorf("byte %d of %d: opened read-only", at, size)
					}
					continue
				}
				if err != nil {
					t.Fatalf("byte %d of %d: %v", at, size, err)
				}
				if got := len(scan(t, after)); got < int(n)-1 {
					t.Errorf("byte %d of %d: opened with %d of %d records", at, size, got, n)
				}
				closeCatalog(t, after)
			}
			if refused < 35 {
				t.Errorf("%d of about 50 catalogs were refused", refused)
			}
		})
	}
}
