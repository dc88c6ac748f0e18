package frame_test

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/xfer/frame"
)

var errHandler = errors.New("the handler is unhappy")

// TestServeEnds: what ends a connection, what Serve says, and what the peer is told.
func TestServeEnds(t *testing.T) {
	unhappy := calls{frame: func(*frame.Header, []byte) error { return errHandler }}
	message := encode(frame.Header{Type: frame.Message}, "hello")
	for _, tt := range []struct {
		name    string
		handler calls
		sent    []byte
		close   bool // by the peer, behind that
		want    error
		bye     string // part of what is told, "" for nothing
	}{
		{name: "close", sent: message, close: true, want: io.EOF},
		{name: "close within a header", sent: message[:10], close: true, want: io.ErrUnexpectedEOF},
		{name: "close behind a header", sent: message[:frame.HeaderBytes], close: true, want: io.ErrUnexpectedEOF},
		{name: "close within a payload", sent: message[:34], close: true, want: io.ErrUnexpectedEOF},
		{name: "close within skipped data", sent: encode(frame.Header{Type: frame.Data}, "data")[:34], close: true, want: io.ErrUnexpectedEOF},
		{name: "bye", sent: encode(frame.Header{Type: frame.Bye}, "enough"), want: frame.ErrBye},
		{name: "type 0", sent: make([]byte, 100), want: frame.ErrFrame, bye: "type 0"},
		{name: "an HTTP request", sent: []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), want: frame.ErrFrame, bye: "at most"},
		{name: "large message", sent: header(frame.Header{Type: frame.Message, Length: frame.MaxSkipped + 1}), want: frame.ErrFrame, bye: "16777217 bytes"},
		{name: "large data", sent: header(frame.Header{Type: frame.Data, Length: frame.MaxData + 1}), want: frame.ErrFrame, bye: "262145 bytes"},
		{name: "handler", handler: unhappy, sent: message, want: errHandler, bye: errHandler.Error()},
		{
			name: "handler of data", sent: encode(frame.Header{Type: frame.Data}, "data"), want: errHandler, bye: errHandler.Error(),
			handler: calls{
				land:   func(h *frame.Header) []byte { return make([]byte, h.Length) },
				landed: func(*frame.Header, []byte, error) error { return errHandler },
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			near, far := pair(t, "tcp")
			conn, served := serve(t, near, nil, tt.handler)
			write(t, far, tt.sent)
			if tt.close {
				if err := far.(*net.TCPConn).CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			if tt.bye != "" {
				if h, p := next(t, far); h.Type != frame.Bye || !strings.Contains(p, tt.bye) {
					t.Errorf("told type %d: %q, want a Bye with %q", h.Type, p, tt.bye)
				}
			}
			if err := <-served; !errors.Is(err, tt.want) {
				t.Errorf("Serve: %v, want %v", err, tt.want)
			}
			if err := conn.Err(); !errors.Is(err, tt.want) {
				t.Errorf("Err: %v, want %v", err, tt.want)
			}
			if err := conn.Send(t.Context(), frame.Frame{Header: frame.Header{Type: frame.Message}}); !errors.Is(err, tt.want) {
				t.Errorf("Send: %v, want %v", err, tt.want)
			}
			if b, err := io.ReadAll(far); len(b) > 0 || err != nil && tt.bye == "" && tt.want != frame.ErrBye {
				t.Errorf("behind that: %q, %v", b, err)
			}
		})
	}
}

func header(h frame.Header) []byte { return h.Append(nil) }

// TestMessageSize: a message longer than was agreed is skipped, its handler is told how
// long it was, and what follows it comes as it should. None is sent.
func TestMessageSize(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		type got struct {
			h frame.Header
			n int
		}
		frames := make(chan got)
		conn, _ := serve(t, near, &frame.Options{MaxMessage: 70_000}, calls{frame: func(h *frame.Header, p []byte) error {
			frames <- got{*h, len(p)}
			return nil
		}})
		sizes := []int{70_000, 70_001, frame.MaxMessage, frame.MaxMessage + 1, 3 << 20, 5}
		wrote := make(chan error, 1)
		go func() {
			var b []byte
			for i, n := range sizes {
				b = append(b, encode(frame.Header{Type: frame.Message, ID: uint64(i)}, string(make([]byte, n)))...)
			}
			b = append(b, encode(frame.Header{Type: frame.Note}, string(make([]byte, frame.MaxMessage)))...) // is none
			_, err := far.Write(b)
			wrote <- err
		}()
		for i, n := range sizes {
			want := got{frame.Header{Length: uint32(n), Type: frame.Message, ID: uint64(i)}, n}
			if n > 70_000 {
				want.n = 0
			}
			if g := <-frames; g != want {
				t.Fatalf("got %+v, want %+v", g, want)
			}
		}
		if g := <-frames; g.n != frame.MaxMessage {
			t.Errorf("got %+v", g)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		long := frame.Frame{Header: frame.Header{Type: frame.Message}, Payload: make([]byte, 70_001)}
		if err := conn.Send(t.Context(), long); !errors.Is(err, frame.ErrFrame) {
			t.Errorf("Send: %v", err)
		}
		if err := conn.Err(); err != nil {
			t.Error(err)
		}
	})
}

