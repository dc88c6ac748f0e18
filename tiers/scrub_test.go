package tiers_test

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// scrubbed waits for the scrub to end and returns how it did.
func scrubbed(t testing.TB, s *tiers.Store) block.ScrubStatus {
	t.Helper()
	eventually(t, "the scrub has ended", func() bool { return s.Stats().Scrub.State != block.ScrubRunning })
	return s.Stats().Scrub
}

const fast = 1 << 40 // bytes per second: no pause

// TestScrub damages blocks in G3: one that G2 has too is written anew, the others
// are dropped, with an event, and what is whole stays.
func TestScrub(t *testing.T) {
	t.Parallel()
	const n, size = 20, 70_000
	s, o, ns := coldBlocks(t, nil, n, size)
	if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: fast}); err != nil {
		t.Fatal(err)
	}
	if st := scrubbed(t, s); st.State != block.ScrubDone || st.Blocks != n || st.Damaged != 0 || st.Done != st.Total || st.Total == 0 {
		t.Fatalf("scrub: %+v", st)
	}
	slot, header := tiers.SlotBytes(size)
	for i, change := range map[int]func(b []byte){
		1: func(b []byte) { b[header] ^= 1 },
		2: func(b []byte) { b[20] ^= 1 },
		3: func(b []byte) { clear(b) },
		4: func(b []byte) { b[header+size-1] ^= 1 },
	} {
		if i == 4 {
			wantHit(t, s, ns, i, size) // brings it up
		}
		inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, i, block.G3).Offset(), int(slot), change)
	}
	var told atomic.Int64 // blocks that are told to be lost
	ready := make(chan struct{})
	go s.Watch(t.Context(), block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}, func(ev block.Event) error {
		if ev.Kind == block.EventRemoved && ev.Reason == block.Damaged && ev.Last {
			told.Add(1)
		}
		return nil
	})
	<-ready
	if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: fast}); err != nil {
		t.Fatal(err)
	}
	st := scrubbed(t, s)
	eventually(t, "three blocks are told to be lost", func() bool { return told.Load() == 3 })
	if st.State != block.ScrubDone || st.Blocks < n || st.Damaged != 4 || st.Repaired != 1 || st.Dropped != 3 {
		t.Errorf("scrub: %+v", st)
	}
	for i := 1; i <= 3; i++ {
		wantMiss(t, s, ns, i, block.MissAbsent)
	}
	if st := s.Stats(); st.Corrupt != 4 || st.Removed["damaged"] != 3 {
		t.Errorf("%d corrupt, removed %v", st.Corrupt, st.Removed)
	}
	s = reopen(t, s, o)
	if got := s.Stats().Scrub; got.State != block.ScrubDone || got.Dropped != 3 {
		t.Errorf("after a restart: %+v", got)
	}
	for i := 4; i <= n; i++ {
		wantHit(t, s, ns, i, size)
	}
}

// TestScrubBesideDelete: a block that is deleted while the scrub reads it is neither
// damaged nor dropped.
func TestScrubBesideDelete(t *testing.T) {
	t.Parallel()
	const n = 3
	var before atomic.Pointer[func()]
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
			if f := before.Load(); op == xfer.Read && f != nil {
				(*f)()
			}
		}}
	})
	s, _, ns := coldBlocks(t, agent, n, 3000)
	var once sync.Once
	first := func() { once.Do(func() { mustDelete(t, s, ns, n, numbersTo(n)...) }) }
	before.Store(&first)
	if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: fast}); err != nil {
		t.Fatal(err)
	}
	if st := scrubbed(t, s); st.State != block.ScrubDone || st.Blocks != 1 || st.Damaged != 0 || st.Dropped != 0 {
		t.Errorf("scrub: %+v", st)
	}
}

// TestScrubGoesOn stops a scrub half way, and lets a restart come between: it
// goes on where it was, and counts each block once.
func TestScrubGoesOn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := tiers.Options{Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t), Slabs: []tiers.SlabSpec{
		{Path: filepath.Join(dir, "s0"), Bytes: 64 << 20}, {Path: filepath.Join(dir, "s1"), Bytes: 64 << 20},
	}}
	s := openStore(t, o)
	ns := space(t, s, "a", 2<<20)
	const n, size = 60, 1 << 20
	for i := 1; i <= n; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	// All of it would take seconds at this rate.
	if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: 16 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := s.StartScrub(block.ScrubOptions{}); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("second start: %v", err)
	}
	eventually(t, "the scrub is through with an extent", func() bool { return s.Stats().Scrub.Done > 0 })
	s.StopScrub()
	st := s.Stats().Scrub
	if st.State != block.ScrubStopped || st.Done == 0 || st.Done >= st.Total {
		t.Fatalf("stopped: %+v", st)
	}
	s = reopen(t, s, o)
	if got := s.Stats().Scrub; got.State != block.ScrubStopped || got.Done != st.Done || got.Blocks != st.Blocks {
		t.Errorf("after a restart: %+v, before it %+v", got, st)
	}
	if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the scrub is further", func() bool { return s.Stats().Scrub.Done > st.Done })
	s = reopen(t, s, o) // it goes on by itself
	if st = scrubbed(t, s); st.State != block.ScrubDone || st.Done != st.Total || st.Damaged != 0 || st.Blocks < n {
		t.Errorf("scrub: %+v", st)
	}
}

// TestSweep puts headers back into room that no record claims, as a crash may
// leave them. After a stop that was not in order they are swept away, and a repair
// raises nothing.
func TestSweep(t *testing.T) {
	t.Parallel()
	for _, size := range []int{700, 70_000, 1 << 20} {
		o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20, SweepAfter: time.Millisecond}
		s := openStore(t, o)
		ns := space(t, s, "a", 2<<20)
		for i := 1; i <= 12; i++ {
			mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
		}
		// 1 to 8 leave: with some of them goes a whole extent, if they filled one.
		slot, _ := tiers.SlotBytes(int64(size))
		whole := map[int64][]byte{}
		for i := 1; i <= 8; i++ {
			off := placeIn(t, s, ns, i, block.G3).Offset()
			inFile(t, o.Slabs[0].Path, off, int(slot), func(b []byte) { whole[off] = append([]byte(nil), b...) })
		}
		mustDelete(t, s, ns, 8, 1, 2, 3, 4, 5, 6, 7, 8)
		tiers.CloseUnclean(t, s)
		for off, old := range whole {
			inFile(t, o.Slabs[0].Path, off, int(slot), func(b []byte) { copy(b, old) })
		}
		s = openStore(t, o)
		eventually(t, "free room is swept", func() bool { return !tiers.Unswept(s) })
		for off := range whole {
			inFile(t, o.Slabs[0].Path, off, 512, func(b []byte) {
				if _, err := tiers.DecodeHeader(b, tiers.SealOf(s, block.PlaceAt(0, off))); !errors.Is(err, tiers.ErrNoSlot) {
					t.Errorf("size %d: header at %d: %v", size, off, err)
				}
			})
		}
		for i := 9; i <= 12; i++ {
			wantHit(t, s, ns, i, size)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		loseCatalog(t, o.Dir, "lost")
		if rep := repair(t, o, nil); rep.Blocks != 4 {
			t.Errorf("size %d: repair: %+v", size, rep)
		}
	}
}
