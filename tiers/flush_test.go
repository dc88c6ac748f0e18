package tiers

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/kvtier/kvtier/index/block"
)

// gatedFlush is a flush that lasts until the test lets it end.
type gatedFlush struct {
	began chan struct{}
	end   chan error
}

func newGatedFlush() *gatedFlush {
	return &gatedFlush{began: make(chan struct{}), end: make(chan error)}
}

func (g *gatedFlush) run() error {
	g.began <- struct{}{}
	return <-g.end
}

// TestFlushShared: those who come while a flush runs share the next one, since
// the running one may have begun before their writes.
func TestFlushShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := newGatedFlush()
		g := newFlushGroup(gate.run)
		results := make(chan error, 11)
		call := func() { results <- g.Flush(t.Context()) }
		go call()
		<-gate.began
		for range 10 {
			go call()
		}
		synctest.Wait()
		gate.end <- nil
		synctest.Wait()
		if len(results) != 1 {
			t.Errorf("the first flush ended %d calls, want 1", len(results))
		}
		<-gate.began
		gate.end <- nil
		synctest.Wait()
		if len(results) != 11 {
			t.Errorf("%d calls ended, want 11", len(results))
		}
		close(results)
		for err := range results {
			if err != nil {
				t.Error(err)
			}
		}
		if flushes, calls := g.counts(); flushes != 2 || calls != 11 {
			t.Errorf("%d flushes for %d calls, want 2 for 11", flushes, calls)
		}
		g.Close()
	})
}

// TestFlushCancelled: who leaves does not take the flush along.
func TestFlushCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := newGatedFlush()
		g := newFlushGroup(gate.run)
		ctx, cancel := context.WithCancel(t.Context())
		left, stayed := make(chan error, 1), make(chan error, 1)
		go func() { left <- g.Flush(ctx) }()
		<-gate.began
		go func() { stayed <- g.Flush(t.Context()) }()
		synctest.Wait()
		cancel()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled call: %v", err)
		}
		gate.end <- nil
		<-gate.began
		gate.end <- nil
		if err := <-stayed; err != nil {
			t.Error(err)
		}
		if err := g.Flush(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("call with an ended context: %v", err)
		}
		g.Close()
		if flushes, calls := g.counts(); flushes != 2 || calls != 2 {
			t.Errorf("%d flushes for %d calls, want 2 for 2", flushes, calls)
		}
	})
}

// TestFlushFailure: what a failed flush lost may be anybody's who wrote before
// it ended, and nobody is told otherwise by a later one.
func TestFlushFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := newGatedFlush()
		g := newFlushGroup(gate.run)
		bad := errors.New("input/output error")
		first, second := make(chan error, 1), make(chan error, 1)
		go func() { first <- g.Flush(t.Context()) }()
		<-gate.began
		go func() { second <- g.Flush(t.Context()) }()
		synctest.Wait()
		gate.end <- bad
		for _, c := range []chan error{first, second} {
			if err := <-c; !errors.Is(err, bad) {
				t.Errorf("error %v, want %v", err, bad)
			}
		}
		if err := g.Flush(t.Context()); !errors.Is(err, bad) {
			t.Errorf("later call: %v, want %v", err, bad)
		}
		if err := g.failed(); !errors.Is(err, bad) {
			t.Errorf("failed is %v, want %v", err, bad)
		}
		g.reset()
		go func() { first <- g.Flush(t.Context()) }()
		<-gate.began
		gate.end <- nil
		if err := <-first; err != nil {
			t.Errorf("after reset: %v", err)
		}
		if flushes, _ := g.counts(); flushes != 2 {
			t.Errorf("%d flushes, want 2", flushes)
		}
		g.Close()
	})
}

func TestFlushClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := newGatedFlush()
		g := newFlushGroup(gate.run)
		called := make(chan error, 1)
		go func() { called <- g.Flush(t.Context()) }()
		<-gate.began
		closed := make(chan struct{})
		go func() {
			g.Close()
			g.Close()
			close(closed)
		}()
		synctest.Wait()
		select {
		case <-closed:
			t.Error("Close did not wait for the flush")
		default:
		}
		gate.end <- nil
		<-closed
		if err := <-called; err != nil {
			t.Error(err)
		}
		if err := g.Flush(t.Context()); !errors.Is(err, block.ErrClosed) {
			t.Errorf("flush after close: %v", err)
		}
	})
}

// TestFlushCovers: whatever the timing, a flush that began after a write serves it.
func TestFlushCovers(t *testing.T) {
	var mu sync.Mutex
	written, durable := 0, 0
	g := newFlushGroup(func() error {
		mu.Lock()
		n := written
		mu.Unlock()
		mu.Lock()
		durable = n
		mu.Unlock()
		return nil
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 300 {
				mu.Lock()
				written++
				mine := written
				mu.Unlock()
				if err := g.Flush(t.Context()); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if durable < mine {
					t.Errorf("write %d was answered when %d were durable", mine, durable)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	g.Close()
}
