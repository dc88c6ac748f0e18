package main

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/kvtier/kvtier/policy/trace"
)

// lateAfter is how far behind its moment a request begins that is counted as late.
const lateAfter = time.Millisecond

// replayRun deals the requests of a trace out to clients, each request to one of
// them, in the order of the trace.
type replayRun struct {
	next     func() (*trace.Request, error) // io.EOF at the end
	limit    int64                          // requests; 0: all
	rate     float64                        // requests per second; 0: by speed
	speed    float64                        // times faster than recorded; 0: each as soon as a client is free
	progress *progress
	times    latencies
	start    time.Time

	mu       sync.Mutex
	dealt    int64
	zero     time.Duration // recorded time of the first request
	ended    error         // why nothing more is dealt out
	report   *replayReport // of all requests that have ended
	firstErr error         // of report.Errors
}

// scheduled reports whether requests begin at set moments.
func (n *replayRun) scheduled() bool { return n.rate > 0 || n.speed > 0 }

// run works the trace off with a client for each of rs. The first that cannot go
// on ends the others. A trace that breaks off lets them end their requests.
func (n *replayRun) run(ctx context.Context, rs []*replayer) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	n.start = time.Now()
	var wg sync.WaitGroup
	for _, r := range rs {
		wg.Go(func() {
			if err := n.client(ctx, r); err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	n.progress.done()
	n.report.Seconds = time.Since(n.start).Seconds()
	n.report.rates()
	n.report.Latency = n.times.report()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if errors.Is(n.ended, io.EOF) {
		return nil
	}
	return n.ended
}

// client does one request after another until there are none.
func (n *replayRun) client(ctx context.Context, r *replayer) error {
	r.watch = stopwatch{all: &n.times, scheduled: n.scheduled()}
	for {
		req, due, ok := n.deal()
		if !ok {
			return nil
		}
		r.report = newReplayReport()
		if n.scheduled() {
			if err := sleep(ctx, time.Until(due)); err != nil {
				return err
			}
			lag := time.Since(due)
			if r.report.LagSeconds = lag.Seconds(); lag > lateAfter {
				r.report.Late = 1
			}
		}
		r.watch.begin(due)
		err := r.request(ctx, req.HashIDs)
		r.watch.end()
		n.count(r)
		if err != nil {
			return err
		}
	}
}

// deal gives the next request and the moment at which it should begin.
func (n *replayRun) deal() (req *trace.Request, due time.Time, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended == nil && n.limit > 0 && n.dealt == n.limit {
		n.ended = io.EOF
	}
	if n.ended != nil {
		return nil, due, false
	}
	if req, n.ended = n.next(); n.ended != nil {
		return nil, due, false
	}
	if n.dealt == 0 {
		n.zero = req.Time
	}
	switch {
	case n.rate > 0:
		due = n.start.Add(seconds(float64(n.dealt) / n.rate))
	case n.speed > 0:
		due = n.start.Add(seconds((req.Time - n.zero).Seconds() / n.speed))
	default:
		due = time.Now()
	}
	n.dealt++
	return req, due, true
}

// seconds is a duration of at most some thirty years, which fits.
func seconds(s float64) time.Duration { return time.Duration(min(s, 1e9) * float64(time.Second)) }

// count adds what a client's request has come to.
func (n *replayRun) count(r *replayer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.report.add(r.report)
	if n.firstErr == nil {
		n.firstErr = r.firstErr
	}
	n.progress.update(func() string { return n.report.progressLine(time.Since(n.start)) })
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
