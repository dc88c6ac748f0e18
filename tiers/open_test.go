package tiers_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// twoSlabs makes a store on two slabs with blocks 0 to 39, and says on which
// slab each lies.
func twoSlabs(t *testing.T) (o tiers.Options, ns block.Namespace, on [40]int) {
	t.Helper()
	dir := t.TempDir()
	o = tiers.Options{
		Dir: filepath.Join(dir, "data"), Agent: newAgent(t), DRAM: 16 << 20,
		Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "s0"), Bytes: 32 << 20}, {Path: filepath.Join(dir, "s1"), Bytes: 48 << 20}},
	}
	s := openStore(t, o)
	ns = space(t, s, "a", 1<<20)
	var count [2]int
	for i := range on {
		mustPut(t, s, ns, i, 50_000+i, block.PutOptions{Durable: block.G3})
		on[i] = int(placeIn(t, s, ns, i, block.G3).Device())
		count[on[i]]++
	}
	if count[0] == 0 || count[1] == 0 {
		t.Fatalf("blocks by slab: %v", count)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return o, ns, on
}

// wantOn wants the blocks of the given slabs, and the others to be absent.
func wantOn(t *testing.T, s *tiers.Store, ns block.Namespace, on [40]int, slabs ...bool) {
	t.Helper()
	for i, slab := range on {
		if slabs[slab] {
			wantHit(t, s, ns, i, 50_000+i)
		} else {
			wantMiss(t, s, ns, i, block.MissAbsent)
		}
	}
}

// wantOpened wants G3 to count, right after opening, the blocks whose slabs are there, the
// bytes of their payload and those of their slots, and some more of sizes that are given.
func wantOpened(t *testing.T, s *tiers.Store, on [40]int, without int, slabs []bool, more ...int) {
	t.Helper()
	var want block.TierStats
	count := func(n int) {
		want.Blocks++
		want.Payload += int64(n)
		slot, _ := tiers.SlotBytes(int64(n))
		want.Used += slot
	}
	for i, slab := range on {
		if i != without && slabs[slab] {
			count(50_000 + i)
		}
	}
	for _, n := range more {
		count(n)
	}
	st := s.Stats()
	g3 := st.Tiers[1]
	if g3.Blocks != want.Blocks || g3.Payload != want.Payload || g3.Used != want.Used {
		t.Errorf("g3 has %d blocks, %d bytes of payload, %d of slots, want %d, %d, %d", g3.Blocks, g3.Payload, g3.Used, want.Blocks, want.Payload, want.Used)
	}
	if g2 := st.Tiers[0]; g2.Blocks != 0 || g2.Payload != 0 || st.Blocks != want.Blocks {
		t.Errorf("%d blocks in all and %d in g2, want %d and none", st.Blocks, g2.Blocks, want.Blocks)
	}
}

// TestSlabsComeAndGo reorders slabs, leaves one out, brings it back and adds one:
// each block is served when its slab is there, and what was deleted while it was
// not stays deleted.
func TestSlabsComeAndGo(t *testing.T) {
	withoutRace(t)
	o, ns, on := twoSlabs(t)
	s0, s1 := o.Slabs[0], o.Slabs[1]

	o.Slabs = []tiers.SlabSpec{s1, s0}
	s := openStore(t, o)
	wantOpened(t, s, on, -1, []bool{true, true})
	wantOn(t, s, ns, on, true, true)

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	o.Slabs = []tiers.SlabSpec{s1}
	s = openStore(t, o)
	wantOpened(t, s, on, -1, []bool{false, true})
	wantOn(t, s, ns, on, false, true)
	deleted := -1
	for i, slab := range on {
		if slab == 0 {
			deleted = i
			break
		}
	}
	mustDelete(t, s, ns, 0, deleted) // its record is there, its slab is not
	mustPut(t, s, ns, 100, 60_000, block.PutOptions{Durable: block.G3})

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s2 := tiers.SlabSpec{Path: filepath.Join(filepath.Dir(s0.Path), "s2"), Bytes: 32 << 20}
	o.Slabs = []tiers.SlabSpec{s2, s0, s1}
	s = openStore(t, o)
	wantOpened(t, s, on, deleted, []bool{true, true}, 60_000)
	wantMiss(t, s, ns, deleted, block.MissAbsent)
	for i := range on {
		if i != deleted {
			wantHit(t, s, ns, i, 50_000+i)
		}
	}
	wantHit(t, s, ns, 100, 60_000)
	mustPut(t, s, ns, deleted, 50_000+deleted, block.PutOptions{Durable: block.G3})

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	o.Slabs = nil // as recorded: all three
	s = openStore(t, o)
	wantOpened(t, s, on, -1, []bool{true, true}, 60_000)
	wantOn(t, s, ns, on, true, true)
	if n := len(s.Stats().Tiers[1].Devices); n != 3 {
		t.Errorf("%d slabs", n)
	}
	wantEmpty(t, s)
}

