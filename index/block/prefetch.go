package block

import (
	"fmt"
	"time"
)

// MaxPriority is the highest priority of a prefetch.
const MaxPriority = 9

// PrefetchOptions go with a prefetch.
type PrefetchOptions struct {
	// ID is the caller's name for it, by which it can be cancelled; "": none.
	ID string
	// Priority is 0 to MaxPriority: higher ones go first, and take the room in the queue
	// of lower ones.
	Priority uint8
	// Within is after how long the blocks are of no use any more: those that nobody has
	// begun with by then are dropped, with MissDeadline. 0: they always are.
	Within time.Duration
}

// Check says what is wrong with them. ErrInvalid.
func (o PrefetchOptions) Check() error {
	switch {
	case o.Priority > MaxPriority:
		return fmt.Errorf("%w: priority: %d, at most %d", ErrInvalid, o.Priority, MaxPriority)
	case o.Within < 0:
		return fmt.Errorf("%w: within: %v", ErrInvalid, o.Within)
	}
	return nil
}

// Progress tells how far a prefetch is: one for each key, in the order of the
// request, root first.
type Progress struct {
	Index  int
	Reason MissReason // Hit: resident in the wanted tier now
	Tier   TierID
}

// PrefetchStats counts blocks of prefetches: each that was queued is done, displaced,
// stale or cancelled then.
type PrefetchStats struct {
	Queued, Done int64
	Dropped      int64 // that the queue had no room for
	Displaced    int64 // that left it for those of a higher priority
	Stale        int64 // that nobody had begun with when the request was of no use any more
	Cancelled    int64
	// Of the blocks that were brought up, those that were read in G2 then, and those that
	// left it without.
	Useful, Wasted int64
}
