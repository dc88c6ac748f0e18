package tiers

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/index/block"
)

// Commit makes reservations visible and as durable as each asked for; see
// api.Store.
func (s *Store) Commit(ctx context.Context, ids []uint64) []block.CommitResult {
	res := make([]block.CommitResult, len(ids))
	rs := make([]*reservation, len(ids))
	for i, id := range ids {
		if rs[i] = s.reservations.take(id); rs[i] == nil {
			res[i].Err = fmt.Errorf("commit reservation %d: %w", id, block.ErrLeaseExpired)
		}
	}
	s.commit(ctx, rs, res, func(i int) (block.Sum, error) { return rs[i].seal() })
	return res
}

// commit makes blocks of reservations that were taken, those that are not nil, and
// says in res how each ended. seal makes the slot of one what a block's is, and
// tells its checksum.
func (s *Store) commit(ctx context.Context, rs []*reservation, res []block.CommitResult, seal func(i int) (block.Sum, error)) {
	var down []block.Handle // a reference is held on each
	var at []int
	for _, i := range commitOrder(rs) {
		r := rs[i]
		sum, err := seal(i)
		if err != nil {
			s.giveBack(r)
			res[i].Err = err
			continue
		}
		h, used, durable, err := s.admit(ctx, r, sum)
		if !used {
			s.giveBack(r)
			res[i].Status = block.Exists
		}
		res[i].Err = err
		if durable {
			down, at = append(down, h), append(at, i)
		}
	}
	for j, err := range s.copyTo(ctx, s.g3, down) {
		if err != nil {
			res[at[j]].Err = fmt.Errorf("commit to g3: %w", err)
			if ctx.Err() == nil { // else the copy may still succeed
				s.withdraw(down[j])
			}
		}
		s.release(down[j])
	}
	s.writeThrough(rs, res)
	if full := s.g2.events.full(); full != nil {
		s.g2.wake()
		select {
		case <-full:
		case <-ctx.Done():
		}
	}
}

// commitOrder is leaf to root, so that the policy sees suffix blocks before their
// parents; but of several reservations of one key the first one given counts.
func commitOrder(rs []*reservation) (order []int) {
	seen := make(map[block.Key]struct{}, len(rs))
	var again []int
	for i, r := range rs {
		if r == nil {
			continue
		}
		if _, twice := seen[r.key]; twice {
			again = append(again, i)
			continue
		}
		seen[r.key] = struct{}{}
		order = append(order, i)
	}
	slices.Reverse(order)
	return append(order, again...)
}
