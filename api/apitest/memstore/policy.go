package memstore

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kvtier/kvtier/index/block"
)

// policies are the names that SetPolicy takes. They are no more than names: what
// leaves is the oldest in any case.
var policies = []string{"lru-leaf", "arc"}

// Policies implements api.Store.
func (s *Store) Policies() []block.TierPolicy {
	s.mu.Lock()
	defer s.mu.Unlock()
	return []block.TierPolicy{{Tier: block.G2, Policy: s.mu.policy, Start: policies[0]}}
}

// SetPolicy implements api.Store.
func (s *Store) SetPolicy(ctx context.Context, tier block.TierID, name string) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case !slices.Contains(policies, name):
		return fmt.Errorf("set policy: %w: policy %q: want one of %s", block.ErrInvalid, name, strings.Join(policies, ", "))
	case tier != block.NoTier && tier != block.G2:
		return fmt.Errorf("set policy: %w: this store has no tier %s", block.ErrUnavailable, tier)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.policy = name
	return nil
}

// SetWriteBudget implements api.Store. There is no tier to write to.
func (s *Store) SetWriteBudget(b block.WriteBudget) error {
	if b.Tier != block.G3 && b.Tier != block.G4 {
		return fmt.Errorf("set write budget: %w: write budget of %s: there are budgets of g3 and g4", block.ErrInvalid, b)
	}
	return fmt.Errorf("set write budget: %w: this store has no tier %s", block.ErrUnavailable, b.Tier)
}
