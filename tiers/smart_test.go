package tiers

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// sampleSmart is a log as a device writes it.
func sampleSmart(t testing.TB) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/smart.hex")
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeSmart(t *testing.T) {
	want := block.DeviceWear{UsedPercent: 12, SparePercent: 99, SpareThreshold: 10, CriticalWarning: 1<<1 | 1<<3, WrittenBytes: 0x89_abcd * 512_000}
	for _, c := range []struct {
		name   string
		change func(b []byte)
		want   func(w *block.DeviceWear)
	}{
		{"sample", func([]byte) {}, func(*block.DeviceWear) {}},
		{"used up", func(b []byte) { b[5] = 255 }, func(w *block.DeviceWear) { w.UsedPercent = 255 }},
		{"no spare", func(b []byte) { b[3] = 0 }, func(w *block.DeviceWear) { w.SparePercent = 0 }},
		{"writes not said", func(b []byte) { clear(b[48:64]) }, func(w *block.DeviceWear) { w.WrittenBytes = 0 }},
		{"most writes", func(b []byte) { binary.LittleEndian.PutUint64(b[48:], 18014398509481) }, func(w *block.DeviceWear) { w.WrittenBytes = 18014398509481 * 512_000 }},
		{"too many writes", func(b []byte) { binary.LittleEndian.PutUint64(b[48:], 18014398509482) }, func(w *block.DeviceWear) { w.WrittenBytes = 0 }},
		{"writes of 128 bits", func(b []byte) { b[63] = 1 }, func(w *block.DeviceWear) { w.WrittenBytes = 0 }},
		{"nothing but a warning", func(b []byte) { clear(b[3:64]) }, func(w *block.DeviceWear) {
			*w = block.DeviceWear{CriticalWarning: w.CriticalWarning}
		}},
		{"empty", func(b []byte) { clear(b) }, nil},
		{"only a temperature", func(b []byte) { clear(b); b[1], b[2] = 0x43, 1 }, nil},
		{"all ones", func(b []byte) { copy(b, bytes.Repeat([]byte{0xff}, len(b))) }, nil},
		{"spare above 100", func(b []byte) { b[3] = 101 }, nil},
		{"threshold above 100", func(b []byte) { b[4] = 101 }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := sampleSmart(t)
			c.change(b)
			got, err := decodeSmart(b)
			if c.want == nil {
				if !errors.Is(err, errNoWear) || got != (block.DeviceWear{}) {
					t.Errorf("%+v, error %v, want errNoWear", got, err)
				}
				return
			}
			want := want
			c.want(&want)
			if err != nil || got != want {
				t.Errorf("%+v, error %v, want %+v", got, err, want)
			}
		})
	}
	for _, n := range []int{0, 6, smartBytes - 1, smartBytes + 1} {
		if _, err := decodeSmart(make([]byte, n)); !errors.Is(err, errNoWear) {
			t.Errorf("%d bytes: error %v", n, err)
		}
	}
}

// The command is struct nvme_admin_cmd of linux/nvme_ioctl.h, byte by byte.
func TestEncodeGetSmart(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the bytes are those of a little-endian host")
	}
	got := bytes.Repeat([]byte{0xee}, adminBytes+1)
	encodeGetSmart(got, 0x1122334455667788)
	want := "02000000ffffffff" + "0000000000000000" + // opcode, nsid; cdw2, cdw3
		"0000000000000000" + "8877665544332211" + // metadata; addr
		"0000000000020000" + "02007f0000000000" + // metadata_len, data_len; cdw10, cdw11
		"0000000000000000" + "0000000000000000" + "0000000000000000" + // cdw12 to cdw15; timeout_ms, result
		"ee"
	if hex.EncodeToString(got) != want {
		t.Errorf("command\n%x, want\n%s", got, want)
	}
}

// Nothing but an NVMe device's own node is asked.
func TestReadWearAsksNothingElse(t *testing.T) {
	dev := t.TempDir()
	if err := os.WriteFile(filepath.Join(dev, "nvme0n1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, d := range []disk{{name: "sda"}, {name: "nvme0n1"}} {
		if w, err := readWear(dev, d); !errors.Is(err, errNoWear) || w != (block.DeviceWear{}) {
			t.Errorf("%s: %+v, error %v, want errNoWear", d.name, w, err)
		}
	}
	if _, err := readWear(dev, disk{name: "nvme9n1"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no node: error %v", err)
	}
}

// FuzzSmart: what is accepted can be, and is what the log says.
func FuzzSmart(f *testing.F) {
	f.Add(sampleSmart(f))
	f.Add(make([]byte, smartBytes))
	f.Add(bytes.Repeat([]byte{0xff}, smartBytes))
	f.Add(sampleSmart(f)[:64])
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := decodeSmart(b)
		if err != nil {
			if !errors.Is(err, errNoWear) || w != (block.DeviceWear{}) {
				t.Fatalf("%+v, error %v", w, err)
			}
			return
		}
		if w.SparePercent > 100 || w.SpareThreshold > 100 || w.UsedPercent > 255 || w.WrittenBytes < 0 {
			t.Fatalf("%+v", w)
		}
		if got := []byte{byte(w.CriticalWarning), byte(w.SparePercent), byte(w.SpareThreshold), byte(w.UsedPercent)}; !bytes.Equal(got[:1], b[:1]) || !bytes.Equal(got[1:], b[3:6]) {
			t.Fatalf("%+v of % x", w, b[:6])
		}
		if units := binary.LittleEndian.Uint64(b[48:]); w.WrittenBytes != 0 && uint64(w.WrittenBytes) != units*smartUnit {
			t.Fatalf("%d bytes of %d units", w.WrittenBytes, units)
		}
	})
}
