package xfertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// copier is the smallest backend that keeps the contract.
type copier struct{}

type copierTransfer struct {
	op            xfer.Op
	local, remote []xfer.Bound
}

func (copier) Name() string { return "copier" }
func (copier) Caps() xfer.Caps {
	return xfer.Caps{Pairs: []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}}, Local: true, Align: 1, Engine: "copy"}
}

func (copier) Register(context.Context, xfer.MemType, xfer.Desc) (xfer.Region, error) {
	return nil, nil
}
func (copier) Deregister(xfer.Region) error { return nil }
func (copier) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	return &copierTransfer{op, local, remote}, nil
}

func (copier) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*copierTransfer)
	for i := range t.local {
		if ctx.Err() != nil {
			done(i, xfer.ErrCanceled)
			continue
		}
		t.copy(i)
		done(i, nil)
	}
	return nil
}

func (t *copierTransfer) copy(i int) {
	l, r := arena.View(t.local[i].Addr, int(t.local[i].Len)), arena.View(t.remote[i].Addr, int(t.local[i].Len))
	if t.op == xfer.Read {
		copy(l, r)
	} else {
		copy(r, l)
	}
}

func (copier) Release(xfer.Prepared) {}
func (copier) Close() error          { return nil }

func TestConformance(t *testing.T) {
	Run(t, Harness{New: func(testing.TB) xfer.Backend { return copier{} }, MaxBytes: 4 << 20})
}

// broken are backends that each break one sentence of the contract.
var broken = map[string]func() xfer.Backend{
	"wrong byte":     func() xfer.Backend { return Faulty(copier{}, Rule{Fault: Corrupt, Chance: 0.001}) },
	"short":          func() xfer.Backend { return Faulty(copier{}, Rule{Fault: Short, Descs: []int{31}}) },
	"fails at times": func() xfer.Backend { return Faulty(copier{}, Rule{Fault: Fail, Chance: 0.01}) },
	"goroutine left": func() xfer.Backend { return leaky{new(atomic.Bool)} },
	"off by one": func() xfer.Backend {
		return transferring(func(t *copierTransfer, i int) { t.local[i].Len++; t.copy(i); t.local[i].Len-- })
	},
	"one byte less": func() xfer.Backend {
		return transferring(func(t *copierTransfer, i int) { t.local[i].Len--; t.copy(i); t.local[i].Len++ })
	},
	"early done":  func() xfer.Backend { return early{} },
	"done twice":  func() xfer.Backend { return twice{} },
	"never stops": func() xfer.Backend { return liar{} },
}

// transferring copies each pair in a way of its own.
type transferring func(t *copierTransfer, i int)

func (transferring) Name() string    { return "transferring" }
func (transferring) Caps() xfer.Caps { return copier{}.Caps() }
func (transferring) Register(context.Context, xfer.MemType, xfer.Desc) (xfer.Region, error) {
	return nil, nil
}
func (transferring) Deregister(xfer.Region) error { return nil }
func (transferring) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	return &copierTransfer{op, slices.Clone(local), remote}, nil
}

func (f transferring) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*copierTransfer)
	for i := range t.local {
		if ctx.Err() != nil {
			done(i, xfer.ErrCanceled)
			continue
		}
		f(t, i)
		done(i, nil)
	}
	return nil
}
func (transferring) Release(xfer.Prepared) {}
func (transferring) Close() error          { return nil }

// leaky leaves a goroutine behind.
type leaky struct{ closed *atomic.Bool }

func (leaky) Name() string    { return "leaky" }
func (leaky) Caps() xfer.Caps { return copier{}.Caps() }
func (leaky) Register(context.Context, xfer.MemType, xfer.Desc) (xfer.Region, error) {
	return nil, nil
}
func (leaky) Deregister(xfer.Region) error { return nil }
func (leaky) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	return copier{}.Prepare(op, local, remote)
}

func (leaky) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	return copier{}.Transfer(ctx, p, done)
}
func (leaky) Release(xfer.Prepared) {}
func (l leaky) Close() error {
	if l.closed.CompareAndSwap(false, true) {
		go func() { select {} }()
	}
	return nil
}

// early reports pairs before their bytes are there.
type early struct{ copier }

func (early) Transfer(_ context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*copierTransfer)
	for i := range t.local {
		done(i, nil)
	}
	for i := range t.local {
		t.copy(i)
	}
	return nil
}

// twice reports the first pair again.
type twice struct{ copier }

func (twice) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	err := copier{}.Transfer(ctx, p, done)
	done(0, nil)
	return err
}

// liar calls pairs done that it did not move, because it was cancelled.
type liar struct{ copier }

func (liar) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*copierTransfer)
	for i := range t.local {
		if ctx.Err() == nil {
			t.copy(i)
		}
		done(i, nil)
	}
	return nil
}

