package sim

import (
	"fmt"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// The tiers of a store, as slots number them.
const (
	upperTier = iota
	lowerTier
)

// tier is what a policy serves.
type tier struct {
	ix         int
	p          policy.Policy
	capacity   int64
	high       int64 // 0: no watermarks
	low        int64
	resident   int64
	coming     int64 // not resident yet, but there is room for them
	prefixHits int64
	evictions  int64

	victims []block.Handle
	ok      func(block.Handle) bool // may leave
	full    bool                    // nothing could leave when room was wanted last
}

// addTier gives the store its upper tier, or the lower one.
func (s *store) addTier(ix int, p policy.Policy, o Options, capacity int64) {
	t := &tier{ix: ix, p: p, capacity: capacity}
	t.high, t.low = o.marks(capacity)
	t.ok = func(h block.Handle) bool { return s.mayLeave(t, &s.slots[h]) && !s.stuck(t, &s.slots[h]) }
	if ix == upperTier {
		s.upper = t
	} else {
		s.lower = t
	}
}

// mayLeave reports whether a block may leave a tier now: nobody uses it, and if it
// would be lost with this copy, no child of it is in any.
func (s *store) mayLeave(t *tier, e *slot) bool {
	if s.seen[e.id] == s.stamp {
		return false // pinned
	}
	return t == s.upper || e.in[upperTier].resident || e.in[upperTier].kids == 0 && e.in[lowerTier].kids == 0
}

// stuck reports whether a block cannot leave the upper tier, since its children below
// need it there and there is no room.
func (s *store) stuck(t *tier, e *slot) bool {
	return t == s.upper && s.lower != nil && s.lower.full && e.in[lowerTier].kids > 0 && !e.in[lowerTier].resident
}

// check holds the policy to its contract.
func (t *tier) check(s *store, h block.Handle) error {
	switch {
	case h == 0 || int(h) >= len(s.slots) || !s.slots[h].in[t.ix].resident:
		return fmt.Errorf("%w: victim %d is not resident", ErrPolicy, h)
	case s.slots[h].in[t.ix].kids > 0:
		return fmt.Errorf("%w: victim %d has %d resident children", ErrPolicy, h, s.slots[h].in[t.ix].kids)
	case !s.mayLeave(t, &s.slots[h]):
		return fmt.Errorf("%w: victim %d is pinned", ErrPolicy, h)
	}
	return nil
}
