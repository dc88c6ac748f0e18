package xfertest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// outcomes records what a bare backend reports.
type outcomes struct {
	t      testing.TB
	inside atomic.Int32
	mu     struct {
		sync.Mutex
		errs     []error
		reported []int
		returned bool
	}
	after   func(n int) // called with the number of reports so far
	arrived func(i int) // called when pair i is reported well
}

func newOutcomes(t testing.TB, n int) *outcomes {
	o := &outcomes{t: t}
	o.mu.errs, o.mu.reported = make([]error, n), make([]int, n)
	return o
}

func (o *outcomes) done(i int, err error) {
	if o.inside.Add(1) > 1 {
		o.t.Error("done was called concurrently")
	}
	o.mu.Lock()
	if o.mu.returned {
		o.t.Errorf("done(%d) was called after Transfer returned", i)
	}
	o.mu.errs[i] = err
	o.mu.reported[i]++
	n := 0
	for _, k := range o.mu.reported {
		n += k
	}
	o.mu.Unlock()
	if o.arrived != nil && err == nil {
		o.arrived(i)
	}
	if o.after != nil {
		o.after(n)
	}
	o.inside.Add(-1)
}

// transfer runs a bare backend's Transfer and checks that each pair was
// reported once.
func (o *outcomes) transfer(ctx context.Context, b xfer.Backend, p xfer.Prepared) error {
	err := b.Transfer(ctx, p, o.done)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.returned = true
	for i, n := range o.mu.reported {
		if n != 1 {
			o.t.Errorf("done was called %d times for pair %d of %d", n, i, len(o.mu.reported))
		}
	}
	return err
}

// testDone: each pair is reported exactly once, one after the other, before
// Transfer returns and after its bytes have arrived.
func testDone(t *testing.T, h Harness, pair xfer.Pair) {
	g := newBareRig(t, h, pair, 4<<20)
	for _, op := range ops {
		for _, pieces := range [][]piece{{{0, 0, 1}}, stripes(64, 64<<10), stripes(h.few(1000), 4096), g.scatter(h.few(500), 5000)} {
			p := g.prepare(op, pieces)
			for range 3 {
				g.fill(g.source(op))
				o := newOutcomes(t, len(pieces))
				o.arrived = func(i int) {
					g.moved(op, pieces[i])
					if !g.holds(op, pieces[i]) {
						t.Errorf("pair %d of %d is called done, but its bytes are not there", i, len(pieces))
					}
				}
				if err := o.transfer(t.Context(), g.backend, p); err != nil {
					t.Fatal(err)
				}
				for i, err := range o.mu.errs {
					if err != nil {
						t.Errorf("pair %d: %v", i, err)
					}
				}
				g.check()
			}
		}
	}
}

// testCancelBefore: with a context that has ended, nothing hangs, and what is
// reported is true.
func testCancelBefore(t *testing.T, h Harness, pair xfer.Pair) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	t.Run("bare", func(t *testing.T) {
		g := newBareRig(t, h, pair, 1<<20)
		for _, op := range ops {
			pieces := stripes(64, 16<<10)
			p := g.prepare(op, pieces)
			o := newOutcomes(t, len(pieces))
			if err := o.transfer(ended, g.backend, p); err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, context.Canceled) {
				t.Errorf("Transfer: %v", err)
			}
			g.settle(op, pieces, o.mu.errs)
			g.check()
			g.again(op, pieces, p)
		}
	})
	t.Run("request", func(t *testing.T) {
		g := newRig(t, h, pair, 1<<20)
		for _, op := range ops {
			r := g.request(op, stripes(64, 16<<10))
			for name, run := range map[string]func() error{
				"run": func() error { return r.Run(ended) },
				"post": func() error {
					if err := r.Post(ended); err != nil {
						return err
					}
					return r.Wait(t.Context())
				},
			} {
				if err := run(); !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.Canceled) {
					t.Errorf("%s with an ended context: %v", name, err)
				}
				if r.Status() != xfer.Canceled || r.DescStatus(0) != xfer.Canceled || !errors.Is(r.DescErr(63), xfer.ErrCanceled) {
					t.Errorf("%s with an ended context: request %s, descriptor %s, %v", name, r.Status(), r.DescStatus(0), r.DescErr(63))
				}
			}
			g.check() // nothing was moved
			if err := r.Run(t.Context()); err != nil {
				t.Errorf("repost: %v", err)
			}
			g.moved(op, stripes(64, 16<<10)...)
			g.check()
		}
	})
}

