package session

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// maxBatch is how many events one message tells of, where it has room for them, and
// how many may wait for a client that is slow to take them: behind that the store counts
// them as lost.
const maxBatch = 1024

// batchOf is how many events a message of so many bytes has room for, at most maxBatch.
func batchOf(message int) int {
	const start, most = 1 + 8 + 8 + 1 + 4, eventBytes + 2*block.HashBytes + maxReason
	return min(maxBatch, (message-start)/most)
}

// watch answers CodeWatch.
func (s *session) watch(id uint64, p []byte) error {
	var m WatchMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	var err error
	if m.NS != 0 {
		_, err = s.namespace(m.NS, m.Tag, access.Read)
	} else {
		err = s.identity.CheckAll(access.Read, "a watch of all")
	}
	if err != nil {
		return s.fail(id, err)
	}
	c, err := s.flight.open(s.ctx, id, 0, true, s.calls)
	return s.spawn(id, c, err, func(c *call) error {
		b := &batch{most: batchOf(s.message), wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
		ctx, cancel := context.WithCancelCause(c.ctx)
		var sender sync.WaitGroup
		sender.Go(func() {
			for b.wait() {
				if err := s.send(s.patient(c), id, CodeEvents, b.take()); err != nil {
					cancel(err)
					return
				}
			}
		})
		o := block.WatchOptions{NS: m.NS, Incarnation: m.Incarnation, After: m.After, Snapshot: m.Snapshot, Ready: b.begin}
		err := s.srv.store.Watch(ctx, o, func(e block.Event) error { return b.add(ctx, e) })
		b.end()
		sender.Wait()
		cancel(nil)
		if cause := context.Cause(ctx); errors.Is(err, context.Canceled) && cause != nil {
			err = cause
		}
		switch {
		case s.flight.drains():
			err = fmt.Errorf("watch: %w: the server is closing", block.ErrClosed)
		case err == nil:
			err = context.Canceled
		}
		return err
	})
}

// batch is the events that wait to be sent.
type batch struct {
	most int           // events
	wake chan struct{} // there is something, or the end
	room chan struct{} // something was taken
	mu   struct {
		sync.Mutex
		next  EventsMessage
		ended bool
	}
	out []byte // of the sender
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (b *batch) begin(start block.WatchStart) {
	b.mu.Lock()
	b.mu.next.Start = &start
	b.mu.Unlock()
	poke(b.wake)
}

// add waits for room.
func (b *batch) add(ctx context.Context, e block.Event) error {
	for {
		b.mu.Lock()
		// The first message tells of no events.
		ok := len(b.mu.next.Events) < b.most && b.mu.next.Start == nil
		if ok {
			b.mu.next.Events = append(b.mu.next.Events, e)
		}
		b.mu.Unlock()
		if ok {
			poke(b.wake)
			return nil
		}
		select {
		case <-b.room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (b *batch) end() {
	b.mu.Lock()
	b.mu.ended = true
	b.mu.Unlock()
	poke(b.wake)
}

// wait waits for something to send; false is the end.
func (b *batch) wait() bool {
	for {
		b.mu.Lock()
		ready := b.mu.next.Start != nil || len(b.mu.next.Events) > 0
		ended := b.mu.ended
		b.mu.Unlock()
		if ready || ended {
			return ready
		}
		<-b.wake
	}
}

// take is a message of all that waits. It is valid until the next call.
func (b *batch) take() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.out = b.mu.next.Append(b.out[:0])
	b.mu.next = EventsMessage{Events: b.mu.next.Events[:0]}
	poke(b.room)
	return b.out
}
