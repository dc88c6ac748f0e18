package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// pieceBytes is what a get cuts a block at when it may hand it out in pieces.
const pieceBytes = 512 << 10

// inPieces gets a range of a block in pieces, each of which it gives to seen, and
// returns what they make together and the last one. It wants them to be in order.
func inPieces(ctx context.Context, t testing.TB, s *tiers.Store, ns block.Namespace, w block.Wanted, o block.GetOptions, seen func(p block.Payload) error) (got []byte, last block.Payload, n int, err error) {
	t.Helper()
	o.Pieces = true
	last.More = true
	err = s.Get(ctx, ns.ID, hashLen, []block.Wanted{w}, o, func(_ int, p block.Payload) error {
		if !last.More {
			t.Errorf("a piece at %d behind the last one", p.At)
		}
		if p.Reason == block.Hit && (p.At != int64(len(got)) || len(p.Bytes) == 0) || p.More && p.Reason != block.Hit {
			t.Errorf("piece %d: %v, %d bytes at %d, more: %v; there are %d", n, p.Reason, len(p.Bytes), p.At, p.More, len(got))
		}
		got, last = append(got, p.Bytes...), p
		n++
		if seen != nil {
			return seen(p)
		}
		return nil
	})
	return got, last, n, err
}

// TestPieces gets blocks and ranges of them in pieces, from where they are left,
// from where there is no room for them to go, and from G2, which needs none.
func TestPieces(t *testing.T) {
	t.Parallel()
	sizes := []int{3000, 65_535, pieceBytes - 1, pieceBytes, pieceBytes + 1, 1 << 20, 1<<20 + 4097, 8 << 20}
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 32 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	for i, n := range sizes {
		mustPut(t, s, ns, i, n, block.PutOptions{Durable: block.G3})
	}
	s = reopen(t, s, o)
	check := func(t *testing.T, opt block.GetOptions, tier block.TierID) {
		for i, size := range sizes {
			for _, r := range [][2]int{{0, 0}, {1, 0}, {size - 1, 0}, {0, 1}, {100, 2000}, {size / 3, size / 2}, {0, size - 1}, {pieceBytes, 0}, {pieceBytes - 1, pieceBytes + 2}} {
				if r[0] >= size || r[0]+r[1] > size {
					continue
				}
				want := payload(i, size)[r[0]:]
				if r[1] > 0 {
					want = want[:r[1]]
				}
				w := block.Wanted{Hash: hashOf(i), Offset: int64(r[0]), Length: int64(r[1])}
				got, last, n, err := inPieces(within(t, 20*time.Second), t, s, ns, w, opt, nil)
				if err != nil || last.Reason != block.Hit || last.Tier != tier || last.More || string(got) != string(want) || int(last.Total) != size {
					t.Errorf("%d bytes, %v: %v from %v, %v; right bytes: %v", size, r, last.Reason, last.Tier, err, string(got) == string(want))
				}
				if tier == block.G3 && n > len(want)/pieceBytes+2 || tier == block.G2 && n != 1 {
					t.Errorf("%d bytes, %v: in %d pieces from %v", size, r, n, tier)
				}
			}
		}
	}
	check(t, block.GetOptions{NoPromote: true}, block.G3)
	st := s.Stats()
	if hits := st.Tiers[1].Hits; hits < 40 || st.Tiers[0].Hits != 0 {
		t.Errorf("%d hits in g3", hits)
	}
	var all []uint64 // of G2
	for i := 0; ; i++ {
		r, _, err := s.Reserve(within(t, 20*time.Second), ns.ID, hashLen, hashOf(100+i), []int64{8 << 20, 1000}[min(i/10, 1)], block.PutOptions{})
		if err == nil {
			all = append(all, r.ID)
		} else if i > 10 {
			break
		}
	}
	got, last, n, err := inPieces(within(t, 20*time.Second), t, s, ns, block.Wanted{Hash: hashOf(5)}, block.GetOptions{}, nil)
	if err != nil || last.Reason != block.Hit || last.Tier != block.G3 || string(got) != string(payload(5, 1<<20)) || tiersOf(t, s, ns, 5) != "g3" {
		t.Errorf("without room: %v in %d pieces, %v", last.Reason, n, err)
	}
	s.Abort(all)
	for i, size := range sizes {
		wantHit(t, s, ns, i, size) // takes it up
	}
	check(t, block.GetOptions{}, block.G2)
	wantEmpty(t, s)
}