// TestServeEndsThoughASendIsStuck: the peer that cannot be told is not waited for long.
func TestServeEndsThoughASendIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		conn, served := serve(t, near, nil, calls{})
		sent := make(chan error, 1)
		go func() { sent <- conn.Send(t.Context(), message("nobody reads this")) }()
		synctest.Wait()
		begin := time.Now()
		write(t, far, make([]byte, frame.HeaderBytes))
		if err := <-served; !errors.Is(err, frame.ErrFrame) || time.Since(begin) > time.Second {
			t.Errorf("Serve: %v after %v", err, time.Since(begin))
		}
		if err := <-sent; !errors.Is(err, frame.ErrFrame) {
			t.Errorf("Send: %v", err)
		}
	})
}

// TestByeCarriesTheReason from one Serve to the other.
func TestByeCarriesTheReason(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		_, served := serve(t, near, nil, calls{})
		_, ended := serve(t, far, nil, calls{frame: func(*frame.Header, []byte) error { return errHandler }})
		write(t, near, encode(frame.Header{Type: 200}, ""))
		if err := <-served; !errors.Is(err, frame.ErrBye) || !strings.Contains(err.Error(), errHandler.Error()) {
			t.Errorf("Serve: %v", err)
		}
		if err := <-ended; !errors.Is(err, errHandler) {
			t.Errorf("the other: %v", err)
		}
	})
}

// TestFrames: each type but Ping, Pong and Bye is the handler's, with any size that a
// message may have, even read in pieces.
func TestFrames(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		type got struct {
			h frame.Header
			p string
		}
		frames := make(chan got)
		serve(t, near, nil, calls{frame: func(h *frame.Header, p []byte) error {
			frames <- got{*h, string(p)}
			return nil
		}})
		all := string(pattern(1, frame.MaxMessage))
		wrote := make(chan error, 1)
		types := []frame.Type{frame.Hello, frame.Message, frame.Flush, frame.Done, frame.Read, frame.Note, 11, 255}
		sizes := []int{0, 1, 4063, 4064, 4065, 4096, 4097, 64 << 10, 64<<10 + 1, frame.MaxMessage}
		of := func(typ frame.Type) []int { // the types differ in nothing else
			if typ == frame.Message {
				return sizes
			}
			return sizes[:2]
		}
		go func() {
			var b []byte
			for _, typ := range types {
				for i, n := range of(typ) {
					b = append(b, encode(frame.Header{Type: typ, ID: uint64(i)}, all[:n])...)
				}
				b = append(b, encode(frame.Header{Type: frame.Pong}, "")...)
				b = append(b, encode(frame.Header{Type: frame.Data}, all[:100_000])...) // is skipped
			}
			for err := error(nil); len(b) > 0; {
				n := min(len(b), 7000) // no frame ends there
				if _, err = far.Write(b[:n]); err != nil {
					wrote <- err
					return
				}
				b = b[n:]
			}
			wrote <- nil
		}()
		for _, typ := range types {
			for i, n := range of(typ) {
				g := <-frames
				if want := (frame.Header{Length: uint32(n), Type: typ, ID: uint64(i)}); g.h != want || g.p != all[:n] {
					t.Fatalf("got %+v, want %+v, or the payload is wrong", g.h, want)
				}
			}
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	})
}

// TestLandTooSmall: memory that is shorter than the data is not written behind, and
// Landed follows.
func TestLandTooSmall(t *testing.T) {
	near, far := pair(t, "tcp")
	memory := make([]byte, 10)
	var landed error
	_, served := serve(t, near, nil, calls{
		land:   func(*frame.Header) []byte { return memory[:3] },
		landed: func(_ *frame.Header, _ []byte, err error) error { landed = err; return nil },
	})
	write(t, far, encode(frame.Header{Type: frame.Data}, "data"))
	if err := <-served; err == nil || !errors.Is(landed, err) {
		t.Errorf("Serve: %v, Landed: %v", err, landed)
	}
	if string(memory) != string(make([]byte, 10)) {
		t.Errorf("memory is %q", memory)
	}
}

// TestCloseWhileLanding: Landed hears that the data is not there, Serve ends, and what
// the peer sends then does not arrive.
func TestCloseWhileLanding(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		begun, landed := make(chan struct{}), make(chan error, 1)
		memory := make([]byte, 4)
		conn, served := serve(t, near, nil, calls{
			land:   func(*frame.Header) []byte { close(begun); return memory },
			landed: func(_ *frame.Header, _ []byte, err error) error { landed <- err; return nil },
		})
		write(t, far, encode(frame.Header{Type: frame.Data}, "data")[:34])
		<-begun
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Serve: %v", err)
		}
		if err := <-landed; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Landed: %v", err)
		}
		_, _ = far.Write([]byte("ta")) // may fail
		if string(memory[2:]) != "\x00\x00" {
			t.Errorf("memory is %q", memory)
		}
	})
}

// TestCloseFromHandler: the handler may close, and gets nothing more.
func TestCloseFromHandler(t *testing.T) {
	near, far := pair(t, "tcp")
	var conn *frame.Conn
	ready := make(chan struct{})
	got := 0
	conn, served := serve(t, near, nil, calls{frame: func(*frame.Header, []byte) error {
		<-ready
		got++
		return conn.Close()
	}})
	close(ready)
	two := encode(frame.Header{Type: frame.Message}, "")
	write(t, far, append(two, two...))
	if err := <-served; !errors.Is(err, net.ErrClosed) || got != 1 {
		t.Errorf("Serve: %v after %d frames", err, got)
	}
}
