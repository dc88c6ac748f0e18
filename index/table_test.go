package index

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/kvtier/kvtier/index/block"
)

func newTable(tb testing.TB) *Table {
	tb.Helper()
	t, err := NewTable()
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func tableForTest(t *testing.T) *Table {
	t.Helper()
	table := newTable(t)
	t.Cleanup(func() {
		if err := table.Close(); err != nil {
			t.Error(err)
		}
	})
	return table
}

// small is a key whose hash is a small integer, which must spread as well as any.
func small(ns block.NamespaceID, i uint64) block.Key {
	k := block.Key{NS: ns}
	binary.LittleEndian.PutUint64(k.Hash[:], i)
	return k
}

func nothing(block.Handle, *Entry, bool) {}

func TestEntryStaysSmall(t *testing.T) {
	if got := unsafe.Sizeof(Entry{}); got > 120 {
		t.Errorf("an entry takes %d bytes, want at most 120", got)
	}
	if a, b := unsafe.Sizeof(chunk{})%lineBytes, unsafe.Offsetof(segment{}.slots)%lineBytes; a != 0 || b != 0 {
		t.Errorf("chunks and slots are off the cache lines by %d and %d bytes", a, b)
	}
}

func TestTableLifeOfAnEntry(t *testing.T) {
	table := tableForTest(t)
	k := small(1, 42)
	if _, _, ok := table.Lookup(k); ok {
		t.Fatal("found in an empty table")
	}
	h := table.Upsert(k, 8, func(_ block.Handle, e *Entry, created bool) {
		if !created || e.NS != k.NS || e.Hash != k.Hash || e.HashLen != 8 {
			t.Errorf("created %v, entry %+v", created, *e)
		}
		e.Len = 7
	})
	if h == 0 {
		t.Fatal("no handle")
	}
	if again := table.Upsert(k, 8, func(_ block.Handle, e *Entry, created bool) {
		if created || e.Len != 7 {
			t.Errorf("created %v, len %d", created, e.Len)
		}
	}); again != h {
		t.Errorf("handle %d, then %d", h, again)
	}
	if !table.UpdateKey(k, func(g block.Handle, e *Entry) { e.Len = 8 }) || table.UpdateKey(small(2, 42), func(block.Handle, *Entry) {}) {
		t.Error("UpdateKey finds the wrong keys")
	}
	if g, e, ok := table.Lookup(k); !ok || g != h || e.Len != 8 {
		t.Errorf("Lookup = %d, %+v, %v", g, e, ok)
	}

	if !table.Unlink(h) || table.Unlink(h) {
		t.Error("Unlink does not tell whether the entry was linked")
	}
	if _, _, ok := table.Lookup(k); ok || table.Len() != 0 {
		t.Error("found after Unlink")
	}
	other := table.Upsert(k, 8, func(_ block.Handle, e *Entry, created bool) {
		if !created || e.Len != 0 {
			t.Error("the new entry is the old one")
		}
	})
	if !table.Update(h, func(e *Entry) { e.Len++ }) || !table.View(h, func(e *Entry) {
		if e.Len != 9 {
			t.Errorf("len %d after Unlink", e.Len)
		}
	}) {
		t.Error("an unlinked entry is out of reach")
	}
	table.Free(h)
	if table.View(h, func(*Entry) {}) || table.Update(h, func(*Entry) {}) || table.Unlink(h) {
		t.Error("a free handle is in use")
	}
	table.Free(other)
	if table.Len() != 0 {
		t.Errorf("Len = %d", table.Len())
	}
	if got := table.Upsert(k, 8, nothing); got != other && got != h {
		t.Errorf("handle %d is not used again, nor %d: got %d", h, other, got)
	}
	if table.View(0, nil) || table.Update(0, nil) || table.Unlink(0) || table.View(1<<30, nil) {
		t.Error("handles that never were are in use")
	}
}

func TestTableFreeTwicePanics(t *testing.T) {
	table := tableForTest(t)
	h := table.Upsert(small(1, 1), 8, nothing)
	table.Free(h)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	table.Free(h)
}

func TestClosedTableIsEmpty(t *testing.T) {
	table := newTable(t)
	h := table.Upsert(small(1, 1), 8, nothing)
	for range 2 {
		if err := table.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, ok := table.Lookup(small(1, 1)); ok || table.Len() != 0 || table.Bytes() != 0 {
		t.Error("not empty")
	}
	if table.Upsert(small(1, 1), 8, nothing) != 0 || table.View(h, nil) || table.Unlink(h) {
		t.Error("takes entries")
	}
	table.Free(h)
	key := small(1, 1)
	table.LookupAll(1, 8, key.Hash[:8], func(_ int, _ block.Handle, e *Entry) bool {
		if e != nil {
			t.Error("finds entries")
		}
		return true
	})
	table.Range(0, func(block.Handle, *Entry) bool { t.Error("lists entries"); return true })
}

// TestTableAgainstMap runs random operations on the table and on a Go map, with
// enough keys in few shards' segments that segments split and slots move up.
func TestTableAgainstMap(t *testing.T) {
	withoutRace(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	table := tableForTest(t)
	type known struct {
		h   block.Handle
		len uint32
	}
	model := make(map[block.Key]known)
	unlinked := make(map[block.Handle]uint32)
	const keys = 400_000
	for step := range 1_500_000 {
		k := small(block.NamespaceID(r.IntN(2)), r.Uint64N(keys))
		m, have := model[k]
		op := r.IntN(10)
		// Grow, then shrink, then churn.
		if phase := step * 3 / 1_500_000; phase == 0 && op > 6 || phase == 1 && op < 3 {
			op = (op + 5) % 10
		}
		switch {
		case op < 4:
			n := r.Uint32()
			h := table.Upsert(k, 8, func(_ block.Handle, e *Entry, created bool) {
				if created == have || e.Len != m.len {
					t.Fatalf("upsert of %v: created %v, len %d; the model has %v, %d", k, created, e.Len, have, m.len)
				}
				e.Len = n
			})
			if have && h != m.h {
				t.Fatalf("handle of %v was %d, is %d", k, m.h, h)
			}
			if _, taken := unlinked[h]; taken {
				t.Fatalf("handle %d is in use", h)
			}
			model[k] = known{h, n}
		case op < 6:
			h, e, ok := table.Lookup(k)
			if ok != have || ok && (h != m.h || e.Len != m.len || e.Hash != k.Hash || e.NS != k.NS) {
				t.Fatalf("lookup of %v: %d, %d, %v; the model has %d, %d, %v", k, h, e.Len, ok, m.h, m.len, have)
			}
		case op < 7 && have:
			if !table.Unlink(m.h) {
				t.Fatalf("unlink of %v: not linked", k)
			}
			unlinked[m.h] = m.len
			delete(model, k)
		case op < 9 && have:
			table.Free(m.h)
			delete(model, k)
		default:
			for h, n := range unlinked {
				if !table.View(h, func(e *Entry) {
					if e.Len != n {
						t.Fatalf("unlinked handle %d: len %d, want %d", h, e.Len, n)
					}
				}) {
					t.Fatalf("unlinked handle %d is free", h)
				}
				table.Free(h)
				delete(unlinked, h)
				break
			}
		}
		if step%250_000 == 0 {
			checkSegments(t, table)
		}
	}
	if table.Len() != len(model) {
		t.Errorf("Len = %d, want %d", table.Len(), len(model))
	}
	checkSegments(t, table)
	var hashes []byte
	for i := range uint64(keys) {
		k := small(1, i)
		hashes = append(hashes, k.Hash[:8]...)
	}
	next := 0
	table.LookupAll(1, 8, hashes, func(i int, h block.Handle, e *Entry) bool {
		m, have := model[small(1, uint64(i))]
		if i != next || (e != nil) != have || h != m.h || e != nil && e.Len != m.len {
			t.Fatalf("LookupAll of %d (turn %d): handle %d, found %v; the model has %d, %v", i, next, h, e != nil, m.h, have)
		}
		next++
		return true
	})
	if next != keys {
		t.Errorf("LookupAll gave %d of %d", next, keys)
	}
	var last block.Handle
	listed := 0
	table.Range(0, func(h block.Handle, e *Entry) bool {
		k := block.Key{NS: e.NS, Hash: e.Hash}
		if h <= last || model[k].h != h || model[k].len != e.Len {
			t.Fatalf("Range gives %v under %d after %d; the model has %+v", k, h, last, model[k])
		}
		last = h
		listed++
		return true
	})
	if listed != len(model) {
		t.Errorf("Range lists %d of %d", listed, len(model))
	}
}

// checkSegments fails when a slot cannot be reached by probing, or counts are
// off.
func checkSegments(t *testing.T, table *Table) {
	t.Helper()
	for n := range table.shards {
		s := &table.shards[n]
		seen := make(map[*segment]bool)
		total := 0
		for _, g := range s.mu.dir {
			if seen[g] {
				continue
			}
			seen[g] = true
			used := 0
			for p, v := range g.slots {
				if v == 0 {
					continue
				}
				used++
				e := s.entry(v&^tagMask - 1)
				i, ok := s.find(table.hashOf(e), block.Key{NS: e.NS, Hash: e.Hash})
				if !ok || i != v&^tagMask-1 {
					t.Fatalf("shard %d, slot %d: entry %d is not found by its key", n, p, v&^tagMask-1)
				}
			}
			if used != int(g.used) {
				t.Fatalf("shard %d: a segment counts %d of %d slots", n, g.used, used)
			}
			total += used
		}
		if int64(total) != s.linked.Load() {
			t.Fatalf("shard %d: %d slots, %d linked", n, total, s.linked.Load())
		}
	}
}

func TestLookupAllStops(t *testing.T) {
	table := tableForTest(t)
	var hashes []byte
	for i := range uint64(500) {
		k := numbered(3, i)
		table.Upsert(k, 20, nothing)
		hashes = append(hashes, k.Hash[:20]...)
	}
	for _, stop := range []int{0, 1, 7, 8, 70, 499} {
		calls := 0
		table.LookupAll(3, 20, hashes, func(i int, _ block.Handle, _ *Entry) bool {
			calls++
			return i < stop
		})
		if calls != stop+1 {
			t.Errorf("stopped at %d after %d calls", stop, calls)
		}
	}
	// A writer gets through afterwards: no lock is left behind.
	table.Upsert(numbered(3, 501), 20, nothing)
	defer func() {
		if recover() == nil {
			t.Error("no panic for hashes of 33 bytes")
		}
	}()
	table.LookupAll(3, 33, hashes, nil)
}

func TestRangeFromAHandle(t *testing.T) {
	table := tableForTest(t)
	var handles []block.Handle
	for i := range uint64(5000) {
		handles = append(handles, table.Upsert(small(1, i), 8, nothing))
	}
	slices.Sort(handles)
	for _, at := range []int{0, 1, 33, 2500, 4999} {
		var got []block.Handle
		table.Range(handles[at], func(h block.Handle, _ *Entry) bool {
			got = append(got, h)
			return len(got) < 100
		})
		if want := handles[at:min(at+100, len(handles))]; !slices.Equal(got, want) {
			t.Errorf("from %d: %v, want %v", handles[at], got, want)
		}
	}
	n := 0
	table.Range(handles[len(handles)-1]+1, func(block.Handle, *Entry) bool { n++; return true })
	if n != 0 {
		t.Errorf("%d entries beyond the last", n)
	}
	// What a callback does to the table does not disturb the walk.
	table.Range(0, func(h block.Handle, _ *Entry) bool { table.Free(h); return true })
	if table.Len() != 0 {
		t.Errorf("Len = %d after all were freed", table.Len())
	}
}

// TestTableConcurrently has goroutines that own disjoint keys, and readers of
// all of them. An entry's fields must always fit together.
func TestTableConcurrently(t *testing.T) {
	table := tableForTest(t)
	const owners, keys, rounds = 8, 2000, 30
	check := func(e *Entry) {
		if uint64(e.Len) != binary.LittleEndian.Uint64(e.Hash[:]) || e.Gen%2 != 0 {
			t.Errorf("torn entry: hash %x, len %d, gen %d", e.Hash[:8], e.Len, e.Gen)
		}
	}
	stop := make(chan struct{})
	var readers, writers sync.WaitGroup
	for n := range 4 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(n), 1))
			hashes := make([]byte, 0, 8*100)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, e, ok := table.Lookup(small(1, r.Uint64N(owners*keys))); ok {
					check(&e)
				}
				hashes = hashes[:0]
				for range 100 {
					hashes = binary.LittleEndian.AppendUint64(hashes, r.Uint64N(owners*keys))
				}
				table.LookupAll(1, 8, hashes, func(_ int, _ block.Handle, e *Entry) bool {
					if e != nil {
						check(e)
					}
					return true
				})
				table.Range(block.Handle(r.Uint64N(owners*keys)), func(_ block.Handle, e *Entry) bool {
					check(e)
					return r.IntN(50) > 0
				})
			}
		})
	}
	for n := range uint64(owners) {
		writers.Go(func() {
			for round := range rounds {
				for i := range uint64(keys) {
					k := small(1, n*keys+i)
					h := table.Upsert(k, 8, func(_ block.Handle, e *Entry, _ bool) {
						e.Gen++
						runtime.Gosched()
						e.Len = uint32(n*keys + i)
						e.Gen++
					})
					if (round+int(i))%3 == 0 {
						table.Unlink(h)
						table.Free(h)
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	checkSegments(t, table)
	var want int
	for i := range keys {
		if (rounds-1+i)%3 != 0 {
			want += owners
		}
	}
	if table.Len() != want {
		t.Errorf("Len = %d, want %d", table.Len(), want)
	}
}

func TestSettleAndDetach(t *testing.T) {
	table := tableForTest(t)
	k := small(1, 5)
	h := table.Upsert(k, 8, nothing)
	if !table.Settle(h, func(*Entry) bool { return false }) || table.Len() != 1 {
		t.Error("Settle frees what it was told to keep")
	}
	if !table.Detach(k, func(g block.Handle, _ *Entry) bool { return g != h }) || table.Len() != 1 {
		t.Error("Detach unlinks what it was told to keep")
	}
	if !table.Detach(k, func(g block.Handle, _ *Entry) bool { return g == h }) || table.Len() != 0 {
		t.Error("Detach does not unlink")
	}
	told := false
	if table.Detach(k, func(g block.Handle, e *Entry) bool { told = g == 0 && e == nil; return true }) || !told {
		t.Error("Detach finds an unlinked entry, or does not say that there is none")
	}
	if !table.View(h, func(*Entry) {}) {
		t.Error("Detach frees the entry")
	}
	if !table.Settle(h, func(*Entry) bool { return true }) || table.Settle(h, nil) || table.Settle(0, nil) {
		t.Error("Settle does not free the entry once")
	}
}

// Unlink makes an entry unfindable by its key, under which another may then be
// created; by its handle it stays known until Free. It reports whether the entry
// was linked.
func (t *Table) Unlink(h block.Handle) bool {
	n, i, ok := split(h)
	if !ok {
		return false
	}
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unlink(t, i)
}

// Free gives an entry back, unlinking it first if it is linked. It panics when
// the handle is free already, unless the table is closed.
func (t *Table) Free(h block.Handle) {
	n, i, ok := split(h)
	if !ok {
		panic(fmt.Sprintf("index: free of handle %d", h))
	}
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.dir == nil {
		return
	}
	if s.life(i) == lifeFree {
		panic(fmt.Sprintf("index: handle %d freed twice", h))
	}
	s.unlink(t, i)
	s.give(i)
}
