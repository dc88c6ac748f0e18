package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/internal/invariants"
)

// The paths of the program under test, which TestMain builds: kvtier as it is
// released, and checked with the tag invariants, which poisons what is freed and
// dies at the points that KVTIER_CRASH names.
var kvtier, checked string

// soak says that there is time: the whole trace and many crashes.
var soak = os.Getenv("KVTIER_SOAK") != ""

func TestMain(m *testing.M) {
	if args := os.Getenv(clientEnv); args != "" {
		os.Exit(clientMain(args))
	}
	os.Exit(buildAndRun(m))
}

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvtier-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	kvtier, checked = filepath.Join(dir, "kvtier"), filepath.Join(dir, "kvtier-checked")
	err = build(kvtier)
	if invariants.Enabled {
		checked = kvtier // it would be the same
	} else {
		err = errors.Join(err, build(checked, "-tags", "invariants"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := azurite.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// build builds the program, with the race detector if the tests have it.
func build(path string, args ...string) error {
	args = append([]string{"build", "-o", path}, args...)
	if raceEnabled {
		args = append(args, "-race")
	}
	if invariants.Enabled {
		args = append(args, "-tags", "invariants")
	}
	if out, err := exec.Command("go", append(args, "../cmd/kvtier")...).CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

const (
	// patience bounds everything that a test waits for. It is reached only by a
	// program that hangs, and then the test fails.
	patience = 2 * time.Minute

	conversation = "../policy/trace/testdata/mooncake_conversation_h1.jsonl.gz"
	smallTrace   = "../cmd/kvtier/testdata/conversation_small.jsonl.gz"
)

// output collects what a process writes.
type output struct {
	mu struct {
		sync.Mutex
		buf   bytes.Buffer
		line  chan struct{} // closed with the first whole line
		begun bool
	}
}

func newOutput() *output {
	o := &output{}
	o.mu.line = make(chan struct{})
	return o
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.buf.Write(p)
	if !o.mu.begun && bytes.IndexByte(p, '\n') >= 0 {
		o.mu.begun = true
		close(o.mu.line)
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mu.buf.String()
}

// process is a kvtier that runs. It is killed when the test ends.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout *output
	stderr *output
	exited chan struct{}
}

// start starts kvtier with args.
func start(t *testing.T, stdin io.Reader, args ...string) *process {
	t.Helper()
	cmd := exec.Command(kvtier, args...)
	cmd.Stdin = stdin
	return startCommand(t, cmd)
}

// startCommand starts a command whose Env is what its environment has besides
// the tests' own.
func startCommand(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, stdout: newOutput(), stderr: newOutput(), exited: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	p.cmd.Env = append(environment(), cmd.Env...)
	// A test binary that is killed takes its daemons with it. What the tests stop stays
	// stopped: the kernel continues those whose group loses its shell.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // the exit code is in ProcessState
	}()
	t.Cleanup(func() {
		p.kill()
		if log := p.stderr.String(); strings.Contains(log, "DATA RACE") || strings.Contains(log, "\ngoroutine ") {
			t.Errorf("%s:\n%s", p, log)
		}
	})
	return p
}

// String is the command line.
func (p *process) String() string { return strings.Join(p.cmd.Args, " ") }

// environment is the environment of the processes: this one's without what
// would change them.
func environment() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "KVTIER_") {
			env = append(env, e)
		}
	}
	return env
}

// kill ends the process as kill -9 does, and waits for its end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.exited
}

// commandPatience bounds a command, as patience does what else there is to wait for. Where
// there is time a command may have a whole trace to replay, which takes minutes.
func commandPatience() time.Duration {
	if soak {
		return 15 * patience
	}
	return patience
}

// wait waits for the process to end and returns its exit code.
func (p *process) wait() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(commandPatience()):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // for the goroutines' stacks
		<-p.exited
		p.t.Fatalf("%s did not end:\n%s", p, p.stderr)
	}
	return p.cmd.ProcessState.ExitCode()
}

// daemon is a kvtier serve that is ready.
type daemon struct {
	*process
	addr string
}

// serve starts a daemon on a free port of the loopback and waits until it is
// ready.
func serve(t *testing.T, args ...string) *daemon {
	t.Helper()
	return mustReady(start(t, nil, onLoopback(args...)...))
}

// onLoopback are the arguments of a daemon on a free port of the loopback.
func onLoopback(args ...string) []string {
	return append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)
}

func mustReady(p *process) *daemon {
	p.t.Helper()
	d, ok := p.ready()
	if !ok {
		p.t.Fatalf("serve ended with exit code %d before it was ready:\n%s", p.cmd.ProcessState.ExitCode(), p.stderr)
	}
	return d
}

// ready waits until a daemon is ready; false when it has ended before.
func (p *process) ready() (*daemon, bool) {
	p.t.Helper()
	select {
	case <-p.stdout.mu.line:
	case <-p.exited:
		return nil, false
	case <-time.After(patience):
		p.t.Fatalf("serve is not ready:\n%s", p.stderr)
	}
	addr, ok := strings.CutPrefix(p.stdout.String(), "ready ")
	if !ok {
		p.t.Fatalf("serve printed %q, want ready ADDR", p.stdout)
	}
	return &daemon{p, strings.TrimSuffix(addr, "\n")}, true
}

// stop sends SIGTERM and checks the exit code.
func (d *daemon) stop(want ...int) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		d.t.Fatalf("stop daemon: %v:\n%s", err, d.stderr)
	}
	if code := d.wait(); !slices.Contains(want, code) {
		d.t.Fatalf("the daemon's exit code is %d, want one of %d:\n%s", code, want, d.stderr)
	}
	if out := d.stdout.String(); out != "ready "+d.addr+"\n" {
		d.t.Errorf("the daemon printed %q, want one line", out)
	}
}

// result is how a command ended.
type result struct {
	code           int
	stdout, stderr string
}

// command runs kvtier with args to its end.
func command(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	p := start(t, stdin, args...)
	code := p.wait()
	return result{code, p.stdout.String(), p.stderr.String()}
}

// must runs kvtier with args, which must exit with 0, and returns its output.
func must(t *testing.T, args ...string) string {
	t.Helper()
	r := command(t, nil, args...)
	if r.code != 0 {
		t.Fatalf("kvtier %s: exit code %d:\n%s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// decode reads JSON that a command printed.
func decode(t *testing.T, text string, v any) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(text))
	if err := dec.Decode(v); err != nil {
		t.Fatalf("%v: %q", err, text)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		t.Fatalf("more than one JSON value: %q", text)
	}
}

// timeout is t's context with patience.
func timeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// withoutRace skips a test under the race detector: what it does there others do
// too, and the run without the detector does it in a fraction of the time.
func withoutRace(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("runs without the race detector only")
	}
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx := timeout(t)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: still not so", what)
		}
	}
}
