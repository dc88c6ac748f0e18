package xfer

import (
	"context"
	"fmt"
)

// Each calls fn for the descriptors in order as their bytes have arrived (or
// failed: err is then DescErr), on the caller's goroutine, so that work on one
// overlaps the transfer of those behind it. It posts the request when it was
// never posted; otherwise it follows the post under way, or the last one. An
// error of fn ends it. Each returns fn's error or what Wait would return; when
// it returns early, because fn failed or ctx ended, it has cancelled the
// request. Either way the memory is quiet. Errors: as Post and Wait, ErrActive
// also while another Each of this request is under way.
func (r *Request) Each(ctx context.Context, fn func(i int, err error) error) error {
	r.mu.Lock()
	fresh := r.mu.status == NotPosted
	if r.mu.delivered {
		r.mu.Unlock()
		return r.fail(-1, fmt.Errorf("%w: another Each is under way", ErrActive))
	}
	r.mu.delivered = true
	r.mu.want = 0
	if r.mu.progress == nil {
		r.mu.progress = make(chan struct{}, 1)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.mu.delivered = false
		r.mu.Unlock()
	}()

	switch {
	case fresh && len(r.local) == 1:
		// Nothing to overlap with: spare the goroutine.
		if err := r.Run(ctx); r.DescStatus(0) == NotPosted {
			return err // it did not get that far
		}
	case fresh:
		if err := r.Post(ctx); err != nil {
			return err
		}
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