const brokenEnv = "XFERTEST_BROKEN"

// TestBroken runs the suite over a broken backend, for TestSuiteFindsFaults.
func TestBroken(t *testing.T) {
	name := os.Getenv(brokenEnv)
	if name == "" {
		return
	}
	Run(t, Harness{New: func(testing.TB) xfer.Backend { return broken[name]() }, MaxBytes: 1 << 20})
}

// TestSuiteFindsFaults: no backend that breaks the contract passes.
func TestSuiteFindsFaults(t *testing.T) {
	for name := range broken {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBroken$", "-test.timeout=2m")
			cmd.Env = append(os.Environ(), brokenEnv+"="+name)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || !bytes.Contains(out, []byte("--- FAIL: TestBroken/")) {
				t.Errorf("the suite passes a backend with the fault %q (%v):\n%s", name, err, out)
			}
		})
	}
}

// faultyRig is a rig whose backend is a copier under a rule.
func faultyRig(t testing.TB, rule Rule) *rig {
	h := Harness{New: func(testing.TB) xfer.Backend { return Faulty(copier{}, rule) }}
	return newRig(t, h, xfer.Pair{}, 64<<10)
}

func TestFaults(t *testing.T) {
	pieces := stripes(4, 1000)
	for _, c := range []struct {
		rule Rule
		op   xfer.Op
		errs []error // by descriptor, of the second post
		want error
	}{
		{Rule{Fault: Fail, Call: 2}, xfer.Write, []error{xfer.ErrUnavailable, xfer.ErrUnavailable, xfer.ErrUnavailable, xfer.ErrUnavailable}, xfer.ErrUnavailable},
		{Rule{Fault: Fail, Call: 2, Descs: []int{1, 3}, Err: xfer.ErrDisconnected}, xfer.Read, []error{nil, xfer.ErrDisconnected, nil, xfer.ErrDisconnected}, xfer.ErrDisconnected},
		{Rule{Fault: Fail, Call: 1}, xfer.Read, make([]error, 4), nil},
		{Rule{Fault: Fail, Ops: []xfer.Op{xfer.Read}}, xfer.Write, make([]error, 4), nil},
		{Rule{Fault: Short, Call: 2, Descs: []int{2}}, xfer.Write, []error{nil, nil, xfer.ErrShort, nil}, xfer.ErrShort},
		{Rule{Fault: Down, Call: 2}, xfer.Write, []error{xfer.ErrUnavailable, xfer.ErrUnavailable, xfer.ErrUnavailable, xfer.ErrUnavailable}, xfer.ErrUnavailable},
	} {
		t.Run(fmt.Sprintf("%d at call %d of %s", c.rule.Fault, c.rule.Call, c.op), func(t *testing.T) {
			g := faultyRig(t, c.rule)
			r := g.request(c.op, pieces)
			if err := r.Run(t.Context()); (err != nil) != (c.rule.Call == 1) {
				t.Fatalf("first post: %v", err)
			}
			g.moved(c.op, pieces...)
			if c.rule.Call == 1 {
				for _, p := range pieces {
					g.unknown(c.op, p)
				}
			}
			g.fill(g.source(c.op))
			if err := r.Run(t.Context()); !errors.Is(err, c.want) {
				t.Errorf("second post: %v, want %v", err, c.want)
			}
			for i, want := range c.errs {
				if !errors.Is(r.DescErr(i), want) || (want == nil && r.DescErr(i) != nil) {
					t.Errorf("descriptor %d: %v, want %v", i, r.DescErr(i), want)
				}
				switch p := pieces[i]; {
				case want == nil:
					g.moved(c.op, p)
				case errors.Is(want, xfer.ErrShort):
					p.n /= 2
					g.moved(c.op, p)
				}
			}
			g.check() // what failed was not moved
		})
	}
}

func TestFaultCorrupt(t *testing.T) {
	for _, op := range ops {
		g := faultyRig(t, Rule{Fault: Corrupt, Descs: []int{1}})
		pieces := stripes(3, 1000)
		g.move(t.Context(), op, pieces...) // without an error
		g.sink(op).at(1000, 1)[0] ^= 0xff  // the only difference
		g.check()
	}
}

func TestFaultStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		resume := make(chan struct{})
		g := faultyRig(t, Rule{Fault: Stall, Descs: []int{0}, Resume: resume})
		pieces := stripes(2, 1000)
		r := g.request(xfer.Write, pieces)
		if err := r.Post(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if r.DescStatus(0) != xfer.Active || r.DescStatus(1) != xfer.Succeeded {
			t.Errorf("stalled: %s, %s", r.DescStatus(0), r.DescStatus(1))
		}
		r.Cancel()
		if r.Status() != xfer.Canceled || r.DescStatus(0) != xfer.Canceled {
			t.Errorf("cancelled: %s, %s", r.Status(), r.DescStatus(0))
		}
		g.moved(xfer.Write, pieces[1])
		g.check()
		if err := r.Post(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		close(resume)
		if err := r.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		g.moved(xfer.Write, pieces...)
		g.check()
	})
}

