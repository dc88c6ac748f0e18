package servers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	stopTimeout = 10 * time.Second
	startTries  = 3 // a free port may be taken by another before the server has it
)

// find gives the path of a program of that name in the module's .bin, of whichever version
// is installed there, or in PATH.
func find(t testing.TB, name string) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above the test's directory")
		}
	}
	installed, err := filepath.Glob(filepath.Join(dir, ".bin", name+"@*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(installed) > 0 {
		slices.Sort(installed)
		return installed[len(installed)-1]
	}
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(t, name, fmt.Sprintf("it is neither in .bin, where make tools installs it, nor in PATH: %v", err))
	}
	return path
}

// Missing skips a test that the machine has not what for, or fails it when KVTIER_REQUIRE,
// a list with commas between, names that.
func Missing(t testing.TB, name string, why any) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("KVTIER_REQUIRE"), ","), name) {
		t.Fatalf("%s is required: %v", name, why)
	}
	t.Skipf("no %s: %v", name, why)
}

// process is a server that runs.
type process struct {
	addr   string
	cmd    *exec.Cmd
	output *output
	exited chan struct{}
	stop   sync.Once
}

// output keeps the end of what a server writes.
type output struct {
	mu sync.Mutex
	b  []byte
}

// Write is io.Writer's.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = append(o.b, p...)
	if over := len(o.b) - 4096; over > 0 {
		o.b = o.b[over:]
	}
	return len(p), nil
}

// String gives it.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(bytes.TrimSpace(o.b))
}

// start starts a server on a free port, waits until it answers HTTP requests, and has it
// stopped when the test ends. command makes the command for a port. A server that is not
// ready after patience fails the test.
func start(t testing.TB, name string, patience time.Duration, command func(port string) *exec.Cmd) *process {
	t.Helper()
	var err error
	for range startTries {
		var p *process
		if p, err = try(name, patience, command); err == nil {
			t.Cleanup(p.end)
			return p
		}
	}
	t.Fatalf("start %s: %v", name, err)
	return nil
}

func try(name string, patience time.Duration, command func(port string) *exec.Cmd) (*process, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &process{addr: l.Addr().String(), output: &output{}, exited: make(chan struct{})}
	_, port, err := net.SplitHostPort(p.addr)
	if err := errors.Join(err, l.Close()); err != nil {
		return nil, err
	}
	p.cmd = command(port)
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	// A test binary that is killed takes its servers with it. The signal comes when the
	// thread ends that started the process, so that thread is kept.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		defer close(p.exited)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // it is stopped by a signal; one that ends by itself is seen by its tests
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	if err := p.ready(patience); err != nil {
		p.end()
		return nil, fmt.Errorf("%w: %s says: %s", err, name, p.output)
	}
	return p, nil
}

// ready waits until the server answers a request, whatever it says.
func (p *process) ready(patience time.Duration) error {
	transport := &http.Transport{DisableKeepAlives: true}
	client := http.Client{Transport: transport, Timeout: time.Second}
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		resp, err := client.Get("http://" + p.addr + "/")
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			return errors.Join(err, resp.Body.Close())
		}
		select {
		case <-p.exited:
			return errors.New("it ended")
		case <-late.C:
			return fmt.Errorf("no answer after %v: %w", patience, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// end stops the server.
func (p *process) end() {
	p.stop.Do(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		late := time.NewTimer(stopTimeout)
		defer late.Stop()
		select {
		case <-p.exited:
		case <-late.C:
			_ = p.cmd.Process.Kill()
			<-p.exited
		}
	})
}
