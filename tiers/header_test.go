package tiers

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// sampleHeader has a different byte in each field.
func sampleHeader() SlotHeader {
	h := SlotHeader{
		HasParent: true,
		HashLen:   20,
		Len:       65536,
		Slot:      69632,
		Gen:       0x0102030405060708,
		Epoch:     7,
		Expires:   1893456000,
	}
	for i := range h.Digest {
		h.Digest[i] = 0xd0 + byte(i)
	}
	for i := range 20 {
		h.Hash[i] = 0x10 + byte(i)
		h.Parent[i] = 0x50 + byte(i)
	}
	for i := range h.Sum {
		h.Sum[i] = 0xa0 + byte(i)
	}
	return h
}

// sampleSeal has a different byte in each place of salt and offset.
func sampleSeal(version uint16) Seal {
	at := Seal{Version: version, Offset: 0x0102030405060708}
	for i := range at.Salt {
		at.Salt[i] = 0xe0 + byte(i)
	}
	return at
}

// TestHeaderGolden holds the layouts: a slot written by any released version is
// read by every later one.
func TestHeaderGolden(t *testing.T) {
	for _, version := range []uint16{1, 2} {
		path := fmt.Sprintf("testdata/header_v%d.hex", version)
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		h := sampleHeader()
		b := bytes.Repeat([]byte{0xff}, largeHeaderBytes)
		EncodeHeader(b, &h, sampleSeal(version))
		if !allZero(b[headerUsed:]) {
			t.Error("the rest of the header block is not zero")
		}
		if got := hex.Dump(b[:headerUsed]); got != string(want) {
			t.Errorf("%s: header is\n%s\nwant\n%s", path, got, want)
		}
	}
}

func TestHeaderRoundTrip(t *testing.T) {
	full := sampleHeader()
	bare := SlotHeader{HashLen: 8, Len: 1, Slot: 1024}
	for _, want := range []SlotHeader{full, bare} {
		for _, size := range []int{headerUsed, smallHeaderBytes, largeHeaderBytes} {
			for _, version := range []uint16{1, 2} {
				b := make([]byte, size)
				EncodeHeader(b, &want, sampleSeal(version))
				if got, err := DecodeHeader(b, sampleSeal(version)); err != nil || got != want {
					t.Errorf("decode of %d bytes, version %d: %+v, %v, want %+v", size, version, got, err, want)
				}
			}
		}
	}
}

// TestHeaderElsewhere: a header is none on another slab or in another place, nor
// where another version is expected.
func TestHeaderElsewhere(t *testing.T) {
	h := sampleHeader()
	b := make([]byte, headerUsed)
	EncodeHeader(b, &h, sampleSeal(2))
	wrong := []Seal{sampleSeal(1)}
	for bit := range 64 {
		at := sampleSeal(2)
		at.Offset ^= 1 << bit
		wrong = append(wrong, at)
	}
	for i := range sampleSeal(2).Salt {
		at := sampleSeal(2)
		at.Salt[i] ^= 0x80
		wrong = append(wrong, at)
	}
	for _, at := range wrong {
		if _, err := DecodeHeader(b, at); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("seal %x: %v", at, err)
		}
	}
	EncodeHeader(b, &h, sampleSeal(1))
	if _, err := DecodeHeader(b, sampleSeal(2)); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("version 1 on a slab of version 2: %v", err)
	}
}

// TestHeaderFlips checks that no single flipped bit goes unnoticed.
func TestHeaderFlips(t *testing.T) {
	h := sampleHeader()
	b := make([]byte, headerUsed)
	EncodeHeader(b, &h, sampleSeal(headerVersion))
	for bit := range headerUsed * 8 {
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := DecodeHeader(b, sampleSeal(headerVersion)); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("bit %d of byte %d flipped: %v", bit%8, bit/8, err)
		}
		b[bit/8] ^= 1 << (bit % 8)
	}
}

