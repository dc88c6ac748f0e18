package main

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/policy"
)

// runSimCmd runs the command alone.
func runSimCmd(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	c := newSimCmd()
	var out, messages bytes.Buffer
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(&messages)
	c.SilenceErrors, c.SilenceUsage = true, true
	err = c.ExecuteContext(t.Context())
	return out.String(), err
}

func writeTrace(t *testing.T, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func requestLine(ids string) string {
	return `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[` + ids + `]}`
}

func TestSimJSON(t *testing.T) {
	path := writeTrace(t, requestLine("1,2,3"), requestLine("1,4"), requestLine("1,2"), requestLine("9"))
	for _, c := range []struct {
		args []string
		want map[string]any
	}{
		{[]string{"--capacity", "3", "--limit", "3"}, map[string]any{
			"policy": "switch", "requests": 3., "block_refs": 7., "unique_blocks": 4., "capacity": 3.,
			"prefix_hit_rate": 3. / 7, "hit_rate": 3. / 7, "evictions": 1.,
		}},
		{[]string{"--capacity", "75%", "--limit", "3", "--policy", "lru-leaf"}, map[string]any{"capacity": 3., "evictions": 1.}},
		{[]string{"--capacity", "99.9%"}, map[string]any{"capacity": 4., "requests": 4., "unique_blocks": 5.}},
		{[]string{"--capacity", "4", "--high", "1", "--low", "0.5"}, map[string]any{"capacity": 4., "evictions": 1.}},
		{[]string{"--capacity", "4", "--high", "0.75", "--low", "0.5"}, map[string]any{"capacity": 4., "evictions": 4.}},
	} {
		out, err := runSimCmd(t, append(c.args, "--json", path)...)
		if err != nil {
			t.Errorf("sim %v: %v", c.args, err)
			continue
		}
		var got map[string]any
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Errorf("sim %v printed %q: %v", c.args, out, err)
			continue
		}
		for key, want := range c.want {
			if got[key] != want {
				t.Errorf("sim %v: %s is %v, want %v", c.args, key, got[key], want)
			}
		}
		if ns, ok := got["ns_per_ref"].(float64); !ok || ns <= 0 {
			t.Errorf("sim %v: ns_per_ref is %v", c.args, got["ns_per_ref"])
		}
	}
}

