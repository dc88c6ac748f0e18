package tiers_test

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/tiers/bucket"
)

// formatFar are the blocks of testdata/format-*/objects.tar.gz, by number: a data directory
// and what lies in its bucket, of each version of the catalog that knows object storage.
// TestMakeFormatObjects makes one.
var formatFar = []struct {
	where string // "": deleted
	pin   bool
}{
	{"g4", false},
	{"g4", false},
	{"", false}, // from G4: the bucket has its tombstone
	{"g4", false},
	{"g3", true},
	{"g3", false},
	{"", false}, // from G3, before the sweep that follows a crash: catalog.tombstones has it
	{"", false},
}

func formatFarPayload(i int) []byte {
	b := formatBlock{Line: fmt.Sprint("far ", i), Length: 2000 + 300*i}
	return b.payload()
}

// formatFarOptions are those of a store in dir/data, with its bucket.
func formatFarOptions(t *testing.T, dir string, b *fakeBucket) tiers.Options {
	return tiers.Options{
		Dir: filepath.Join(dir, "data"), Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "data", "g3.slab"), Bytes: 32 << 20}},
		DRAM: 16 << 20, Agent: newAgent(t), Objects: []bucket.Service{b}, Cluster: "format", SweepAfter: time.Hour,
	}
}

// TestFormatObjects opens data directories with blocks in objects, tombstones and a pin.
func TestFormatObjects(t *testing.T) {
	withoutRace(t)
	archives, err := filepath.Glob("testdata/format-*/objects.tar.gz")
	if err != nil || len(archives) < 2 {
		t.Fatalf("%d archives, %v", len(archives), err)
	}
	for _, a := range archives {
		t.Run(filepath.Base(filepath.Dir(a)), func(t *testing.T) {
			t.Parallel()
			testFormatObjects(t, filepath.Dir(unpack(t, a)))
		})
	}
}

func testFormatObjects(t *testing.T, dir string) {
	b := newFakeBucket()
	err := fs.WalkDir(os.DirFS(filepath.Join(dir, "bucket")), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b.objects[path], err = os.ReadFile(filepath.Join(dir, "bucket", path))
		return err
	})
	if err != nil || len(b.objects) < 4 {
		t.Fatalf("%d objects, %v", len(b.objects), err)
	}
	if i, err := os.Stat(index.TombstonesPath(filepath.Join(dir, "data", "catalog"))); err != nil || i.Size() == 0 {
		t.Fatalf("no tombstones: %v", err)
	}
	o := formatFarOptions(t, dir, b)
	judge := func(s *tiers.Store, repaired bool) {
		t.Helper()
		ns, err := s.Namespace("far")
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range formatFar {
			where := f.where
			if repaired && where == "g4" {
				where = "" // see TestRepairBesideObjects
			}
			if got := tiersOf(t, s, ns, i); got != where {
				t.Errorf("block %d is in %q, want %q", i, got, where)
			}
			got, p, err := get(s, ns, i, block.GetOptions{Verify: true, NoPromote: true})
			switch {
			case err != nil || (p.Reason == block.Hit) != (where != ""):
				t.Errorf("get %d: %v, %v", i, p.Reason, err)
			case p.Reason == block.Hit && string(got) != string(formatFarPayload(i)):
				t.Errorf("get %d: other bytes", i)
			}
		}
		entries, _, err := s.List(t.Context(), ns.ID, "", 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if want := e.Hash == hashOf(4) && !repaired; e.Pinned != want {
				t.Errorf("block %s: pinned %v, want %v", e.Hash, e.Pinned, want)
			}
		}
	}
	for range 2 {
		s := openStore(t, o)
		judge(s, false)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	loseCatalog(t, o.Dir, "lost")
	if rep := repair(t, o, nil); rep.Blocks != 2 {
		t.Errorf("repair: %+v", rep)
	}
	judge(openStore(t, o), true)
}

// TestMakeFormatObjects makes such an archive, for a release that changes the format, in the
// file that KVTIER_FORMAT_OUT names.
func TestMakeFormatObjects(t *testing.T) {
	out := os.Getenv("KVTIER_FORMAT_OUT")
	if out == "" {
		t.Skip("KVTIER_FORMAT_OUT names no file")
	}
	dir, b := t.TempDir(), newFakeBucket()
	o := formatFarOptions(t, dir, b)
	s := openStore(t, o)
	ns := space(t, s, "far", 1<<20)
	var down []int
	for i, f := range formatFar {
		if err := put(s, ns, i, formatFarPayload(i), block.PutOptions{Durable: block.G3}); err != nil {
			t.Fatal(err)
		}
		if f.where == "g4" || i == 2 {
			down = append(down, i)
		}
	}
	sendDown(t, s, ns, down...)
	mustDelete(t, s, ns, 1, 2)
	if each, err := s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(4))); errors.Join(append(each, err)...) != nil {
		t.Fatal(each, err)
	}
	tiers.CloseUnclean(t, s)
	s = openStore(t, o)
	mustDelete(t, s, ns, 2, 6, 7)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for k, object := range b.objects {
		path := filepath.Join(dir, "bucket", filepath.FromSlash(k))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, object, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Create(out)
	if err != nil {
		t.Fatal(err)
	}
	z, _ := gzip.NewWriterLevel(f, gzip.BestCompression)
	w := tar.NewWriter(z)
	if err := errors.Join(w.AddFS(os.DirFS(dir)), w.Close(), z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
}
