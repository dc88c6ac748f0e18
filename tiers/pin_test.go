package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// pin pins blocks and returns how many were, when the others met no room.
func pin(t testing.TB, s *tiers.Store, ns block.Namespace, is ...int) (pinned int) {
	t.Helper()
	var hs []byte
	for _, i := range is {
		hs = append(hs, pack(hashOf(i))...)
	}
	errs, err := s.Pin(within(t, 30*time.Second), ns.ID, hashLen, hs)
	if err != nil || len(errs) != len(is) {
		t.Fatalf("pin: %d results, %v", len(errs), err)
	}
	for j, err := range errs {
		if err == nil {
			pinned++
		} else if !errors.Is(err, block.ErrNoSpace) {
			t.Errorf("pin %d: %v", is[j], err)
		}
	}
	return pinned
}

func numbers(from, to int) (is []int) {
	for i := from; i < to; i++ {
		is = append(is, i)
	}
	return is
}

// refusals counts what a policy proposes and the store refuses.
type refusals struct {
	policy.Policy
	n *atomic.Int64
}

func (r refusals) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	return r.Policy.Victims(dst, need, func(h block.Handle) bool {
		if ok(h) {
			return true
		}
		r.n.Add(1)
		return false
	})
}

// TestPinnedCostNothing pins a third of a full tier, puts through it many times
// what it holds, and wants what is pinned to stay without being met by a single
// eviction. Let go, it leaves like any other block.
func TestPinnedCostNothing(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	for _, c := range []struct {
		name string
		o    tiers.Options
		put  block.PutOptions
		tier block.TierID
	}{
		{"g2", tiers.Options{DRAM: 16 << 20}, block.PutOptions{}, block.G2},
		{"g3", tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20), NoSync: true}, block.PutOptions{Durable: block.G3}, block.G3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var refused atomic.Int64
			c.o.Policy = func(block.TierID) (policy.Policy, error) { return refusals{policy.NewLRULeaf(), &refused}, nil }
			s := openStore(t, c.o)
			ns := space(t, s, "s", 1<<20)
			const size = 16<<10 - 512 // 16 KiB with its header
			var full int64
			for _, tr := range s.Stats().Tiers {
				if tr.Tier == c.tier {
					full = tr.Capacity / (16 << 10)
				}
			}
			third := int(full) / 3
			for i := range third {
				mustPut(t, s, ns, i, size, c.put)
			}
			if n := pin(t, s, ns, numbers(0, third)...); n != third {
				t.Fatalf("%d of %d could be pinned", n, third)
			}
			st := s.Stats()
			if st.Pinned != int64(third) || st.PinnedBytes != int64(third*size) {
				t.Errorf("%d blocks of %d bytes are pinned, want %d of %d", st.Pinned, st.PinnedBytes, third, third*size)
			}
			next := third
			through := func(n int) {
				for range n {
					mustPut(t, s, ns, next, size, c.put)
					next++
				}
			}
			through(3 * int(full))
			for i := range third {
				if at := placesOf(t, s, ns, i); len(at) == 0 || at[len(at)-1].Tier != c.tier {
					t.Fatalf("pinned block %d is in %v", i, at)
				}
			}
			// A transfer or a reader refuses now and then; pinned blocks would in each pass.
			if n := refused.Load(); n > int64(third) {
				t.Errorf("%d blocks were proposed and refused", n)
			}
			var hs []byte
			for i := range third {
				hs = append(hs, pack(hashOf(i))...)
			}
			if n, err := s.Unpin(t.Context(), ns.ID, hashLen, hs); n != third || err != nil {
				t.Fatalf("unpin: %d, %v, want %d", n, err, third)
			}
			through(2 * int(full))
			for i := range third {
				if at := placesOf(t, s, ns, i); len(at) != 0 {
					t.Fatalf("block %d is in %v still", i, at)
				}
			}
			wantEmpty(t, s)
		})
	}
}

