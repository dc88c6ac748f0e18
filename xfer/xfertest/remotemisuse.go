package xfertest

import (
	"errors"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// testRemoteMisuse: each misuse has its sentinel, and both agents go on working.
func testRemoteMisuse(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newStrangers(t, h, 128<<10, true)
	half := d.size / 2
	d.peer.must(call{Verb: "register", N: half})
	d.peer.must(call{Verb: "register", Off: half, N: half})

	local, remote := d.lists(xfer.Write, []piece{{0, 0, 4096}, {8192, 8192, 100}})
	if r, err := d.agent.NewRequest(op, local, remote, d.options); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("a peer that nobody has told of: %v, %v", r, err)
	}
	if err := d.agent.Notify(t.Context(), farName, nil, nil); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("notify a peer that nobody has told of: %v", err)
	}
	for name, info := range map[string][]byte{
		"nothing": nil, "text": []byte("metadata"), "cut": d.peer.must(call{Verb: "metadata"}).Data[:20],
	} {
		if err := d.near.handle(call{Verb: "load", Data: info}).err(); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("metadata that is %s: %v", name, err)
		}
	}
	d.meet()
	edit := func(l xfer.DescList, f func(d []xfer.Desc) []xfer.Desc) xfer.DescList {
		l.Descs = f(append([]xfer.Desc(nil), l.Descs...))
		return l
	}
	far := func(f func(d *xfer.Desc)) xfer.DescList {
		return edit(remote, func(d []xfer.Desc) []xfer.Desc { f(&d[1]); return d })
	}
	for name, c := range map[string]struct {
		local, remote xfer.DescList
		peer          string
		want          []error
	}{
		"peer":              {local, remote, "nobody", []error{xfer.ErrNotFound}},
		"counts":            {local, edit(remote, func(d []xfer.Desc) []xfer.Desc { return d[:1] }), farName, []error{xfer.ErrInvalid}},
		"lengths":           {local, far(func(d *xfer.Desc) { d.Len++ }), farName, []error{xfer.ErrInvalid}},
		"length 0":          {local, far(func(d *xfer.Desc) { d.Len = 0 }), farName, []error{xfer.ErrInvalid}},
		"wrap":              {local, far(func(d *xfer.Desc) { d.Addr = ^uint64(0) }), farName, []error{xfer.ErrInvalid}},
		"before":            {local, far(func(d *xfer.Desc) { d.Addr = d.Addr - 8192 - 1 }), farName, []error{xfer.ErrNoBackend, xfer.ErrNotFound}},
		"behind":            {local, far(func(d *xfer.Desc) { d.Addr += uint64(d.Len) + 128<<10 - 8192 - 199 }), farName, []error{xfer.ErrNoBackend, xfer.ErrNotFound}},
		"two registrations": {local, far(func(d *xfer.Desc) { d.Addr += uint64(half) - 8192 - 50 }), farName, []error{xfer.ErrNoBackend, xfer.ErrNotFound}},
		"device":            {local, far(func(d *xfer.Desc) { d.Dev += 7 }), farName, []error{xfer.ErrNoBackend, xfer.ErrNotFound}},
		"not registered here": {
			edit(local, func(d []xfer.Desc) []xfer.Desc { d[0].Addr--; return d }), remote, farName, []error{xfer.ErrNoBackend, xfer.ErrNotFound},
		},
	} {
		r, err := d.agent.NewRequest(op, c.local, c.remote, &xfer.RequestOptions{Peer: c.peer})
		ok := false
		for _, want := range c.want {
			ok = ok || errors.Is(err, want)
		}
		if !ok {
			t.Errorf("%s: %v, %v; want %v", name, r, err, c.want)
		}
	}
	theirs := d.theirs(op, piece{d.size - 50, 0, 100}) // behind what is registered here
	theirs.Count = 1
	if _, err := d.peer.ask(theirs); !errors.Is(err, xfer.ErrNoBackend) && !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("the peer's request behind the registered part: %v", err)
	}
	d.check()

	// Both go on working.
	d.fill(d.source(op))
	d.move(t.Context(), op, piece{0, 0, half}, piece{half, half, half})
	d.check()
	theirs = d.theirs(op, piece{0, 0, half})
	theirs.Count = 1
	d.peer.must(theirs)
	d.moved(opposite(op), piece{0, 0, half})
	d.check()
}