func TestHeaderRefused(t *testing.T) {
	at := sampleSeal(headerVersion)
	seal := func(b []byte) {
		binary.LittleEndian.PutUint64(b[headerSumAt:], at.checksum(b[:headerSumAt]))
	}
	for _, c := range []struct {
		name   string
		change func(b []byte) []byte
		want   error
	}{
		{"short", func(b []byte) []byte { return b[:headerUsed-1] }, block.ErrCorrupt},
		{"empty", func([]byte) []byte { return nil }, block.ErrCorrupt},
		{"invalidated", func(b []byte) []byte { clear(b); return b }, ErrNoSlot},
		{"random", func(b []byte) []byte { return bytes.Repeat([]byte{0xa5}, len(b)) }, block.ErrCorrupt},
		{"newer version", func(b []byte) []byte { b[8] = 3; seal(b); return b }, ErrVersion},
		{"older version", func(b []byte) []byte { b[8] = 1; seal(b); return b }, block.ErrCorrupt},
		{"damaged version", func(b []byte) []byte { b[8] = 3; return b }, block.ErrCorrupt},
		{"hash length", func(b []byte) []byte { b[10] = 9; seal(b); return b }, block.ErrCorrupt},
		{"flags", func(b []byte) []byte { b[11] |= 2; seal(b); return b }, block.ErrCorrupt},
		{"parent without flag", func(b []byte) []byte { b[11] = 0; seal(b); return b }, block.ErrCorrupt},
		{"long hash", func(b []byte) []byte { b[56+20] = 1; seal(b); return b }, block.ErrCorrupt},
		{"long parent", func(b []byte) []byte { b[88+31] = 1; seal(b); return b }, block.ErrCorrupt},
		{"unused bytes", func(b []byte) []byte { b[200] = 1; seal(b); return b }, block.ErrCorrupt},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := sampleHeader()
			b := make([]byte, smallHeaderBytes)
			EncodeHeader(b, &h, sampleSeal(headerVersion))
			got, err := DecodeHeader(c.change(b), sampleSeal(headerVersion))
			if !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if c.want == ErrVersion && errors.Is(err, block.ErrCorrupt) {
				t.Errorf("error %v: an unknown version is not corrupt", err)
			}
			if got != (SlotHeader{}) {
				t.Errorf("a refused header gave %+v", got)
			}
		})
	}
	if !errors.Is(ErrNoSlot, block.ErrCorrupt) {
		t.Error("ErrNoSlot is not block.ErrCorrupt")
	}
}

func TestSlotBytes(t *testing.T) {
	for _, c := range []struct{ payload, slot, header int64 }{
		{1, 1024, 512},
		{512, 1024, 512},
		{513, 1536, 512},
		{4096, 4608, 512},
		{16 << 10, 16<<10 + 512, 512},
		{64<<10 - 1, 64<<10 + 512, 512},
		{64 << 10, 68 << 10, 4096},
		{64<<10 + 1, 72 << 10, 4096},
		{1 << 20, 1<<20 + 4096, 4096},
		{8 << 20, 8<<20 + 4096, 4096},
	} {
		if slot, header := SlotBytes(c.payload); slot != c.slot || header != c.header {
			t.Errorf("SlotBytes(%d) = %d, %d, want %d, %d", c.payload, slot, header, c.slot, c.header)
		}
	}
}

// FuzzHeader: what DecodeHeader accepts is what EncodeHeader writes.
func FuzzHeader(f *testing.F) {
	h := sampleHeader()
	b := make([]byte, smallHeaderBytes)
	EncodeHeader(b, &h, sampleSeal(headerVersion))
	f.Add(b, false)
	f.Add(b[:headerUsed], true)
	f.Add(make([]byte, headerUsed), false)
	f.Fuzz(func(t *testing.T, b []byte, seal bool) {
		at := sampleSeal(headerVersion)
		if len(b) > 8 && b[8] == 1 {
			at = sampleSeal(1)
		}
		if seal && len(b) >= headerUsed { // get past magic and checksum
			copy(b, headerMagic)
			b[8], b[9] = byte(at.Version), 0
			binary.LittleEndian.PutUint64(b[headerSumAt:], at.checksum(b[:headerSumAt]))
		}
		h, err := DecodeHeader(b, at)
		if err != nil {
			if !errors.Is(err, block.ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Fatalf("error %v has no class", err)
			}
			return
		}
		again := make([]byte, headerUsed)
		EncodeHeader(again, &h, at)
		if !bytes.Equal(again, b[:headerUsed]) {
			t.Fatalf("encodes as\n%s\nfrom\n%s", hex.Dump(again), hex.Dump(b[:headerUsed]))
		}
	})
}

func BenchmarkHeaderEncode(b *testing.B) {
	h := sampleHeader()
	dst, at := make([]byte, smallHeaderBytes), sampleSeal(headerVersion)
	b.ReportAllocs()
	for b.Loop() {
		EncodeHeader(dst, &h, at)
	}
}

func BenchmarkHeaderDecode(b *testing.B) {
	h := sampleHeader()
	src, at := make([]byte, smallHeaderBytes), sampleSeal(headerVersion)
	EncodeHeader(src, &h, at)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeHeader(src, at); err != nil {
			b.Fatal(err)
		}
	}
}
