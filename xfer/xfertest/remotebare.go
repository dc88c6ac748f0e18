package xfertest

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// bare is a rig of two backends that know each other, without agents.
type bare struct {
	*rig
	h        RemoteHarness
	near     xfer.Backend
	far      xfer.Backend
	nearID   xfer.PeerID
	farID    xfer.PeerID
	region   xfer.Region // of far memory, at the far side
	farInfo  []byte
	closed   bool // the far side
	unloaded bool
}

func (b *bare) remoteRole() xfer.Remote { return b.near.(xfer.Remote) }

// bind makes a backend somebody's.
func bind(t testing.TB, b xfer.Backend, id xfer.PeerID) []byte {
	t.Helper()
	if err := b.(xfer.Remote).Bind(id); err != nil {
		t.Fatalf("bind to %s: %v", id, err)
	}
	info, err := b.(xfer.Remote).ConnInfo()
	if err != nil {
		t.Fatalf("connection info: %v", err)
	}
	return info
}

// newBare makes two backends with size bytes registered at each; the near one knows
// the far one and its memory.
func newBare(t testing.TB, h RemoteHarness, size int64) *bare {
	t.Helper()
	b := &bare{h: h, nearID: xfer.PeerID{Name: nearName, Incarnation: 1}, farID: xfer.PeerID{Name: farName, Incarnation: 2}}
	b.rig = &rig{t: t, size: size, scratch: make([]byte, size+2*guardBytes)}
	b.seed()
	for i, s := range b.sides() {
		*s = side{name: [...]string{nearName, farName}[i], typ: xfer.DRAM, mem: h.memory(t, Side(i), size+2*guardBytes)}
		s.model = make([]byte, size+2*guardBytes)
		b.fill(s)
	}
	b.near, b.far = h.New(t, Near), h.New(t, Far)
	b.backend = b.near
	bind(t, b.near, b.nearID)
	b.farInfo = bind(t, b.far, b.farID)
	var err error
	if b.regions[0], err = b.near.Register(t.Context(), xfer.DRAM, b.local.registration()); err != nil {
		t.Fatal(err)
	}
	if b.region, err = b.far.Register(t.Context(), xfer.DRAM, b.remote.registration()); err != nil {
		t.Fatal(err)
	}
	if err := b.remoteRole().LoadConnInfo(b.farID, b.farInfo); err != nil {
		t.Fatalf("load connection info of %s: %v", b.farID, err)
	}
	if b.regions[1], err = b.load(b.remote.registration()); err != nil {
		t.Fatalf("load region of %s: %v", b.farID, err)
	}
	t.Cleanup(func() {
		if !b.unloaded {
			b.remoteRole().UnloadRegion(b.regions[1])
			b.remoteRole().ForgetPeer(b.farID)
		}
		if err := b.near.Deregister(b.regions[0]); err != nil {
			t.Errorf("deregister: %v", err)
		}
		if err := b.near.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		b.closeFar()
	})
	return b
}

func (b *bare) closeFar() {
	b.t.Helper()
	if b.closed {
		return
	}
	b.closed = true
	if err := b.far.Deregister(b.region); err != nil {
		b.t.Errorf("deregister: %v", err)
	}
	if err := b.far.Close(); err != nil {
		b.t.Errorf("close: %v", err)
	}
}

// load makes the far region known to the near side as d.
func (b *bare) load(d xfer.Desc) (xfer.Region, error) {
	info, err := b.far.(xfer.Remote).RegionInfo(b.region)
	if err != nil {
		b.t.Fatalf("region info: %v", err)
	}
	d.Meta = ""
	return b.remoteRole().LoadRegion(b.farID, xfer.DRAM, d, info)
}

// transfer runs a prepared transfer and gives the first error, of a pair or of the
// whole.
func (b *bare) transfer(ctx context.Context, p xfer.Prepared, n int) error {
	o := newOutcomes(b.t, n)
	err := o.transfer(ctx, b.near, p)
	for _, e := range o.mu.errs {
		if e != nil {
			return e
		}
	}
	if err != nil {
		b.t.Errorf("every pair is reported well, and the transfer is not: %v", err)
	}
	return err
}

