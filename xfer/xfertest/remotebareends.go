package xfertest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// spin transfers until it fails, with the first error.
func (b *bare) spin(ctx context.Context, op xfer.Op, pieces []piece) (begun <-chan struct{}, end <-chan error) {
	p := b.prepare(op, pieces)
	first, last := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			err := b.transfer(ctx, p, len(pieces))
			if i == 0 {
				close(first)
			}
			if err != nil {
				last <- err
				return
			}
		}
	}()
	return first, last
}

// testDisconnectInFlight: Disconnect fails what is under way, and the next transfer
// connects by itself.
func testDisconnectInFlight(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 1<<20)
	pieces := stripes(16, 64<<10)
	for range 10 {
		for _, op := range ops {
			begun, end := b.spin(t.Context(), op, pieces)
			<-begun
			for ended := false; !ended; {
				b.remoteRole().Disconnect(b.farID)
				select {
				case err := <-end:
					if !errors.Is(err, xfer.ErrDisconnected) {
						t.Fatalf("transfer when disconnected: %v", err)
					}
					ended = true
				case <-time.After(50 * time.Millisecond): // it fell between two transfers
				}
			}
			p := b.prepare(op, pieces)
			if err := b.transfer(t.Context(), p, len(pieces)); err != nil {
				t.Fatalf("the transfer after Disconnect: %v", err)
			}
			b.moved(op, pieces...)
			b.check()
		}
	}
}

// testCloseBareInFlight: when the peer's backend closes each pair is reported once,
// and its error says why.
func testCloseBareInFlight(t *testing.T, h RemoteHarness) {
	for _, op := range ops {
		b := newBare(t, h, 1<<20)
		begun, end := b.spin(t.Context(), op, stripes(16, 64<<10))
		<-begun
		b.closeFar()
		select {
		case err := <-end:
			if !errors.Is(err, xfer.ErrDisconnected) && !errors.Is(err, xfer.ErrInvalid) {
				t.Errorf("transfer when the peer closes: %v", err)
			}
		case <-time.After(patience):
			t.Fatal("a transfer with a peer that has closed does not end")
		}
		b.poison(&b.local)
		b.poison(&b.remote)
		b.watch()
	}
}

// testRemoteCancel: a context that ends before or during a transfer ends it, what is
// reported is true, and it can be transferred again.
func testRemoteCancel(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, h.maxBytes())
	pieces := stripes(64, b.size/64)
	for _, op := range ops {
		p := b.prepare(op, pieces)
		for _, after := range []time.Duration{0, 20 * time.Microsecond, 200 * time.Microsecond, time.Millisecond, 3 * time.Millisecond} {
			for range 3 {
				b.fill(b.source(op))
				ctx, cancel := context.WithCancel(t.Context())
				if after == 0 {
					cancel()
				} else {
					time.AfterFunc(after, cancel)
				}
				o := newOutcomes(t, len(pieces))
				err := o.transfer(ctx, b.near, p)
				late := ctx.Err() == nil
				cancel()
				if err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, context.Canceled) {
					t.Errorf("cancelled transfer: %v", err)
				}
				if after == 0 {
					b.check2(op)
				}
				_, canceled := b.settle(op, pieces, o.mu.errs)
				if late && canceled > 0 {
					t.Error("pairs were cancelled, though the context had not ended")
				}
				if op == xfer.Read {
					b.check()
				}
				b.again(op, pieces, p)
			}
		}
	}
}

// check2 checks that nothing was moved by a transfer that was cancelled before.
func (b *bare) check2(op xfer.Op) {
	b.t.Helper()
	if !b.holds(op, piece{0, 0, b.size}) {
		b.t.Errorf("%s with an ended context moved bytes", op)
	}
}

