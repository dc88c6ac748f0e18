package tiers_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// unswept is a SweepAfter after which no test runs any more.
const unswept = time.Hour

func tombstonesOf(o tiers.Options) string {
	return index.TombstonesPath(filepath.Join(o.Dir, "catalog"))
}

// twoSlabs are the options of a store with two slabs, and whose sweep never comes.
func slabPair(t testing.TB) tiers.Options {
	dir := t.TempDir()
	return tiers.Options{Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t), SweepAfter: unswept, Slabs: []tiers.SlabSpec{
		{Path: filepath.Join(dir, "0"), Bytes: 64 << 20}, {Path: filepath.Join(dir, "1"), Bytes: 64 << 20},
	}}
}

// closeAs closes a store in order or not.
func closeAs(t testing.TB, s *tiers.Store, end string) {
	t.Helper()
	if end == "unclean" {
		tiers.CloseUnclean(t, s)
	} else if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// repaired loses the catalog, repairs it, and says which of some blocks are there.
func repaired(t testing.TB, o tiers.Options, ns block.Namespace, is []int) (there []int) {
	t.Helper()
	loseCatalog(t, o.Dir, "lost")
	repair(t, o, nil)
	s := openStore(t, o)
	for _, i := range is {
		if tiersOf(t, s, ns, i) != "" {
			there = append(there, i)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return there
}

// TestDeadWhileAway: what dies while its slab is not there is not raised by a repair
// when the slab is back, before any sweep; all else is.
func TestDeadWhileAway(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	const n = 12
	g3 := block.PutOptions{Durable: block.G3}
	kill := map[string]func(t *testing.T, s *tiers.Store, ns block.Namespace, is []int){
		"Delete": func(t *testing.T, s *tiers.Store, ns block.Namespace, is []int) { mustDelete(t, s, ns, 0, is...) },
		"Clear": func(t *testing.T, s *tiers.Store, ns block.Namespace, _ []int) {
			if _, err := s.Clear(t.Context(), ns.ID); err != nil {
				t.Fatal(err)
			}
		},
		"PutAnewAndDelete": func(t *testing.T, s *tiers.Store, ns block.Namespace, is []int) {
			for _, i := range is {
				mustPut(t, s, ns, i, 6000, g3)
			}
			mustDelete(t, s, ns, len(is), is...)
		},
		"PutAnewAndExpire": func(t *testing.T, s *tiers.Store, ns block.Namespace, is []int) {
			for _, i := range is {
				putBriefly(t, s, ns, i, 6000)
			}
			eventually(t, "they have expired", func() bool {
				return !slices.ContainsFunc(is, func(i int) bool { return tiersOf(t, s, ns, i) != "" })
			})
		},
		"PutAnewAndEvict": func(t *testing.T, s *tiers.Store, ns block.Namespace, is []int) {
			for _, i := range is {
				mustPut(t, s, ns, i, 6000, g3)
				tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
				eventually(t, "it is evicted", func() bool {
					tiers.EvictG3(s, tiers.HandleOf(s, keyOf(ns, i)))
					return tiersOf(t, s, ns, i) == ""
				})
			}
		},
	}
	for how, kill := range kill {
		for _, away := range []string{"one", "all"} {
			for _, end := range []string{"clean", "unclean"} {
				if away == "all" && how != "Delete" && how != "Clear" {
					continue // there is nowhere to put them
				}
				t.Run(how+"/"+away+"/"+end, func(t *testing.T) {
					t.Parallel()
					o := slabPair(t)
					s := openStore(t, o)
					ns, other := space(t, s, "a", 8<<20), space(t, s, "b", 8<<20)
					var dead, keep []int
					for i := 1; i <= n; i++ {
						mustPut(t, s, ns, i, 5000, g3)
						if away == "all" && i%2 == 0 || away == "one" && placeIn(t, s, ns, i, block.G3).Device() == 1 {
							dead = append(dead, i)
						} else if how != "Clear" {
							keep = append(keep, i)
						}
					}
					for i := 1; i <= n; i++ {
						mustPut(t, s, other, i, 5000, g3)
					}
					if len(dead) == 0 || len(dead) == n {
						t.Fatalf("blocks %v are on the second slab", dead)
					}
					less := o
					if away == "one" {
						less.Slabs = o.Slabs[:1]
					} else {
						less.Slabs, less.NoSlabs = nil, true
					}
					s = reopen(t, s, less)
					kill(t, s, ns, dead)
					closeAs(t, s, end)
					if got := repaired(t, o, ns, numbersTo(n)); !slices.Equal(got, keep) {
						t.Errorf("blocks %v are there, want %v", got, keep)
					}
					if got := repaired(t, o, other, numbersTo(n)); len(got) != n {
						t.Errorf("of the other namespace %v are there", got)
					}
				})
			}
		}
	}
}

func numbersTo(n int) (is []int) {
	for i := range n {
		is = append(is, i+1)
	}
	return is
}

// raw is what lies in a block's slot.
func raw(t testing.TB, s *tiers.Store, o tiers.Options, ns block.Namespace, i, n int) (put func()) {
	t.Helper()
	slot, _ := tiers.SlotBytes(int64(n))
	p := placeIn(t, s, ns, i, block.G3)
	path := o.Slabs[p.Device()].Path
	var whole []byte
	inFile(t, path, p.Offset(), int(slot), func(b []byte) { whole = bytes.Clone(b) })
	return func() { inFile(t, path, p.Offset(), int(slot), func(b []byte) { copy(b, whole) }) }
}

// TestDeadBeforeSweep: a crash leaves blocks on the medium that no record tells of.
// Those that are deleted afterwards are not raised by a repair, before any sweep.
func TestDeadBeforeSweep(t *testing.T) {
	t.Parallel()
	const n, size = 8, 5000
	g3 := block.PutOptions{Durable: block.G3}
	for _, end := range []string{"clean", "unclean"} {
		for _, again := range []string{"Absent", "PutAnew"} {
			t.Run(again+"/"+end, func(t *testing.T) {
				t.Parallel()
				o := slabPair(t)
				s := openStore(t, o)
				ns := space(t, s, "a", 8<<20)
				var back []func()
				for i := 1; i <= n; i++ {
					mustPut(t, s, ns, i, size, g3)
					back = append(back, raw(t, s, o, ns, i, size))
				}
				mustPut(t, s, ns, 101, size, g3) // keep the room for blocks of this size
				mustPut(t, s, ns, 102, size, g3)
				mustDelete(t, s, ns, n, numbersTo(n)...)
				tiers.CloseUnclean(t, s)
				for _, put := range back { // as if they had been written and not recorded
					put()
				}
				s = openStore(t, o)
				there := 0
				if again == "PutAnew" {
					for i := 1; i <= n; i++ {
						mustPut(t, s, ns, i, 50_000+size, g3)
					}
					there = n / 2
				}
				mustDelete(t, s, ns, there, numbersTo(n/2)...)
				mustPut(t, s, ns, 1, 60_000, g3) // and this one lives
				closeAs(t, s, end)
				// The others were written and never answered, or put anew.
				if got := repaired(t, o, ns, numbersTo(n)); !slices.Equal(got, []int{1, 5, 6, 7, 8}) {
					t.Errorf("blocks %v are there", got)
				}
				s = openStore(t, o)
				wantHit(t, s, ns, 1, 60_000)
			})
		}
	}
}

// TestDeleteAgain: a delete that could not erase the header fails. The next one finds
// nothing, and what it answers is true after a repair, too.
func TestDeleteAgain(t *testing.T) {
	t.Parallel()
	var disk xfertest.Injector
	o := slabPair(t)
	o.Agent = agentWith(t, disk.Wrap)
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	mustPut(t, s, ns, 1, 3000, g3)
	mustPut(t, s, ns, 2, 3000, g3)
	disk.Set(xfertest.Rule{Fault: xfertest.Fail, Ops: []xfer.Op{xfer.Write}})
	if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, block.ErrUnavailable) {
		t.Fatalf("delete: %v, want ErrUnavailable", err)
	}
	mustDelete(t, s, ns, 0, 1)
	disk.Clear()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got := repaired(t, o, ns, []int{1, 2}); !slices.Equal(got, []int{2}) {
		t.Errorf("blocks %v are there, want 2", got)
	}
}

// TestTombstonesGo: with the slabs back and swept no tombstone is left, and while
// nothing is away or unswept there are none.
func TestTombstonesGo(t *testing.T) {
	t.Parallel()
	o := slabPair(t)
	there := func() bool {
		_, err := os.Stat(tombstonesOf(o))
		return err == nil
	}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 10; i++ {
		mustPut(t, s, ns, i, 5000, g3)
	}
	mustDelete(t, s, ns, 1, 1)
	if there() {
		t.Error("a tombstone of a block whose header is erased")
	}
	one := o
	one.Slabs = o.Slabs[:1]
	s = reopen(t, s, one)
	mustDelete(t, s, ns, 0, 11)
	if !there() {
		t.Error("no tombstone")
	}
	// A sweep of the one slab says nothing of the other.
	one.SweepAfter = time.Millisecond
	s = reopen(t, s, one)
	eventually(t, "free room is swept", func() bool { return !tiers.Unswept(s) })
	tiers.AwaitCommits(s)
	if !there() {
		t.Error("the tombstone is gone, and the slab is not back")
	}
	o.SweepAfter = time.Millisecond
	s = reopen(t, s, o)
	eventually(t, "free room is swept, and the tombstones are gone", func() bool { return !tiers.Unswept(s) && !there() })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// What is left by somebody is of no use after a stop in order.
	if err := os.WriteFile(tombstonesOf(o), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	eventually(t, "the damaged ones are gone", func() bool { return !there() })
	mustDelete(t, s, ns, 0, 1)
}

// TestTombstonesTorn: a repair that finds the last write of tombstones torn goes on;
// one that finds them damaged refuses, and says which file.
func TestTombstonesTorn(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	o := slabPair(t)
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, 5000, g3)
	}
	back := []func(){raw(t, s, o, ns, 1, 5000), raw(t, s, o, ns, 2, 5000)}
	mustDelete(t, s, ns, 2, 1, 2)
	tiers.CloseUnclean(t, s)
	for _, put := range back {
		put()
	}
	s = openStore(t, o)
	mustDelete(t, s, ns, 0, 1)
	mustDelete(t, s, ns, 0, 2)
	tiers.CloseUnclean(t, s)
	whole, err := os.ReadFile(tombstonesOf(o))
	if err != nil || len(whole) != 2*512 {
		t.Fatalf("%d bytes, %v", len(whole), err)
	}
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(tombstonesOf(o), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	loseCatalog(t, o.Dir, "lost")
	for _, at := range []int{0, 9, 41, 60, 511, 512, 552, 1023} {
		b := bytes.Clone(whole)
		b[at] ^= 4
		write(b)
		if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), tombstonesOf(o)) {
			t.Errorf("byte %d damaged: %v", at, err)
		}
	}
	// The first delete was answered before the second was written, which was not.
	for n := 512; n < 1024; n += 73 {
		write(whole[:n])
		if rep := repair(t, o, &tiers.RepairOptions{Force: true}); rep.Blocks != 3 {
			t.Errorf("cut to %d bytes: %+v", n, rep)
		}
	}
	write(whole)
	if rep := repair(t, o, &tiers.RepairOptions{Force: true}); rep.Blocks != 2 || rep.Stale != 2 {
		t.Errorf("%+v", rep)
	}
}

