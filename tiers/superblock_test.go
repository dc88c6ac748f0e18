package tiers

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index/block"
)

func sampleSuper(version uint16) superblock {
	s := superblock{version: version, bytes: 2 << 30, extent: 64 << 20, dataAt: slabDataAt}
	for i := range s.id {
		s.id[i] = 0x10 + byte(i)
		s.store[i] = 0xa0 + byte(i)
		if version > 1 {
			s.salt[i] = 0x50 + byte(i)
		}
	}
	return s
}

// TestSuperblockGolden holds the layouts.
func TestSuperblockGolden(t *testing.T) {
	for _, version := range []uint16{1, 2} {
		path := fmt.Sprintf("testdata/superblock_v%d.hex", version)
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		s := sampleSuper(version)
		b := s.encode()
		if !allZero(b[superZeroAt:superSumAt]) {
			t.Error("unused bytes are not zero")
		}
		if got := hex.Dump(b[:80+16*(int(version)-1)]) + hex.Dump(b[superSumAt:]); got != string(want) {
			t.Errorf("%s: superblock is\n%s\nwant\n%s", path, got, want)
		}
		if got, err := decodeSuperblock(b); err != nil || got != s {
			t.Errorf("decode: %+v, %v, want %+v", got, err, s)
		}
	}
}

func TestSuperblockRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(b []byte)
		seal   bool
		want   error
	}{
		{"magic", func(b []byte) { b[0] ^= 1 }, true, errNoSuperblock},
		{"checksum", func(b []byte) { b[50] ^= 1 }, false, block.ErrCorrupt},
		{"version", func(b []byte) { b[8] = 9 }, true, ErrVersion},
		{"version 0", func(b []byte) { b[8] = 0 }, true, ErrVersion},
		{"salt in version 1", func(b []byte) { b[8] = 1 }, true, block.ErrCorrupt},
		{"unused", func(b []byte) { b[1000] = 1 }, true, block.ErrCorrupt},
		{"extent 0", func(b []byte) { clear(b[56:64]) }, true, block.ErrCorrupt},
		{"extent odd", func(b []byte) { b[56] = 1 }, true, block.ErrCorrupt},
		{"data offset behind the end", func(b []byte) { b[70] = 0xff }, true, block.ErrCorrupt},
		{"no room", func(b []byte) { copy(b[48:56], b[64:72]) }, true, block.ErrCorrupt},
		{"huge", func(b []byte) { b[55] = 0x7f }, true, block.ErrCorrupt},
		{"negative", func(b []byte) { b[55] = 0xff }, true, block.ErrCorrupt},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sampleSuper(superVersion)
			b := s.encode()
			c.change(b)
			if c.seal {
				binary.LittleEndian.PutUint64(b[superSumAt:], xxhash.Sum64(b[:superSumAt]))
			}
			if _, err := decodeSuperblock(b); !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
		})
	}
}

// FuzzSuperblock: what is accepted is what encode writes.
func FuzzSuperblock(f *testing.F) {
	s := sampleSuper(superVersion)
	f.Add(s.encode()[:80])
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, start []byte) {
		b := make([]byte, superBytes)
		copy(b, start)
		binary.LittleEndian.PutUint64(b[superSumAt:], xxhash.Sum64(b[:superSumAt]))
		s, err := decodeSuperblock(b)
		if err != nil {
			if !errors.Is(err, block.ErrCorrupt) && !errors.Is(err, ErrVersion) && !errors.Is(err, errNoSuperblock) {
				t.Fatalf("error %v has no class", err)
			}
			return
		}
		if again := s.encode(); !bytes.Equal(again, b) {
			t.Fatalf("encodes as\n%s\nfrom\n%s", hex.Dump(again[:96]), hex.Dump(b[:96]))
		}
	})
}
