package tiers_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// lendSession owns the leases of tests' loans.
const lendSession = 77

// lend lends blocks for a minute.
func lend(t testing.TB, s *tiers.Store, ns block.Namespace, o block.GetOptions, is ...int) ([]block.Loan, block.Lease) {
	t.Helper()
	var hs []byte
	for _, i := range is {
		hs = append(hs, pack(hashOf(i))...)
	}
	loans, l, err := s.Lend(within(t, 20*time.Second), ns.ID, hashLen, hs, o, time.Minute, lendSession)
	if err != nil || len(loans) != len(is) {
		t.Fatalf("lend %v: %d loans, %v", is, len(loans), err)
	}
	return loans, l
}

// wantLoan wants a loan to be of block i with its payload of n bytes.
func wantLoan(t testing.TB, l block.Loan, i, n int) {
	t.Helper()
	if l.Reason != block.Hit || int(l.Len) != n || len(l.Mem) != n || string(l.Mem) != string(payload(i, n)) {
		t.Fatalf("loan of block %d: %v, %d bytes of %d; right bytes: %v", i, l.Reason, len(l.Mem), l.Len, string(l.Mem) == string(payload(i, n)))
	}
}

// TestLend lends blocks of both tiers and some that are not there.
func TestLend(t *testing.T) {
	const size = 300_001
	s, _, ns := coldBlocks(t, nil, 2, size)
	mustPut(t, s, ns, 3, size, block.PutOptions{})
	loans, l := lend(t, s, ns, block.GetOptions{NoPromote: true}, 1, 3)
	if loans[0].Reason != block.MissNoRoom || l.Count != 1 {
		t.Errorf("block of g3 that may not come up: %v, lease %+v", loans[0].Reason, l)
	}
	wantLoan(t, loans[1], 3, size)
	releaseLease(t, s, l)
	loans, l = lend(t, s, ns, block.GetOptions{}, 1, 9, 3, 2, 3)
	for j, i := range []int{1, 9, 3, 2, 3} {
		if i == 9 {
			if loans[j].Reason != block.MissAbsent {
				t.Errorf("absent block: %v", loans[j].Reason)
			}
			continue
		}
		wantLoan(t, loans[j], i, size)
		want := block.G3
		if i == 3 {
			want = block.G2
		}
		if loans[j].Tier != want {
			t.Errorf("block %d was in %v, want %v", i, loans[j].Tier, want)
		}
	}
	if l.Count != 4 || s.Stats().Leases != 1 {
		t.Errorf("lease %+v, %d leases", l, s.Stats().Leases)
	}
	if _, err := s.RenewLease(l.ID, time.Hour); err != nil {
		t.Error(err)
	}
	releaseLease(t, s, l)
	for _, i := range []int{1, 2, 3} {
		if refs := tiers.EntryOf(s, keyOf(ns, i)).Refs; refs != 0 {
			t.Errorf("%d references to block %d are left", refs, i)
		}
	}
	if loans, l := lend(t, s, ns, block.GetOptions{}, 9); l != (block.Lease{}) || loans[0].Reason != block.MissAbsent {
		t.Errorf("nothing lent: %+v, %+v", loans, l)
	}
	if loans, l := lend(t, s, ns, block.GetOptions{}); l != (block.Lease{}) || len(loans) != 0 {
		t.Errorf("nothing asked for: %+v, %+v", loans, l)
	}
	for _, d := range []time.Duration{0, -1, 25 * time.Hour} {
		if _, _, err := s.Lend(t.Context(), ns.ID, hashLen, pack(hashOf(1)), block.GetOptions{}, d, 1); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("lease for %v: %v", d, err)
		}
	}
	if _, _, err := s.Lend(t.Context(), ns.ID+9, hashLen, pack(hashOf(1)), block.GetOptions{}, time.Minute, 1); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("unknown namespace: %v", err)
	}
	if _, _, err := s.Lend(t.Context(), ns.ID, hashLen, make([]byte, 17), block.GetOptions{}, time.Minute, 1); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("hashes cut short: %v", err)
	}
	st := s.Stats()
	if st.Tiers[0].Hits != 3 || st.Tiers[1].Hits != 2 || st.Misses["absent"] != 2 {
		t.Errorf("hits %d and %d, misses %v", st.Tiers[0].Hits, st.Tiers[1].Hits, st.Misses)
	}
	wantEmpty(t, s)
}

