package block

import (
	"fmt"
	"math"
	"time"
)

// Prefill is what it costs an engine to compute the tokens of a prompt: the one at
// position s takes Token and s times Position. The zero value says nothing.
type Prefill struct {
	Token    time.Duration // of a token at the beginning
	Position float64       // ns more for each token before it, since attention looks at all of them
}

// Check fails with ErrInvalid, naming the field, on a cost that cannot be.
func (p Prefill) Check() error {
	switch {
	case p.Token < 0:
		return fmt.Errorf("%w: prefill cost of a token: %v", ErrInvalid, p.Token)
	case !(p.Position >= 0) || math.IsInf(p.Position, 0):
		return fmt.Errorf("%w: prefill cost of a position: %v ns", ErrInvalid, p.Position)
	}
	return nil
}

// PlanOptions ask what of a prompt is worth loading.
type PlanOptions struct {
	// Prefill is the engine's; the zero value stands for what the store knows of the
	// namespace.
	Prefill Prefill
	// Overlap: the engine can compute the head of a prompt while the tail is loaded. Else
	// it loads the head, and computes the rest then.
	Overlap bool
	// Deadline, when above 0, is by when what is loaded must be there.
	Deadline time.Duration
}

// Plan says which blocks of a prompt's resident prefix to load, so that all of it is
// there as early as can be. The rest of it is to be computed. Total is never more
// than Recompute.
type Plan struct {
	From, To  int           // the blocks to load; the same when all is to be computed
	Load      time.Duration // until they are there
	Compute   time.Duration // of the rest
	Total     time.Duration // until all is there
	Recompute time.Duration // until all is there if nothing is loaded
}

// MaxPrefillTokens bounds the tokens, and the position, of a PrefillReport.
const MaxPrefillTokens = 1 << 28

// PrefillReport is what an engine tells of tokens of a prompt that it has computed in one
// go.
type PrefillReport struct {
	Position int64         // tokens of the prompt before them
	Tokens   int64         // at least 1
	Took     time.Duration // more than 0
}

// Check fails with ErrInvalid, naming the field, on a report that cannot be.
func (r PrefillReport) Check() error {
	switch {
	case r.Position < 0 || r.Position > MaxPrefillTokens:
		return fmt.Errorf("%w: prefill report: position %d, want 0 to %d", ErrInvalid, r.Position, MaxPrefillTokens)
	case r.Tokens < 1 || r.Tokens > MaxPrefillTokens:
		return fmt.Errorf("%w: prefill report: %d tokens, want 1 to %d", ErrInvalid, r.Tokens, MaxPrefillTokens)
	case r.Took <= 0:
		return fmt.Errorf("%w: prefill report: took %v, want more than 0", ErrInvalid, r.Took)
	}
	return nil
}

// PrefillCost is what a store knows of what prefill costs the engines of a namespace.
type PrefillCost struct {
	Prefill       // the zero value: too few reports
	Learned bool  // from reports; otherwise it is configured
	Reports int64 // since the start
}