// testBind: a backend says how it is reached, always the same, and carries both
// roles.
func testBind(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	caps := b.near.Caps()
	if !caps.Remote || !caps.Notify || !caps.Has(xfer.Pair{}) {
		t.Errorf("Caps of a backend with both roles, for DRAM: %+v", caps)
	}
	if _, ok := b.near.(xfer.Notifier); !ok {
		t.Error("it has no Notifier role")
	}
	for range 2 {
		info, err := b.far.(xfer.Remote).ConnInfo()
		if err != nil || !bytes.Equal(info, b.farInfo) {
			t.Errorf("connection info is not constant: %q, %q, %v", b.farInfo, info, err)
		}
	}
	if err := b.remoteRole().Connect(t.Context(), b.farID); err != nil {
		t.Errorf("connect: %v", err)
	}
	for _, op := range ops {
		pieces := stripes(7, 5000)
		p := b.prepare(op, pieces)
		if err := b.transfer(t.Context(), p, len(pieces)); err != nil {
			t.Fatal(err)
		}
		b.moved(op, pieces...)
		b.check()
	}
	b.closeFar()
	if _, ok := <-b.far.(xfer.Notifier).Notifications(); ok {
		t.Error("a notification that nobody sent")
	}
}

// testInfos: what cannot be read is refused, and no piece of what can be read makes
// a backend panic.
func testInfos(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	stranger := xfer.PeerID{Name: "stranger", Incarnation: 3}
	info, err := b.far.(xfer.Remote).RegionInfo(b.region)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{"nothing": nil, "a zero": {0}, "noise": bytes.Repeat([]byte{0xa5}, 300)} {
		if err := b.remoteRole().LoadConnInfo(stranger, bad); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("connection info that is %s: %v", name, err)
		}
		if _, err := b.remoteRole().LoadRegion(b.farID, xfer.DRAM, b.remote.registration(), bad); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("region info that is %s: %v", name, err)
		}
	}
	for n := range b.farInfo {
		if err := b.remoteRole().LoadConnInfo(stranger, b.farInfo[:n]); err == nil {
			b.remoteRole().ForgetPeer(stranger)
		} else if !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("connection info cut at %d: %v", n, err)
		}
	}
	for n := range info {
		if r, err := b.remoteRole().LoadRegion(b.farID, xfer.DRAM, b.remote.registration(), info[:n]); err == nil {
			b.remoteRole().UnloadRegion(r)
		} else if !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("region info cut at %d: %v", n, err)
		}
	}
}

// testWhoAnswers: whoever answers at a peer's address is not believed unless it is
// that peer, and the error names both.
func testWhoAnswers(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	for _, other := range []xfer.PeerID{{Name: farName, Incarnation: 3}, {Name: "other", Incarnation: b.farID.Incarnation}} {
		if other.Name == farName { // one incarnation of a name is known at a time
			b.remoteRole().UnloadRegion(b.regions[1])
			b.remoteRole().ForgetPeer(b.farID)
			b.unloaded = true
		}
		info, err := b.far.(xfer.Remote).RegionInfo(b.region)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.remoteRole().LoadConnInfo(other, b.farInfo); err != nil {
			t.Fatal(err)
		}
		region, err := b.remoteRole().LoadRegion(other, xfer.DRAM, b.remote.registration(), info)
		if err != nil {
			t.Fatal(err)
		}
		refused := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, xfer.ErrDisconnected) {
				t.Errorf("%s %s, where %s answers: %v", what, other, b.farID, err)
			}
		}
		err = b.remoteRole().Connect(t.Context(), other)
		refused("connect to", err)
		if err != nil && (!strings.Contains(err.Error(), other.String()) || !strings.Contains(err.Error(), b.farID.String())) {
			t.Errorf("the error does not name both %s and %s: %v", other, b.farID, err)
		}
		for _, op := range ops {
			local, remote := b.bounds(op, []piece{{0, 0, 4096}})
			remote[0].Region = region
			p, err := b.near.Prepare(op, local, remote)
			if err != nil {
				t.Fatal(err)
			}
			for range 3 {
				refused(op.String()+" with", b.transfer(t.Context(), p, 1))
			}
			b.near.Release(p)
		}
		refused("notify", b.near.(xfer.Notifier).Notify(t.Context(), other, []byte("hello")))
		b.check() // nothing was moved
		b.remoteRole().UnloadRegion(region)
		b.remoteRole().ForgetPeer(other)
	}
	select {
	case n, ok := <-b.far.(xfer.Notifier).Notifications():
		if ok {
			t.Errorf("a notification for somebody else was delivered: %q", n.Msg)
		}
	default:
	}
}

