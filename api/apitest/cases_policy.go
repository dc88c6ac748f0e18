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

// A write budget is set, changed and taken away, where there is a tier that it is of.
func testWriteBudgets(e *env) {
	budgets := func() []block.BudgetStats {
		for _, t := range e.s.Stats().Tiers {
			if t.Tier == block.G3 && t.Admission != nil {
				return t.Admission.Budgets
			}
		}
		return nil
	}
	e.is(e.s.SetWriteBudget(block.WriteBudget{}), block.ErrInvalid)
	e.is(e.s.SetWriteBudget(block.WriteBudget{Tier: block.G2, Bytes: 1 << 40}), block.ErrInvalid)
	e.is(e.s.SetWriteBudget(block.WriteBudget{Tier: block.G4, Bytes: 1 << 40}), block.ErrUnavailable)
	all := block.WriteBudget{Tier: block.G3, Bytes: 24 << 40}
	some := block.WriteBudget{Tier: block.G3, Namespaces: "team-*", Bytes: 24 << 30}
	if len(e.s.Policies()) == 1 {
		e.is(e.s.SetWriteBudget(all), block.ErrUnavailable)
		return
	}
	e.ok(e.s.SetWriteBudget(all))
	e.ok(e.s.SetWriteBudget(some))
	if b := budgets(); len(b) != 2 || b[0].WriteBudget != all || b[1].WriteBudget != some || b[1].AvailableBytes < 512<<20 || b[1].AvailableBytes > 768<<20 {
		e.Fatalf("budgets %+v", b)
	}
	some.Bytes = 6 << 30
	e.ok(e.s.SetWriteBudget(some))
	if b := budgets(); len(b) != 2 || b[1].WriteBudget != some || b[1].AvailableBytes != 256<<20 {
		e.Fatalf("budgets %+v after a change to one that has less room", b)
	}
	e.is(e.s.SetWriteBudget(block.WriteBudget{Tier: block.G3, Bytes: 1}), block.ErrInvalid)
	e.is(e.s.SetWriteBudget(block.WriteBudget{Tier: block.G3, Bytes: -1}), block.ErrInvalid)
	e.is(e.s.SetWriteBudget(block.WriteBudget{Tier: block.G3, Bytes: 24 << 40, Requests: 1 << 20}), block.ErrInvalid)
	e.is(e.s.SetWriteBudget(block.WriteBudget{Tier: block.G3, Namespaces: "[", Bytes: 24 << 40}), block.ErrInvalid)
	all.Bytes, some.Bytes = 0, 0
	e.ok(e.s.SetWriteBudget(all))
	if b := budgets(); len(b) != 1 || b[0].Namespaces != "team-*" {
		e.Fatalf("budgets %+v after one was taken away", b)
	}
	e.ok(e.s.SetWriteBudget(some))
	if b := budgets(); b != nil {
		e.Fatalf("budgets %+v after all were taken away", b)
	}
}
