package xfertest

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// call is an order to a party, answer what came of it.
type call struct {
	ID      uint64
	Verb    string
	Name    string // of the party's agent (open) or of its peer
	Op      xfer.Op
	Pieces  [][3]int64 // offsets in the party's own and its peer's registered part, length
	Off     int64      // in all its memory, guards included
	N       int64
	Count   int
	Timeout time.Duration // patience when 0
	Data    []byte
	Flag    bool
}

type answer struct {
	ID    uint64
	Err   string
	Is    []int // the sentinels that the error is
	Desc  xfer.Desc
	Peer  xfer.PeerID
	Data  []byte
	Info  []byte
	Msgs  [][]byte
	Count int
	Texts []string
}

// patience bounds everything that a test waits for. It is reached only by a
// backend that hangs, and then the test fails.
const patience = 30 * time.Second

// sentinels are the errors that keep their identity between processes.
var sentinels = []error{
	xfer.ErrInvalid, xfer.ErrNotFound, xfer.ErrNoBackend, xfer.ErrUnavailable, xfer.ErrActive, xfer.ErrNotPosted,
	xfer.ErrCanceled, xfer.ErrShort, xfer.ErrDisconnected, xfer.ErrNotSupported, xfer.ErrClosed,
}

// farError is an error that a party in another process met.
type farError struct {
	text string
	is   []error
}

func (e *farError) Error() string   { return "at the peer: " + e.text }
func (e *farError) Unwrap() []error { return e.is }

func (a *answer) fail(err error) {
	if err == nil {
		return
	}
	a.Err = err.Error()
	for i, s := range sentinels {
		if errors.Is(err, s) {
			a.Is = append(a.Is, i)
		}
	}
}

func (a answer) err() error {
	if a.Err == "" {
		return nil
	}
	e := &farError{text: a.Err}
	for _, i := range a.Is {
		e.is = append(e.is, sentinels[i])
	}
	return e
}

// peer is the party on the far side: in this process, or in one of its own.
type peer struct {
	t     testing.TB
	party *party // nil when it has a process
	child *child
}

// newPeer starts the far side. It ends with the test.
func newPeer(t testing.TB, h RemoteHarness) *peer {
	t.Helper()
	p := &peer{t: t}
	if h.process == nil {
		p.party = newParty(t, h, Far)
		return p
	}
	p.child = startChild(t, *h.process)
	return p
}

// ask gives an order and waits for what comes of it.
func (p *peer) ask(c call) (answer, error) {
	if p.party != nil {
		a := p.party.handle(c)
		return a, a.err()
	}
	return p.child.ask(c)
}

// must is ask for what cannot fail.
func (p *peer) must(c call) answer {
	p.t.Helper()
	a, err := p.ask(c)
	if err != nil {
		p.t.Fatalf("%s: %v", c.Verb, err)
	}
	return a
}

// outcome is what an order came to that was given without waiting.
type outcome struct {
	answer
	error
}

// start gives an order and goes on.
func (p *peer) start(c call) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		a, err := p.ask(c)
		done <- outcome{a, err}
	}()
	return done
}

// child is a process of this test's program that serves a party.
type child struct {
	cmd    *exec.Cmd
	out    bytes.Buffer // of its stdout and stderr, readable when exited is closed
	orders *os.File
	exited chan struct{} // closed when the process was waited for and its answers are read
	enc    *gob.Encoder
	mu     struct {
		sync.Mutex
		id      uint64
		pending map[uint64]chan answer
		gone    bool
		killed  bool
	}
}

// peerEnv names the test that a child is to run for its RemoteHarness.
const peerEnv = "XFERTEST_PEER"

// startChild runs the test again in a process of its own, as a peer.
func startChild(t testing.TB, test string) *child {
	t.Helper()
	elements := strings.Split(test, "/")
	for i, e := range elements {
		elements[i] = "^" + regexp.QuoteMeta(e) + "$"
	}
	orders, ordersW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	answersR, answers, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{orders: ordersW, exited: make(chan struct{}), enc: gob.NewEncoder(ordersW)}
	c.mu.pending = map[uint64]chan answer{}
	c.cmd = exec.Command(exe, "-test.run="+strings.Join(elements, "/"), "-test.timeout=30m")
	c.cmd.Env = append(os.Environ(), peerEnv+"="+test)
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.out
	c.cmd.ExtraFiles = []*os.File{orders, answers}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		defer close(c.exited)
		// The signal comes when the thread ends that started the process, so that
		// thread is kept.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		_, _ = orders.Close(), answers.Close()
		started <- err
		if err != nil {
			return
		}
		c.listen(answersR)
		_ = c.cmd.Wait() // ProcessState has what there is to know
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.end(t) })
	return c
}

