package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// oddSizes are lengths of blocks of which hardly any is a multiple of a page.
var oddSizes = []int{1, 2, 511, 513, 4095, 4097, 60_000, 65_537, 1<<20 - 1, 1<<20 + 1, 3<<20 + 12345, block.MaxBlockBytes - 1, block.MaxBlockBytes}

// thereAndBack: blocks of odd sizes are put, evicted from DRAM, read, brought
// up again, and read by the next daemon after a kill and after a stop.
func thereAndBack(t *testing.T, args []string, data string) (log string) {
	t.Helper()
	size := func(i int) int { return oddSizes[i%len(oddSizes)] }
	const blocks = 60 // 110 MiB, more than twice the DRAM
	all := numbers(0, blocks)
	tier := block.G3
	for _, stop := range []bool{false, true} {
		d := serve(t, args...)
		c := dial(t, d)
		ns := open(t, c, "odd", block.MaxBlockBytes)
		if tier == block.G3 {
			for _, i := range all {
				put(t, c, ns, i, 1, size(i), tier)
			}
		}
		evictions := tierStats(t, c, block.G2).Evictions
		if tier == block.G3 && evictions == 0 {
			t.Error("nothing was evicted from DRAM")
		}
		if missed := get(timeout(t), t, c, ns, all, size); len(missed) != 0 {
			t.Errorf("blocks are missed: %v", missed)
		}
		for _, i := range all {
			up := false
			err := c.Prefetch(timeout(t), ns, []block.Hash{hashOf(i)}, block.PrefetchOptions{}, func(p block.Progress) error {
				up = p.Reason == block.Hit && p.Tier == block.G2
				return nil
			})
			if err != nil || !up {
				t.Errorf("prefetch of block %d of %d bytes: up %v, error %v", i, size(i), up, err)
			}
		}
		if missed := get(timeout(t), t, c, ns, all, size); len(missed) != 0 {
			t.Errorf("after the prefetch blocks are missed: %v", missed)
		}
		if tier == block.G2 {
			put(t, c, ns, blocks, len(oddSizes), 12_345, block.G2)
		}
		tier = block.G2
		if stop {
			d.stop(0)
		} else {
			d.kill()
		}
		log += d.stderr.String()
	}
	if n := verify(t, data); n != int64(blocks+len(oddSizes)) {
		t.Errorf("%d blocks are committed, want %d", n, blocks+len(oddSizes))
	}
	return log
}

// TestOddSizes is for the file system of the temporary directory.
func TestOddSizes(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	thereAndBack(t, []string{"--data", data, "--dram", "48MiB", "--nvme", filepath.Join(dir, "slab") + "=256MiB"}, data)
}

// TestFileSystems: file systems that refuse direct I/O or preallocation work,
// for the slab and for the data directory. The daemon says what it does without.
func TestFileSystems(t *testing.T) {
	withoutRace(t)
	for _, tt := range []struct {
		name  string
		mount func(t *testing.T) string
		warns []string // what the daemon says
	}{
		// Whether tmpfs has direct I/O, and an overlay of it, depends on the kernel.
		{"tmpfs", func(t *testing.T) string { return mount(t, "-t", "tmpfs", "-o", "size=1g", "tmpfs") }, nil},
		{"overlay", func(t *testing.T) string { return overlay(t, t.TempDir()) }, nil},
		{"overlay on tmpfs", func(t *testing.T) string { return overlay(t, mount(t, "-t", "tmpfs", "-o", "size=1g", "tmpfs")) }, nil},
		{"neither", func(t *testing.T) string { return ext4(t, 640<<20, noExtents, "data=journal") }, []string{"no direct I/O", "no preallocation"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := tt.mount(t)
			data, slab := filepath.Join(dir, "data"), filepath.Join(dir, "slab")
			args := []string{"--data", data, "--dram", "48MiB", "--nvme", slab + "=256MiB"}
			direct := directIO(t, dir)
			log := thereAndBack(t, args, data)
			if says := strings.Contains(log, "no direct I/O"); tt.warns == nil && says == direct {
				t.Errorf("the file system has direct I/O: %v, the daemon says that it has none: %v:\n%s", direct, says, log)
			}
			for _, warns := range tt.warns {
				if !strings.Contains(log, warns) {
					t.Errorf("the daemon does not say %q:\n%s", warns, log)
				}
			}
		})
	}
}

// directIO reports whether the files of a directory can be opened for it. An ext4 that
// journals its data opens them, and has none.
func directIO(t *testing.T, dir string) bool {
	t.Helper()
	path := filepath.Join(dir, "direct")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_DIRECT, 0o600)
	if err == nil {
		err = f.Close()
	} else if !errors.Is(err, syscall.EINVAL) {
		t.Fatal(err)
	}
	if e := os.Remove(path); e != nil && !errors.Is(e, fs.ErrNotExist) {
		t.Fatal(e)
	}
	return err == nil
}

// noExtents are the features of an ext4 without fallocate.
const noExtents = "^extent,^64bit"

// overlay mounts an overlay whose files lie in dir.
func overlay(t *testing.T, dir string) string {
	t.Helper()
	var o []string
	for _, name := range []string{"lower", "upper", "work"} {
		sub := filepath.Join(dir, name)
		if err := os.Mkdir(sub, 0o755); err != nil {
			t.Fatal(err)
		}
		o = append(o, fmt.Sprintf("%sdir=%s", name, sub))
	}
	return mount(t, "-t", "overlay", "-o", strings.Join(o, ","), "overlay")
}