// TestPinRoom: no more than half of a tier can be pinned, and the rest takes
// blocks of any size, in G2 also by moving pinned blocks together.
func TestPinRoom(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	for _, slabs := range [][]tiers.SlabSpec{nil, slabIn(t, 32<<20)} {
		t.Run(fmt.Sprintf("slabs=%d", len(slabs)), func(t *testing.T) {
			t.Parallel()
			s := openStore(t, tiers.Options{DRAM: 32 << 20, Slabs: slabs, NoSync: true})
			ns := space(t, s, "s", 1<<20)
			const size, slot = 60_000, 61_440 + 512
			o := block.PutOptions{}
			if slabs != nil {
				o.Durable = block.G3
			}
			for i := range 300 {
				mustPut(t, s, ns, i, size, o)
			}
			want := 16 << 20 / slot
			n := pin(t, s, ns, numbers(0, 300)...)
			if held := tiers.PinnedSlots(s); n < want*9/10 || held > 16<<20 || held < int64(n)*size || s.Stats().Pinned != int64(n) {
				t.Fatalf("%d of 300 were pinned, about %d fit; %d are counted, in %d bytes", n, want, s.Stats().Pinned, held)
			}
			errs, err := s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(0), hashOf(299), hashOf(1000)))
			if err != nil || errs[0] != nil || !errors.Is(errs[1], block.ErrNoSpace) || !errors.Is(errs[2], block.ErrNotFound) {
				t.Errorf("pin of one pinned, one too many, one absent: %v, %v", errs, err)
			}
			for i := range 60 {
				mustPut(t, s, ns, 2000+i, 1<<20, o)
			}
			for i := range n {
				wantHit(t, s, ns, i, size)
			}
			wantEmpty(t, s)
		})
	}
}

// TestPinRefused: what fails has pinned nothing.
func TestPinRefused(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20), Agent: failing(t, xfertest.Rule{Fault: xfertest.Fail})})
	ns := space(t, s, "s", 1<<20)
	mustPut(t, s, ns, 1, 1000, block.PutOptions{})
	errs, err := s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(1)))
	if err != nil || !errors.Is(errs[0], block.ErrUnavailable) {
		t.Errorf("pin on a device that fails: %v, %v", errs, err)
	}
	if _, err := s.Pin(t.Context(), ns.ID, 8, make([]byte, 8)); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("pin with hashes of another length: %v", err)
	}
	if _, err := s.Unpin(t.Context(), ns.ID+9, hashLen, nil); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("unpin in no namespace: %v", err)
	}
	if st := s.Stats(); st.Pinned != 0 || st.PinnedBytes != 0 {
		t.Errorf("%d blocks of %d bytes are pinned", st.Pinned, st.PinnedBytes)
	}
	wantHit(t, s, ns, 1, 1000)
}

// TestPinDeadline: a pin whose record cannot be written in time says so, and the
// next one is not held up by it for longer than its own time.
func TestPinDeadline(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)})
	ns := space(t, s, "s", 1<<20)
	mustPut(t, s, ns, 1, 1000, block.PutOptions{Durable: block.G3})
	release := tiers.HoldCommits(s)
	for range 2 {
		_, err := s.Pin(within(t, 50*time.Millisecond), ns.ID, hashLen, pack(hashOf(1)))
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("pin while the catalog is held: %v", err)
		}
	}
	release()
	if n := pin(t, s, ns, 1); n != 1 {
		t.Error("the block cannot be pinned when the catalog is free again")
	}
}

// TestPinnedExpires: a pin keeps no block beyond its time.
func TestPinnedExpires(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)})
	ns := space(t, s, "s", 1<<20)
	mustPut(t, s, ns, 1, 1000, block.PutOptions{TTL: time.Second})
	mustPut(t, s, ns, 2, 2000, block.PutOptions{})
	if n := pin(t, s, ns, 1, 2); n != 2 {
		t.Fatalf("%d of 2 could be pinned", n)
	}
	eventually(t, "the block is gone", func() bool { return s.Stats().Pinned == 1 })
	wantMiss(t, s, ns, 1, block.MissAbsent)
	wantHit(t, s, ns, 2, 2000)
	if st := s.Stats(); st.PinnedBytes != 2000 {
		t.Errorf("%d bytes are pinned, want 2000", st.PinnedBytes)
	}
	wantEmpty(t, s)
}

