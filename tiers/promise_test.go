package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// The promises about full tiers, failed writes and damage, one by one. Those about
// single steps of a block's life are where the step is tested.

// putBy puts a block once, with a deadline for the room.
func putBy(t testing.TB, s *tiers.Store, ns block.Namespace, i, n int, d time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	r, _, err := s.Reserve(ctx, ns.ID, hashLen, hashOf(i), int64(n), block.PutOptions{})
	if err != nil || r.Status == block.Exists {
		return err
	}
	if err := s.Fill(t.Context(), r.ID, 0, payload(i, n)); err != nil {
		return err
	}
	return s.Commit(t.Context(), []uint64{r.ID})[0].Err
}

// fillG2 puts blocks from number 0 on and leases each, until there is no room.
func fillG2(t testing.TB, s *tiers.Store, ns block.Namespace, size int) (leases []block.Lease) {
	t.Helper()
	for i := 0; ; i++ {
		d := 50 * time.Millisecond
		if i == 0 {
			d = 20 * time.Second // it also fixes the namespace's length of hashes, on the disk
		}
		err := putBy(t, s, ns, i, size, d)
		if errors.Is(err, block.ErrNoSpace) {
			return leases
		}
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, lease(t, s, ns, i))
	}
}

// TestPutsIntoLeasedMemory: when each byte of G2 is leased and nothing can go down,
// puts are refused. Of what is acknowledged once that is over, all is readable.
func TestPutsIntoLeasedMemory(t *testing.T) {
	t.Parallel()
	const size = 250_000
	stuck := make(chan struct{})
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
			if op == xfer.Write {
				<-stuck
			}
		}}
	})
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 96<<20), Agent: agent})
	ns := space(t, s, "a", 1<<20)
	leases := fillG2(t, s, ns, size)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			if err := putBy(t, s, ns, 1000+i, size, 100*time.Millisecond); !errors.Is(err, block.ErrNoSpace) {
				t.Errorf("put into memory that is leased: %v", err)
			}
		})
	}
	wg.Wait()
	for i := range leases {
		wantHit(t, s, ns, i, size)
	}
	close(stuck)
	for _, l := range leases {
		releaseLease(t, s, l)
	}
	for i := 1000; i < 1100; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{})
	}
	for i := 1000; i < 1100; i++ {
		wantHit(t, s, ns, i, size)
	}
	wantEmpty(t, s)
}

