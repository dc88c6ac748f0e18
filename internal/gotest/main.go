// Gotest reads what "go test -json" writes and prints what go test prints
// without -v, and in addition every test that was skipped, with its reason: a
// skip that nobody sees is a test that nobody has. The exit code is 1 when a
// package failed.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	ok, err := report(os.Stdin, os.Stdout)
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "gotest: %v\n", err)
		os.Exit(2)
	case !ok:
		os.Exit(1)
	}
}

// event is one line of the input, as "go doc test2json" describes it. Builds
// that fail come with ImportPath instead of Package.
type event struct {
	Action     string
	Package    string
	Test       string
	Output     string
	ImportPath string
	Key, Value string // of an attribute
}

// running is the output of tests that have not ended, by package and test.
type running map[[2]string]*strings.Builder

func (r running) add(ev *event) {
	key := [2]string{ev.Package, ev.Test}
	if r[key] == nil {
		r[key] = &strings.Builder{}
	}
	r[key].WriteString(ev.Output)
}

func (r running) take(ev *event) string {
	key := [2]string{ev.Package, ev.Test}
	defer delete(r, key)
	if b := r[key]; b != nil {
		return b.String()
	}
	return ""
}

// report prints the events of r and says whether all packages passed.
func report(r io.Reader, w io.Writer) (ok bool, err error) {
	out := bufio.NewWriter(w)
	ok = true
	tests := running{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var ev event
		if err := json.Unmarshal(lines.Bytes(), &ev); err != nil || ev.Action == "" {
			// What the go command itself says is not JSON.
			fmt.Fprintf(out, "%s\n", lines.Bytes())
			continue
		}
		switch ev.Action {
		case "build-output":
			fmt.Fprint(out, ev.Output)
		case "build-fail":
			ok = false
		case "output":
			if !strings.HasPrefix(ev.Output, "=== ") {
				tests.add(&ev)
			}
		case "attr":
			// What a test says that it did, such as how many crashes it caused.
			fmt.Fprintf(out, "%s %s %s: %s\n", strings.ToUpper(ev.Key), ev.Package, ev.Test, ev.Value)
		case "pass", "bench":
			if text := tests.take(&ev); ev.Test == "" {
				fmt.Fprint(out, lastLine(text))
			}
		case "skip":
			if text := tests.take(&ev); ev.Test == "" {
				fmt.Fprint(out, text) // a package without tests
			} else {
				fmt.Fprintf(out, "SKIP %s %s: %s\n", ev.Package, ev.Test, reason(text))
			}
		case "fail":
			ok = false
			fmt.Fprint(out, tests.take(&ev))
		}
		if ev.Test == "" {
			if err := out.Flush(); err != nil {
				return false, err
			}
		}
	}
	// Tests that never ended are why their package failed.
	for _, text := range tests {
		fmt.Fprint(out, text.String())
	}
	return ok, errors.Join(lines.Err(), out.Flush())
}

// lastLine is a package's result: before it comes "PASS", and what tests wrote
// past the testing package.
func lastLine(text string) string {
	text = strings.TrimSuffix(text, "\n")
	return text[strings.LastIndexByte(text, '\n')+1:] + "\n"
}

// reason is what a skipped test said last.
func reason(text string) string {
	said := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "--- ") {
			said = line
		}
	}
	if said == "" {
		return "no reason given"
	}
	return said
}
