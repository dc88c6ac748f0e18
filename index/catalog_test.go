package index

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/kvtier/kvtier/index/block"
)

// withoutRace skips a test under the race detector: it does one thing after the other, in
// many places or orders, and the run without the detector does it in a fraction of the
// time. Others commit, read and reopen side by side.
func withoutRace(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("runs without the race detector only")
	}
}

func openCatalog(t testing.TB, dir string, o *CatalogOptions) *Catalog {
	t.Helper()
	c, err := OpenCatalog(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // a test that closes it looks at the error itself
	return c
}

func closeCatalog(t testing.TB, c *Catalog) {
	t.Helper()
	for range 2 {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// recordOf is a record whose fields follow from its number.
func recordOf(ns block.NamespaceID, i uint64) *Record {
	k := numbered(ns, i)
	return &Record{
		Key: k, HashLen: 32, HasParent: i%2 == 1, Parent: block.Hash{}, Len: uint32(i%4096) + 1,
		Sum: block.Sum(k.Hash[:]), Slab: uint16(i % 3), Offset: int64(i) * 512, Slot: uint32(i%8) * 512, Gen: i, Epoch: 1, Expires: int64(i % 7),
	}
}

func commit(t testing.TB, c *Catalog, sync bool, records ...*Record) {
	t.Helper()
	b := c.NewBatch()
	for _, r := range records {
		b.Put(r)
	}
	if b.Len() != len(records) {
		t.Fatalf("batch of %d has length %d", len(records), b.Len())
	}
	if err := c.Commit(b, sync); err != nil {
		t.Fatal(err)
	}
	if b.Len() != 0 {
		t.Fatal("batch is not empty after its commit")
	}
}

func scan(t testing.TB, c *Catalog) map[block.Key]Record {
	t.Helper()
	all := make(map[block.Key]Record)
	if err := c.Scan(func(r *Record) error { all[r.Key] = *r; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCatalogKeepsRecords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "there", "yet")
	c := openCatalog(t, dir, nil)
	b := c.NewBatch()
	for i := range uint64(1000) {
		b.Put(recordOf(block.NamespaceID(1+i%3), i))
	}
	if err := c.Commit(b, false); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(1000) {
		if i%10 == 0 {
			b.Drop(recordOf(block.NamespaceID(1+i%3), i).Key, 32)
		}
	}
	if err := c.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		all := scan(t, c)
		if len(all) != 900 {
			t.Errorf("%d records, want 900", len(all))
		}
		for i := range uint64(1000) {
			want := *recordOf(block.NamespaceID(1+i%3), i)
			got, ok, err := c.Get(want.Key, 32)
			if err != nil || ok != (i%10 != 0) || ok && (got != want || all[want.Key] != want) {
				t.Errorf("record %d: got %+v, %v, %v", i, got, ok, err)
			}
		}
	}
	check()
	boot, store := c.Boot(), c.StoreID()
	closeCatalog(t, c)

	c = openCatalog(t, dir, nil)
	check()
	if c.Boot() != boot+1 || c.StoreID() != store || store == [16]byte{} {
		t.Errorf("boot %d then %d, store %x then %x", boot, c.Boot(), store, c.StoreID())
	}
	if m := c.Metrics(); m.DiskBytes == 0 || m.WALSyncs == 0 || m.WALSyncMax == 0 || m.MemTableBytes == 0 || m.Failed {
		t.Errorf("metrics %+v", m)
	}
	closeCatalog(t, c)

	c = openCatalog(t, dir, &CatalogOptions{ReadOnly: true})
	check()
	if c.Boot() != boot+1 {
		t.Errorf("boot %d after a read-only opening, want %d", c.Boot(), boot+1)
	}
	b = c.NewBatch()
	b.Put(recordOf(1, 1))
	if err := c.Commit(b, true); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("commit to a read-only catalog: %v", err)
	}
}

func TestScanFrom(t *testing.T) {
	c := openCatalog(t, "cat", &CatalogOptions{FS: vfs.NewMem()})
	var want []block.Hash
	for i := range uint64(100) {
		for _, ns := range []block.NamespaceID{4, 5, 6} {
			commit(t, c, false, recordOf(ns, i))
		}
		want = append(want, recordOf(5, i).Key.Hash)
	}
	slices.SortFunc(want, func(a, b block.Hash) int { return slices.Compare(a[:], b[:]) })
	var got []block.Hash
	enough := errors.New("enough")
	for page := 0; ; page++ {
		var after []byte
		if len(got) > 0 {
			after = got[len(got)-1][:]
		}
		n := 0
		err := c.ScanFrom(5, after, func(r *Record) error {
			if r.Key.NS != 5 {
				t.Fatalf("namespace %d", r.Key.NS)
			}
			got = append(got, r.Key.Hash)
			if n++; n == 7 {
				return enough
			}
			return nil
		})
		if err == nil {
			break
		}
		if !errors.Is(err, enough) {
			t.Fatal(err)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("pages give %d hashes, want %d in order", len(got), len(want))
	}
}

func TestCatalogNamespaces(t *testing.T) {
	fs := vfs.NewMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: fs})
	var spaces []block.Namespace
	for i := range 3 {
		n := sampleSpace()
		n.Desc.Name = fmt.Sprint("ns", i)
		id, err := c.NewNamespaceID()
		if err != nil {
			t.Fatal(err)
		}
		n.ID = id
		if err := c.PutNamespace(n); err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, n)
		commit(t, c, true, recordOf(id, 1), recordOf(id, 2))
	}
	if err := c.PutNamespace(block.Namespace{ID: 99, Desc: spaces[0].Desc}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("an id that was not given out: %v", err)
	}

	if err := c.ClearNamespace(spaces[0]); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("clear with the old epoch: %v", err)
	}
	spaces[0].Epoch++
	if err := c.ClearNamespace(spaces[0]); err != nil {
		t.Fatal(err)
	}
	if err := c.DropNamespace(spaces[1].ID); err != nil {
		t.Fatal(err)
	}
	if err := c.DropNamespace(spaces[1].ID); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("second drop: %v", err)
	}
	if err := c.ClearNamespace(spaces[1]); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("clear after drop: %v", err)
	}

	closeCatalog(t, c)
	c = openCatalog(t, "cat", &CatalogOptions{FS: fs})
	got, err := c.Namespaces()
	if err != nil || !slices.Equal(got, []block.Namespace{spaces[0], spaces[2]}) {
		t.Errorf("namespaces %+v, %v", got, err)
	}
	left := scan(t, c)
	if len(left) != 2 || left[recordOf(spaces[2].ID, 1).Key].Gen != 1 {
		t.Errorf("%d records left, want the 2 of %d", len(left), spaces[2].ID)
	}

	// The same descriptor again must not make blocks live that were dropped.
	again := spaces[1]
	if again.ID, err = c.NewNamespaceID(); err != nil || again.ID <= spaces[2].ID {
		t.Fatalf("new id %d, %v", again.ID, err)
	}
	if err := c.PutNamespace(again); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("dropped namespace with its old epoch: %v", err)
	}
	if again.Epoch, err = c.FirstEpoch(again.Desc); err != nil || again.Epoch <= spaces[1].Epoch {
		t.Fatalf("first epoch %d, %v", again.Epoch, err)
	}
	if err := c.PutNamespace(again); err != nil {
		t.Error(err)
	}
	if e, err := c.FirstEpoch(spaces[2].Desc); err != nil || e != 0 {
		t.Errorf("first epoch of one that was never dropped: %d, %v", e, err)
	}
}