// TestPutsOutrunOffloading: puts that come faster than G3 takes blocks wait or are
// refused. Each that was acknowledged is there, or counted as dropped.
func TestPutsOutrunOffloading(t *testing.T) {
	t.Parallel()
	const size, putters, each = 250_000, 4, 60
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
			if op == xfer.Write {
				time.Sleep(10 * time.Millisecond)
			}
		}}
	})
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 96<<20), Agent: agent})
	ns := space(t, s, "a", 1<<20)
	acked := make([][]int, putters)
	var wg sync.WaitGroup
	for g := range putters {
		wg.Go(func() {
			for i := g * each; i < (g+1)*each; i++ {
				switch err := putBy(t, s, ns, i, size, 5*time.Second); {
				case err == nil:
					acked[g] = append(acked[g], i)
				case !errors.Is(err, block.ErrNoSpace):
					t.Errorf("put %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	all := slices.Concat(acked...)
	if len(all) == 0 {
		t.Error("no put was acknowledged")
	}
	var there []int
	eventually(t, "each that was acknowledged is there or counted as evicted", func() bool { // some may leave still
		there = there[:0]
		for _, i := range all {
			if tiersOf(t, s, ns, i) != "" {
				there = append(there, i)
			}
		}
		return len(there)+int(s.Stats().Removed["evicted"]) == len(all)
	})
	for _, i := range there {
		data, p, err := get(s, ns, i, block.GetOptions{})
		if err != nil || p.Reason != block.MissAbsent && (p.Reason != block.Hit || !slices.Equal(data, payload(i, size))) {
			t.Errorf("get %d: %v, %v", i, p.Reason, err)
		}
	}
}

// TestOneBlockGoesRound: all of G2 is leased but one block, and many puts wait for
// its place. Each gets it in its turn.
func TestOneBlockGoesRound(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", size)
	leases := fillG2(t, s, ns, size)
	releaseLease(t, s, leases[3])
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			if err := put(s, ns, 1000+i, payload(1000+i, size), block.PutOptions{}); err != nil {
				t.Errorf("put %d of those that wait: %v", i, err)
			}
		})
	}
	wg.Wait()
	for i := range leases {
		if i != 3 {
			wantHit(t, s, ns, i, size)
		}
	}
	eventually(t, "24 blocks are evicted, one for each put", func() bool { return s.Stats().Removed["evicted"] == 24 })
}

// TestLeasedBetweenMatchAndGet: what a match has leased, the get behind it finds,
// however many puts come between. A lease that is released twice takes nothing from
// another one of the same blocks.
func TestLeasedBetweenMatchAndGet(t *testing.T) {
	const size, n = 500_000, 8
	for _, slabs := range [][]tiers.SlabSpec{nil, slabIn(t, 32<<20)} {
		t.Run(fmt.Sprintf("slabs=%d", len(slabs)), func(t *testing.T) {
			s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabs})
			ns := space(t, s, "a", 1<<20)
			var all []int
			for i := range n {
				mustPut(t, s, ns, i, size, block.PutOptions{})
				all = append(all, i)
			}
			first, second := lease(t, s, ns, all...), lease(t, s, ns, all...)
			releaseLease(t, s, first)
			if err := s.ReleaseLease(first.ID); !errors.Is(err, block.ErrLeaseExpired) {
				t.Errorf("released twice: %v", err)
			}
			if _, err := s.RenewLease(first.ID, time.Minute); !errors.Is(err, block.ErrLeaseExpired) {
				t.Errorf("renewed after its end: %v", err)
			}
			for i := 100; i < 200; i++ {
				mustPut(t, s, ns, i, size, block.PutOptions{})
			}
			for i := range n {
				wantHit(t, s, ns, i, size)
			}
			releaseLease(t, s, second)
			wantEmpty(t, s)
		})
	}
}

// TestFailedWriteOfABatch: of a batch of durable puts one is not written. It alone
// fails, is in G3 neither now nor after a restart, and can be put again.
func TestFailedWriteOfABatch(t *testing.T) {
	const size, n = 100_000, 4
	for _, fault := range []xfertest.Fault{xfertest.Fail, xfertest.Short} {
		t.Run(fault.String(), func(t *testing.T) {
			var in xfertest.Injector
			in.Set(xfertest.Rule{Fault: fault, Ops: []xfer.Op{xfer.Write}, Descs: []int{1}, Call: 1})
			o := tiers.Options{Dir: t.TempDir(), DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), Agent: agentWith(t, in.Wrap)}
			s := openStore(t, o)
			ns := space(t, s, "a", 1<<20)
			var ids []uint64
			for i := range n {
				r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(i), size, block.PutOptions{Durable: block.G3})
				if err == nil {
					err = s.Fill(t.Context(), r.ID, 0, payload(i, size))
				}
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, r.ID)
			}
			failed := -1
			for i, res := range s.Commit(t.Context(), ids) {
				switch {
				case res.Err == nil:
					wantHit(t, s, ns, i, size)
				case !errors.Is(res.Err, block.ErrUnavailable) || failed >= 0:
					t.Errorf("commit %d: %v", i, res.Err)
				default:
					failed = i
				}
			}
			if failed < 0 {
				t.Fatal("no commit has failed")
			}
			if where := tiersOf(t, s, ns, failed); where != "g2" && where != "" {
				t.Errorf("the block that was not written is in %q", where)
			}
			s = reopen(t, s, o)
			wantMiss(t, s, ns, failed, block.MissAbsent)
			for i := range n {
				if i != failed {
					wantHit(t, s, ns, i, size)
				}
			}
			mustPut(t, s, ns, failed, size, block.PutOptions{Durable: block.G3})
			s = reopen(t, s, o)
			wantHit(t, s, ns, failed, size)
			wantEmpty(t, s)
		})
	}
}

