package sim

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/kvtier/kvtier/policy"
)

// TierOptions say how a store of two tiers behaves.
type TierOptions struct {
	DRAM, SSD Options
	// WriteBudget is how many blocks may be written to SSD for each block reference,
	// paid from a bucket; 0: any number.
	WriteBudget float64
}

// Together are the options of one tier as large as both, without watermarks.
func (o TierOptions) Together(w *Workload) (Options, error) {
	dram, ssd, err := o.capacities(w)
	return Options{Capacity: dram + ssd}, err
}

func (o TierOptions) capacities(w *Workload) (dram, ssd int64, err error) {
	if dram, err = o.DRAM.capacity(w); err != nil {
		return 0, 0, fmt.Errorf("DRAM: %w", err)
	}
	if ssd, err = o.SSD.capacity(w); err != nil {
		return 0, 0, fmt.Errorf("SSD: %w", err)
	}
	return dram, ssd, nil
}

// TierResult is what a replay through two tiers counted.
type TierResult struct {
	Result              // of both: capacity and evictions are those of DRAM and SSD together
	Capacities [2]int64 // blocks, of DRAM and SSD
	PrefixHits [2]int64 // blocks of unbroken resident prefixes, by the tier that served them
	SSDWrites  int64    // blocks
}

// The bucket of a write budget holds one in burstPart of the SSD tier's blocks, and
// the admission remembers ghostTimes as many blocks as it has turned away.
const (
	burstPart  = 64
	ghostTimes = 4
)

// RunTiers replays the workload through two tiers that are empty, each with a policy,
// as the store moves blocks: new ones come into DRAM; what leaves it is written to SSD
// unless it is there; what is hit on SSD comes up and keeps its copy; what DRAM has no
// room for is written to SSD at once. A hit counts for the tier that served it, and
// both policies are told. Partial last blocks are not written to SSD. It fails as Run.
func RunTiers(ctx context.Context, w *Workload, dram, ssd policy.Policy, o TierOptions) (TierResult, error) {
	upper, lower, err := o.capacities(w)
	if err != nil {
		return TierResult{}, err
	}
	s := newStore(w)
	s.addTier(upperTier, dram, o.DRAM, upper)
	s.addTier(lowerTier, ssd, o.SSD, lower)
	s.admission, err = policy.NewAdmission(policy.AdmissionOptions{
		Bytes:  policy.Budget{Rate: o.WriteBudget, Burst: max(1, float64(lower)/burstPart)},
		Ghosts: int(min(lower, math.MaxInt32/ghostTimes)) * ghostTimes,
	})
	if err != nil {
		return TierResult{}, err
	}
	begin := time.Now()
	if err := s.replay(ctx); err != nil {
		return TierResult{}, err
	}
	hits := s.upper.prefixHits + s.lower.prefixHits
	return TierResult{
		Result:     w.result(upper+lower, hits, s.hits, s.upper.evictions+s.lower.evictions, time.Since(begin)),
		Capacities: [2]int64{upper, lower},
		PrefixHits: [2]int64{s.upper.prefixHits, s.lower.prefixHits},
		SSDWrites:  s.written,
	}, nil
}
