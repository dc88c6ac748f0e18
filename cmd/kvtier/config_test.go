package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// newServeFlags parses args as serve does.
func newServeFlags(t *testing.T, args ...string) (*serveFlags, *pflag.FlagSet) {
	t.Helper()
	f := &serveFlags{}
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	f.add(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f, fs
}

func TestConfig(t *testing.T) {
	f, fs := newServeFlags(t, "--high", "0.9", "--listen", "unix:/run/a", "--listen", "[::1]:1")
	err := applyConfig([]byte(`
# A comment.
data: &d /srv/kvtier
dram: 4GiB
prefetch-bytes: 1048576
nvme:
  - /mnt/a=1GiB
  - /mnt/b=2GiB
listen: [127.0.0.1:9]
high: 0.97
low: 0.5
grace: 250ms
insecure: true
token-file: *d
log-format: json
`), fs)
	if err != nil {
		t.Fatal(err)
	}
	if f.data != "/srv/kvtier" || f.tokenFile != f.data {
		t.Errorf("data %q, token-file %q", f.data, f.tokenFile)
	}
	if f.dram != 4<<30 || f.prefetch != 1<<20 {
		t.Errorf("dram %d, prefetch-bytes %d", f.dram, f.prefetch)
	}
	if got := strings.Join(f.nvme, " "); got != "/mnt/a=1GiB /mnt/b=2GiB" {
		t.Errorf("nvme %q", got)
	}
	// The command line wins.
	if f.high != 0.9 || f.low != 0.5 {
		t.Errorf("high %v, low %v", f.high, f.low)
	}
	if got := strings.Join(f.listen, " "); got != "unix:/run/a [::1]:1" {
		t.Errorf("listen %q", got)
	}
	if f.grace != 250*time.Millisecond || !f.insecure || f.logFormat != "json" {
		t.Errorf("grace %v, insecure %v, log-format %q", f.grace, f.insecure, f.logFormat)
	}
}

func TestConfigRefuses(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{
			"unknown keys, all of them", "drm: 1\ndata: /x\nlissten: y\n<<: {a: b}\n",
			`unknown keys "drm" (line 1), "lissten" (line 3), "<<" (line 4)`,
		},
		{"one unknown key", "drm: 1\n", `unknown key "drm" (line 1)`},
		{"flags that are no keys", "config: a\nhelp: true\nprint-config: true\n", `unknown keys "config" (line 1), "help" (line 2), "print-config" (line 3)`},
		{
			"unknown and wrong", "drm: 1\ndram: 4Gx\n",
			`unknown key "drm" (line 1); line 2: dram: size "4Gx": unknown unit "Gx", want B, KiB, MiB, GiB or TiB`,
		},
		{"size of wrong type", "dram: [1]\n", "line 1: dram: want a size such as 4GiB, have a list"},
		{"size nothing", "dram:\n", "line 1: dram: want a size such as 4GiB, have nothing"},
		{"share of wrong type", "\nhigh: yes\n", `line 2: high: want a number from 0 to 1, have str "yes"`},
		{"share out of range", "low: 1.5\n", `line 1: low: "1.5": want a number from 0 to 1`},
		{"string of wrong type", "data: 3\n", `line 1: data: want a string, have int "3"`},
		{"bool of wrong type", "insecure: on it\n", `line 1: insecure: want true or false, have str "on it"`},
		{"duration of wrong type", "grace: 30\n", `line 1: grace: want a duration such as 30s, have int "30"`},
		{"bad duration", "grace: fast\n", `line 1: grace: time: invalid duration "fast"`},
		{"word", "posix-engine: aio\n", `line 1: posix-engine: "aio": want auto, io_uring, goroutines`},
		{"list of wrong type", "nvme: {a: b}\n", "line 1: nvme: want a list of strings, have a mapping"},
		{"element of wrong type", "nvme:\n- /a=1GiB\n- 7\n", `line 2: nvme: want a list of strings, have int "7" in it on line 3`},
		{"bad element", "nvme:\n- /a\n", `line 2: nvme: slab "/a": want PATH=SIZE or none`},
		{"bad address", "listen: [nowhere]\n", `line 1: listen: address "nowhere": want HOST:PORT or unix:PATH`},
		{"key twice", "data: /a\ndata: /b\n", "line 2: data: given already on line 1"},
		{"no mapping", "- a\n", "line 1: want a mapping of flag names to values"},
		{"two documents", "data: /a\n---\ndata: /b\n", "more than one YAML document"},
		{"not YAML", "a: b: c\n", "yaml: mapping values are not allowed in this context"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, fs := newServeFlags(t)
			err := applyConfig([]byte(tc.in), fs)
			if err == nil || err.Error() != tc.want {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}

// A file is wrong even where the command line wins.
func TestConfigCheckedWhereFlagsWin(t *testing.T) {
	f, fs := newServeFlags(t, "--dram", "1GiB")
	if err := applyConfig([]byte("dram: 4Gx\n"), fs); err == nil {
		t.Error("no error")
	}
	if f.dram != 1<<30 {
		t.Errorf("dram %d", f.dram)
	}
}

func TestConfigEmpty(t *testing.T) {
	for _, in := range []string{"", "# nothing\n", "---\n", "null\n"} {
		_, fs := newServeFlags(t)
		if err := applyConfig([]byte(in), fs); err != nil {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// What --print-config prints is the same configuration again.
func TestPrintConfigFeedsBack(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "in.yaml")
	write(t, in, "nvme: none\nhigh: 1\ntoken-file: ''\nlisten: ['unix:/run/a b', '127.0.0.1:0']\n")
	var first bytes.Buffer
	stderr := new(bytes.Buffer)
	args := []string{"serve", "--print-config", "--data", dir, "--log-level", "debug"}
	if code := run(context.Background(), append(args, "--config", in), nil, &first, stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for _, want := range []string{"data: " + dir + "\n", "nvme:\n  - none\n", "high: 1\n", "log-level: debug\n", "  - unix:/run/a b\n"} {
		if !strings.Contains(first.String(), want) {
			t.Errorf("no %q in\n%s", want, &first)
		}
	}
	write(t, in, first.String())
	var second bytes.Buffer
	if code := run(context.Background(), []string{"serve", "--print-config", "--config", in}, nil, &second, stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	// Only why DRAM has its size is no longer known.
	strip := func(s string) string {
		var lines []string
		for l := range strings.Lines(s) {
			l, _, _ = strings.Cut(l, " #")
			lines = append(lines, strings.TrimSpace(l))
		}
		return strings.Join(lines, "\n")
	}
	if strip(first.String()) != strip(second.String()) {
		t.Errorf("first\n%s\nsecond\n%s", &first, &second)
	}
}

// What is printed means the same in every working directory.
func TestPrintConfigAbsolute(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	args := []string{"serve", "--print-config", "--data", "kv", "--nvme", "kv/a=64MiB", "--nvme", "/b=1G"}
	if code := run(context.Background(), args, nil, &stdout, &stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, &stderr)
	}
	for _, want := range []string{"data: " + wd + "/kv\n", "nvme:\n  - " + wd + "/kv/a=64MiB\n  - /b=1GiB\n"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("no %q in\n%s", want, &stdout)
		}
	}
}

// FuzzConfig: whatever is accepted can be printed and is accepted again, with
// the same meaning.
func FuzzConfig(f *testing.F) {
	f.Add("data: /srv/kvtier\ndram: 4GiB\nnvme: [/a=1GiB, /b=2GiB]\nhigh: .9\n")
	f.Add("data: \"a\\nb: c\"\ntoken-file: '# x'\n")
	f.Add("policy: [g2=arc, g3=switch]\nprefill: ['llama-*=33us,0.4', '*=1ms']\nwrite-budget: 2TB\n")
	f.Add("object: ['s3://bucket/a?endpoint=http://127.0.0.1:1&path_style=true', 'azure://container']\ncluster: one\n")
	f.Add("dram: 0x10\nlisten: []\nhigh: 1e-1\ninsecure: true\n")
	f.Fuzz(func(t *testing.T, in string) {
		_, fs := newServeFlags(t)
		if applyConfig([]byte(in), fs) != nil {
			return
		}
		var first bytes.Buffer
		if err := formatConfig(&first, fs, func(string) string { return "" }); err != nil {
			t.Fatal(err)
		}
		_, again := newServeFlags(t)
		if err := applyConfig(first.Bytes(), again); err != nil {
			t.Fatalf("%v in\n%s", err, &first)
		}
		fs.VisitAll(func(fl *pflag.Flag) {
			if got := again.Lookup(fl.Name).Value.String(); got != fl.Value.String() {
				t.Errorf("%s: %q, was %q", fl.Name, got, fl.Value)
			}
		})
	})
}

// write makes a file.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
