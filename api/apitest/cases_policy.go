package apitest

import (
	"context"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// A policy is changed for all tiers or one, and stays as it was when the change
// cannot be. No block is lost by it.
func testPolicies(e *env) {
	ns := e.open("ns")
	for i := range 5 {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	before := e.s.Policies()
	if len(before) == 0 || before[0].Tier != block.G2 || before[0].Policy != "lru-leaf" || before[0].Start != "lru-leaf" {
		e.Fatalf("policies %+v, want lru-leaf first of all", before)
	}
	e.ok(e.s.SetPolicy(e.ctx, block.NoTier, "arc"))
	e.ok(e.s.SetPolicy(e.ctx, block.NoTier, "arc"))
	for i, p := range e.s.Policies() {
		if p != (block.TierPolicy{Tier: before[i].Tier, Policy: "arc", Start: "lru-leaf"}) {
			e.Fatalf("after the change: %+v", p)
		}
	}
	e.ok(e.s.SetPolicy(e.ctx, block.G2, "lru-leaf"))
	for _, t := range e.s.Stats().Tiers {
		if want := map[bool]string{true: "lru-leaf", false: "arc"}[t.Tier == block.G2]; t.Policy != want {
			e.Fatalf("stats of %s say %q, want %s", t.Tier, t.Policy, want)
		}
	}
	e.says(e.s.SetPolicy(e.ctx, block.G2, "mru"), `policy "mru": want one of lru-leaf`)
	e.is(e.s.SetPolicy(e.ctx, block.G2, "mru"), block.ErrInvalid)
	e.is(e.s.SetPolicy(e.ctx, block.G1, "arc"), block.ErrUnavailable)
	gone, cancel := context.WithCancel(e.ctx)
	cancel()
	e.is(e.s.SetPolicy(gone, block.G2, "arc"), context.Canceled)
	for i := range 5 {
		e.has(ns, i, 1000)
	}
}
