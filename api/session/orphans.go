package session

import (
	"context"
	"log/slog"
	"slices"
	"sync"
)

// orphans are the places in shared memory whose session has ended while its process
// can still write them. They come back when the process has ended, or when another
// session of it gives them back: nobody else knows their numbers.
type orphans struct {
	store Store
	log   *slog.Logger
	ctx   context.Context // ends when nobody waits for them any more
	work  sync.WaitGroup
	mu    struct {
		sync.Mutex
		of map[uint64]*orphaned
	}
}

// orphaned is what one session left.
type orphaned struct {
	left   int
	cancel context.CancelFunc // of the wait for its process
}

// add takes places over, and the process with them.
func (o *orphans) add(p *process, ids []uint64) {
	ctx, cancel := context.WithCancel(o.ctx)
	from := &orphaned{left: len(ids), cancel: cancel}
	o.mu.Lock()
	for _, id := range ids {
		o.mu.of[id] = from
	}
	o.mu.Unlock()
	o.work.Go(func() {
		defer cancel()
		defer p.close()
		switch err := p.wait(ctx); {
		case err == nil:
			o.store.AbortGrants(o.take(from, ids))
		case ctx.Err() == nil:
			o.log.Warn("places of a client are lost until the store is opened anew", "places", len(ids), "err", err)
		}
	})
}

// take takes out what is left of ids.
func (o *orphans) take(from *orphaned, ids []uint64) (left []uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, id := range ids {
		if o.mu.of[id] == from {
			delete(o.mu.of, id)
			left = append(left, id)
		}
	}
	return left
}

// dropPlace takes out a place in shared memory that another session had, to be given
// back. The end of that session may not have been seen yet. It is false when there is
// none.
func (s *Server) dropPlace(id uint64) bool {
	var all []*session
	s.mu.Lock()
	for _, sess := range s.mu.sessions {
		if sess.process != nil {
			all = append(all, sess)
		}
	}
	s.mu.Unlock()
	// In this order: a session's end makes orphans of its places.
	return slices.ContainsFunc(all, func(sess *session) bool { return sess.places.drop(id) }) || s.orphans.drop(id)
}

// drop takes one out, to be given back. It is false when there is none.
func (o *orphans) drop(id uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	from := o.mu.of[id]
	if from == nil {
		return false
	}
	delete(o.mu.of, id)
	if from.left--; from.left == 0 {
		from.cancel()
	}
	return true
}

func (o *orphans) count() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return int64(len(o.mu.of))
}
