package object

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// Kind is a kind of request, as services bill them.
type Kind uint8

// The kinds of requests.
const (
	KindCheck Kind = iota
	KindHead
	KindGet
	KindPut
	KindBegin
	KindPart
	KindComplete
	KindAbort
	KindDelete
	KindList
	kinds
)

var kindNames = [kinds]string{"check", "head", "get", "put", "begin", "part", "complete", "abort", "delete", "list"}

// String names the kind.
func (k Kind) String() string {
	if k < kinds {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

const (
	// maxTries bounds the tries of a request that is not throttled.
	maxTries = 4
	// A request that failed is made again after a random while up to the first of these,
	// then twice that, up to the second.
	firstBackoff = 50 * time.Millisecond
	maxBackoff   = time.Second
	// giveUp is how long a request of a caller without a deadline is throttled before it
	// fails.
	giveUp = time.Minute
	// tokenWait is how long a throttled request waits for the budget before it looks again.
	tokenWait = 500 * time.Millisecond
	// minRate is how many bytes a second a try must move, beside Options.TryTimeout.
	minRate = 1 << 20
)

// request is one request of the service for call.
type request struct {
	kind  Kind
	key   string
	bytes int64 // payload, either way
}

// call makes a request, again where that is of use, and counts. doubt says whether a try
// that failed may have reached the service, so that a later answer is about that one.
func (b *Backend) call(ctx context.Context, r request, try func(ctx context.Context) error) (doubt bool, err error) {
	began := time.Now()
	for tries := 1; ; tries++ {
		round, aerr := b.limit.acquire(ctx)
		if aerr != nil {
			b.count.canceled.Add(1)
			if err == nil { // else it also says why this took so long
				err = aerr
			}
			return doubt, b.canceled(ctx, r, err)
		}
		b.count.requests[r.kind].Add(1)
		if tries > 1 {
			b.count.retries.Add(1)
		}
		limit := b.opt.TryTimeout + time.Duration(float64(r.bytes)/minRate*float64(time.Second))
		tctx, cancel := context.WithTimeout(ctx, limit)
		err = try(tctx)
		late := tctx.Err() != nil
		cancel()
		if err == nil {
			b.limit.release(round, served, 0)
			b.budget.earn()
			return doubt, nil
		}
		if ctx.Err() != nil {
			b.limit.release(round, unknown, 0)
			b.count.canceled.Add(1)
			return true, b.canceled(ctx, r, err)
		}
		e := b.failure(r, err)
		if late && e.Class != ClassCorrupt {
			e.Class = ClassTimeout
			e.Err = fmt.Errorf("a try took more than %v: %w", limit.Round(time.Millisecond), err)
		}
		err = e
		switch {
		case e.Class == ClassThrottled:
			b.limit.release(round, throttled, e.After)
			b.count.throttled.Add(1)
		case e.Class.Retryable():
			b.limit.release(round, unknown, 0)
			b.count.failed.Add(1)
		default:
			b.limit.release(round, served, 0) // an answer, if not the one hoped for
			b.count.refused.Add(1)
		}
		if !e.Class.Retryable() {
			return doubt, err
		}
		if e.Class != ClassThrottled {
			doubt = true
		}
		if !b.again(ctx, e.Class, tries, began) {
			return doubt, err
		}
	}
}

// again waits until a request that failed may be made again. It says no when that is of no
// use, or when the budget is spent. Its ctx may end: then acquire sees that.
func (b *Backend) again(ctx context.Context, class Class, tries int, began time.Time) bool {
	if class != ClassThrottled {
		if tries >= maxTries || !b.budget.spend() {
			return false
		}
		sleep(ctx, rand.N(min(firstBackoff<<(tries-1), maxBackoff)))
		return true
	}
	for !b.budget.spend() { // the limiter does the waiting as long as there is a budget
		if time.Since(began) > giveUp {
			return false
		}
		if sleep(ctx, tokenWait/2+rand.N(tokenWait)); ctx.Err() != nil {
			return true
		}
	}
	return time.Since(began) <= giveUp
}

// sleep waits, until ctx ends at the most.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// failure makes an *Error of what a client returned.
func (b *Backend) failure(r request, err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		c := *e
		return &c
	}
	return &Error{Op: r.kind.String(), Where: b.client.String(), Key: r.key, Err: err}
}

// canceled is the failure of a request whose ctx has ended.
func (b *Backend) canceled(ctx context.Context, r request, err error) error {
	return &Error{
		Op: r.kind.String(), Where: b.client.String(), Key: r.key, Class: ClassCanceled,
		Err: fmt.Errorf("%w: %w", context.Cause(ctx), err),
	}
}

// counters is what Stats reports, as it is counted.
type counters struct {
	requests                                      [kinds]atomic.Uint64
	retries, throttled, failed, refused, canceled atomic.Uint64
	in, out, verified, landed, aborts             atomic.Uint64
}

// Stats is what a backend has done since it was made.
type Stats struct {
	Requests  [kinds]uint64 // by Kind, tries that failed included
	Retries   uint64        // of these, the ones that were made again
	Throttled uint64        // tries that the service refused because of its load
	Failed    uint64        // tries that failed otherwise, and may succeed when they are made again
	Refused   uint64        // requests that the service answered by no: what is missing, forbidden or there already
	Canceled  uint64        // requests whose context ended
	BytesIn   uint64        // payload of gets that arrived
	BytesOut  uint64        // payload of puts and parts that were stored
	Verified  uint64        // of BytesIn, what was compared with a checksum of the service
	Landed    uint64        // writes whose answer was lost, found to be done
	AbortsDue uint64        // uploads given up without an answer to Abort: their parts may remain

	Limit    int // requests that may run at once, now
	InFlight int
	Waiting  int    // requests in the queue of the limit
	Shrunk   uint64 // times that the limit was halved
	Waits    uint64 // requests that had to wait for the limit
	Budget   float64
}

// Total is the number of requests of all kinds.
func (s *Stats) Total() uint64 {
	var n uint64
	for _, r := range s.Requests {
		n += r
	}
	return n
}

// Stats gives a snapshot.
func (b *Backend) Stats() Stats {
	c := &b.count
	s := Stats{
		Retries: c.retries.Load(), Throttled: c.throttled.Load(), Failed: c.failed.Load(), Refused: c.refused.Load(), Canceled: c.canceled.Load(),
		BytesIn: c.in.Load(), BytesOut: c.out.Load(), Verified: c.verified.Load(), Landed: c.landed.Load(), AbortsDue: c.aborts.Load(),
	}
	for k := range s.Requests {
		s.Requests[k] = c.requests[k].Load()
	}
	l := &b.limit.mu
	l.Lock()
	s.Limit, s.InFlight, s.Waiting, s.Shrunk, s.Waits = int(l.limit), l.inUse, len(l.waiting), l.shrunk, l.waits
	if l.probing {
		s.Limit = 1
	}
	l.Unlock()
	b.budget.mu.Lock()
	s.Budget = b.budget.mu.tokens
	b.budget.mu.Unlock()
	return s
}
