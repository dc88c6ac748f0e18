package archtest_test

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// TestRules shows that the rules find what they are for, and only that.
func TestRules(t *testing.T) {
	for _, tt := range []struct {
		src  string
		want string // part of the one finding; "" for none
	}{
		{`func init() {}`, "func init"},
		{`type T struct{}; func (T) init() {}`, ""},
		{`import _ "net/http/pprof"`, "blank import"},
		{`import _ "embed"`, ""},
		{`var log = slog.New(nil)`, "*slog.Logger"},
		{`var log *slog.Logger`, "*slog.Logger"},
		{`var ctx = context.Background()`, "context"},
		{`var kinds = map[string]int{}`, "registry"},
		{`var kinds = make(map[string]int)`, "registry"},
		{`var kinds = map[string]int{"a": 1}`, ""},
		{`var mu sync.Mutex`, "sync.Mutex"},
		{`var all = &sync.Map{}`, "sync.Map"},
		{`var done = make(chan int)`, "channel"},
		{`var ErrX = errors.New("x")`, ""},
		{`var pool = sync.Pool{}`, ""},
		{`func f() { slog.Info("x") }`, "slog.Info"},
		{`func f(log *slog.Logger) { log.Info("x") }`, ""},
		{`func f() { log.Fatal("x") }`, "log.Fatal"},
		{`func f() { prometheus.MustRegister(nil) }`, "registry of the process"},
		{`func f() { m := map[string]int{}; _ = m }`, ""},
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\n"+tt.src, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		found := hidden(f, false)
		switch {
		case tt.want == "" && len(found) > 0:
			t.Errorf("%s: found %q, want nothing", tt.src, found[0].why)
		case tt.want != "" && (len(found) != 1 || !strings.Contains(found[0].why, tt.want)):
			t.Errorf("%s: found %v, want one with %q", tt.src, found, tt.want)
		}
	}
}

func TestAllows(t *testing.T) {
	for _, tt := range []struct {
		name, path string
		want       bool
	}{
		{"index", module + "/index", true},
		{"index", module + "/index/block", false}, // a package of ours is meant exactly
		{"index", "github.com/someone/index", false},
		{grpc, grpc, true},
		{grpc, grpc + "/codes", true},
		{grpc, grpc + "extra", false},
	} {
		if got := allows(tt.name, tt.path); got != tt.want {
			t.Errorf("allows(%q, %q) = %v, want %v", tt.name, tt.path, got, tt.want)
		}
	}
}