func TestSimText(t *testing.T) {
	out, err := runSimCmd(t, filepath.Join("testdata", "conversation_small.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"policy           switch\n", "781 of 7814 unique blocks (10.0 %)", "300, 8490 block references"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
}

func TestSimErrors(t *testing.T) {
	good := writeTrace(t, requestLine("1,2,3"))
	broken := writeTrace(t, requestLine("1,2,3"), `{"timestamp":0,`, requestLine("1"))
	blockless := writeTrace(t, requestLine(""))
	missing := filepath.Join(t.TempDir(), "none.jsonl")
	for _, c := range []struct {
		name string
		args []string
		want []string // in the message
	}{
		{"no trace", nil, []string{"1 arg"}},
		{"missing file", []string{missing}, []string{missing, "no such file"}},
		{"broken line", []string{broken}, []string{broken, "line 2", "not JSON"}},
		{"no blocks", []string{blockless}, []string{blockless, "no blocks"}},
		{"unknown policy", []string{"--policy", "mru", good}, []string{"--policy", `"mru"`, "lru-leaf"}},
		{"unknown policies", []string{"--compare", "arc,mru", good}, []string{"--compare", `"mru"`, "belady"}},
		{"policy twice", []string{"--compare", "arc,arc", good}, []string{"--compare", `"arc"`, "twice"}},
		{"policy and policies", []string{"--compare", "all", "--policy", "arc", good}, []string{"--compare", "--policy"}},
		{"drawing of another kind", []string{"--plot", "p.png", good}, []string{"--plot", "p.png", ".svg"}},
		{"drawing nowhere", []string{"--capacity", "2", "--plot", filepath.Join(missing, "p.svg"), good}, []string{"--plot", "p.svg", "no such file"}},
		{"table nowhere", []string{"--capacity", "2", "--csv", filepath.Join(missing, "p.csv"), good}, []string{"--csv", "p.csv", "no such file"}},
		{"sweep of no block", []string{"--compare", "all", good}, []string{"capacity share 0.01", "3 unique"}},
		{"one bad capacity", []string{"--capacity", "2,x", good}, []string{"--capacity", `"x"`}},
		{"no capacity", []string{"--capacity", "", good}, []string{"--capacity", `""`}},
		{"capacity 0", []string{"--capacity", "0", good}, []string{"--capacity", `"0"`}},
		{"capacity word", []string{"--capacity", "much", good}, []string{"--capacity", `"much"`}},
		{"capacity negative", []string{"--capacity", "-3", good}, []string{"--capacity", `"-3"`}},
		{"capacity 0 %", []string{"--capacity", "0%", good}, []string{"--capacity", `"0%"`}},
		{"capacity 101 %", []string{"--capacity", "101%", good}, []string{"--capacity", `"101%"`}},
		{"capacity NaN", []string{"--capacity", "NaN%", good}, []string{"--capacity", `"NaN%"`}},
		{"capacity of no block", []string{"--capacity", "1%", good}, []string{"capacity share 0.01", "3 unique"}},
		{"one tier of two", []string{"--tiers", "2", good}, []string{"--tiers 2", "DRAM,SSD"}},
		{"three tiers", []string{"--tiers", "1,2,3", good}, []string{"--tiers 1,2,3", "DRAM,SSD"}},
		{"tier of no block", []string{"--tiers", "1,1%", good}, []string{"SSD", "capacity share 0.01"}},
		{"optimum of no block", []string{"--tiers", "1%,1", "--policy", "belady", good}, []string{"DRAM", "capacity share 0.01"}},
		{"tiers and capacity", []string{"--tiers", "1,2", "--capacity", "1", good}, []string{"--tiers", "--capacity"}},
		{"tiers drawn", []string{"--tiers", "1,2", "--plot", "p.svg", good}, []string{"--tiers", "--plot"}},
		{"budget of one tier", []string{"--write-budget", "1", good}, []string{"--write-budget", "--tiers"}},
		{"budget below 0", []string{"--write-budget", "-1", "--tiers", "1,2", good}, []string{"--write-budget -1"}},
		{"budget NaN", []string{"--write-budget", "NaN", "--tiers", "1,2", good}, []string{"--write-budget NaN"}},
		{"tokens of one tier", []string{"--block-tokens", "16", good}, []string{"--block-tokens", "--tiers"}},
		{"tokens below 0", []string{"--block-tokens", "-1", "--tiers", "1,2", good}, []string{"--block-tokens -1"}},
		{"limit", []string{"--limit", "-1", good}, []string{"--limit", "-1"}},
		{"high alone", []string{"--high", "0.9", "--capacity", "2", good}, []string{"high 0.9", "low 0"}},
		{"low above high", []string{"--high", "0.5", "--low", "0.6", "--capacity", "2", good}, []string{"high 0.5", "low 0.6"}},
		{"high above 1", []string{"--high", "1.5", "--low", "0.6", good}, []string{"--high", "1.5"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := runSimCmd(t, c.args...)
			if err == nil {
				t.Fatalf("no error, output %q", out)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

const smallTrace = "conversation_small.jsonl.gz"

func TestSimBelady(t *testing.T) {
	path := writeTrace(t, requestLine("1,2,3"), requestLine("1,4"), requestLine("1,2"), requestLine("1,4"))
	out, err := runSimCmd(t, "--policy", "belady", "--capacity", "2", "--json", path)
	if err != nil {
		t.Fatal(err)
	}
	var got simReport
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	got.NsPerRef = 0
	// Of 2 and 4, which come again, one is kept beside 1.
	if want := (simReport{Policy: "belady", Requests: 4, BlockRefs: 9, UniqueBlocks: 4, Capacity: 2, PrefixHitRate: 4. / 9, HitRate: 4. / 9, Evictions: 3}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestSimTiers(t *testing.T) {
	line := func(tokens int, ids string) string {
		return strings.Replace(requestLine(ids), `"input_length":1,`, fmt.Sprintf(`"input_length":%d,`, tokens), 1)
	}
	// 3 finds no room in DRAM. 2 and 1 leave it for 4 and 5, and 3 leaves SSD for 1.
	path := writeTrace(t, line(5, "1,2,3"), line(4, "4,5"), line(4, "1,2"))
	csvPath := filepath.Join(t.TempDir(), "tiers.csv")
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, `"prefix_hit_rate": 0.2857142857142857`},
		{nil, `"hits_by_tier": {
    "dram": 0,
    "ssd": 2
  }`},
		{nil, `"ssd_writes": 3`},
		{nil, `"ssd_writes_per_hit": 1.5`},
		{nil, `"capacity": 4`},
		{[]string{"--block-tokens", "2"}, `"ssd_writes": 2`},   // 3 is partial
		{[]string{"--write-budget", "0.1"}, `"ssd_writes": 2`}, // of 2, and of 1 that it needs
		{[]string{"--write-budget", "0.01"}, `"ssd_writes": 0`},
	} {
		out, err := runSimCmd(t, append(c.args, "--policy", "lru-leaf", "--tiers", "2,2", "--csv", csvPath, "--json", path)...)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, c.want) {
			t.Errorf("sim %v lacks %s:\n%s", c.args, c.want, out)
		}
	}
	out, err := runSimCmd(t, "--policy", "lru-leaf", "--tiers", "2,2", "--csv", csvPath, path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"prefix hits by tier  DRAM 0, SSD 2\n", "SSD writes           3, 1.500 a prefix hit\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
	table, err := os.ReadFile(csvPath)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(table), "\n")
	if !strings.HasSuffix(lines[0], ",dram_capacity,ssd_capacity,dram_hits,ssd_hits,ssd_writes") || !strings.HasSuffix(lines[1], ",2,2,0,2,3") {
		t.Errorf("the table is\n%s", table)
	}
	out, err = runSimCmd(t, "--compare", "lru-leaf,belady", "--tiers", "2,2", path)
	if err != nil {
		t.Fatal(err)
	}
	lines = strings.Split(out, "\n")
	if len(lines) != 6 || !strings.HasSuffix(lines[0], "; 4 in both tiers") || !slices.Equal(strings.Fields(lines[3]), []string{"lru-leaf", "0.2857", "(100.0)", "0.0000", "0.2857", "0.429", "1.500"}) || !slices.Equal(strings.Fields(lines[4]), []string{"belady", "0.2857", "(100.0)"}) {
		t.Errorf("the table is\n%s", out)
	}
}

func TestSimCompare(t *testing.T) {
	dir := t.TempDir()
	csvPath, svgPath := filepath.Join(dir, "hits.csv"), filepath.Join(dir, "hits.svg")
	trace := filepath.Join("testdata", smallTrace)
	out, err := runSimCmd(t, "--compare", "all", "--json", "--csv", csvPath, "--plot", svgPath, trace)
	if err != nil {
		t.Fatal(err)
	}
	var reports []simReport
	if err := json.Unmarshal([]byte(out), &reports); err != nil {
		t.Fatal(err)
	}
	if want := len(simPolicies()) * 6; len(reports) != want {
		t.Fatalf("%d reports, want %d", len(reports), want)
	}
	best := make(map[int64]float64)
	for _, r := range reports {
		if r.Policy == beladyName {
			best[r.Capacity] = r.PrefixHitRate
		}
	}
	for _, r := range reports {
		if r.PrefixHitRate > best[r.Capacity] || r.PrefixHitRate <= 0 {
			t.Errorf("%s has a hit rate of %v at %d blocks, the optimum is %v", r.Policy, r.PrefixHitRate, r.Capacity, best[r.Capacity])
		}
	}

	file, err := os.Open(csvPath)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) != len(reports)+1 {
		t.Fatalf("%d lines, want one for each of %d reports and a head", len(lines), len(reports))
	}
	for i, r := range reports {
		want := []string{r.Policy, fmt.Sprint(r.Capacity), fmt.Sprintf("%.6f", r.PrefixHitRate)}
		if got := []string{lines[i+1][0], lines[i+1][1], lines[i+1][6]}; !slices.Equal(got, want) {
			t.Errorf("line %d has %v, want %v", i+1, got, want)
		}
	}

	drawing, err := os.ReadFile(svgPath)
	if err != nil {
		t.Fatal(err)
	}
	var svg struct {
		Lines []struct {
			Points string `xml:"points,attr"`
		} `xml:"polyline"`
		Texts []string `xml:"text"`
	}
	if err := xml.Unmarshal(drawing, &svg); err != nil {
		t.Fatal(err)
	}
	if len(svg.Lines) != len(simPolicies()) {
		t.Errorf("%d lines are drawn, want %d", len(svg.Lines), len(simPolicies()))
	}
	for _, l := range svg.Lines {
		last := -1.
		for _, point := range strings.Fields(l.Points) {
			var x, y float64
			if _, err := fmt.Sscanf(point, "%f,%f", &x, &y); err != nil {
				t.Fatalf("point %q: %v", point, err)
			}
			if x <= last || x > plotWidth-plotRight || y < plotTop || y > plotHeight-plotBottom {
				t.Errorf("point %q is behind %v or outside of the axes", point, last)
			}
			last = x
		}
	}
	for _, name := range simPolicies() {
		if !slices.Contains(svg.Texts, name) {
			t.Errorf("the drawing does not name %s", name)
		}
	}
}

func TestSimTable(t *testing.T) {
	trace := filepath.Join("testdata", smallTrace)
	out, err := runSimCmd(t, "--compare", "lru-leaf,belady", "--capacity", "100,10%", trace)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out, "\n")
	if len(lines) != 6 || !slices.Equal(strings.Fields(lines[2]), []string{"CAPACITY", "100", "781"}) || !strings.Contains(lines[4], "(100.0)") {
		t.Errorf("the table is\n%s", out)
	}
	out, err = runSimCmd(t, "--capacity", "100,200", "--json", trace) // one policy, several capacities
	if err != nil {
		t.Fatal(err)
	}
	var reports []simReport
	if err := json.Unmarshal([]byte(out), &reports); err != nil {
		t.Fatal(err)
	}
	if len(reports) != 2 || reports[1].Capacity != 200 || reports[1].Policy != policy.Default {
		t.Errorf("reports are %+v", reports)
	}
}

func TestPlotOfOneCapacity(t *testing.T) {
	drawing := string(simPlot([]simReport{{Policy: "arc", Capacity: 7, UniqueBlocks: 10, PrefixHitRate: 0}}))
	if strings.Contains(drawing, "NaN") || strings.Contains(drawing, "Inf") {
		t.Errorf("the drawing has no place for its point:\n%s", drawing)
	}
}

func TestCapacityFlagShowsWhatItTook(t *testing.T) {
	for _, s := range []string{"1", "4759", "10%", "0.1%", "29%", "33.3%", "100%"} {
		var v capacityValue
		if err := v.Set(s); err != nil {
			t.Errorf("Set(%q): %v", s, err)
		} else if v.String() != s {
			t.Errorf("Set(%q) shows %q", s, v.String())
		}
	}
}
