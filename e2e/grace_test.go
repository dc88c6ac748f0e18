package e2e

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

const (
	// grace is how long after its deadline a call may end, graceTick the step in which
	// that is measured.
	grace     = 100 * time.Millisecond
	graceTick = 5 * time.Millisecond
)

// await waits for the end of a call that is to end with ctx, and says how much later
// it did, in the time of a goroutine that sleeps from then on: on a machine that does
// other things both are late for that reason.
func await(ctx context.Context, end <-chan error) (late time.Duration, err error) {
	select {
	case err := <-end:
		return 0, err
	case <-ctx.Done():
	}
	for late < patience {
		time.Sleep(graceTick)
		select {
		case err := <-end:
			return late, err
		default:
			late += graceTick
		}
	}
	return late, errors.New("the call does not end")
}

// stopwatch measures in the same way how long something takes from now on.
type stopwatch struct {
	ticks atomic.Int64
	stop  chan struct{}
}

func startWatch() *stopwatch {
	w := &stopwatch{stop: make(chan struct{})}
	go func() {
		for {
			select {
			case <-w.stop:
				return
			case <-time.After(graceTick):
				w.ticks.Add(1)
			}
		}
	}()
	return w
}

// took stops the watch and says how long it was.
func (w *stopwatch) took() time.Duration {
	close(w.stop)
	return time.Duration(w.ticks.Load()) * graceTick
}
