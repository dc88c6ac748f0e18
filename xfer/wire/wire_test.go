package wire_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer/wire"
)

// golden reads the hex digits of a file in testdata; lines that begin with # say what
// it is.
func golden(t testing.TB, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var digits strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "#") {
			digits.WriteString(strings.TrimSpace(line))
		}
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(path, err)
	}
	return b
}

// describe writes what matters of a blob on a line.
func describe(m *wire.Metadata) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %x partial=%v", m.Agent, m.Incarnation, m.Partial)
	for _, c := range m.Conns {
		fmt.Fprintf(&s, " conn %s %d", c.Backend, len(c.Info))
	}
	for _, x := range m.Sections {
		fmt.Fprintf(&s, " section %s %d", x.Backend, x.Type)
		for _, r := range x.Regions {
			fmt.Fprintf(&s, " %x+%x@%d:%d", r.Addr, r.Len, r.Dev, len(r.Info))
		}
	}
	return s.String()
}

// What real NIXL agents wrote is read, and written again byte for byte.
func TestNIXLCaptures(t *testing.T) {
	for name, want := range map[string]string{
		"full_1reg":            "vec-one 0 partial=false conn UCX 213 section UCX 0 7feb90d00000+100000@0:11",
		"full_noreg":           "vec-empty 0 partial=false conn UCX 213",
		"full_5reg_unsorted":   "vec-sort 0 partial=false conn UCX 213 section UCX 0 7feb90f00000+1000@0:11 7feb90d03000+800@3:11 7feb90d00000+1000@7:11 7feb90d01000+1000@7:11 7feb90e00000+1000@7:11",
		"partial_2of5_conn":    "vec-sort 0 partial=false conn UCX 213 section UCX 0 7feb90d03000+800@3:11 7feb90d00000+1000@7:11",
		"partial_2of5_noconn":  "vec-sort 0 partial=false section UCX 0 7feb90d03000+800@3:11 7feb90d00000+1000@7:11",
		"partial_empty_noconn": "vec-sort 0 partial=false conn UCX 213",
		"old_1.0.1":            "old-1.0.1 0 partial=false conn UCX 135 section UCX 0 7f08050bf000+100000@0:11",
	} {
		b := golden(t, filepath.Join("testdata", name+".hex"))
		m, err := wire.Decode(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := describe(m); got != want {
			t.Errorf("%s:\n got %s\nwant %s", name, got, want)
		}
		if again, err := wire.Encode(m); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%s: written again it is %x, %v", name, again, err)
		}
	}
}

// both is an agent with a backend of NIXL's and one of ours.
func both() *wire.Metadata {
	return &wire.Metadata{
		Agent: "goagent", Incarnation: 0x1122334455667788,
		Conns: []wire.Conn{{Backend: "tcp", Info: []byte("here")}, {Backend: "UCX", Info: []byte(" WADDR")}},
		Sections: []wire.Section{
			{Backend: "tcp", Type: 0, Regions: []wire.Region{{Addr: 0x1000, Len: 0x2000, Dev: 3, Info: []byte("token")}}},
			{Backend: "UCX", Type: 0, Regions: []wire.Region{{Addr: 0x7f0000001000, Len: 0x100000, Info: make([]byte, 9)}}},
		},
	}
}

// Our blob is NIXL's with two connection entries more, and bytes behind its end.
func TestOursRidesAlong(t *testing.T) {
	m := both()
	b, err := wire.Encode(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := golden(t, "testdata/kvtier.hex"); !bytes.Equal(b, want) {
		t.Errorf("encoded %x\nwant    %x", b, want)
	}
	got, err := wire.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(m.Sections) // those of NIXL's backends come first
	if !reflect.DeepEqual(got, m) {
		t.Errorf("read back %+v, want %+v", got, m)
	}

	// The same in NIXL's own words.
	nixl := *m
	nixl.Incarnation = 0
	entry := "\x01\x00\x88\x77\x66\x55\x44\x33\x22\x11\x01\x00\x00\x00\x00\x00\x00\x00"
	nixl.Conns = append(slices.Clone(m.Conns), wire.Conn{Backend: "entry!", Info: []byte(entry)})
	nixl.Sections = m.Sections[:1]
	plain, err := wire.Encode(&nixl)
	if err != nil {
		t.Fatal(err)
	}
	if plain = bytes.Replace(plain, []byte("entry!"), []byte(wire.Entry), 1); !bytes.HasPrefix(b, plain) || len(plain) == len(b) {
		t.Errorf("what NIXL reads is %x\nwant %x", b, plain)
	}
}

func TestPartialIsKept(t *testing.T) {
	m := both()
	m.Partial, m.Sections = true, nil
	b, err := wire.Encode(m)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := wire.Decode(b); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("read back %+v, %v", got, err)
	}
}

