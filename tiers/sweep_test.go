package tiers_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// TestSweepOtherClass: slots of another size take the room of old headers before
// the sweep comes there. Those headers then lie in the middle of free slots, behind
// the bytes of blocks, and behind the last slot, and go all the same.
func TestSweepOtherClass(t *testing.T) {
	t.Parallel()
	after := time.Second
	for !sweepOtherClass(t, after) { // a disk that is busy takes the put no sooner
		if after *= 2; after > 16*time.Second {
			t.Fatal("the sweep came first")
		}
	}
}

// sweepOtherClass is false when the sweep came first.
func sweepOtherClass(t *testing.T, after time.Duration) bool {
	t.Helper()
	const small = 700
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 32 << 20, SweepAfter: after}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	slot, _ := tiers.SlotBytes(small)
	const n = 40
	whole := map[int64][]byte{}
	for i := 1; i <= n; i++ {
		mustPut(t, s, ns, i, small, g3)
		off := placeIn(t, s, ns, i, block.G3).Offset()
		inFile(t, o.Slabs[0].Path, off, int(slot), func(b []byte) { whole[off] = bytes.Clone(b) })
	}
	for i := 1; i <= n; i++ {
		mustDelete(t, s, ns, 1, i)
	}
	tiers.CloseUnclean(t, s)
	for off, old := range whole {
		inFile(t, o.Slabs[0].Path, off, int(slot), func(b []byte) { copy(b, old) })
	}
	s = openStore(t, o)
	mustPut(t, s, ns, 100, 5000, g3)
	if !tiers.Unswept(s) {
		return false
	}
	eventually(t, "free room is swept", func() bool { return !tiers.Unswept(s) })
	for off := range whole {
		inFile(t, o.Slabs[0].Path, off, 512, func(b []byte) {
			hd, err := tiers.DecodeHeader(b, tiers.SealOf(s, block.PlaceAt(0, off)))
			if err == nil && hd.Hash != hashOf(100) {
				t.Errorf("header of %s at %d", hd.Hash.Hex(hashLen), off)
			}
		})
	}
	wantHit(t, s, ns, 100, 5000)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	loseCatalog(t, o.Dir, "lost")
	if rep := repair(t, o, nil); rep.Blocks != 1 {
		t.Errorf("repair: %+v", rep)
	}
	return true
}

// TestDeleteOnAbsentSlab deletes a block whose slab is not there. When the slab is
// back it has the block's header still, which the sweep erases.
func TestDeleteOnAbsentSlab(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := tiers.Options{Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t), SweepAfter: time.Millisecond, Slabs: []tiers.SlabSpec{
		{Path: filepath.Join(dir, "0"), Bytes: 64 << 20}, {Path: filepath.Join(dir, "1"), Bytes: 64 << 20},
	}}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	var gone []int
	for i := 1; i <= 10; i++ {
		mustPut(t, s, ns, i, 5000, block.PutOptions{Durable: block.G3})
		if placeIn(t, s, ns, i, block.G3).Device() == 1 {
			gone = append(gone, i)
		}
	}
	if len(gone) == 0 || len(gone) == 10 {
		t.Fatalf("blocks %v are on the second slab", gone)
	}
	one := o
	one.Slabs = o.Slabs[:1]
	s = reopen(t, s, one)
	mustDelete(t, s, ns, 0, gone...)
	s = reopen(t, s, o)
	eventually(t, "free room is swept", func() bool { return !tiers.Unswept(s) })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	loseCatalog(t, o.Dir, "lost")
	if rep := repair(t, o, nil); rep.Blocks != int64(10-len(gone)) {
		t.Errorf("%d blocks were deleted, repair: %+v", len(gone), rep)
	}
}

// TestSweepAfterFailure: a header that could not be erased is erased when the device
// works again.
func TestSweepAfterFailure(t *testing.T) {
	t.Parallel()
	var disk xfertest.Injector
	agent := agentWith(t, disk.Wrap)
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: agent, DRAM: 16 << 20, SweepAfter: 50 * time.Millisecond}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	off := placeIn(t, s, ns, 1, block.G3).Offset()
	disk.Set(xfertest.Rule{Fault: xfertest.Fail, Ops: []xfer.Op{xfer.Write}})
	if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("delete: %v, want ErrUnavailable", err)
	}
	disk.Clear()
	eventually(t, "the header is erased", func() (gone bool) {
		inFile(t, o.Slabs[0].Path, off, 512, func(b []byte) {
			_, err := tiers.DecodeHeader(b, tiers.SealOf(s, block.PlaceAt(0, off)))
			gone = errors.Is(err, tiers.ErrNoSlot)
		})
		return gone
	})
	eventually(t, "the sweep has ended", func() bool { return !tiers.Unswept(s) })
	if s = reopen(t, s, o); tiers.Unswept(s) {
		t.Error("it is to be swept again")
	}
}

// TestSweepBeforeFree: a sweep that comes to a header which could not be erased, before its
// slot is free, does not count it as swept.
func TestSweepBeforeFree(t *testing.T) {
	t.Parallel()
	var disk xfertest.Injector
	var reads atomic.Int64
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{disk.Wrap(b), func(op xfer.Op, _, _ []xfer.Bound) {
			if op == xfer.Read {
				reads.Add(1)
			}
		}}
	})
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: agent, DRAM: 16 << 20, SweepAfter: time.Millisecond}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	off := placeIn(t, s, ns, 1, block.G3).Offset()
	disk.Set(xfertest.Rule{Fault: xfertest.Fail, Ops: []xfer.Op{xfer.Write}})
	// The committer stands still behind the erasure that has failed, ahead of what follows.
	one := tiers.HoldCommits(s)
	other := make(chan func())
	go func() { other <- tiers.HoldCommits(s) }()
	eventually(t, "the next round has begun to fill", func() bool { return tiers.QueuedCommits(s) == 1 })
	deleted := make(chan error)
	ctx := within(t, time.Minute)
	go func() {
		_, err := s.Delete(ctx, ns.ID, hashLen, pack(hashOf(1)))
		deleted <- err
	}()
	eventually(t, "the delete is queued", func() bool { return tiers.QueuedCommits(s) > 1 })
	before := reads.Load()
	one()
	release := <-other
	eventually(t, "a sweep has come by", func() bool { return reads.Load() > before+1 })
	disk.Clear()
	release()
	if err := <-deleted; !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("delete: %v, want ErrUnavailable", err)
	}
	eventually(t, "all is swept", func() bool { return !tiers.Suspect(s, 0) })
	inFile(t, o.Slabs[0].Path, off, 512, func(b []byte) {
		if hd, err := tiers.DecodeHeader(b, tiers.SealOf(s, block.PlaceAt(0, off))); !errors.Is(err, tiers.ErrNoSlot) {
			t.Errorf("at %d there is %+v, %v", off, hd, err)
		}
	})
}
