package tiers

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// flushGroup lets concurrent callers share flushes of one device: while one
// runs, all who come meet in the next. A flush serves a caller only when it
// began after the call, since it says nothing of writes that ended meanwhile.
type flushGroup struct {
	fn   func() error
	work sync.WaitGroup
	mu   struct {
		sync.Mutex
		closed  bool
		running bool
		next    *flushRun // that waits for the running one; nil: nobody came
		err     error     // of the first flush that failed since the last reset
		flushes uint64
		calls   uint64
	}
}

// flushRun is one flush and those who wait for it.
type flushRun struct {
	done chan struct{} // closed when err is set
	err  error
}

// newFlushGroup makes a group whose flushes are calls of fn, one at a time.
func newFlushGroup(fn func() error) *flushGroup { return &flushGroup{fn: fn} }

// Flush returns when a call of fn that began after Flush was called has
// succeeded. When ctx ends it returns ctx's error, and the flush goes on. After
// a failure each call fails with that error until reset: the kernel tells of
// lost writes once, so the next flush may succeed although they are lost. After
// Close it fails with block.ErrClosed.
func (g *flushGroup) Flush(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	run, err := g.join()
	if err != nil {
		return err
	}
	select {
	case <-run.done:
		return run.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// join returns the flush that begins next, and starts it when none is running.
func (g *flushGroup) join() (*flushRun, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.mu.closed:
		return nil, block.ErrClosed
	case g.mu.err != nil:
		return nil, fmt.Errorf("since a flush failed: %w", g.mu.err)
	}
	g.mu.calls++
	if g.mu.next == nil {
		g.mu.next = &flushRun{done: make(chan struct{})}
	}
	run := g.mu.next
	if !g.mu.running {
		g.mu.running = true
		g.work.Go(g.flush)
	}
	return run, nil
}

// flush runs flushes until nobody waits for another.
func (g *flushGroup) flush() {
	for {
		g.mu.Lock()
		run := g.mu.next
		g.mu.next = nil
		if run == nil {
			g.mu.running = false
			g.mu.Unlock()
			return
		}
		g.mu.flushes++
		g.mu.Unlock()
		err := g.fn()
		var too *flushRun
		if err != nil {
			// Who came while this flush failed had written before it ended, so what
			// was lost may be theirs: their own flush fails without being tried.
			g.mu.Lock()
			g.mu.err = err
			too, g.mu.next = g.mu.next, nil
			g.mu.Unlock()
		}
		run.end(err)
		if too != nil {
			too.end(err)
		}
	}
}

// end gives those who wait for a flush its result.
func (r *flushRun) end(err error) {
	r.err = err
	close(r.done)
}

// failed is the error of the flush that failed, or nil.
func (g *flushGroup) failed() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.err
}

// reset makes Flush work again after a failure.
func (g *flushGroup) reset() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.err = nil
}

// counts is how often fn was called, and for how many calls of Flush.
func (g *flushGroup) counts() (flushes, calls uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.flushes, g.mu.calls
}

// Close refuses further calls and waits for the flushes that were asked for.
// It is safe to call twice.
func (g *flushGroup) Close() {
	g.mu.Lock()
	g.mu.closed = true
	g.mu.Unlock()
	g.work.Wait()
}
