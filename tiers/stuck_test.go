package tiers_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// TestHangingFlush: a device whose flush never ends costs the other one nothing.
func TestHangingFlush(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := tiers.Options{
		Dir: filepath.Join(dir, "data"), Agent: newAgent(t), DRAM: 16 << 20, StallAfter: stallAfter, ProbeEvery: 20 * time.Millisecond,
		Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "0"), Bytes: 64 << 20}, {Path: filepath.Join(dir, "1"), Bytes: 64 << 20}},
	}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	var hangs atomic.Bool
	resume := make(chan struct{})
	tiers.WrapFlush(s, func(device int, _ string, flush func() error) error {
		if device == 1 && hangs.Load() {
			<-resume
		}
		return flush()
	})
	g3 := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, 5000, g3)
	}
	hangs.Store(true)
	state := func() string { return s.Stats().Tiers[1].Devices[1].State }
	for i := 5; state() != block.Down && i < 100; i++ {
		if err := ends(t, "put", func() error { return put(s, ns, i, payload(i, 5000), g3) }); err != nil && !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("put: %v", err)
		}
	}
	for i := 100; i < 110; i++ {
		if err := ends(t, "put", func() error { return put(s, ns, i, payload(i, 5000), g3) }); err != nil {
			t.Errorf("put: %v", err)
		}
	}
	if err := ends(t, "clear", func() error { _, err := s.Clear(context.Background(), ns.ID); return err }); err != nil {
		t.Errorf("clear: %v", err)
	}
	hangs.Store(false)
	close(resume)
	eventually(t, "the device is healthy", func() bool { return state() == block.Healthy })
	wantEmpty(t, s)
}

// TestStuckErase: a device that does not answer while a header is erased holds up
// no other one's records, and the slot is nobody's until it has answered.
func TestStuckErase(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newSickRig(t, []tiers.SlabSpec{{Path: filepath.Join(dir, "0"), Bytes: 64 << 20}, {Path: filepath.Join(dir, "1"), Bytes: 64 << 20}}, stallAfter)
	g3 := block.PutOptions{Durable: block.G3}
	on := map[uint8]int{}
	for i := 100; len(on) < 2 && i < 120; i++ {
		mustPut(t, r.Store, r.ns, i, sickBytes, g3)
		on[placeIn(t, r.Store, r.ns, i, block.G3).Device()] = i
	}
	taken := used(r.Store, block.G3)
	resume := make(chan struct{})
	r.disk.Set(xfertest.Rule{Fault: xfertest.Hang, Devs: []uint64{1}, Resume: resume})
	err := ends(t, "delete", func() error {
		_, err := r.Delete(context.Background(), r.ns.ID, hashLen, pack(hashOf(on[1])))
		return err
	})
	if !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("delete: %v", err)
	}
	if now := used(r.Store, block.G3); now != taken {
		t.Errorf("the slot is free while the device may write to it: %d bytes, %d before", now, taken)
	}
	for i := 120; i < 125; i++ {
		if err := ends(t, "put", func() error { return put(r.Store, r.ns, i, payload(i, sickBytes), g3) }); err != nil {
			t.Errorf("put: %v", err)
		}
	}
	mustDelete(t, r.Store, r.ns, 1, on[0])
	close(resume)
	r.disk.Clear()
	eventually(t, "the device is healthy", func() bool { return r.device(1).State == block.Healthy })
	wantEmpty(t, r.Store)
}
