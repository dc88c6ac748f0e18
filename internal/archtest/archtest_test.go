package archtest_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/kvtier/kvtier"

// Modules of others, by the short names that the table uses.
const (
	bufconn  = "google.golang.org/grpc/test/bufconn"
	cobra    = "github.com/spf13/cobra"
	pflag    = "github.com/spf13/pflag"
	goleak   = "go.uber.org/goleak"
	grpc     = "google.golang.org/grpc"
	pebble   = "github.com/cockroachdb/pebble/v2"
	prom     = "github.com/prometheus/client_golang"
	promText = "github.com/prometheus/common/expfmt"
	protobuf = "google.golang.org/protobuf"
	xsync    = "golang.org/x/sync"
	xsys     = "golang.org/x/sys"
	awssdk   = "github.com/aws/aws-sdk-go-v2"
	azure    = "github.com/Azure/azure-sdk-for-go/sdk"
	crc64    = "github.com/minio/crc64nvme"
	smithy   = "github.com/aws/smithy-go"
	xxh3     = "github.com/zeebo/xxh3"
	xxhash   = "github.com/cespare/xxhash/v2"
	yaml     = "go.yaml.in/yaml/v3"
)

// may is what a package may import beside the standard library: packages of
// this module by their path in it, exactly, and modules of others with all
// their packages.
type may struct {
	code  []string
	tests []string // in its tests, more than that and than commonTests
	all   bool     // every package of this module
}

// commonTests is what every test may import: the suites, and what is internal.
var commonTests = []string{"xfer/xfertest", "policy/policytest", "api/apitest", "internal/arena", "internal/invariants", goleak}

// table says who may import whom. Imports point one way: index/block and xfer
// are leaves, cmd/kvtier knows everything.
var table = map[string]may{
	"index/block":         {},
	"internal/arena":      {code: []string{xsys}, tests: []string{"internal/servers"}},
	"internal/blocksum":   {code: []string{xxh3}},
	"internal/invariants": {},

	"xfer/wire":     {},
	"xfer":          {code: []string{"xfer/wire"}, tests: []string{"backends/mem"}}, // its example moves real bytes
	"xfer/xfertest": {code: []string{"xfer", "internal/arena", goleak}},
	"xfer/frame":    {code: []string{"internal/invariants", xsys}},

	"backends": {code: []string{"xfer", "backends/mem", "backends/posix", "backends/shm", "backends/tcp"}},
	// A backend imports xfer and what it drives, and never another backend.
	"backends/tcp":   {code: []string{"xfer", "xfer/frame", "internal/arena"}, tests: []string{"internal/servers", xsys}},
	"backends/mem":   {code: []string{"xfer", "internal/arena"}},
	"backends/posix": {code: []string{"xfer", "internal/arena", "internal/invariants", xsys}, tests: []string{"internal/servers"}},
	"backends/shm":   {code: []string{"xfer", "xfer/frame", "internal/arena", xsys}, tests: []string{"internal/servers"}},
	// Objects: what is the same for all services, and for each an adapter of its SDK. An SDK
	// is imported by its adapter alone.
	"backends/object": {code: []string{"xfer", "internal/arena"}},
	"backends/azure":  {code: []string{"xfer", "backends/object", azure, crc64}, tests: []string{"internal/servers"}},
	"backends/s3":     {code: []string{"xfer", "backends/object", awssdk, smithy}, tests: []string{"internal/servers"}},

	"index": {code: []string{"index/block", "internal/invariants", pebble, xxhash, xsys}},

	"policy":            {code: []string{"index/block"}},
	"policy/policytest": {code: []string{"policy", "index/block"}},
	"policy/trace":      {code: []string{"index/block"}},
	"policy/sim":        {code: []string{"policy", "index/block"}, tests: []string{"policy/trace"}},

	// What lies in a bucket is a format, and no more.
	"tiers/packed": {code: []string{"index", "index/block", xxhash}},
	"tiers/bucket": {
		code:  []string{"index", "index/block", "tiers/packed", "xfer"},
		tests: []string{"backends/object", "backends/s3", "internal/servers", xxhash},
	},
	"tiers": {
		code: []string{"xfer", "index", "index/block", "policy", "tiers/bucket", "tiers/packed", "internal/arena", "internal/invariants", xxh3, xxhash, xsys},
		// A store needs something that moves its bytes; its tests bring it, its code
		// does not. They also bring file systems that crash, below the catalog.
		tests: []string{"backends/mem", "backends/posix", "internal/servers", pebble},
	},

	// The API serves an interface of its own, so it does not know tiers.
	"api":                  {code: []string{"index/block", "api/access", "api/kvtierpb", "api/session", "internal/invariants", grpc, protobuf, xxh3, xsync}, tests: []string{"api/apitest/memstore"}},
	"api/access":           {code: []string{"index/block"}},
	"api/session":          {code: []string{"index/block", "api/access", "xfer/frame", "internal/arena", "internal/blocksum", xxh3, xsync, xsys}, tests: []string{"api/apitest/memstore", "internal/servers"}},
	"api/kvtierpb":         {code: []string{grpc, protobuf}},
	"api/apitest":          {code: []string{"api", "api/session", "index/block", grpc, xxh3}},
	"api/apitest/memstore": {code: []string{"api", "index/block", xxh3, xsys}},

	// The program wires everything, and nothing knows it.
	"cmd/kvtier": {
		all:   true,
		code:  []string{cobra, pflag, prom, yaml, pebble, xxh3, xsync, xsys},
		tests: []string{promText},
	},

	// The end-to-end tests see what a stranger sees: a program and a Go client.
	"e2e": {tests: []string{"api", "api/session", "index/block", "internal/servers", xsys}},

	"internal/archtest": {},
	"internal/gotest":   {},
	"internal/servers":  {},
}

