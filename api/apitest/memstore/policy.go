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
