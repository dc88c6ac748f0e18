package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

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
	kvtier(t, addr, "", "policy", "set").want(t, 2, "", "want the NAME of a policy, --write-budget, or both")
	kvtier(t, addr, "", "policy", "set", "--tier", "g2", "--write-budget", "1TB").want(t, 2, "", "--tier g2 is for the NAME of a policy")
	kvtier(t, addr, "", "policy", "set", "--write-budget", "1TB").want(t, 1, "", "no tier g3")
	kvtier(t, addr, "", "policy", "set", "--write-budget", "1TB", "--write-budget", "g3=1GB").want(t, 2, "", "both of g3")
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
	const bucket = " --object s3://b/p"
	g3 := func(bytes int64) []block.WriteBudget { return []block.WriteBudget{{Tier: block.G3, Bytes: bytes}} }
	for args, want := range map[string][]block.WriteBudget{
		"":                                nil,
		"--write-budget none":             nil,
		"--write-budget 10TB":             g3(10e12),
		"--write-budget g3=10TB":          g3(10e12),
		"--write-budget 3650TB/5y":        g3(2e12),
		"--write-budget 1825TB/2.5y":      g3(2e12),
		"--nvme none":                     nil,
		"--write-budget none --nvme none": nil,
		"--nvme none --write-budget g4=500GB,100000" + bucket: {{Tier: block.G4, Bytes: 500e9, Requests: 100000}},
		"--write-budget g4=none,24" + bucket:                  {{Tier: block.G4, Requests: 24}},
		"--write-budget 1TB --write-budget g3/team=a/*=1GB":   {g3(1e12)[0], {Tier: block.G3, Namespaces: "team=a/*", Bytes: 1e9}},
	} {
		f, _ := newServeFlags(t, strings.Fields(args)...)
		p, err := f.plan(t.Context(), fakeEnv(nil))
		if err != nil || !slices.Equal(p.budgets, want) {
			t.Errorf("%s: %v, %v, want %v", args, p, err, want)
		}
	}
	for args, want := range map[string]string{
		"--write-budget 1TB --nvme none":                "exclude each other",
		"--write-budget g4=1TB":                         "--write-budget g4=1TB without --object: there is no bucket to write to",
		"--write-budget 1TB --write-budget g3=2TB":      "1TB and g3=2TB are both of g3",
		"--write-budget none --write-budget 2TB":        "none and 2TB are both of g3",
		"--write-budget g4/a=1TB --write-budget g4/a=2": `"g4/a=2": want at least 192MiB a day`,
	} {
		f, fs := newServeFlags(t)
		err := fs.Parse(strings.Fields(args))
		if err == nil {
			_, err = f.plan(t.Context(), fakeEnv(nil))
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
	for value, want := range map[string]string{
		"0":                "nothing could be written; say none for no bound",
		"g4=0":             "nothing could be written",
		"1MiB":             "want at least 192MiB a day",
		"lots":             `size "lots"`,
		"g2=1TB":           "want g3 or g4 before the =",
		"g9=1TB":           "g9",
		"g3/=1TB":          `bad glob ""`,
		"g3/[=1TB":         `bad glob "["`,
		"1TB,100":          "requests are for g4",
		"g4=1TB,":          `"" requests a day: want a number from 24 on`,
		"g4=1TB,23":        `"23" requests a day`,
		"g4=1TB,1e6":       `"1e6" requests a day`,
		"600TB/5":          `"5": want a number of years such as 5y`,
		"600TB/0y":         `"0y": want a number of years`,
		"600TB/-1y":        `"-1y": want a number of years`,
		"8000000TB/0.001y": "too large",
	} {
		if err := checkBudget(value); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), value) {
			t.Errorf("%s: %v, want %s", value, err, want)
		}
	}
}

func TestPrintBudgets(t *testing.T) {
	stats := []block.TierStats{{Tier: block.G2}, {Tier: block.G3, Admission: &block.AdmissionStats{
		Budgets: []block.BudgetStats{
			{WriteBudget: block.WriteBudget{Tier: block.G3, Bytes: 1 << 40}, AvailableBytes: -4096},
			{WriteBudget: block.WriteBudget{Tier: block.G3, Namespaces: "a*", Bytes: 1 << 30}, AvailableBytes: 1 << 20},
		},
		Admitted: 7, Rejected: map[string]int64{"used_once": 5, "tail": 0},
	}}, {Tier: block.G4, Admission: &block.AdmissionStats{
		Budgets: []block.BudgetStats{{WriteBudget: block.WriteBudget{Tier: block.G4, Bytes: 1 << 30, Requests: 100}, AvailableRequests: 4}},
	}}}
	var out strings.Builder
	if err := printBudgets(&out, stats); err != nil {
		t.Fatal(err)
	}
	const want = `
g3: 1.0 TiB a day may be written, -4.0 KiB now
g3/a*: 1.0 GiB a day may be written, 1.0 MiB now
g3: 7 blocks admitted, 5 rejected (used_once 5)

g4: 1.0 GiB a day may be written, 0 B now; 100 requests a day may be made, 4 now
g4: 0 blocks admitted, 0 rejected
`
	if out.String() != want {
		t.Errorf("%s\nwant %s", &out, want)
	}
	got := describeTiers([]block.TierPolicy{{Tier: block.G2, Policy: "arc"}, {Tier: block.G3, Policy: "switch"}}, stats)
	if len(got) != 3 || got[1].Policy != "switch" || len(got[1].Budgets) != 2 || got[2].Tier != "g4" || got[2].Budgets[0].Requests != 100 || got[0].Budgets != nil {
		t.Errorf("as JSON %+v", got)
	}
}

func TestPrintPrefills(t *testing.T) {
	var out strings.Builder
	err := printPrefills(&out, []block.NamespaceStats{
		{Name: "nobody"},
		{Name: "told", Prefill: &block.PrefillCost{Prefill: block.Prefill{Token: 33 * time.Microsecond, Position: 1.5}, Reports: 7}},
		{Name: "learned", Prefill: &block.PrefillCost{Prefill: block.Prefill{Token: 33012, Position: 1.0987654}, Learned: true, Reports: 900}},
		{Name: "little", Prefill: &block.PrefillCost{Learned: true, Reports: 1}},
	})
	const want = `
NAMESPACE  PREFILL       KNOWN FROM
told       33µs,1.5      --prefill
learned    33.012µs,1.1  900 reports
little     -             1 report
`
	if err != nil || out.String() != want {
		t.Errorf("%v, %s, want %s", err, &out, want)
	}
	out.Reset()
	if err := printPrefills(&out, []block.NamespaceStats{{Name: "nobody"}}); err != nil || out.Len() > 0 {
		t.Errorf("%v, %q", err, &out)
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
