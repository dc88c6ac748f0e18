package blocksum_test

import (
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/internal/blocksum"
)

// TestSum compares with xxh3 at once, for lengths around every border and steps of
// all sizes.
func TestSum(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := make([]byte, 70000)
	for i := range p {
		p[i] = byte(rng.Uint32())
	}
	var s blocksum.Sum
	check := func(n int) {
		t.Helper()
		if got, want := s.Sum(), xxh3.Hash128(p[:n]).Bytes(); got != want {
			t.Fatalf("%d bytes: sum %x, want %x", n, got, want)
		}
	}
	check(0)
	for n := range 5000 {
		s.Reset()
		s.Add(p[:n])
		check(n)
	}
	for range 2000 {
		s.Reset()
		for n, end := 0, rng.IntN(len(p)); n < end; {
			n = min(end, n+rng.IntN([]int{3, 100, 1100, 5000, 40000}[rng.IntN(5)]))
			s.Add(p[:n])
			check(n) // in between as well
		}
	}
}

func BenchmarkSum(b *testing.B) {
	p := make([]byte, 1<<20)
	b.Run("steps", func(b *testing.B) {
		var s blocksum.Sum
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			s.Reset()
			for n := 256 << 10; n <= len(p); n += 256 << 10 {
				s.Add(p[:n])
			}
			s.Sum()
		}
	})
	b.Run("at_once", func(b *testing.B) {
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			xxh3.Hash128(p)
		}
	})
	b.Run("stream", func(b *testing.B) {
		h := xxh3.New()
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			h.Reset()
			for n := 0; n < len(p); n += 256 << 10 {
				_, _ = h.Write(p[n:][:256<<10])
			}
			h.Sum128()
		}
	})
}