// settle tells the models how a cancelled transfer ended: what was reported
// well has arrived, what was cancelled may hold anything.
func (g *rig) settle(op xfer.Op, pieces []piece, errs []error) (arrived, canceled int) {
	g.t.Helper()
	for i, p := range pieces {
		switch {
		case errs[i] == nil:
			g.moved(op, p)
			arrived++
		case errors.Is(errs[i], xfer.ErrCanceled):
			g.unknown(op, p)
			canceled++
		default:
			g.t.Errorf("pair %d of a cancelled transfer: %v, want nil or ErrCanceled", i, errs[i])
			g.unknown(op, p)
		}
	}
	return arrived, canceled
}

// again transfers a prepared transfer to the end.
func (g *rig) again(op xfer.Op, pieces []piece, p xfer.Prepared) {
	g.t.Helper()
	o := newOutcomes(g.t, len(pieces))
	if err := o.transfer(g.t.Context(), g.backend, p); err != nil {
		g.t.Fatalf("transfer after a cancelled one: %v", err)
	}
	for i, err := range o.mu.errs {
		if err != nil {
			g.t.Errorf("pair %d of a transfer after a cancelled one: %v", i, err)
		}
	}
	g.moved(op, pieces...)
	g.check()
}

// testCancelDuring: a transfer that is cancelled at some point returns with its
// memory quiet, having reported the truth, and can be transferred again.
func testCancelDuring(t *testing.T, h Harness, pair xfer.Pair) {
	size := h.maxBytes()
	g := newBareRig(t, h, pair, size)
	half := size / 2
	for _, op := range ops {
		for _, length := range []int64{4 << 10, 64 << 10, 1 << 20, half} {
			pieces := stripes(int(min(half/length, int64(h.few(512)))), length)
			other := pieces // the same in the other half, to flush out what is still moving
			other = append([]piece(nil), other...)
			for i := range other {
				other[i].local += half
				other[i].remote += half
			}
			p, q := g.prepare(op, pieces), g.prepare(op, other)
			for _, share := range []int{0, 1, 2, 10} {
				g.fill(g.source(op))
				ctx, cancel := context.WithCancel(t.Context())
				o := newOutcomes(t, len(pieces))
				var helper sync.WaitGroup
				if share == 0 {
					// Somewhere in the first piece.
					helper.Go(func() { runtime.Gosched(); cancel() })
				} else {
					at := max(1, len(pieces)/share/2)
					o.after = func(n int) {
						if n == at {
							cancel()
						}
					}
				}
				err := o.transfer(ctx, g.backend, p)
				helper.Wait()
				cancel()
				if err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, context.Canceled) {
					t.Errorf("cancelled Transfer: %v", err)
				}
				g.settle(op, pieces, o.mu.errs)
				g.check()
				// Quiet memory keeps what is put there now.
				for i, p := range pieces {
					if o.mu.errs[i] != nil {
						off := p.local
						if op == xfer.Write {
							off = p.remote
						}
						g.refill(g.sink(op), off, p.n)
					}
				}
				g.again(op, other, q)
				g.again(op, pieces, p)
			}
		}
	}
}

// testCancelRequest: Cancel, from any goroutine at any time, returns when the
// memory is quiet.
func testCancelRequest(t *testing.T, h Harness, pair xfer.Pair) {
	size := min(h.maxBytes(), 8<<20)
	g := newRig(t, h, pair, size)
	pieces := g.blocks(int(size/(32<<10)), 32<<10)
	for _, op := range ops {
		r := g.request(op, pieces)
		for round := range h.few(40) {
			g.fill(g.source(op))
			until := g.rand.IntN(len(pieces))
			if round%2 == 0 {
				until = 0
			}
			if err := r.Post(t.Context()); err != nil {
				t.Fatal(err)
			}
			for r.Status() == xfer.Active && r.DescStatus(until) == xfer.Active && until > 0 {
				runtime.Gosched()
			}
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					r.Cancel()
					if s := r.Status(); s == xfer.Active {
						t.Error("Cancel returned while the request is in flight")
					}
				})
			}
			wg.Wait()
			errs := make([]error, len(pieces))
			for i := range errs {
				errs[i] = r.DescErr(i)
			}
			_, canceled := g.settle(op, pieces, errs)
			err := r.Wait(t.Context())
			if (err == nil) != (canceled == 0) {
				t.Errorf("%d descriptors were cancelled, but Wait says %v", canceled, err)
			}
			if err != nil && (!errors.Is(err, xfer.ErrCanceled) || r.Status() != xfer.Canceled) {
				t.Errorf("Wait after Cancel: %s, %v", r.Status(), err)
			}
			g.check()
		}
	}
}

