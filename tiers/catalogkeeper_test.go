package tiers_test

import (
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// fullDisk is a file system that has no room while full is set.
func fullDisk(full *atomic.Bool) vfs.FS {
	return errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if full.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpRemove {
			return syscall.ENOSPC
		}
		return nil
	}))
}

// TestCatalogWithoutRoom: while the catalog cannot be written nothing new is
// durable, and what is there is served; when there is room again all goes on,
// without a restart, and what was deleted meanwhile is gone.
func TestCatalogWithoutRoom(t *testing.T) {
	t.Parallel()
	const size = 3000
	var full atomic.Bool
	o := tiers.Options{
		Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20,
		Catalog: &index.CatalogOptions{FS: fullDisk(&full)},
	}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	durable := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, size, durable)
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
	}
	if st := s.Stats().Catalog; st.State != block.Healthy || st.Errors != 0 {
		t.Errorf("catalog %+v", st)
	}

	full.Store(true)
	if err := put(s, ns, 5, payload(5, size), durable); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("durable put: %v, want ErrNoSpace", err)
	}
	if st := s.Stats().Catalog; st.State != block.Degraded || st.Reason == "" || st.Errors != 1 || time.Since(st.Since) > time.Minute {
		t.Errorf("catalog %+v", st)
	}
	mustPut(t, s, ns, 6, size, block.PutOptions{})
	for _, i := range []int{1, 2, 6} {
		wantHit(t, s, ns, i, size)
	}
	wantMiss(t, s, ns, 5, block.MissAbsent)
	if _, err := s.Delete(within(t, 10*time.Second), ns.ID, hashLen, pack(hashOf(3))); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("delete: %v, want ErrNoSpace", err)
	}
	wantMiss(t, s, ns, 3, block.MissAbsent)
	if _, err := s.Clear(within(t, 10*time.Second), ns.ID); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("clear: %v, want ErrNoSpace", err)
	}
	if freed := tiers.Evict(s, block.G3, tiers.HandleOf(s, keyOf(ns, 4))); freed != 0 {
		t.Errorf("evicting freed %d bytes of which the record may be there", freed)
	}
	wantHit(t, s, ns, 4, size)

	full.Store(false)
	eventually(t, "the catalog works", func() bool { return s.Stats().Catalog.State == block.Healthy })
	mustPut(t, s, ns, 5, size, durable)
	mustDelete(t, s, ns, 0, 3)
	if _, there, err := tiers.Catalog(s).Get(keyOf(ns, 3), hashLen); there || err != nil {
		t.Errorf("deleted, and in the catalog: %v, %v", there, err)
	}
	slot, _ := tiers.SlotBytes(size)
	eventually(t, "only 1, 2, 4 and 5 have slots", func() bool { return used(s, block.G3) == 4*slot })
	mustPut(t, s, ns, 7, size, durable)

	s = reopen(t, s, o)
	for _, i := range []int{1, 2, 4, 5, 7} {
		wantHit(t, s, ns, i, size)
	}
	wantMiss(t, s, ns, 3, block.MissAbsent)
	wantMiss(t, s, ns, 6, block.MissAbsent)
	wantEmpty(t, s)
}

// TestCatalogFailsUnderDelete: what a store that is closed could not drop is in
// the catalog again, and the next opening knows that it was not closed in order.
func TestCatalogFailsUnderDelete(t *testing.T) {
	var full atomic.Bool
	o := tiers.Options{
		Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20,
		Catalog: &index.CatalogOptions{FS: fullDisk(&full)},
	}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	s = reopen(t, s, o)
	if tiers.Unswept(s) {
		t.Error("closed in order, and it is to be swept")
	}
	full.Store(true)
	if _, err := s.Delete(within(t, 10*time.Second), ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("delete: %v, want ErrNoSpace", err)
	}
	_ = s.Close() // it may tell that the catalog could not be written
	full.Store(false)
	s = openStore(t, o)
	if !tiers.Unswept(s) {
		t.Error("it was not closed in order, and is not to be swept")
	}
	wantHit(t, s, ns, 1, 3000)
}
