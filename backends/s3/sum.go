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

// Join is the CRC32C of the parts behind each other; the zero Sum when one has none.
func (c *client) Join(parts []object.Part) object.Sum {
	return object.JoinCRC[uint32](parts, object.CRC32C, crc32.Castagnoli)
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
