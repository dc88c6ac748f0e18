package tiers_test

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// TestSizesFollowTheTraffic fills a tier with blocks of one size, then with
// blocks of another, and back; each time the tier comes to hold mostly the last.
func TestSizesFollowTheTraffic(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	for _, c := range []struct {
		name string
		slab int64
	}{{"g2", 0}, {"g3", 64 << 20}} {
		t.Run(c.name, func(t *testing.T) {
			o := tiers.Options{DRAM: 64 << 20}
			if c.slab > 0 {
				o.Slabs = slabIn(t, c.slab)
			}
			s := openStore(t, o)
			ns := space(t, s, "a", 8<<20)
			next := 0
			for _, size := range []int{64 << 10, 1 << 20, 8 << 20, 100_000, 64 << 10} {
				n := 160 << 20 / size
				for range n {
					mustPut(t, s, ns, next, size, block.PutOptions{})
					next++
				}
				hits := 0
				for i := next - n; i < next; i++ {
					got, p, err := get(s, ns, i, block.GetOptions{NoPromote: true})
					if err != nil || p.Reason == block.Hit && !bytes.Equal(got, payload(i, size)) {
						t.Fatalf("get %d: %v, %v", i, p.Reason, err)
					}
					if p.Reason == block.Hit {
						hits += size
					}
				}
				if hits < 40<<20 {
					t.Errorf("of %d blocks of %d bytes, %d bytes are there", n, size, hits)
				}
			}
			wantEmpty(t, s)
		})
	}
}

// TestSizesAroundLeases: a few leased blocks, one in each of the first extents,
// do not keep other sizes from coming in, nor do they cost everything else.
func TestSizesAroundLeases(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 128 << 20})
	ns := space(t, s, "a", 1<<20)
	const size, n = 64<<10 - 512, 1900 // of slots of 64 KiB, nearly full
	byExtent := map[int64]int{}
	for i := range n {
		mustPut(t, s, ns, i, size, block.PutOptions{})
		byExtent[placeIn(t, s, ns, i, block.G2).Offset()/(8*(1<<20+4096))] = i
	}
	var leased []int
	for e := range int64(8) {
		leased = append(leased, byExtent[e])
	}
	l := lease(t, s, ns, leased...)
	for i := n; i < n+20; i++ {
		mustPut(t, s, ns, i, 1<<20, block.PutOptions{})
		wantHit(t, s, ns, i, 1<<20)
	}
	for _, i := range leased {
		wantHit(t, s, ns, i, size)
	}
	left := 0
	for i := range n {
		if tiersOf(t, s, ns, i) != "" {
			left++
		}
	}
	if left < n/2 {
		t.Errorf("%d of %d small blocks are left after 20 large ones came", left, n)
	}
	releaseLease(t, s, l)
	wantEmpty(t, s)
}

// TestImpossibleSize: a block for which leases leave no room is refused, and the
// others are not evicted for it, though a large part may be while it is tried.
func TestImpossibleSize(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 64 << 20})
	ns := space(t, s, "a", 8<<20)
	const size, n = 1 << 20, 50
	var all []int
	for i := range n {
		mustPut(t, s, ns, i, size, block.PutOptions{})
		all = append(all, i)
	}
	l := lease(t, s, ns, all...)
	for range 2 {
		if _, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(n), 8<<20, block.PutOptions{}); !errors.Is(err, block.ErrNoSpace) {
			t.Errorf("reserve: %v, want ErrNoSpace", err)
		}
	}
	for _, i := range all {
		wantHit(t, s, ns, i, size)
	}
	releaseLease(t, s, l)
	mustPut(t, s, ns, n, 8<<20, block.PutOptions{})
	wantHit(t, s, ns, n, 8<<20)
}

// TestManyOddSizes puts blocks of many lengths into a store with both tiers.
func TestManyOddSizes(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 128 << 20, Slabs: slabIn(t, 256<<20)})
	ns := space(t, s, "a", 1<<20)
	size := func(i int) int { return 1 + i*i*7919%300_000 }
	const n = 3000
	lost := 0
	for i := range n {
		mustPut(t, s, ns, i, size(i), block.PutOptions{})
	}
	for i := range n {
		got, p, err := get(s, ns, i, block.GetOptions{NoPromote: true})
		switch {
		case err != nil || p.Reason == block.Hit && !bytes.Equal(got, payload(i, size(i))):
			t.Fatalf("get %d: %v, %v", i, p.Reason, err)
		case p.Reason != block.Hit:
			lost++
		}
	}
	st := s.Stats()
	if lost != int(st.Removed["evicted"]) {
		t.Errorf("%d blocks are missing, %d are accounted for as evicted", lost, st.Removed["evicted"])
	}
	t.Logf("%d of %d blocks were evicted for good; used %d and %d", lost, n, used(s, block.G2), used(s, block.G3))
	wantEmpty(t, s)
}

