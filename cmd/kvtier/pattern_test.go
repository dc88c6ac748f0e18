package main

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

func TestTraceHash(t *testing.T) {
	h := traceHash(0x0102)
	if got := binary.LittleEndian.Uint64(h[:8]); got != 0x0102 {
		t.Errorf("first word is %#x, want the id", got)
	}
	if binary.LittleEndian.Uint64(h[8:16]) == 0 {
		t.Error("second word is zero")
	}
	if !bytes.Equal(h[traceHashBytes:], make([]byte, block.HashBytes-traceHashBytes)) {
		t.Errorf("bytes past the hash's length are not zero: %x", h)
	}
}

func TestSeedsDiffer(t *testing.T) {
	seen := make(map[uint64]uint64)
	for id := range uint64(100000) {
		s := patternSeed(traceHash(id))
		if other, ok := seen[s]; ok {
			t.Fatalf("blocks of ids %d and %d have the same bytes", id, other)
		}
		seen[s] = id
	}
	// Each byte of a hash counts, the ones of a 32-byte hash too.
	for i := range block.HashBytes {
		h := traceHash(5)
		h[i] ^= 1
		if patternSeed(h) == patternSeed(traceHash(5)) {
			t.Errorf("byte %d of a hash does not count", i)
		}
	}
}

// The bytes are part of what a store on disk holds: a replay must be able to
// check what an older build of it wrote.
func TestPatternGolden(t *testing.T) {
	got := make([]byte, 20)
	fillPattern(got, traceHash(1))
	want := []byte("\x18\xa4\x83\x9a\x87\xac\x8a\x5d\x01\x8d\x04\x76\x52\x33\xe7\x07\x95\x83\x06\xa1")
	if !bytes.Equal(got, want) {
		t.Errorf("block of id 1 begins with %x, want %x", got, want)
	}
}

func TestPatternIsPrefixStable(t *testing.T) {
	long := make([]byte, 100)
	fillPattern(long, traceHash(7))
	for n := range len(long) {
		p := make([]byte, n)
		fillPattern(p, traceHash(7))
		if !bytes.Equal(p, long[:n]) {
			t.Errorf("%d bytes are no prefix of the block", n)
		}
	}
}

func TestWrongPattern(t *testing.T) {
	const n = 4099 // no multiple of eight
	h := traceHash(42)
	good := make([]byte, n)
	fillPattern(good, h)
	for _, tc := range []struct {
		name   string
		damage func(p []byte) []byte
		want   func(wrong int64) bool
	}{
		{"right", func(p []byte) []byte { return p }, func(w int64) bool { return w == 0 }},
		{"first byte", func(p []byte) []byte { p[0] ^= 1; return p }, func(w int64) bool { return w == 1 }},
		{"last byte", func(p []byte) []byte { p[n-1] ^= 0x80; return p }, func(w int64) bool { return w == 1 }},
		{"a word", func(p []byte) []byte {
			for i := 16; i < 24; i++ {
				p[i] ^= 0xff
			}
			return p
		}, func(w int64) bool { return w == 8 }},
		{"shifted by one word", func(p []byte) []byte { return p[8:] }, func(w int64) bool { return w > n*9/10 }},
		{"another block", func(p []byte) []byte { fillPattern(p, traceHash(43)); return p }, func(w int64) bool { return w > n*9/10 }},
		{"a torn half", func(p []byte) []byte { clear(p[n/2:]); return p }, func(w int64) bool { return w > n*4/10 && w <= n/2+1 }},
		{"two sectors swapped", func(p []byte) []byte {
			a := bytes.Clone(p[:512])
			copy(p, p[512:1024])
			copy(p[512:], a)
			return p
		}, func(w int64) bool { return w > 1000 && w <= 1024 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if w := wrongPattern(tc.damage(bytes.Clone(good)), h); !tc.want(w) {
				t.Errorf("%d wrong bytes of %d", w, n)
			}
		})
	}
}

func FuzzPattern(f *testing.F) {
	f.Fuzz(func(t *testing.T, id uint64, n, at uint16, flip byte) {
		p := make([]byte, n)
		fillPattern(p, traceHash(id))
		if w := wrongPattern(p, traceHash(id)); w != 0 {
			t.Fatalf("%d of %d bytes wrong as written", w, n)
		}
		if n == 0 || flip == 0 {
			return
		}
		p[int(at)%len(p)] ^= flip
		if w := wrongPattern(p, traceHash(id)); w != 1 {
			t.Fatalf("%d bytes wrong after one was changed", w)
		}
	})
}

func BenchmarkPattern(b *testing.B) {
	p := make([]byte, 64<<10)
	b.Run("fill", func(b *testing.B) {
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			fillPattern(p, traceHash(3))
		}
	})
	b.Run("verify", func(b *testing.B) {
		fillPattern(p, traceHash(3))
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			if wrongPattern(p, traceHash(3)) != 0 {
				b.Fatal("wrong bytes")
			}
		}
	})
}
