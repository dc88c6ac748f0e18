package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
			"policy": "lru-leaf", "requests": 3., "block_refs": 7., "unique_blocks": 4., "capacity": 3.,
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
	for _, want := range []string{"policy           lru-leaf\n", "781 of 7814 unique blocks (10.0 %)", "300, 8490 block references"} {
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
		{"capacity 0", []string{"--capacity", "0", good}, []string{"--capacity", `"0"`}},
		{"capacity word", []string{"--capacity", "much", good}, []string{"--capacity", `"much"`}},
		{"capacity negative", []string{"--capacity", "-3", good}, []string{"--capacity", `"-3"`}},
		{"capacity 0 %", []string{"--capacity", "0%", good}, []string{"--capacity", `"0%"`}},
		{"capacity 101 %", []string{"--capacity", "101%", good}, []string{"--capacity", `"101%"`}},
		{"capacity NaN", []string{"--capacity", "NaN%", good}, []string{"--capacity", `"NaN%"`}},
		{"capacity of no block", []string{"--capacity", "1%", good}, []string{"capacity share 0.01", "3 unique"}},
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
