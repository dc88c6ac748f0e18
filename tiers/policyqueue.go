package tiers

import (
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/index/block"
)

// policyQueue carries what happens in a tier to the goroutine that owns the
// tier's policy, in order, so that no lookup ever takes a policy's lock.
//
// Arrivals and departures are never dropped: a block that the policy does not
// know could never leave. Hints (hits, requests) are, above hintRoom and
// requestRoom, and counted. The queue of arrivals is bounded by those who
// commit: they wait above eventRoom; the store's own goroutines do not, since
// they drain it.
type policyQueue struct {
	mu struct {
		sync.Mutex
		events   []policyEvent
		requests []policyRequest
		hints    int
		drained  chan struct{} // closed, and made anew, whenever events were taken
	}
	drops atomic.Int64
}

const (
	hintRoom    = 1 << 14
	requestRoom = 1 << 8
	eventRoom   = 1 << 17
)

// policyEvent names a block; what the policy is told of it is looked up when the
// event is applied.
type policyEvent struct {
	kind eventKind
	why  block.Reason
	h    block.Handle
}

type eventKind uint8

const (
	evInsert eventKind = iota
	evRemove
	evLeaf // the child count of h passed zero: look how it is now
	evHit
)

// policyRequest is one request's path.
type policyRequest struct {
	path  []uint64
	hits  int
	class uint8
}

func (q *policyQueue) init() { q.mu.drained = make(chan struct{}) }

func (q *policyQueue) push(ev policyEvent) {
	q.mu.Lock()
	q.mu.events = append(q.mu.events, ev)
	q.mu.Unlock()
}

// hint adds hits, which may be lost.
func (q *policyQueue) hint(ev []policyEvent) {
	q.mu.Lock()
	if q.mu.hints+len(ev) > hintRoom {
		q.mu.Unlock()
		q.drops.Add(int64(len(ev)))
		return
	}
	q.mu.hints += len(ev)
	q.mu.events = append(q.mu.events, ev...)
	q.mu.Unlock()
}

// request adds a request, which may be lost.
func (q *policyQueue) request(r policyRequest) {
	q.mu.Lock()
	if len(q.mu.requests) >= requestRoom {
		q.mu.Unlock()
		q.drops.Add(1)
		return
	}
	q.mu.requests = append(q.mu.requests, r)
	q.mu.Unlock()
}

// full returns a channel to wait on when there are too many events, else nil.
func (q *policyQueue) full() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.mu.events) < eventRoom {
		return nil
	}
	return q.mu.drained
}

// take empties the queue. spare is what the last take returned, used again.
func (q *policyQueue) take(spare []policyEvent) ([]policyEvent, []policyRequest) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ev, reqs := q.mu.events, q.mu.requests
	if len(ev) == 0 && len(reqs) == 0 {
		return spare[:0], nil
	}
	q.mu.events, q.mu.requests = spare[:0], nil
	q.mu.hints = 0
	close(q.mu.drained)
	q.mu.drained = make(chan struct{})
	return ev, reqs
}
