package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// event is one line of what "go test -json" writes, as "go doc test2json" describes it.
// Builds that fail come with ImportPath instead of Package.
type event struct {
	Action     string
	Package    string
	Test       string
	Output     string
	ImportPath string
	Key, Value string // of an attribute
}

// result is what a run came to.
type result struct {
	failed map[string][]string // by package, its failed tests of the top level
	said   strings.Builder     // what failed tests and packages printed
	build  bool                // a package did not build
	open   int                 // tests that did not end
}

func (r *result) ok() bool { return len(r.failed) == 0 && !r.build }

func (r *result) fail(ev *event) {
	tests := r.failed[ev.Package]
	if ev.Test != "" && !strings.Contains(ev.Test, "/") && !slices.Contains(tests, ev.Test) {
		tests = append(tests, ev.Test)
	}
	r.failed[ev.Package] = tests
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

// report prints the events of in, and says what they come to.
func report(in io.Reader, w io.Writer) (*result, error) {
	out := bufio.NewWriter(w)
	r := &result{failed: map[string][]string{}}
	tests := running{}
	lines := bufio.NewScanner(in)
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
			r.build = true
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
			r.fail(&ev)
			text := tests.take(&ev)
			r.said.WriteString(text)
			fmt.Fprint(out, text)
		}
		if ev.Test == "" {
			if err := out.Flush(); err != nil {
				return r, err
			}
		}
	}
	// Tests that never ended are why their package failed.
	for _, text := range tests {
		fmt.Fprint(out, text.String())
		r.said.WriteString(text.String())
		r.open++
	}
	return r, errors.Join(lines.Err(), out.Flush())
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
