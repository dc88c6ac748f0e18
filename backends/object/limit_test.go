package object

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The limit is halved once by a round that is throttled, however many of it are, then one
// request at a time goes ahead, after pauses that grow, and when one is served the limit
// grows again, up to what was asked for.
func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(16)
		take := func() uint64 {
			t.Helper()
			round, err := l.acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return round
		}
		for range 200 {
			l.release(take(), served, 0)
		}
		if l.mu.limit != 16 {
			t.Errorf("limit %v of a healthy service, want 16", l.mu.limit)
		}
		var rounds []uint64
		for range 16 {
			rounds = append(rounds, take())
		}
		for _, r := range rounds {
			l.release(r, throttled, 0)
		}
		if l.mu.limit != 8 || l.mu.shrunk != 1 {
			t.Errorf("limit %v after one round that was throttled, halved %d times", l.mu.limit, l.mu.shrunk)
		}
		// What is still under way says nothing new.
		last := time.Duration(0)
		for range 4 {
			at := time.Now()
			r := take()
			pause := time.Since(at)
			if pause < minPause/2 || pause <= last/3 {
				t.Errorf("a pause of %v after one of %v", pause, last)
			}
			last = pause
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			if _, err := l.acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a second request beside the one that tries: %v", err)
			}
			cancel()
			l.release(r, throttled, 0)
		}
		at := time.Now()
		r := take()
		l.release(r, throttled, 20*time.Second)
		if waited := time.Since(at); waited > maxPause*3/2 {
			t.Errorf("waited %v", waited)
		}
		at = time.Now()
		r = take()
		if waited := time.Since(at); waited < 20*time.Second {
			t.Errorf("waited %v, though the service asked for 20 s", waited)
		}
		l.release(r, served, 0)
		for range 400 {
			l.release(take(), served, 0)
		}
		if l.mu.limit != 16 || l.mu.inUse != 0 || len(l.mu.waiting) != 0 {
			t.Errorf("in the end: limit %v, %d in use, %d waiting", l.mu.limit, l.mu.inUse, len(l.mu.waiting))
		}
	})
}

// Waiters that give up leave no trace, and those behind them get their turn.
func TestLimitGivenUp(t *testing.T) {
	l := newLimiter(1)
	for range 200 {
		round, err := l.acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				c := ctx
				if i%2 == 0 {
					c = t.Context()
				}
				if r, err := l.acquire(c); err == nil {
					l.release(r, served, 0)
				} else if i%2 == 0 {
					t.Error(err)
				}
			})
		}
		go cancel()
		l.release(round, served, 0)
		wg.Wait()
	}
	if l.mu.inUse != 0 || len(l.mu.waiting) != 0 {
		t.Errorf("%d in use, %d waiting", l.mu.inUse, len(l.mu.waiting))
	}
}

func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(3)
		spend := func() (n int) {
			for b.spend() {
				n++
			}
			return n
		}
		if n := spend(); n != 3 {
			t.Errorf("%d retries of a full budget of 3", n)
		}
		for range 11 {
			b.earn()
		}
		if n := spend(); n != 2 {
			t.Errorf("%d retries for 11 successes", n)
		}
		time.Sleep(time.Hour)
		if n := spend(); n != 3 {
			t.Errorf("%d retries after an hour", n)
		}
	})
}

func TestBody(t *testing.T) {
	want := []byte("what is in three pieces, one of them empty")
	v := Vector{want[:5], nil, want[5:6], want[6:]}
	if err := iotest.TestReader(NewBody(v), want); err != nil {
		t.Error(err)
	}
	b := NewBody(v)
	if _, err := b.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	b.Detach()
	if n, err := b.Read(make([]byte, 3)); n != 0 || err == nil || errors.Is(err, io.EOF) {
		t.Errorf("read of a body whose memory is gone: %d, %v", n, err)
	}
}

func TestVectorSlice(t *testing.T) {
	all := []byte("0123456789")
	v := Vector{all[:3], nil, all[3:4], all[4:]}
	for off := range int64(11) {
		for n := range 11 - off {
			s := v.Slice(off, n)
			if got := bytes.Join(s, nil); !bytes.Equal(got, all[off:off+n]) || s.Len() != n {
				t.Errorf("slice [%d,+%d) is %q", off, n, got)
			}
		}
	}
	dst := Vector{make([]byte, 4), make([]byte, 2)}
	if n, err := ReadInto(bytes.NewReader(all[:5]), dst); n != 5 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("5 bytes into 6: %d, %v", n, err)
	}
}
