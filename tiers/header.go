package tiers

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// A slot begins with a header block of 512 or 4096 bytes (see SlotBytes), of
// which the first 256 are used and the rest is zero. All numbers are
// little-endian.
//
//	offset bytes
//	     0     8  magic "KVTSLOT\n"
//	     8     2  version, 2; 1 on a slab of version 1
//	    10     1  hash length: 8, 16, 20 or 32
//	    11     1  flags: 1 = a parent is given
//	    12     4  payload length
//	    16     8  generation
//	    24     8  expiry, Unix seconds, 0 = never
//	    32     4  epoch of the namespace
//	    36     4  slot length, header block included
//	    40    16  xxh3-128 of the payload, canonical form
//	    56    32  hash, zero behind the hash length
//	    88    32  parent's hash, likewise; zero when none is given
//	   120    32  digest of the namespace's descriptor
//	   152    96  zero
//	   248     8  xxhash64 of the salt and the place (see Seal), then of the 248
//	              bytes before; in version 1 of those bytes alone
//
// Magic, version and checksum stay where they are in every version, so that an
// unknown version is told from a damaged one.
const (
	headerMagic   = "KVTSLOT\n"
	headerVersion = 2 // of the headers on a slab of the same version
	headerUsed    = 256
	headerSumAt   = 248
	headerZeroAt  = 152

	headerHasParent = 1
)

var (
	// ErrVersion: the format is of a version that this program does not know.
	// What carries it must be left as it is. It is the catalog's too.
	ErrVersion = index.ErrVersion
	// ErrNoSlot: the header is all zeros: nothing was written there, or it was
	// invalidated. It is a block.ErrCorrupt, since a block was expected.
	ErrNoSlot = fmt.Errorf("%w: no slot header", block.ErrCorrupt)
)

// SlotHeader says what lies in a slot, so that the catalog can be rebuilt from
// the media, and a misdirected, torn or stale read shows.
type SlotHeader struct {
	Digest    [32]byte // of the namespace's descriptor; a handle could be another tenant's after a rebuild
	Hash      block.Hash
	Parent    block.Hash
	HasParent bool
	HashLen   uint8  // bytes of Hash that count
	Len       uint32 // payload bytes
	Slot      uint32 // bytes of the slot, which may be more than Len needs
	Gen       uint64
	Epoch     uint32 // of the namespace when the block was put
	Expires   int64  // Unix seconds; 0: never
	Sum       block.Sum
}

// Seal binds a slot header to its place. A header is one only there: a copy of
// it, a write that went astray, or a payload that looks like a header has another
// checksum than the place asks for. The salt is what nobody who puts blocks knows.
type Seal struct {
	Version uint16 // of the slab
	Salt    [16]byte
	Offset  int64 // of the slot, counted as Slab.DataOffset counts
}

// checksum is that of a header whose first 248 bytes are b.
func (s *Seal) checksum(b []byte) uint64 {
	if s.Version == 1 {
		return xxhash.Sum64(b)
	}
	var all [16 + 8 + headerSumAt]byte
	copy(all[:], s.Salt[:])
	binary.LittleEndian.PutUint64(all[16:], uint64(s.Offset))
	copy(all[24:], b)
	return xxhash.Sum64(all[:])
}

// SlotBytes says how many bytes the slot of a payload takes, and how many of
// them come before the payload for the header. Below 64 KiB both are rounded to
// 512 bytes, so that small blocks waste little; from there on to 4096, so that
// the payload is page aligned on the device as direct I/O likes it. In memory
// the header lies in front of the payload too, so that both go down in the same
// write.
func SlotBytes(payload int64) (slot, header int64) {
	header = smallHeaderBytes
	if payload >= smallPayloadBytes {
		header = largeHeaderBytes
	}
	return (header + payload + header - 1) / header * header, header
}

const (
	smallHeaderBytes  = 512
	largeHeaderBytes  = 4096
	smallPayloadBytes = 64 << 10 // payloads below it are small
)

// EncodeHeader writes the header to dst, a whole header block, and zeros behind it.
// It panics when dst is shorter than 256 bytes.
func EncodeHeader(dst []byte, h *SlotHeader, at Seal) {
	clear(dst)
	b := dst[:headerUsed]
	copy(b, headerMagic)
	le := binary.LittleEndian
	le.PutUint16(b[8:], at.Version)
	b[10] = h.HashLen
	if h.HasParent {
		b[11] = headerHasParent
		copy(b[88:], h.Parent[:])
	}
	le.PutUint32(b[12:], h.Len)
	le.PutUint64(b[16:], h.Gen)
	le.PutUint64(b[24:], uint64(h.Expires))
	le.PutUint32(b[32:], h.Epoch)
	le.PutUint32(b[36:], h.Slot)
	copy(b[40:], h.Sum[:])
	copy(b[56:], h.Hash[:])
	copy(b[120:], h.Digest[:])
	le.PutUint64(b[headerSumAt:], at.checksum(b[:headerSumAt]))
}

