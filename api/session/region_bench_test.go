package session_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/blocksum"
)

// regionStep is how much the server copies before it hashes it.
const regionStep = 64 << 10

// BenchmarkRegion moves sixteen blocks of 1 MiB between a region and a store in memory:
// in one call, in sixteen at once, and bare, which is the limit, as a loop that copies and
// hashes in the same steps between two mappings of the same kind.
func BenchmarkRegion(b *testing.B) {
	const n, count = 1 << 20, 16
	r := newRig(b, &memstore.Options{Capacity: 512 << 20, Evict: true, Shared: 1 << 30}, nil)
	c, _, mem := r.attach(n * count)
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	items, blocks := rows(0, count, n)
	for i := range items {
		items[i].Segments = []session.Segment{segment(0, n, i*n)}
		blocks[i].Segments = items[i].Segments
		blocks[i].HasParent = false
	}
	if _, err := c.RegionPut(b.Context(), r.handle(), blocks, session.PutOptions{}); err != nil {
		b.Fatal(err)
	}
	get := func(from, to int) {
		res, err := c.RegionGet(b.Context(), r.handle(), items[from:to], block.GetOptions{})
		if err != nil || res[0].Reason != block.Hit {
			b.Error(res, err)
		}
	}
	put := func(from, to int) {
		res, err := c.RegionPut(b.Context(), r.handle(), blocks[from:to], session.PutOptions{})
		if err != nil || res[0].Err != nil {
			b.Error(res, err)
		}
	}
	atOnce := func(one func(from, to int)) {
		var wg sync.WaitGroup
		for i := range count {
			wg.Go(func() { one(i, i+1) })
		}
		wg.Wait()
	}
	_, src := unsealed(b, n*count)
	copy(src, mem)
	bare := func() {
		for i := range count {
			dst, src := mem[i*n:][:n], src[i*n:][:n]
			var sum blocksum.Sum
			for at := 0; at < n; at += regionStep {
				copy(dst[at:][:regionStep], src[at:])
				sum.Add(src[:at+regionStep])
			}
			_ = sum.Sum()
		}
	}
	for _, bb := range []struct {
		name string
		run  func()
	}{
		{"bare", bare},
		{"get", func() { get(0, count) }},
		{"get/atOnce", func() { atOnce(get) }},
		{"put", func() { put(0, count) }},
		{"put/atOnce", func() { atOnce(put) }},
	} {
		b.Run(fmt.Sprintf("%s/%dx1MiB", bb.name, count), func(b *testing.B) {
			b.SetBytes(n * count)
			b.ReportAllocs()
			for b.Loop() {
				bb.run()
			}
		})
	}
}