// TestFailedPrefetch: what a prefetch cannot read does not come up, and says so;
// what it reads wrong is given up.
func TestFailedPrefetch(t *testing.T) {
	const size = 100_000
	for _, c := range []struct {
		fault  xfertest.Fault
		reason block.MissReason
		where  string // the block is then
	}{
		{xfertest.Fail, block.MissUnavailable, "g3"},
		{xfertest.Short, block.MissUnavailable, "g3"},
		{xfertest.Corrupt, block.MissCorrupt, ""},
	} {
		t.Run(c.fault.String(), func(t *testing.T) {
			s, _, ns := coldBlocks(t, failing(t, xfertest.Rule{Fault: c.fault, Ops: []xfer.Op{xfer.Read}}), 1, size)
			var got []block.MissReason
			err := s.Prefetch(t.Context(), ns.ID, hashLen, pack(hashOf(1)), block.PrefetchOptions{}, func(p block.Progress) error {
				got = append(got, p.Reason)
				return nil
			})
			if err != nil || len(got) != 1 || got[0] != c.reason {
				t.Errorf("prefetch: %v, %v, want %v", got, err, c.reason)
			}
			if where := tiersOf(t, s, ns, 1); where != c.where {
				t.Errorf("the block is in %q, want %q", where, c.where)
			}
			eventually(t, "its room in G2 is free", func() bool { return used(s, block.G2) == 0 })
			wantEmpty(t, s)
		})
	}
}

// TestPrefetchesLeaveNothing cancels and fails many prefetches.
func TestPrefetchesLeaveNothing(t *testing.T) {
	const size, n = 20_000, 12
	rounds := 1000
	switch {
	case os.Getenv("KVTIER_SOAK") == "1":
		rounds = 10_000
	case raceEnabled, testing.Short():
		rounds = 100
	}
	var in xfertest.Injector
	s, o, ns := coldBlocks(t, agentWith(t, in.Wrap), n, size)
	o.ProbeEvery, o.StallAfter = time.Millisecond, time.Hour
	s = reopen(t, s, o)
	var hs []byte
	for i := 1; i <= n; i++ {
		hs = append(hs, pack(hashOf(i))...)
	}
	prefetch := func(ctx context.Context, id string) error {
		return s.Prefetch(ctx, ns.ID, hashLen, hs, block.PrefetchOptions{ID: id}, func(block.Progress) error { return nil })
	}
	before := runtime.NumGoroutine()
	for round := range rounds {
		resume := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		switch round % 3 {
		case 0: // cancelled by its id, while the device is stuck
			in.Set(xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Resume: resume})
			done := make(chan error, 1)
			go func() { done <- prefetch(ctx, "p") }()
			eventually(t, "the prefetch is known", func() bool { return s.CancelPrefetch("p") == nil })
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Fatalf("prefetch: %v", err)
			}
		case 1: // whose caller is gone
			in.Set(xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Read}, Resume: resume})
			cancel()
			if err := prefetch(ctx, ""); !errors.Is(err, context.Canceled) {
				t.Fatalf("prefetch: %v", err)
			}
		case 2: // which cannot be read
			in.Set(xfertest.Rule{Fault: xfertest.Fail, Ops: []xfer.Op{xfer.Read}})
			if err := prefetch(ctx, ""); err != nil {
				t.Fatalf("prefetch: %v", err)
			}
		}
		cancel()
		in.Clear()
		close(resume)
		// What was on its way arrives, and would be a hit for the next round.
		eventually(t, "nothing is under way", func() bool {
			e := tiers.EntryOf(s, keyOf(ns, 1+round%n))
			return e.Refs == 0 && s.Stats().Tiers[1].Devices[0].State != block.Down
		})
		for i := 1; i <= n; i++ {
			tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		}
	}
	eventually(t, "memory is free", func() bool {
		for i := 1; i <= n; i++ {
			tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		}
		return used(s, block.G2) == 0
	})
	for i := 1; i <= n; i++ {
		wantHit(t, s, ns, i, size)
	}
	eventually(t, "all goroutines are gone", func() bool { return runtime.NumGoroutine() <= before+4 })
	wantEmpty(t, s)
}