// TestTombstonesDamaged: a store opens all the same when its tombstones are damaged,
// and until it is swept a repair raises nothing that is older.
func TestTombstonesDamaged(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	o := slabPair(t)
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, 5000, g3)
	}
	back := raw(t, s, o, ns, 1, 5000)
	mustDelete(t, s, ns, 1, 1)
	tiers.CloseUnclean(t, s)
	back()
	s = openStore(t, o)
	mustDelete(t, s, ns, 0, 1)
	tiers.CloseUnclean(t, s)
	b, err := os.ReadFile(tombstonesOf(o))
	if err != nil {
		t.Fatal(err)
	}
	b[100] ^= 1
	if err := os.WriteFile(tombstonesOf(o), b, 0o600); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	wantHit(t, s, ns, 2, 5000)
	mustPut(t, s, ns, 5, 50_000, g3)
	tiers.CloseUnclean(t, s)
	rep := repair(t, o, &tiers.RepairOptions{Force: true})
	if rep.Blocks != 1 || rep.Stale != 4 || len(rep.Problems) == 0 {
		t.Errorf("%+v", rep)
	}

	// Of a newer version they are left as they are.
	newer := bytes.Repeat([]byte("KVTTOMB\n"), 64)
	if err := os.WriteFile(tombstonesOf(o), newer, 0o600); err != nil {
		t.Fatal(err)
	}
	o.SweepAfter = time.Millisecond
	s = openStore(t, o)
	eventually(t, "free room is swept", func() bool { return !tiers.Unswept(s) })
	tiers.AwaitCommits(s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if rep := repair(t, o, &tiers.RepairOptions{Force: true}); rep.Blocks != 1 || rep.Stale != 0 {
		t.Errorf("after a sweep: %+v", rep)
	}
}

