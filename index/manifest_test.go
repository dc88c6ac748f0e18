package index

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index/block"
)

func sampleManifest() *Manifest {
	dropped := sampleSpace()
	dropped.Desc.Name = "gone"
	dropped.ID, dropped.Epoch = 5, 9
	s := sampleSlab()
	s.Number, s.Unswept = 1, true
	return &Manifest{
		Store: [16]byte{0xfe, 15: 0xef}, Boot: 9, NextSpace: 8,
		Spaces: []ManifestSpace{{Namespace: dropped, Dropped: true}, {Namespace: sampleSpace()}},
		Slabs:  []SlabRecord{s, sampleSlab()}, Tombstones: true,
	}
}

// manifestV1 is what a program that knew no more wrote for sampleManifest.
func manifestV1(t testing.TB) []byte {
	t.Helper()
	dump, err := os.ReadFile(filepath.Join("testdata", "manifest_v1.golden"))
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	for line := range strings.Lines(string(dump)) {
		if len(line) > 60 {
			part, err := hex.DecodeString(strings.ReplaceAll(line[8:60], " ", ""))
			if err != nil {
				t.Fatal(err)
			}
			b = append(b, part...)
		}
	}
	return b
}

// TestManifestV1 reads version 1, and nothing in it that it does not have.
func TestManifestV1(t *testing.T) {
	want, old := sampleManifest(), manifestV1(t)
	want.Tombstones, want.Slabs[0].Unswept = false, false
	var m Manifest
	if err := m.decode(old); err != nil || !reflect.DeepEqual(&m, want) {
		t.Errorf("got %+v, %v, want %+v", m, err, want)
	}
	for _, change := range []func(m *Manifest){func(m *Manifest) { m.Tombstones = true }, func(m *Manifest) { m.Slabs[1].Unswept = true }} {
		m := *want
		m.Slabs = append([]SlabRecord(nil), want.Slabs...)
		change(&m)
		b := m.encode()
		b[8] = 1
		end := len(b) - checksumBytes
		binary.LittleEndian.PutUint64(b[end:], xxhash.Sum64(b[:end]))
		if err := m.decode(b); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("version 1 with what it does not have: %v", err)
		}
	}
}

// TestManifestGolden holds the bytes of the file.
func TestManifestGolden(t *testing.T) {
	got := hex.Dump(sampleManifest().encode())
	path := filepath.Join("testdata", "manifest.golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("manifest is\n%s\nwant\n%s", got, want)
	}
	for _, m := range []*Manifest{sampleManifest(), {}} {
		var back Manifest
		if err := back.decode(m.encode()); err != nil || !reflect.DeepEqual(&back, m) {
			t.Errorf("got %+v, %v, want %+v", back, err, m)
		}
	}
}

// TestManifestDamage flips each bit and cuts each length.
func TestManifestDamage(t *testing.T) {
	withoutRace(t)
	good := sampleManifest().encode()
	for bit := range 8 * len(good) {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		want := block.ErrCorrupt
		if at := bit / 8; at >= 8 && at < 12 {
			want = ErrVersion
		}
		if err := new(Manifest).decode(b); !errors.Is(err, want) {
			t.Fatalf("bit %d flipped: %v, want %v", bit, err, want)
		}
	}
	for n := range good {
		if err := new(Manifest).decode(good[:n]); !errors.Is(err, block.ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
	// Out of order, and twice, with a checksum that fits.
	for name, m := range map[string]*Manifest{
		"order": {Spaces: []ManifestSpace{{Namespace: block.Namespace{ID: 2}}, {Namespace: block.Namespace{ID: 1}}}},
		"twice": {Slabs: []SlabRecord{{Number: 1}, {Number: 1}}},
	} {
		if err := new(Manifest).decode(m.encode()); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzManifest decodes anything, once as it is and once with a checksum that
// fits; what is accepted must come out of the encoder again.
func FuzzManifest(f *testing.F) {
	for _, m := range []*Manifest{sampleManifest(), {}} {
		b := m.encode()
		f.Add(b)
		f.Add(b[:len(b)-checksumBytes])
	}
	f.Add(manifestV1(f))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, b := range [][]byte{data, binary.LittleEndian.AppendUint64(bytes.Clone(data), xxhash.Sum64(data))} {
			var m Manifest
			if err := m.decode(b); err != nil {
				if !errors.Is(err, ErrVersion) && !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("unclassified: %v", err)
				}
				continue
			}
			again := m.encode()
			if b[8] == 1 { // it is written anew as the version that this program writes
				var back Manifest
				if err := back.decode(again); err != nil || !reflect.DeepEqual(back, m) {
					t.Errorf("%+v comes back as %+v, %v", m, back, err)
				}
			} else if !bytes.Equal(again, b) {
				t.Errorf("%x is accepted, but encoded as %x", b, again)
			}
		}
	})
}

func TestReadManifestRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m")
	if _, err := ReadManifest(path); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("absent: %v", err)
	}
	newer := sampleManifest().encode()
	newer[8]++
	for want, data := range map[error][]byte{ErrVersion: newer, block.ErrCorrupt: newer[:8]} {
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadManifest(path); !errors.Is(err, want) || !strings.Contains(err.Error(), path) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	if _, err := ReadManifest(filepath.Dir(path)); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("a directory: %v", err)
	}
}

