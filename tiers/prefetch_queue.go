package tiers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// prefetchQueue holds the blocks that somebody wants brought up and nobody has
// begun with. Each request's blocks come out in its order, root first, since a
// block is of use only with all before it; requests take turns, so that a long
// one does not hold up the others.
//
// It is bounded in blocks and in bytes, both counted until a block is done. What
// does not fit is dropped, from the end of the request, and counted: fetching
// ahead is never worth a wait. It is safe for concurrent use.
type prefetchQueue struct {
	maxItems int
	maxBytes int64
	wake     chan struct{} // buffer of 1: there may be work
	// Of the blocks that were brought up, those that were read then, and those that left
	// G2 without.
	useful, wasted atomic.Int64
	mu             struct {
		sync.Mutex
		closed bool
		live   map[*prefetchRequest]struct{} // that have not ended
		byID   map[string]*prefetchRequest   // those of them that have an id
		levels [block.MaxPriority + 1]prefetchLevel
		items  int
		bytes  int64
		stats  block.PrefetchStats
	}
}

// prefetchLevel is what the queue holds of one priority and nobody has begun with.
type prefetchLevel struct {
	turns []*prefetchRequest // those with blocks in the queue, next turn first
	items int
	bytes int64
}

// prefetchItem is one block of a request.
type prefetchItem struct {
	key   block.Key
	bytes int64 // that bringing it up takes
	index int   // in the request
	// ahead, of a block that no local tier has, are those of the request in G4 behind it.
	ahead []farBlock

	req *prefetchRequest
}

// prefetchRequest is the blocks that were asked for together. Results may come
// in any order; wait gives them in the order of the request.
type prefetchRequest struct {
	block.PrefetchOptions
	q      *prefetchQueue
	ctx    context.Context // of the work on its blocks; ends with the request
	cancel context.CancelFunc
	came   chan struct{} // buffer of 1: results or end may have changed

	// The rest is under the lock of q.
	todo   []prefetchItem // blocks in the queue
	stale  *time.Timer    // drops them; nil: they are of use at any time
	ended  bool
	result []prefetchOutcome // per block
}

// prefetchOutcome is how one block ended; sameAs is the place of the item whose
// result counts, which is another's when a request names a block twice.
type prefetchOutcome struct {
	done   bool
	sameAs int
	block.Progress
}

// newPrefetchQueue makes a queue for at most maxItems blocks of at most maxBytes
// altogether.
func newPrefetchQueue(maxItems int, maxBytes int64) *prefetchQueue {
	q := &prefetchQueue{maxItems: maxItems, maxBytes: maxBytes, wake: make(chan struct{}, 1)}
	q.mu.live = make(map[*prefetchRequest]struct{})
	q.mu.byID = make(map[string]*prefetchRequest)
	return q
}

// add queues a request of n blocks, of which items, in ascending order of their
// index, need to be brought up; the caller knows about the others already. ctx
// lends its values to the work, not its end. A block that items name twice is
// queued once. It fails with block.ErrInvalid when the id, unless "", is in use,
// and with block.ErrClosed after close. The caller ends the request.
func (q *prefetchQueue) add(ctx context.Context, o block.PrefetchOptions, n int, items []prefetchItem) (*prefetchRequest, error) {
	r := &prefetchRequest{PrefetchOptions: o, q: q, came: make(chan struct{}, 1), result: make([]prefetchOutcome, n)}
	first := make(map[block.Key]int, len(items))
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.mu.closed:
		return nil, block.ErrClosed
	case o.ID != "" && q.mu.byID[o.ID] != nil:
		return nil, fmt.Errorf("%w: prefetch: request id %q is in use", block.ErrInvalid, o.ID)
	}
	for i := range r.result {
		r.result[i].sameAs = i
	}
	full := false
	for _, it := range items {
		if at, twice := first[it.key]; twice {
			r.result[it.index].sameAs = at
			continue
		}
		first[it.key] = it.index
		// Once one did not fit, later ones are of no use either.
		if full = full || !q.makeRoom(r.Priority, it.bytes); full {
			q.mu.stats.Dropped++
			r.set(it.index, block.MissNoRoom, block.NoTier)
			continue
		}
		q.push(r, it)
	}
	q.enter(ctx, r)
	return r, nil
}