// goPackage is what this test reads of go list's output.
type goPackage struct {
	ImportPath     string
	Name           string
	Dir            string
	GoFiles        []string
	CgoFiles       []string
	IgnoredGoFiles []string // of other systems or tags: they count as well
	TestGoFiles    []string
	XTestGoFiles   []string
}

// path is the import path within the module.
func (p *goPackage) path() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
}

// file is a parsed file with the package it belongs to.
type file struct {
	pkg  *goPackage
	name string // path within the module
	test bool
	ast  *ast.File
	fset *token.FileSet
}

func (f *file) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", f.name, f.fset.Position(n.Pos()).Line)
}

// generated reports whether a tool wrote the file.
func (f *file) generated() bool { return ast.IsGenerated(f.ast) }

// load lists the module's packages and parses all their files.
func load(t *testing.T) ([]*goPackage, []*file) {
	t.Helper()
	cmd := exec.Command("go", "list", "-json", "./...")
	cmd.Dir = filepath.Join("..", "..")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, stderr.String())
	}
	var pkgs []*goPackage
	var files []*file
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		p := &goPackage{}
		if err := dec.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
		for _, name := range slices.Concat(p.GoFiles, p.CgoFiles, p.IgnoredGoFiles, p.TestGoFiles, p.XTestGoFiles) {
			fset := token.NewFileSet()
			tree, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, &file{
				pkg: p, name: filepath.ToSlash(filepath.Join(p.path(), name)),
				test: strings.HasSuffix(name, "_test.go"), ast: tree, fset: fset,
			})
		}
	}
	if len(files) == 0 {
		t.Fatal("go list found no file")
	}
	return pkgs, files
}

// isStandard reports whether an import is of the standard library: only the
// first part of other paths has a dot.
func isStandard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

// allows reports whether a name of the table is the import or, for a module of
// others, holds it.
func allows(name, path string) bool {
	if own, ok := strings.CutPrefix(path, module+"/"); ok {
		return name == own
	}
	return path == name || strings.HasPrefix(path, name+"/")
}

func TestImports(t *testing.T) {
	pkgs, files := load(t)
	missing := maps.Clone(table)
	for _, p := range pkgs {
		if _, ok := table[p.path()]; !ok {
			t.Errorf("package %s is not in the table: add what it may import", p.path())
		}
		delete(missing, p.path())
	}
	for name := range missing {
		t.Errorf("the table has package %s, the module has not: remove it", name)
	}
	used := map[string]map[string]bool{} // package -> names in its row that a file needs
	for _, f := range files {
		row, ok := table[f.pkg.path()]
		if !ok {
			continue
		}
		if used[f.pkg.path()] == nil {
			used[f.pkg.path()] = map[string]bool{}
		}
		allowed, what := row.code, f.pkg.path()
		if f.test {
			allowed = slices.Concat(row.code, row.tests, commonTests, []string{f.pkg.path()})
			what = "a test of " + what
		}
		for _, spec := range f.ast.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if isStandard(path) || row.all && strings.HasPrefix(path, module+"/") {
				continue
			}
			if i := slices.IndexFunc(allowed, func(name string) bool { return allows(name, path) }); i >= 0 {
				used[f.pkg.path()][allowed[i]] = true
				continue
			}
			t.Errorf("%s: %s imports %s; it may import the standard library%s", f.at(spec), what, path, alsoText(allowed))
		}
	}
	// A row that allows more than is needed would let the next import slip in.
	for name, row := range table {
		for _, allowed := range slices.Concat(row.code, row.tests) {
			if used[name] != nil && !used[name][allowed] {
				t.Errorf("the table allows %s to import %s, and it does not: remove it", name, allowed)
			}
		}
	}
}

func alsoText(allowed []string) string {
	if len(allowed) == 0 {
		return " only"
	}
	return " and " + strings.Join(allowed, ", ")
}