func TestCatalogSlabs(t *testing.T) {
	c := openCatalog(t, "cat", &CatalogOptions{FS: vfs.NewMem()})
	a, b := sampleSlab(), SlabRecord{Number: 2, Path: "/dev/x", Bytes: 1 << 40}
	for _, s := range []SlabRecord{a, b} {
		if err := c.PutSlab(s); err != nil {
			t.Fatal(err)
		}
	}
	b.Retired = true
	if err := c.PutSlab(b); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Slabs(); err != nil || !slices.Equal(got, []SlabRecord{b, a}) {
		t.Errorf("slabs %+v, %v", got, err)
	}
}

// TestClean opens a catalog again and again, after an end in order and others.
func TestClean(t *testing.T) {
	o := &CatalogOptions{FS: vfs.NewMem()}
	ro := &CatalogOptions{FS: o.FS, ReadOnly: true}
	for i, c := range []struct {
		o           *CatalogOptions
		clean, mark bool
	}{{o, true, false}, {o, false, true}, {ro, true, false}, {ro, true, false}, {o, true, false}, {ro, false, false}, {o, false, true}, {o, true, true}} {
		cat := openCatalog(t, "cat", c.o)
		if cat.Clean() != c.clean {
			t.Errorf("opening %d is clean: %v, want %v", i, cat.Clean(), c.clean)
		}
		if c.mark {
			if err := cat.MarkClean(); err != nil {
				t.Fatal(err)
			}
		}
		closeCatalog(t, cat)
	}
	if err := openCatalog(t, "cat", ro).MarkClean(); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("read-only: %v", err)
	}
}

