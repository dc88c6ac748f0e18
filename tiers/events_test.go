package tiers

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/kvtier/kvtier/index/block"
)

// eventTester is a watcher that takes an event only when the test asks.
type eventTester struct {
	events chan block.Event
	ended  chan error
	cancel context.CancelFunc
}

func startWatch(t *testing.T, h *eventHub, ns string) *eventTester {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &eventTester{events: make(chan block.Event), ended: make(chan error, 1), cancel: cancel}
	ready := make(chan struct{})
	go func() {
		w.ended <- h.watch(ctx, ns, func() { close(ready) }, func(ev block.Event) error {
			select {
			case w.events <- ev:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	<-ready
	return w
}

func publishN(h *eventHub, ns string, n int) {
	for range n {
		h.publish(block.Event{Kind: block.EventStored, NS: ns})
	}
}

// want takes n events, of which the first has that number.
func (w *eventTester) want(t *testing.T, first uint64, n int) {
	t.Helper()
	for i := range n {
		if ev := <-w.events; ev.Seq != first+uint64(i) || ev.Kind != block.EventStored {
			t.Fatalf("event %+v, want number %d", ev, first+uint64(i))
		}
	}
}

// wantNone checks that the watcher has nothing to tell.
func (w *eventTester) wantNone(t *testing.T) {
	t.Helper()
	synctest.Wait()
	select {
	case ev := <-w.events:
		t.Fatalf("event %+v", ev)
	default:
	}
}

func TestEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newEventHub(8)
		publishN(h, "a", 3) // before anybody watches
		all, a := startWatch(t, h, ""), startWatch(t, h, "a")
		all.wantNone(t)
		publishN(h, "b", 2)
		publishN(h, "a", 1)
		all.want(t, 4, 3)
		a.want(t, 6, 1)
		all.wantNone(t)
		a.wantNone(t)
		if got, want := h.stats(), (eventStats{Published: 6, Watchers: 2}); got != want {
			t.Errorf("counters %+v, want %+v", got, want)
		}
		for _, w := range []*eventTester{all, a} {
			w.cancel()
			if err := <-w.ended; !errors.Is(err, context.Canceled) {
				t.Errorf("watch ended with %v", err)
			}
		}
		if h.mu.ring != nil || h.stats().Watchers != 0 {
			t.Error("the ring outlives its watchers")
		}
		publishN(h, "a", 100)
		again := startWatch(t, h, "")
		publishN(h, "a", 1)
		again.want(t, 107, 1)
		again.cancel()
	})
}

// TestEventsLost: a slow watcher is told once what it missed and goes on; a
// fast one beside it misses nothing.
func TestEventsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newEventHub(8)
		slow, fast := startWatch(t, h, "a"), startWatch(t, h, "")
		publishN(h, "a", 1)
		synctest.Wait() // slow holds event 1
		fast.want(t, 1, 1)
		for range 5 {
			publishN(h, "a", 4)
			fast.want(t, h.stats().Published-3, 4)
		}
		slow.want(t, 1, 1)
		ev := <-slow.events
		if ev.Kind != block.EventLost || ev.Count != 12 || ev.Seq != 13 || ev.NS != "a" {
			t.Errorf("event %+v, want 12 lost up to 13", ev)
		}
		slow.want(t, 14, 8)
		publishN(h, "a", 1)
		slow.want(t, 22, 1)
		fast.want(t, 22, 1)
		if got, want := h.stats(), (eventStats{Published: 22, Watchers: 2, Lost: 12}); got != want {
			t.Errorf("counters %+v, want %+v", got, want)
		}
		slow.cancel()
		fast.cancel()
	})
}

// TestEventsBacklog: more than one batch is read without being woken again.
func TestEventsBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newEventHub(0)
		w := startWatch(t, h, "")
		publishN(h, "a", 3*eventBatch)
		w.want(t, 1, 3*eventBatch)
		w.wantNone(t)
		w.cancel()
	})
}

func TestEventsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newEventHub(8)
		w := startWatch(t, h, "")
		bad := errors.New("stream broke")
		failed := make(chan error, 1)
		go func() { failed <- h.watch(t.Context(), "", nil, func(block.Event) error { return bad }) }()
		synctest.Wait()
		publishN(h, "a", 1)
		if err := <-failed; !errors.Is(err, bad) {
			t.Errorf("watch ended with %v, want %v", err, bad)
		}
		w.want(t, 1, 1)
		h.close()
		h.close()
		if err := <-w.ended; !errors.Is(err, block.ErrClosed) {
			t.Errorf("watch ended with %v, want %v", err, block.ErrClosed)
		}
		publishN(h, "a", 1)
		if err := h.watch(t.Context(), "", nil, nil); !errors.Is(err, block.ErrClosed) {
			t.Errorf("watch after close: %v", err)
		}
	})
}

// TestEventsConcurrent: each watcher gets every number once, in order, or is
// told how many it missed.
func TestEventsConcurrent(t *testing.T) {
	h := newEventHub(64)
	const publishers, each = 4, 5000
	var watching, ready sync.WaitGroup
	ready.Add(4)
	for range 4 {
		watching.Go(func() {
			last := uint64(0)
			err := h.watch(t.Context(), "", ready.Done, func(ev block.Event) error {
				step := uint64(1)
				if ev.Kind == block.EventLost {
					step = uint64(ev.Count)
				}
				if last += step; ev.Seq != last {
					t.Errorf("event %+v when %d was due", ev, last)
				}
				if last == publishers*each {
					return errEnough
				}
				return nil
			})
			if !errors.Is(err, errEnough) {
				t.Errorf("watch ended with %v", err)
			}
		})
	}
	ready.Wait()
	var publishing sync.WaitGroup
	for range publishers {
		publishing.Go(func() { publishN(h, "a", each) })
	}
	publishing.Wait()
	watching.Wait()
}

var errEnough = errors.New("enough")

func BenchmarkEventsPublish(b *testing.B) {
	for _, watched := range []bool{false, true} {
		name := "unwatched"
		if watched {
			name = "watched"
		}
		b.Run(name, func(b *testing.B) {
			h := newEventHub(0)
			if watched {
				ready := make(chan struct{})
				done := make(chan struct{})
				go func() {
					defer close(done)
					h.watch(b.Context(), "", func() { close(ready) }, func(block.Event) error { return nil })
				}()
				<-ready
				defer func() { h.close(); <-done }()
			}
			b.ReportAllocs()
			for b.Loop() {
				h.publish(block.Event{Kind: block.EventStored, NS: "a"})
			}
		})
	}
}
