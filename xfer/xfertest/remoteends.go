package xfertest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// quick is how long what ends without a deadline may need at most.
const quick = 2 * time.Second

// loop runs a request, or what goes round, over and over until it fails or ctx ends.
// begun is closed when it has succeeded once.
func loop(ctx context.Context, run func(ctx context.Context) error) (begun <-chan struct{}, end <-chan error) {
	b, e := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			if err := run(ctx); err != nil {
				if i == 0 {
					close(b)
				}
				e <- err
				return
			}
			if i == 0 {
				close(b)
			}
		}
	}()
	return b, e
}

// busy is a loop over all of the registered part in large and small pieces, at a
// random moment in its life.
func (d *duo) busy(ctx context.Context, op xfer.Op) (*xfer.Request, <-chan error) {
	d.t.Helper()
	r := d.request(op, stripes(16, d.size/16))
	return r, d.going(ctx, r.Run)
}

// going is a loop at a random moment in its life.
func (d *duo) going(ctx context.Context, run func(ctx context.Context) error) <-chan error {
	d.t.Helper()
	began := time.Now()
	begun, end := loop(ctx, run)
	<-begun
	d.moment(began)
	return end
}

// moment waits for a random moment of what goes round and has done so once since began:
// for as much as one more round, at most. Yielding instead would cost a time slice
// each time where those who copy have all processors.
func (d *duo) moment(began time.Time) {
	time.Sleep(time.Duration(d.rand.Int64N(int64(time.Since(began)))))
}

// underWay is the peer's loop over all of the registered part, at a random moment in
// its life.
func (d *duo) underWay(op xfer.Op) <-chan outcome {
	d.t.Helper()
	began := time.Now()
	end := d.peer.start(d.theirs(op, stripes(16, d.size/16)...))
	d.peer.must(call{Verb: "begun"})
	d.moment(began)
	return end
}

// ended waits for a loop. Its error must be one of those.
func (d *duo) ended(what string, end <-chan error, want ...error) error {
	d.t.Helper()
	select {
	case err := <-end:
		for _, w := range want {
			if errors.Is(err, w) {
				return err
			}
		}
		d.t.Fatalf("%s: the request ends with %v, want %v", what, err, want)
	case <-time.After(patience):
		d.t.Fatalf("%s: the request does not end", what)
	}
	return nil
}

// adopt takes over into the models what the registered part of a side holds: after
// a failure any of the bytes may have arrived.
func (g *rig) adopt(s *side) {
	g.t.Helper()
	if _, err := s.mem.ReadAt(s.at(0, g.size), guardBytes); err != nil {
		g.t.Fatal(err)
	}
}

// settled checks what is promised when transfers with a peer that lives have
// failed: this side's memory is quiet at once, and the peer's when the next
// transfer has returned, which fences off what the failed ones had under way.
func (d *duo) settled() {
	d.t.Helper()
	d.poison(&d.local)
	d.watchNear()
	one := d.request(xfer.Write, []piece{{0, 0, 1}})
	d.eventually("the next transfer", func() error { return one.Run(d.t.Context()) })
	d.poison(&d.remote)
	d.watch()
}

// testRemoteCloseInFlight: an agent that closes while its peer transfers leaves
// quiet memory, and the peer's transfer ends.
func testRemoteCloseInFlight(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	theirs := d.underWay(op)
	_, end := d.busy(t.Context(), op)
	closed := make(chan error, 1)
	go func() { closed <- d.agent.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Errorf("close: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Close hangs")
	}
	d.poison(&d.local) // at once
	d.ended("close", end, xfer.ErrCanceled, xfer.ErrClosed)
	got := <-theirs
	if !errors.Is(got.error, xfer.ErrDisconnected) && !errors.Is(got.error, xfer.ErrInvalid) {
		t.Errorf("the peer's transfer, when this agent closed: %v", got.error)
	}
	d.adopt(&d.remote)
	d.watch()
}

// testPeerCloses: transfers with a peer that closes end, with their memory quiet.
func testPeerCloses(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	r, end := d.busy(t.Context(), op)
	d.peer.must(call{Verb: "close"})
	// Memory that is no longer registered is refused as long as somebody is there
	// to say so.
	d.ended("the peer closes", end, xfer.ErrDisconnected, xfer.ErrInvalid)
	d.poison(&d.local)
	d.poison(&d.remote)
	for range 20 {
		began := time.Now()
		if err := r.Run(t.Context()); !errors.Is(err, xfer.ErrDisconnected) {
			t.Fatalf("transfer to a peer that has closed: %v", err)
		}
		if took := time.Since(began); took > quick {
			t.Fatalf("that a peer is not there is said after %v", took)
		}
	}
	if err := d.agent.Notify(t.Context(), farName, []byte("hello"), nil); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("notification to a peer that has closed: %v", err)
	}
	d.watch()
}

// testNewIncarnation: a peer that was started again is another one. Requests made
// for the old one fail, and what is made for the new one works.
func testNewIncarnation(t *testing.T, h RemoteHarness, op xfer.Op) {
	for _, same := range []bool{false, true} {
		if same && h.Again == nil {
			continue
		}
		t.Run(map[bool]string{false: "another address", true: "same address"}[same], func(t *testing.T) {
			d := newDuo(t, h, 1<<20)
			old := d.request(op, []piece{{0, 0, d.size}})
			if err := old.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			d.moved(op, piece{0, 0, d.size})
			before := d.far
			d.reopen(same)
			stale := func(when string) {
				t.Helper()
				if err := old.Run(t.Context()); !errors.Is(err, xfer.ErrDisconnected) {
					t.Errorf("a request for %s %s: %v", before, when, err)
				}
				d.check()
			}
			d.fill(&d.local)
			d.fill(&d.remote)
			stale("that was started again")
			if d.learn() == before {
				t.Fatalf("the peer is %s again", before)
			}
			stale("when the new one is known")
			d.again()
			stale("when the new one is in use")
			d.again()
		})
	}
}

// reopen makes the peer's agent anew over the same memory.
func (d *duo) reopen(same bool) {
	d.t.Helper()
	c := call{Verb: "open", Name: farName, N: d.size}
	if same {
		c.Data = d.farInfo
	}
	d.farInfo = d.peer.must(c).Info
	d.peer.must(call{Verb: "load", Data: d.order(call{Verb: "metadata"}).Data})
}

// testPeerDisconnects: a connection that either side ends while both live is made
// again by the next transfer; the one that was under way fails.
func testPeerDisconnects(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newDuo(t, h, min(h.maxBytes(), 2<<20))
	for round := range 6 {
		ctx, cancel := context.WithCancel(t.Context())
		_, end := d.busy(ctx, op)
		if round%2 == 0 {
			for len(end) == 0 { // else it fell between two transfers
				if err := d.agent.Disconnect(farName); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Millisecond)
			}
			d.ended("this side disconnects", end, xfer.ErrDisconnected)
		} else {
			// The peer may have no part in connections that this side made.
			d.peer.must(call{Verb: "disconnect", Name: nearName, N: int64(d.me.Incarnation)})
			cancel()
			d.ended("the peer disconnects", end, xfer.ErrDisconnected, xfer.ErrCanceled)
		}
		cancel()
		d.settled()
		d.again()
	}
}
