package tiers

import (
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// TestSlotsShares: in random runs no extent ever has slots of two shares, an extent
// passes to another one only by being withdrawn and returned, and Alloc fails only when
// no extent that it may have holds a slot.
func TestSlotsShares(t *testing.T) {
	const extent, extents = 16 << 10, 12
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		s := NewSlots(extent*extents, extent)
		type slot struct {
			off   int64
			share uint64
		}
		var live []slot
		owner := map[int]uint64{} // of each extent that anybody has had
		count := map[int]int{}    // slots taken in it
		for step := range 4000 {
			share := uint64(rng.IntN(3))
			size := int64(1+rng.IntN(2)) << 12
			switch {
			case rng.IntN(1000) < 300+(step/400%2)*400 && len(live) > 0:
				i := rng.IntN(len(live))
				s.Free(live[i].off)
				count[int(live[i].off/extent)]--
				live[i] = live[len(live)-1]
				live = live[:len(live)-1]
			case rng.IntN(10) == 0:
				e, ok := s.Withdraw(share, size)
				want := false
				for x, o := range owner {
					want = want || o != share && count[x] == 0
				}
				if ok != want {
					t.Fatalf("seed %d step %d: withdraw for %d: %v, want %v", seed, step, share, ok, want)
				}
				if !ok {
					continue
				}
				if owner[e] == share || count[e] != 0 {
					t.Fatalf("seed %d step %d: withdrew extent %d of share %d with %d slots for %d", seed, step, e, owner[e], count[e], share)
				}
				for range 3 { // nobody gets it meanwhile
					off, ok := s.Alloc(owner[e], 512, 1)
					if ok && int(off/extent) == e {
						t.Fatalf("seed %d step %d: a slot in extent %d, which is withdrawn", seed, step, e)
					} else if ok {
						s.Free(off)
						if _, had := owner[int(off/extent)]; !had {
							owner[int(off/extent)] = owner[e]
						}
					}
				}
				s.Return(e, share)
				owner[e] = share
			default:
				can := s.CanAlloc(share, size)
				off, ok := s.Alloc(share, size, block.Handle(step+1))
				if can != ok {
					t.Fatalf("seed %d step %d: can alloc %v, alloc %v", seed, step, can, ok)
				}
				if !ok {
					for e := range extents {
						if o, had := owner[e]; !had || o == share && count[e] == 0 {
							t.Fatalf("seed %d step %d: no slot for share %d while it may have extent %d", seed, step, share, e)
						}
					}
					continue
				}
				e := int(off / extent)
				if o, had := owner[e]; had && o != share {
					t.Fatalf("seed %d step %d: a slot for share %d in an extent of %d", seed, step, share, o)
				}
				owner[e] = share
				count[e]++
				live = append(live, slot{off, share})
			}
		}
		has := map[uint64]int{}
		for _, o := range owner {
			has[o]++
		}
		for share := range uint64(4) {
			e, _, ok := s.Emptiest(share, 4096, nil)
			if ok && owner[e] != share && has[share] > 0 && has[owner[e]] < has[share]+2 {
				t.Errorf("seed %d: share %d with %d extents takes one of share %d, which has %d", seed, share, has[share], owner[e], has[owner[e]])
			}
		}
	}
}