// TestPiecesEarly: all but the last piece are handed out while the device has not
// brought that yet, and stay what they are until use has returned.
func TestPiecesEarly(t *testing.T) {
	const size = 2 << 20
	for name, w := range map[string]block.Wanted{"whole": {Hash: hashOf(1)}, "range": {Hash: hashOf(1), Offset: 100, Length: size / 2}} {
		for _, promote := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/promote=%v", name, promote), func(t *testing.T) {
				resume := make(chan struct{})
				goOn := sync.OnceFunc(func() { close(resume) })
				a := failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Call: 1, Descs: []int{8}, Resume: resume})
				s, _, ns := coldBlocks(t, a, 2, size)
				want := payload(1, size)[w.Offset:]
				if w.Length > 0 {
					want = want[:w.Length]
				}
				var early int64
				got, last, _, err := inPieces(within(t, 20*time.Second), t, s, ns, w, block.GetOptions{NoPromote: !promote}, func(p block.Payload) error {
					at := p.At + int64(len(p.Bytes))
					if p.More {
						early = at
					}
					if len(want)-int(at) <= pieceBytes && p.More {
						goOn()
						wantHit(t, s, ns, 2, size) // through other memory
					}
					if string(p.Bytes) != string(want[p.At:][:len(p.Bytes)]) {
						t.Errorf("wrong bytes at %d", p.At)
					}
					return nil
				})
				if err != nil || last.Reason != block.Hit || last.Tier != block.G3 || len(want)-int(early) > pieceBytes || string(got) != string(want) {
					t.Errorf("%v from %v, %v after %d early bytes of %d", last.Reason, last.Tier, err, early, len(want))
				}
				eventually(t, "the block is where it should be", func() bool {
					return tiersOf(t, s, ns, 1) == map[bool]string{true: "g2g3", false: "g3"}[promote]
				})
				wantEmpty(t, s)
			})
		}
	}
}

// TestPiecesDamaged: of a block whose header is wrong nothing is handed out, and of
// one whose payload is, the last call says so. The bytes of a piece stay until use
// has returned, also when it is found out meanwhile and their memory is wanted.
func TestPiecesDamaged(t *testing.T) {
	const size = 2 << 20
	for name, at := range map[string]int64{"header": 60, "first": 4096, "last": 4096 + size - 1} {
		for _, promote := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/promote=%v", name, promote), func(t *testing.T) {
				resume := make(chan struct{})
				a := failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Call: 1, Descs: []int{8}, Resume: resume})
				s, o, ns := coldBlocks(t, a, 1, size)
				inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 1, block.G3).Offset()+at, 1, func(b []byte) { b[0] ^= 1 })
				if name == "header" {
					close(resume) // there is nothing to wait for
				}
				early, found := 0, false
				_, last, _, err := inPieces(within(t, 20*time.Second), t, s, ns, block.Wanted{Hash: hashOf(1)}, block.GetOptions{NoPromote: !promote}, func(p block.Payload) error {
					if !p.More {
						return nil
					}
					if early++; p.At+int64(len(p.Bytes)) >= size-pieceBytes {
						found = true
						before := slices.Clone(p.Bytes)
						close(resume)
						eventually(t, "the damage is found", func() bool { return s.Stats().Corrupt == 1 && tiers.Flights(s) == 0 })
						for i := range 20 {
							mustPut(t, s, ns, 100+i, size, block.PutOptions{})
						}
						if !slices.Equal(p.Bytes, before) {
							t.Error("the bytes have changed while they were used")
						}
					}
					return nil
				})
				if sound := name != "header"; err != nil || (early > 0) != sound || found != sound {
					t.Errorf("%d pieces, up to where it was found: %v, %v", early, found, err)
				}
				if last.Reason != block.MissCorrupt || last.Bytes != nil || last.More {
					t.Errorf("last: %v, %d bytes, more: %v", last.Reason, len(last.Bytes), last.More)
				}
				st := s.Stats()
				if st.Corrupt != 1 || st.Tiers[1].Hits != 0 || st.Misses["corrupt"] != 1 {
					t.Errorf("corrupt %d, hits %d, misses %v", st.Corrupt, st.Tiers[1].Hits, st.Misses)
				}
				wantMiss(t, s, ns, 1, block.MissAbsent)
				wantEmpty(t, s)
			})
		}
	}
}