// makeRoom reports whether one more block of n bytes may come, of that priority. For it
// blocks of lower ones are displaced; none, when that would not do.
func (q *prefetchQueue) makeRoom(priority uint8, n int64) bool {
	items, bytes := q.mu.items, q.mu.bytes
	for _, l := range q.mu.levels[:priority] {
		items, bytes = items-l.items, bytes-l.bytes
	}
	if !q.fits(items, bytes, n) {
		return false
	}
	for p := 0; !q.fits(q.mu.items, q.mu.bytes, n); {
		l := &q.mu.levels[p]
		if len(l.turns) == 0 {
			p++
			continue
		}
		// The one that waits longest for its turn loses its end, and then the rest: a few
		// requests that are served as a whole are worth more than parts of all.
		r := l.turns[len(l.turns)-1]
		last := len(r.todo) - 1
		q.drop(r, last, block.MissNoRoom, &q.mu.stats.Displaced)
	}
	return true
}

// fits reports whether one more block of n bytes has room beside so many. A block larger
// than the bound may come alone.
func (q *prefetchQueue) fits(items int, bytes, n int64) bool {
	return items == 0 || items < q.maxItems && n <= q.maxBytes-bytes
}

// drop takes the blocks of a request from number from on out of the queue and settles
// them with reason, counted in count.
func (q *prefetchQueue) drop(r *prefetchRequest, from int, reason block.MissReason, count *int64) {
	if len(r.todo) == 0 {
		return
	}
	for _, it := range r.todo[from:] {
		q.leave(it)
		q.levelled(it, -1)
		r.set(it.index, reason, block.NoTier)
	}
	*count += int64(len(r.todo) - from)
	if r.todo = r.todo[:from]; from > 0 {
		return
	}
	l := &q.mu.levels[r.Priority]
	if i := slices.Index(l.turns, r); i >= 0 {
		l.turns = slices.Delete(l.turns, i, i+1)
	}
}

// levelled counts a block in (1) or out (-1) of those that nobody has begun with.
func (q *prefetchQueue) levelled(it prefetchItem, n int) {
	l := &q.mu.levels[it.req.Priority]
	l.items += n
	l.bytes += int64(n) * it.bytes
}

func (q *prefetchQueue) push(r *prefetchRequest, it prefetchItem) {
	it.req = r
	r.todo = append(r.todo, it)
	q.levelled(it, 1)
	q.mu.items++
	q.mu.bytes += it.bytes
	q.mu.stats.Queued++
}

// enter makes a request known and gives it its turns.
func (q *prefetchQueue) enter(ctx context.Context, r *prefetchRequest) {
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	q.mu.live[r] = struct{}{}
	if r.ID != "" {
		q.mu.byID[r.ID] = r
	}
	if len(r.todo) == 0 {
		return
	}
	l := &q.mu.levels[r.Priority]
	l.turns = append(l.turns, r)
	if r.Within > 0 {
		r.stale = time.AfterFunc(r.Within, r.dropStale)
	}
	q.signal()
}

// next waits for a block to bring up. The caller ends with done. It fails with
// ctx's error, and with block.ErrClosed after close.
func (q *prefetchQueue) next(ctx context.Context) (prefetchItem, error) {
	for {
		it, ok, err := q.take()
		if ok || err != nil {
			return it, err
		}
		select {
		case <-q.wake:
		case <-ctx.Done():
			return prefetchItem{}, ctx.Err()
		}
	}
}

func (q *prefetchQueue) take() (it prefetchItem, ok bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.closed {
		q.signal() // the next worker that waits
		return it, false, block.ErrClosed
	}
	for p := len(q.mu.levels) - 1; p >= 0; p-- {
		if l := &q.mu.levels[p]; len(l.turns) > 0 {
			r := l.turns[0]
			l.turns = l.turns[1:]
			it, r.todo = r.todo[0], r.todo[1:]
			q.levelled(it, -1)
			if len(r.todo) > 0 {
				l.turns = append(l.turns, r)
			}
			q.signal() // there may be more for others
			return it, true, nil
		}
	}
	return it, false, nil
}

