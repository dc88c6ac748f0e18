package frame

import (
	"context"
	"sync"
)

// turn is a lock that is had in the order in which it was asked for, so that whoever
// gives it up between two groups of frames lets everybody else send who was waiting.
// Waiting can be given up.
type turn struct {
	mu struct {
		sync.Mutex
		held        bool
		first, last *waiter
		spare       *waiter
	}
}

type waiter struct {
	granted chan struct{} // holds one: whoever gives does not wait
	next    *waiter
}

// take gets the turn, or returns false when ctx or the connection ends first.
func (t *turn) take(ctx context.Context, done <-chan struct{}) bool {
	t.mu.Lock()
	if !t.mu.held {
		t.mu.held = true
		t.mu.Unlock()
		return true
	}
	w := t.enqueue()
	t.mu.Unlock()
	return t.wait(w, ctx, done)
}

// give gives the turn to the next.
func (t *turn) give() {
	t.mu.Lock()
	t.handOn()
	t.mu.Unlock()
}

// wanted reports whether somebody waits for the turn.
func (t *turn) wanted() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.first != nil
}

// pass lets those go first who are waiting now. When it returns false the turn is
// lost.
func (t *turn) pass(ctx context.Context, done <-chan struct{}) bool {
	t.mu.Lock()
	if t.mu.first == nil {
		t.mu.Unlock()
		return true
	}
	w := t.enqueue()
	t.handOn()
	t.mu.Unlock()
	return t.wait(w, ctx, done)
}

func (t *turn) wait(w *waiter, ctx context.Context, done <-chan struct{}) bool {
	got := false
	select {
	case <-w.granted:
		got = true
	case <-ctx.Done():
	case <-done:
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !got && !t.remove(w) {
		<-w.granted // meanwhile
		t.handOn()
	}
	w.next, t.mu.spare = t.mu.spare, w
	return got
}

// enqueue, remove and handOn need t.mu.
func (t *turn) enqueue() *waiter {
	w := t.mu.spare
	if w == nil {
		w = &waiter{granted: make(chan struct{}, 1)}
	} else {
		t.mu.spare, w.next = w.next, nil
	}
	if t.mu.last == nil {
		t.mu.first = w
	} else {
		t.mu.last.next = w
	}
	t.mu.last = w
	return w
}

func (t *turn) remove(w *waiter) bool {
	var before *waiter
	for at := t.mu.first; at != nil; before, at = at, at.next {
		if at != w {
			continue
		}
		if before == nil {
			t.mu.first = w.next
		} else {
			before.next = w.next
		}
		if t.mu.last == w {
			t.mu.last = before
		}
		return true
	}
	return false
}

func (t *turn) handOn() {
	w := t.mu.first
	if w == nil {
		t.mu.held = false
		return
	}
	t.mu.first = w.next
	if w.next == nil {
		t.mu.last = nil
	}
	w.granted <- struct{}{}
}
