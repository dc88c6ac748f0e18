package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// coldBlocks makes a store whose blocks 1 to n, of size bytes each, are in G3
// only, and returns it with its options.
func coldBlocks(t testing.TB, agent *xfer.Agent, n, size int) (*tiers.Store, tiers.Options, block.Namespace) {
	t.Helper()
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	for i := 1; i <= n; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if agent != nil {
		o.Agent = agent
	}
	return openStore(t, o), o, ns
}

// TestDamagedSlots changes the slot of block 1 on the medium in many ways. Every
// one is a miss with a reason, and what was damaged is gone for good; block 2
// stays.
func TestDamagedSlots(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	const size = 70_000 // header block of 4096 bytes
	slot, header := tiers.SlotBytes(size)
	reheader := func(change func(h *tiers.SlotHeader)) func(b []byte, at tiers.Seal) {
		return func(b []byte, at tiers.Seal) {
			h, err := tiers.DecodeHeader(b, at)
			if err != nil {
				panic(err)
			}
			change(&h)
			tiers.EncodeHeader(b[:header], &h, at)
		}
	}
	for _, c := range []struct {
		name   string
		want   block.MissReason
		change func(b []byte, at tiers.Seal) // of the slot
	}{
		{"FirstByte", block.MissCorrupt, func(b []byte, _ tiers.Seal) { b[header] ^= 1 }},
		{"LastByte", block.MissCorrupt, func(b []byte, _ tiers.Seal) { b[header+size-1] ^= 0x80 }},
		{"HeaderBit", block.MissCorrupt, func(b []byte, _ tiers.Seal) { b[20] ^= 1 }},
		{"HeaderGone", block.MissCorrupt, func(b []byte, _ tiers.Seal) { clear(b[:header]) }},
		{"AllZeros", block.MissCorrupt, func(b []byte, _ tiers.Seal) { clear(b) }},
		{"OtherNamespace", block.MissCorrupt, reheader(func(h *tiers.SlotHeader) { h.Digest[0] ^= 1 })},
		{"OtherBlock", block.MissCorrupt, reheader(func(h *tiers.SlotHeader) { h.Hash[0] ^= 1 })},
		{"OtherHashLength", block.MissCorrupt, reheader(func(h *tiers.SlotHeader) { h.HashLen = 32 })},
		{"OlderGeneration", block.MissCorrupt, reheader(func(h *tiers.SlotHeader) { h.Gen-- })},
		{"OtherLength", block.MissCorrupt, reheader(func(h *tiers.SlotHeader) { h.Len-- })},
		{"OtherSum", block.MissCorrupt, reheader(func(h *tiers.SlotHeader) { h.Sum[0] ^= 1 })},
		{"Elsewhere", block.MissCorrupt, func(b []byte, at tiers.Seal) {
			h, err := tiers.DecodeHeader(b, at)
			if err != nil {
				panic(err)
			}
			at.Offset += slot
			tiers.EncodeHeader(b[:header], &h, at)
		}},
		{"OlderVersion", block.MissCorrupt, func(b []byte, at tiers.Seal) {
			h, err := tiers.DecodeHeader(b, at)
			if err != nil {
				panic(err)
			}
			tiers.EncodeHeader(b[:header], &h, tiers.Seal{Version: 1})
		}},
		{"NewerVersion", block.MissUnavailable, func(b []byte, at tiers.Seal) {
			h, err := tiers.DecodeHeader(b, at)
			if err != nil {
				panic(err)
			}
			at.Version = 3
			tiers.EncodeHeader(b[:header], &h, at)
		}},
		{"Padding", block.Hit, func(b []byte, _ tiers.Seal) { b[slot-1] ^= 1 }}, // nobody's bytes
	} {
		for _, promote := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/promote=%v", c.name, promote), func(t *testing.T) {
				s, o, ns := coldBlocks(t, nil, 2, size)
				place := placeIn(t, s, ns, 1, block.G3)
				inFile(t, o.Slabs[0].Path, place.Offset(), int(slot), func(b []byte) { c.change(b, tiers.SealOf(s, place)) })
				got, p, err := get(s, ns, 1, block.GetOptions{NoPromote: !promote})
				if err != nil || p.Reason != c.want || p.Reason == block.Hit && string(got) != string(payload(1, size)) {
					t.Fatalf("get: %v, %v, want %v", p.Reason, err, c.want)
				}
				wantHit(t, s, ns, 2, size)
				if c.want != block.MissCorrupt {
					if st := s.Stats(); st.Corrupt != 0 || st.Blocks != 2 {
						t.Errorf("%d blocks, %d corrupt", st.Blocks, st.Corrupt)
					}
					return
				}
				eventually(t, "the slot is free and the block counted", func() bool {
					return used(s, block.G3) == slot && s.Stats().Removed["damaged"] == 1
				})
				wantMiss(t, s, ns, 1, block.MissAbsent)
				if st := s.Stats(); st.Corrupt != 1 || st.Removed["damaged"] != 1 || st.Misses["corrupt"] != 1 {
					t.Errorf("%d corrupt, removed %v, misses %v", st.Corrupt, st.Removed, st.Misses)
				}
				s = reopen(t, s, o)
				wantMiss(t, s, ns, 1, block.MissAbsent)
				mustPut(t, s, ns, 1, size, block.PutOptions{Durable: block.G3})
				s = reopen(t, s, o)
				wantHit(t, s, ns, 1, size)
				wantHit(t, s, ns, 2, size)
			})
		}
	}
}

