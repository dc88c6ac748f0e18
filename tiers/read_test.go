package tiers_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// clientMemory is n bytes that are registered with an agent.
func clientMemory(t testing.TB, a *xfer.Agent, n int64) []byte {
	t.Helper()
	m, err := arena.New(n, nil)
	if err != nil {
		t.Fatal(err)
	}
	l := xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{{Addr: arena.Addr(m.Slice(0, n)), Len: uint64(n)}}}
	if err := a.Register(t.Context(), l, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(a.Deregister(context.Background(), l), m.Close()); err != nil {
			t.Error(err)
		}
	})
	return m.Slice(0, n)
}

// TestReadInto reads blocks into a caller's memory, from both tiers, and leaves
// them where they are.
func TestReadInto(t *testing.T) {
	const size = 300_001
	a := newAgent(t)
	mem := clientMemory(t, a, 1<<20)
	s, o, ns := coldBlocks(t, a, 3, size)
	mustPut(t, s, ns, 4, size, block.PutOptions{})
	for _, c := range []struct {
		i    int
		want block.TierID
	}{{1, block.G3}, {4, block.G2}} {
		for _, verify := range []bool{false, true} {
			clear(mem)
			r := s.ReadInto(t.Context(), keyOf(ns, c.i), mem[4096:], block.GetOptions{Verify: verify})
			if r.Reason != block.Hit || r.Tier != c.want || r.Len != size || string(mem[4096:][:size]) != string(payload(c.i, size)) {
				t.Errorf("block %d, verify %v: %+v", c.i, verify, r)
			}
			if mem[4095] != 0 || mem[4096+size] != 0 {
				t.Errorf("block %d: bytes around its place were changed", c.i)
			}
		}
	}
	if got := tiersOf(t, s, ns, 1); got != "g3" {
		t.Errorf("block 1 went to %s", got)
	}
	if r := s.ReadInto(t.Context(), keyOf(ns, 1), mem[:size-1], block.GetOptions{}); !errors.Is(r.Err, block.ErrInvalid) {
		t.Errorf("short memory: %+v", r)
	}
	if r := s.ReadInto(t.Context(), keyOf(ns, 9), mem, block.GetOptions{}); r.Reason != block.MissAbsent {
		t.Errorf("absent block: %+v", r)
	}
	inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 2, block.G3).Offset()+5000, 1, func(b []byte) { b[0] ^= 1 })
	damageG2(t, s, ns, 4)
	for _, i := range []int{2, 4} {
		if r := s.ReadInto(t.Context(), keyOf(ns, i), mem, block.GetOptions{Verify: true}); r.Reason != block.MissCorrupt || !errors.Is(r.Err, block.ErrCorrupt) {
			t.Errorf("damaged block %d: %+v", i, r)
		}
		if r := s.ReadInto(t.Context(), keyOf(ns, i), mem, block.GetOptions{}); r.Reason != block.MissAbsent {
			t.Errorf("damaged block %d, again: %+v", i, r)
		}
	}
	wantEmpty(t, s)
}

// TestReadIntoStalls: a device that does not answer is a miss by the deadline.
func TestReadIntoStalls(t *testing.T) {
	const size = 3000
	a := failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Call: 1})
	mem := clientMemory(t, a, 1<<20)
	s, _, ns := coldBlocks(t, a, 1, size)
	r := s.ReadInto(within(t, 30*time.Millisecond), keyOf(ns, 1), mem, block.GetOptions{})
	if r.Reason != block.MissDeadline {
		t.Errorf("stalled: %+v", r)
	}
	if r := s.ReadInto(t.Context(), keyOf(ns, 1), mem, block.GetOptions{}); r.Reason != block.Hit || string(mem[:size]) != string(payload(1, size)) {
		t.Errorf("afterwards: %+v", r)
	}
	if e := tiers.EntryOf(s, keyOf(ns, 1)); e.Refs != 0 {
		t.Errorf("%d references are left", e.Refs)
	}
}
