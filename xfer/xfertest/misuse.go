package xfertest

import (
	"context"
	"errors"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// testMisuse: each misuse has its sentinel, and harms nothing.
func testMisuse(t *testing.T, h Harness, pair xfer.Pair) {
	g := newRig(t, h, pair, 64<<10)
	local, remote := g.lists(xfer.Read, []piece{{0, 0, 4096}, {8192, 8192, 100}})
	edit := func(l xfer.DescList, f func(d []xfer.Desc) []xfer.Desc) xfer.DescList {
		l.Descs = f(append([]xfer.Desc(nil), l.Descs...))
		return l
	}
	for name, c := range map[string]struct {
		op            xfer.Op
		local, remote xfer.DescList
		o             *xfer.RequestOptions
		want          error
	}{
		"operation":       {op: 7, local: local, remote: remote, want: xfer.ErrInvalid},
		"empty":           {local: edit(local, func(d []xfer.Desc) []xfer.Desc { return nil }), remote: remote, want: xfer.ErrInvalid},
		"counts":          {local: local, remote: edit(remote, func(d []xfer.Desc) []xfer.Desc { return d[:1] }), want: xfer.ErrInvalid},
		"lengths":         {local: local, remote: edit(remote, func(d []xfer.Desc) []xfer.Desc { d[1].Len++; return d }), want: xfer.ErrInvalid},
		"length 0":        {local: edit(local, func(d []xfer.Desc) []xfer.Desc { d[0].Len = 0; return d }), remote: remote, want: xfer.ErrInvalid},
		"wrap":            {local: edit(local, func(d []xfer.Desc) []xfer.Desc { d[1].Addr = ^uint64(0); return d }), remote: remote, want: xfer.ErrInvalid},
		"device":          {local: local, remote: edit(remote, func(d []xfer.Desc) []xfer.Desc { d[1].Dev += 1 << 40; return d }), want: xfer.ErrNotFound},
		"before":          {local: edit(local, func(d []xfer.Desc) []xfer.Desc { d[0].Addr -= 1; return d }), remote: edit(remote, func(d []xfer.Desc) []xfer.Desc { d[0].Addr -= 1; return d }), want: xfer.ErrNotFound},
		"behind":          {local: local, remote: edit(remote, func(d []xfer.Desc) []xfer.Desc { d[0].Addr += 64<<10 - 4095; return d }), want: xfer.ErrNoBackend},
		"memory type":     {local: xfer.DescList{Type: 99, Descs: local.Descs}, remote: remote, want: xfer.ErrInvalid},
		"unknown backend": {local: local, remote: remote, o: &xfer.RequestOptions{Backend: "no such"}, want: xfer.ErrNotFound},
	} {
		if r, err := g.agent.NewRequest(c.op, c.local, c.remote, c.o); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v; want %v", name, r, err, c.want)
		}
	}

	op := xfer.Write
	if g.remote.mem.pieces != nil {
		op = xfer.Read // writes go elsewhere
	}
	r, err := g.agent.NewRequest(op, local, remote, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Wait(t.Context()); !errors.Is(err, xfer.ErrNotPosted) {
		t.Errorf("Wait before Post: %v", err)
	}
	registered := xfer.DescList{Type: pair.Remote, Descs: []xfer.Desc{g.remote.registration()}}
	if err := g.agent.Deregister(t.Context(), registered); !errors.Is(err, xfer.ErrActive) {
		t.Errorf("Deregister with a live request: %v", err)
	}
	if err := r.Run(t.Context()); err != nil {
		t.Errorf("a request after the refused Deregister: %v", err)
	}
	g.moved(op, piece{0, 0, 4096}, piece{8192, 8192, 100})
	for range 2 {
		if err := r.Release(); err != nil {
			t.Errorf("Release: %v", err)
		}
	}
	for name, err := range map[string]error{
		"Run": r.Run(t.Context()), "Post": r.Post(t.Context()), "Wait": r.Wait(t.Context()),
		"Each": r.Each(t.Context(), func(int, error) error { return nil }),
	} {
		if !errors.Is(err, xfer.ErrClosed) {
			t.Errorf("%s after Release: %v", name, err)
		}
	}
	if err := g.agent.Deregister(t.Context(), registered); err != nil {
		t.Errorf("Deregister after Release: %v", err)
	}
	if err := g.agent.Deregister(t.Context(), registered); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("Deregister twice: %v", err)
	}
	if r, err := g.agent.NewRequest(op, local, remote, nil); !errors.Is(err, xfer.ErrNoBackend) {
		t.Errorf("NewRequest after Deregister: %v, %v", r, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.agent.Register(ended, registered, nil); err == nil {
		// A backend that has nothing to wait for may succeed.
		if err := g.agent.Deregister(t.Context(), registered); err != nil {
			t.Error(err)
		}
	}
	g.check()

	for range 2 {
		if err := g.agent.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if err := g.agent.Register(t.Context(), registered, nil); !errors.Is(err, xfer.ErrClosed) {
		t.Errorf("Register after Close: %v", err)
	}
	if r, err := g.agent.NewRequest(op, local, remote, nil); !errors.Is(err, xfer.ErrClosed) {
		t.Errorf("NewRequest after Close: %v, %v", r, err)
	}
}

// testShort: reading behind the end fails for the descriptors that lie there,
// with ErrShort, and for no other.
func testShort(t *testing.T, h Harness, pair xfer.Pair) {
	if !pair.Remote.Unbounded() {
		return // such memory has no end that the agent lets through
	}
	const size = 256 << 10
	g := newRig(t, h, pair, size)
	whole := g.remote.mem.Desc
	whole.Addr, whole.Len = 0, 0
	whole.Dev += 1 << 32 // beside the bounded registration
	if err := g.agent.Register(t.Context(), xfer.DescList{Type: pair.Remote, Descs: []xfer.Desc{whole}}, nil); err != nil {
		t.Fatalf("register without a length: %v", err)
	}
	const end = size + 2*guardBytes
	for name, c := range map[string]struct{ off, n int64 }{
		"behind":             {end, 4096},
		"far behind":         {end + 1<<30, 4096},
		"across":             {end - 4096, 8192},
		"across, odd":        {end - 1000, 1001},
		"across, one sector": {end - 512, 1024},
	} {
		t.Run(name, func(t *testing.T) {
			local, remote := g.lists(xfer.Read, []piece{{0, 0, 4096}, {8192, 0, c.n}, {32 << 10, 0, 4096}})
			for i := range remote.Descs {
				remote.Descs[i].Dev = whole.Dev
			}
			remote.Descs[1].Addr = uint64(c.off)
			r, err := g.agent.NewRequest(xfer.Read, local, remote, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Release()
			err = r.Run(t.Context())
			var where *xfer.Error
			if !errors.Is(err, xfer.ErrShort) || !errors.As(err, &where) {
				t.Fatalf("read behind the end: %v, want ErrShort", err)
			}
			if where.Layer != xfer.LayerPost || where.Backend != g.backend.Name() || where.Index != 1 {
				t.Errorf("the error does not name the place: %v", err)
			}
			if r.DescErr(0) != nil || r.DescErr(2) != nil || r.DescStatus(1) != xfer.Failed {
				t.Errorf("descriptors: %v; %s; %v", r.DescErr(0), r.DescStatus(1), r.DescErr(2))
			}
			g.moved(xfer.Read, piece{0, 0, 4096}, piece{32 << 10, 0, 4096})
			g.unknown(xfer.Read, piece{8192, 0, c.n})
			g.check()
		})
	}
}

// testAbsent: what does not exist is an error at registration or at the first
// read, never bytes.
func testAbsent(t *testing.T, h Harness, pair xfer.Pair) {
	absent := h.Absent[pair.Remote]
	if absent == nil {
		return
	}
	g := newRig(t, h, pair, 64<<10)
	d := absent(t)
	err := g.agent.Register(t.Context(), xfer.DescList{Type: pair.Remote, Descs: []xfer.Desc{d}}, nil)
	if err == nil {
		local, remote := g.lists(xfer.Read, []piece{{0, 0, 4096}})
		remote.Descs[0] = xfer.Desc{Len: 4096, Dev: d.Dev}
		r, rerr := g.agent.NewRequest(xfer.Read, local, remote, nil)
		if rerr != nil {
			t.Fatal(rerr)
		}
		defer r.Release()
		err = r.Run(t.Context())
	}
	var where *xfer.Error
	if !errors.Is(err, xfer.ErrUnavailable) && !errors.Is(err, xfer.ErrNotFound) || !errors.As(err, &where) || where.Index != 0 {
		t.Errorf("%s %s: %v, want ErrUnavailable or ErrNotFound of descriptor 0", pair.Remote, d, err)
	}
	g.check()
}

// testQuery: a Querier knows what exists and how big it is.
func testQuery(t *testing.T, h Harness, pair xfer.Pair) {
	const size = 64 << 10
	g := newRig(t, h, pair, size)
	info := g.agent.Backends()[0]
	l := xfer.DescList{Type: pair.Remote, Descs: []xfer.Desc{g.remote.mem.Desc}}
	if !info.Querier {
		if _, err := g.agent.Query(t.Context(), info.Name, l); !errors.Is(err, xfer.ErrNotSupported) {
			t.Errorf("Query without the role: %v", err)
		}
		return
	}
	if absent := h.Absent[pair.Remote]; absent != nil {
		l.Descs = append(l.Descs, absent(t))
	}
	results, err := g.agent.Query(t.Context(), info.Name, l)
	if err != nil {
		t.Fatal(err)
	}
	if want := (xfer.QueryResult{Exists: true, Bytes: size + 2*guardBytes}); results[0] != want {
		t.Errorf("query: %+v, want %+v", results[0], want)
	}
	if len(results) > 1 && results[1] != (xfer.QueryResult{}) {
		t.Errorf("query of something absent: %+v", results[1])
	}
}

// testEstimate: an Estimator gives a cost that grows with the size.
func testEstimate(t *testing.T, h Harness, pair xfer.Pair) {
	g := newRig(t, h, pair, 4<<20)
	info := g.agent.Backends()[0]
	small, large := g.request(xfer.Read, []piece{{0, 0, 1}}), g.request(xfer.Read, stripes(4, 1<<20))
	for range 2 { // before and after something is known
		s, err := g.agent.Estimate(small)
		if !info.Estimator {
			if !errors.Is(err, xfer.ErrNotSupported) {
				t.Errorf("Estimate without the role: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		l, err := g.agent.Estimate(large)
		if err != nil {
			t.Fatal(err)
		}
		if s.Time <= 0 || l.Time < s.Time || s.Margin < 0 || l.Margin < 0 {
			t.Errorf("estimates: %+v for 1 byte, %+v for 4 MiB", s, l)
		}
		for range 5 {
			if err := large.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			g.moved(xfer.Read, stripes(4, 1<<20)...)
		}
	}
	g.check()
}
