package s3

import (
	"encoding/base64"
	"encoding/binary"
	"hash/crc32"

	"github.com/kvtier/kvtier/backends/object"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum is the CRC32C.
func (c *client) Sum(src object.Vector) object.Sum { return sum(src) }

func sum(src object.Vector) object.Sum {
	var crc uint32
	for _, b := range src {
		crc = crc32.Update(crc, castagnoli, b)
	}
	return object.Sum{Algorithm: object.CRC32C, Value: uint64(crc)}
}

// Join computes the CRC32C of the parts, one behind the other, from theirs.
func (c *client) Join(parts []object.Part) object.Sum {
	var crc uint32
	for _, p := range parts {
		if p.Sum.Algorithm != object.CRC32C {
			return object.Sum{}
		}
		crc = multiply(crc, shift(p.Bytes)) ^ uint32(p.Sum.Value)
	}
	return object.Sum{Algorithm: object.CRC32C, Value: uint64(crc)}
}

// A CRC is a polynomial over bits, its lowest power in the highest bit: the CRC of a text
// with n bytes behind it is its own times x^8n, modulo the polynomial of the CRC.

// multiply is the product modulo that polynomial.
func multiply(a, b uint32) uint32 {
	var product uint32
	for bit := uint32(1) << 31; bit != 0; bit >>= 1 {
		if a&bit != 0 {
			product ^= b
		}
		carry := b & 1
		b >>= 1
		if carry != 0 {
			b ^= crc32.Castagnoli
		}
	}
	return product
}

// shift is x^8n.
func shift(n int64) uint32 {
	power, square := uint32(1)<<31, uint32(1)<<(31-8)
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			power = multiply(power, square)
		}
		square = multiply(square, square)
	}
	return power
}

// encode writes a sum as the protocol does: big-endian, in base 64.
func encode(s object.Sum) *string {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(s.Value))
	text := base64.StdEncoding.EncodeToString(b[:])
	return &text
}

// decode reads one. A sum of sums, which has the number of parts behind it, is none of the
// bytes.
func decode(s *string) object.Sum {
	if s == nil {
		return object.Sum{}
	}
	b, err := base64.StdEncoding.DecodeString(*s)
	if err != nil || len(b) != 4 {
		return object.Sum{}
	}
	return object.Sum{Algorithm: object.CRC32C, Value: uint64(binary.BigEndian.Uint32(b))}
}