func TestFaultRegisterAndPrepare(t *testing.T) {
	one := xfer.DescList{Descs: []xfer.Desc{{Addr: 1, Len: 1}}}
	agent := func(rule Rule) *xfer.Agent {
		a, err := xfer.NewAgent("test", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.AddBackend(Faulty(copier{}, rule)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = a.Close() })
		return a
	}
	a := agent(Rule{Fault: Fail, On: OnRegister, Call: 2})
	for call, want := range []error{nil, xfer.ErrUnavailable, nil} {
		if err := a.Register(t.Context(), one, nil); !errors.Is(err, want) {
			t.Errorf("register %d: %v, want %v", call, err, want)
		}
	}
	a = agent(Rule{Fault: Stall, On: OnRegister})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Register(ended, one, nil); !errors.Is(err, xfer.ErrCanceled) {
		t.Errorf("stalled register: %v", err)
	}
	a = agent(Rule{Fault: Fail, On: OnPrepare, Ops: ops[:1], Err: xfer.ErrInvalid})
	if err := a.Register(t.Context(), one, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := a.NewRequest(ops[0], one, one, nil); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("prepare: %v", err)
	}
	if _, err := a.NewRequest(ops[1], one, one, nil); err != nil {
		t.Errorf("prepare of the other operation: %v", err)
	}
}

func TestFaultChanceIsReproducible(t *testing.T) {
	run := func(seed uint64) string {
		g := faultyRig(t, Rule{Fault: Fail, Chance: 0.3, Seed: seed})
		r := g.request(xfer.Read, stripes(64, 100))
		var pattern strings.Builder
		for range 4 {
			_ = r.Run(t.Context()) // fails or not, as DescErr tells
			for i := range r.Len() {
				if r.DescErr(i) != nil {
					pattern.WriteByte('x')
				} else {
					pattern.WriteByte('.')
				}
			}
		}
		return pattern.String()
	}
	first := run(1)
	if run(1) != first || run(2) == first {
		t.Error("the seed does not decide what fails")
	}
	if n := strings.Count(first, "x"); n < 40 || n > 120 { // 77 expected of 256
		t.Errorf("%d of 256 descriptors failed at a chance of 0.3", n)
	}
}

type (
	withQuerier   struct{ copier }
	withEstimator struct{ copier }
	withBoth      struct {
		withQuerier
		withEstimator2
	}
	withEstimator2 struct{}
)

func (withQuerier) Query(_ context.Context, _ xfer.MemType, d []xfer.Desc) ([]xfer.QueryResult, error) {
	return make([]xfer.QueryResult, len(d)), nil
}

func (withEstimator) Estimate(p xfer.Prepared) (xfer.Cost, error) {
	return withEstimator2{}.Estimate(p)
}

func (withEstimator2) Estimate(p xfer.Prepared) (xfer.Cost, error) {
	_ = p.(*copierTransfer) // it sees its own
	return xfer.Cost{Time: 1}, nil
}

func TestFaultyKeepsRoles(t *testing.T) {
	for name, c := range map[string]struct {
		b                  xfer.Backend
		querier, estimator bool
	}{
		"none":      {copier{}, false, false},
		"querier":   {withQuerier{}, true, false},
		"estimator": {withEstimator{}, false, true},
		"both":      {withBoth{}, true, true},
	} {
		h := Harness{New: func(testing.TB) xfer.Backend {
			return Faulty(Faulty(c.b, Rule{Fault: Fail, Call: 9}), Rule{Fault: Down, Call: 9})
		}}
		g := newRig(t, h, xfer.Pair{}, 4096)
		info := g.agent.Backends()[0]
		if info.Querier != c.querier || info.Estimator != c.estimator || info.Remote || info.Notifier {
			t.Errorf("%s: %+v", name, info)
		}
		if c.estimator {
			r := g.request(xfer.Read, stripes(1, 100))
			if cost, err := g.agent.Estimate(r); err != nil || cost.Time != 1 {
				t.Errorf("%s: estimate %+v, %v", name, cost, err)
			}
		}
	}
}

func TestFaultyRefusesRulesWithoutSense(t *testing.T) {
	for _, rule := range []Rule{
		{},
		{Fault: Down + 1},
		{Fault: Short, On: OnRegister},
		{Fault: Stall, On: OnPrepare},
		{Fault: Fail, Chance: 2},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Faulty accepts %+v", rule)
				}
			}()
			Faulty(copier{}, rule)
		}()
	}
}
