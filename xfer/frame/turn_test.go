package frame

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
)

// TestTurn: many take turns and some give up waiting; there is never more than one,
// and none is lost.
func TestTurn(t *testing.T) {
	var (
		turn turn
		had  int // the race detector sees when two have it
		wg   sync.WaitGroup
		mu   sync.Mutex
		all  int
	)
	done := make(chan struct{})
	for i := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(2, uint64(i)))
			got := 0
			for range 2000 {
				ctx, cancel := context.WithCancel(context.Background())
				if r.IntN(2) == 0 {
					go cancel()
				}
				if turn.take(ctx, done) {
					had++
					got++
					if !turn.pass(ctx, done) {
						cancel()
						continue
					}
					had++
					got++
					turn.give()
				}
				cancel()
			}
			mu.Lock()
			all += got
			mu.Unlock()
		})
	}
	wg.Wait()
	if had != all || all == 0 {
		t.Errorf("the turn was had %d times, %d were counted", all, had)
	}
	if turn.mu.held || turn.mu.first != nil || turn.mu.last != nil {
		t.Errorf("the turn is still held: %+v", &turn.mu)
	}
	if turn.take(t.Context(), done); !turn.mu.held {
		t.Error("the turn is not held")
	}
	close(done)
	if turn.take(t.Context(), done) {
		t.Error("two have the turn")
	}
}

// TestTaking: when the peer takes bytes it is seen, though the send that waits for it
// is not yet woken.
func TestTaking(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			addr := "127.0.0.1:0"
			if network == "unix" {
				addr = t.TempDir() + "/s"
			}
			l, err := net.Listen(network, addr)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			near, err := net.Dial(network, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			far, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer far.Close()
			c := NewConn(near, nil)
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				_ = c.Send(context.Background(), Frame{Header{Type: Data}, make([]byte, 64<<20)}) // is cut off
			}()
			defer func() { _ = c.Close(); <-sent }()
			look := func() (int64, int) { return c.out.writes.Load(), c.queued() }
			until(t, func() bool {
				writes, queued := look()
				time.Sleep(10 * time.Millisecond)
				again, more := look()
				return c.out.waiting.Load() && queued > 0 && again == writes && more == queued
			})
			writes, queued := look()
			if _, err := io.CopyN(io.Discard, far, 8<<20); err != nil {
				t.Fatal(err)
			}
			until(t, func() bool {
				again, less := look()
				return again != writes || less < queued
			})
		})
	}
}

// until waits for a condition.
func until(t *testing.T, cond func() bool) {
	t.Helper()
	for range 10_000 {
		if cond() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the condition does not come")
}
