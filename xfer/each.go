package xfer

import (
	"context"
	"fmt"
	"time"
)

// Each calls fn for the descriptors in order as their bytes have arrived (or
// failed: err is then DescErr), so that work on one overlaps the transfer of
// those behind it. Calls of fn never overlap each other. An error of fn ends it.
//
// A request that was never posted is run as by Run: on the caller's goroutine,
// and fn is called there too, between the completions, as they come in. That
// saves waking another goroutine for each, but fn holds the transfer up: it should
// compute, not wait. (A backend that spreads a transfer over cores may call fn
// from any of them.) Otherwise Each follows the post under way, or the last one.
//
// Each returns fn's error or what Wait would return; when it returns early,
// because fn failed or ctx ended, it has cancelled the request. Either way the
// memory is quiet. Errors: as Post and Wait, ErrActive also while another Each of
// this request is under way.
func (r *Request) Each(ctx context.Context, fn func(i int, err error) error) error {
	r.mu.Lock()
	fresh := r.mu.status == NotPosted
	if r.mu.delivered {
		r.mu.Unlock()
		return r.fail(-1, fmt.Errorf("%w: another Each is under way", ErrActive))
	}
	r.mu.delivered = true
	r.mu.want = 0
	if !fresh && r.mu.progress == nil {
		r.mu.progress = make(chan struct{}, 1)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.mu.delivered = false
		r.mu.Unlock()
	}()

	if fresh {
		return r.runEach(ctx, fn)
	}
	for i := range r.local {
		if err := r.await(ctx, i); err != nil {
			r.Cancel()
			return err
		}
		if err := fn(i, r.DescErr(i)); err != nil {
			r.Cancel()
			return err
		}
	}
	err := r.Wait(ctx)
	r.Cancel() // only when ctx ended between the last descriptor and the end
	return err
}

// runEach is Each of a request that was never posted.
func (r *Request) runEach(ctx context.Context, fn func(i int, err error) error) error {
	var began time.Time
	if r.a.telemetry {
		began = time.Now()
	}
	d := &delivery{r: r, fn: fn}
	ctx, err := r.begin(ctx, began, false, d)
	if err != nil {
		return err
	}
	err = r.transfer(ctx, began)
	d.advance() // to those that the backend did not report
	if d.err != nil {
		return d.err
	}
	return err
}

// delivery hands the descriptors of a run to fn, in order. It is used by one
// goroutine at a time: by the backend while it transfers, then by runEach.
type delivery struct {
	r    *Request
	fn   func(i int, err error) error
	next int
	err  error // of fn
}

// advance calls fn for the next descriptors that are done.
func (d *delivery) advance() {
	r := d.r
	for d.err == nil && d.next < len(r.local) {
		i := d.next
		r.mu.Lock()
		state := r.mu.states[i]
		var err error
		if state == Failed || state == Canceled {
			err = r.fail(i, r.mu.errs[i])
		}
		r.mu.Unlock()
		if state == Active {
			return
		}
		d.next++
		if d.err = d.fn(i, err); d.err != nil {
			r.interrupt()
		}
	}
}

// await waits until descriptor i is done.
func (r *Request) await(ctx context.Context, i int) error {
	for {
		r.mu.Lock()
		r.mu.want = i
		state, released := r.mu.states[i], r.mu.status == Released
		r.mu.Unlock()
		switch {
		case released:
			return r.fail(-1, fmt.Errorf("%w: request was released", ErrClosed))
		case state != Active:
			return nil
		}
		select {
		case <-r.mu.progress:
		case <-ctx.Done():
			return r.fail(i, fmt.Errorf("%w: %w", ErrCanceled, context.Cause(ctx)))
		}
	}
}
