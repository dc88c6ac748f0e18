package index

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// inFiles changes the files of a catalog whose names have a suffix.
func inFiles(t *testing.T, disk vfs.FS, dir, suffix string, change func(path string, data []byte) []byte) {
	t.Helper()
	names, err := disk.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, name := range names {
		if !strings.HasSuffix(name, suffix) {
			continue
		}
		n++
		path := disk.PathJoin(dir, name)
		f, err := disk.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(f)
		if err := errors.Join(err, f.Close(), disk.Remove(path)); err != nil {
			t.Fatal(err)
		}
		if data = change(path, data); data == nil {
			continue
		}
		if f, err = disk.Create(path, vfs.WriteCategoryUnspecified); err != nil {
			t.Fatal(err)
		}
		_, err = f.Write(data)
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if n == 0 {
		t.Fatalf("no %s in %s", suffix, dir)
	}
}

// TestCatalogLags takes from a catalog what it had on disk, in ways that Pebble
// takes for a log that was not written to the end: it is refused, again and again,
// and neither it nor its manifest is changed, so that a repair can use them.
func TestCatalogLags(t *testing.T) {
	withoutRace(t)
	gone := func(string, []byte) []byte { return nil }
	for _, c := range []struct {
		name   string
		flush  bool // the first namespace is in a table, and in no log
		suffix string
		change func(path string, data []byte) []byte
	}{
		{"log gone", false, ".log", gone},
		{"log gone, tables whole", true, ".log", gone},
		{"log empty", false, ".log", func(string, []byte) []byte { return []byte{} }},
		{"log damaged", false, ".log", func(_ string, data []byte) []byte {
			for i := 200; i < 264; i++ {
				data[i] ^= 0x55
			}
			return data
		}},
		// The manifest knows nothing of this, but the log itself does.
		{"log damaged among blocks", false, ".log", func(_ string, data []byte) []byte {
			for i := 40_000; i < 40_064; i++ {
				data[i] ^= 0x55
			}
			return data
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := &CatalogOptions{FS: vfs.NewMem()}
			cat := openCatalog(t, "cat", o)
			putSpace(t, cat, "first")
			if c.flush {
				if err := cat.now().db.Flush(); err != nil {
					t.Fatal(err)
				}
				closeCatalog(t, cat)
				cat = openCatalog(t, "cat", o)
			}
			n := putSpace(t, cat, "second")
			for i := range uint64(1000) {
				commit(t, cat, true, recordOf(n.ID, i))
			}
			n.Epoch++
			if err := cat.ClearNamespace(n); err != nil {
				t.Fatal(err)
			}
			closeCatalog(t, cat)
			inFiles(t, o.FS, "cat", c.suffix, c.change)
			before, err := readManifest(o.FS, ManifestPath("cat"))
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if _, err := OpenCatalog("cat", o); !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("open: %v", err)
				}
				if _, err := OpenCatalog("cat", &CatalogOptions{FS: o.FS, ReadOnly: true}); err == nil {
					t.Error("opened read-only")
				}
			}
			after, err := readManifest(o.FS, ManifestPath("cat"))
			if err != nil || len(after.Spaces) != len(before.Spaces) || after.Boot != before.Boot {
				t.Errorf("manifest %+v, %v, was %+v", after, err, before)
			}
		})
	}
}

// TestManifestLags: a manifest that a crash kept from being written is older than
// its catalog, one that is damaged or gone says nothing, and neither is held
// against the catalog. Another store's is, and a newer program's is left alone.
func TestManifestLags(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	cat, manifest := filepath.Join(dir, "cat"), ManifestPath(filepath.Join(dir, "cat"))
	read := func() []byte {
		b, err := os.ReadFile(manifest)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	write := func(b []byte) {
		if err := os.WriteFile(manifest, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	reopen := func(what string) {
		t.Helper()
		c, err := OpenCatalog(cat, nil)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		closeCatalog(t, c)
	}
	c := openCatalog(t, cat, nil)
	n := putSpace(t, c, "ns")
	old := read()
	n.Epoch++
	if err := c.ClearNamespace(n); err != nil {
		t.Fatal(err)
	}
	if err := c.DropNamespace(n.ID); err != nil {
		t.Fatal(err)
	}
	closeCatalog(t, c)
	write(old)
	reopen("an older manifest")
	good := read()
	for i := range good {
		if i >= 8 && i < 12 {
			continue // its version
		}
		if i%7 == 0 {
			bad := append([]byte(nil), good...)
			bad[i] ^= 1
			write(bad)
			reopen("a damaged manifest")
			good = read()
		}
	}
	if err := os.Remove(manifest); err != nil {
		t.Fatal(err)
	}
	reopen("no manifest")
	good = read()

	other := openCatalog(t, filepath.Join(dir, "other"), nil)
	theirs, err := os.ReadFile(ManifestPath(filepath.Join(dir, "other")))
	closeCatalog(t, other)
	if err != nil {
		t.Fatal(err)
	}
	newer := append([]byte(nil), good...)
	newer[8]++
	for _, w := range []struct {
		data []byte
		want error
	}{{theirs, block.ErrCorrupt}, {newer, ErrVersion}} {
		write(w.data)
		if _, err := OpenCatalog(cat, nil); !errors.Is(err, w.want) {
			t.Errorf("open: %v, want %v", err, w.want)
		}
		if string(read()) != string(w.data) {
			t.Error("the manifest was replaced")
		}
	}
	write(good)
	reopen("its own manifest")
}
