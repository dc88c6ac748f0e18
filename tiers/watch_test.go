package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

var errStop = errors.New("the watcher has had enough")

// watchSnapshot returns what a snapshot says is there.
func watchSnapshot(t *testing.T, s *tiers.Store, ns block.NamespaceID) (events []block.Event) {
	t.Helper()
	var start block.WatchStart
	o := block.WatchOptions{NS: ns, Snapshot: true, Ready: func(st block.WatchStart) { start = st }}
	err := s.Watch(t.Context(), o, func(ev block.Event) error {
		if ev.Kind == block.EventPresent {
			events = append(events, ev)
			return nil
		}
		if ev.Kind != block.EventSnapshot || ev.Seq != start.Seq || ev.Count != int64(len(events)) {
			t.Errorf("event %+v behind %d present, begun at %d", ev, len(events), start.Seq)
		}
		return errStop
	})
	if !errors.Is(err, errStop) {
		t.Fatalf("watch: %v", err)
	}
	if st := s.Stats(); start.Incarnation != st.Incarnation || start.Incarnation == 0 || start.Seq != st.EventSeq || start.Resumed {
		t.Errorf("the watch begins with %+v, the store is %d at %d", start, st.Incarnation, st.EventSeq)
	}
	return events
}

func TestWatchSnapshot(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)})
	a, b := space(t, s, "a", 1<<20), space(t, s, "b", 1<<20)
	mustPut(t, s, a, 1, 1000, block.PutOptions{})
	mustPut(t, s, a, 2, 2000, block.PutOptions{Durable: block.G3, Parent: hashOf(1), HasParent: true})
	mustPut(t, s, b, 3, 3000, block.PutOptions{Durable: block.G3})
	tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(b, 3)))
	mustPut(t, s, b, 4, 4000, block.PutOptions{})
	mustDelete(t, s, b, 1, 4)
	present := func(ns string, i, n int, tier block.TierID) block.Event {
		return block.Event{Kind: block.EventPresent, NS: ns, Hash: hashOf(i), Hlen: hashLen, Tier: tier, Len: uint32(n)}
	}
	child := func(tier block.TierID) block.Event {
		ev := present("a", 2, 2000, tier)
		ev.Parent, ev.HasPar = hashOf(1), true
		return ev
	}
	ofA := []block.Event{present("a", 1, 1000, block.G2), child(block.G2), child(block.G3)}
	ofB := []block.Event{present("b", 3, 3000, block.G3)}
	for ns, want := range map[block.NamespaceID][]block.Event{a.ID: ofA, b.ID: ofB, 0: append(slices.Clone(ofA), ofB...)} {
		got := watchSnapshot(t, s, ns)
		slices.SortFunc(got, func(x, y block.Event) int {
			return int(x.Hash[0])*8 + int(x.Tier) - int(y.Hash[0])*8 - int(y.Tier)
		})
		if !slices.Equal(got, want) {
			t.Errorf("snapshot of namespace %d: %+v, want %+v", ns, got, want)
		}
	}
}

// TestWatchSnapshotEnds: a watch ends in the middle of its snapshot when its
// context does, when its callback fails, and when the store closes.
func TestWatchSnapshotEnds(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	for i := range 1000 {
		mustPut(t, s, ns, i, 1000, block.PutOptions{})
	}
	ctx, cancel := context.WithCancel(t.Context())
	for _, c := range []struct {
		name string
		end  func() error // in the callback
		want error
		more int // calls at most that may follow
	}{
		{"context", func() error { cancel(); return nil }, context.Canceled, 0},
		{"callback", func() error { return errStop }, errStop, 0},
		{"close", s.Close, block.ErrClosed, 256},
	} {
		n := 0
		err := s.Watch(ctx, block.WatchOptions{Snapshot: true}, func(block.Event) error {
			if n++; n == 10 {
				return c.end()
			}
			return nil
		})
		if !errors.Is(err, c.want) || n > 10+c.more {
			t.Errorf("%s: %v after %d events, want %v after 10", c.name, err, n, c.want)
		}
		ctx = t.Context()
	}
}

// TestWatchAgrees lets a watcher begin with a snapshot while blocks are put,
// deleted and evicted, go and come back at random, and wants what it has made of
// all it was told to be what is there.
func TestWatchAgrees(t *testing.T) {
	seeds := fewer(24, 4)
	if testing.Short() {
		seeds = min(seeds, 6)
	}
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			watchAgrees(t, seed)
		})
	}
}

