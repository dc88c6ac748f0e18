package tiers_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// badSectors lets a file backend fail where sectors are bad.
type badSectors struct {
	mu  sync.Mutex
	bad []*badSector
}

// badSector is a range of a file that cannot be moved, so many times or, below 0,
// for ever.
type badSector struct {
	op       xfer.Op
	from, to uint64
	times    int
}

func (b *badSectors) add(op xfer.Op, from, n int64, times int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bad = append(b.bad, &badSector{op, uint64(slabDataAt + from), uint64(slabDataAt + from + n), times})
}

func (b *badSectors) clear() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bad = nil
}

func (b *badSectors) hit(op xfer.Op, at xfer.Bound) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.bad {
		if s.op == op && s.times != 0 && at.Addr < s.to && at.Addr+at.Len > s.from {
			s.times--
			return fmt.Errorf("%w: %w", xfer.ErrUnavailable, syscall.EIO)
		}
	}
	return nil
}

func (b *badSectors) wrap(inner xfer.Backend) xfer.Backend {
	return sectored{spy{inner, func(xfer.Op, []xfer.Bound, []xfer.Bound) {}}, b}
}

type sectored struct {
	spy
	bad *badSectors
}

func (s sectored) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	v := p.(spied)
	if v.op == xfer.Write { // nothing of it is written
		for i := range v.remote {
			if err := s.bad.hit(v.op, v.remote[i]); err != nil {
				return err
			}
		}
	}
	return s.spy.Transfer(ctx, p, func(i int, err error) {
		if err == nil {
			err = s.bad.hit(v.op, v.remote[i])
		}
		done(i, err)
	})
}

// watchRemoved counts the blocks that are told to be lost, by reason.
func watchRemoved(t testing.TB, s *tiers.Store) (counts [8]*atomic.Int64) {
	t.Helper()
	for i := range counts {
		counts[i] = new(atomic.Int64)
	}
	ready := make(chan struct{})
	go s.Watch(t.Context(), block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}, func(ev block.Event) error {
		if ev.Kind == block.EventRemoved && ev.Last {
			counts[ev.Reason].Add(1)
		}
		return nil
	})
	<-ready
	return counts
}

// quickProbes are the options of a store with one slab whose blocks are read again
// without a pause.
func quickProbes(t testing.TB, agent *xfer.Agent) tiers.Options {
	return tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: agent, DRAM: 16 << 20, ProbeEvery: 5 * time.Millisecond}
}

// TestScrubUnreadable: a block that cannot be read, and around which all can, is
// dropped, or written anew when G2 has it; one that can be read the next time stays.
// Nobody gets the slot of a lost block until it can be read and written.
func TestScrubUnreadable(t *testing.T) {
	t.Parallel()
	const n, size = 20, 70_000
	var sectors badSectors
	o := quickProbes(t, agentWith(t, sectors.wrap))
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	for i := 1; i <= n; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	s = reopen(t, s, o)
	slot, _ := tiers.SlotBytes(size)
	wantHit(t, s, ns, 7, size) // brings it up
	lost := placeIn(t, s, ns, 5, block.G3)
	for i, times := range map[int]int{5: -1, 7: -1, 9: 2, 11: 3} {
		sectors.add(xfer.Read, placeIn(t, s, ns, i, block.G3).Offset()+8192, 512, times)
	}
	told := watchRemoved(t, s)
	wantMiss(t, s, ns, 5, block.MissUnavailable)
	before := used(s, block.G3)
	scrub := func() block.ScrubStatus {
		t.Helper()
		if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: fast, Restart: true}); err != nil {
			t.Fatal(err)
		}
		return scrubbed(t, s)
	}
	if st := scrub(); st.State != block.ScrubDone || st.Damaged != 2 || st.Repaired != 1 || st.Dropped != 1 {
		t.Errorf("scrub: %+v", st)
	}
	eventually(t, "a block is told to be unreadable", func() bool { return told[block.Unreadable].Load() == 1 })
	wantMiss(t, s, ns, 5, block.MissAbsent)
	st := s.Stats()
	if st.Removed["unreadable"] != 1 || st.Removed["damaged"] != 0 || st.Corrupt != 0 {
		t.Errorf("removed %v, corrupt %d", st.Removed, st.Corrupt)
	}
	// Two slots are bad, one block has another slot instead.
	if d := st.Tiers[1].Devices[0]; d.Quarantined != 2*slot || used(s, block.G3) != before+slot {
		t.Errorf("%d bytes in quarantine, %d used, before %d", d.Quarantined, used(s, block.G3), before)
	}
	for i := n + 1; i <= 2*n; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
		if placeIn(t, s, ns, i, block.G3) == lost {
			t.Errorf("block %d is where block 5 could not be read", i)
		}
	}
	mustPut(t, s, ns, 5, size, block.PutOptions{Durable: block.G3}) // it comes anew
	sectors.clear()
	if st := scrub(); st.State != block.ScrubDone || st.Damaged != 0 {
		t.Errorf("scrub: %+v", st)
	}
	if got := s.Stats().Tiers[1].Devices[0].Quarantined; got != 0 || used(s, block.G3) != 2*n*slot {
		t.Errorf("%d bytes in quarantine, %d used of %d blocks", got, used(s, block.G3), 2*n)
	}
	s = reopen(t, s, o)
	for i := 1; i <= 2*n; i++ {
		wantHit(t, s, ns, i, size)
	}
	wantEmpty(t, s)
}