// TestRecordedSlabGone: a slab that the data directory records and that is gone
// takes its own blocks with it, not the others'.
func TestRecordedSlabGone(t *testing.T) {
	o, ns, on := twoSlabs(t)
	gone := o.Slabs[0].Path
	o.Slabs = nil
	if err := os.Rename(gone, gone+".away"); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, o)
	wantOpened(t, s, on, -1, []bool{false, true})
	wantOn(t, s, ns, on, false, true)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(gone+".away", gone); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	wantOpened(t, s, on, -1, []bool{true, true})
	wantOn(t, s, ns, on, true, true)
	wantEmpty(t, s)
}

// TestSlabMoved: a slab is known by what it is, not by where it lies.
func TestSlabMoved(t *testing.T) {
	o, ns, on := twoSlabs(t)
	moved := o.Slabs[0].Path + ".moved"
	if err := os.Rename(o.Slabs[0].Path, moved); err != nil {
		t.Fatal(err)
	}
	o.Slabs[0].Path = moved
	s := openStore(t, o)
	wantOn(t, s, ns, on, true, true)
}

// TestSlabOfAnotherStore is refused, and left as it is.
func TestSlabOfAnotherStore(t *testing.T) {
	o, ns, on := twoSlabs(t)
	other := o
	other.Dir = t.TempDir()
	if _, err := tiers.Open(t.Context(), other); !errors.Is(err, block.ErrInvalid) {
		t.Fatalf("open: %v, want ErrInvalid", err)
	}
	s := openStore(t, o)
	wantOn(t, s, ns, on, true, true)
}

