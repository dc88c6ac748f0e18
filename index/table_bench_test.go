package index

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// benchTables keeps the tables of the benchmarks, since filling one takes
// longer than reading it.
var benchTables = struct {
	sync.Mutex
	bySize map[int]*Table
}{bySize: map[int]*Table{}}

func benchTable(b *testing.B, n int) *Table {
	b.Helper()
	benchTables.Lock()
	defer benchTables.Unlock()
	if t := benchTables.bySize[n]; t != nil {
		return t
	}
	t := newTable(b)
	for i := range n {
		if t.Upsert(numbered(1, uint64(i)), 32, func(block.Handle, *Entry, bool) {}) == 0 {
			b.Fatal("table is full")
		}
	}
	benchTables.bySize[n] = t
	return t
}

// numbered is a key whose hash has all of its bytes in use.
func numbered(ns block.NamespaceID, i uint64) block.Key {
	k := block.Key{NS: ns}
	for j := range 4 {
		binary.LittleEndian.PutUint64(k.Hash[8*j:], (i+1)*0x9e3779b97f4a7c15>>j)
	}
	return k
}

func BenchmarkLookup(b *testing.B) {
	for _, n := range []int{1_000_000, 10_000_000} {
		t := benchTable(b, n)
		b.Run(fmt.Sprintf("n=%d/hit", n), func(b *testing.B) {
			b.ReportMetric(float64(t.Bytes())/float64(t.Len()), "B/entry")
			r := rand.New(rand.NewPCG(1, 2))
			for b.Loop() {
				if _, _, ok := t.Lookup(numbered(1, r.Uint64N(uint64(n)))); !ok {
					b.Fatal("absent")
				}
			}
		})
		b.Run(fmt.Sprintf("n=%d/miss", n), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			for b.Loop() {
				if _, _, ok := t.Lookup(numbered(2, r.Uint64N(uint64(n)))); ok {
					b.Fatal("present")
				}
			}
		})
	}
}

func BenchmarkLookupAll(b *testing.B) {
	const batch = 256
	for _, n := range []int{1_000_000, 10_000_000} {
		t := benchTable(b, n)
		for _, name := range []string{"hit", "miss"} {
			b.Run(fmt.Sprintf("n=%d/%s", n, name), func(b *testing.B) {
				r := rand.New(rand.NewPCG(1, 2))
				pool := make([][]byte, 4096)
				for i := range pool {
					for range batch {
						k := numbered(1, r.Uint64N(uint64(n)))
						pool[i] = append(pool[i], k.Hash[:]...)
					}
				}
				ns := block.NamespaceID(1)
				if name == "miss" {
					ns = 2
				}
				var found, i int
				b.ResetTimer()
				for b.Loop() {
					t.LookupAll(ns, 32, pool[i%len(pool)], func(_ int, _ block.Handle, e *Entry) bool {
						if e != nil && e.State[0] == SlotNone {
							found++
						}
						return true
					})
					i++
				}
				if want := batch * i; name == "hit" && found != want || name == "miss" && found != 0 {
					b.Fatalf("found %d", found)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(batch*i), "ns/key")
			})
		}
	}
}

func BenchmarkUpsert(b *testing.B) {
	t := newTable(b)
	var i uint64
	for b.Loop() {
		t.Upsert(numbered(1, i), 32, func(block.Handle, *Entry, bool) {})
		i++
	}
	b.ReportMetric(float64(t.Bytes())/float64(t.Len()), "B/entry")
}
