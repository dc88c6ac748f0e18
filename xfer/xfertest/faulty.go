package xfertest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// Fault is a way to go wrong.
type Fault uint8

// The faults. In a call with faulty descriptors, the others are transferred
// first and then the faulty ones, in order.
const (
	Fail    Fault = iota + 1 // nothing is moved; the error is Rule.Err
	Short                    // half of the bytes are moved; the error is ErrShort
	Stall                    // goes on as it should after Rule.Resume is closed, or is cancelled
	Corrupt                  // all is well, but the first byte that arrives is wrong
	Down                     // nothing of the whole call is moved; the call's error is Rule.Err
	Hang                     // as Stall, and nothing cancels it: only Rule.Resume ends it
)

// String gives the name that reports use.
func (f Fault) String() string {
	return [...]string{"none", "fail", "short", "stall", "corrupt", "down", "hang"}[f]
}

// Method is where a rule applies.
type Method uint8

// The methods. Register can Fail or Stall, Prepare can Fail, Transfer all.
const (
	OnTransfer Method = iota
	OnRegister
	OnPrepare
)

// Rule says what goes wrong, and when: the fields that are set must all apply.
// The same calls in the same order meet the same faults.
type Rule struct {
	Fault  Fault
	On     Method
	Ops    []xfer.Op       // these operations only (Prepare and Transfer); other calls are not counted
	Call   int             // the n-th call only, counted from 1
	Descs  []int           // these descriptors of a Transfer only
	Devs   []uint64        // descriptors of a Transfer whose remote memory is of these devices only
	Chance float64         // with this probability, for each descriptor of a Transfer or else each call
	Seed   uint64          // of the random numbers behind Chance
	Err    error           // for Fail and Down; an injected ErrUnavailable when nil
	Resume <-chan struct{} // for Stall, where nil is never, and for Hang, which needs it
}

// Faulty wraps a backend in one that does as it does, except where the rule
// says otherwise. It has the optional roles that the backend has, and closes
// it. Wrap several times for several rules. It panics when the rule makes no
// sense. Corrupt works for local DRAM.
func Faulty(b xfer.Backend, rule Rule) xfer.Backend {
	var in Injector
	in.Set(rule)
	return in.Wrap(b)
}

// check panics when the rule makes no sense, and fills in what it leaves open.
func (rule *Rule) check() {
	switch {
	case rule.Fault < Fail || rule.Fault > Hang,
		rule.Fault == Hang && rule.Resume == nil,
		rule.On > OnPrepare,
		rule.On == OnRegister && rule.Fault != Fail && rule.Fault != Stall,
		rule.On == OnPrepare && rule.Fault != Fail,
		rule.Chance < 0 || rule.Chance > 1:
		panic(fmt.Sprintf("xfertest: no such rule: %+v", *rule))
	}
	if rule.Err == nil {
		rule.Err = fmt.Errorf("%w: injected fault", xfer.ErrUnavailable)
	}
}

type faulty struct {
	xfer.Backend
	in *Injector
}

// faultyTransfer remembers what the wrapper needs to do a transfer in parts.
type faultyTransfer struct {
	inner         xfer.Prepared
	op            xfer.Op
	local, remote []xfer.Bound
}

// network is the pair of roles that come together.
type network interface {
	xfer.Remote
	xfer.Notifier
}

// estimator unwraps what the wrapped backend prepared.
type estimator struct{ inner xfer.Estimator }

func (e estimator) Estimate(p xfer.Prepared) (xfer.Cost, error) {
	return e.inner.Estimate(p.(*faultyTransfer).inner)
}

// withRoles gives the wrapper exactly the roles of the wrapped backend, since
// an agent finds roles by type.
func (f *faulty) withRoles() xfer.Backend {
	q, isQuerier := f.Backend.(xfer.Querier)
	inner, isEstimator := f.Backend.(xfer.Estimator)
	n, isNetwork := f.Backend.(network)
	e := estimator{inner}
	switch {
	case isQuerier && isEstimator && isNetwork:
		return struct {
			*faulty
			xfer.Querier
			estimator
			network
		}{f, q, e, n}
	case isQuerier && isEstimator:
		return struct {
			*faulty
			xfer.Querier
			estimator
		}{f, q, e}
	case isQuerier && isNetwork:
		return struct {
			*faulty
			xfer.Querier
			network
		}{f, q, n}
	case isEstimator && isNetwork:
		return struct {
			*faulty
			estimator
			network
		}{f, e, n}
	case isQuerier:
		return struct {
			*faulty
			xfer.Querier
		}{f, q}
	case isEstimator:
		return struct {
			*faulty
			estimator
		}{f, e}
	case isNetwork:
		return struct {
			*faulty
			network
		}{f, n}
	}
	return f
}

// stall waits and says whether the context ended first.
func (rule *Rule) stall(ctx context.Context) (canceled bool) {
	select {
	case <-rule.Resume:
		return false
	case <-ctx.Done():
		return true
	}
}