// testCancelAfter: cancelling what has ended changes nothing.
func testCancelAfter(t *testing.T, h Harness, pair xfer.Pair) {
	g := newRig(t, h, pair, 1<<20)
	for _, op := range ops {
		pieces := stripes(16, 4096)
		r := g.request(op, pieces)
		r.Cancel() // never posted
		if r.Status() != xfer.NotPosted {
			t.Errorf("status after Cancel before the first post: %s", r.Status())
		}
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			if err := r.Run(ctx); err != nil {
				t.Fatal(err)
			}
			cancel()
			r.Cancel()
			if err := r.Wait(t.Context()); err != nil || r.Status() != xfer.Succeeded {
				t.Errorf("after Cancel of a request that had ended: %s, %v", r.Status(), err)
			}
		}
		g.moved(op, pieces...)
		g.check()
	}
}

// testDeadline: a deadline that has passed cancels, one that has not does
// nothing.
func testDeadline(t *testing.T, h Harness, pair xfer.Pair) {
	g := newRig(t, h, pair, 1<<20)
	pieces := stripes(64, 16<<10)
	for _, op := range ops {
		local, remote := g.lists(op, pieces)
		for _, c := range []struct {
			deadline time.Time
			want     error
		}{
			{time.Now().Add(-time.Second), context.DeadlineExceeded},
			{time.Now().Add(time.Hour), nil},
		} {
			r, err := g.agent.NewRequest(op, local, remote, &xfer.RequestOptions{Deadline: c.deadline})
			if err != nil {
				t.Fatal(err)
			}
			err = r.Run(t.Context())
			if !errors.Is(err, c.want) || (c.want != nil && !errors.Is(err, xfer.ErrCanceled)) {
				t.Errorf("run with a deadline in %v: %v", time.Until(c.deadline).Round(time.Second), err)
			}
			if err == nil {
				g.moved(op, pieces...)
			}
			if err := r.Release(); err != nil {
				t.Error(err)
			}
			g.check()
		}
	}
}

// testEach: descriptors are handed over in order, each with its bytes there.
func testEach(t *testing.T, h Harness, pair xfer.Pair) {
	const n = 64
	g := newRig(t, h, pair, n*(16<<10))
	pieces := g.blocks(n, 16<<10)
	for _, op := range ops {
		g.fill(g.source(op))
		r := g.request(op, pieces)
		next := 0
		err := r.Each(t.Context(), func(i int, err error) error {
			if i != next || err != nil {
				return fmt.Errorf("descriptor %d, want %d: %w", i, next, err)
			}
			next++
			p := pieces[i]
			g.moved(op, p)
			if !g.holds(op, p) {
				return fmt.Errorf("descriptor %d is called done, but its bytes are not there", i)
			}
			return nil
		})
		if err != nil || next != n {
			t.Fatalf("Each called fn for %d of %d descriptors: %v", next, n, err)
		}
		g.check()

		stop := errors.New("enough")
		if err := r.Post(t.Context()); err != nil {
			t.Fatal(err)
		}
		err = r.Each(t.Context(), func(i int, _ error) error {
			if i == n/2 {
				return stop
			}
			return nil
		})
		if !errors.Is(err, stop) || r.Status() == xfer.Active {
			t.Errorf("Each with a function that fails: %v, request %s", err, r.Status())
		}
	}
}

// testCloseInFlight: an agent that is closed while requests are in flight
// leaves quiet memory.
func testCloseInFlight(t *testing.T, h Harness, pair xfer.Pair) {
	size := min(h.maxBytes(), 8<<20)
	for _, op := range ops {
		g := newRig(t, h, pair, size)
		var requests []*xfer.Request
		pieces := stripes(8, size/8)
		for _, p := range pieces {
			local, remote := g.lists(op, []piece{p})
			r, err := g.agent.NewRequest(op, local, remote, nil)
			if err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
			if err := r.Post(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.agent.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		for i, r := range requests {
			if r.Status() != xfer.Released || !errors.Is(r.Post(t.Context()), xfer.ErrClosed) || r.Release() != nil {
				t.Errorf("request %d of a closed agent is %s", i, r.Status())
			}
		}
		// Whatever has arrived, it moves no more.
		for _, p := range pieces {
			g.unknown(op, p)
		}
		g.check()
	}
}