// openFiles is the number of descriptors of this process.
func openFiles(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestOpenFails opens stores that cannot be opened, each at another step: an
// error that says why, and nothing is left behind.
func TestOpenFails(t *testing.T) {
	withoutRace(t)
	good := func(t *testing.T) tiers.Options {
		return tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)}
	}
	for _, c := range []struct {
		name string
		want error
		bad  func(t *testing.T, o *tiers.Options)
	}{
		{"NoDir", block.ErrInvalid, func(_ *testing.T, o *tiers.Options) { o.Dir = "" }},
		{"NoAgent", block.ErrInvalid, func(_ *testing.T, o *tiers.Options) { o.Agent = nil }},
		{"LittleDRAM", block.ErrInvalid, func(_ *testing.T, o *tiers.Options) { o.DRAM = 1 << 20 }},
		{"Watermarks", block.ErrInvalid, func(_ *testing.T, o *tiers.Options) { o.High, o.Low = 0.5, 0.9 }},
		{"SlabTwice", block.ErrInvalid, func(_ *testing.T, o *tiers.Options) { o.Slabs = append(o.Slabs, o.Slabs[0]) }},
		{"LittleSlab", block.ErrInvalid, func(_ *testing.T, o *tiers.Options) { o.Slabs[0].Bytes = 1000 }},
		{"HugeSlab", block.ErrNoSpace, func(_ *testing.T, o *tiers.Options) { o.Slabs[0].Bytes = 1 << 50 }},
		{"SlabIsAFile", block.ErrInvalid, func(t *testing.T, o *tiers.Options) {
			if err := os.WriteFile(o.Slabs[0].Path, []byte("something else"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"SecondSlabIsADirectory", block.ErrInvalid, func(t *testing.T, o *tiers.Options) {
			o.Slabs = append(o.Slabs, tiers.SlabSpec{Path: t.TempDir(), Bytes: 32 << 20})
		}},
		{"DirIsAFile", block.ErrUnavailable, func(t *testing.T, o *tiers.Options) {
			o.Dir = filepath.Join(o.Dir, "file")
			if err := os.WriteFile(o.Dir, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"CatalogIsAFile", block.ErrUnavailable, func(t *testing.T, o *tiers.Options) {
			if err := os.WriteFile(filepath.Join(o.Dir, "catalog"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"NoFileBackend", xfer.ErrNoBackend, func(t *testing.T, o *tiers.Options) {
			a, err := xfer.NewAgent("bare", nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { a.Close() })
			o.Agent = a
		}},
		{"Policy", errNoPolicy, func(_ *testing.T, o *tiers.Options) {
			o.Policy = func(block.TierID) (policy.Policy, error) { return nil, errNoPolicy }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := good(t)
			c.bad(t, &o)
			files, running := openFiles(t), goleak.IgnoreCurrent()
			s, err := tiers.Open(context.Background(), o)
			if err == nil {
				s.Close()
				t.Fatal("opened")
			}
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			goleak.VerifyNone(t, running)
			if n := openFiles(t); n > files {
				t.Errorf("%d files are open, %d were", n, files)
			}
		})
	}
}

var errNoPolicy = errors.New("no such policy")

// TestOneStoreAtATime: a data directory and a slab have one user; when that one
// has closed, another may come.
func TestOneStoreAtATime(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)}
	files, running := openFiles(t), goleak.IgnoreCurrent()
	s := openStore(t, o)
	if _, err := tiers.Open(t.Context(), o); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("the same directory: %v, want ErrUnavailable", err)
	}
	other := o
	other.Dir = t.TempDir()
	if _, err := tiers.Open(t.Context(), other); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("the same slab: %v, want ErrUnavailable", err)
	}
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	goleak.VerifyNone(t, running)
	if n := openFiles(t); n > files {
		t.Errorf("%d files are open after Close, %d were before Open", n, files)
	}
	s = openStore(t, o)
	wantHit(t, s, ns, 1, 3000)
}

// TestCloseUnderWork closes a store whose own work is under way: blocks move
// down, others are prefetched, records are queued.
func TestCloseUnderWork(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), DRAM: 16 << 20, Slabs: slabIn(t, 128<<20)}
	running := goleak.IgnoreCurrent()
	durable := map[int]bool{}
	for round := range 5 {
		s := openStore(t, o)
		ns := space(t, s, "a", 1<<20)
		for i := range durable {
			wantHit(t, s, ns, i, 300_000)
		}
		watched := make(chan error, 1)
		go func() {
			watched <- s.Watch(t.Context(), block.WatchOptions{}, func(block.Event) error { return nil })
		}()
		for i := round * 20; i < round*20+20; i++ {
			d := block.TierID(2 + i%2)
			mustPut(t, s, ns, i, 300_000, block.PutOptions{Durable: d})
			if d == block.G3 {
				durable[i] = true
			}
		}
		short, cancel := context.WithCancel(t.Context())
		cancel()
		_ = s.Prefetch(short, ns.ID, hashLen, pack(hashOf(1), hashOf(3), hashOf(5)), block.PrefetchOptions{}, func(block.Progress) error { return nil })
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-watched; !errors.Is(err, block.ErrClosed) {
			t.Errorf("watch: %v, want ErrClosed", err)
		}
	}
	goleak.VerifyNone(t, running)
}

// TestSlabInAnothersPlace puts a second slab at the path of the first and then
// the first one back: the data directory opens with either, and verifies.
func TestSlabInAnothersPlace(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	path := filepath.Join(t.TempDir(), "slab")
	o := tiers.Options{Dir: dir, Agent: newAgent(t), Slabs: []tiers.SlabSpec{{Path: path, Bytes: 64 << 20}}}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	closeStore(t, s)
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	wantMiss(t, s, ns, 1, block.MissAbsent)
	closeStore(t, s)
	o.Slabs = nil
	s = openStore(t, o)
	mustPut(t, s, ns, 2, 3000, block.PutOptions{Durable: block.G3})
	closeStore(t, s)
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	wantHit(t, s, ns, 1, 3000)
	wantMiss(t, s, ns, 2, block.MissAbsent)
	closeStore(t, s)
	rep, err := tiers.Verify(t.Context(), dir, nil)
	if err != nil || rep.Good != 1 || rep.Bad != 1 {
		t.Errorf("verify: %+v, %v, want block 1 good and block 2, whose slab is away, bad", rep, err)
	}
}

// TestPreallocatedSlab makes a slab of a file that somebody has preallocated,
// but of nothing else, and not again of a slab that has been wiped.
func TestPreallocatedSlab(t *testing.T) {
	withoutRace(t)
	path := filepath.Join(t.TempDir(), "slab")
	blank := func(n int64) {
		t.Helper()
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, n); err != nil {
			t.Fatal(err)
		}
	}
	o := tiers.Options{Dir: t.TempDir(), DRAM: 64 << 20, Agent: newAgent(t), Slabs: []tiers.SlabSpec{{Path: path, Bytes: 64 << 20}}}
	blank(40 << 20)
	_, err := tiers.Open(t.Context(), o)
	if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "too short: it has 41943040 bytes, 67108864 are asked for") {
		t.Errorf("a short file: %v", err)
	}
	blank(64 << 20)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("somebody's"), 64<<20-100); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err = tiers.Open(t.Context(), o); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "67108864 bytes of something") {
		t.Errorf("a file with data: %v", err)
	}
	blank(0)
	blank(64 << 20)
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	closeStore(t, s)
	blank(0)
	blank(64 << 20)
	if _, err = tiers.Open(t.Context(), o); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("a wiped slab: %v", err)
	}
}

func closeStore(t *testing.T, s *tiers.Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestSlabV1: a slab of version 1 goes on being used, with headers of version 1,
// and its superblocks stay as they are.
func TestSlabV1(t *testing.T) {
	withoutRace(t)
	const size = 70_000
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := o.Slabs[0].Path
	if err := tiers.MakeV1(path); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	for i := 1; i <= 3; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	mustDelete(t, s, ns, 1, 3)
	s = reopen(t, s, o)
	wantHit(t, s, ns, 1, size)
	wantHit(t, s, ns, 2, size)
	wantMiss(t, s, ns, 3, block.MissAbsent)
	inFile(t, path, placeIn(t, s, ns, 1, block.G3).Offset(), 512, func(b []byte) {
		h, err := tiers.DecodeHeader(b, tiers.Seal{Version: 1})
		if err != nil || h.Hash != hashOf(1) {
			t.Errorf("header %+v, %v", h, err)
		}
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := tiers.Verify(t.Context(), o.Dir, nil); err != nil || r.Good != 2 || r.Bad != 0 {
		t.Errorf("verify: %+v, %v", r, err)
	}
}
