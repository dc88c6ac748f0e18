package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

func (n *node) bytes() []byte { return arena.View(n.mem.Desc.Addr, int(n.mem.Desc.Len)) }

func fill(b []byte, seed uint64) {
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	const period = 65_521 // a prime, so that what is a whole number of blocks off is seen
	n := min(period, len(b))
	r.Read(b[:n])
	for n < len(b) { // by copying, which the race detector does not slow down
		n += copy(b[n:], b[:n])
	}
}

// list is pieces of both memories: from, to and length.
type list [][3]uint64

func (n *node) prepare(t testing.TB, op xfer.Op, remote xfer.Region, peer *node, l list) xfer.Prepared {
	t.Helper()
	var local, far []xfer.Bound
	for _, p := range l {
		local = append(local, xfer.Bound{Desc: xfer.Desc{Addr: n.mem.Desc.Addr + p[0], Len: p[2]}, Region: n.region})
		far = append(far, xfer.Bound{Desc: xfer.Desc{Addr: peer.mem.Desc.Addr + p[1], Len: p[2]}, Region: remote})
	}
	p, err := n.Prepare(op, local, far)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// run transfers and gives the result of each pair.
func (n *node) run(ctx context.Context, t testing.TB, p xfer.Prepared, pairs int) []error {
	t.Helper()
	errs, calls := make([]error, pairs), make([]int, pairs)
	_ = n.Transfer(ctx, p, func(i int, err error) { errs[i] = err; calls[i]++ }) // it is also in errs
	for i, c := range calls {
		if c != 1 {
			t.Fatalf("done was called %d times for pair %d of %d", c, i, pairs)
		}
	}
	return errs
}

// TestMixes moves lists of small and large pieces in another order on each side.
func TestMixes(t *testing.T) {
	const size = 16 << 20
	a, b := newNode(t, "a", size, Options{}), newNode(t, "b", size, Options{})
	remote := a.meets(t, b)
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, lengths := range [][]uint64{
		{1},
		{100, 200},
		{smallBytes, smallBytes + 1},
		{1 << 20},
		{3<<20 + 7},
		{64, 64, 64, 300 << 10, 64, 64, 2 << 20, 1, 1, 1},
		slices.Repeat([]uint64{1, 4096, 4097, 17}, 800),
		slices.Repeat([]uint64{64}, 20_000),
		slices.Repeat([]uint64{8 << 10}, 1000),
	} {
		for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
			var l list
			var at uint64
			for _, n := range lengths {
				at += rnd.Uint64N(3)
				l = append(l, [3]uint64{at, 0, n})
				at += n
			}
			at = 0
			for _, i := range rnd.Perm(len(l)) {
				at += rnd.Uint64N(3)
				l[i][1] = at
				at += l[i][2]
			}
			fill(a.bytes(), rnd.Uint64())
			fill(b.bytes(), rnd.Uint64())
			wantA, wantB := bytes.Clone(a.bytes()), bytes.Clone(b.bytes())
			for _, p := range l {
				x, y := wantA[p[0]:][:p[2]], wantB[p[1]:][:p[2]]
				if op == xfer.Write {
					copy(y, x)
				} else {
					copy(x, y)
				}
			}
			p := a.prepare(t, op, remote, b, l)
			for i, err := range a.run(t.Context(), t, p, len(l)) {
				if err != nil {
					t.Fatalf("%s of %d pieces: %d: %v", op, len(l), i, err)
				}
			}
			if !bytes.Equal(a.bytes(), wantA) || !bytes.Equal(b.bytes(), wantB) {
				t.Fatalf("%s of %d pieces, first %v: wrong bytes", op, len(l), l[0])
			}
		}
	}
}