// TestFullOfLeases: when all of G2 is leased, puts are refused soon, blocks of
// G3 are served past G2, and room comes back with the lease.
func TestFullOfLeases(t *testing.T) {
	const size = 1 << 20
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20)})
	ns := space(t, s, "a", size)
	for i := range 5 {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	for i := 5; i < 40; i++ { // push them out of G2
		mustPut(t, s, ns, i, size, block.PutOptions{})
	}
	eventually(t, "the first blocks are in G3 only", func() bool {
		for i := range 5 {
			if tiersOf(t, s, ns, i) != "g3" {
				return false
			}
		}
		return true
	})
	var inG2 []int
	for i := range 60 {
		if i >= 40 { // fill G2 up
			r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(i), size, block.PutOptions{})
			if errors.Is(err, block.ErrNoSpace) {
				break
			}
			if err == nil {
				err = s.Fill(t.Context(), r.ID, 0, payload(i, size))
			}
			if err == nil {
				err = s.Commit(t.Context(), []uint64{r.ID})[0].Err
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if places := placesOf(t, s, ns, i); len(places) > 0 && places[0].Tier == block.G2 {
			lease(t, s, ns, i)
			inG2 = append(inG2, i)
		}
	}
	if _, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(99), size, block.PutOptions{}); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("reserve: %v, want ErrNoSpace", err)
	}
	for i := range 5 {
		got, p, err := get(s, ns, i, block.GetOptions{})
		if err != nil || p.Reason != block.Hit || p.Tier != block.G3 || !bytes.Equal(got, payload(i, size)) {
			t.Errorf("get %d: %v from %v, %v", i, p.Reason, p.Tier, err)
		}
	}
	for _, i := range inG2 {
		if tiersOf(t, s, ns, i)[:2] != "g2" {
			t.Errorf("block %d left G2 although it is leased", i)
		}
	}
	if s.Stats().Tiers[0].Refused == 0 {
		t.Error("no refusal was counted")
	}
}

// TestParentsStay: in a store without G3 a parent is not evicted before its
// children, in whatever order they were used.
func TestParentsStay(t *testing.T) {
	const size = 256 << 10
	s := openStore(t, tiers.Options{DRAM: 32 << 20})
	ns := space(t, s, "a", size)
	parent := func(i int) int { return (i - 1) / 3 } // a tree
	for i := range 1000 {
		o := block.PutOptions{}
		if i > 0 {
			o.Parent, o.HasParent = hashOf(parent(i)), true
		}
		mustPut(t, s, ns, i, size, o)
		if i%50 == 0 {
			for j := 1; j <= i; j++ {
				if tiersOf(t, s, ns, j) == "" {
					continue
				}
				// The parent may be gone for good only if it went before this child came.
				if e := tiers.EntryOf(s, keyOf(ns, parent(j))); e.Kids[0] == 0 {
					t.Fatalf("block %d is there and its parent counts no child", j)
				}
			}
		}
	}
	var evicted map[string]int64
	if evicted = s.Stats().Removed; evicted["evicted"] < 800 {
		t.Errorf("removed %v", evicted)
	}
	wantEmpty(t, s)
}

// TestParentLeavesLast watches the departures of one chain: leaf first, root last.
func TestParentLeavesLast(t *testing.T) {
	const size, n = 1 << 20, 10
	chain := map[block.Hash]bool{}
	for i := range n {
		chain[hashOf(i)] = true
	}
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", size)
	var mu sync.Mutex
	var left []block.Hash
	ready := make(chan struct{})
	go s.Watch(t.Context(), block.WatchOptions{NS: ns.ID, Ready: func(block.WatchStart) { close(ready) }}, func(ev block.Event) error {
		if ev.Kind == block.EventRemoved && chain[ev.Hash] {
			mu.Lock()
			left = append(left, ev.Hash)
			mu.Unlock()
		}
		return nil
	})
	<-ready
	for i := range n {
		o := block.PutOptions{}
		if i > 0 {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		mustPut(t, s, ns, i, size, o)
	}
	for i := n; i < n+30; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{})
	}
	eventually(t, "the chain is gone", func() bool { return tiersOf(t, s, ns, 0) == "" })
	eventually(t, "its end is told", func() bool { mu.Lock(); defer mu.Unlock(); return len(left) >= n })
	mu.Lock()
	defer mu.Unlock()
	for k := range n {
		if left[k] != hashOf(n-1-k) {
			t.Fatalf("departure %d is of another block than %d", k, n-1-k)
		}
	}
}