// TestOlderVersions makes a catalog what earlier versions left.
func TestOlderVersions(t *testing.T) {
	for version := uint32(1); version < catalogVersion; version++ {
		o := &CatalogOptions{FS: vfs.NewMem()}
		c := openCatalog(t, "cat", o)
		commit(t, c, true, recordOf(1, 1))
		old := c.admin.meta
		old.Catalog = version
		if err := c.now().put(metaKey, old.encode()); err != nil {
			t.Fatal(err)
		}
		closeCatalog(t, c)
		for _, c := range []struct{ readOnly, upgraded bool }{{true, false}, {false, true}, {true, true}} {
			again := openCatalog(t, "cat", &CatalogOptions{FS: o.FS, ReadOnly: c.readOnly})
			if got := scan(t, again); len(got) != 1 || got[recordOf(1, 1).Key] != *recordOf(1, 1) {
				t.Errorf("version %d: records %+v", version, got)
			}
			if m := again.admin.meta; m.Store != old.Store || (m.Catalog == catalogVersion) != c.upgraded || again.Clean() {
				t.Errorf("version %d, read-only %v: meta %+v, clean %v", version, c.readOnly, m, again.Clean())
			}
			closeCatalog(t, again)
		}
	}
}

func TestScrubState(t *testing.T) {
	disk := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	if s, ok, err := c.ScrubState(); ok || err != nil {
		t.Errorf("before the first scrub: %+v, %v, %v", s, ok, err)
	}
	want := sampleScrub()
	want.Error = strings.Repeat("x", MaxScrubError-1)
	long := want
	long.Error += "\u00e9 and more" // cut within a character
	if err := c.PutScrubState(long); err != nil {
		t.Fatal(err)
	}
	after := openCatalog(t, "cat", &CatalogOptions{FS: disk.CrashClone(vfs.CrashCloneCfg{})})
	if got, ok, err := after.ScrubState(); err != nil || !ok || got != want {
		t.Errorf("after a crash: %+v, %v, %v, want %+v", got, ok, err, want)
	}
	if err := c.PutScrubState(ScrubRecord{State: block.ScrubFailed + 1}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("unknown state: %v", err)
	}
}

func TestCorruptValueIsAnError(t *testing.T) {
	c := openCatalog(t, "cat", &CatalogOptions{FS: vfs.NewMem()})
	r := recordOf(1, 1)
	key, value := recordBytes(r)
	for _, damage := range []struct {
		at   int
		want error
	}{{0, ErrVersion}, {5, block.ErrCorrupt}} {
		v := slices.Clone(value)
		v[damage.at] ^= 0x40
		if err := c.now().put(key, v); err != nil {
			t.Fatal(err)
		}
		if _, ok, err := c.Get(r.Key, 32); ok || !errors.Is(err, damage.want) {
			t.Errorf("get: %v, %v, want %v", ok, err, damage.want)
		}
		if err := c.Scan(func(*Record) error { return nil }); !errors.Is(err, damage.want) {
			t.Errorf("scan: %v, want %v", err, damage.want)
		}
	}
}