// TestLendKeeps: what is lent stays where it is, whatever wants its room, and also
// when it is deleted, until the lease ends in any way.
func TestLendKeeps(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	for name, end := range map[string]func(t *testing.T, s *tiers.Store, l block.Lease){
		"release": func(t *testing.T, s *tiers.Store, l block.Lease) { releaseLease(t, s, l) },
		"session": func(_ *testing.T, s *tiers.Store, _ block.Lease) { s.EndSession(lendSession) },
		"time": func(t *testing.T, s *tiers.Store, l block.Lease) {
			if _, err := s.RenewLease(l.ID, time.Millisecond); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the lease is over", func() bool { return s.Stats().Leases == 0 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 256<<20)})
			ns := space(t, s, "a", 8<<20)
			for i := range 4 {
				mustPut(t, s, ns, i, size, block.PutOptions{})
			}
			if each, err := s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(2))); err != nil || each[0] != nil {
				t.Fatal(each, err)
			}
			loans, l := lend(t, s, ns, block.GetOptions{}, 0, 1, 2, 3)
			mustDelete(t, s, ns, 1, 3)
			mustPut(t, s, ns, 3, size/2, block.PutOptions{}) // another block of its key
			for i := range 40 {
				mustPut(t, s, ns, 100+i, size, block.PutOptions{})
				mustPut(t, s, ns, 200+i, size/3, block.PutOptions{}) // its extents are wanted, too
			}
			for i := range 4 {
				wantLoan(t, loans[i], i, size)
			}
			for i := range 3 {
				if p := placeIn(t, s, ns, i, block.G2); p.Offset()+4096 != loans[i].Offset {
					t.Errorf("block %d has moved", i)
				}
			}
			end(t, s, l)
			if err := s.ReleaseLease(l.ID); !errors.Is(err, block.ErrLeaseExpired) {
				t.Errorf("release of a lease that is over: %v", err)
			}
			for i := range 40 {
				mustPut(t, s, ns, 300+i, size, block.PutOptions{})
			}
			if got := tiersOf(t, s, ns, 0); got != "g3" {
				t.Errorf("block 0 is in %s", got)
			}
			wantHit(t, s, ns, 2, size)
			wantEmpty(t, s)
		})
	}
}

// TestLendNoRoom: what finds no room in G2 is a miss, the others are lent.
func TestLendNoRoom(t *testing.T) {
	const size, n = 1 << 20, 24
	s, _, ns := coldBlocks(t, nil, n, size)
	var is []int
	for i := 1; i <= n; i++ {
		is = append(is, i)
	}
	loans, l := lend(t, s, ns, block.GetOptions{}, is...)
	lent := 0
	for j, i := range is {
		switch loans[j].Reason {
		case block.Hit:
			wantLoan(t, loans[j], i, size)
			lent++
		case block.MissNoRoom:
		default:
			t.Errorf("block %d: %v", i, loans[j].Reason)
		}
	}
	if lent < 8 || lent > 15 || l.Count != lent {
		t.Errorf("%d are lent, lease %+v", lent, l)
	}
	for j, i := range is {
		if loans[j].Reason != block.Hit {
			wantHit(t, s, ns, i, size) // by a get
		}
	}
	s.EndSession(lendSession)
	wantEmpty(t, s)
}

// TestLendLimits: with as many leases as may be nothing is lent and nothing held.
func TestLendLimits(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20, MaxLeases: 1})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 1000, block.PutOptions{})
	_, l := lend(t, s, ns, block.GetOptions{}, 1)
	if loans, l, err := s.Lend(t.Context(), ns.ID, hashLen, pack(hashOf(1)), block.GetOptions{}, time.Minute, 1); !errors.Is(err, block.ErrNoSpace) || loans != nil || l.ID != 0 {
		t.Errorf("a second lease: %v, %+v, %v", loans, l, err)
	}
	if refs := tiers.EntryOf(s, keyOf(ns, 1)).Refs; refs != 1 {
		t.Errorf("%d references, want 1", refs)
	}
	releaseLease(t, s, l)
	wantEmpty(t, s)
}

// TestLendDamaged: damage is a miss, and the block is dropped: in G3 always, in G2
// when the call wants it verified.
func TestLendDamaged(t *testing.T) {
	const size = 300_001
	s, o, ns := coldBlocks(t, nil, 2, size)
	inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 1, block.G3).Offset()+5000, 1, func(b []byte) { b[0] ^= 1 })
	mustPut(t, s, ns, 3, size, block.PutOptions{})
	damageG2(t, s, ns, 3)
	loans, l := lend(t, s, ns, block.GetOptions{}, 3)
	if loans[0].Reason != block.Hit {
		t.Errorf("damaged in g2, not verified: %v", loans[0].Reason)
	}
	releaseLease(t, s, l)
	loans, l = lend(t, s, ns, block.GetOptions{Verify: true}, 1, 2, 3)
	if loans[0].Reason != block.MissCorrupt || loans[2].Reason != block.MissCorrupt || l.Count != 1 {
		t.Errorf("damaged blocks: %v, %v, lease %+v", loans[0].Reason, loans[2].Reason, l)
	}
	wantLoan(t, loans[1], 2, size)
	releaseLease(t, s, l)
	wantMiss(t, s, ns, 1, block.MissAbsent)
	wantMiss(t, s, ns, 3, block.MissAbsent)
	wantEmpty(t, s)
}

// TestLendStalls: by the deadline what is in G2 is lent and the rest missed, while
// the device does not answer.
func TestLendStalls(t *testing.T) {
	const size = 3000
	a := failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Call: 1})
	s, _, ns := coldBlocks(t, a, 1, size)
	mustPut(t, s, ns, 2, size, block.PutOptions{})
	var loans []block.Loan
	var l block.Lease
	patiently(t, 30*time.Millisecond, func(ctx context.Context) bool {
		var err error
		loans, l, err = s.Lend(ctx, ns.ID, hashLen, pack(hashOf(1), hashOf(2)), block.GetOptions{}, time.Minute, lendSession)
		if err != nil || loans[0].Reason != block.MissDeadline || l.Count > 1 {
			t.Fatalf("stalled: %v, lease %+v, %v", loans[0].Reason, l, err)
		}
		return l.Count == 1
	})
	wantLoan(t, loans[1], 2, size)
	releaseLease(t, s, l)
	if err := s.Close(); err != nil { // ends the read
		t.Error(err)
	}
}
