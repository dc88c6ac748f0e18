package xfer

import (
	"context"
	"errors"
	"fmt"
)

// onDone records the end of one descriptor; backends call it.
func (r *Request) onDone(i int, err error) {
	r.mu.Lock()
	r.record(i, err)
	if r.mu.want == i {
		r.wake()
	}
	each := r.mu.each
	r.mu.Unlock()
	if each != nil {
		each.advance()
	}
}

// record needs r.mu. What is reported twice counts once.
func (r *Request) record(i int, err error) {
	if r.mu.states[i] != Active {
		return
	}
	r.mu.left--
	if err == nil {
		r.mu.states[i] = Succeeded
		r.mu.moved += r.local[i].Len
		return
	}
	if r.mu.errs == nil {
		r.mu.errs = make([]error, len(r.local))
	}
	r.mu.states[i] = Failed
	if errors.Is(err, ErrCanceled) {
		r.mu.states[i] = Canceled
		if r.mu.stale != nil { // that is why
			r.mu.states[i], err = Failed, r.mu.stale
		}
	}
	r.mu.errs[i] = err
}

// wake needs r.mu.
func (r *Request) wake() {
	if r.mu.progress == nil {
		return
	}
	select {
	case r.mu.progress <- struct{}{}:
	default:
	}
}

// settle gives descriptors that the backend did not report an end. It needs
// r.mu.
func (r *Request) settle(ctx context.Context, err error) {
	switch {
	case err != nil:
	case ctx.Err() != nil:
		err = ErrCanceled
	default:
		// Never take silence for success.
		err = fmt.Errorf("%w: the backend did not report it", ErrShort)
	}
	for i := range r.mu.states {
		r.record(i, err)
	}
}

// outcome sums the descriptors up; err is the backend's own. It needs r.mu.
func (r *Request) outcome(ctx context.Context, err error) (Status, error) {
	if r.mu.errs == nil {
		if err != nil {
			return Failed, r.fail(-1, err)
		}
		return Succeeded, nil
	}
	failed, canceled, first := 0, 0, -1
	for i, s := range r.mu.states {
		switch s {
		case Failed:
			if failed == 0 {
				first = i
			}
			failed++
		case Canceled:
			if first < 0 {
				first = i
			}
			canceled++
		}
	}
	cause := r.mu.errs[first]
	if ctx.Err() != nil && r.mu.stale == nil {
		cause = fmt.Errorf("%w: %w", cause, context.Cause(ctx))
	}
	if n := len(r.mu.states); n > 1 {
		cause = fmt.Errorf("%w (%d of %d descriptors failed, %d were canceled)", cause, failed, n, canceled)
	}
	if failed == 0 && ctx.Err() != nil {
		return Canceled, r.fail(first, cause)
	}
	return Failed, r.fail(first, cause)
}

// arrived says whether the post under way has moved all its bytes.
func (r *Request) arrived() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.left == 0 && r.mu.errs == nil
}

// unnotified is the outcome of a post whose notification failed. It needs r.mu.
func (r *Request) unnotified(ctx context.Context, err error) (Status, error) {
	status := Failed
	switch {
	case r.mu.stale != nil:
		err = r.mu.stale
	case ctx.Err() != nil && errors.Is(err, ErrCanceled):
		status = Canceled
		err = fmt.Errorf("%w: %w", err, context.Cause(ctx))
	}
	return status, r.fail(-1, fmt.Errorf("the bytes arrived, their notification did not: %w", err))
}

// count adds the post to the backend's counters. It needs r.mu.
func (r *Request) count() {
	c := &r.b.counts
	c.transfers.Add(1)
	c.bytes[r.op].Add(r.mu.moved)
	switch r.mu.status {
	case Succeeded:
		c.descs.Add(uint64(len(r.local)))
		return
	case Canceled:
		c.canceled.Add(1)
	default:
		c.failed.Add(1)
	}
	for _, s := range r.mu.states {
		if s == Succeeded {
			c.descs.Add(1)
		}
	}
}
