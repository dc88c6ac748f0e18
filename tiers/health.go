package tiers

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// health is what the store thinks of one medium of G3, or one bucket of G4.
//
//	healthy  -> degraded   an operation failed
//	degraded -> healthy    enough went well, or a probe did, and nothing failed for a while
//	any      -> down       downAfter operations failed in a row, nothing was heard of one
//	                       for stallAfter, nor of a bucket that was asked then, or a flush
//	                       failed
//	down     -> healthy    a probe went well
//
// A medium that is down is left alone: its blocks are missed at once, new ones
// go elsewhere, and who waits for a copy from or to it is told. What is under way
// on it goes on until the medium answers.
type health struct {
	what       string // "slab" or "bucket"
	name       string
	log        *slog.Logger
	stallAfter time.Duration
	// answers, of a bucket, asks it for something small until ctx ends: an operation of which
	// nothing is heard may be a large one, and says nothing by itself. nil for a slab.
	answers func(ctx context.Context) bool
	quiet   time.Duration // without a failure, before a degraded medium is healthy
	rest    atomic.Uint32 // healthRank, for who only looks
	kick    chan struct{} // buffer of 1: a probe may go well now
	start   time.Time
	lines   logRate
	mu      struct {
		sync.Mutex
		state, reason string
		since         time.Time
		errors        int64
		streak        int                    // failures without a success between
		wins          int                    // successes since the last failure
		failed        time.Time              // when the last failure was
		ops           map[*healthOp]struct{} // under way
		up            context.Context
		sink          context.CancelCauseFunc // ends up
	}
}

// healthOp is an operation under way.
type healthOp struct {
	h      *health
	heard  atomic.Int64 // when a part of it ended last, on the clock of health
	failed error        // first failure that the medium is to blame for
	worked bool         // a part of it went well
	void   bool         // something was not done, and the medium is not to blame
}

// goesOn notes that a part of the operation has ended: a large one may take its
// time.
func (op *healthOp) goesOn() { op.heard.Store(op.h.now()) }

// failure notes that the medium failed.
func (op *healthOp) failure(err error) {
	if op.failed == nil {
		op.failed = err
	}
}

const (
	// downAfter is how many failures in a row are more than bad luck.
	downAfter = 10
	// healAfter is how many successes make a degraded medium healthy.
	healAfter = 16
)

// Ranks of the states: new blocks go to the lowest there is, and to none that is
// down.
const (
	rankHealthy = iota
	rankDegraded
	rankDown
)

func newHealth(name string, o Options) *health {
	h := &health{what: "slab", name: name, log: o.Logger, stallAfter: o.StallAfter, quiet: o.ProbeEvery, kick: make(chan struct{}, 1), start: time.Now()}
	h.mu.ops = map[*healthOp]struct{}{}
	h.mu.state, h.mu.since = block.Healthy, time.Now()
	h.mu.up, h.mu.sink = context.WithCancelCause(context.Background())
	return h
}

// now is a monotonic clock.
func (h *health) now() int64 { return int64(time.Since(h.start)) }

// rank is that of the state.
func (h *health) rank() uint32 { return h.rest.Load() }

// lost is nil, or says why the medium is down: a block.ErrUnavailable.
func (h *health) lost() error {
	if h.rank() != rankDown {
		return nil
	}
	return context.Cause(h.up())
}

// up ends when the medium goes down; its cause says why.
func (h *health) up() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.up
}

// begin counts an operation in. It fails at once when the medium is down.
func (h *health) begin() (*healthOp, error) {
	if err := h.lost(); err != nil {
		return nil, err
	}
	return h.enter(), nil
}

// enter counts an operation in, whatever the state is.
func (h *health) enter() *healthOp {
	op := &healthOp{h: h}
	op.goesOn()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.ops[op] = struct{}{}
	return op
}

// end counts an operation out, and how the medium has done.
func (h *health) end(op *healthOp) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.mu.ops, op)
	switch {
	case op.failed != nil:
		if op.worked {
			h.mu.streak = 0
		}
		h.fail(op.failed)
		return
	case op.void:
		return
	}
	h.mu.streak = 0
	h.mu.wins++
	switch h.mu.state {
	case block.Down: // it answers again
		select {
		case h.kick <- struct{}{}:
		default:
		}
	case block.Degraded:
		if h.mu.wins >= healAfter && time.Since(h.mu.failed) >= h.quiet {
			h.turn(block.Healthy, rankHealthy, "")
		}
	}
}