// TestGrace: a block that was just put is not dropped; a put is refused instead.
func TestGrace(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Grace: 5 * time.Second})
	ns := space(t, s, "a", size)
	n := 0
	for ; n < 100; n++ {
		r, _, err := s.Reserve(within(t, 30*time.Second), ns.ID, hashLen, hashOf(n), size, block.PutOptions{})
		if errors.Is(err, block.ErrNoSpace) {
			break
		}
		if err == nil {
			err = s.Fill(t.Context(), r.ID, 0, payload(n, size))
		}
		if err == nil {
			err = s.Commit(t.Context(), []uint64{r.ID})[0].Err
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if gone := s.Stats().Removed["evicted"]; gone != 0 || n == 100 {
		t.Errorf("%d blocks were put and %d evicted within their grace", n, gone)
	}
	mustPut(t, s, ns, 200, size, block.PutOptions{}) // tries until the grace is over
	wantHit(t, s, ns, 200, size)
}

// TestBothTiersFullOfOneChain fills G3 with a chain of which only the last block
// is in G2, and goes on: something has to give.
func TestBothTiersFullOfOneChain(t *testing.T) {
	const size = 1 << 20
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 33<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", size)
	const n = 31 // which is all that fit
	for i := range n {
		po := block.PutOptions{Durable: block.G3}
		if i > 0 {
			po.Parent, po.HasParent = hashOf(i-1), true
		}
		mustPut(t, s, ns, i, size, po)
	}
	s = reopen(t, s, o) // all of them are in G3 only
	for i := range n {
		if tiersOf(t, s, ns, i) != "g3" {
			t.Fatalf("block %d is not in G3", i)
		}
	}
	mustPut(t, s, ns, n, size, block.PutOptions{Parent: hashOf(n - 1), HasParent: true})
	for i := n + 1; i < n+40; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{})
		wantHit(t, s, ns, i, size)
	}
	wantEmpty(t, s)
}

// TestPutDurableWhileEvicting puts durable blocks of several sizes through a
// small store from many sides; each is where it was said to be, or accounted for.
func TestPutDurableWhileEvicting(t *testing.T) {
	t.Parallel()
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 96<<20), Agent: newAgent(t), DRAM: 32 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	const each = 100
	size := func(i int) int { return []int{64 << 10, 200_000, 1 << 20}[i%3] }
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for k := range each {
				i := g*each + k
				if err := put(s, ns, i, payload(i, size(i)), block.PutOptions{Durable: block.G3}); err != nil && !errors.Is(err, block.ErrNoSpace) {
					t.Errorf("put %d: %v", i, err)
				}
				if _, p, err := get(s, ns, max(0, i-3), block.GetOptions{}); err != nil || p.Reason != block.Hit && p.Reason != block.MissAbsent {
					t.Errorf("get %d: %v, %v", i-3, p.Reason, err)
				}
			}
		})
	}
	wg.Wait()
	there := func(s *tiers.Store) (n int) {
		for i := range 4 * each {
			got, p, err := get(s, ns, i, block.GetOptions{NoPromote: true})
			if err != nil || p.Reason == block.Hit && !bytes.Equal(got, payload(i, size(i))) {
				t.Fatalf("get %d: %v, %v", i, p.Reason, err)
			}
			if p.Reason == block.Hit {
				n++
			}
		}
		return n
	}
	n, gone := there(s), s.Stats().Removed["evicted"]
	if n+int(gone) < 4*each-int(s.Stats().Tiers[1].Refused) || n == 0 {
		t.Errorf("%d of %d are there, %d evicted", n, 4*each, gone)
	}
	s = reopen(t, s, o)
	if there(s) == 0 {
		t.Error("nothing survived")
	}
	wantEmpty(t, s)
}

// TestStalledDeviceRefusesPuts: when G3 does not take writes any more, G2 fills
// up; puts are then refused by their deadline, and what is in G2 is served.
func TestStalledDeviceRefusesPuts(t *testing.T) {
	const size = 1 << 20
	stuck := make(chan struct{})
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
			if op == xfer.Write {
				<-stuck
			}
		}}
	})
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 64<<20), Agent: agent})
	ns := space(t, s, "a", size)
	var err error
	n := 0
	for ; n < 30 && err == nil; n++ {
		var r block.Reserved
		if r, _, err = s.Reserve(within(t, 100*time.Millisecond), ns.ID, hashLen, hashOf(n), size, block.PutOptions{}); err == nil {
			if err := s.Fill(t.Context(), r.ID, 0, payload(n, size)); err != nil {
				t.Fatal(err)
			}
			if err := s.Commit(t.Context(), []uint64{r.ID})[0].Err; err != nil {
				t.Fatal(err)
			}
		}
	}
	if !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("put %d: %v, want ErrNoSpace", n, err)
	}
	for i := range n - 1 {
		wantHit(t, s, ns, i, size)
	}
	close(stuck)
	mustPut(t, s, ns, 50, size, block.PutOptions{})
	for i := range n - 1 {
		wantHit(t, s, ns, i, size)
	}
	wantEmpty(t, s)
}

// TestManySizes puts blocks of more sizes than G2 has extents, of which each then
// holds little: none is lost.
func TestManySizes(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 64 << 20})
	ns := space(t, s, "a", 8<<20)
	sizes := []int{100, 1000, 3000, 5000, 9000, 17_000, 33_000, 70_000, 140_000, 270_000, 530_000, 1 << 20, 1_100_000, 2 << 20}
	for i, n := range sizes {
		mustPut(t, s, ns, i, n, block.PutOptions{})
	}
	for i, n := range sizes {
		wantHit(t, s, ns, i, n)
	}
}