func TestClosedCatalog(t *testing.T) {
	c := openCatalog(t, "cat", &CatalogOptions{FS: vfs.NewMem()})
	b := c.NewBatch()
	b.Put(recordOf(1, 1))
	closeCatalog(t, c)
	_, _, get := c.Get(recordOf(1, 1).Key, 32)
	_, id := c.NewNamespaceID()
	_, list := c.Namespaces()
	for name, err := range map[string]error{
		"commit": c.Commit(b, true), "get": get, "id": id, "list": list,
		"scan": c.Scan(nil), "slab": c.PutSlab(sampleSlab()),
	} {
		if !errors.Is(err, block.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c.Metrics()
}

func TestOpenRefuses(t *testing.T) {
	withoutRace(t)
	t.Run("newer catalog", func(t *testing.T) {
		o := &CatalogOptions{FS: vfs.NewMem()}
		c := openCatalog(t, "cat", o)
		m := c.admin.meta
		m.Catalog++
		if err := c.now().put(metaKey, m.encode()); err != nil {
			t.Fatal(err)
		}
		closeCatalog(t, c)
		if _, err := OpenCatalog("cat", o); !errors.Is(err, ErrVersion) {
			t.Error(err)
		}
	})
	t.Run("newer pebble", func(t *testing.T) {
		o := &CatalogOptions{FS: vfs.NewMem()}
		closeCatalog(t, openCatalog(t, "cat", o))
		m, _, err := atomicfs.LocateMarker(o.FS, "cat", "format-version")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(m.Move("999"), m.Close()); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenCatalog("cat", o); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "999") {
			t.Error(err)
		}
	})
	t.Run("lost meta record", func(t *testing.T) {
		o := &CatalogOptions{FS: vfs.NewMem()}
		c := openCatalog(t, "cat", o)
		commit(t, c, true, recordOf(1, 1))
		if err := c.now().db.Delete(metaKey, nil); err != nil {
			t.Fatal(err)
		}
		closeCatalog(t, c)
		if _, err := OpenCatalog("cat", o); !errors.Is(err, block.ErrCorrupt) {
			t.Error(err)
		}
	})
	t.Run("nothing to read", func(t *testing.T) {
		for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "absent")} {
			if _, err := OpenCatalog(dir, &CatalogOptions{ReadOnly: true}); !errors.Is(err, block.ErrNotFound) {
				t.Errorf("%s: %v", dir, err)
			}
		}
	})
	t.Run("a file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenCatalog(path, nil); !errors.Is(err, block.ErrUnavailable) || strings.Contains(err.Error(), "in use") {
			t.Error(err)
		}
	})
}

func TestOneOpenerAtATime(t *testing.T) {
	if dir := os.Getenv("INDEX_TEST_HOLD"); dir != "" {
		// The other process: hold the catalog until standard input ends.
		c := openCatalog(t, dir, nil)
		fmt.Println("holds")
		_, _ = bufio.NewReader(os.Stdin).ReadByte()
		closeCatalog(t, c)
		return
	}
	dir := t.TempDir()
	refused := func() {
		t.Helper()
		for _, ro := range []bool{false, true} {
			_, err := OpenCatalog(dir, &CatalogOptions{ReadOnly: ro})
			if !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), "in use by another process") {
				t.Errorf("read-only %v: %v", ro, err)
			}
		}
	}
	c := openCatalog(t, dir, nil)
	refused()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenCatalog(link, nil); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("through a link: %v", err)
	}
	closeCatalog(t, c)

	cmd := exec.Command(os.Args[0], "-test.run=^TestOneOpenerAtATime$", "-test.v")
	cmd.Env = append(os.Environ(), "INDEX_TEST_HOLD="+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "holds") {
	}
	refused()
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	closeCatalog(t, openCatalog(t, dir, nil))
}

func TestCommitsOfManyGoroutines(t *testing.T) {
	c := openCatalog(t, t.TempDir(), nil)
	var wg sync.WaitGroup
	for n := range uint64(8) {
		wg.Go(func() {
			b := c.NewBatch()
			for i := range uint64(50) {
				b.Put(recordOf(1, n*50+i))
				if err := c.Commit(b, i%5 == 4); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := len(scan(t, c)); got != 400 {
		t.Errorf("%d records", got)
	}
}
