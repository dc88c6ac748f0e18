package xfer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// gated is a backend whose pairs wait for their turn.
func gated() (b *script, started, turn chan int) {
	started, turn = make(chan int), make(chan int)
	b = newScript("gated")
	b.transfer = func(ctx context.Context, p *scriptTransfer, done func(int, error)) error {
		left := make(map[int]bool)
		for i := range p.local {
			left[i] = true
		}
		select {
		case started <- len(left):
		case <-ctx.Done():
		}
		for len(left) > 0 {
			select {
			case i := <-turn:
				p.copyPair(i)
				delete(left, i)
				done(i, nil)
			case <-ctx.Done():
				for i := range left {
					done(i, xfer.ErrCanceled)
				}
				return nil
			}
		}
		return nil
	}
	return b, started, turn
}

func split(l xfer.DescList) (local, remote xfer.DescList) {
	n := len(l.Descs) / 2
	return xfer.DescList{Type: l.Type, Descs: l.Descs[:n]}, xfer.DescList{Type: l.Type, Descs: l.Descs[n:]}
}

func TestRequestLife(t *testing.T) {
	b, started, turn := gated()
	a := newAgent(t, &xfer.AgentOptions{Telemetry: true}, b)
	l, m := newMemory(t, a, 6)
	if _, err := m.WriteAt(bytes.Repeat([]byte("kv"), 3<<9), 0); err != nil {
		t.Fatal(err)
	}
	local, remote := split(l)
	r := newRequest(t, a, xfer.Write, local, remote, nil)
	if r.Status() != xfer.NotPosted || r.DescStatus(2) != xfer.NotPosted || r.Len() != 3 || r.Backend() != "gated" {
		t.Errorf("a new request: %s, %s, %d descriptors, backend %s", r.Status(), r.DescStatus(2), r.Len(), r.Backend())
	}
	for range 2 {
		if err := r.Post(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-started
		for name, err := range map[string]error{
			"Post": r.Post(t.Context()), "Run": r.Run(t.Context()), "Release": r.Release(),
		} {
			wantError(t, name+" in flight", err, xfer.ErrActive, xfer.Error{Layer: xfer.LayerPost, Backend: "gated", Index: -1})
		}
		turn <- 1
		for r.DescStatus(1) != xfer.Succeeded { // done, but perhaps not recorded yet
			time.Sleep(time.Microsecond)
		}
		if r.Status() != xfer.Active || r.DescStatus(0) != xfer.Active || r.DescErr(0) != nil {
			t.Errorf("in flight: %s, %s, %v", r.Status(), r.DescStatus(0), r.DescErr(0))
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Wait(ended); !errors.Is(err, context.Canceled) || errors.Is(err, xfer.ErrCanceled) || r.Status() != xfer.Active {
			t.Errorf("a wait that is given up: %v, request %s", err, r.Status())
		}
		turn <- 0
		turn <- 2
		if err := r.Wait(t.Context()); err != nil || r.Status() != xfer.Succeeded {
			t.Errorf("wait: %v, request %s", err, r.Status())
		}
	}
	got := make([]byte, 6<<10)
	if _, err := m.ReadAt(got, 0); err != nil || !bytes.Equal(got[:3<<10], got[3<<10:]) {
		t.Errorf("the bytes did not arrive (%v)", err)
	}
	tel := r.Telemetry()
	if tel.Posts != 2 || tel.Descs != 3 || tel.Bytes != 3<<10 || tel.Started.IsZero() || tel.TransferTime <= 0 || tel.PostTime < 0 {
		t.Errorf("telemetry: %+v", tel)
	}
	s := a.Stats().Backends[0]
	if s.Transfers != 2 || s.Descs != 6 || s.BytesWritten != 6<<10 || s.BytesRead != 0 || s.Failed+s.Canceled != 0 {
		t.Errorf("stats: %+v", s)
	}
	for range 2 {
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
	if r.Status() != xfer.Released || a.Stats().Requests != 0 {
		t.Errorf("after Release: %s, %d requests", r.Status(), a.Stats().Requests)
	}
}

func TestFailuresNameTheDescriptor(t *testing.T) {
	b := newScript("b")
	a := newAgent(t, nil, b)
	l, _ := newMemory(t, a, 8)
	local, remote := split(l)
	r := newRequest(t, a, xfer.Read, local, remote, nil)
	reports := func(errs ...error) func(context.Context, *scriptTransfer, func(int, error)) error {
		return func(_ context.Context, _ *scriptTransfer, done func(int, error)) error {
			for i, err := range errs {
				done(i, err)
			}
			return nil
		}
	}
	short := fmt.Errorf("%w: 10 of 1024 bytes", xfer.ErrShort)
	for _, c := range []struct {
		name     string
		transfer func(context.Context, *scriptTransfer, func(int, error)) error
		want     error
		index    int
		text     string
	}{
		{"one", reports(nil, nil, short, nil), xfer.ErrShort, 2, "descriptor 2 0:[0x"},
		{"two", reports(nil, errInjected, short, nil), errInjected, 1, "2 of 4"},
		{"a failure before a cancelled one", reports(xfer.ErrCanceled, nil, nil, short), xfer.ErrShort, 3, "1 were canceled"},
		{"cancelled by the backend", reports(nil, nil, xfer.ErrCanceled, nil), xfer.ErrCanceled, 2, "canceled"},
		{"unreported", reports(nil, nil, nil), xfer.ErrShort, 3, "did not report"},
		{"reported twice", func(_ context.Context, _ *scriptTransfer, done func(int, error)) error {
			for i := range 4 {
				done(i, nil)
				done(i, errInjected) // too late to count
			}
			return nil
		}, nil, 0, ""},
		{"whole", func(_ context.Context, _ *scriptTransfer, done func(int, error)) error {
			done(0, nil)
			return errInjected
		}, errInjected, 1, "3 of 4"},
		{"whole, after all", func(_ context.Context, p *scriptTransfer, done func(int, error)) error {
			for i := range 4 {
				done(i, nil)
			}
			return errInjected
		}, errInjected, -1, "injected"},
	} {
		b.transfer = c.transfer
		err := r.Run(t.Context())
		if c.want == nil {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		wantError(t, c.name, err, c.want, xfer.Error{Layer: xfer.LayerPost, Backend: "b", Index: c.index})
		if err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %q does not say %q", c.name, err, c.text)
		}
		if r.Status() != xfer.Failed {
			t.Errorf("%s: request %s", c.name, r.Status())
		}
		if c.index >= 0 {
			wantError(t, c.name+", DescErr", r.DescErr(c.index), c.want, xfer.Error{Layer: xfer.LayerPost, Backend: "b", Index: c.index})
		}
	}
	b.transfer = nil
	if err := r.Run(t.Context()); err != nil || r.DescErr(3) != nil {
		t.Errorf("the next post is clean: %v, %v", err, r.DescErr(3))
	}
	b.prepare = func() error { return errInjected }
	_, err := a.NewRequest(xfer.Read, local, remote, nil)
	wantError(t, "prepare", err, errInjected, xfer.Error{Layer: xfer.LayerPrepare, Backend: "b", Index: -1})
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	if err := a.Deregister(t.Context(), list(xfer.Desc{Addr: l.Descs[0].Addr, Len: 8 << 10})); err != nil {
		t.Errorf("what failed left a reference: %v", err)
	}
}

func TestCancelWaitsForQuietMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newScript("slow")
		quiet := false
		b.transfer = func(ctx context.Context, p *scriptTransfer, done func(int, error)) error {
			done(0, nil)
			<-ctx.Done()
			time.Sleep(time.Hour) // the device takes its time
			quiet = true
			done(1, xfer.ErrCanceled)
			return nil
		}
		a := newAgent(t, nil, b)
		l, _ := newMemory(t, a, 4)
		local, remote := split(l)

		r := newRequest(t, a, xfer.Write, local, remote, nil)
		if err := r.Post(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		r.Cancel()
		if !quiet || r.Status() != xfer.Canceled || r.DescStatus(0) != xfer.Succeeded || r.DescStatus(1) != xfer.Canceled {
			t.Errorf("Cancel returned: quiet %v, %s, %s, %s", quiet, r.Status(), r.DescStatus(0), r.DescStatus(1))
		}
		err := r.Wait(t.Context())
		if !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.Canceled) {
			t.Errorf("wait: %v", err)
		}

		// Run in another goroutine is cancelled in the same way.
		quiet = false
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := r.Run(t.Context()); !errors.Is(err, xfer.ErrCanceled) {
				t.Errorf("run: %v", err)
			}
		})
		synctest.Wait()
		r.Cancel()
		if !quiet {
			t.Error("Cancel of Run returned before the memory was quiet")
		}
		wg.Wait()
		if err := r.Release(); err != nil {
			t.Error(err)
		}

		// A deadline, too.
		quiet = false
		start := time.Now()
		d := newRequest(t, a, xfer.Write, local, remote, &xfer.RequestOptions{Deadline: start.Add(time.Minute)})
		err = d.Run(t.Context())
		if !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.DeadlineExceeded) || !quiet || d.Status() != xfer.Canceled {
			t.Errorf("past the deadline: %v, %s", err, d.Status())
		}
		if took := time.Since(start); took != time.Minute+time.Hour {
			t.Errorf("the deadline of a minute ended a request after %v", took)
		}
		if s := a.Stats().Backends[0]; s.Canceled != 3 || s.Descs != 3 {
			t.Errorf("stats: %+v", s)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestMaxInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newScript("b")
		goOn := make(chan struct{})
		b.transfer = func(ctx context.Context, p *scriptTransfer, done func(int, error)) error {
			<-goOn
			done(0, nil)
			return nil
		}
		a := newAgent(t, &xfer.AgentOptions{MaxInFlight: 2}, b)
		l, _ := newMemory(t, a, 8)
		local, remote := split(l)
		var requests []*xfer.Request
		for i := range 4 {
			r := newRequest(t, a, xfer.Read, list(local.Descs[i]), list(remote.Descs[i]), nil)
			requests = append(requests, r)
		}
		for _, r := range requests[:2] {
			if err := r.Post(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := requests[2].Post(ctx); !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.DeadlineExceeded) || requests[2].Status() != xfer.NotPosted {
			t.Errorf("a post that found no room until its context ended: %v, %s", err, requests[2].Status())
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := requests[3].Post(t.Context()); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		if s := a.Stats(); s.InFlight != 2 || s.Limit != 2 || s.PostWaits != 2 || s.Requests != 4 || requests[3].Status() != xfer.NotPosted {
			t.Errorf("stats: %+v; request %s", s, requests[3].Status())
		}
		close(goOn)
		wg.Wait()
		for _, i := range []int{0, 1, 3} {
			if err := requests[i].Wait(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := requests[2].Run(t.Context()); err != nil {
			t.Error(err)
		}
		if s := a.Stats(); s.InFlight != 0 {
			t.Errorf("stats: %+v", s)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestEachOverlapsAndKeepsOrder(t *testing.T) {
	b, started, turn := gated()
	a := newAgent(t, nil, b)
	l, _ := newMemory(t, a, 8)
	local, remote := split(l)
	r := newRequest(t, a, xfer.Read, local, remote, nil)

	// Pieces end in the order 2, 0, 1, 3, and the last only after 2 was handed
	// over: Each does not wait for the end.
	var wg sync.WaitGroup
	wg.Go(func() {
		<-started
		for _, i := range []int{2, 0, 1} {
			turn <- i
		}
	})
	var order []int
	err := r.Each(t.Context(), func(i int, err error) error {
		order = append(order, i)
		if i == 2 {
			wg.Go(func() { turn <- 3 }) // fn itself may run inside the transfer
		}
		return err
	})
	wg.Wait()
	if err != nil || fmt.Sprint(order) != "[0 1 2 3]" {
		t.Errorf("Each: %v, %v", order, err)
	}

	// Of a post that has ended, it hands over what there is.
	n := 0
	if err := r.Each(t.Context(), func(int, error) error { n++; return nil }); err != nil || n != 4 {
		t.Errorf("Each after the end: %d, %v", n, err)
	}

	// The end of its context cancels the post.
	if err := r.Post(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-started
	turn <- 0
	ctx, cancel := context.WithCancel(t.Context())
	err = r.Each(ctx, func(i int, err error) error {
		if err := r.Each(t.Context(), nil); !errors.Is(err, xfer.ErrActive) {
			t.Errorf("Each inside Each: %v", err)
		}
		cancel()
		return err
	})
	if !errors.Is(err, xfer.ErrCanceled) || r.Status() != xfer.Canceled {
		t.Errorf("Each with a context that ends: %v, %s", err, r.Status())
	}

	// An error of the function does, too.
	if err := r.Post(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-started
	turn <- 0
	if err := r.Each(t.Context(), func(int, error) error { return errInjected }); !errors.Is(err, errInjected) || r.Status() != xfer.Canceled {
		t.Errorf("Each with a function that fails: %v, %s", err, r.Status())
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
}

func TestEachHandsOverErrors(t *testing.T) {
	b := newScript("b")
	b.transfer = func(_ context.Context, p *scriptTransfer, done func(int, error)) error {
		for i := range p.local {
			if i%2 == 0 {
				done(i, errInjected)
			} else {
				done(i, nil)
			}
		}
		return nil
	}
	a := newAgent(t, nil, b)
	l, _ := newMemory(t, a, 8)
	for _, n := range []int{1, 4} {
		r := newRequest(t, a, xfer.Read, list(l.Descs[:n]...), list(l.Descs[4:4+n]...), nil)
		failed := 0
		err := r.Each(t.Context(), func(i int, err error) error {
			if (err != nil) != (i%2 == 0) {
				t.Errorf("descriptor %d: %v", i, err)
			}
			if err != nil {
				failed++
			}
			return nil
		})
		if !errors.Is(err, errInjected) || failed != (n+1)/2 {
			t.Errorf("Each over %d: %d failed, %v", n, failed, err)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
}

func TestPreparedLists(t *testing.T) {
	a := newAgent(t, nil, newScript("other", xfer.Pair{Local: xfer.DRAM, Remote: xfer.FILE}), newScript("copy"))
	l, m := newMemory(t, a, 8)
	for i := range 4 {
		if _, err := m.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 1<<10), int64(i)<<10); err != nil {
			t.Fatal(err)
		}
	}
	local, remote := split(l)
	pl, err := a.Prepare(local)
	if err != nil {
		t.Fatal(err)
	}
	odd := remote
	odd.Descs = append(append([]xfer.Desc(nil), remote.Descs...), xfer.Desc{Addr: remote.Descs[0].Addr, Len: 7})
	pr, err := a.Prepare(odd)
	if err != nil {
		t.Fatal(err)
	}
	foreign := newAgent(t, nil, newScript("copy"))
	fl, _ := newMemory(t, foreign, 1)
	pf, err := foreign.Prepare(fl)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		op    xfer.Op
		l     *xfer.PreparedList
		li    []int
		r     *xfer.PreparedList
		ri    []int
		o     *xfer.RequestOptions
		want  error
		index int
	}{
		"operation":       {3, pl, []int{0}, pr, []int{0}, nil, xfer.ErrInvalid, -1},
		"nil":             {xfer.Read, nil, nil, pr, nil, nil, xfer.ErrInvalid, -1},
		"foreign":         {xfer.Read, pl, nil, pf, nil, nil, xfer.ErrInvalid, -1},
		"index":           {xfer.Read, pl, []int{0, 4}, pr, []int{0, 1}, nil, xfer.ErrInvalid, -1},
		"negative index":  {xfer.Read, pl, []int{0}, pr, []int{-1}, nil, xfer.ErrInvalid, -1},
		"counts":          {xfer.Read, pl, []int{0, 1}, pr, []int{0}, nil, xfer.ErrInvalid, -1},
		"all, counts":     {xfer.Read, pl, nil, pr, nil, nil, xfer.ErrInvalid, -1},
		"none":            {xfer.Read, pl, []int{}, pr, []int{}, nil, xfer.ErrInvalid, -1},
		"lengths":         {xfer.Read, pl, []int{0, 1}, pr, []int{0, 4}, nil, xfer.ErrInvalid, 1},
		"unknown backend": {xfer.Read, pl, []int{0}, pr, []int{0}, &xfer.RequestOptions{Backend: "x"}, xfer.ErrNotFound, -1},
		"other backend":   {xfer.Read, pl, []int{0}, pr, []int{0}, &xfer.RequestOptions{Backend: "other"}, xfer.ErrNoBackend, -1},
	} {
		_, err := a.Select(c.op, c.l, c.li, c.r, c.ri, c.o)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		var e *xfer.Error
		if !errors.As(err, &e) || e.Layer != xfer.LayerPrepare || e.Index != c.index {
			t.Errorf("%s: %v, want descriptor %d", name, err, c.index)
		}
	}

	r, err := a.Select(xfer.Write, pl, []int{3, 1}, pr, []int{0, 2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	all, err := a.Select(xfer.Write, pl, nil, pr, []int{0, 1, 2, 3}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if pl.Len() != 4 || pr.Len() != 5 || all.Len() != 4 || r.Len() != 2 {
		t.Errorf("lengths: %d, %d, %d, %d", pl.Len(), pr.Len(), all.Len(), r.Len())
	}
	// The lists go; the requests stay, and keep the memory registered.
	pl.Release()
	pr.Release()
	if _, err := a.Select(xfer.Write, pl, nil, pr, nil, nil); !errors.Is(err, xfer.ErrClosed) {
		t.Errorf("select from a released list: %v", err)
	}
	for _, c := range []struct {
		r    *xfer.Request
		want []byte
	}{{r, []byte{4, 0, 2, 0}}, {all, []byte{1, 2, 3, 4}}} {
		if err := a.Deregister(t.Context(), list(m.Desc)); !errors.Is(err, xfer.ErrActive) {
			t.Errorf("deregister under a selected request: %v", err)
		}
		if err := c.r.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 4<<10)
		if _, err := m.ReadAt(got, 4<<10); err != nil {
			t.Fatal(err)
		}
		for i, w := range c.want {
			if !bytes.Equal(got[i<<10:(i+1)<<10], bytes.Repeat([]byte{w}, 1<<10)) {
				t.Errorf("block %d holds %d, want %d", i, got[i<<10], w)
			}
		}
		if err := c.r.Release(); err != nil {
			t.Error(err)
		}
	}
	if err := a.Deregister(t.Context(), list(m.Desc)); err != nil {
		t.Error(err)
	}
	if _, err := a.Prepare(local); !errors.Is(err, xfer.ErrNoBackend) || !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("prepare of what is not registered: %v", err)
	}
}

// TestEverythingAtOnce lets all calls of an agent meet; the race detector and
// the counters of the backends judge.
func TestEverythingAtOnce(t *testing.T) {
	a := newAgent(t, &xfer.AgentOptions{Telemetry: true, MaxInFlight: 3}, newScript("one"), newScript("two"))
	l, m := newMemory(t, a, 64)
	again := list(m.Desc)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			local, remote := list(l.Descs[w*4:w*4+4]...), list(l.Descs[32+w*4:32+w*4+4]...)
			for i := range 100 {
				r, err := a.NewRequest(xfer.Write, local, remote, nil)
				if err != nil {
					if errors.Is(err, xfer.ErrClosed) {
						return
					}
					t.Error(err)
					return
				}
				var side sync.WaitGroup
				side.Go(func() {
					_ = r.Status()
					_ = r.DescErr(i % 4)
					_ = r.Telemetry()
					_, _ = a.Estimate(r)
					if i%3 == 0 {
						r.Cancel()
					}
				})
				if i%2 == 0 {
					err = r.Run(t.Context())
				} else {
					err = r.Each(t.Context(), func(int, error) error { return nil })
				}
				if err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, xfer.ErrClosed) {
					t.Error(err)
				}
				side.Wait()
				if err := r.Release(); err != nil {
					t.Error(err)
				}
				if w == 0 {
					if err := a.Register(t.Context(), again, nil); err != nil && !errors.Is(err, xfer.ErrClosed) {
						t.Error(err)
					} else if err == nil {
						if err := a.Deregister(t.Context(), again); err != nil && !errors.Is(err, xfer.ErrClosed) && !errors.Is(err, xfer.ErrActive) {
							t.Error(err)
						}
					}
					_ = a.Stats()
				}
				if w == 1 && i == 90 {
					if err := a.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkRequest(b *testing.B) {
	nop := newScript("nop")
	nop.transfer = func(_ context.Context, p *scriptTransfer, done func(int, error)) error {
		for i := range p.local {
			done(i, nil)
		}
		return nil
	}
	a := newAgent(b, nil, nop)
	l, _ := newMemory(b, a, 2048)
	local, remote := split(l)
	for _, n := range []int{1, 16, 1024} {
		b.Run(fmt.Sprintf("new+run/%d", n), func(b *testing.B) {
			lo, re := list(local.Descs[:n]...), list(remote.Descs[:n]...)
			b.ReportAllocs()
			for b.Loop() {
				r, err := a.NewRequest(xfer.Write, lo, re, nil)
				if err != nil {
					b.Fatal(err)
				}
				if err := r.Run(b.Context()); err != nil {
					b.Fatal(err)
				}
				if err := r.Release(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	one := newRequest(b, a, xfer.Write, list(local.Descs[0]), list(remote.Descs[0]), nil)
	b.Run("run", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := one.Run(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("post+wait", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := one.Post(b.Context()); err != nil {
				b.Fatal(err)
			}
			if err := one.Wait(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
