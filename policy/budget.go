package policy

import (
	"fmt"
	"math"

	"github.com/kvtier/kvtier/index/block"
)

// Budget is what may be spent as time goes by, and how much of it at once. The zero
// value bounds nothing.
type Budget struct {
	// Rate is how much comes in a unit of time; 0: there is no bound.
	Rate float64
	// Burst is how much at most is saved up: in no span of time more is spent than comes
	// in it and this, but for what is spent in any case. With a Rate it is above 0.
	Burst float64
	// Start is how much there is at first, at most Burst.
	Start float64
}

// check fails with block.ErrInvalid on a budget that cannot be.
func (b Budget) check(what string) error {
	switch {
	case !(b.Rate >= 0) || math.IsInf(b.Rate, 0):
		return fmt.Errorf("%w: %s %v: want 0 (none) or more", block.ErrInvalid, what, b.Rate)
	case b.Rate > 0 && !(b.Burst > 0):
		return fmt.Errorf("%w: burst %v of a %s: want above 0", block.ErrInvalid, b.Burst, what)
	case !(b.Start >= 0 && b.Start <= b.Burst):
		return fmt.Errorf("%w: start %v of a %s: want 0 to the burst, %v", block.ErrInvalid, b.Start, what, b.Burst)
	}
	return nil
}

// bucket is a budget and what there is of it now.
type bucket struct {
	Budget
	level float64 // below 0: overdrawn
}

func (b *bucket) set(to Budget) {
	had := b.Rate > 0
	b.Budget = to
	if had {
		b.level = min(b.level, to.Burst)
	} else {
		b.level = to.Start
	}
}

func (b *bucket) fill(time float64) { b.level = min(b.level+b.Rate*time, b.Burst) }

func (b *bucket) charge(n int64) {
	if b.Rate > 0 {
		b.level -= float64(n)
	}
}

func (b *bucket) empty() bool { return b.Rate > 0 && b.level <= 0 }

func (b *bucket) low() bool { return b.Rate > 0 && b.level < b.Burst/2 }