// TestPiecesDeleted: a block that is deleted while it is handed out stays readable
// for who reads it, or is a miss in the end; its slots come free.
func TestPiecesDeleted(t *testing.T) {
	const size = 2 << 20
	for _, promote := range []bool{false, true} {
		resume := make(chan struct{})
		a := failing(t, xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Call: 1, Descs: []int{8}, Resume: resume})
		s, _, ns := coldBlocks(t, a, 1, size)
		got, last, n, err := inPieces(within(t, 20*time.Second), t, s, ns, block.Wanted{Hash: hashOf(1)}, block.GetOptions{NoPromote: !promote}, func(p block.Payload) error {
			if p.At == 0 && p.More {
				mustDelete(t, s, ns, 1, 1)
				close(resume)
			}
			return nil
		})
		if err != nil || n < 2 || last.Reason != block.Hit && last.Reason != block.MissAbsent || last.Reason == block.Hit && string(got) != string(payload(1, size)) {
			t.Errorf("promote %v: %v in %d pieces, %v", promote, last.Reason, n, err)
		}
		wantMiss(t, s, ns, 1, block.MissAbsent)
		wantEmpty(t, s)
	}
}

// TestPiecesStall: the last call comes when the time is over, also when the device does
// not let go of the memory, which nobody else gets meanwhile. So it is when use
// does not want more.
func TestPiecesStall(t *testing.T) {
	const size = 2 << 20
	enough := errors.New("enough")
	for _, c := range []struct {
		fault          xfertest.Fault
		promote, quits bool
	}{
		{xfertest.Stall, false, false},
		{xfertest.Stall, false, true},
		{xfertest.Hang, false, false},
		{xfertest.Hang, false, true},
		{xfertest.Stall, true, false},
		{xfertest.Stall, true, true},
		{xfertest.Hang, true, false},
		{xfertest.Hang, true, true},
	} {
		t.Run(fmt.Sprintf("%v/promote=%v/quits=%v", c.fault, c.promote, c.quits), func(t *testing.T) {
			resume := make(chan struct{})
			a := failing(t, xfertest.Rule{Fault: c.fault, Ops: []xfer.Op{xfer.Read}, Call: 1, Descs: []int{7, 8}, Resume: resume})
			s, _, ns := coldBlocks(t, a, 8, size)
			ctx, over := expiring(t)
			came := int64(3 * pieceBytes) // of what is read, at its cuts
			if c.promote {
				came -= 4096 // the slot, not the payload, is cut
			}
			got, last, n, err := inPieces(ctx, t, s, ns, block.Wanted{Hash: hashOf(1)}, block.GetOptions{NoPromote: !c.promote}, func(p block.Payload) error {
				if c.quits {
					return enough
				}
				if p.At+int64(len(p.Bytes)) == came {
					over() // its time; the bytes stay
				}
				if p.More && !slices.Equal(p.Bytes, payload(1, size)[p.At:][:len(p.Bytes)]) {
					t.Errorf("wrong bytes at %d", p.At)
				}
				return nil
			})
			if !c.quits && (err != nil || last.Reason != block.MissDeadline || last.More || int64(len(got)) != came) {
				t.Errorf("last: %v, more: %v, behind %d bytes, want %d, %v", last.Reason, last.More, len(got), came, err)
			}
			if c.quits && (n != 1 || !errors.Is(err, enough)) {
				t.Errorf("%d calls, %v", n, err)
			}
			for i := 2; i <= 8; i++ {
				got, last, _, err := inPieces(within(t, 20*time.Second), t, s, ns, block.Wanted{Hash: hashOf(i)}, block.GetOptions{NoPromote: true}, nil)
				if err != nil || last.Reason != block.Hit || string(got) != string(payload(i, size)) {
					t.Errorf("block %d meanwhile: %v, %v", i, last.Reason, err)
				}
			}
			close(resume)
			wantHit(t, s, ns, 1, size)
			eventually(t, "nobody refers to the block", func() bool { return tiers.EntryOf(s, keyOf(ns, 1)).Refs == 0 })
			wantEmpty(t, s)
		})
	}
}