func (f *faulty) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	if rule, hit := f.in.hits(OnRegister, 0, []xfer.Bound{{}}); hit[0] {
		if rule.Fault == Fail {
			return nil, rule.Err
		}
		if rule.stall(ctx) {
			return nil, fmt.Errorf("%w: %w", xfer.ErrCanceled, context.Cause(ctx))
		}
	}
	return f.Backend.Register(ctx, t, d)
}

func (f *faulty) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	if rule, hit := f.in.hits(OnPrepare, op, []xfer.Bound{{}}); hit[0] {
		return nil, rule.Err
	}
	inner, err := f.Backend.Prepare(op, local, remote)
	if err != nil {
		return nil, err
	}
	return &faultyTransfer{inner, op, local, remote}, nil
}

func (f *faulty) Release(p xfer.Prepared) { f.Backend.Release(p.(*faultyTransfer).inner) }

func (f *faulty) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	t := p.(*faultyTransfer)
	rule, hit := f.in.hits(OnTransfer, t.op, t.remote)
	if !slices.Contains(hit, true) {
		return f.Backend.Transfer(ctx, t.inner, done)
	}
	if rule.Fault == Down {
		for i := range hit {
			done(i, rule.Err)
		}
		return rule.Err
	}
	var well []int
	for i, h := range hit {
		if !h {
			well = append(well, i)
		}
	}
	if len(well) > 0 {
		if err := f.part(ctx, t, well, done); err != nil {
			for i, h := range hit {
				if h {
					done(i, err)
				}
			}
			return err
		}
	}
	for i, h := range hit {
		if h {
			done(i, f.spoil(ctx, &rule, t, i))
		}
	}
	return nil
}

// part transfers some of the pairs.
func (f *faulty) part(ctx context.Context, t *faultyTransfer, which []int, done func(i int, err error)) error {
	local, remote := make([]xfer.Bound, len(which)), make([]xfer.Bound, len(which))
	for k, i := range which {
		local[k], remote[k] = t.local[i], t.remote[i]
	}
	return f.transfer(ctx, t.op, local, remote, func(k int, err error) { done(which[k], err) })
}

// transfer does one transfer of the wrapped backend from beginning to end.
func (f *faulty) transfer(ctx context.Context, op xfer.Op, local, remote []xfer.Bound, done func(i int, err error)) error {
	p, err := f.Backend.Prepare(op, local, remote)
	if err != nil {
		for i := range local {
			done(i, err)
		}
		return err
	}
	defer f.Backend.Release(p)
	return f.Backend.Transfer(ctx, p, done)
}

// move transfers one pair.
func (f *faulty) move(ctx context.Context, op xfer.Op, local, remote xfer.Bound) error {
	var result error
	err := f.transfer(ctx, op, []xfer.Bound{local}, []xfer.Bound{remote}, func(_ int, err error) { result = err })
	if result == nil {
		result = err
	}
	return result
}

// spoil does to pair i what the rule says.
func (f *faulty) spoil(ctx context.Context, rule *Rule, t *faultyTransfer, i int) error {
	if ctx.Err() != nil {
		return xfer.ErrCanceled
	}
	local, remote := t.local[i], t.remote[i]
	switch rule.Fault {
	case Short:
		n := local.Len
		local.Len, remote.Len = n/2, n/2
		if n > 1 {
			if err := f.move(ctx, t.op, local, remote); err != nil {
				return err
			}
		}
		return fmt.Errorf("%w: %d of %d bytes, injected fault", xfer.ErrShort, n/2, n)
	case Stall:
		if rule.stall(ctx) {
			return xfer.ErrCanceled
		}
		return f.move(ctx, t.op, local, remote)
	case Hang:
		<-rule.Resume
		return f.move(ctx, t.op, local, remote)
	case Corrupt:
		return f.corrupt(ctx, t.op, local, remote)
	}
	return rule.Err
}

// corrupt transfers one pair with a wrong first byte.
func (f *faulty) corrupt(ctx context.Context, op xfer.Op, local, remote xfer.Bound) error {
	if local.Type != xfer.DRAM {
		return fmt.Errorf("%w: corrupting local %s", xfer.ErrNotSupported, local.Type)
	}
	n := int(local.Len)
	if op == xfer.Read {
		if err := f.move(ctx, op, local, remote); err != nil {
			return err
		}
		arena.View(local.Addr, n)[0] ^= 0xff
		return nil
	}
	// The source stays as it is: others may look at it.
	a, err := arena.New(int64(n), nil)
	if err != nil {
		return err
	}
	defer a.Close()
	bad := a.Slice(0, int64(n))
	copy(bad, arena.View(local.Addr, n))
	bad[0] ^= 0xff
	local.Desc = xfer.Desc{Addr: arena.Addr(bad), Len: local.Len}
	if local.Region, err = f.Backend.Register(ctx, xfer.DRAM, local.Desc); err != nil {
		return err
	}
	return errors.Join(f.move(ctx, op, local, remote), f.Backend.Deregister(local.Region))
}