func watchAgrees(t *testing.T, seed uint64) {
	const keys, size = 80, 1 << 20 // 15 fit into G2, 31 into G3
	dir := t.TempDir()
	s := openStore(t, tiers.Options{
		Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, NoSync: true,
		Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "slab"), Bytes: 32 << 20}},
	})
	ns, other := space(t, s, "watched", size), space(t, s, "other", size)
	data := make([]byte, size)
	var workers, watcher sync.WaitGroup
	for w := range 3 {
		r := rand.New(rand.NewPCG(seed, uint64(w)))
		workers.Go(func() {
			for range 120 {
				i := r.IntN(keys/3)*3 + w
				switch p := r.IntN(10); {
				case p < 5:
					o := block.PutOptions{Durable: block.TierID(2 + r.IntN(2)), Parent: hashOf(i - 1), HasParent: i%4 > 0}
					if err := put(s, ns, i, data[:size-i], o); err != nil && !errors.Is(err, block.ErrNoSpace) {
						t.Errorf("put %d: %v", i, err)
					}
				case p < 7:
					if _, err := s.Delete(t.Context(), ns.ID, hashLen, pack(hashOf(i))); err != nil {
						t.Errorf("delete %d: %v", i, err)
					}
				case p < 8:
					if err := put(s, other, i, data[:1000], block.PutOptions{}); err != nil {
						t.Errorf("put %d: %v", i, err)
					}
				case p < 9:
					tiers.Evict(s, block.TierID(2+r.IntN(2)), tiers.HandleOf(s, keyOf(ns, i)))
				default:
					if _, _, err := get(s, ns, i, block.GetOptions{}); err != nil {
						t.Errorf("get %d: %v", i, err)
					}
				}
			}
		})
	}
	type place struct {
		hash block.Hash
		len  uint32
		tier block.TierID
	}
	var mu sync.Mutex
	there, seq := map[place]bool{}, uint64(0)
	ctx, cancel := context.WithCancel(t.Context())
	defer watcher.Wait()
	defer cancel()
	watcher.Go(func() {
		r := rand.New(rand.NewPCG(seed, 99))
		var o block.WatchOptions
		for ctx.Err() == nil {
			o.NS, o.Snapshot = ns.ID, true
			var start block.WatchStart
			whole := false // what there is was told
			o.Ready = func(st block.WatchStart) {
				mu.Lock()
				defer mu.Unlock()
				start, whole = st, st.Resumed
				if !whole {
					clear(there)
				}
			}
			left := r.IntN(60) // events until it goes
			err := s.Watch(ctx, o, func(ev block.Event) error {
				mu.Lock()
				defer mu.Unlock()
				k := place{ev.Hash, ev.Len, ev.Tier}
				switch ev.Kind {
				case block.EventPresent, block.EventStored:
					there[k] = true
				case block.EventRemoved:
					delete(there, k)
				case block.EventSnapshot:
					whole = true
				default:
					t.Errorf("event %+v", ev)
				}
				if ev.Seq > 0 {
					seq = ev.Seq
				}
				if left--; left == 0 {
					return errStop
				}
				return nil
			})
			if !errors.Is(err, errStop) && ctx.Err() == nil {
				t.Errorf("watch: %v", err)
			}
			o = block.WatchOptions{}
			if whole {
				o.Incarnation, o.After = start.Incarnation, seq
			}
		}
	})
	workers.Wait()
	var want, got map[place]bool
	eventually(t, "the watcher knows what is there", func() bool {
		want = map[place]bool{}
		entries, _, err := s.List(t.Context(), ns.ID, "", 2*keys)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			for _, tier := range e.Tiers {
				want[place{e.Hash, e.Len, tier}] = true
			}
		}
		mu.Lock()
		defer mu.Unlock()
		got = maps.Clone(there)
		return maps.Equal(got, want)
	})
	if len(want) == 0 {
		t.Error("nothing is there at the end")
	}
}

// TestWatchPutWhileLeaving puts a block again whose record is still being dropped:
// that its old copy has left is told before the new one, and not as the end of it.
func TestWatchPutWhileLeaving(t *testing.T) {
	t.Parallel()
	s, _, ns := coldBlocks(t, nil, 1, 3000)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ready := make(chan struct{})
	events := make(chan block.Event, 100)
	done := make(chan error, 1)
	go func() {
		o := block.WatchOptions{NS: ns.ID, Ready: func(block.WatchStart) { close(ready) }}
		done <- s.Watch(ctx, o, func(ev block.Event) error { events <- ev; return nil })
	}()
	<-ready
	release := tiers.HoldCommits(s)
	if !tiers.EvictG3(s, tiers.HandleOf(s, keyOf(ns, 1))) {
		t.Fatal("the block does not leave")
	}
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	release()
	eventually(t, "the old slot is free", func() bool { return used(s, block.G3) == 0 })
	mustDelete(t, s, ns, 1, 1)
	got := ""
	for range 3 {
		ev := <-events
		got += fmt.Sprintf("%v %v %v; ", ev.Kind, ev.Tier, ev.Last)
	}
	if want := "removed g3 true; stored g2 false; removed g2 true; "; got != want {
		t.Errorf("events %s, want %s", got, want)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("watch: %v", err)
	}
}
