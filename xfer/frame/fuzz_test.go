package frame_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer/frame"
)

// script is a stream whose peer sends fixed bytes, in pieces, and reads all.
type script struct {
	net.Conn // the rest is not called
	in       []byte
	piece    int
	closed   chan struct{}
}

func (s *script) Read(p []byte) (int, error) {
	select {
	case <-s.closed:
		return 0, net.ErrClosed
	default:
	}
	if len(s.in) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.in[:min(len(s.in), s.piece)])
	s.in = s.in[n:]
	return n, nil
}

func (s *script) Write(p []byte) (int, error)      { return len(p), nil }
func (s *script) Close() error                     { close(s.closed); return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// guarded is a small landing memory between two guards. Tokens below 4 are quarters
// of it; all else is skipped.
type guarded struct {
	t     *testing.T
	all   [3 << 10]byte
	lent  bool
	ended bool
}

func (g *guarded) Land(h *frame.Header) []byte {
	g.quiet()
	const quarter = 256
	if h.Token >= 4 || h.Offset > quarter || uint64(h.Length) > quarter-h.Offset {
		return nil
	}
	g.lent = true
	at := 1<<10 + h.Token*quarter + h.Offset
	return g.all[at:][:h.Length] // with room behind it, which is not meant
}

func (g *guarded) Landed(h *frame.Header, p []byte, err error) error {
	if !g.lent || len(p) != int(h.Length) {
		g.t.Errorf("landed %d of %d bytes, lent %v", len(p), h.Length, g.lent)
	}
	g.lent = false
	g.ended = err != nil
	clear(p)
	return err
}

func (g *guarded) Frame(h *frame.Header, p []byte) error {
	g.quiet()
	switch {
	case len(p) != int(h.Length):
		g.t.Errorf("%d of %d bytes", len(p), h.Length)
	case h.Type == frame.Data || h.Type == frame.Ping || h.Type == frame.Pong || h.Type == frame.Bye:
		g.t.Errorf("the handler got type %d", h.Type)
	}
	return nil
}

// quiet checks that the last call was answered, and that nothing is written outside of
// what was lent.
func (g *guarded) quiet() {
	if g.lent || g.ended {
		g.t.Error("another call while memory is lent, or after the end")
	}
	for i, b := range g.all {
		if b != 0 {
			g.t.Fatalf("byte %d is %#x", i, b)
		}
	}
}

// FuzzServe gives Serve arbitrary bytes in pieces of any size.
func FuzzServe(f *testing.F) {
	var all []byte
	for _, g := range golden {
		f.Add(encode(g.h, g.payload), uint16(7))
		if g.h.Type != frame.Bye {
			all = append(all, encode(g.h, g.payload)...)
		}
	}
	f.Add(all, uint16(1))
	f.Add(all, uint16(1000))
	long := encode(frame.Header{Type: frame.Data, Token: 1, Offset: 3}, string(pattern(1, 200)))
	f.Add(append(long, encode(frame.Header{Type: frame.Message}, string(pattern(1, 70_000)))...), uint16(5000))
	f.Add(append(long, all...), uint16(100))
	f.Fuzz(func(t *testing.T, b []byte, piece uint16) {
		s := &script{in: bytes.Clone(b), piece: int(piece) + 1, closed: make(chan struct{})}
		g := &guarded{t: t}
		conn := frame.NewConn(s, nil)
		err := conn.Serve(g)
		if err == nil || errors.Is(err, net.ErrClosed) {
			t.Errorf("Serve: %v", err)
		}
		if !g.ended {
			g.quiet()
		}
		got := conn.Stats()
		if n := got.BytesIn + got.FramesIn*frame.HeaderBytes; errors.Is(err, io.EOF) && n != int64(len(b)) {
			t.Errorf("%+v of %d bytes", got, len(b))
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
}
