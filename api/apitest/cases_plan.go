package apitest

import (
	"errors"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// A match says what of its prefix is worth loading, and a get hands out no more than that.
// Where plans are not made, the calls say so.
func testPlans(e *env) {
	const n = 4
	ns, err := e.s.OpenNamespace(e.ctx, block.Descriptor{Name: "ns", Model: "m", MaxBlockBytes: 1 << 20, TokensPerBlock: 256}, 0)
	e.ok(err)
	for i := range n {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	hs := hashes(0, n+1) // the last is not there
	var want []block.Wanted
	for _, h := range hs {
		want = append(want, block.Wanted{Hash: h})
	}
	for _, c := range []struct {
		token    time.Duration
		from, to int
	}{{time.Minute, 0, n}, {0, 0, 0}} {
		o := block.PlanOptions{Prefill: block.Prefill{Token: c.token, Position: 1e-9}, Deadline: 24 * time.Hour}
		var m block.MatchResult
		err := e.s.Match(e.ctx, ns.ID, hashLen, pack(hashLen, hs...), block.MatchOptions{Plan: &o}, &m)
		if errors.Is(err, block.ErrUnavailable) {
			return // this store makes none
		}
		e.ok(err)
		p := m.Plan
		if p == nil || m.Prefix != n || p.From != c.from || p.To != c.to || p.Total != p.Load+p.Compute || p.Total > p.Recompute {
			e.Fatalf("%v a token: prefix %d, plan %+v", c.token, m.Prefix, p)
		}
		hits := 0
		e.ok(e.s.Get(e.ctx, ns.ID, hashLen, want, block.GetOptions{Plan: &o}, func(i int, b block.Payload) error {
			why := block.Hit
			switch {
			case i == n:
				why = block.MissAbsent
			case i < c.from || i >= c.to:
				why = block.MissRecompute
			}
			if b.Reason != why {
				e.Errorf("%v a token: block %d: %v, want %v", c.token, i, b.Reason, why)
			}
			if b.Reason == block.Hit && !b.More {
				hits++
			}
			return nil
		}))
		if hits != c.to-c.from {
			e.Errorf("%v a token: %d hits", c.token, hits)
		}
	}
	bad := block.PlanOptions{Prefill: block.Prefill{Token: -1}}
	var m block.MatchResult
	e.is(e.s.Match(e.ctx, ns.ID, hashLen, pack(hashLen, hs...), block.MatchOptions{Plan: &bad}, &m), block.ErrInvalid)
	late := block.PlanOptions{Prefill: block.Prefill{Token: time.Second}, Deadline: -1}
	e.is(e.s.Match(e.ctx, ns.ID, hashLen, pack(hashLen, hs...), block.MatchOptions{Plan: &late}, &m), block.ErrInvalid)
	// Nobody knows what prefill costs here.
	e.is(e.s.Match(e.ctx, ns.ID, hashLen, pack(hashLen, hs...), block.MatchOptions{Plan: &block.PlanOptions{}}, &m), block.ErrInvalid)
	flat := e.open("flat")
	e.is(e.s.Match(e.ctx, flat.ID, hashLen, pack(hashLen, hs...), block.MatchOptions{Plan: &block.PlanOptions{Prefill: block.Prefill{Token: time.Second}}}, &m), block.ErrInvalid)
}

// What engines report of prefill is what plans without a cost go by, in that namespace,
// when there is enough of it.
func testReportPrefill(e *env) {
	ns, err := e.s.OpenNamespace(e.ctx, block.Descriptor{Name: "ns", Model: "m", MaxBlockBytes: 1 << 20, TokensPerBlock: 256}, 0)
	e.ok(err)
	e.put(ns, 0, 1000, api.PutOptions{}, block.Stored)
	slow := block.PrefillReport{Position: 1024, Tokens: 512, Took: 512 * time.Second}
	e.is(e.s.ReportPrefill(99, []block.PrefillReport{slow}), block.ErrNotFound)
	for _, bad := range []block.PrefillReport{
		{Tokens: 0, Took: 1},
		{Tokens: -1, Took: 1},
		{Tokens: block.MaxPrefillTokens + 1, Took: 1},
		{Position: -1, Tokens: 1, Took: 1},
		{Position: block.MaxPrefillTokens + 1, Tokens: 1, Took: 1},
		{Tokens: 1, Took: 0},
		{Tokens: 1, Took: -1},
	} {
		e.is(e.s.ReportPrefill(ns.ID, []block.PrefillReport{slow, bad}), block.ErrInvalid)
	}
	known := func() block.PrefillCost {
		for _, n := range e.s.Stats().ByNamespace {
			if n.Name == "ns" && n.Prefill != nil {
				return *n.Prefill
			}
		}
		return block.PrefillCost{}
	}
	if c := known(); c != (block.PrefillCost{}) {
		e.Fatalf("without a report: %+v", c)
	}
	plan := func() (*block.Plan, error) {
		var m block.MatchResult
		o := block.MatchOptions{Plan: &block.PlanOptions{}}
		err := e.s.Match(e.ctx, ns.ID, hashLen, pack(hashLen, hash(0, hashLen)), o, &m)
		return m.Plan, err
	}
	err = e.s.ReportPrefill(ns.ID, []block.PrefillReport{slow})
	if errors.Is(err, block.ErrUnavailable) {
		return // this store makes no plans
	}
	e.ok(err)
	if c := known(); c != (block.PrefillCost{Learned: true, Reports: 1}) {
		e.Fatalf("after one report: %+v", c)
	}
	_, err = plan()
	e.is(err, block.ErrInvalid)
	var many []block.PrefillReport
	for range 99 {
		many = append(many, slow)
	}
	e.ok(e.s.ReportPrefill(ns.ID, many))
	if c := known(); c != (block.PrefillCost{Prefill: block.Prefill{Token: time.Second}, Learned: true, Reports: 100}) {
		e.Fatalf("after 100 reports: %+v", c)
	}
	p, err := plan()
	e.ok(err)
	if p == nil || p.From != 0 || p.To != 1 || p.Recompute != 256*time.Second {
		e.Fatalf("plan %+v, want one that loads", p)
	}
}