// testBounds: a peer reaches only what is registered, whatever its initiator
// believes, and pieces of the same transfer that are registered go on.
func testBounds(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	wide := b.remote.registration() // as if the guards were registered
	wide.Addr -= guardBytes
	wide.Len += 2 * guardBytes
	region, err := b.load(wide)
	if errors.Is(err, xfer.ErrInvalid) {
		return // the info has the bounds
	}
	if err != nil {
		t.Fatalf("load a region of more than is registered: %v", err)
	}
	defer b.remoteRole().UnloadRegion(region)
	for _, off := range []int64{-guardBytes, -1, -4095, b.size - 4095, b.size, b.size + guardBytes - 4096} {
		for _, op := range ops {
			local, remote := b.bounds(op, []piece{{0, 0, 4096}, {8192, off, 4096}})
			remote[0].Region, remote[1].Region = region, region
			p, err := b.near.Prepare(op, local, remote)
			if err != nil {
				if !errors.Is(err, xfer.ErrInvalid) {
					t.Errorf("prepare at offset %d: %v", off, err)
				}
				continue
			}
			o := newOutcomes(t, 2)
			err = o.transfer(t.Context(), b.near, p)
			b.near.Release(p)
			if !errors.Is(o.mu.errs[1], xfer.ErrInvalid) || (err != nil && !errors.Is(err, xfer.ErrInvalid)) {
				t.Errorf("%s at offset %d of %d: %v; %v", op, off, b.size, o.mu.errs[1], err)
			}
			if o.mu.errs[0] == nil {
				b.moved(op, piece{0, 0, 4096})
			} else {
				b.unknown(op, piece{0, 0, 4096})
			}
			if op == xfer.Read {
				b.unknown(op, piece{8192, 0, 4096})
			}
			b.check()
		}
	}
}

// testForgedInfo: with any byte of a region's info changed, nothing is reached but
// the pieces described, and the backend goes on working.
func testForgedInfo(t *testing.T, h RemoteHarness) {
	b := newBare(t, h, 64<<10)
	info, err := b.far.(xfer.Remote).RegionInfo(b.region)
	if err != nil {
		t.Fatal(err)
	}
	believed := 0
	for i := range info {
		for _, flip := range []byte{0x01, 0x80} {
			forged := bytes.Clone(info)
			forged[i] ^= flip
			region, err := b.remoteRole().LoadRegion(b.farID, xfer.DRAM, b.remote.registration(), forged)
			if err != nil {
				continue
			}
			local, remote := b.bounds(xfer.Read, []piece{{100, 200, 300}})
			remote[0].Region = region
			for _, op := range ops {
				p, err := b.near.Prepare(op, local, remote)
				if err != nil {
					continue
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				if b.transfer(ctx, p, 1) == nil {
					b.moved(op, piece{100, 200, 300})
					believed++
				}
				cancel()
				b.near.Release(p)
				if op == xfer.Read {
					b.unknown(op, piece{100, 200, 300})
				}
				b.check()
			}
			b.remoteRole().UnloadRegion(region)
		}
	}
	if believed >= 4*len(info) && len(info) > 0 {
		t.Errorf("no byte of %q matters", info)
	}
	p := b.prepare(xfer.Write, []piece{{0, 0, b.size}})
	for began := time.Now(); ; {
		err := b.transfer(t.Context(), p, 1)
		if err == nil {
			break
		}
		if !errors.Is(err, xfer.ErrDisconnected) || time.Since(began) > patience {
			t.Fatalf("transfer after forged ones: %v", err)
		}
	}
	b.moved(xfer.Write, piece{0, 0, b.size})
	b.check()
}
