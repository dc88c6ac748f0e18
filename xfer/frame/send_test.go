package frame_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/xfer/frame"
)

var errCause = errors.New("the caller lost interest")

func message(p string) frame.Frame {
	return frame.Frame{Header: frame.Header{Type: frame.Message}, Payload: []byte(p)}
}

// TestSendGivesUpWaiting: a send that waits for another one's turn fails with its
// context's cause, and the connection goes on.
func TestSendGivesUpWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		conn, _ := serve(t, near, nil, calls{})
		first, second, third := make(chan error, 1), make(chan error, 1), make(chan error, 1)
		go func() { first <- conn.Send(t.Context(), message("first")) }()
		synctest.Wait() // it waits for the peer
		ctx, cancel := context.WithCancelCause(t.Context())
		go func() { second <- conn.Send(ctx, message("second")) }()
		synctest.Wait()
		go func() { third <- conn.Send(t.Context(), message("third")) }()
		synctest.Wait()
		cancel(errCause)
		if err := <-second; !errors.Is(err, errCause) {
			t.Errorf("second: %v", err)
		}
		for _, want := range []string{"first", "third"} {
			if _, p := next(t, far); p != want {
				t.Errorf("received %q, want %q", p, want)
			}
		}
		if err := errors.Join(<-first, <-third, conn.Err()); err != nil {
			t.Error(err)
		}
		if err := conn.Send(ctx, message("again")); !errors.Is(err, errCause) {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

// TestSendEndsBetweenFrames: when the context ends before a frame's first byte
// nothing is lost.
func TestSendEndsBetweenFrames(t *testing.T) {
	for _, taken := range []int{0, 1, 2} {
		synctest.Test(t, func(t *testing.T) {
			near, far := pair(t, "pipe")
			conn, _ := serve(t, near, nil, calls{})
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errCause)
			defer cancel()
			sent := make(chan error, 1)
			go func() { sent <- conn.Send(ctx, message("one"), message("two"), message("three")) }()
			for i := range taken {
				if _, p := next(t, far); p != []string{"one", "two"}[i] {
					t.Errorf("received %q", p)
				}
			}
			if err := <-sent; !errors.Is(err, errCause) {
				t.Errorf("%d frames taken: %v", taken, err)
			}
			if got := conn.Stats().FramesOut; got != int64(taken) {
				t.Errorf("%d frames counted, want %d", got, taken)
			}
			go func() { sent <- conn.Send(t.Context(), message("next")) }()
			if _, p := next(t, far); p != "next" {
				t.Errorf("received %q", p)
			}
			if err := <-sent; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSendEndsWithinFrame: a frame that was begun is finished when the peer takes it
// at once, else the connection is given up.
func TestSendEndsWithinFrame(t *testing.T) {
	for _, tt := range []struct {
		name  string
		more  time.Duration // until the peer takes the rest; 0: never
		left  int           // frames behind
		wants error
		ends  bool
	}{
		{name: "never", wants: errCause, ends: true},
		{name: "at once", more: 10 * time.Millisecond},
		{name: "at once, with another behind it", more: 10 * time.Millisecond, left: 1, wants: errCause},
		{name: "too late", more: 80 * time.Millisecond, wants: errCause, ends: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := pair(t, "pipe")
				conn, _ := serve(t, near, nil, calls{})
				ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errCause)
				defer cancel()
				begin := time.Now()
				sent := make(chan error, 1)
				frames := []frame.Frame{message("frame"), message("behind")}[:1+tt.left]
				go func() { sent <- conn.Send(ctx, frames...) }()
				if _, err := io.ReadFull(far, make([]byte, 10)); err != nil {
					t.Fatal(err)
				}
				var peer sync.WaitGroup
				defer peer.Wait()
				if tt.more > 0 {
					peer.Go(func() {
						time.Sleep(time.Second + tt.more)
						_, _ = io.ReadFull(far, make([]byte, frame.HeaderBytes+5-10)) // too late it fails
					})
				}
				if err := <-sent; !errors.Is(err, tt.wants) {
					t.Errorf("Send: %v, want %v", err, tt.wants)
				}
				if d := time.Since(begin); d > time.Second+100*time.Millisecond {
					t.Errorf("after %v", d)
				}
				if err := conn.Err(); tt.ends != errors.Is(err, frame.ErrTorn) || !tt.ends && err != nil {
					t.Errorf("the connection: %v", err)
				}
				if err := conn.Err(); errors.Is(err, errCause) {
					t.Errorf("one caller's cause is everybody's: %v", err)
				}
			})
		})
	}
}

// TestSendEnds: a send to a peer that does not read ends with its context, with the
// connection, or because the peer takes nothing, over any stream.
func TestSendEnds(t *testing.T) {
	data := frame.Frame{Header: frame.Header{Type: frame.Data}, Payload: make([]byte, 64<<20)}
	for _, tt := range []struct {
		name string
		o    frame.Options
		end  func(conn *frame.Conn, cancel func(error))
		want error
	}{
		{"context", frame.Options{}, func(_ *frame.Conn, cancel func(error)) { cancel(errCause) }, errCause},
		{"close", frame.Options{}, func(conn *frame.Conn, _ func(error)) { _ = conn.Close() }, net.ErrClosed},
		{"stall", frame.Options{StallAfter: 200 * time.Millisecond}, func(*frame.Conn, func(error)) {}, frame.ErrStalled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			over(t, func(t *testing.T, near, far net.Conn) {
				conn, served := serve(t, near, &tt.o, calls{})
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				sent := make(chan error, 2)
				for range 2 { // one sends, one waits
					go func() { sent <- conn.Send(ctx, data) }()
				}
				if _, err := io.ReadFull(far, make([]byte, 100)); err != nil {
					t.Fatal(err)
				}
				tt.end(conn, cancel)
				for range 2 {
					if err := <-sent; !errors.Is(err, tt.want) && !errors.Is(err, frame.ErrTorn) {
						t.Errorf("Send: %v, want %v", err, tt.want)
					}
				}
				if tt.want == errCause {
					// Nothing of the second frame need have been sent.
					_ = conn.Close()
				} else if err := <-served; !errors.Is(err, tt.want) {
					t.Errorf("Serve: %v, want %v", err, tt.want)
				}
			})
		})
	}
}

// TestSendIsFair: while one sender has much to send, the others' messages wait for
// one group of it at most, and it then waits for all of them.
func TestSendIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := pair(t, "pipe")
		conn, _ := serve(t, near, nil, calls{})
		sent := make(chan error, 3)
		big := frame.Frame{Header: frame.Header{Type: frame.Data}, Payload: make([]byte, 5*frame.MaxData)}
		go func() { sent <- conn.Send(t.Context(), big, message("behind the data")) }()
		synctest.Wait()
		for _, p := range []string{"first", "second"} {
			go func() { sent <- conn.Send(t.Context(), message(p)) }()
			synctest.Wait()
		}
		for _, want := range []string{"data", "data", "first", "second", "data", "data", "data", "behind the data"} {
			h, p := next(t, far)
			if h.Type == frame.Data {
				p = "data"
			}
			if p != want {
				t.Errorf("received %q, want %q", p, want)
			}
		}
		for range cap(sent) {
			if err := <-sent; err != nil {
				t.Error(err)
			}
		}
	})
}
