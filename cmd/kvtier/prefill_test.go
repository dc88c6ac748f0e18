package main

import (
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

func TestPlanPrefill(t *testing.T) {
	f, _ := newServeFlags(t, "--prefill", "llama-8b*=33us,2.5", "--prefill", "*=1ms")
	p, err := f.plan(t.Context(), fakeEnv(nil))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]block.Prefill{
		"llama-8b-tp2": {Token: 33 * time.Microsecond, Position: 2.5},
		"other":        {Token: time.Millisecond},
	} {
		if got := p.prefill.of(name); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	if got := (prefills{}).of("x"); got != (block.Prefill{}) {
		t.Errorf("none known: %+v", got)
	}
	for s, want := range map[string]string{
		"1ms":       "want GLOB=TOKEN",
		"=1ms":      "want GLOB=TOKEN",
		"a[=1ms":    "syntax error in pattern",
		"a=fast":    `"fast" is no duration`,
		"a=1ms,x":   `"x" is no number of ns`,
		"a=-1ms":    "prefill cost of a token: -1ms",
		"a=1ms,-1":  "prefill cost of a position: -1",
		"a=1ms,NaN": "prefill cost of a position: NaN",
		"a=0s":      "want more than 0",
	} {
		if _, err := parseNamedPrefill(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", s, err, want)
		}
	}
}

func TestMatchPlanPrints(t *testing.T) {
	for _, c := range []struct {
		p    block.Plan
		want string
	}{
		{block.Plan{To: 4, Load: 3 * time.Millisecond, Total: 3 * time.Millisecond, Recompute: time.Second}, "load all 4 blocks: 3ms, computing all takes 1s\n"},
		{
			block.Plan{To: 2, Load: 3 * time.Millisecond, Compute: 5 * time.Millisecond, Total: 8 * time.Millisecond, Recompute: time.Second},
			"load blocks 0 to 1 of 4 and compute the rest: 8ms (load 3ms, compute 5ms), computing all takes 1s\n",
		},
		{block.Plan{Compute: time.Second, Total: time.Second, Recompute: time.Second}, "compute all: 1s, no loading is faster\n"},
	} {
		if got := describePlan(c.p).line(4); got != c.want {
			t.Errorf("%+v: %q, want %q", c.p, got, c.want)
		}
	}
}
