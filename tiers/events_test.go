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
	start  block.WatchStart
}

func startWatch(t *testing.T, h *eventHub, ns string) *eventTester {
	t.Helper()
	return startWatchWith(t, h, ns, block.WatchOptions{})
}

// startWatchWith starts a watch whose snapshot is nothing but its end.
func startWatchWith(t *testing.T, h *eventHub, ns string, o block.WatchOptions) *eventTester {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &eventTester{events: make(chan block.Event), ended: make(chan error, 1), cancel: cancel}
	ready := make(chan struct{})
	o.Ready = func(start block.WatchStart) {
		w.start = start
		close(ready)
	}
	snapshot := func(seq uint64) error {
		select {
		case w.events <- block.Event{Kind: block.EventSnapshot, Seq: seq}:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	go func() {
		w.ended <- h.watch(ctx, o, ns, snapshot, func(ev block.Event) error {
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
		if h.stats().Watchers != 0 {
			t.Error("a watcher that has ended is counted")
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

// TestEventsResume: a watcher that comes back is told what it has missed, as far
// as the ring goes.
func TestEventsResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newEventHub(8)
		publishN(h, "a", 3)
		own, other := h.incarnation, h.incarnation+1
		first := startWatchWith(t, h, "", block.WatchOptions{Incarnation: own, After: 3}) // nobody has watched yet
		first.cancel()
		<-first.ended
		publishN(h, "a", 10) // 4 to 13, of which 6 to 13 are there
		for _, c := range []struct {
			name    string
			o       block.WatchOptions
			resumed bool
			seq     uint64
			tell    block.EventKind // first, unless resumed
			count   int64
		}{
			{"the last", block.WatchOptions{Incarnation: own, After: 13}, true, 13, 0, 0},
			{"some", block.WatchOptions{Incarnation: own, After: 9, Snapshot: true}, true, 9, 0, 0},
			{"all that is there", block.WatchOptions{Incarnation: own, After: 5}, true, 5, 0, 0},
			{"one too many", block.WatchOptions{Incarnation: own, After: 4}, false, 5, block.EventLost, 1},
			{"one too many, snapshot", block.WatchOptions{Incarnation: own, After: 4, Snapshot: true}, false, 13, block.EventSnapshot, 0},
			{"from the beginning", block.WatchOptions{Incarnation: own}, false, 5, block.EventLost, 5},
			{"the future", block.WatchOptions{Incarnation: own, After: 14}, false, 13, block.EventLost, 0},
			{"the end of numbers", block.WatchOptions{Incarnation: own, After: 1<<64 - 1}, false, 13, block.EventLost, 0},
			{"another incarnation", block.WatchOptions{Incarnation: other, After: 9}, false, 13, block.EventLost, 0},
			{"another incarnation, snapshot", block.WatchOptions{Incarnation: other, After: 9, Snapshot: true}, false, 13, block.EventSnapshot, 0},
			{"a snapshot", block.WatchOptions{Snapshot: true}, false, 13, block.EventSnapshot, 0},
		} {
			lost := h.stats().Lost
			w := startWatchWith(t, h, "", c.o)
			if want := (block.WatchStart{Incarnation: own, Seq: c.seq, Resumed: c.resumed}); w.start != want {
				t.Errorf("%s: begins with %+v, want %+v", c.name, w.start, want)
			}
			if !c.resumed {
				if ev := <-w.events; ev.Kind != c.tell || ev.Seq != c.seq || ev.Count != c.count {
					t.Errorf("%s: event %+v, want %v, %d up to %d", c.name, ev, c.tell, c.count, c.seq)
				}
			}
			w.want(t, c.seq+1, int(13-c.seq))
			w.wantNone(t)
			if got := h.stats().Lost - lost; got != c.count {
				t.Errorf("%s: %d events are counted as lost, want %d", c.name, got, c.count)
			}
			w.cancel()
			<-w.ended
		}
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
		go func() {
			failed <- h.watch(t.Context(), block.WatchOptions{}, "", nil, func(block.Event) error { return bad })
		}()
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
		if err := h.watch(t.Context(), block.WatchOptions{}, "", nil, nil); !errors.Is(err, block.ErrClosed) {
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
			o := block.WatchOptions{Ready: func(block.WatchStart) { ready.Done() }}
			err := h.watch(t.Context(), o, "", nil, func(ev block.Event) error {
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
					o := block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}
					h.watch(b.Context(), o, "", nil, func(block.Event) error { return nil })
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
