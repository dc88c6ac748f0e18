package xfertest

import (
	"fmt"
	"testing"
)

// Bench measures throughput through an agent by memory pair, operation and
// size: one piece at a time, lists of pieces, and requests that are made anew
// for each transfer. Run it with -benchmem for the allocations.
func Bench(b *testing.B, h Harness) {
	for _, pair := range h.pairs(b) {
		for _, op := range ops {
			for _, c := range []struct {
				n     int
				bytes int64
			}{
				{1, 4 << 10},
				{1, 64 << 10},
				{1, 1 << 20},
				{1, 4 << 20},
				{256, 4 << 10},
				{64, 64 << 10},
				{32, 1 << 20},
			} {
				if int64(c.n)*c.bytes > h.maxBytes() {
					continue
				}
				name := fmt.Sprintf("%s-%s/%s/%dx%dKiB", pair.Local, pair.Remote, op, c.n, c.bytes>>10)
				b.Run(name, func(b *testing.B) {
					g := newRig(b, h, pair, int64(c.n)*c.bytes)
					r := g.request(op, stripes(c.n, c.bytes))
					b.SetBytes(int64(c.n) * c.bytes)
					b.ReportAllocs()
					for b.Loop() {
						if err := r.Run(b.Context()); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
			b.Run(fmt.Sprintf("%s-%s/%s/new+1x4KiB", pair.Local, pair.Remote, op), func(b *testing.B) {
				g := newRig(b, h, pair, 4<<10)
				local, remote := g.lists(op, stripes(1, 4<<10))
				b.SetBytes(4 << 10)
				b.ReportAllocs()
				for b.Loop() {
					r, err := g.agent.NewRequest(op, local, remote, nil)
					if err != nil {
						b.Fatal(err)
					}
					if err := r.Run(b.Context()); err != nil {
						b.Fatal(err)
					}
					if err := r.Release(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
