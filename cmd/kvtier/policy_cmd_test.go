package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

func TestPolicy(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	const head = "TIER  POLICY    AT START  MOVING\n"
	kvtier(t, addr, "", "policy", "show").want(t, 0, head+"g2    lru-leaf  lru-leaf  0 blocks\n", "")
	kvtier(t, addr, "", "policy", "set", "mru").want(t, 2, "", `policy "mru": want one of lru-leaf, s3-ghost, arc`)
	kvtier(t, addr, "", "policy", "set", "arc", "--tier", "g7").want(t, 2, "", `--tier: invalid: tier "g7"`)
	kvtier(t, addr, "", "policy", "set", "arc", "--tier", "g3").want(t, 1, "", "no tier g3")
	kvtier(t, addr, "", "policy", "set").want(t, 2, "", "1 arg")
	r := kvtier(t, addr, "", "policy", "set", "arc", "--json")
	var got []policyOutput
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || r.code != 0 || len(got) != 1 || got[0].Tier != "g2" || got[0].Policy != "arc" || got[0].Start != "lru-leaf" || got[0].Moving != 0 {
		t.Errorf("set --json: %+v, %v", r, err)
	}
	kvtier(t, addr, "", "policy", "show").want(t, 0, strings.ReplaceAll(head, "POLICY    ", "POLICY  ")+"g2    arc     lru-leaf  0 blocks\n", "")
}

func TestPlanPolicy(t *testing.T) {
	for args, want := range map[string][2]string{
		"":                                   {policy.Default, policy.Default},
		"--policy arc":                       {"arc", "arc"},
		"--policy g3=gdsf":                   {policy.Default, "gdsf"},
		"--policy g3=gdsf --policy switch":   {"switch", "gdsf"},
		"--policy g2=arc --policy G3=switch": {"arc", "switch"},
	} {
		f, _ := newServeFlags(t, strings.Fields(args)...)
		p, err := f.plan(t.Context(), fakeEnv(nil))
		if err != nil || p.policy[block.G2] != want[0] || p.policy[block.G3] != want[1] {
			t.Errorf("%s: %v, %v, want %s", args, p, err, want)
		}
	}
	for args, want := range map[string]string{
		"--policy arc --policy gdsf":       "--policy: arc and gdsf for all tiers",
		"--policy g3=arc --policy g3=gdsf": "--policy: arc and gdsf for g3",
	} {
		f, _ := newServeFlags(t, strings.Fields(args)...)
		if _, err := f.plan(t.Context(), fakeEnv(nil)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}

func TestPlanWriteBudget(t *testing.T) {
	for args, want := range map[string]int64{
		"":                                0,
		"--write-budget none":             0,
		"--write-budget 10TB":             10e12,
		"--nvme none":                     0,
		"--write-budget none --nvme none": 0,
	} {
		f, _ := newServeFlags(t, strings.Fields(args)...)
		p, err := f.plan(t.Context(), fakeEnv(nil))
		if err != nil || p.writeBudget != want {
			t.Errorf("%s: %v, %v, want %d", args, p, err, want)
		}
	}
	for args, want := range map[string]string{
		"--write-budget 0":               "--write-budget 0: nothing could be written to NVMe",
		"--write-budget 1MiB":            "--write-budget 1MiB: want at least 192MiB a day",
		"--write-budget 1TB --nvme none": "exclude each other",
	} {
		f, _ := newServeFlags(t, strings.Fields(args)...)
		if _, err := f.plan(t.Context(), fakeEnv(nil)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}

func TestPrintCurves(t *testing.T) {
	var out strings.Builder
	err := printCurves(&out, []block.TierStats{
		{Tier: block.G2, Curves: []block.Curve{
			{Policy: "arc", Size: 1, Asked: 1000, Hits: 400}, {Policy: "arc", Size: 0.5, Asked: 100, Hits: 30}, {Policy: "arc", Size: 2}, {Asked: 1000, Hits: 512},
		}},
		{Tier: block.G3},
	})
	const want = "\nTIER  ASKED  arc    HALF   TWICE  ALL\ng2    1000   40.0%  30.0%  -      51.2%\n"
	if err != nil || out.String() != want {
		t.Errorf("%v, %q, want %q", err, out.String(), want)
	}
}
