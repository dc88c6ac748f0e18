package session

import (
	"context"
	"sync"
)

// watchQueue is how many events wait for a slow watcher before it loses some.
const watchQueue = 16384

// queue carries what the reader has received to the goroutine of a caller.
type queue[T any] struct {
	mu struct {
		sync.Mutex
		items, spare []T
		had          int   // in all
		lost         int64 // for which there was no room
		last         T     // of those
	}
	most int
	some chan struct{} // one token: there is something to take
}

func newQueue[T any](most int) *queue[T] { return &queue[T]{most: most, some: make(chan struct{}, 1)} }

// put adds items, or counts those for which there is no room, and returns how many
// came before.
func (q *queue[T]) put(items []T) (had int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	had = q.mu.had
	q.mu.had += len(items)
	room := 0
	if q.mu.lost == 0 { // what comes behind a gap waits until the gap was told of
		room = max(0, min(len(items), q.most-len(q.mu.items)))
	}
	q.mu.items = append(q.mu.items, items[:room]...)
	if room < len(items) {
		q.mu.lost += int64(len(items) - room)
		q.mu.last = items[len(items)-1]
	}
	select {
	case q.some <- struct{}{}:
	default:
	}
	return had
}

// take gives what is there, valid until the next take. The items that were lost come
// behind it; last is the last one of them.
func (q *queue[T]) take() (items []T, lost int64, last T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	items, lost, last = q.mu.items, q.mu.lost, q.mu.last
	q.mu.items, q.mu.spare, q.mu.lost = q.mu.spare[:0], items, 0
	return items, lost, last
}

// follow is a call with several replies. The reader gives them to stream, which says
// whether more follow and puts a token into some; deliver then hands them to the
// caller, on its goroutine.
func (c *Client) follow(ctx context.Context, code Code, m message, want Code, stream func(p []byte) (bool, error), some <-chan struct{}, deliver func() error) error {
	k, err := c.begin(ctx, 0)
	if err != nil {
		return err
	}
	defer c.release(k)
	k.want, k.stream = want, stream
	if err := c.enter(k); err != nil {
		return err
	}
	if err := c.send(ctx, k, code, m); err != nil {
		return c.wait(ctx, k, err)
	}
	for over := false; ; {
		select {
		case <-some:
		case <-k.done:
			over = true
		case <-ctx.Done():
			return c.wait(ctx, k, nil)
		}
		if err := deliver(); err != nil {
			if !over && !c.leave(k) {
				c.later.cancel(k.id)
			}
			return err
		}
		if over {
			return k.err
		}
	}
}
