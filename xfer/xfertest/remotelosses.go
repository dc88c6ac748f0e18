package xfertest

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// testCut: connections that are cut while both processes live are made again; what
// used them fails.
func testCut(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	for _, how := range []int{syscall.SHUT_RDWR, syscall.SHUT_WR, syscall.SHUT_RD} {
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			_, end := d.busy(ctx, op)
			n := d.peer.must(call{Verb: "cut", Count: how}).Count
			if n == 0 {
				t.Log("the peer has no connections to cut")
			}
			// The memory of a peer that is mapped needs no connection.
			stop := time.AfterFunc(200*time.Millisecond, cancel)
			d.ended("cut connections", end, xfer.ErrDisconnected, xfer.ErrCanceled)
			stop.Stop()
			cancel()
			d.settled()
			d.again()

			// Connections that rest are cut as well.
			d.peer.must(call{Verb: "cut", Count: how})
			d.again()
			d.eventually("notification after a cut", func() error { return d.agent.Notify(t.Context(), farName, []byte("hello"), nil) })
			d.peer.must(call{Verb: "take", Count: 1})
			if d.peer.must(call{Verb: "idle"}).Count != 0 {
				t.Log("a notification was delivered though it had failed")
			}
		}
	}
}

// testKilled: when the peer's process dies in the middle of transfers they end, no
// later than promised after their deadlines, and memory is quiet; its next life is
// another peer, which works.
func testKilled(t *testing.T, h RemoteHarness, op xfer.Op) {
	const deadline = 300 * time.Millisecond
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	for round := range 5 {
		r := d.request(op, stripes(16, d.size/16))
		bounded := func(ctx context.Context) error {
			return inTime(ctx, t, "a transfer whose peer is killed", deadline, r.Run)
		}
		end := d.going(t.Context(), func(ctx context.Context) error {
			err := bounded(ctx)
			if errors.Is(err, xfer.ErrCanceled) {
				return nil // slow before the kill, or out of time when it came: the next one says more
			}
			return err
		})
		if round == 0 {
			d.peer.start(d.theirs(xfer.Read, stripes(4, 10_000)...)) // both ways
		}
		before := d.far
		began := time.Now()
		d.peer.child.kill(t)
		d.ended("the peer is killed", end, xfer.ErrDisconnected)
		t.Logf("round %d: the request ended %v after the kill", round, time.Since(began).Round(time.Microsecond))
		d.poison(&d.local)
		d.watchNear()
		// What a transfer that failed has left in its sink is anything; it is quiet.
		notThere := func() {
			t.Helper()
			if err := bounded(t.Context()); !errors.Is(err, xfer.ErrDisconnected) {
				t.Fatalf("transfer to %s, which was killed: %v", before, err)
			}
			d.poison(&d.local)
		}
		notThere()
		d.startPeer(false)
		d.watch()
		notThere()
		d.meet()
		if d.far == before {
			t.Fatalf("the peer is %s again", before)
		}
		notThere()
		d.watch()
		d.again()
		notThere()
	}
}

// testStopped: a transfer with a peer whose process stands still ends by its
// deadline, as promised, with its memory quiet. When the peer goes on and bytes of a new
// transfer have arrived, none of the old one's arrive any more.
func testStopped(t *testing.T, h RemoteHarness, op xfer.Op) {
	const deadline = 100 * time.Millisecond
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	pieces := stripes(16, d.size/16)
	for range 4 {
		looping, stop := context.WithCancel(t.Context())
		_, end := d.busy(looping, op)
		d.peer.child.signal(t, syscall.SIGSTOP)
		r := d.request(op, pieces)
		t.Cleanup(d.peer.child.wake) // before the requests of a test that failed are cancelled
		for range 3 {
			err := inTime(t.Context(), t, "a transfer with a peer that stands still", deadline, r.Run)
			// A backend that needs nobody to move bytes may succeed.
			if err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, xfer.ErrDisconnected) {
				t.Fatalf("transfer with a peer that stands still: %v", err)
			}
		}
		err := inTime(t.Context(), t, "a notification to a peer that stands still", deadline, func(ctx context.Context) error {
			return d.agent.Notify(ctx, farName, []byte("are you there"), nil)
		})
		if err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, xfer.ErrDisconnected) {
			t.Errorf("notification to a peer that stands still: %v", err)
		}
		// The first one may have been disconnected when the others gave up.
		stop()
		late, err := await(looping, end)
		if !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, xfer.ErrDisconnected) {
			t.Fatalf("cancel with a peer that stands still: %v", err)
		}
		if tooLate(late) {
			t.Errorf("a transfer with a peer that stands still goes on %v after it was cancelled", late)
		}
		d.poison(&d.local)
		d.watchNear()
		d.peer.child.signal(t, syscall.SIGCONT)
		d.settled()
		d.again()
	}
	for d.peer.must(call{Verb: "idle"}).Count > 0 { // may have been delivered or not
	}
}