// flipEach makes a store with as many blocks in G3 as a part of a slot has bytes,
// flips a bit of another byte of that part in each, and opens it again.
func flipEach(t *testing.T, from, n, size int) (s *tiers.Store, ns, other block.Namespace) {
	t.Helper()
	slot, _ := tiers.SlotBytes(int64(size))
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s = openStore(t, o)
	ns, other = space(t, s, "a", 1<<20), space(t, s, "b", 1<<20)
	at := make([]int64, n)
	for i := range n {
		mustPut(t, s, ns, i, size, block.PutOptions{})
		// The same hash, with bytes of its own, in another namespace.
		if err := put(s, other, i, payload(i+n, size), block.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if res, err := s.Drain(t.Context(), nil); err != nil || res.Left != 0 {
		t.Fatalf("drain: %+v, %v", res, err)
	}
	for i := range n {
		at[i] = placeIn(t, s, ns, i, block.G3).Offset()
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(o.Slabs[0].Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, slot)
	for i := range n {
		if _, err := f.ReadAt(b, slabDataAt+at[i]); err != nil {
			t.Fatal(err)
		}
		b[from+i] ^= 1 << (i % 8)
		if _, err := f.WriteAt(b, slabDataAt+at[i]); err != nil {
			t.Fatal(err)
		}
	}
	return openStore(t, o), ns, other
}

// TestEveryByteOfASlot flips a bit in each byte of a slot's header and of its
// payload, in one block each: always a miss that is counted, never a refused start,
// and never bytes of another namespace.
func TestEveryByteOfASlot(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	const size, headerUsed = 600, 256
	_, header := tiers.SlotBytes(size)
	for _, c := range []struct {
		name    string
		from, n int
	}{
		{"Header", 0, headerUsed},
		{"Payload", int(header), size},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s, ns, other := flipEach(t, c.from, c.n, size)
			for i := range c.n {
				wantMiss(t, s, ns, i, block.MissCorrupt)
				got, p, err := get(s, other, i, block.GetOptions{})
				if err != nil || p.Reason != block.Hit || !slices.Equal(got, payload(i+c.n, size)) {
					t.Fatalf("block %d of the other namespace: %v, %v", i, p.Reason, err)
				}
			}
			eventually(t, "what was damaged is gone", func() bool { return s.Stats().Removed["damaged"] == int64(c.n) })
			if st := s.Stats(); st.Corrupt != int64(c.n) || st.Misses["corrupt"] != int64(c.n) || st.Blocks != int64(c.n) {
				t.Errorf("%d corrupt, misses %v, %d blocks, want %d of each", st.Corrupt, st.Misses, st.Blocks, c.n)
			}
			wantEmpty(t, s)
		})
	}
}

// TestBlockOnTwoSlabs puts a block again, with other bytes, while the slab that has
// it is away. When that is back, the block is there once and is the new one.
func TestBlockOnTwoSlabs(t *testing.T) {
	o, ns, on := twoSlabs(t)
	all := o.Slabs
	o.Slabs = all[1:]
	s := openStore(t, o)
	again := 0
	for i, slab := range on {
		if slab == 0 {
			wantMiss(t, s, ns, i, block.MissAbsent)
			if err := put(s, ns, i, payload(i+1000, 40_000), block.PutOptions{Durable: block.G3}); err != nil {
				t.Fatal(err)
			}
			again++
		}
	}
	o.Slabs = all
	s = reopen(t, s, o)
	entries, _, err := s.List(t.Context(), ns.ID, "", 2*len(on))
	if st := s.Stats(); err != nil || len(entries) != len(on) || st.Blocks != int64(len(on)) || st.Tiers[1].Blocks != int64(len(on)) {
		t.Errorf("%d blocks are listed, %d counted, %d of them in G3, want %d: %v", len(entries), st.Blocks, st.Tiers[1].Blocks, len(on), err)
	}
	for i, slab := range on {
		want := payload(i, 50_000+i)
		if slab == 0 {
			want = payload(i+1000, 40_000)
		}
		got, p, err := get(s, ns, i, block.GetOptions{})
		if err != nil || p.Reason != block.Hit || !slices.Equal(got, want) {
			t.Errorf("block %d: %v, %v", i, p.Reason, err)
		}
	}
	if again == 0 {
		t.Error("no block was put again")
	}
	wantEmpty(t, s)
}
