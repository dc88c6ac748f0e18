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

var tombStore = [16]byte{0xfe, 15: 0xef}

// stonesOf are tombstones of some keys, all of one generation.
func stonesOf(gen uint64, first, n uint64) (out []Tombstone) {
	for i := range n {
		out = append(out, Tombstone{numbered(3, first+i), gen})
	}
	return out
}

// sampleTombs are the pages of two writes, of which the first has two pages.
func sampleTombs() []byte {
	records := []tombRecord{(&Floor{[16]byte{1, 2, 15: 16}, 1 << 40}).record()}
	for _, s := range stonesOf(2<<40+7, 0, tombPerPage+2) {
		records = append(records, s.record())
	}
	b := encodeTombs(tombStore, 0, records)
	for i := range records {
		records[i].gen++
	}
	return append(b, encodeTombs(tombStore, len(b)/tombPage, records)...)
}

func decodeTombs(b []byte) (*Tombstones, error) {
	t := newTombstones(vfs.NewMem(), "t", tombStore)
	return t, t.decode(b)
}

// TestTombstonesGolden holds the bytes of the file.
func TestTombstonesGolden(t *testing.T) {
	got := hex.Dump(sampleTombs())
	path := filepath.Join("testdata", "tombstones.golden")
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
		t.Errorf("tombstones are\n%s\nwant\n%s", got, want)
	}
	back, err := decodeTombs(sampleTombs())
	if err != nil || len(back.keys) != tombPerPage+2 || len(back.floors) != 1 {
		t.Fatalf("%d keys, %d floors, %v", len(back.keys), len(back.floors), err)
	}
	k, slab := numbered(3, 1), [16]byte{1, 2, 15: 16}
	for gen, want := range map[uint64]bool{0: true, 2<<40 + 8: true, 2<<40 + 9: false} {
		if back.Dead(k, gen) != want || back.Dead(numbered(4, 1), gen) {
			t.Errorf("generation %d: dead %v, want %v", gen, back.Dead(k, gen), want)
		}
	}
	for gen, want := range map[uint64]bool{0: true, 1<<40 + 1: true, 1<<40 + 2: false} {
		if back.Below(slab, gen) != want || back.Below([16]byte{}, gen) {
			t.Errorf("generation %d: below the floor %v, want %v", gen, back.Below(slab, gen), want)
		}
	}
}

// TestTombstonesDamage flips each bit, and cuts and blanks what a loss of power may,
// and what it may not.
func TestTombstonesDamage(t *testing.T) {
	withoutRace(t)
	good := sampleTombs()
	if len(good) != 4*tombPage {
		t.Fatalf("%d pages", len(good)/tombPage)
	}
	for bit := range 8 * len(good) {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := decodeTombs(b); !errors.Is(err, block.ErrCorrupt) {
			t.Fatalf("bit %d flipped: %v", bit, err)
		}
	}
	want, err := decodeTombs(good[:2*tombPage])
	if err != nil {
		t.Fatal(err)
	}
	for n := range good {
		got, err := decodeTombs(good[:n])
		switch {
		case n < 2*tombPage && !errors.Is(err, block.ErrCorrupt):
			t.Fatalf("cut to %d bytes, which were synced: %v", n, err)
		case n >= 2*tombPage && (err != nil || len(got.keys) != len(want.keys)):
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
	// A third write, behind which the second was answered.
	more := append(bytes.Clone(good), encodeTombs(tombStore, 4, []tombRecord{{kind: tombKindKey, gen: 1}, {kind: tombKindKey, gen: 2, ns: 1}})...)
	for blank, torn := range map[int]bool{0: false, 1: false, 2: false, 3: false, 4: true} {
		b := bytes.Clone(more)
		clear(b[blank*tombPage:][:tombPage])
		if _, err := decodeTombs(b); (err == nil) != torn || !torn && !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("page %d is blank: %v", blank, err)
		}
	}
	for blank := 2; blank < 4; blank++ {
		b := bytes.Clone(good)
		clear(b[blank*tombPage:][:tombPage])
		if _, err := decodeTombs(b); err != nil {
			t.Errorf("page %d of the last write is blank: %v", blank, err)
		}
	}
	newer := bytes.Clone(good)
	newer[8]++
	binary.LittleEndian.PutUint64(newer[tombSumAt:], xxhash.Sum64(newer[:tombSumAt]))
	if _, err := decodeTombs(newer); !errors.Is(err, ErrVersion) {
		t.Errorf("a newer version: %v", err)
	}
	other := newTombstones(vfs.NewMem(), "t", [16]byte{1})
	if err := other.decode(good); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("another store's: %v", err)
	}
}

