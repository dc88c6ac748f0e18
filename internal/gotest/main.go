// Gotest runs a "go test -json" command, which it is given, and prints what go test
// prints without -v, and in addition every test that was skipped, with its reason: a
// skip that nobody sees is a test that nobody has. The exit code is 1 when a package
// failed.
//
//	gotest [-again N] go test -json [flags] packages
//
// With -again, a few tests that failed are run N times more, alone; when each of these
// passes, the failure was the machine's or the test's, is printed as FLAKY, and does not
// count. See suspects for what is never excused.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	again := flag.Int("again", 0, "run tests that failed `N` times more")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := test(ctx, flag.Args(), *again, os.Stdout)
	stop()
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "gotest: %v\n", err)
		os.Exit(2)
	case !ok:
		os.Exit(1)
	}
}

// test runs a command, and what failed in it again.
func test(ctx context.Context, command []string, again int, w io.Writer) (ok bool, err error) {
	if len(command) == 0 {
		return false, errors.New("no command is given")
	}
	r, err := run(ctx, command, w)
	if err != nil || r.ok() {
		return err == nil, err
	}
	packages, why := r.suspects()
	if again == 0 || why != "" {
		if again > 0 {
			fmt.Fprintf(w, "not run again: %s\n", why)
		}
		return false, nil
	}
	for _, p := range packages {
		tests := r.failed[p]
		fmt.Fprintf(w, "again, %d times: %s %s\n", again, p, strings.Join(tests, " "))
		r, err := run(ctx, onlyTests(command, p, tests, again), w)
		if err != nil || !r.ok() {
			return false, err
		}
	}
	for _, p := range packages {
		for _, name := range r.failed[p] {
			fmt.Fprintf(w, "FLAKY %s %s: failed, and passed %d times when it was run again\n", p, name, again)
		}
	}
	return true, nil
}

// run runs a command and reports what it says.
func run(ctx context.Context, command []string, w io.Writer) (*result, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	r, err := report(out, w)
	if err != nil {
		_, _ = io.Copy(io.Discard, out) // so that the command can end
	}
	exit := cmd.Wait()
	if err == nil && exit != nil && r.ok() {
		err = exit // it failed, and said nothing of it
	}
	return r, err
}

// onlyTests is a go test command with other packages, tests and repetitions.
func onlyTests(command []string, pkg string, tests []string, times int) []string {
	c := slices.DeleteFunc(slices.Clone(command), func(arg string) bool { return strings.HasPrefix(arg, "./") })
	return append(c, "-count="+strconv.Itoa(times), "-run=^("+strings.Join(tests, "|")+")$", pkg)
}

// mostSuspects is how many failures may be anything but a fault of the code.
const mostSuspects = 3

// broken is what a test says when a promise of the store is broken. Once is too often:
// that it does not happen again proves nothing.
var broken = regexp.MustCompile(`(?i)data race|panic:|fatal error|timed out|\bwrong\b|\blost\b|\bleak|\bcorrupt|\bhang|\bhung\b|\bstuck\b|came back|raised`)

// suspects are the packages with failures that may be flakes, or why they are none: more
// than a few, tests that did not end, packages that failed without a failed test, and
// whatever speaks of a race, a crash, bytes that are wrong or gone, or a call without an end.
func (r *result) suspects() (packages []string, why string) {
	switch said := broken.FindString(r.said.String()); {
	case r.build:
		return nil, "a package does not build"
	case r.open > 0:
		return nil, fmt.Sprintf("%d tests did not end", r.open)
	case said != "":
		return nil, fmt.Sprintf("a test says %q", said)
	}
	n := 0
	packages = slices.Sorted(maps.Keys(r.failed))
	for _, p := range packages {
		if len(r.failed[p]) == 0 {
			return nil, p + " failed without a failed test"
		}
		n += len(r.failed[p])
	}
	if n > mostSuspects {
		return nil, fmt.Sprintf("%d tests failed", n)
	}
	return packages, ""
}