// TestRefused: pieces that the peer does not let us reach fail alone, each with its
// index.
func TestRefused(t *testing.T) {
	const size = 8 << 20
	a, b := newNode(t, "a", size, Options{}), newNode(t, "b", size, Options{})
	good := a.meets(t, b)
	info := regionInfo{b.region.(*region).token, b.mem.Desc.Addr, size + 1<<20}.append(nil) // it says too much
	wide, err := a.LoadRegion(b.id, xfer.DRAM, xfer.Desc{Addr: b.mem.Desc.Addr, Len: size + 1<<20}, info)
	if err != nil {
		t.Fatal(err)
	}
	info = regionInfo{random(), b.mem.Desc.Addr, size}.append(nil)
	guessed, err := a.LoadRegion(b.id, xfer.DRAM, b.mem.Desc, info)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []uint64{64, 64 << 10, 1 << 20} {
		for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
			t.Run(fmt.Sprintf("%s %d", op, n), func(t *testing.T) {
				fill(a.bytes(), 1)
				fill(b.bytes(), 2)
				var local, far []xfer.Bound
				const pairs = 7
				for i := range uint64(pairs) {
					local = append(local, xfer.Bound{Desc: xfer.Desc{Addr: a.mem.Desc.Addr + i*n, Len: n}, Region: a.region})
					far = append(far, xfer.Bound{Desc: xfer.Desc{Addr: b.mem.Desc.Addr + i*n, Len: n}, Region: good})
				}
				far[1].Region = guessed
				far[2].Region = guessed
				far[4].Desc.Addr, far[4].Region = b.mem.Desc.Addr+size-n/2, wide // half of it beyond the end
				far[5].Desc.Addr, far[5].Region = b.mem.Desc.Addr+size+1, wide
				wantA, wantB := bytes.Clone(a.bytes()), bytes.Clone(b.bytes())
				for _, i := range []uint64{0, 3, 6} {
					if op == xfer.Write {
						copy(wantB[i*n:][:n], wantA[i*n:])
					} else {
						copy(wantA[i*n:][:n], wantB[i*n:])
					}
				}
				p, err := a.Prepare(op, local, far)
				if err != nil {
					t.Fatal(err)
				}
				for i, err := range a.run(t.Context(), t, p, pairs) {
					bad := i == 1 || i == 2 || i == 4 || i == 5
					if bad != errors.Is(err, xfer.ErrInvalid) || !bad && err != nil {
						t.Errorf("pair %d: %v", i, err)
					}
				}
				if op == xfer.Write { // of a piece that is cut in frames the first may be within bounds
					copy(b.bytes()[size-n/2:], wantB[size-n/2:])
				}
				if !bytes.Equal(a.bytes(), wantA) {
					t.Error("wrong bytes here")
				}
				if !bytes.Equal(b.bytes(), wantB) {
					t.Error("wrong bytes at the peer")
				}
			})
		}
	}
	if err := b.Deregister(b.region); err != nil {
		t.Fatal(err)
	}
	if err := a.move(t.Context(), t, xfer.Write, good, b, 0, 1<<20); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("after Deregister: %v", err)
	}
	if err := b.Deregister(b.region); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("Deregister twice: %v", err)
	}
}