// TestBackendsAreStrangers holds for backends that the table does not know yet.
func TestBackendsAreStrangers(t *testing.T) {
	_, files := load(t)
	for _, f := range files {
		own, isBackend := strings.CutPrefix(f.pkg.ImportPath, module+"/backends/")
		if !isBackend {
			continue
		}
		for _, spec := range f.ast.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			if other, ok := strings.CutPrefix(path, module+"/backends/"); ok && other != own && other != "object" { // which is none by itself
				t.Errorf("%s: backend %s imports backend %s", f.at(spec), own, other)
			}
		}
	}
}

func TestNothingHappensBehindTheBack(t *testing.T) {
	_, files := load(t)
	for _, f := range files {
		if f.generated() {
			continue // protobuf's registration is its own affair
		}
		for _, found := range hidden(f.ast, f.test) {
			t.Errorf("%s: %s", f.at(found.node), found.why)
		}
	}
}

// finding is a place in a file that must not be.
type finding struct {
	node ast.Node
	why  string
}

// hidden finds what acts or is shared without a caller's doing: init functions,
// blank imports, loggers and registries of a package or of the process.
func hidden(f *ast.File, test bool) []finding {
	var found []finding
	add := func(n ast.Node, format string, args ...any) {
		found = append(found, finding{n, fmt.Sprintf(format, args...)})
	}
	for _, spec := range f.Imports {
		if spec.Name != nil && spec.Name.Name == "_" && spec.Path.Value != `"embed"` {
			add(spec, "blank import of %s: what a package needs is handed to it", spec.Path.Value)
		}
	}
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil && d.Name.Name == "init" {
				add(d, "func init: a constructor must do it, called by whoever needs it")
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if v, ok := s.(*ast.ValueSpec); ok && d.Tok == token.VAR && !test {
					if why := shared(v); why != "" {
						add(v, "package variable %s: %s", v.Names[0].Name, why)
					}
				}
			}
		}
	}
	if test {
		return found
	}
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		switch name := selector(call.Fun); name {
		case "slog.Default", "slog.SetDefault", "slog.Debug", "slog.Info", "slog.Warn", "slog.Error", "slog.Log",
			"slog.DebugContext", "slog.InfoContext", "slog.WarnContext", "slog.ErrorContext":
			add(n, "%s uses the logger of the process: a constructor takes a *slog.Logger", name)
		case "log.Print", "log.Printf", "log.Println", "log.Fatal", "log.Fatalf", "log.Fatalln", "log.Default", "log.SetOutput":
			add(n, "%s uses the logger of the process: return an error, or take a *slog.Logger", name)
		case "prometheus.MustRegister", "prometheus.Register", "promauto.NewCounter", "promauto.NewGauge", "promauto.NewHistogram":
			add(n, "%s uses the registry of the process: make one", name)
		}
		return true
	})
	return found
}

// shared says why a package variable is state that callers share unseen, or "".
// Tables, sentinels, patterns and pools are none.
func shared(v *ast.ValueSpec) string {
	if why := sharedType(v.Type); why != "" {
		return why
	}
	for _, value := range v.Values {
		switch e := value.(type) {
		case *ast.UnaryExpr:
			if lit, ok := e.X.(*ast.CompositeLit); ok {
				if why := sharedType(lit.Type); why != "" {
					return why
				}
			}
		case *ast.CompositeLit:
			if why := sharedType(e.Type); why != "" {
				return why
			}
			if _, ok := e.Type.(*ast.MapType); ok && len(e.Elts) == 0 {
				return "an empty map is a registry: build a value and hand it on"
			}
		case *ast.CallExpr:
			if id, ok := e.Fun.(*ast.Ident); ok && (id.Name == "make" || id.Name == "new") && len(e.Args) > 0 {
				if _, ok := e.Args[0].(*ast.MapType); ok {
					return "an empty map is a registry: build a value and hand it on"
				}
				if _, ok := e.Args[0].(*ast.ChanType); ok {
					return "a channel of a package has no owner"
				}
				if why := sharedType(e.Args[0]); why != "" {
					return why
				}
			}
			switch pkg, _, _ := strings.Cut(selector(e.Fun), "."); pkg {
			case "slog", "log":
				return "a constructor takes a *slog.Logger"
			case "context":
				return "a context belongs to a call"
			case "prometheus", "promauto", "expvar":
				return "metrics are snapshots of values that have an owner"
			}
		}
	}
	return ""
}

func sharedType(e ast.Expr) string {
	if star, ok := e.(*ast.StarExpr); ok {
		e = star.X
	}
	switch name := selector(e); name {
	case "slog.Logger", "log.Logger":
		return "a constructor takes a *slog.Logger"
	case "context.Context":
		return "a context belongs to a call"
	case "sync.Mutex", "sync.RWMutex", "sync.Map", "sync.Once", "sync.WaitGroup":
		return name + " guards state of the whole process: give the state an owner"
	}
	return ""
}

// selector writes pkg.Name, or "" for anything else.
func selector(e ast.Expr) string {
	s, ok := e.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	id, ok := s.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return id.Name + "." + s.Sel.Name
}
