package xfertest

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// testRegisteredLater: memory that a peer registers later is reached when the
// agent is told of it, and not before.
func testRegisteredLater(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newStrangers(t, h, 1<<20, true)
	half := d.size / 2
	d.peer.must(call{Verb: "register", N: half})
	d.meet()
	first, second := piece{0, 0, half}, piece{half, half, half}
	d.move(t.Context(), op, first)
	d.check()
	unknown := func() {
		t.Helper()
		local, remote := d.lists(xfer.Write, []piece{second})
		if r, err := d.agent.NewRequest(op, local, remote, d.options); !errors.Is(err, xfer.ErrNoBackend) && !errors.Is(err, xfer.ErrNotFound) {
			t.Fatalf("a request for memory that the peer has not told of: %v, %v", r, err)
		}
	}
	unknown()
	d.peer.must(call{Verb: "register", Off: half, N: half})
	unknown()
	part := d.peer.must(call{Verb: "partial", Off: half, N: half}).Data
	if id := d.order(call{Verb: "load", Data: part}).Peer; id != d.far {
		t.Fatalf("partial metadata is of %s, want %s", id, d.far)
	}
	for range 2 {
		d.fill(d.source(op))
		d.move(t.Context(), op, first, second)
		d.check()
		d.order(call{Verb: "load", Data: part}) // twice is no harm
	}
}

// testDeregistered: memory that a peer has deregistered is out of reach, whatever
// was prepared and is still believed.
func testDeregistered(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newStrangers(t, h, 1<<20, true)
	half := d.size / 2
	d.peer.must(call{Verb: "register", N: half})
	d.peer.must(call{Verb: "register", Off: half, N: half})
	d.meet()
	kept, gone := piece{0, 0, half}, piece{half, half, half}
	r, mixed := d.request(op, []piece{gone}), d.request(op, []piece{kept, gone})
	if err := mixed.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.moved(op, kept, gone)
	d.peer.must(call{Verb: "deregister", Off: half, N: half})
	d.fill(&d.local)
	d.fill(&d.remote)
	for range 3 {
		if err := r.Run(t.Context()); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("transfer with memory that the peer deregistered: %v", err)
		}
		// The piece that is still registered may have arrived or not, as its own status says.
		if err := mixed.Run(t.Context()); !errors.Is(err, xfer.ErrInvalid) || mixed.DescErr(1) == nil {
			t.Errorf("transfer with memory part of which the peer deregistered: %v; %v", err, mixed.DescErr(1))
		}
		if mixed.DescErr(0) == nil {
			d.moved(op, kept)
		} else {
			d.unknown(op, kept)
		}
		d.sinkMayHold(op, gone)
		d.check()
		d.move(t.Context(), op, kept) // goes on
		d.check()
	}
	// Registered anew, it is another registration: what was believed of the old one
	// stays refused.
	d.peer.must(call{Verb: "register", Off: half, N: half})
	d.fill(d.source(op))
	if err := r.Run(t.Context()); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("transfer by the token of a registration that is gone: %v", err)
	}
	d.sinkMayHold(op, gone)
	d.check()
}

// sinkMayHold takes over what a failed read left here. A failed write leaves the
// peer's memory alone when the peer refused it.
func (d *duo) sinkMayHold(op xfer.Op, p piece) {
	d.t.Helper()
	if op == xfer.Read {
		d.unknown(op, p)
	}
}

// testDeregisterInFlight: when Deregister has returned no bytes of a peer arrive in
// the memory any more, and none are read from it.
func testDeregisterInFlight(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	for round := range 6 {
		taken := d.peer.start(call{Verb: "take", Count: 1})
		theirs := d.underWay(op)
		d.order(call{Verb: "deregister", N: d.size})
		d.poison(&d.local)
		got := <-theirs
		if !errors.Is(got.error, xfer.ErrInvalid) {
			t.Fatalf("the peer's transfer, when the memory was deregistered: %v", got.error)
		}
		d.adopt(&d.remote)
		d.watch()
		if op == xfer.Read {
			// Reads that began later would have brought the poison.
			if i := bytes.Index(d.remote.at(0, d.size), d.local.at(0, 128)); i >= 0 {
				t.Fatalf("bytes from after Deregister are at offset %d of the peer's memory", i)
			}
		}
		d.fill(&d.local)
		d.fill(&d.remote)
		d.order(call{Verb: "register", N: d.size})
		if _, err := d.peer.ask(call{Verb: "load", Data: d.order(call{Verb: "metadata"}).Data}); err != nil {
			t.Fatal(err)
		}
		if err := d.agent.Notify(t.Context(), farName, fmt.Append(nil, round), nil); err != nil {
			t.Fatal(err)
		}
		if got := <-taken; got.error != nil {
			t.Fatal(got.error)
		}
		c := d.theirs(op, piece{0, 0, d.size})
		c.Count = 1
		d.peer.must(c)
		d.moved(opposite(op), piece{0, 0, d.size})
		d.check()
	}
}
