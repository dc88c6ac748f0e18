package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/kvtier/kvtier/index/block"
)

// catalogReaders is how many reads of the catalog calls have under way at once: more than a
// device needs to give what it can.
const catalogReaders = 64

// catalogReads has the catalog read for calls. A read takes microseconds when Pebble has the
// bytes in memory. When not, it takes as long as the disk does, and nothing interrupts it. So
// another goroutine reads, for all keys of a call at once, and the call parts from it when
// its time is over: what is found later is dropped, and lies in memory that the caller does
// not know. No more than catalogReaders goroutines hang on a disk that does not answer. Calls
// beyond wait for their turn, by their own time. Close waits for the reads.
type catalogReads struct {
	turns chan struct{}
	left  atomic.Int64 // reads from which calls have parted
	lines logRate
}

func (c *catalogReads) init() { c.turns = make(chan struct{}, catalogReaders) }

// begin takes a turn to read, which end gives back.
func (c *catalogReads) begin(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("read the catalog: %w", context.Cause(ctx))
	}
	select {
	case c.turns <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for a read of the catalog: %w", context.Cause(ctx))
	}
}

func (c *catalogReads) end() { <-c.turns }

// readCatalog runs read, which reads the catalog, and returns what it has found, or that ctx
// has ended. read may run on after that: it must not use what the caller may change then.
func readCatalog[R any](ctx context.Context, s *Store, read func() (R, error)) (found R, err error) {
	if err := s.catalogReads.begin(ctx); err != nil {
		return found, err
	}
	type answer struct {
		found R
		err   error
	}
	done := make(chan answer, 1)
	s.wg.Go(func() {
		defer s.catalogReads.end()
		var a answer
		a.found, a.err = read()
		done <- a
	})
	select {
	case a := <-done:
		return a.found, a.err
	case <-ctx.Done():
		s.partFromRead(ctx)
		return found, fmt.Errorf("read the catalog: %w", context.Cause(ctx))
	}
}

// partFromRead counts a read whose caller does not wait for it any more.
func (s *Store) partFromRead(ctx context.Context) {
	n := s.catalogReads.left.Add(1)
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return // the caller has left
	}
	if more, ok := s.catalogReads.lines.next(); ok {
		s.log.Warn("catalog: a read does not end in a call's time", "under way", len(s.catalogReads.turns), "at most", catalogReaders, "so far", n, "more", more)
	}
}

// apart does long work for a call, which is told of its progress and parts from it when ctx
// ends: the work, whose context ends then, too, may wait for the catalog's disk. It also ends
// when progress, which may be nil, fails, and with the store.
func apart[P any](ctx context.Context, s *Store, progress func(P) error, work func(ctx context.Context, tell func(P) error) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(s.life, func() { cancel(block.ErrClosed) })
	defer stop()
	told, done := make(chan P), make(chan error, 1)
	s.wg.Go(func() {
		done <- work(ctx, func(p P) error {
			select {
			case told <- p:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	})
	for {
		select {
		case p := <-told:
			if progress == nil {
				continue
			}
			if err := progress(p); err != nil {
				return err
			}
		case err := <-done:
			if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
				err = fmt.Errorf("%w: %w", cause, err)
			}
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