// TestMisdirectedSlots exchanges two whole slots: neither is served under the
// other's name.
func TestMisdirectedSlots(t *testing.T) {
	withoutRace(t)
	const size = 3000
	s, o, ns := coldBlocks(t, nil, 2, size)
	slot, _ := tiers.SlotBytes(size)
	var held [2][]byte
	off := [2]int64{placeIn(t, s, ns, 1, block.G3).Offset(), placeIn(t, s, ns, 2, block.G3).Offset()}
	for i := range held {
		inFile(t, o.Slabs[0].Path, off[i], int(slot), func(b []byte) { held[i] = append([]byte(nil), b...) })
	}
	for i := range held {
		inFile(t, o.Slabs[0].Path, off[i], int(slot), func(b []byte) { copy(b, held[1-i]) })
	}
	wantMiss(t, s, ns, 1, block.MissCorrupt)
	wantMiss(t, s, ns, 2, block.MissCorrupt)
	wantEmpty(t, s)
}

// TestTruncatedSlab cuts a slab short under an open store: what lay beyond is
// given up, so that it can be put again; what lies before is served. A store does
// not open on such a slab.
func TestTruncatedSlab(t *testing.T) {
	withoutRace(t)
	const size = 100_000
	s, o, ns := coldBlocks(t, nil, 3, size)
	cut := placeIn(t, s, ns, 3, block.G3).Offset()
	if err := os.Truncate(o.Slabs[0].Path, slabDataAt+cut); err != nil {
		t.Fatal(err)
	}
	wantMiss(t, s, ns, 3, block.MissCorrupt)
	mustPut(t, s, ns, 3, size, block.PutOptions{Durable: block.G3})
	wantHit(t, s, ns, 3, size)
	wantHit(t, s, ns, 1, size)
	wantHit(t, s, ns, 2, size)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := tiers.Open(t.Context(), o); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("open: %v, want ErrInvalid", err)
	}
}

// failing is an agent whose file backend goes wrong.
func failing(t testing.TB, r xfertest.Rule) *xfer.Agent {
	return agentWith(t, func(b xfer.Backend) xfer.Backend { return xfertest.Faulty(b, r) })
}

// TestReadFaults: a device that fails to read gives misses with a reason, keeps
// its blocks, and serves them when it works again.
func TestReadFaults(t *testing.T) {
	t.Parallel()
	const size = 600_000 // several pieces
	for _, c := range []struct {
		name string
		rule xfertest.Rule
		want block.MissReason
		kept bool
	}{
		{"Fail", xfertest.Rule{Fault: xfertest.Fail}, block.MissUnavailable, true},
		{"Short", xfertest.Rule{Fault: xfertest.Short}, block.MissUnavailable, true},
		{"ShortInTheMiddle", xfertest.Rule{Fault: xfertest.Short, Descs: []int{1}}, block.MissUnavailable, true},
		{"Down", xfertest.Rule{Fault: xfertest.Down}, block.MissUnavailable, true},
		{"Corrupt", xfertest.Rule{Fault: xfertest.Corrupt, Descs: []int{1}}, block.MissCorrupt, false},
	} {
		for _, promote := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/promote=%v", c.name, promote), func(t *testing.T) {
				c.rule.Ops, c.rule.Call = []xfer.Op{xfer.Read}, 1
				s, _, ns := coldBlocks(t, failing(t, c.rule), 1, size)
				_, p, err := get(s, ns, 1, block.GetOptions{NoPromote: !promote})
				if err != nil || p.Reason != c.want {
					t.Fatalf("get: %v, %v, want %v", p.Reason, err, c.want)
				}
				if c.kept {
					wantHit(t, s, ns, 1, size)
				}
				wantEmpty(t, s)
			})
		}
	}
}

