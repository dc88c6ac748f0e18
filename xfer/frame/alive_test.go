package frame_test

import (
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/xfer/frame"
)

// TestIdle: two ends that have nothing to say stay connected, with about one Ping
// per PingAfter.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		a, _ := serve(t, near, nil, calls{})
		b, _ := serve(t, far, nil, calls{})
		time.Sleep(time.Hour)
		if err := errors.Join(a.Err(), b.Err()); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*frame.Conn{a, b} {
			if n := c.Stats().FramesIn; n < 240 || n > 1000 {
				t.Errorf("%d frames in an hour", n)
			}
		}
	})
}

// TestSilentPeer: one that takes the Pings but says nothing is given up.
func TestSilentPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		begin := time.Now()
		_, served := serve(t, near, nil, calls{})
		for _, at := range []time.Duration{10 * time.Second, 20 * time.Second} {
			h, _ := next(t, far)
			if h != (frame.Header{Type: frame.Ping}) || time.Since(begin) != at {
				t.Errorf("%+v after %v, want a Ping after %v", h, time.Since(begin), at)
			}
		}
		if _, err := io.ReadAll(far); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, frame.ErrSilent) || time.Since(begin) != 30*time.Second {
			t.Errorf("Serve: %v after %v", err, time.Since(begin))
		}
	})
}

// TestStoppedPeer: one that neither reads nor writes is given up.
func TestStoppedPeer(t *testing.T) {
	over(t, func(t *testing.T, near, _ net.Conn) {
		_, served := serve(t, near, &frame.Options{PingAfter: 4 * time.Millisecond, DeadAfter: 40 * time.Millisecond}, calls{})
		if err := <-served; !errors.Is(err, frame.ErrSilent) && !errors.Is(err, frame.ErrStalled) {
			t.Errorf("Serve: %v", err)
		}
	})
}

// TestBusyHandler: while the handler works, for longer than DeadAfter, the peer hears
// from us, and is not taken for dead.
func TestBusyHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		conn, served := serve(t, near, nil, calls{frame: func(*frame.Header, []byte) error {
			time.Sleep(5 * time.Minute)
			return nil
		}})
		write(t, far, encode(frame.Header{Type: frame.Message}, ""))
		for begin := time.Now(); time.Since(begin) < 5*time.Minute; {
			last := time.Now()
			if h, _ := next(t, far); h.Type != frame.Ping || time.Since(last) > 13*time.Second {
				t.Fatalf("%+v after %v", h, time.Since(last))
			}
		}
		if err := conn.Err(); err != nil {
			t.Error(err)
		}
		go func() { _, _ = io.Copy(io.Discard, far) }()
		if err := <-served; !errors.Is(err, frame.ErrSilent) { // now it listens
			t.Errorf("Serve: %v", err)
		}
	})
}

// TestPong: a Ping is answered with its ID.
func TestPong(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		serve(t, near, nil, calls{})
		for _, id := range []uint64{0, 7, 1 << 63} {
			write(t, far, encode(frame.Header{Type: frame.Ping, ID: id}, "ignored"))
			if h, _ := next(t, far); h != (frame.Header{Type: frame.Pong, ID: id}) {
				t.Errorf("ID %d: %+v", id, h)
			}
		}
	})
}

// TestPingFlood: a peer that sends Pings and takes no Pongs hinders nobody from
// receiving, and keeps no memory.
func TestPingFlood(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		got := make(chan struct{})
		conn, _ := serve(t, near, nil, calls{frame: func(*frame.Header, []byte) error { close(got); return nil }})
		sent := make(chan error, 1)
		go func() { // the way out is full
			sent <- conn.Send(t.Context(), frame.Frame{Header: frame.Header{Type: frame.Data}, Payload: make([]byte, 64<<20)})
		}()
		flood := make([]byte, 0, 2000*frame.HeaderBytes)
		for i := range uint64(2000) {
			flood = append(flood, header(frame.Header{Type: frame.Ping, ID: i})...)
		}
		for range 50 {
			write(t, far, flood)
		}
		write(t, far, encode(frame.Header{Type: frame.Message}, ""))
		<-got
		_ = conn.Close()
		if err := <-sent; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Send: %v", err)
		}
	})
}

// TestSlowPeer: one that takes a little in less than StallAfter, for much longer than
// that and saying nothing, stays.
func TestSlowPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		conn, _ := serve(t, near, nil, calls{})
		sent := make(chan error, 1)
		go func() {
			sent <- conn.Send(t.Context(), frame.Frame{Header: frame.Header{Type: frame.Data}, Payload: make([]byte, frame.MaxData)})
		}()
		buf := make([]byte, 16<<10)
		for range frame.MaxData / len(buf) {
			time.Sleep(20 * time.Second)
			if _, err := io.ReadFull(far, buf); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := io.ReadFull(far, buf[:frame.HeaderBytes]); err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
	})
}
