package tiers

import (
	"context"
	"math/rand/v2"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// eventHub tells watchers what happens to blocks. Publishing never waits: the
// events of the last while are in a ring, each watcher reads it at its own pace,
// and one that is overtaken is told how much it missed and goes on from what is
// left. The lock is held for a few stores only, since publishers hold the lock of
// a shard meanwhile, and nobody who has it takes another.
type eventHub struct {
	size        uint64 // events that the ring holds
	incarnation uint64 // random, not 0: whose numbers the events have
	mu          struct {
		sync.Mutex
		closed   bool
		seq      uint64        // of the event published last; the first has 1
		first    uint64        // lowest seq that the ring may hold
		ring     []block.Event // made for the first watcher, who may come back for what it missed
		watchers map[*eventWatcher]struct{}
		lost     int64
	}
}

// eventWatcher is one watcher's place in the stream.
type eventWatcher struct {
	cursor uint64        // seq of the last event it read or missed
	wake   chan struct{} // buffer of 1
}

// defaultEventRing is how many events are kept for slow watchers, and for those
// that come back: 8 MiB, 120 bytes an event.
const defaultEventRing = 65536

// eventBatch bounds what a watcher copies out of the ring while it holds the lock.
const eventBatch = 256

// eventStats is a snapshot of the counters.
type eventStats struct {
	Published uint64
	Watchers  int
	Lost      int64 // events that a watcher missed, summed over the watchers
}

// newEventHub makes a hub that keeps size events, defaultEventRing if 0.
func newEventHub(size int) *eventHub {
	if size <= 0 {
		size = defaultEventRing
	}
	h := &eventHub{size: uint64(size)}
	for h.incarnation == 0 {
		h.incarnation = rand.Uint64()
	}
	h.mu.first = 1
	h.mu.watchers = make(map[*eventWatcher]struct{})
	return h
}

// publish gives ev the next number and makes it known to the watchers. It does
// not block on any of them.
func (h *eventHub) publish(ev block.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.seq++
	if h.mu.ring == nil {
		h.mu.first = h.mu.seq + 1
		return
	}
	ev.Seq = h.mu.seq
	h.mu.ring[ev.Seq%h.size] = ev
	if ev.Seq >= h.mu.first+h.size {
		h.mu.first = ev.Seq - h.size + 1
	}
	for w := range h.mu.watchers {
		w.signal()
	}
}

// watch calls fn for each event of the namespace of that name, "" for all, from
// where o asks it to, until ctx ends, fn fails or the hub is closed, and returns
// why. snapshot, which is called when o asks for one and the watch does not go on
// where it was, tells of what is there. A watcher that was overtaken gets an
// EventLost whose Count is the number of events that it missed, those of other
// namespaces among them, and whose Seq is the last of these.
func (h *eventHub) watch(ctx context.Context, o block.WatchOptions, ns string, snapshot func(seq uint64) error, fn func(block.Event) error) error {
	w := &eventWatcher{wake: make(chan struct{}, 1)}
	start, missed, err := h.add(w, &o)
	if err != nil {
		return err
	}
	defer h.remove(w)
	if o.Ready != nil {
		o.Ready(start)
	}
	switch {
	case start.Resumed || o.Incarnation == 0 && !o.Snapshot:
	case o.Snapshot:
		err = snapshot(start.Seq)
	default:
		err = fn(block.Event{Seq: start.Seq, Kind: block.EventLost, NS: ns, Count: missed})
	}
	if err != nil {
		return err
	}
	batch := make([]block.Event, 0, eventBatch)
	for {
		var lost uint64
		if batch, lost, err = h.read(w, batch[:0]); err != nil {
			return err
		}
		if lost > 0 {
			at := w.cursor - uint64(len(batch))
			if err := fn(block.Event{Seq: at, Kind: block.EventLost, NS: ns, Count: int64(lost)}); err != nil {
				return err
			}
		}
		for _, ev := range batch {
			if err := ctx.Err(); err != nil {
				return err
			}
			if ns != "" && ev.NS != ns {
				continue
			}
			if err := fn(ev); err != nil {
				return err
			}
		}
		if len(batch) == eventBatch {
			continue
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// add makes w a watcher of what comes from where it asks to go on, if the ring
// holds that, else from as far back as it is of use. missed is how many events
// lie between, if that can be said.
func (h *eventHub) add(w *eventWatcher, o *block.WatchOptions) (start block.WatchStart, missed int64, err error) {
	if err := h.provide(); err != nil {
		return start, 0, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.closed {
		return start, 0, block.ErrClosed
	}
	start = block.WatchStart{Incarnation: h.incarnation, Seq: h.mu.seq}
	if o.Incarnation == h.incarnation && o.After <= h.mu.seq {
		switch {
		case o.After+1 >= h.mu.first:
			start.Seq, start.Resumed = o.After, true
		case !o.Snapshot:
			start.Seq = h.mu.first - 1
			missed = int64(start.Seq - o.After)
			h.mu.lost += missed
		}
	}
	w.cursor = start.Seq
	h.mu.watchers[w] = struct{}{}
	return start, missed, nil
}

// provide makes the ring if there is none. That takes a while, and publishers
// do not wait for it.
func (h *eventHub) provide() error {
	h.mu.Lock()
	closed, have := h.mu.closed, h.mu.ring != nil
	h.mu.Unlock()
	if closed {
		return block.ErrClosed
	}
	if have {
		return nil
	}
	ring := make([]block.Event, h.size)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.ring == nil {
		h.mu.ring = ring
	}
	return nil
}

// remove forgets a watcher. The ring stays: it may come back.
func (h *eventHub) remove(w *eventWatcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.mu.watchers, w)
}

// err is block.ErrClosed when the hub is closed.
func (h *eventHub) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.closed {
		return block.ErrClosed
	}
	return nil
}

// read moves a watcher on and appends to dst, as far as its capacity goes, what
// it has not read. lost is the number of events it was too slow for; they came
// before those in dst.
func (h *eventHub) read(w *eventWatcher, dst []block.Event) (_ []block.Event, lost uint64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.closed {
		return dst, 0, block.ErrClosed
	}
	if w.cursor+1 < h.mu.first {
		lost = h.mu.first - 1 - w.cursor
		w.cursor += lost
		h.mu.lost += int64(lost)
	}
	for w.cursor < h.mu.seq && len(dst) < cap(dst) {
		w.cursor++
		dst = append(dst, h.mu.ring[w.cursor%h.size])
	}
	return dst, lost, nil
}

// stats is a snapshot of the counters.
func (h *eventHub) stats() eventStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return eventStats{Published: h.mu.seq, Watchers: len(h.mu.watchers), Lost: h.mu.lost}
}

// close ends all watchers with block.ErrClosed. It does not wait for them:
// each runs on its caller's goroutine.
func (h *eventHub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.closed = true
	for w := range h.mu.watchers {
		w.signal()
	}
}

// signal wakes a watcher if it waits, or keeps it from waiting.
func (w *eventWatcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default: // it was woken and has not looked yet
	}
}