// FuzzTombstones decodes anything, once as it is and once with checksums that fit;
// what is accepted must come back when it is written anew.
func FuzzTombstones(f *testing.F) {
	good := sampleTombs()
	f.Add(good)
	f.Add(good[:3*tombPage])
	f.Add(encodeTombs(tombStore, 0, nil))
	f.Add(encodeTombs(tombStore, 0, []tombRecord{{kind: 3}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		sealed := bytes.Clone(data)
		for p := sealed; len(p) >= tombPage; p = p[tombPage:] {
			binary.LittleEndian.PutUint64(p[tombSumAt:], xxhash.Sum64(p[:tombSumAt]))
		}
		for _, b := range [][]byte{data, sealed} {
			got, err := decodeTombs(b)
			if err != nil {
				if !errors.Is(err, ErrVersion) && !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("unclassified: %v", err)
				}
				continue
			}
			if got.Len() == 0 {
				continue
			}
			if err := got.rewrite(); err != nil {
				t.Fatal(err)
			}
			again, err := readTombstones(got.disk, got.path, tombStore, true)
			if err != nil || !reflect.DeepEqual(again.keys, got.keys) || !reflect.DeepEqual(again.floors, got.floors) {
				t.Errorf("%d keys and %d floors come back as %d and %d, %v", len(got.keys), len(got.floors), len(again.keys), len(again.floors), err)
			}
			got.drop()
		}
	})
}

// TestTombstonesCrash looks at what a crash leaves after each call.
func TestTombstonesCrash(t *testing.T) {
	disk := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	stones, err := c.Tombstones()
	if err != nil || stones.Len() != 0 {
		t.Fatalf("of a new catalog: %v, %v", stones, err)
	}
	defer stones.Close()
	left := func(after string) *Tombstones {
		t.Helper()
		got, err := readTombstones(disk.CrashClone(vfs.CrashCloneCfg{}), TombstonesPath("cat"), c.StoreID(), true)
		if err != nil || !reflect.DeepEqual(got.keys, stones.keys) || !reflect.DeepEqual(got.floors, stones.floors) {
			t.Fatalf("after %s a crash leaves %+v, %v, want %+v", after, got, err, stones)
		}
		return got
	}
	add := func(gen, first, n uint64) {
		t.Helper()
		if raised, err := stones.Add(stonesOf(gen, first, n), nil); raised || err != nil {
			t.Fatalf("add: raised %v, %v", raised, err)
		}
	}
	add(5, 0, 3)
	left("the first")
	add(6, 2, 50)
	pages := stones.pages
	add(6, 2, 50)
	if stones.pages != pages {
		t.Error("what is there is written again")
	}
	if got := left("some more"); got.Dead(numbered(3, 1), 6) || !got.Dead(numbered(3, 2), 6) {
		t.Error("the generations are wrong")
	}
	if err := stones.Raise([]Floor{{[16]byte{1}, 9}, {[16]byte{2}, 10}}); err != nil {
		t.Fatal(err)
	}
	if got := left("floors"); got.Dead(numbered(3, 2), 1) || !got.Below([16]byte{1}, 9) {
		t.Error("floors are not what is there")
	}
	add(11, 0, 1)
	if err := stones.Keep([]Floor{{[16]byte{2}, 10}, {[16]byte{7}, 10}}); err != nil {
		t.Fatal(err)
	}
	if got := left("one floor less"); got.Below([16]byte{1}, 9) || !got.Reached([]Floor{{[16]byte{2}, 10}}) || got.Reached([]Floor{{[16]byte{2}, 10}, {[16]byte{1}, 1}}) {
		t.Error("the wrong floor is gone")
	}
	if err := stones.Clear(); err != nil {
		t.Fatal(err)
	}
	if _, err := disk.Stat(TombstonesPath("cat")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is there: %v", err)
	}
	add(12, 0, 1)
	left("a new beginning")
}

