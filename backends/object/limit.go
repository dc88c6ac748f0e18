package object

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// startLimit is how many requests run at once before the service has said anything.
	startLimit = 8
	// A service that throttles is left alone for a while between these two.
	minPause = 50 * time.Millisecond
	maxPause = 5 * time.Second
	// maxAfter bounds what a service may ask for, so that a wrong header is no outage.
	maxAfter = 30 * time.Second
)

// limiter says how many requests run at once. It grows by one for each round of requests
// that are served and is halved by a round that is throttled. After that nothing starts
// until a pause is over, and then one request at a time, until one was served: requests
// that the service would refuse are not made.
type limiter struct {
	max int
	mu  struct {
		sync.Mutex
		limit   float64
		inUse   int
		waiting []chan struct{} // in order of arrival; closed when it is their turn
		round   uint64          // grows with each halving
		pause   time.Duration   // the last one; 0 while all is well
		resume  time.Time       // nothing starts before
		probing bool            // only one request at a time
		shrunk  uint64          // halvings so far
		waits   uint64          // requests that had to wait
	}
}

func newLimiter(most int) *limiter {
	l := &limiter{max: most}
	l.mu.limit = float64(min(startLimit, most))
	return l
}

// outcome is what a request says about the service's load.
type outcome uint8

const (
	unknown outcome = iota // it failed for another reason
	served
	throttled
)

// acquire waits until a request may start and says in which round it does. The error is
// ctx's. The queue is as long as there are goroutines that call: a transfer has at most as
// many as max.
func (l *limiter) acquire(ctx context.Context) (round uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	ready := make(chan struct{})
	l.mu.Lock()
	l.mu.waiting = append(l.mu.waiting, ready)
	l.grant()
	select {
	case <-ready:
	default:
		l.mu.waits++
	}
	for {
		pause := time.Until(l.mu.resume)
		l.mu.Unlock()
		var timer *time.Timer
		var over <-chan time.Time
		if pause > 0 {
			timer = time.NewTimer(pause)
			over = timer.C
		}
		select {
		case <-ready:
		case <-ctx.Done():
			err = ctx.Err()
		case <-over:
		}
		if timer != nil {
			timer.Stop()
		}
		l.mu.Lock()
		if err != nil {
			l.leave(ready)
			l.mu.Unlock()
			return 0, err
		}
		l.grant()
		select {
		case <-ready:
			round = l.mu.round
			l.mu.Unlock()
			return round, nil
		default:
		}
	}
}

// leave takes a waiter that gives up out of the queue, or gives back what it was just
// granted. It needs l.mu.
func (l *limiter) leave(ready chan struct{}) {
	for i, w := range l.mu.waiting {
		if w == ready {
			l.mu.waiting = append(l.mu.waiting[:i], l.mu.waiting[i+1:]...)
			return
		}
	}
	l.mu.inUse--
	l.grant()
}

// grant lets the first in the queue start, as many as may. It needs l.mu.
func (l *limiter) grant() {
	room := int(l.mu.limit)
	if l.mu.probing {
		room = 1
	}
	for len(l.mu.waiting) > 0 && l.mu.inUse < room && !time.Now().Before(l.mu.resume) {
		l.mu.inUse++
		close(l.mu.waiting[0])
		l.mu.waiting = l.mu.waiting[1:]
	}
}

// release ends a request that started in a round. after is how long the service asked to
// wait.
func (l *limiter) release(round uint64, o outcome, after time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.inUse--
	switch {
	case o == throttled:
		if round == l.mu.round { // else it says what is known already
			l.mu.round++
			l.mu.shrunk++
			l.mu.limit = max(1, l.mu.limit/2)
			l.mu.pause = min(max(2*l.mu.pause, minPause), maxPause)
			l.mu.probing = true
			// Jitter, so that nodes that were throttled together do not come back so.
			l.delay(l.mu.pause/2 + rand.N(l.mu.pause))
		}
		l.delay(min(after, maxAfter))
	case o == served && round == l.mu.round:
		l.mu.pause, l.mu.probing = 0, false
		l.mu.limit = min(float64(l.max), l.mu.limit+1/l.mu.limit)
	}
	l.grant()
}

// delay needs l.mu.
func (l *limiter) delay(d time.Duration) {
	if t := time.Now().Add(d); t.After(l.mu.resume) {
		l.mu.resume = t
	}
}

// budget bounds how many requests are made again: a share of those that succeed, and a
// trickle, so that a service that comes back is noticed.
type budget struct {
	max float64
	mu  struct {
		sync.Mutex
		tokens float64
		at     time.Time
	}
}

const (
	budgetShare   = 0.2 // of a retry that each success pays for
	budgetTrickle = 0.5 // retries a second
)

func newBudget(most int) *budget {
	b := &budget{max: float64(most)}
	b.mu.tokens, b.mu.at = b.max, time.Now()
	return b
}

func (b *budget) earn() {
	b.mu.Lock()
	b.mu.tokens = min(b.max, b.mu.tokens+budgetShare)
	b.mu.Unlock()
}

// spend takes what one retry costs, if it is there.
func (b *budget) spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.mu.tokens = min(b.max, b.mu.tokens+budgetTrickle*now.Sub(b.mu.at).Seconds())
	b.mu.at = now
	if b.mu.tokens < 1 {
		return false
	}
	b.mu.tokens--
	return true
}
