package tiers_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// wantErased wants the header of a slot to be zeros.
func wantErased(t testing.TB, path string, off int64) {
	t.Helper()
	inFile(t, path, off, 512, func(b []byte) {
		if _, err := tiers.DecodeHeader(b, tiers.Seal{Version: 2}); !errors.Is(err, tiers.ErrNoSlot) {
			t.Errorf("header at %d: %v, want none", off, err)
		}
	})
}

// TestHeadersAreErased: whichever way a block leaves G3, its slot has no header
// when the slot is free.
func TestHeadersAreErased(t *testing.T) {
	withoutRace(t)
	for name, leave := range map[string]func(t *testing.T, s *tiers.Store, ns block.Namespace, o tiers.Options){
		"Delete": func(t *testing.T, s *tiers.Store, ns block.Namespace, _ tiers.Options) { mustDelete(t, s, ns, 1, 1) },
		"Evict": func(_ *testing.T, s *tiers.Store, ns block.Namespace, _ tiers.Options) {
			tiers.Evict(s, block.G3, tiers.HandleOf(s, keyOf(ns, 1)))
		},
		"Damage": func(t *testing.T, s *tiers.Store, ns block.Namespace, o tiers.Options) {
			inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 1, block.G3).Offset(), 1024, func(b []byte) { b[600] ^= 1 })
			wantMiss(t, s, ns, 1, block.MissCorrupt)
		},
		"Expire": func(t *testing.T, s *tiers.Store, ns block.Namespace, _ tiers.Options) {
			putBriefly(t, s, ns, 2, 3000)
			mustDelete(t, s, ns, 1, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, o, ns := coldBlocks(t, nil, 1, 3000)
			off := placeIn(t, s, ns, 1, block.G3).Offset()
			leave(t, s, ns, o)
			eventually(t, "the slots are free", func() bool { return used(s, block.G3) == 0 })
			wantErased(t, o.Slabs[0].Path, off)
			wantErased(t, o.Slabs[0].Path, off+3584)
		})
	}
}

// TestDeleteUnderRead: a get that had begun when the block was deleted, and finds
// its header erased, answers that it is absent, and nothing counts as damaged.
func TestDeleteUnderRead(t *testing.T) {
	for _, promote := range []bool{true, false} {
		var before func()
		agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
			return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
				if op == xfer.Read && before != nil {
					before()
				}
			}}
		})
		s, _, ns := coldBlocks(t, agent, 1, 3000)
		var once sync.Once
		before = func() { once.Do(func() { mustDelete(t, s, ns, 1, 1) }) }
		_, p, err := get(s, ns, 1, block.GetOptions{NoPromote: !promote})
		if err != nil || p.Reason != block.MissAbsent {
			t.Errorf("promote %v: %v, %v, want absent", promote, p.Reason, err)
		}
		if n := s.Stats().Corrupt; n != 0 {
			t.Errorf("promote %v: %d corrupt", promote, n)
		}
		wantEmpty(t, s)
	}
}

// TestDeleteUnderWrite: a delete that meets a copy on its way down is answered when
// what that has written is erased.
func TestDeleteUnderWrite(t *testing.T) {
	begun, goOn := make(chan int64, 1), make(chan struct{})
	var once sync.Once
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, remote []xfer.Bound) {
			if op == xfer.Write {
				once.Do(func() {
					begun <- int64(remote[0].Addr) - slabDataAt
					<-goOn
				})
			}
		}}
	})
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: agent, DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	wrote := make(chan error, 1)
	go func() { wrote <- put(s, ns, 1, payload(1, 3000), block.PutOptions{Durable: block.G3}) }()
	off := <-begun
	patiently(t, 20*time.Millisecond, func(ctx context.Context) bool {
		if _, err := s.Delete(ctx, ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("delete while the copy is written: %v, want the deadline", err)
		}
		return tiersOf(t, s, ns, 1) == ""
	})
	// Nor is another one, although the block is not there any more.
	if _, err := s.Delete(within(t, 20*time.Millisecond), ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("delete while the copy is written: %v, want the deadline", err)
	}
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	close(goOn)
	mustDelete(t, s, ns, 1, 1)
	wantErased(t, o.Slabs[0].Path, off)
	if err := <-wrote; !errors.Is(err, block.ErrNotFound) {
		t.Errorf("durable put of what is deleted: %v", err)
	}
	wantEmpty(t, s)
}

// TestFlushFails: a put whose bytes may be lost is not durable, although a later
// flush succeeds; and the slab is used again.
func TestFlushFails(t *testing.T) {
	bad := errors.New("input/output error")
	var fails bool
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	tiers.WrapFlush(s, func(_ int, _ string, flush func() error) error {
		if fails {
			return bad
		}
		return flush()
	})
	ns := space(t, s, "a", 8<<20)
	durable := block.PutOptions{Durable: block.G3}

	fails = true
	if err := put(s, ns, 1, payload(1, 3000), durable); !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), bad.Error()) {
		t.Errorf("put: %v, want %v", err, bad)
	}
	fails = false
	well := func() bool { return s.Stats().Tiers[1].Devices[0].State == block.Healthy }
	eventually(t, "the slab is used again", well)
	mustPut(t, s, ns, 1, 3000, durable)

	// Written, and not recorded yet, when a flush fails.
	release := tiers.HoldCommits(s)
	done := make(chan error, 1)
	go func() { done <- put(s, ns, 2, payload(2, 3000), durable) }()
	eventually(t, "the record is queued", func() bool { return tiers.EntryOf(s, keyOf(ns, 2)).Ops > 0 })
	fails = true
	if err := tiers.FlushSlabs(s); !errors.Is(err, bad) {
		t.Fatalf("flush: %v", err)
	}
	fails = false
	release()
	if err := <-done; !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("put: %v, want ErrUnavailable", err)
	}
	if _, there, err := tiers.Catalog(s).Get(keyOf(ns, 2), hashLen); there || err != nil {
		t.Errorf("recorded although its bytes may be lost: %v, %v", there, err)
	}
	slot, _ := tiers.SlotBytes(3000)
	eventually(t, "its slot is free", func() bool { return used(s, block.G3) == slot })
	eventually(t, "the slab is used again", well)
	mustPut(t, s, ns, 2, 3000, durable)
	s = reopen(t, s, o)
	wantHit(t, s, ns, 1, 3000)
	wantHit(t, s, ns, 2, 3000)
	if !tiers.Unswept(s) {
		t.Error("headers could not be erased while the slab was down, and it is not to be swept")
	}
	wantEmpty(t, s)
}

// TestErasureLostByProbe: a flush that nobody of the committer's has asked for fails
// when a header was just erased. The erasure may be lost: a delete does not rely on
// it, nor is the stop a clean one.
func TestErasureLostByProbe(t *testing.T) {
	t.Parallel()
	s, o, ns := coldBlocks(t, nil, 1, 3000)
	var fails atomic.Bool
	tiers.WrapFlush(s, func(_ int, _ string, flush func() error) error {
		if fails.Load() {
			return errors.New("input/output error")
		}
		return flush()
	})
	tiers.Evict(s, block.G3, tiers.HandleOf(s, keyOf(ns, 1)))
	fails.Store(true)
	if err := tiers.FlushSlabs(s); err == nil {
		t.Fatal("the flush has not failed")
	}
	fails.Store(false)
	eventually(t, "the slab is used again", func() bool { return s.Stats().Tiers[1].Devices[0].State == block.Healthy })
	if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("delete: %v, want ErrUnavailable", err)
	}
	if s = reopen(t, s, o); !tiers.Unswept(s) {
		t.Error("it is not to be swept")
	}
}