// TestTombstonesBounded: neither the keys nor the file grow without end.
func TestTombstonesBounded(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	disk := vfs.NewMem()
	stones := newTombstones(disk, "t", tombStore)
	size := func() int64 {
		st, err := disk.Stat("t")
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	for gen := range uint64(3 * tombSlack) {
		if _, err := stones.Add(stonesOf(gen+1, gen%7, 1), nil); err != nil {
			t.Fatal(err)
		}
		if size() > (tombSlack+10)*tombPage {
			t.Fatalf("%d bytes for 7 keys", size())
		}
	}
	back, err := readTombstones(disk, "t", tombStore, true)
	if err != nil || !reflect.DeepEqual(back.keys, stones.keys) {
		t.Fatalf("%v, %v, want %v", back, err, stones.keys)
	}
	floor := []Floor{{[16]byte{1}, 1 << 40}}
	if raised, err := stones.Add(stonesOf(1<<39, 0, MaxTombstones), floor); raised || err != nil {
		t.Fatalf("as many as there may be: raised %v, %v", raised, err)
	}
	if size() > maxTombBytes {
		t.Errorf("%d bytes, at most %d", size(), maxTombBytes)
	}
	if raised, err := stones.Add(stonesOf(1<<39, MaxTombstones, 1), floor); !raised || err != nil {
		t.Fatalf("one more: raised %v, %v", raised, err)
	}
	if back, err = readTombstones(disk, "t", tombStore, true); err != nil || back.Len() != 1 || !back.Reached(floor) || size() != tombPage {
		t.Errorf("%d entries, %v, in %d bytes", back.Len(), err, size())
	}
}

// TestTombstonesFail lets writes fail half way: that is told, and mended by the next
// one that succeeds.
func TestTombstonesFail(t *testing.T) {
	for _, kind := range []errorfs.OpKind{errorfs.OpFileWrite, errorfs.OpFileSync, errorfs.OpRename, errorfs.OpCreate} {
		mem := vfs.NewCrashableMem()
		var full atomic.Bool
		disk := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if full.Load() && strings.HasPrefix(op.Path, "t") && op.Kind == kind {
				return syscall.ENOSPC
			}
			return nil
		}))
		stones := newTombstones(disk, "t", tombStore)
		for round := range uint64(3) {
			if _, err := stones.Add(stonesOf(1, 10*round, 3), nil); err != nil {
				t.Fatal(err)
			}
			full.Store(true)
			if round == 1 { // the file is to be written anew
				stones.drop()
			}
			if _, err := stones.Add(stonesOf(1, 10*round+5, 3), nil); err == nil {
				if kind != errorfs.OpRename && kind != errorfs.OpCreate || round == 1 {
					t.Fatalf("%v: no error in round %d", kind, round)
				}
			} else if !errors.Is(err, block.ErrNoSpace) {
				t.Fatalf("%v: %v", kind, err)
			}
			full.Store(false)
			// The same again, which is known, and may not be in the file.
			if _, err := stones.Add(stonesOf(1, 10*round+5, 3), nil); err != nil {
				t.Fatal(err)
			}
			got, err := readTombstones(mem.CrashClone(vfs.CrashCloneCfg{}), "t", tombStore, true)
			if err != nil || !reflect.DeepEqual(got.keys, stones.keys) {
				t.Fatalf("%v, round %d: %d keys, %v, want %d", kind, round, got.Len(), err, stones.Len())
			}
		}
		stones.Close()
	}
}

// TestTombstonesLost: that there is a file the catalog knows and its manifest, so that
// its loss is noticed; and no crash looks like one.
func TestTombstonesLost(t *testing.T) {
	mem := vfs.NewCrashableMem()
	var looking atomic.Bool
	crashes := 0
	look := func() {
		disk := mem.CrashClone(vfs.CrashCloneCfg{})
		m, err := readManifest(disk, ManifestPath("cat"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := disk.Stat(TombstonesPath("cat")); m.Tombstones && err != nil {
			t.Errorf("after a crash the manifest knows of a file: %v", err)
		}
		crashes++
	}
	disk := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if looking.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && (strings.Contains(op.Path, "tombstones") || strings.Contains(op.Path, "manifest")) {
			look()
		}
		return nil
	}))
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	stones, err := c.Tombstones()
	if err != nil {
		t.Fatal(err)
	}
	looking.Store(true)
	for range 2 {
		if _, err := stones.Add(stonesOf(1, 0, 3), nil); err != nil {
			t.Fatal(err)
		}
		look()
		if _, err := stones.Add(stonesOf(1, 3, 3), nil); err != nil {
			t.Fatal(err)
		}
		if err := stones.Clear(); err != nil {
			t.Fatal(err)
		}
		look()
	}
	looking.Store(false)
	if crashes < 12 {
		t.Errorf("%d crashes", crashes)
	}
	if got, err := c.Tombstones(); err != nil || got.Len() != 0 {
		t.Errorf("of none: %v", err)
	}
	if _, err := stones.Add(stonesOf(2, 0, 3), nil); err != nil {
		t.Fatal(err)
	}
	stones.Close()
	if err := mem.Remove(TombstonesPath("cat")); err != nil {
		t.Fatal(err)
	}
	closeCatalog(t, c)
	c = openCatalog(t, "cat", &CatalogOptions{FS: disk})
	if _, err := c.Tombstones(); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), "lost") {
		t.Errorf("of a file that is lost: %v", err)
	}
	anew := c.NewTombstones()
	defer anew.Close()
	if err := anew.Raise([]Floor{{[16]byte{1}, 9}}); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Tombstones(); err != nil || !got.Below([16]byte{1}, 9) {
		t.Errorf("of the new file: %v", err)
	}
}