// TestTombstonesBounded: more deletes than there may be tombstones make a repair leave
// out what is on the slab, and nothing else.
func TestTombstonesBounded(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	o := slabPair(t)
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	var here []int
	for i := 1; i <= 10; i++ {
		mustPut(t, s, ns, i, 5000, g3)
		if placeIn(t, s, ns, i, block.G3).Device() == 0 {
			here = append(here, i)
		}
	}
	one := o
	one.Slabs = o.Slabs[:1]
	s = reopen(t, s, one)
	const part = 1 << 15
	hs := make([]byte, 0, part*hashLen)
	for i := 0; i <= index.MaxTombstones; i += part {
		hs = hs[:0]
		for j := range part {
			hs = append(hs, pack(hashOf(1000+i+j))...)
		}
		if _, err := s.Delete(within(t, 2*time.Minute), ns.ID, hashLen, hs); err != nil {
			t.Fatal(err)
		}
	}
	st, err := os.Stat(tombstonesOf(o))
	if err != nil || st.Size() != 512 {
		t.Errorf("%d tombstones are in a file of %d bytes, %v", index.MaxTombstones+part, st.Size(), err)
	}
	// No more are needed for the absent slab.
	mustDelete(t, s, ns, 0, 999)
	if st, err := os.Stat(tombstonesOf(o)); err != nil || st.Size() != 512 {
		t.Errorf("one more delete: %d bytes, %v", st.Size(), err)
	}
	closeAs(t, s, "clean")
	if got := repaired(t, o, ns, numbersTo(10)); !slices.Equal(got, here) {
		t.Errorf("blocks %v are there, want %v", got, here)
	}
}

