package main

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/index/block"
)

// Replay needs no file to check the bytes it reads: they follow from the hash
// alone. Word i of a block, the eight bytes from offset 8*i in little-endian
// order, is output i of the SplitMix64 generator (Steele, Lea and Flood 2014)
// seeded from the hash. So a block that is another one's, a piece that lies
// elsewhere in its block, and a torn block all show. A length that is no
// multiple of eight ends with the first bytes of the next word.

// splitmixGamma is the increment of SplitMix64: 2^64 divided by the golden ratio.
const splitmixGamma = 0x9e3779b97f4a7c15

// traceHashBytes is the length of the hashes that replay makes.
const traceHashBytes = 16

// traceHash is the hash of a trace's block id: the id in little-endian order,
// so that it can be read off a listing, and its mixed word, so that all bytes
// count when hashes are spread over shards.
func traceHash(id uint64) block.Hash {
	var h block.Hash
	binary.LittleEndian.PutUint64(h[:8], id)
	binary.LittleEndian.PutUint64(h[8:16], mix64(id+splitmixGamma))
	return h
}

// mix64 is the output function of SplitMix64, a bijection.
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// patternSeed folds the whole hash into the seed of its block's bytes. It begins
// with a constant: from zero, the two words of a traceHash would cancel out.
func patternSeed(h block.Hash) uint64 {
	s := uint64(splitmixGamma)
	for i := 0; i < len(h); i += 8 {
		s = mix64((s ^ binary.LittleEndian.Uint64(h[i:])) + splitmixGamma)
	}
	return s
}

// fillPattern writes the first len(p) bytes of the block of h.
func fillPattern(p []byte, h block.Hash) {
	z := patternSeed(h)
	for len(p) >= 8 {
		z += splitmixGamma
		binary.LittleEndian.PutUint64(p, mix64(z))
		p = p[8:]
	}
	if len(p) > 0 {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], mix64(z+splitmixGamma))
		copy(p, last[:])
	}
}

// wrongPattern counts the bytes of p that differ from the block of h.
func wrongPattern(p []byte, h block.Hash) int64 {
	var wrong int64
	z := patternSeed(h)
	for len(p) >= 8 {
		z += splitmixGamma
		if d := binary.LittleEndian.Uint64(p) ^ mix64(z); d != 0 {
			wrong += nonzeroBytes(d)
		}
		p = p[8:]
	}
	if len(p) > 0 {
		var last [8]byte
		copy(last[:], p)
		d := binary.LittleEndian.Uint64(last[:]) ^ mix64(z+splitmixGamma)
		wrong += nonzeroBytes(d & (1<<(8*len(p)) - 1))
	}
	return wrong
}

func nonzeroBytes(d uint64) int64 {
	var n int64
	for ; d != 0; d >>= 8 {
		if d&0xff != 0 {
			n++
		}
	}
	return n
}
