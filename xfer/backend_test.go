package xfer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a backend that copies DRAM and does what a test tells it to.
type script struct {
	name  string
	caps  xfer.Caps
	steps *[]string // where it writes down what it is asked, if not nil

	register   func(d xfer.Desc) error
	deregister func(d xfer.Desc) error
	prepare    func() error
	transfer   func(ctx context.Context, p *scriptTransfer, done func(int, error)) error

	mu struct {
		sync.Mutex
		regions, prepared int
		closed            bool
	}
}

type scriptTransfer struct {
	op            xfer.Op
	local, remote []xfer.Bound
}

// copyPair moves the bytes of one pair.
func (p *scriptTransfer) copyPair(i int) {
	l, r := arena.View(p.local[i].Addr, int(p.local[i].Len)), arena.View(p.remote[i].Addr, int(p.local[i].Len))
	if p.op == xfer.Read {
		copy(l, r)
	} else {
		copy(r, l)
	}
}

func newScript(name string, pairs ...xfer.Pair) *script {
	if len(pairs) == 0 {
		pairs = []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}}
	}
	return &script{name: name, caps: xfer.Caps{Pairs: pairs, Local: true, Align: 1, Engine: "script"}}
}

func (s *script) Name() string    { return s.name }
func (s *script) Caps() xfer.Caps { return s.caps }

func (s *script) note(format string, args ...any) {
	if s.steps != nil {
		*s.steps = append(*s.steps, s.name+" "+fmt.Sprintf(format, args...))
	}
}

func (s *script) Register(_ context.Context, _ xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	s.note("register %d", d.Addr)
	if s.register != nil {
		if err := s.register(d); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.regions++
	return d, nil
}

func (s *script) Deregister(r xfer.Region) error {
	s.note("deregister %d", r.(xfer.Desc).Addr)
	s.mu.Lock()
	s.mu.regions--
	s.mu.Unlock()
	if s.deregister != nil {
		return s.deregister(r.(xfer.Desc))
	}
	return nil
}

func (s *script) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	if s.prepare != nil {
		if err := s.prepare(); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.prepared++
	return &scriptTransfer{op, local, remote}, nil
}

func (s *script) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*scriptTransfer)
	if s.transfer != nil {
		return s.transfer(ctx, t, done)
	}
	for i := range t.local {
		t.copyPair(i)
		done(i, nil)
	}
	return nil
}

func (s *script) Release(xfer.Prepared) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.prepared--
}

func (s *script) Close() error {
	s.note("close")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.regions != 0 || s.mu.prepared != 0 || s.mu.closed {
		return fmt.Errorf("backend %s closed with %d regions and %d prepared transfers", s.name, s.mu.regions, s.mu.prepared)
	}
	s.mu.closed = true
	return nil
}

// newAgent adopts the backends and closes with the test, which also checks that
// the backends were left as they should be.
func newAgent(t testing.TB, o *xfer.AgentOptions, backends ...xfer.Backend) *xfer.Agent {
	t.Helper()
	a, err := xfer.NewAgent("test", o)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range backends {
		if err := a.AddBackend(b); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return a
}

// newMemory registers n blocks of 1 KiB and gives a description of each.
func newMemory(t testing.TB, a *xfer.Agent, n int) (xfer.DescList, xfertest.Memory) {
	t.Helper()
	m := xfertest.DRAM(t, int64(n)<<10)
	// The agent closes before the memory goes.
	t.Cleanup(func() { _ = a.Close() })
	if err := a.Register(t.Context(), list(m.Desc), nil); err != nil {
		t.Fatal(err)
	}
	var l xfer.DescList
	for i := range n {
		l.Descs = append(l.Descs, xfer.Desc{Addr: m.Desc.Addr + uint64(i)<<10, Len: 1 << 10})
	}
	return l, m
}

func list(descs ...xfer.Desc) xfer.DescList { return xfer.DescList{Type: xfer.DRAM, Descs: descs} }

// newRequest makes a request that is released with the test.
func newRequest(t testing.TB, a *xfer.Agent, op xfer.Op, local, remote xfer.DescList, o *xfer.RequestOptions) *xfer.Request {
	t.Helper()
	r, err := a.NewRequest(op, local, remote, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// wantError compares sentinel and place.
func wantError(t *testing.T, what string, err, sentinel error, want xfer.Error) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Errorf("%s: %v, want %v", what, err, sentinel)
		return
	}
	var e *xfer.Error
	if !errors.As(err, &e) {
		t.Errorf("%s: %v is no *xfer.Error", what, err)
		return
	}
	if e.Layer != want.Layer || e.Backend != want.Backend || e.Index != want.Index {
		t.Errorf("%s: %q, layer %s, backend %q, descriptor %d; want %s, %q, %d",
			what, err, e.Layer, e.Backend, e.Index, want.Layer, want.Backend, want.Index)
	}
}