// listen hands answers to those who wait for them, until the process has ended.
func (c *child) listen(answers *os.File) {
	dec := gob.NewDecoder(answers)
	for {
		var a answer
		if err := dec.Decode(&a); err != nil {
			break
		}
		c.mu.Lock()
		if done := c.mu.pending[a.ID]; done != nil {
			done <- a
			delete(c.mu.pending, a.ID)
		}
		c.mu.Unlock()
	}
	_ = answers.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.gone = true
	for id, done := range c.mu.pending {
		close(done)
		delete(c.mu.pending, id)
	}
}

var errChildGone = errors.New("the peer's process has ended")

func (c *child) ask(order call) (answer, error) {
	done := make(chan answer, 1)
	c.mu.Lock()
	if c.mu.gone {
		c.mu.Unlock()
		return answer{}, errChildGone
	}
	c.mu.id++
	order.ID = c.mu.id
	c.mu.pending[order.ID] = done
	err := c.enc.Encode(order)
	c.mu.Unlock()
	if err != nil {
		return answer{}, fmt.Errorf("%w: %w", errChildGone, err)
	}
	a, ok := <-done
	if !ok {
		return answer{}, errChildGone
	}
	return a, a.err()
}

func (c *child) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if sig == syscall.SIGKILL {
		c.mu.Lock()
		c.mu.killed = true
		c.mu.Unlock()
	}
	if err := c.cmd.Process.Signal(sig); err != nil {
		t.Errorf("signal the peer's process: %v", err)
	}
}

// wake lets a process that was stopped go on.
func (c *child) wake() { _ = c.cmd.Process.Signal(syscall.SIGCONT) }

// kill ends the process as a crash does, and waits for it.
func (c *child) kill(t testing.TB) {
	t.Helper()
	c.signal(t, syscall.SIGKILL)
	<-c.exited
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.orders.Close()
}

// end asks the process to end and checks that it ends well.
func (c *child) end(t testing.TB) {
	t.Helper()
	c.mu.Lock()
	killed := c.mu.killed
	_ = c.orders.Close() // it ends when its orders do
	c.mu.Unlock()
	if !killed {
		c.wake() // a test may have failed while it was stopped
		hung := time.AfterFunc(patience, func() { _ = c.cmd.Process.Signal(syscall.SIGQUIT) })
		dead := time.AfterFunc(patience+10*time.Second, func() { _ = c.cmd.Process.Kill() })
		<-c.exited
		dead.Stop()
		if !hung.Stop() {
			t.Error("the peer's process does not end")
		}
		if !c.cmd.ProcessState.Success() {
			t.Errorf("the peer's process: %s", c.cmd.ProcessState)
		}
	}
	<-c.exited
	if out := c.out.String(); t.Failed() || strings.Contains(out, "DATA RACE") {
		t.Errorf("output of the peer's process %d:\n%s", c.cmd.Process.Pid, out)
	}
}

// servePeer is the life of a child: it follows orders until there are no more.
func servePeer(t *testing.T, h RemoteHarness) {
	orders, answers := os.NewFile(3, "orders"), os.NewFile(4, "answers")
	syscall.CloseOnExec(3)
	syscall.CloseOnExec(4)
	p := newParty(t, h, Far)
	dec, enc := gob.NewDecoder(orders), gob.NewEncoder(answers)
	var (
		wg sync.WaitGroup
		mu sync.Mutex // of enc
	)
	serve := func(c call) {
		a := p.handle(c)
		a.ID = c.ID
		mu.Lock()
		defer mu.Unlock()
		if err := enc.Encode(a); err != nil {
			t.Errorf("answer to %s: %v", c.Verb, err)
		}
	}
	for {
		var c call
		if err := dec.Decode(&c); err != nil {
			if !errors.Is(err, io.EOF) {
				t.Errorf("orders: %v", err)
			}
			break
		}
		if c.Verb == "open" { // on the test's own goroutine, since it may fail the test
			serve(c)
			continue
		}
		wg.Go(func() { serve(c) })
	}
	p.close()
	wg.Wait()
	_, _ = orders.Close(), answers.Close()
}
