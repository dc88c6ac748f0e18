package azure

import (
	"hash/crc64"
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/backends/object"
)

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)}).Read(b)
	return b
}

// TestSum: the checksum is the SDK's, which takes it from hash/crc64, of any pieces; and
// those of parts make that of the whole.
func TestSum(t *testing.T) {
	table := crc64.MakeTable(polynomial)
	for _, n := range []int{0, 1, 7, 8, 127, 128, 129, 4096, 100_003} {
		b := random(n)
		want := object.Sum{Algorithm: object.CRC64, Value: crc64.Checksum(b, table)}
		if got := sum(object.Vector{b}); got != want {
			t.Errorf("%d bytes: %x, want %x", n, got.Value, want.Value)
		}
		v := object.Vector{b[:n/3], nil, b[n/3 : n/2], b[n/2:]}
		if got := sum(v); got != want {
			t.Errorf("%d bytes in pieces: %x, want %x", n, got.Value, want.Value)
		}
		var parts []object.Part
		for i, piece := range v {
			parts = append(parts, object.Part{Number: i + 1, Bytes: int64(len(piece)), Sum: sum(object.Vector{piece})})
		}
		if got := join(parts); got != want {
			t.Errorf("%d bytes in parts: %x, want %x", n, got.Value, want.Value)
		}
		if got := parseSum(sumText(want)); got != want {
			t.Errorf("text of %x is read as %x", want.Value, got.Value)
		}
	}
	if got := join([]object.Part{{Number: 1, Bytes: 3}}); got != (object.Sum{}) {
		t.Errorf("a part without a checksum: %+v", got)
	}
	for _, bad := range []string{"", "x", "-1", "11112222333344445"} {
		if got := parseSum(bad); got != (object.Sum{}) {
			t.Errorf("%q is read as %+v", bad, got)
		}
	}
}

// BenchmarkSum compares with the standard library.
func BenchmarkSum(b *testing.B) {
	data := random(8 << 20)
	b.Run("crc64nvme", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			sum(object.Vector{data})
		}
	})
	table := crc64.MakeTable(polynomial)
	b.Run("hash", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			crc64.Checksum(data, table)
		}
	})
}