// watchNear watches this side's memory only, since the peer cannot be asked.
func (d *duo) watchNear() {
	d.t.Helper()
	got := d.scratch
	for began := time.Now(); time.Since(began) < pause; time.Sleep(time.Millisecond) {
		if _, err := d.local.mem.ReadAt(got, 0); err != nil {
			d.t.Fatal(err)
		}
		if i := firstDifference(got, d.local.model); i >= 0 {
			d.t.Fatalf("byte %d of near memory changed after the transfer had ended", i-guardBytes)
		}
	}
}

// testInitiatorStopped: when a peer's process stands still in the middle of its
// transfer, Deregister and Close here do not return before its bytes can arrive no
// more. Where it touches the memory itself they may wait until it goes on or is gone, and
// no longer; elsewhere they do not wait.
func testInitiatorStopped(t *testing.T, h RemoteHarness, op xfer.Op) {
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	const (
		rounds = 4
		moment = 300 * time.Millisecond // how long one is held for a wait where waits are allowed
	)
	wait := quick
	if h.Direct {
		wait = moment
	}
	for round := range rounds {
		theirs := d.underWay(op)
		d.peer.child.signal(t, syscall.SIGSTOP)
		t.Cleanup(d.peer.child.wake)
		last := round == rounds-1
		what, end := "Deregister", make(chan error, 1)
		if last {
			what = "Close"
			go func() { end <- d.agent.Close() }()
		} else {
			go func() { end <- d.near.handle(call{Verb: "deregister", N: d.size}).err() }()
		}
		var err error
		select {
		case err = <-end:
			d.poison(&d.local)
			d.watchNear()
			d.release(last)
		case <-time.After(wait):
			if !h.Direct {
				t.Fatalf("%s waits for a peer that stands still", what)
			}
			d.release(last)
			select {
			case err = <-end:
			case <-time.After(patience):
				t.Fatalf("%s still waits for a peer that has gone on, or is gone", what)
			}
			d.poison(&d.local)
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		got := <-theirs
		if last {
			d.watchNear()
			return
		}
		if !errors.Is(got.error, xfer.ErrInvalid) && !errors.Is(got.error, xfer.ErrDisconnected) {
			t.Fatalf("the transfer of a peer that stood still: %v", got.error)
		}
		d.adopt(&d.remote)
		d.watch()
		d.order(call{Verb: "register", N: d.size})
		d.peer.must(call{Verb: "load", Data: d.order(call{Verb: "metadata"}).Data})
		d.fill(&d.local)
		d.fill(&d.remote)
		c := d.theirs(op, piece{0, 0, d.size})
		c.Count = 1
		d.eventually("the peer's next transfer", func() error { _, err := d.peer.ask(c); return err })
		d.moved(opposite(op), piece{0, 0, d.size})
		d.check()
	}
}

// release ends the standstill of the peer's process, for good or with its life.
func (d *duo) release(kill bool) {
	d.t.Helper()
	if kill {
		d.peer.child.kill(d.t)
		return
	}
	d.peer.child.wake()
}