// TestReadStalls: a device that does not answer costs a call its own time, not
// more, and others nothing. Close ends what is stuck.
func TestReadStalls(t *testing.T) {
	const size = 3000
	resume := make(chan struct{})
	s, _, ns := coldBlocks(t, failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Resume: resume}), 3, size)
	mustPut(t, s, ns, 4, size, block.PutOptions{})
	for _, promote := range []bool{true, false} {
		var got []block.MissReason
		want := []block.Wanted{{Hash: hashOf(4)}, {Hash: hashOf(1)}, {Hash: hashOf(2)}, {Hash: hashOf(9)}}
		ctx, expire := expiring(t)
		err := s.Get(ctx, ns.ID, hashLen, want, block.GetOptions{NoPromote: !promote}, func(_ int, p block.Payload) error {
			got = append(got, p.Reason)
			time.AfterFunc(100*time.Millisecond, expire) // after the hit
			return nil
		})
		if fmt.Sprint(got) != "[hit deadline deadline absent]" || err != nil {
			t.Errorf("promote %v: %v, %v", promote, got, err)
		}
	}
	err := s.Prefetch(within(t, 100*time.Millisecond), ns.ID, hashLen, pack(hashOf(1), hashOf(3)), block.PrefetchOptions{ID: "p"}, func(block.Progress) error { return nil })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("prefetch: %v", err)
	}
	wantHit(t, s, ns, 4, size)
	mustDelete(t, s, ns, 1, 2) // while it is being read
	close(resume)
	wantHit(t, s, ns, 1, size)
	wantMiss(t, s, ns, 2, block.MissAbsent)
	wantEmpty(t, s)
}

// TestCloseWhileStalled closes a store while transfers are stuck in a device.
func TestCloseWhileStalled(t *testing.T) {
	s, _, ns := coldBlocks(t, failing(t, xfertest.Rule{Fault: xfertest.Stall}), 1, 3000)
	_ = s.Get(within(t, 20*time.Millisecond), ns.ID, hashLen, []block.Wanted{{Hash: hashOf(1)}}, block.GetOptions{}, func(int, block.Payload) error { return nil })
	if err := put(s, ns, 2, payload(2, 3000), block.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	err := s.CompareExisting(within(t, 20*time.Millisecond), ns.ID, hashOf(2), 3000, tiers.EntryOf(s, keyOf(ns, 2)).Sum, block.PutOptions{Durable: block.G3})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("durable put: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestWriteFaults: a device that fails to write keeps no block as durable. A
// block that was to move down stays, or is dropped and counted, and its bytes
// are right wherever they are.
func TestWriteFaults(t *testing.T) {
	t.Parallel()
	const size, n = 200_000, 300
	for _, c := range []struct {
		name string
		rule xfertest.Rule
	}{
		{"Fail", xfertest.Rule{Fault: xfertest.Fail}},
		{"FailSometimes", xfertest.Rule{Fault: xfertest.Fail, Chance: 0.3, Seed: 1}},
		{"Short", xfertest.Rule{Fault: xfertest.Short, Chance: 0.3, Seed: 2}},
		{"Down", xfertest.Rule{Fault: xfertest.Down, Chance: 0.3, Seed: 3}},
		{"Corrupt", xfertest.Rule{Fault: xfertest.Corrupt, Chance: 0.3, Seed: 4}},
	} {
		if raceEnabled && c.name != "FailSometimes" {
			continue // one fault is as another to the detector
		}
		t.Run(c.name, func(t *testing.T) {
			c.rule.Ops = []xfer.Op{xfer.Write}
			// A machine that does other things is no stall.
			o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 128<<20), Agent: failing(t, c.rule), DRAM: 16 << 20, StallAfter: time.Minute}
			s := openStore(t, o)
			ns := space(t, s, "a", 1<<20)
			durable := map[int]bool{}
			for i := range n {
				po := block.PutOptions{Durable: block.TierID(2 + i%2)}
				switch err := put(s, ns, i, payload(i, size), po); {
				case err == nil:
					durable[i] = po.Durable == block.G3
				case !errors.Is(err, block.ErrUnavailable) && !errors.Is(err, block.ErrNotFound):
					t.Fatalf("put %d: %v", i, err)
				}
			}
			check := func(s *tiers.Store) (hits int64) {
				for i := range n {
					got, p, err := get(s, ns, i, block.GetOptions{Verify: true})
					switch {
					case err != nil:
						t.Fatalf("get %d: %v", i, err)
					case p.Reason == block.Hit && string(got) != string(payload(i, size)):
						t.Fatalf("get %d: wrong bytes from %v", i, p.Tier)
					case p.Reason == block.Hit:
						hits++
					case p.Reason == block.MissCorrupt && c.rule.Fault == xfertest.Corrupt:
					case p.Reason != block.MissAbsent:
						t.Fatalf("get %d: %v", i, p.Reason)
					case durable[i] && c.rule.Fault != xfertest.Corrupt:
						t.Errorf("get %d: absent, though it was committed to G3", i)
					}
				}
				return hits
			}
			// Reading moves blocks, and a damaged copy is counted when the drop of its
			// record is synced: so until it adds up.
			eventually(t, "each block is there or accounted for", func() bool {
				hits := check(s)
				gone := int64(0)
				for _, k := range s.Stats().Removed {
					gone += k
				}
				return hits+gone == n
			})
			s = reopen(t, s, o)
			check(s)
			wantEmpty(t, s)
		})
	}
}
