package xfertest

import (
	"context"
	"errors"
	"testing"
	"time"
)

const (
	// grace is how long after its deadline a request may end, graceTick the step in which
	// that is measured.
	grace     = 100 * time.Millisecond
	graceTick = 5 * time.Millisecond
)

var errHangs = errors.New("it does not end")

// await waits for the end of what is to end with ctx, and says how much later it did,
// in the time of a goroutine that sleeps from then on: on a machine that does other
// things both are late for that reason. It gives up with errHangs.
func await(ctx context.Context, end <-chan error) (late time.Duration, err error) {
	select {
	case err := <-end:
		return 0, err
	case <-ctx.Done():
	}
	for late < 20*grace {
		time.Sleep(graceTick)
		select {
		case err := <-end:
			return late, err
		default:
			late += graceTick
		}
	}
	return late, errHangs
}

// tooLate judges that. With the race detector the code is as much slower.
func tooLate(late time.Duration) bool {
	if raceEnabled {
		return late > 4*grace
	}
	return late > grace
}

// inTime runs f with a deadline, and fails the test when f ends later than is promised.
func inTime(ctx context.Context, t testing.TB, what string, deadline time.Duration, f func(ctx context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	end := make(chan error, 1)
	go func() { end <- f(ctx) }()
	late, err := await(ctx, end)
	if tooLate(late) {
		t.Errorf("%s goes on %v after its deadline of %v", what, late, deadline)
	}
	return err
}
