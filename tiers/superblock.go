package tiers

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index/block"
)

// A slab begins with a superblock of 4096 bytes; a copy of it lies at 64 KiB, so
// that one bad sector does not cost all blocks. Payload begins at the data
// offset, 1 MiB. Between them, at 96 KiB, is a page of 4096 bytes that probes of the
// medium write and read back; nobody else reads it. All numbers are little-endian.
//
//	offset bytes
//	     0     8  magic "KVTSLAB\n"
//	     8     2  version, 2
//	    10     6  zero
//	    16    16  identity of the slab, random
//	    32    16  identity of the store that made it
//	    48     8  length of the slab
//	    56     8  extent length
//	    64     8  data offset
//	    72    16  salt of the slot headers, random; zero in version 1
//	    88  4000  zero
//	  4088     8  xxhash64 of the 4088 bytes before
//
// Magic, version and checksum stay where they are in every version. A slab of
// version 1 goes on being used as it is, with slot headers of version 1.
const (
	superMagic   = "KVTSLAB\n"
	superVersion = 2
	superBytes   = 4096
	superSumAt   = superBytes - 8
	superZeroAt  = 88
	superTwinAt  = 64 << 10
	slabDataAt   = 1 << 20
	probeAt      = 96 << 10
	probeBytes   = 4096
)

// superblock is what a slab says of itself.
type superblock struct {
	id     [16]byte
	store  [16]byte
	bytes  int64
	extent int64
	dataAt int64

	version uint16
	salt    [16]byte
}

// encode returns the superblock as it lies on the medium.
func (s *superblock) encode() []byte {
	b := make([]byte, superBytes)
	copy(b, superMagic)
	le := binary.LittleEndian
	le.PutUint16(b[8:], s.version)
	copy(b[16:], s.id[:])
	copy(b[32:], s.store[:])
	le.PutUint64(b[48:], uint64(s.bytes))
	le.PutUint64(b[56:], uint64(s.extent))
	le.PutUint64(b[64:], uint64(s.dataAt))
	copy(b[72:], s.salt[:])
	le.PutUint64(b[superSumAt:], xxhash.Sum64(b[:superSumAt]))
	return b
}

// decodeSuperblock reads a superblock. It fails with errNoSuperblock when the
// magic is not there, with ErrVersion on a whole one of an unknown version, and
// with block.ErrCorrupt on a damaged one.
func decodeSuperblock(b []byte) (superblock, error) {
	var s superblock
	if len(b) < superBytes || string(b[:len(superMagic)]) != superMagic {
		return s, errNoSuperblock
	}
	b = b[:superBytes]
	le := binary.LittleEndian
	if got, want := xxhash.Sum64(b[:superSumAt]), le.Uint64(b[superSumAt:]); got != want {
		return s, fmt.Errorf("%w: superblock: checksum %016x, want %016x", block.ErrCorrupt, got, want)
	}
	v := le.Uint16(b[8:])
	if v < 1 || v > superVersion {
		return s, fmt.Errorf("superblock: %w %d, this program knows up to %d", ErrVersion, v, superVersion)
	}
	s = superblock{
		id:     [16]byte(b[16:32]),
		store:  [16]byte(b[32:48]),
		bytes:  int64(le.Uint64(b[48:])),
		extent: int64(le.Uint64(b[56:])),
		dataAt: int64(le.Uint64(b[64:])),

		version: v,
		salt:    [16]byte(b[72:88]),
	}
	if !allZero(b[10:16]) || !allZero(b[superZeroAt:superSumAt]) || v == 1 && s.salt != [16]byte{} {
		return superblock{}, fmt.Errorf("%w: superblock: unused bytes are not zero", block.ErrCorrupt)
	}
	if err := s.check(); err != nil {
		return superblock{}, fmt.Errorf("%w: superblock: %w", block.ErrCorrupt, err)
	}
	return s, nil
}

// check fails with block.ErrInvalid when the lengths cannot be a slab's.
func (s *superblock) check() error {
	switch {
	case s.extent < minSlabExtent || s.extent > maxSlabExtent || s.extent%largeHeaderBytes != 0:
		return fmt.Errorf("%w: extents of %d bytes, want a multiple of %d from %d to %d", block.ErrInvalid, s.extent, largeHeaderBytes, minSlabExtent, maxSlabExtent)
	case s.dataAt < superTwinAt+superBytes || s.dataAt%largeHeaderBytes != 0 || s.dataAt > s.bytes:
		return fmt.Errorf("%w: data offset %d in %d bytes", block.ErrInvalid, s.dataAt, s.bytes)
	case s.bytes-s.dataAt < minSlabData:
		return fmt.Errorf("%w: %d bytes, want at least %d", block.ErrInvalid, s.bytes, s.dataAt+minSlabData)
	case s.bytes > maxSlabBytes:
		return fmt.Errorf("%w: %d bytes, at most %d", block.ErrInvalid, s.bytes, maxSlabBytes)
	}
	return nil
}

const (
	minSlabExtent = 64 << 10
	maxSlabExtent = 1 << 30
	minSlabData   = 64 << 10
	maxSlabBytes  = 1 << 56 // offsets fit a block.Place
)