// DecodeHeader reads the header at the start of src. It fails with ErrNoSlot on
// zeros, with ErrVersion on a whole header of a version that came later, and with
// block.ErrCorrupt on anything else that EncodeHeader did not write with this seal.
func DecodeHeader(src []byte, at Seal) (SlotHeader, error) {
	var h SlotHeader
	if len(src) < headerUsed {
		return h, fmt.Errorf("%w: slot header of %d bytes, want %d", block.ErrCorrupt, len(src), headerUsed)
	}
	b := src[:headerUsed]
	if string(b[:8]) != headerMagic {
		if allZero(b) {
			return h, ErrNoSlot
		}
		return h, fmt.Errorf("%w: slot header: magic %q", block.ErrCorrupt, b[:8])
	}
	le := binary.LittleEndian
	if got, want := at.checksum(b[:headerSumAt]), le.Uint64(b[headerSumAt:]); got != want {
		return h, fmt.Errorf("%w: slot header: checksum %016x, want %016x", block.ErrCorrupt, got, want)
	}
	switch v := le.Uint16(b[8:]); {
	case v > headerVersion:
		return h, fmt.Errorf("slot header: %w %d, this program knows up to %d", ErrVersion, v, headerVersion)
	case v != at.Version:
		return h, fmt.Errorf("%w: slot header: version %d on a slab of version %d", block.ErrCorrupt, v, at.Version)
	}
	h = SlotHeader{
		Digest:    [32]byte(b[120:152]),
		Hash:      block.Hash(b[56:88]),
		Parent:    block.Hash(b[88:120]),
		HasParent: b[11]&headerHasParent != 0,
		HashLen:   b[10],
		Len:       le.Uint32(b[12:]),
		Slot:      le.Uint32(b[36:]),
		Gen:       le.Uint64(b[16:]),
		Epoch:     le.Uint32(b[32:]),
		Expires:   int64(le.Uint64(b[24:])),
		Sum:       block.Sum(b[40:56]),
	}
	switch {
	case !block.ValidHashLen(int(h.HashLen)):
		return SlotHeader{}, fmt.Errorf("%w: slot header: hash length %d", block.ErrCorrupt, h.HashLen)
	case b[11]&^headerHasParent != 0:
		return SlotHeader{}, fmt.Errorf("%w: slot header: flags %#x", block.ErrCorrupt, b[11])
	case !h.HasParent && h.Parent != block.Hash{}:
		return SlotHeader{}, fmt.Errorf("%w: slot header: parent without its flag", block.ErrCorrupt)
	case !allZero(h.Hash[h.HashLen:]) || !allZero(h.Parent[h.HashLen:]):
		return SlotHeader{}, fmt.Errorf("%w: slot header: hash or parent is longer than %d bytes", block.ErrCorrupt, h.HashLen)
	case !allZero(b[headerZeroAt:headerSumAt]):
		return SlotHeader{}, fmt.Errorf("%w: slot header: bytes %d to %d are not zero", block.ErrCorrupt, headerZeroAt, headerSumAt)
	}
	return h, nil
}

// differs says in what a header found on a medium is not the one that was written
// for a block; nil when it is. want needs digest, hash, generation, length and
// checksum: the rest follows from them, or is the caller's to compare.
func (h *SlotHeader) differs(want *SlotHeader) error {
	switch {
	case h.Digest != want.Digest:
		return fmt.Errorf("%w: another namespace's", block.ErrCorrupt)
	case h.Hash != want.Hash || h.HashLen != want.HashLen:
		return fmt.Errorf("%w: another block's, %s", block.ErrCorrupt, h.Hash.Hex(int(h.HashLen)))
	case h.Gen != want.Gen:
		return fmt.Errorf("%w: generation %d, want %d", block.ErrCorrupt, h.Gen, want.Gen)
	case h.Len != want.Len || h.Sum != want.Sum:
		return fmt.Errorf("%w: length %d and checksum %s, want %d and %s", block.ErrCorrupt, h.Len, h.Sum, want.Len, want.Sum)
	}
	return nil
}

// allZero reports whether every byte is zero.
func allZero(b []byte) bool {
	for len(b) >= 8 {
		if binary.LittleEndian.Uint64(b) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
