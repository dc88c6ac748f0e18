package frame_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/xfer/frame"
)

// openFiles counts the descriptors of this process.
func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// keepsFiles fails the test when f leaves more descriptors open than before.
func keepsFiles(t *testing.T, f func()) {
	t.Helper()
	before := openFiles(t)
	f()
	if after := openFiles(t); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}

// TestHello: the payload arrives, and not a byte of what follows is taken.
func TestHello(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		for _, n := range []int{0, 1, 5000, frame.MaxHello} {
			want := pattern(1, n)
			sent := make(chan error, 1)
			go func() {
				err := frame.SendHello(far, want, nil)
				_, more := far.Write([]byte("next"))
				sent <- errors.Join(err, more)
			}()
			got, files, err := frame.RecvHello(near)
			if err != nil || !bytes.Equal(got, want) || len(files) > 0 {
				t.Errorf("hello of %d bytes: got %d and %d files, %v", n, len(got), len(files), err)
			}
			behind := make([]byte, 4)
			if _, err := io.ReadFull(near, behind); err != nil || string(behind) != "next" {
				t.Errorf("behind the hello: %q, %v", behind, err)
			}
			if err := <-sent; err != nil {
				t.Error(err)
			}
		}
	}, "tlspipe")
}

// TestHelloFiles passes as many files as can be, twice, and reads from one.
func TestHelloFiles(t *testing.T) {
	const files = 253
	near, far := pair(t, "unix")
	keepsFiles(t, func() {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		defer w.Close()
		fds := make([]int, files)
		for i := range fds {
			fds[i] = int(r.Fd())
		}
		sent := make(chan error, 1)
		go func() { sent <- frame.SendHello(far, []byte("hello"), fds) }()
		p, got, err := frame.RecvHello(near)
		if err != nil || string(p) != "hello" || len(got) != files {
			t.Fatalf("got %q, %d files, %v", p, len(got), err)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
		if _, err := w.WriteString("x"); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if n, err := unix.Read(got[files-1], b); n != 1 || b[0] != 'x' {
			t.Errorf("read from a passed file: %q, %v", b[:n], err)
		}
		for _, fd := range got {
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("a passed file survives exec: %v", err)
			}
			if err := unix.Close(fd); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestHelloRefused: whatever comes in place of a hello is refused, and files that
// came with it are closed.
func TestHelloRefused(t *testing.T) {
	hello := encode(frame.Header{Type: frame.Hello}, "hello")
	for _, tt := range []struct {
		name  string
		sent  []byte
		stays bool // the peer does not close
		want  error
	}{
		{"nothing", nil, false, io.EOF},
		{"nothing, for ever", nil, true, os.ErrDeadlineExceeded},
		{"torn header", hello[:31], false, io.ErrUnexpectedEOF},
		{"torn header, for ever", hello[:31], true, os.ErrDeadlineExceeded},
		{"no payload", hello[:32], false, io.ErrUnexpectedEOF},
		{"torn payload", hello[:33], false, io.ErrUnexpectedEOF},
		{"torn payload, for ever", hello[:33], true, os.ErrDeadlineExceeded},
		{"zeros", make([]byte, 1000), true, frame.ErrFrame},
		{"HTTP", []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), true, frame.ErrFrame},
		{"a message", encode(frame.Header{Type: frame.Message}, "hello"), true, frame.ErrFrame},
		{"too long", header(frame.Header{Type: frame.Hello, Length: frame.MaxHello + 1}), true, frame.ErrFrame},
		{"bye", encode(frame.Header{Type: frame.Bye}, "no"), true, frame.ErrBye},
	} {
		t.Run(tt.name, func(t *testing.T) {
			over(t, func(t *testing.T, near, far net.Conn) {
				if tt.want == os.ErrDeadlineExceeded {
					if err := near.SetDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
						t.Fatal(err)
					}
				}
				keepsFiles(t, func() {
					done := make(chan struct{})
					go func() {
						defer close(done)
						if u, ok := far.(*net.UnixConn); ok && len(tt.sent) > 0 {
							_, _, _ = u.WriteMsgUnix(tt.sent, unix.UnixRights(0, 1, 2), nil)
						} else if len(tt.sent) > 0 {
							_, _ = far.Write(tt.sent) // a pipe is not read to its end
						}
						if closer, ok := far.(interface{ CloseWrite() error }); ok && !tt.stays {
							_ = closer.CloseWrite()
						} else if !tt.stays {
							_ = far.Close()
						}
					}()
					p, files, err := frame.RecvHello(near)
					if !errors.Is(err, tt.want) || p != nil || files != nil {
						t.Errorf("got %q, %v, %v; want %v", p, files, err, tt.want)
					}
					if _, ok := far.(*net.UnixConn); !ok && far.RemoteAddr().Network() == "pipe" {
						_ = far.Close()
					}
					<-done
				})
			}, "tlspipe") // whose close waits for a reader
		})
	}
}

// TestHelloFilesLate: files that come with later bytes than the first stay open
// nowhere, in a hello as in frames.
func TestHelloFilesLate(t *testing.T) {
	near, far := pair(t, "unix")
	u := far.(*net.UnixConn)
	late := func(b []byte) {
		if _, _, err := u.WriteMsgUnix(b, unix.UnixRights(0, 1, 2), nil); err != nil {
			t.Error(err)
		}
	}
	keepsFiles(t, func() {
		hello := encode(frame.Header{Type: frame.Hello}, "hello")
		write(t, far, hello[:10])
		late(hello[10:])
		p, files, err := frame.RecvHello(near)
		if string(p) != "hello" || err != nil {
			t.Errorf("got %q, %v", p, err)
		}
		for _, fd := range files { // the kernel may join the two parts
			if err := unix.Close(fd); err != nil {
				t.Error(err)
			}
		}
		got := make(chan struct{}, 1)
		conn, served := serve(t, near, nil, calls{frame: func(*frame.Header, []byte) error { got <- struct{}{}; return nil }})
		late(encode(frame.Header{Type: frame.Message}, "message"))
		<-got
		late(encode(frame.Header{Type: frame.Data}, "data"))
		write(t, far, encode(frame.Header{Type: frame.Message}, ""))
		<-got
		if n := conn.Stats().FramesIn; n != 3 {
			t.Errorf("%d frames", n)
		}
		_ = conn // stays open: its socket was there before
		select {
		case err := <-served:
			t.Error(err)
		default:
		}
	})
}

func TestSendHelloRefuses(t *testing.T) {
	near, _ := pair(t, "tcp")
	local, _ := pair(t, "unix")
	for _, tt := range []struct {
		c     net.Conn
		bytes int
		files []int
	}{
		{near, frame.MaxHello + 1, nil},
		{near, 1, []int{0}},
		{local, 1, make([]int, 254)},
	} {
		if err := frame.SendHello(tt.c, make([]byte, tt.bytes), tt.files); !errors.Is(err, frame.ErrFrame) {
			t.Errorf("%d bytes and %d files over %s: %v", tt.bytes, len(tt.files), tt.c.RemoteAddr().Network(), err)
		}
	}
}

// TestByeForHello: a peer that closes in place of its hello says why; of that no more than is
// reasonable is told.
func TestByeForHello(t *testing.T) {
	near, far := pair(t, "tcp")
	if _, err := far.Write(encode(frame.Header{Type: frame.Bye}, strings.Repeat("no", 1000))); err != nil {
		t.Fatal(err)
	}
	_, _, err := frame.RecvHello(near)
	if !errors.Is(err, frame.ErrBye) || !strings.Contains(err.Error(), `"nono`) || len(err.Error()) > 1200 {
		t.Error(err)
	}
}

// TestHelloThenFrames: the deadline of the hello does not outlive it.
func TestHelloThenFrames(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		deadline := time.Now().Add(50 * time.Millisecond)
		if err := errors.Join(near.SetDeadline(deadline), far.SetDeadline(deadline)); err != nil {
			t.Fatal(err)
		}
		got := make(chan string, 1)
		a, _ := serve(t, near, nil, calls{frame: func(_ *frame.Header, p []byte) error { got <- string(p); return nil }})
		b, _ := serve(t, far, nil, calls{})
		<-time.After(time.Until(deadline.Add(time.Millisecond)))
		if err := b.Send(t.Context(), message("late")); err != nil {
			t.Fatal(err)
		}
		if p := <-got; p != "late" || a.Err() != nil {
			t.Errorf("%q, %v", p, a.Err())
		}
	})
}