// testBackOff: while nobody is at the peer's address transfers fail at once;
// somebody who is there again is found by Connect at once, and by transfers when
// the back-off has passed.
func testBackOff(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	pieces := []piece{{0, 0, b.size}}
	p := b.prepare(xfer.Read, pieces)
	if err := b.transfer(t.Context(), p, 1); err != nil {
		t.Fatal(err)
	}
	b.moved(xfer.Read, pieces...)
	b.closeFar()
	gone := func() {
		t.Helper()
		began := time.Now()
		for range 200 {
			if err := b.transfer(t.Context(), p, 1); !errors.Is(err, xfer.ErrDisconnected) {
				t.Fatalf("transfer with nobody: %v", err)
			}
		}
		if took := time.Since(began); took > patience/3 {
			t.Errorf("200 transfers with nobody took %v", took)
		}
		b.fill(&b.local)
		b.check()
	}
	gone()
	if err := b.remoteRole().Connect(t.Context(), b.farID); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("connect to nobody: %v", err)
	}
	if err := b.near.(xfer.Notifier).Notify(t.Context(), b.farID, nil); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("notify nobody: %v", err)
	}
	if h.Again == nil {
		return
	}
	for _, connect := range []bool{true, false} {
		b.far = h.Again(t, Far, b.farInfo)
		b.closed = false
		bind(t, b.far, b.farID) // for this test, the same life goes on
		var err error
		if b.region, err = b.far.Register(t.Context(), xfer.DRAM, b.remote.registration()); err != nil {
			t.Fatal(err)
		}
		region, err := b.load(b.remote.registration())
		if err != nil {
			t.Fatal(err)
		}
		local, remote := b.bounds(xfer.Write, pieces)
		remote[0].Region = region
		q, err := b.near.Prepare(xfer.Read, local, remote)
		if err != nil {
			t.Fatal(err)
		}
		if connect {
			if err := b.remoteRole().Connect(t.Context(), b.farID); err != nil {
				t.Errorf("connect to a peer that is there again: %v", err)
			}
			if err := b.transfer(t.Context(), q, 1); err != nil {
				t.Errorf("transfer when connected: %v", err)
			}
		} else {
			for began := time.Now(); ; time.Sleep(time.Millisecond) {
				err := b.transfer(t.Context(), q, 1)
				if err == nil {
					t.Logf("a peer that is there again is found after %v", time.Since(began).Round(time.Millisecond))
					break
				}
				if !errors.Is(err, xfer.ErrDisconnected) || time.Since(began) > patience {
					t.Fatalf("transfer to a peer that is there again: %v", err)
				}
			}
		}
		b.moved(xfer.Read, pieces...)
		b.check()
		b.near.Release(q)
		b.remoteRole().UnloadRegion(region)
		b.closeFar()
		gone()
	}
}

// testForget: a peer that is forgotten and loaded again is as good as new, and
// nothing of what was known piles up.
func testForget(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	b.remoteRole().UnloadRegion(b.regions[1])
	b.remoteRole().ForgetPeer(b.farID)
	b.unloaded = true
	var before, after int
	for i := range 100 {
		if err := b.remoteRole().LoadConnInfo(b.farID, b.farInfo); err != nil {
			t.Fatal(err)
		}
		region, err := b.load(b.remote.registration())
		if err != nil {
			t.Fatal(err)
		}
		b.regions[1] = region
		op := ops[i%2]
		local, remote := b.bounds(xfer.Write, []piece{{0, 0, b.size}})
		p, err := b.near.Prepare(op, local, remote)
		if err != nil {
			t.Fatal(err)
		}
		b.fill(b.source(op))
		if err := b.transfer(t.Context(), p, 1); err != nil {
			t.Fatalf("transfer in life %d: %v", i, err)
		}
		b.moved(op, piece{0, 0, b.size})
		b.check()
		b.near.Release(p)
		b.remoteRole().UnloadRegion(region)
		b.remoteRole().ForgetPeer(b.farID)
		after = len(openFiles(t))
		if i == 10 {
			before = after
		}
	}
	// The far side may notice the end of the last connections a moment later.
	if after > before+8 {
		t.Errorf("%d files are open after 100 lives of a peer, %d after 10", after, before)
	}
}
