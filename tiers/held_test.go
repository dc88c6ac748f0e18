package tiers_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// TestHeld: what a get holds stays as it is when the blocks are deleted and more
// blocks than the tier has room for come after them, and no longer than it says.
func TestHeld(t *testing.T) {
	const size = 1 << 20
	s := openStore(t, tiers.Options{DRAM: 16 << 20, NoSlabs: true})
	ns := space(t, s, "a", size)
	var want []block.Wanted
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{})
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	want = append(want, block.Wanted{Hash: hashOf(5)}) // which is nowhere
	var held []block.Payload
	err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{}, func(i int, p block.Payload) error {
		held = append(held, p)
		if p.Held != (i < 4) {
			t.Errorf("key %d: held %v", i, p.Held)
		}
		if i < 4 {
			mustDelete(t, s, ns, 1, i+1)
			return nil
		}
		for j := 100; j < 140; j++ {
			mustPut(t, s, ns, j, size, block.PutOptions{})
		}
		for j, p := range held[:4] {
			if p.Reason != block.Hit || string(p.Bytes) != string(payload(j+1, size)) {
				t.Errorf("block %d: %v, or other bytes while it is held", j+1, p.Reason)
			}
		}
		return nil
	})
	if err != nil || len(held) != 5 || held[4].Reason != block.MissAbsent {
		t.Errorf("%d answers, %v", len(held), err)
	}
	wantEmpty(t, s)
}

// TestHeldNoWait: what comes before a block that the device still has is not held.
func TestHeldNoWait(t *testing.T) {
	const size = 100_000
	resume := make(chan struct{})
	a := failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Call: 1, Resume: resume})
	s, _, ns := coldBlocks(t, a, 1, size)
	var want []block.Wanted
	for _, i := range []int{11, 12, 1, 13, 14} {
		if i != 1 {
			mustPut(t, s, ns, i, size, block.PutOptions{})
		}
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	var holds []bool
	if err := s.Get(within(t, 20*time.Second), ns.ID, hashLen, want, block.GetOptions{}, func(i int, p block.Payload) error {
		if holds = append(holds, p.Held); i == 1 {
			close(resume)
		}
		if p.Reason != block.Hit {
			t.Errorf("key %d: %v", i, p.Reason)
		}
		return nil
	}); err != nil || !slices.Equal(holds, []bool{true, false, false, true, false}) {
		t.Errorf("held: %v, %v", holds, err)
	}
	wantEmpty(t, s)
}

// TestHeldBound: a get holds no more than it has sent for at once.
func TestHeldBound(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 32 << 20, NoSlabs: true})
	ns := space(t, s, "a", 1000)
	var want []block.Wanted
	for i := 1; i <= 100; i++ {
		mustPut(t, s, ns, i, 1000, block.PutOptions{})
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	var runs []int
	run := 0
	if err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{}, func(_ int, p block.Payload) error {
		if run++; !p.Held {
			runs, run = append(runs, run), 0
		}
		return nil
	}); err != nil || !slices.Equal(runs, []int{64, 36}) {
		t.Errorf("at once: %d, %v", runs, err)
	}
	wantEmpty(t, s)
}