// TestManifestFollowsCatalog looks at what a crash leaves of the manifest after
// each call that changes what it mirrors.
func TestManifestFollowsCatalog(t *testing.T) {
	disk := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	want := &Manifest{Store: c.StoreID(), Boot: 1, NextSpace: 1}
	check := func(after string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", after, err)
		}
		got, err := readManifest(disk.CrashClone(vfs.CrashCloneCfg{}), ManifestPath("cat"))
		if err != nil || !reflect.DeepEqual(&got, want) {
			t.Errorf("after %s: %+v, %v, want %+v", after, got, err, want)
		}
	}
	check("opening", nil)
	n := sampleSpace()
	n.Epoch = 0
	id, err := c.NewNamespaceID()
	n.ID, want.NextSpace = id, id+1
	check("an id", err)
	want.Spaces = []ManifestSpace{{Namespace: n}}
	check("a namespace", c.PutNamespace(n))
	want.Slabs = []SlabRecord{sampleSlab()}
	check("a slab", c.PutSlab(sampleSlab()))
	n.Epoch++
	want.Spaces = []ManifestSpace{{Namespace: n}}
	check("clear", c.ClearNamespace(n))
	n.Epoch++
	want.Spaces = []ManifestSpace{{Namespace: n, Dropped: true}}
	check("drop", c.DropNamespace(n.ID))
	closeCatalog(t, c)

	// One that is older, as a crash leaves it, or gone, is written anew.
	if err := disk.Remove(ManifestPath("cat")); err != nil {
		t.Fatal(err)
	}
	ro := openCatalog(t, "cat", &CatalogOptions{FS: disk, ReadOnly: true})
	if _, err := readManifest(disk, ManifestPath("cat")); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("a read-only opening wrote the manifest: %v", err)
	}
	closeCatalog(t, ro)
	openCatalog(t, "cat", &CatalogOptions{FS: disk})
	want.Boot = 2
	check("the next opening", nil)
}

// TestManifestFails lets the manifest not be written: the change is no success,
// nothing of the old manifest is lost, and nothing is recorded that it does not
// know how to read until it is written.
func TestManifestFails(t *testing.T) {
	var full atomic.Bool
	mem := vfs.NewMem()
	disk := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if full.Load() && strings.Contains(op.Path, ".manifest") && op.Kind == errorfs.OpFileWrite {
			return syscall.ENOSPC
		}
		return nil
	}))
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	n := putSpace(t, c, "ns")
	before, err := readManifest(mem, ManifestPath("cat"))
	if err != nil {
		t.Fatal(err)
	}
	full.Store(true)
	cleared := n
	cleared.Epoch++
	_, id := c.NewNamespaceID()
	r := sampleRecord(16, false)
	b := c.NewBatch()
	b.Put(&r)
	if err := c.Commit(b, true); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("record behind a manifest that is old: %v", err)
	}
	for name, err := range map[string]error{
		"id": id, "put": c.PutNamespace(n), "clear": c.ClearNamespace(cleared), "slab": c.PutSlab(sampleSlab()), "drop": c.DropNamespace(n.ID),
	} {
		if !errors.Is(err, block.ErrNoSpace) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if after, err := readManifest(mem, ManifestPath("cat")); err != nil || !reflect.DeepEqual(after, before) {
		t.Errorf("manifest %+v, %v, want the one before", after, err)
	}
	if _, err := mem.Stat(ManifestPath("cat") + ".tmp"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what was not written is left: %v", err)
	}
	if err := c.Reopen(); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("reopen: %v", err)
	}
	closeCatalog(t, c)
	if _, err := OpenCatalog("cat", &CatalogOptions{FS: disk}); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("open: %v", err)
	}
	full.Store(false)
	c = openCatalog(t, "cat", &CatalogOptions{FS: disk})
	again, err := c.NewNamespaceID()
	if err != nil || again != n.ID+2 {
		t.Errorf("id %d, %v; the one before the failure was %d", again, err, n.ID)
	}
}
