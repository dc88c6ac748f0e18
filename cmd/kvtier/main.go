// Kvtier is a tiered store of LLM KV-cache blocks: the daemon (kvtier serve)
// and the tools that talk to one or work on its files. This package wires the
// others together and holds no other logic.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// The exit codes that scripts rely on.
const (
	exitFailure = 1 // the command failed
	exitUsage   = 2 // the command line or the configuration cannot be accepted
	exitMiss    = 3 // a miss, a stop that could not keep everything, a scrub or sweep that lost something, or an import that left something out
)

func main() {
	// The first signal ends the command's context, so that it can stop in
	// order; with the handler gone the second one kills.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run executes one command line and returns its exit code. An error is printed
// once, here.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root, started := newRootCmd()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	code := exitFailure
	var ee *exitError
	switch {
	case errors.As(err, &ee):
		code = ee.code
	case !*started:
		code = exitUsage // cobra refused the command line before the command ran
	}
	if err.Error() != "" {
		fmt.Fprintf(stderr, "kvtier: %v\n", err)
	}
	return code
}

// exitError is an error that asks for an exit code of its own. One whose err is
// nil prints nothing.
type exitError struct {
	code int
	err  error
}

// Error gives the text of the cause.
func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

// Unwrap gives the cause.
func (e *exitError) Unwrap() error { return e.err }

// usageErrorf makes an error that ends the program with exit code 2.
func usageErrorf(format string, args ...any) error {
	return &exitError{code: exitUsage, err: fmt.Errorf(format, args...)}
}
