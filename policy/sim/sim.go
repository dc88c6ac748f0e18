// Package sim replays request traces through a policy over metadata only: it
// tells which hit rate the policy would have at a capacity, without moving a
// byte.
//
// A request is atomic. Its hits are counted first: resident blocks of it, and
// the length of its unbroken resident prefix. Then all its blocks are pinned,
// victims make room, misses are inserted and hits are told, leaf to root. A
// request that does not fit is cut at its leaf end. The cache starts cold, and
// nothing is left out of the rates.
package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// ErrPolicy means that the policy broke its contract: it proposed a block that
// is pinned, is not resident, or has resident children.
var ErrPolicy = errors.New("policy broke its contract")

// Options say how the tier that the policy serves behaves. One of Capacity and
// Share must be given.
type Options struct {
	Capacity int64   // blocks
	Share    float64 // of the workload's unique blocks, rounded down: above 0, at most 1
	// High and Low are watermarks, as shares of the capacity, 0 < Low <= High <= 1:
	// when a request leaves the tier fuller than High, blocks are evicted down to
	// Low. Without them blocks are evicted one for one when the tier is full.
	High, Low float64
}

// Result is what a replay counted.
type Result struct {
	Requests      int64
	BlockRefs     int64 // blocks of all requests together
	UniqueBlocks  int64
	Capacity      int64   // blocks
	PrefixHitRate float64 // blocks in unbroken resident prefixes / BlockRefs
	HitRate       float64 // resident blocks / BlockRefs
	Evictions     int64
	NsPerRef      float64 // wall time of the replay, policy and simulator together, by BlockRefs
}

// Run replays the workload through an empty policy. It fails with
// block.ErrInvalid on options that cannot be, with ErrPolicy, and when ctx ends.
func Run(ctx context.Context, w *Workload, p policy.Policy, o Options) (Result, error) {
	capacity, err := o.capacity(w)
	if err != nil {
		return Result{}, err
	}
	s := newStore(w)
	s.addTier(upperTier, p, o, capacity)
	begin := time.Now()
	if err := s.replay(ctx); err != nil {
		return Result{}, err
	}
	return w.result(capacity, s.upper.prefixHits, s.hits, s.upper.evictions, time.Since(begin)), nil
}

// replay replays all requests.
func (s *store) replay(ctx context.Context) error {
	for i := range s.w.Requests() {
		if i%64 == 0 && ctx.Err() != nil {
			return fmt.Errorf("simulate: request %d: %w", i+1, ctx.Err())
		}
		if err := s.request(s.w.path(i)); err != nil {
			return fmt.Errorf("simulate %s: request %d: %w", s.upper.p.Name(), i+1, err)
		}
	}
	return nil
}

// result makes counts into rates.
func (w *Workload) result(capacity, prefixHits, hits, evictions int64, elapsed time.Duration) Result {
	r := Result{
		Requests:     int64(w.Requests()),
		BlockRefs:    int64(len(w.refs)),
		UniqueBlocks: int64(w.Unique()),
		Capacity:     capacity,
		Evictions:    evictions,
	}
	if r.BlockRefs > 0 {
		r.PrefixHitRate = float64(prefixHits) / float64(r.BlockRefs)
		r.HitRate = float64(hits) / float64(r.BlockRefs)
		r.NsPerRef = float64(elapsed.Nanoseconds()) / float64(r.BlockRefs)
	}
	return r
}

// marks returns the watermarks in blocks, 0 when there are none.
func (o Options) marks(capacity int64) (high, low int64) {
	if o.High == 0 {
		return 0, 0
	}
	return max(1, int64(o.High*float64(capacity))), max(1, int64(o.Low*float64(capacity)))
}

// capacity checks the options and returns the capacity in blocks.
func (o Options) capacity(w *Workload) (int64, error) {
	if (o.High != 0 || o.Low != 0) && !(0 < o.Low && o.Low <= o.High && o.High <= 1) {
		return 0, fmt.Errorf("%w: watermarks high %v, low %v: want 0 < low <= high <= 1", block.ErrInvalid, o.High, o.Low)
	}
	switch {
	case o.Capacity != 0 && o.Share != 0:
		return 0, fmt.Errorf("%w: capacity %d blocks and share %v exclude each other", block.ErrInvalid, o.Capacity, o.Share)
	case o.Share != 0:
		if !(0 < o.Share && o.Share <= 1) {
			return 0, fmt.Errorf("%w: capacity share %v: want above 0, at most 1", block.ErrInvalid, o.Share)
		}
		// A share such as 0.29 has no exact float64: 29 % of 100 blocks is 29.
		const round = 1 + 1e-12
		n := int64(o.Share * float64(w.Unique()) * round)
		if n < 1 {
			return 0, fmt.Errorf("%w: capacity share %v of %d unique blocks is less than one block", block.ErrInvalid, o.Share, w.Unique())
		}
		return n, nil
	case o.Capacity < 1:
		return 0, fmt.Errorf("%w: capacity %d blocks: want at least 1", block.ErrInvalid, o.Capacity)
	}
	return o.Capacity, nil
}