// TestScrubSickRegion: where what is around a block cannot be read either, the scrub
// drops nothing: the part of the device may come back.
func TestScrubSickRegion(t *testing.T) {
	t.Parallel()
	const n, size = 40, 1 << 20
	var sectors badSectors
	o := quickProbes(t, agentWith(t, sectors.wrap))
	s := openStore(t, o)
	ns := space(t, s, "a", 2<<20)
	for i := 1; i <= n; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	s = reopen(t, s, o)
	for _, blocks := range []int{3, 8, n} {
		sectors.add(xfer.Read, placeIn(t, s, ns, 4, block.G3).Offset(), int64(blocks)<<20, -1)
		if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: fast, Restart: true}); err != nil {
			t.Fatal(err)
		}
		// When more in a row cannot be read it is the device, and the scrub ends.
		if st := scrubbed(t, s); st.Dropped != 0 || (st.State == block.ScrubDone) != (blocks < n) || st.State == block.ScrubDone && st.Damaged < int64(blocks) {
			t.Errorf("%d MiB cannot be read: %+v", blocks, st)
		}
		sectors.clear()
		eventually(t, "the device is well", func() bool { return s.Stats().Tiers[1].Devices[0].State == block.Healthy })
	}
	for i := 1; i <= n; i++ {
		wantHit(t, s, ns, i, size)
	}
}

// TestBadSlotIsLeftOut: a slot that cannot be written is not handed out to one put
// after the other.
func TestBadSlotIsLeftOut(t *testing.T) {
	t.Parallel()
	const size = 70_000
	var sectors badSectors
	o := quickProbes(t, agentWith(t, sectors.wrap))
	o.SweepAfter = 20 * time.Millisecond
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	mustPut(t, s, ns, 1, size, block.PutOptions{Durable: block.G3})
	slot, _ := tiers.SlotBytes(size)
	sectors.add(xfer.Write, placeIn(t, s, ns, 1, block.G3).Offset()+slot, slot, -1)
	failed := 0
	for i := 2; i <= 20; i++ {
		if err := put(s, ns, i, payload(i, size), block.PutOptions{Durable: block.G3}); err != nil {
			failed++
		} else {
			wantHit(t, s, ns, i, size)
		}
	}
	if failed > 1 {
		t.Errorf("%d puts failed for one slot", failed)
	}
	sectors.clear()
	eventually(t, "the slot is swept and given back", func() bool {
		return !tiers.Unswept(s) && s.Stats().Tiers[1].Devices[0].Quarantined == 0
	})
	wantEmpty(t, s)
}