func TestEncodeRefuses(t *testing.T) {
	for name, edit := range map[string]func(m *wire.Metadata){
		"agent":           func(m *wire.Metadata) { m.Agent = "" },
		"backend":         func(m *wire.Metadata) { m.Conns[0].Backend = "" },
		"our entry":       func(m *wire.Metadata) { m.Conns[0].Backend = wire.Entry },
		"info":            func(m *wire.Metadata) { m.Conns[1].Info = nil },
		"section backend": func(m *wire.Metadata) { m.Sections[1].Backend = "" },
		"our section":     func(m *wire.Metadata) { m.Sections[1].Backend = wire.Entry },
		"empty section":   func(m *wire.Metadata) { m.Sections[0].Regions = nil },
	} {
		m := both()
		edit(m)
		if _, err := wire.Encode(m); err == nil {
			t.Errorf("%s: encoded", name)
		}
	}
}

// Every cut of a blob, every changed byte that matters, and what an attacker would try.
func TestDecodeRefuses(t *testing.T) {
	whole, err := wire.Encode(both())
	if err != nil {
		t.Fatal(err)
	}
	for n := range whole {
		if m, err := wire.Decode(whole[:n]); !errors.Is(err, wire.ErrMalformed) {
			t.Errorf("the first %d bytes of %d: %v, %v", n, len(whole), m, err)
		}
	}
	replace := func(old, with string) []byte {
		if bytes.Count(whole, []byte(old)) != 1 {
			t.Fatalf("%q is not there once", old)
		}
		return bytes.Replace(whole, []byte(old), []byte(with), 1)
	}
	const seven = "\x07\x00\x00\x00\x00\x00\x00\x00"
	entry := "c\x12\x00\x00\x00\x00\x00\x00\x00"
	for name, b := range map[string][]byte{
		"magic":          replace("nixlSerDes|", "nixlSerDes!"),
		"huge length":    replace("Agent"+seven, "Agent\xff\xff\xff\xff\xff\xff\xff\xff"),
		"empty agent":    replace("Agent"+seven+"goagent|", "Agent\x00\x00\x00\x00\x00\x00\x00\x00|"),
		"tag":            replace("Conns", "Konns"),
		"many conns":     replace("Conns\x08\x00\x00\x00\x00\x00\x00\x00\x03", "Conns\x08\x00\x00\x00\x00\x00\x00\x00\x04"),
		"few conns":      replace("Conns\x08\x00\x00\x00\x00\x00\x00\x00\x03", "Conns\x08\x00\x00\x00\x00\x00\x00\x00\x02"),
		"number's size":  replace("nixlSecElms\x08", "nixlSecElms\x07"),
		"section word":   replace("MemSection", "MemSektion"),
		"version":        replace(entry+"\x01", entry+"\x02"),
		"kind":           replace(entry+"\x01\x00", entry+"\x01\x02"),
		"incarnation 0":  replace("\x88\x77\x66\x55\x44\x33\x22\x11", "\x00\x00\x00\x00\x00\x00\x00\x00"),
		"more sections":  replace("\x88\x77\x66\x55\x44\x33\x22\x11\x01", "\x88\x77\x66\x55\x44\x33\x22\x11\xff"),
		"list":           bytes.Replace(whole, []byte("nixlSDList"), []byte("nixlBDList"), 1),
		"two entries":    replace("t\x03\x00\x00\x00\x00\x00\x00\x00tcp|c\x04\x00\x00\x00\x00\x00\x00\x00here", "t\x06\x00\x00\x00\x00\x00\x00\x00kvtier|"+entry+"\x01\x00\x88\x77\x66\x55\x44\x33\x22\x11\x01\x00\x00\x00\x00\x00\x00\x00"),
		"short region":   replace("\x1d\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00token", "\x05\x00\x00\x00\x00\x00\x00\x00token"),
		"kvtier section": replace("bknd\x03\x00\x00\x00\x00\x00\x00\x00tcp", "bknd\x06\x00\x00\x00\x00\x00\x00\x00kvtier"),
	} {
		if m, err := wire.Decode(b); !errors.Is(err, wire.ErrMalformed) {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	if m, err := wire.Decode(append(whole, "what follows"...)); err != nil || len(m.Sections) != 2 {
		t.Errorf("with bytes behind the end: %v, %v", m, err)
	}
}

// FuzzDecode: what can be read can be written, and is then read as the same.
func FuzzDecode(f *testing.F) {
	files, err := filepath.Glob("testdata/*.hex")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range files {
		f.Add(golden(f, path))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := wire.Decode(b)
		if err != nil {
			if !errors.Is(err, wire.ErrMalformed) {
				t.Error(err)
			}
			return
		}
		once, err := wire.Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		again, err := wire.Decode(once)
		if err != nil {
			t.Fatal(err)
		}
		if twice, err := wire.Encode(again); err != nil || !bytes.Equal(once, twice) {
			t.Errorf("%x\n%x, %v", once, twice, err)
		}
	})
}