// TestTombstonesFullDisk: a delete that cannot have its tombstone fails, and one that
// comes when there is room again does not.
func TestTombstonesFullDisk(t *testing.T) {
	t.Parallel()
	o := slabPair(t)
	var full atomic.Bool
	o.Catalog = &index.CatalogOptions{FS: errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if full.Load() && strings.Contains(op.Path, ".tombstones") && op.Kind == errorfs.OpFileWrite {
			return syscall.ENOSPC
		}
		return nil
	}))}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	for i := 1; i <= 10; i++ {
		mustPut(t, s, ns, i, 5000, block.PutOptions{Durable: block.G3})
	}
	one := o
	one.Slabs = o.Slabs[:1]
	s = reopen(t, s, one)
	all := numbersTo(10)
	for part := range slices.Chunk(all, 5) { // the second when there are tombstones
		var hs []byte
		for _, i := range part {
			hs = append(hs, pack(hashOf(i))...)
		}
		full.Store(true)
		if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, hs); !errors.Is(err, block.ErrNoSpace) {
			t.Fatalf("delete: %v, want ErrNoSpace", err)
		}
		full.Store(false)
		mustDelete(t, s, ns, 0, part...)
	}
	closeAs(t, s, "clean")
	o.Catalog = nil
	if got := repaired(t, o, ns, all); len(got) != 0 {
		t.Errorf("blocks %v are there", got)
	}
}

// TestFailedPutKeepsAway: a put that failed takes no block from a slab that is not
// here, whether it fails before its record can be in the catalog or afterwards.
func TestFailedPutKeepsAway(t *testing.T) {
	t.Parallel()
	g3 := block.PutOptions{Durable: block.G3}
	for _, at := range []string{"Write", "Flush", "CatalogWrite", "CatalogSync"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			o := slabPair(t)
			var sectors badSectors
			o.Agent = agentWith(t, sectors.wrap)
			fault := &diskFault{kinds: diskWrites, errno: syscall.EIO, from: 1}
			if at == "CatalogSync" {
				fault.kinds = diskSyncs
			}
			o.Catalog = &index.CatalogOptions{FS: errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(fault.MaybeError))}
			s := openStore(t, o)
			ns := space(t, s, "a", 8<<20)
			away := 0
			for i := 1; i <= 4; i++ {
				mustPut(t, s, ns, i, 5000, g3)
				if placeIn(t, s, ns, i, block.G3).Device() == 1 {
					away = i
				}
			}
			if away == 0 {
				t.Fatal("no block is on the second slab")
			}
			one := o
			one.Slabs = o.Slabs[:1]
			s = reopen(t, s, one)
			var failing atomic.Bool
			tiers.WrapFlush(s, func(_ int, _ string, flush func() error) error {
				if failing.Load() {
					return syscall.EIO
				}
				return flush()
			})
			fail := func(on bool) {
				switch at {
				case "Write":
					if sectors.clear(); on {
						sectors.add(xfer.Write, 0, 64<<20, -1)
					}
				case "Flush":
					failing.Store(on)
				default:
					fault.set(on)
				}
			}
			fail(true)
			if err := put(s, ns, away, payload(away, 5000), g3); err == nil {
				t.Fatal("the put has not failed")
			}
			fail(false)
			eventually(t, "a durable put succeeds again", func() bool { return put(s, ns, 10, payload(10, 5000), g3) == nil })
			s = reopen(t, s, o)
			for i := 1; i <= 4; i++ {
				wantHit(t, s, ns, i, 5000)
			}
			wantHit(t, s, ns, 10, 5000)
		})
	}
}

