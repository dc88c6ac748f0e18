package session_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDocument shows that the worked examples of the document are the golden frames,
// all of them.
func TestDocument(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "protocol.md"))
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string]string{}
	for _, block := range strings.Split(string(b), "```hex ")[1:] {
		name, rest, _ := strings.Cut(block, "\n")
		text, _, ok := strings.Cut(rest, "```")
		if _, twice := shown[name]; twice || !ok {
			t.Errorf("block %q is there twice, or has no end", name)
		}
		shown[name] = text
	}
	golden, err := filepath.Glob(goldenPath("*"))
	if err != nil || len(golden) != len(examples()) {
		t.Fatalf("%d golden files for %d examples, error %v", len(golden), len(examples()), err)
	}
	for _, path := range golden {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(path), ".hex")
		if got := shown[name]; got != string(want) {
			t.Errorf("%s is shown as\n%swant\n%s", name, got, want)
		}
		delete(shown, name)
	}
	for name := range shown {
		t.Errorf("%q is no golden frame", name)
	}
}