// TestPinRaces pins, unpins, puts, deletes and evicts the same few blocks at
// once. At rest what is counted and what the catalog has is what is pinned.
func TestPinRaces(t *testing.T) {
	t.Parallel()
	for _, g3 := range []bool{false, true} {
		t.Run(fmt.Sprintf("g3=%v", g3), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			o := tiers.Options{Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, NoSync: true, Agent: newAgent(t)}
			lowest := block.G2
			if g3 {
				o.Slabs, lowest = []tiers.SlabSpec{{Path: filepath.Join(dir, "slab"), Bytes: 32 << 20}}, block.G3
			}
			s := openStore(t, o)
			ns := space(t, s, "s", 1<<20)
			const keys = 6
			var wg sync.WaitGroup
			for w := range 6 {
				r := rand.New(rand.NewPCG(uint64(w), 1))
				wg.Go(func() {
					for range 300 {
						i := r.IntN(keys)
						var errs []error
						var err error
						switch r.IntN(6) {
						case 0, 1:
							errs, err = s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(i), hashOf((i+1)%keys), hashOf(i)))
						case 2:
							_, err = s.Unpin(t.Context(), ns.ID, hashLen, pack(hashOf(i), hashOf(i)))
						case 3:
							_, err = s.Delete(t.Context(), ns.ID, hashLen, pack(hashOf(i)))
						case 4:
							tiers.Evict(s, block.TierID(2+r.IntN(int(lowest)-1)), tiers.HandleOf(s, keyOf(ns, i)))
						default:
							err = put(s, ns, i, payload(i, 1000*(i+1)), block.PutOptions{Durable: block.TierID(2 + r.IntN(int(lowest)-1))})
						}
						for _, e := range errs {
							if e != nil && !errors.Is(e, block.ErrNotFound) {
								err = e
							}
						}
						// A put may be deleted before it is in G3.
						if err != nil && !errors.Is(err, block.ErrNotFound) && !errors.Is(err, block.ErrNoSpace) {
							t.Errorf("block %d: %v", i, err)
						}
					}
				})
			}
			wg.Wait()
			pinnedNow := func() map[block.Hash]bool {
				pinned := map[block.Hash]bool{}
				entries, _, err := s.List(t.Context(), ns.ID, "", keys+1)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range entries {
					if e.Pinned {
						pinned[e.Hash] = true
						if e.Tiers[len(e.Tiers)-1] != lowest {
							t.Errorf("pinned block %v is in %v", e.Hash, e.Tiers)
						}
					}
				}
				if st := s.Stats(); st.Pinned != int64(len(pinned)) {
					t.Errorf("%d blocks are counted as pinned, %d are", st.Pinned, len(pinned))
				}
				return pinned
			}
			before := pinnedNow()
			if g3 {
				s = reopen(t, s, o)
				if after := pinnedNow(); fmt.Sprint(after) != fmt.Sprint(before) {
					t.Errorf("pinned after a restart: %v, before: %v", after, before)
				}
			}
			wantEmpty(t, s)
		})
	}
}

// TestPinnedComesDownAgain: a pinned block whose copy in G3 was damaged is
// pinned there again when it comes down, or no more if it was let go meanwhile,
// also while its record is on the way.
func TestPinnedComesDownAgain(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"never", "before", "on the way"} {
		t.Run("unpin="+when, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			o := tiers.Options{
				Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t),
				Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "slab"), Bytes: 32 << 20}},
			}
			s := openStore(t, o)
			ns := space(t, s, "s", 1<<20)
			mustPut(t, s, ns, 1, 1000, block.PutOptions{})
			pin(t, s, ns, 1)
			e := tiers.EntryOf(s, keyOf(ns, 1))
			tiers.DamagedG3(s, tiers.HandleOf(s, keyOf(ns, 1)), &e)
			eventually(t, "the damaged copy has left", func() bool {
				return tiersOf(t, s, ns, 1) == "g2" && tiers.PinnedSlots(s) == 0
			})
			unpin := func() {
				if n, err := s.Unpin(within(t, 10*time.Second), ns.ID, hashLen, pack(hashOf(1))); n != 1 || err != nil {
					t.Errorf("unpin: %d, %v", n, err)
				}
			}
			if when == "before" {
				unpin()
			}
			release := tiers.HoldCommits(s)
			down := make(chan error, 1)
			free := sync.OnceFunc(release)
			defer free()
			go func() {
				down <- s.CompareExisting(context.Background(), ns.ID, hashOf(1), 1000, e.Sum, block.PutOptions{Durable: block.G3})
			}()
			eventually(t, "the record is queued", func() bool { return tiers.QueuedCommits(s) > 0 })
			if when == "on the way" {
				unpin()
			}
			free()
			if err := <-down; err != nil {
				t.Fatal(err)
			}
			want := int64(0)
			if when == "never" {
				want = 1
			}
			eventually(t, "the record says what the flag says", func() bool {
				r, _, err := tiers.Catalog(s).Get(keyOf(ns, 1), hashLen)
				return err == nil && r.Pinned == (want == 1)
			})
			if slots := tiers.PinnedSlots(s); s.Stats().Pinned != want || (slots > 0) != (want == 1) {
				t.Errorf("%d are pinned in %d bytes, want %d", s.Stats().Pinned, slots, want)
			}
			s = reopen(t, s, o)
			if got := s.Stats().Pinned; got != want {
				t.Errorf("%d are pinned after a restart, want %d", got, want)
			}
			wantHit(t, s, ns, 1, 1000)
			wantEmpty(t, s)
		})
	}
}