// TestBothRead: two agents that read as much as they can from each other do not wait
// for each other.
func TestBothRead(t *testing.T) {
	const size = 16 << 20
	a, b := newNode(t, "a", size, Options{Conns: 2}), newNode(t, "b", size, Options{Conns: 2})
	ab, ba := a.meets(t, b), b.meets(t, a)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for k := range 8 {
		op := []xfer.Op{xfer.Read, xfer.Write}[k/4%2]
		wg.Go(func() {
			for range 4 {
				if err := a.move(ctx, t, op, ab, b, uint64(k)*(1<<20), 1<<20); err != nil {
					t.Error(err)
				}
				if err := a.move(ctx, t, xfer.Read, ab, b, 8<<20, 8<<20); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 4 {
				if err := b.move(ctx, t, op, ba, a, uint64(k)*(1<<20), 1<<20); err != nil {
					t.Error(err)
				}
				if err := b.move(ctx, t, xfer.Read, ba, a, 8<<20, 8<<20); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestCancelKeepsConnection: who cancels often keeps the connections where the peer is
// well, and other transfers are unharmed.
func TestCancelKeepsConnection(t *testing.T) {
	const size = 64 << 20
	a, b := newNode(t, "a", size, Options{Conns: 2}), newNode(t, "b", size, Options{})
	remote := a.meets(t, b)
	if err := a.Connect(t.Context(), b.id); err != nil {
		t.Fatal(err)
	}
	ended, lost := 0, 0
	for i := range 40 {
		op := []xfer.Op{xfer.Read, xfer.Write}[i%2]
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*300*time.Microsecond)
		err := a.move(ctx, t, op, remote, b, 0, size)
		if errors.Is(err, xfer.ErrCanceled) {
			ended++
		} else if err != nil {
			t.Errorf("%s: %v", op, err)
		}
		cancel()
		// Whatever was on its way: nothing of it lands later.
		fill(a.bytes()[:1<<20], uint64(i))
		if err := a.move(t.Context(), t, xfer.Write, remote, b, 0, 1<<20); errors.Is(err, xfer.ErrDisconnected) {
			lost++ // a peer that has no processor just then has not answered in time
			waitFor(t, func() bool { return a.move(t.Context(), t, xfer.Write, remote, b, 0, 1<<20) == nil })
		} else if err != nil {
			t.Errorf("after a cancelled %s: %v", op, err)
		}
		if !bytes.Equal(a.bytes()[:1<<20], b.bytes()[:1<<20]) {
			t.Fatalf("after a cancelled %s: wrong bytes", op)
		}
	}
	if ended == 0 {
		t.Error("nothing was cancelled")
	}
	if lost > ended/2 {
		t.Errorf("%d of %d that were cancelled cost the connections", lost, ended)
	}
	t.Logf("%d cancelled, %+v", ended, a.Stats())
}

func TestNotify(t *testing.T) {
	a, b := newNode(t, "a", 1<<20, Options{}), newNode(t, "b", 1<<20, Options{Notifications: 4})
	a.meets(t, b)
	if err := a.Notify(t.Context(), b.id, make([]byte, xfer.MaxNotification+1)); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("too long: %v", err)
	}
	const n = 50
	sent := make(chan error, 1)
	go func() {
		for i := range n {
			if err := a.Notify(t.Context(), b.id, []byte(fmt.Sprint(i))); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	for b.Stats().NotificationsRefused == 0 {
		select {
		case err := <-sent:
			t.Fatalf("all sent although the queue is full: %v", err)
		case <-time.After(time.Millisecond): // to look again
		}
	}
	for i := range n {
		if got := <-b.Notifications(); string(got.Msg) != fmt.Sprint(i) || got.Peer != a.id {
			t.Fatalf("notification %d: %q from %s", i, got.Msg, got.Peer)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if err := a.Notify(t.Context(), b.id, nil); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := a.Notify(ctx, b.id, []byte("late")); !errors.Is(err, xfer.ErrCanceled) {
		t.Errorf("full queue: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	got := 0
	for range b.Notifications() {
		got++
	}
	if got != 4 {
		t.Errorf("%d notifications were left, want 4", got)
	}
}

func TestReconnect(t *testing.T) {
	const size = 4 << 20
	a := newNode(t, "a", size, Options{BackoffMin: time.Minute, BackoffMax: time.Minute})
	// Of this address nobody else is given the port while b is closed.
	b := newNode(t, "b", size, Options{Listen: "127.0.0.2:0"})
	remote := a.meets(t, b)
	for range 3 {
		if err := a.move(t.Context(), t, xfer.Write, remote, b, 0, size); err != nil {
			t.Fatal(err)
		}
		a.Disconnect(b.id)
	}
	if s := a.Stats(); s.Reconnects != 2*4 || s.Connects != 3*4 {
		t.Errorf("%+v", s)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	failures := a.Stats().ConnectFailures
	for range 3 {
		if err := a.move(t.Context(), t, xfer.Write, remote, b, 0, size); !errors.Is(err, xfer.ErrDisconnected) {
			t.Errorf("peer is gone: %v", err)
		}
	}
	if n := a.Stats().ConnectFailures - failures; n > 1 {
		t.Errorf("%d attempts within one back-off", n)
	}
	if err := a.Connect(t.Context(), b.id); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("connect: %v", err)
	}
	// Somebody else answers there.
	o := Options{Listen: b.mu.listener.Addr().String()}
	other := newNode(t, "b", size, o)
	err := a.Connect(t.Context(), b.id)
	if !errors.Is(err, xfer.ErrDisconnected) || !bytes.Contains([]byte(err.Error()), []byte(b.id.String())) ||
		!bytes.Contains([]byte(err.Error()), []byte(other.id.String())) {
		t.Errorf("another incarnation: %v, want both %s and %s named", err, b.id, other.id)
	}
	a.ForgetPeer(b.id)
	if err := a.Connect(t.Context(), b.id); err == nil {
		t.Error("connected to a peer that was forgotten")
	}
}
