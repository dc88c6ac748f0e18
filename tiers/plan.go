package tiers

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// plan says what of a prefix is worth loading. Each of its blocks is resident.
func (s *Store) plan(ns *namespace, prefix []block.Found, o block.PlanOptions) (block.Plan, error) {
	desc := &ns.state.Load().Desc
	if err := o.Prefill.Check(); err != nil {
		return block.Plan{}, fmt.Errorf("plan: %w", err)
	}
	if o.Deadline < 0 {
		return block.Plan{}, fmt.Errorf("plan: %w: deadline %v", block.ErrInvalid, o.Deadline)
	}
	if o.Prefill == (block.Prefill{}) {
		o.Prefill = s.prefillCost(ns).Prefill
	}
	if o.Prefill == (block.Prefill{}) {
		return block.Plan{}, fmt.Errorf("plan: %w: prefill cost: none given, and none known of namespace %q", block.ErrInvalid, desc.Name)
	}
	if desc.TokensPerBlock == 0 {
		return block.Plan{}, fmt.Errorf("plan: %w: namespace %q does not say how many tokens a block has", block.ErrInvalid, desc.Name)
	}
	var runs []policy.Run
	for _, f := range prefix {
		r := policy.Run{Source: int(f.Tier), Blocks: 1, Bytes: int64(f.Len)}
		if n := len(runs); n > 0 && runs[n-1].Source == r.Source && runs[n-1].Bytes == r.Bytes {
			runs[n-1].Blocks++
		} else {
			runs = append(runs, r)
		}
	}
	sources := make([]policy.Source, block.G4+1) // one that is not filled in is never loaded from
	now := time.Now()
	for _, t := range s.tiers() {
		sources[t.id] = t.speed.source(now)
	}
	if s.objects != nil {
		sources[block.G4] = s.objects.speed.source(now)
	}
	return policy.Plan(runs, sources, int64(desc.TokensPerBlock), o), nil
}

// planMatch adds the plan to a match that asks for one.
func (s *Store) planMatch(nsID block.NamespaceID, o block.MatchOptions, res *block.MatchResult) error {
	if o.Plan == nil {
		return nil
	}
	ns, err := s.names.byID(nsID)
	if err != nil {
		return fmt.Errorf("match: %w", err)
	}
	p, err := s.plan(ns, res.Blocks[:res.Prefix], *o.Plan)
	if err != nil {
		return fmt.Errorf("match: %w", err)
	}
	res.Plan = &p
	return nil
}

// getPlanned is a get that hands out what is worth loading of a prefix. The others that
// are there are misses that say so, and no device is touched for them.
func (s *Store) getPlanned(ctx context.Context, ns *namespace, nsID block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	hashes := make([]byte, 0, len(want)*hashLen)
	for i := range want {
		hashes = append(hashes, want[i].Hash[:hashLen]...)
	}
	var m block.MatchResult
	if err := s.Match(ctx, nsID, hashLen, hashes, block.MatchOptions{Quiet: true}, &m); err != nil {
		return fmt.Errorf("get: %w", err)
	}
	prefix := m.Blocks[:m.Prefix]
	for i := range prefix {
		if n := want[i].Length; n > 0 {
			prefix[i].Len = uint32(min(n, int64(prefix[i].Len)))
		}
	}
	p, err := s.plan(ns, prefix, *o.Plan)
	if err != nil {
		return fmt.Errorf("get: %w", err)
	}
	o.Plan = nil
	skip := func(from, to int) error {
		for i, why := range s.unloaded(ctx, nsID, want[from:to]) {
			s.missed(block.Key{NS: nsID, Hash: want[from+i].Hash}, why)
			if err := use(from+i, block.Payload{Reason: why}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := skip(0, p.From); err != nil {
		return err
	}
	err = s.Get(ctx, nsID, hashLen, want[p.From:p.To], o, func(i int, b block.Payload) error { return use(p.From+i, b) })
	if err != nil {
		return err
	}
	return skip(p.To, len(want))
}

// unloaded says why blocks are misses that a plan leaves out: those that are there for one
// that recomputing is faster.
func (s *Store) unloaded(ctx context.Context, nsID block.NamespaceID, want []block.Wanted) []block.MissReason {
	why := make([]block.MissReason, len(want))
	var keys []block.Key // that no local tier has
	var at []int
	for i := range want {
		k := block.Key{NS: nsID, Hash: want[i].Hash}
		g := s.grip(k)
		if why[i] = g.reason; g.h != 0 {
			s.ungrip(&g)
			why[i] = block.MissRecompute
		} else if s.objects != nil {
			keys, at = append(keys, k), append(at, i)
		}
	}
	if len(keys) == 0 {
		return why
	}
	far, err := s.objects.findAll(ctx, keys, true)
	for j, i := range at {
		switch {
		case err != nil:
			why[i] = missOf(err)
		case far[j].why == block.Hit:
			why[i] = block.MissRecompute
		}
	}
	return why
}
