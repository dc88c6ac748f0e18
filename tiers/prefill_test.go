package tiers_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestPrefillKnown: a plan goes by what the call says, else by what is configured, else by
// what engines of the namespace have reported, and of no other.
func TestPrefillKnown(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, NoSlabs: true, Prefill: func(name string) block.Prefill {
		if name == "told" {
			return block.Prefill{Token: time.Second}
		}
		return block.Prefill{}
	}})
	const tokens = 16
	ns := map[string]block.Namespace{}
	for _, name := range []string{"told", "learns", "other"} {
		n, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: name, MaxBlockBytes: 1 << 20, TokensPerBlock: tokens}, 0)
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, n, 1, 1000, block.PutOptions{})
		ns[name] = n
	}
	reports := slices.Repeat([]block.PrefillReport{{Tokens: 100, Took: 200 * time.Second}}, 8)
	for _, name := range []string{"told", "learns"} {
		if err := s.ReportPrefill(ns[name].ID, reports); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		ns    string
		given block.Prefill
		want  time.Duration // of a token; 0: not known
	}{
		{"told", block.Prefill{}, time.Second},
		{"told", block.Prefill{Token: time.Minute}, time.Minute},
		{"learns", block.Prefill{}, 2 * time.Second},
		{"learns", block.Prefill{Token: time.Minute}, time.Minute},
		{"other", block.Prefill{}, 0},
	} {
		var m block.MatchResult
		o := block.MatchOptions{Plan: &block.PlanOptions{Prefill: c.given}}
		err := s.Match(t.Context(), ns[c.ns].ID, hashLen, pack(hashOf(1)), o, &m)
		switch {
		case c.want == 0 && !errors.Is(err, block.ErrInvalid):
			t.Errorf("%s: %v", c.ns, err)
		case c.want > 0 && (err != nil || m.Plan.Recompute != tokens*c.want):
			t.Errorf("%s, given %v: %+v, %v, want %v a token", c.ns, c.given, m.Plan, err, c.want)
		}
	}
	for _, n := range s.Stats().ByNamespace {
		want := map[string]block.PrefillCost{
			"told":   {Prefill: block.Prefill{Token: time.Second}, Reports: 8},
			"learns": {Prefill: block.Prefill{Token: 2 * time.Second}, Learned: true, Reports: 8},
		}[n.Name]
		if got := n.Prefill; (got == nil) != (want == (block.PrefillCost{})) || got != nil && *got != want {
			t.Errorf("%s: %+v, want %+v", n.Name, got, want)
		}
	}
}
