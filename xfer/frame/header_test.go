package frame_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer/frame"
)

// golden is one frame of each type, whose bytes are in testdata/headers.txt. The frames
// that docs/protocol.md shows are those of api/session/testdata/golden.
var golden = []struct {
	name    string
	h       frame.Header
	payload string
}{
	{"hello", frame.Header{Type: frame.Hello}, "KVTS"},
	{"data", frame.Header{Type: frame.Data, ID: 0x0102030405060708, Token: 0x1112131415161718, Offset: 256 << 10}, "bytes"},
	{"message", frame.Header{Type: frame.Message, Flags: 3, Status: 0x0201, ID: 42}, "\x01\x02\x03"},
	{"ping", frame.Header{Type: frame.Ping, ID: 7}, ""},
	{"pong", frame.Header{Type: frame.Pong, ID: 7}, ""},
	{"bye", frame.Header{Type: frame.Bye}, "not a frame: type 0"},
	{"flush", frame.Header{Type: frame.Flush, ID: 9}, ""},
	{"done", frame.Header{Type: frame.Done, Status: 6, ID: 9}, "no such token"},
	{"read", frame.Header{Type: frame.Read, ID: 10, Token: 5, Offset: 4096}, ""},
	{"note", frame.Header{Type: frame.Note, ID: 11}, "notification"},
}

// TestGolden compares frames with testdata/headers.txt: a name, then 32 bytes of
// header and the payload, in hex.
func TestGolden(t *testing.T) {
	var b strings.Builder
	for _, g := range golden {
		all := encode(g.h, g.payload)
		b.WriteString(g.name + "\n" + hex.Dump(all) + "\n")
		h, err := frame.ParseHeader(all)
		want := g.h
		want.Length = uint32(len(g.payload))
		if err != nil || h != want {
			t.Errorf("%s: parsed %+v, %v; want %+v", g.name, h, err, want)
		}
	}
	want, err := os.ReadFile("testdata/headers.txt")
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the bytes of frames differ from testdata/headers.txt:\n%s", b.String())
	}
}

func TestParseHeaderRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		b    []byte
		ok   bool
	}{
		{"nothing", nil, false},
		{"31 bytes", header(frame.Header{Type: frame.Message})[:31], false},
		{"type 0", header(frame.Header{}), false},
		{"most data", header(frame.Header{Type: frame.Data, Length: frame.MaxData}), true},
		{"more data", header(frame.Header{Type: frame.Data, Length: frame.MaxData + 1}), false},
		{"most of a message", header(frame.Header{Type: frame.Message, Length: frame.MaxSkipped}), true},
		{"more of a message", header(frame.Header{Type: frame.Message, Length: frame.MaxSkipped + 1}), false},
		{"all of a message", header(frame.Header{Type: frame.Message, Length: 1<<32 - 1}), false},
		{"an unknown type", header(frame.Header{Type: 255, Length: frame.MaxMessage}), true},
	} {
		if _, err := frame.ParseHeader(tt.b); tt.ok && err != nil || !tt.ok && !errors.Is(err, frame.ErrFrame) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// FuzzParseHeader: what is a header is the same bytes again.
func FuzzParseHeader(f *testing.F) {
	for _, g := range golden {
		f.Add(encode(g.h, g.payload))
	}
	f.Add(make([]byte, frame.HeaderBytes))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := frame.ParseHeader(b)
		if err != nil {
			if !errors.Is(err, frame.ErrFrame) {
				t.Error(err)
			}
			return
		}
		most := uint32(frame.MaxMessage)
		switch h.Type {
		case frame.Data:
			most = frame.MaxData
		case frame.Message:
			most = frame.MaxSkipped
		}
		if h.Length > most {
			t.Errorf("%d bytes of type %d", h.Length, h.Type)
		}
		if again := h.Append(nil); !bytes.Equal(again, b[:frame.HeaderBytes]) {
			t.Errorf("%x became %x", b[:frame.HeaderBytes], again)
		}
	})
}