// watchFlush makes a flush an operation of the medium. After one that failed
// nothing that was written can be trusted until another has gone well.
func (h *health) watchFlush(flush func() error) func() error {
	return func() error {
		op := h.enter()
		op.failed = flush()
		h.end(op)
		if op.failed != nil {
			h.mu.Lock()
			h.sinkNow(fmt.Sprintf("flush failed: %v", op.failed))
			h.mu.Unlock()
		}
		return op.failed
	}
}

// while is ctx as long as the medium is not down.
func (h *health) while(ctx context.Context) (context.Context, func()) {
	up := h.up()
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(up, func() { cancel(context.Cause(up)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// probed takes the outcome of a probe.
func (h *health) probed(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err != nil:
		h.fail(fmt.Errorf("probe: %w", err))
	case h.mu.state == block.Down || time.Since(h.mu.failed) >= h.quiet:
		h.turn(block.Healthy, rankHealthy, "")
	}
}

// look finds out whether an operation stalls. Of a bucket it says that one may: then the
// bucket is to be asked.
func (h *health) look() (ask bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.state == block.Down {
		return false
	}
	now := h.now()
	for op := range h.mu.ops {
		if now-op.heard.Load() <= int64(h.stallAfter) {
			continue
		}
		if h.answers != nil {
			return true
		}
		h.sinkNow(fmt.Sprintf("nothing was heard of an operation for %v", h.stallAfter))
		return false
	}
	return false
}

// asked takes what a bucket was asked for. One that answers is not asked again for a while
// for the sake of the operations that are under way.
func (h *health) asked(answers bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !answers {
		h.sinkNow(fmt.Sprintf("nothing was heard of an operation for %v, and a small request got no answer within %v", h.stallAfter, h.stallAfter))
		return
	}
	now := h.now()
	for op := range h.mu.ops {
		op.heard.Store(now)
	}
}

// fail needs mu.
func (h *health) fail(err error) {
	h.mu.errors++
	h.mu.streak++
	h.mu.wins, h.mu.failed = 0, time.Now()
	switch {
	case h.mu.streak >= downAfter:
		h.sinkNow(fmt.Sprintf("%d operations failed in a row, the last one: %v", h.mu.streak, err))
	case h.mu.state == block.Healthy:
		h.turn(block.Degraded, rankDegraded, err.Error())
	}
	if skipped, ok := h.lines.next(); ok {
		h.log.Warn("device fails", h.what, h.name, "err", err, "more", skipped)
	}
}

// sinkNow needs mu.
func (h *health) sinkNow(reason string) {
	if h.mu.state == block.Down {
		return
	}
	h.turn(block.Down, rankDown, reason)
	h.mu.sink(fmt.Errorf("%w: %s %s is down: %s", block.ErrUnavailable, h.what, h.name, reason))
}

// sinks makes a medium down that cannot be used from the beginning.
func (h *health) sinks(reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sinkNow(reason)
}

// turn needs mu.
func (h *health) turn(state string, rank uint32, reason string) {
	if state == h.mu.state {
		return
	}
	log := h.log.Warn
	if state == block.Healthy {
		log = h.log.Info
		h.mu.streak, h.mu.wins = 0, 0
		if h.mu.state == block.Down {
			h.mu.up, h.mu.sink = context.WithCancelCause(context.Background())
		}
	}
	log("device is "+state, h.what, h.name, "was", h.mu.state, "for", time.Since(h.mu.since).Round(time.Millisecond), "reason", reason)
	h.mu.state, h.mu.reason, h.mu.since = state, reason, time.Now()
	h.rest.Store(rank)
}

// stats fills in what a snapshot says of the state.
func (h *health) stats(st *block.DeviceStats) {
	h.mu.Lock()
	defer h.mu.Unlock()
	st.State, st.Reason, st.Since, st.Errors = h.mu.state, h.mu.reason, h.mu.since, h.mu.errors
}