// TestTombstonesLost: when the file of tombstones is lost, a repair refuses, and says
// what may come of it; and a store that opens without it takes care that no later
// repair raises anything.
func TestTombstonesLost(t *testing.T) {
	t.Parallel()
	o := slabPair(t)
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, 5000, g3)
	}
	back := raw(t, s, o, ns, 1, 5000)
	mustDelete(t, s, ns, 1, 1)
	tiers.CloseUnclean(t, s)
	back()
	s = openStore(t, o)
	mustDelete(t, s, ns, 0, 1)
	tiers.CloseUnclean(t, s)
	lose := func() {
		t.Helper()
		if err := os.Remove(tombstonesOf(o)); err != nil {
			t.Fatal(err)
		}
	}
	lose()
	loseCatalog(t, o.Dir, "lost")
	if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), tombstonesOf(o)) || !strings.Contains(err.Error(), "lost") {
		t.Fatalf("repair: %v", err)
	}
	if rep := repair(t, o, &tiers.RepairOptions{NoTombstones: true}); rep.Blocks != 4 || len(rep.Problems) != 1 {
		t.Errorf("repair without tombstones: %+v", rep)
	}
	s = openStore(t, o) // knows of none any more
	wantHit(t, s, ns, 1, 5000)
	mustDelete(t, s, ns, 1, 1) // what the repair has raised; it is unswept still
	tiers.CloseUnclean(t, s)
	lose()
	s = openStore(t, o)
	if !tiers.Unswept(s) {
		t.Error("the store has not noticed")
	}
	for i := 2; i <= 4; i++ {
		wantHit(t, s, ns, i, 5000)
	}
	tiers.CloseUnclean(t, s)
	if rep := repair(t, o, &tiers.RepairOptions{Force: true}); rep.Blocks != 0 || len(rep.Problems) == 0 {
		t.Errorf("repair before the sweep: %+v", rep)
	}
}

// TestSweepOnce: a slab that stays away is remembered, and not a reason to sweep the
// others with each start. When it is back it alone is swept, and the tombstones go.
func TestSweepOnce(t *testing.T) {
	t.Parallel()
	o := slabPair(t)
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	var here, away []int
	for i := 1; i <= 10; i++ {
		mustPut(t, s, ns, i, 5000, g3)
		if placeIn(t, s, ns, i, block.G3).Device() == 0 {
			here = append(here, i)
		} else {
			away = append(away, i)
		}
	}
	one := o
	one.Slabs = o.Slabs[:1]
	s = reopen(t, s, one)
	mustDelete(t, s, ns, 1, here[0], away[0])
	for range 2 {
		s = reopen(t, s, one)
		if tiers.Unswept(s) {
			t.Fatal("the slab that is here is to be swept")
		}
		mustDelete(t, s, ns, 0, away[0])
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// The dead one is dead still, although every stop was in order.
	if got := repaired(t, o, ns, []int{here[0], away[0]}); len(got) != 0 {
		t.Errorf("blocks %v are there", got)
	}
	s = openStore(t, one) // the repaired catalog is swept once, in part
	one.SweepAfter, o.SweepAfter = time.Millisecond, time.Millisecond
	s = reopen(t, s, one)
	eventually(t, "free room is swept", func() bool { return !tiers.Unswept(s) })
	tiers.AwaitCommits(s)
	mustDelete(t, s, ns, 0, away[1])
	if _, err := os.Stat(tombstonesOf(o)); err != nil {
		t.Error(err)
	}
	s = reopen(t, s, o)
	eventually(t, "the slab is swept, and the tombstones are gone", func() bool {
		_, err := os.Stat(tombstonesOf(o))
		return !tiers.Unswept(s) && errors.Is(err, os.ErrNotExist)
	})
	s = reopen(t, s, o)
	if tiers.Unswept(s) {
		t.Error("it is to be swept again")
	}
	for _, i := range append(here[1:], away[2:]...) {
		wantHit(t, s, ns, i, 5000)
	}
}
