package tiers

import (
	"encoding/binary"
	"runtime"
	"runtime/metrics"
	"testing"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// BenchmarkGC measures what a cycle of the garbage collector costs with ten
// million blocks in what a store keeps per block: the resident table, a tier's
// policy and its slots. gc-cpu-ms is the CPU time of one forced cycle on all
// processors. The bar is 50.
func BenchmarkGC(b *testing.B) {
	const n = 10_000_000
	table, err := index.NewTable()
	if err != nil {
		b.Fatal(err)
	}
	defer table.Close()
	lru := policy.NewLRULeaf()
	slot, _ := SlotBytes(4096)
	slots := NewSlots(n*slot+n*slot/50, largeExtent)
	var parent block.Handle
	for i := range n {
		k := block.Key{NS: 1}
		binary.LittleEndian.PutUint64(k.Hash[:], uint64(i)*0x9e3779b97f4a7c15)
		h := table.Upsert(k, 16, func(block.Handle, *index.Entry, bool) {})
		if h == 0 {
			b.Fatal("the table is full")
		}
		if i%16 == 0 {
			parent = 0
		}
		lru.Insert(h, policy.Block{Hash: uint64(i), Parent: parent, Bytes: 4096})
		parent = h
		if _, ok := slots.Alloc(0, slot, h); !ok {
			b.Fatal("no slot")
		}
	}
	runtime.GC()
	sample := []metrics.Sample{{Name: "/cpu/classes/gc/total:cpu-seconds"}}
	cpu := func() float64 {
		metrics.Read(sample)
		return sample[0].Value.Float64()
	}
	worst := 0.0
	for b.Loop() {
		before := cpu()
		runtime.GC()
		worst = max(worst, cpu()-before)
	}
	b.ReportMetric(worst*1000, "gc-cpu-ms")
	runtime.KeepAlive(lru)
	runtime.KeepAlive(slots)
}