// done tells how the work on a block ended: reason is block.Hit when it is in
// tier now. The result of a request that was cancelled is dropped.
func (q *prefetchQueue) done(it prefetchItem, reason block.MissReason, tier block.TierID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.leave(it)
	r := it.req
	if r.ended {
		q.mu.stats.Cancelled++
		return
	}
	q.mu.stats.Done++
	r.set(it.index, reason, tier)
}

// leave counts a block out.
func (q *prefetchQueue) leave(it prefetchItem) {
	q.mu.items--
	q.mu.bytes -= it.bytes
}

// cancel ends the request of that id: its blocks leave the queue, the work on
// others is cancelled, and who waits for it is told. It fails with
// block.ErrNotFound when there is no such request.
func (q *prefetchQueue) cancel(id string) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := q.mu.byID[id]
	if r == nil {
		return fmt.Errorf("cancel prefetch %q: %w", id, block.ErrNotFound)
	}
	r.endLocked(&q.mu.stats.Cancelled)
	return nil
}

// stats is a snapshot of the counters.
func (q *prefetchQueue) stats() block.PrefetchStats {
	q.mu.Lock()
	defer q.mu.Unlock()
	st := q.mu.stats
	st.Useful, st.Wasted = q.useful.Load(), q.wasted.Load()
	return st
}

// close ends all requests and makes next fail. It is safe to call twice.
func (q *prefetchQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.closed = true
	for r := range q.mu.live {
		r.endLocked(&q.mu.stats.Cancelled)
	}
	q.signal()
}

func (q *prefetchQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default: // a worker is on its way
	}
}

// context is that of the work on the blocks: it ends with the request.
func (it prefetchItem) context() context.Context { return it.req.ctx }

// know records what the caller of add found out about a block by itself.
func (r *prefetchRequest) know(i int, reason block.MissReason, tier block.TierID) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	r.set(i, reason, tier)
}

// wait returns how block i of the request ended. It fails with ctx's error, and
// with context.Canceled when the request was cancelled, whatever is known by then.
func (r *prefetchRequest) wait(ctx context.Context, i int) (block.Progress, error) {
	for {
		p, done, ended := r.outcome(i)
		if ended {
			return p, fmt.Errorf("prefetch %q: %w", r.ID, context.Canceled)
		}
		if done {
			return p, nil
		}
		select {
		case <-r.came:
		case <-ctx.Done():
			return p, ctx.Err()
		}
	}
}

func (r *prefetchRequest) outcome(i int) (p block.Progress, done, ended bool) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	o := r.result[r.result[i].sameAs]
	p = o.Progress
	p.Index = i
	return p, o.done, r.ended
}

// dropStale drops what nobody has begun with, since it came too late for its use. What
// somebody has begun with is nearly there, and stays.
func (r *prefetchRequest) dropStale() {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if !r.ended {
		r.q.drop(r, 0, block.MissDeadline, &r.q.mu.stats.Stale)
	}
}

// end ends the request: what is still queued leaves, late if the caller's time was up.
// It is safe to call twice.
func (r *prefetchRequest) end(late bool) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if late {
		r.endLocked(&r.q.mu.stats.Stale)
	} else {
		r.endLocked(&r.q.mu.stats.Cancelled)
	}
}

// endLocked ends the request; count is where its blocks that are still queued go.
func (r *prefetchRequest) endLocked(count *int64) {
	if r.ended {
		return
	}
	r.ended = true
	q := r.q
	delete(q.mu.live, r)
	if r.ID != "" {
		delete(q.mu.byID, r.ID)
	}
	if r.stale != nil {
		r.stale.Stop()
	}
	q.drop(r, 0, block.MissDeadline, count)
	r.cancel()
	r.signal()
}

func (r *prefetchRequest) set(i int, reason block.MissReason, tier block.TierID) {
	r.result[i].done = true
	r.result[i].Progress = block.Progress{Index: i, Reason: reason, Tier: tier}
	r.signal()
}

func (r *prefetchRequest) signal() {
	select {
	case r.came <- struct{}{}:
	default: // the caller has not looked yet
	}
}
