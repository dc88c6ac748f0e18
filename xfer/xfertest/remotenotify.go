package xfertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// farPieces are pieces as a far party counts them.
func farPieces(pieces []piece) [][3]int64 {
	var far [][3]int64
	for _, p := range pieces {
		far = append(far, [3]int64{p.remote, p.local, p.n})
	}
	return far
}

// testNotifyAfterData: at the moment a notification arrives that began when
// transfers had returned, all their bytes are there, on whichever connections
// they went. With reads, the reader has them, and may tell so.
func testNotifyAfterData(t *testing.T, h RemoteHarness, op xfer.Op) {
	const requests = 8
	rounds := rounds(200, 50, 20)
	d := newDuo(t, h, min(h.maxBytes(), 1<<20))
	share := d.size / requests
	var rs []*xfer.Request
	var all []piece
	for i := range int64(requests) {
		pieces := stripes(3, share/3-i)
		for k := range pieces {
			pieces[k].local += i * share
			pieces[k].remote += (requests - 1 - i) * share
		}
		rs = append(rs, d.request(op, pieces))
		all = append(all, pieces...)
	}
	var want []byte
	for round := range rounds {
		d.fill(d.source(op))
		msg := fmt.Appendf(nil, "round %d", round)
		arrived := d.peer.start(call{Verb: "expect", Pieces: farPieces(all)})
		for _, r := range rs {
			if err := r.Post(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range rs {
			if err := r.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.agent.Notify(t.Context(), farName, msg, nil); err != nil {
			t.Fatal(err)
		}
		d.moved(op, all...)
		got := <-arrived
		if got.error != nil {
			t.Fatal(got.error)
		}
		if !bytes.Equal(got.Info, msg) || got.Peer != d.me {
			t.Fatalf("round %d: the peer is notified of %q by %s, want %q by %s", round, got.Info, got.Peer, msg, d.me)
		}
		want = want[:0]
		for _, p := range all {
			want = append(want, d.remote.at(p.remote, p.n)...)
		}
		if i := firstDifference(got.Data, want); i >= 0 {
			t.Fatalf("round %d: the notification is there, and byte %d of %d is not", round, i, len(want))
		}
		if round%16 == 0 {
			d.check()
		}
	}
	d.check()
}

// firstDifference is the index of the first byte that differs, or -1.
func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) { // much faster with the race detector
		return -1
	}
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// testNotifications: notifications alone arrive once each, whole, and in order
// where they do not overlap.
func testNotifications(t *testing.T, h RemoteHarness) {
	d := newDuo(t, h, 64<<10)
	random := d.random
	var msgs [][]byte
	for i := range 300 {
		n := []int{0, 1, 24, 1000, 4096, 65535, xfer.MaxNotification}[i%7]
		if n > 5000 && i > 40 {
			n = i
		}
		msg := make([]byte, n)
		random.Read(msg)
		msgs = append(msgs, msg)
	}
	taken := d.peer.start(call{Verb: "take", Count: len(msgs)})
	for _, msg := range msgs {
		if err := d.agent.Notify(t.Context(), farName, msg, nil); err != nil {
			t.Fatalf("notify of %d bytes: %v", len(msg), err)
		}
	}
	got := <-taken
	if got.error != nil {
		t.Fatal(got.error)
	}
	for i := range msgs {
		if !bytes.Equal(got.Msgs[i], msgs[i]) {
			t.Fatalf("notification %d has %d bytes, want %d of its own", i, len(got.Msgs[i]), len(msgs[i]))
		}
	}
	if err := d.agent.Notify(t.Context(), farName, make([]byte, xfer.MaxNotification+1), nil); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("a notification that is too long: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.agent.Notify(ended, farName, []byte("never"), nil); !errors.Is(err, xfer.ErrCanceled) {
		t.Errorf("notify with an ended context: %v", err)
	}

	// Many senders: each one's messages in order, none twice.
	const (
		senders = 8
		each    = 50
	)
	taken = d.peer.start(call{Verb: "take", Data: []byte("end")})
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				if err := d.agent.Notify(t.Context(), farName, []byte{byte(s), byte(i)}, nil); err != nil {
					t.Errorf("sender %d: %v", s, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := d.agent.Notify(t.Context(), farName, []byte("end"), nil); err != nil {
		t.Fatal(err)
	}
	got = <-taken
	if got.error != nil {
		t.Fatal(got.error)
	}
	var next [senders]byte
	for _, m := range got.Msgs {
		if string(m) == "never" {
			continue // may have been delivered
		}
		if m[1] != next[m[0]] {
			t.Fatalf("sender %d: notification %d, want %d", m[0], m[1], next[m[0]])
		}
		next[m[0]]++
	}
	for s, n := range next {
		if n != each {
			t.Errorf("%d of %d notifications of sender %d arrived", n, each, s)
		}
	}

	// And back.
	back := make(chan answer, 1)
	go func() { back <- d.near.handle(call{Verb: "take", Count: 100}) }()
	d.peer.must(call{Verb: "notify", Name: nearName, Data: []byte("back"), Count: 100})
	a := <-back
	if err := a.err(); err != nil {
		t.Fatal(err)
	}
	if a.Peer != d.far || slices.ContainsFunc(a.Msgs, func(m []byte) bool { return string(m) != "back" }) {
		t.Errorf("notifications by %s, want %s: %q", a.Peer, d.far, a.Msgs)
	}
	for side, a := range map[string]answer{
		"far":  d.peer.must(call{Verb: "idle"}),
		"near": d.order(call{Verb: "idle"}),
	} {
		if a.Count != 0 {
			t.Errorf("%d notifications more at the %s side", a.Count, side)
		}
	}
}

// testFullQueue: the queue of notifications is bounded; when it is full a sender
// waits, its context ends that, transfers go on, and all goes well when there is
// room again.
func testFullQueue(t *testing.T, h RemoteHarness) {
	d := newDuo(t, h, 64<<10)
	var (
		sent, unsure []uint64
		n            uint64
	)
	send := func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		err := d.agent.Notify(ctx, farName, binary.BigEndian.AppendUint64([]byte("queue"), n), nil)
		if err == nil {
			sent = append(sent, n)
		} else {
			unsure = append(unsure, n)
		}
		n++
		return err
	}
	d.fillQueue(send)
	t.Logf("%d notifications were delivered before the queue was full", len(sent))
	for range 3 {
		if err := send(20 * time.Millisecond); err != nil && !errors.Is(err, xfer.ErrCanceled) && !errors.Is(err, xfer.ErrDisconnected) {
			t.Errorf("notify with a full queue: %v", err)
		}
	}
	for _, op := range ops { // a full queue is no reason for a transfer to wait
		r := d.request(op, []piece{{0, 0, d.size}})
		d.fill(d.source(op))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		d.eventually("a transfer while the queue is full", func() error { return r.Run(ctx) })
		cancel()
		d.moved(op, piece{0, 0, d.size})
		d.check()
	}
	taken := d.peer.start(call{Verb: "take", Data: []byte("enough")})
	d.eventually("a notification when there is room again", func() error { return send(patience) })
	d.eventually("the last notification", func() error { return d.agent.Notify(t.Context(), farName, []byte("enough"), nil) })
	got := <-taken
	if got.error != nil {
		t.Fatal(got.error)
	}
	// Each that was delivered is there once, in order; of the others any may be, anywhere
	// behind those that were before it.
	seen := map[uint64]bool{}
	at := 0
	for _, m := range got.Msgs {
		k := binary.BigEndian.Uint64(m[len("queue"):])
		if seen[k] {
			t.Fatalf("notification %d arrived twice", k)
		}
		seen[k] = true
		switch {
		case at < len(sent) && sent[at] == k:
			at++
		case slices.Contains(unsure, k):
		default:
			t.Fatalf("notification %d arrived where %v was due", k, sent[at:min(at+1, len(sent))])
		}
	}
	if at != len(sent) {
		t.Errorf("%d of %d notifications that were delivered arrived", at, len(sent))
	}

	// A peer that closes keeps nobody waiting.
	d.fillQueue(send)
	waits := d.waitingNotify()
	d.peer.must(call{Verb: "close"})
	d.ended("the peer closes", waits, xfer.ErrDisconnected)
}

// fillQueue sends until the peer takes no more.
func (d *duo) fillQueue(send func(limit time.Duration) error) {
	d.t.Helper()
	const (
		most  = 200_000 // nobody's queue should be as long
		stuck = 300 * time.Millisecond
	)
	for range most {
		if err := send(stuck); errors.Is(err, xfer.ErrCanceled) {
			return
		} else if err != nil {
			d.t.Fatalf("notification to a peer that takes none: %v", err)
		}
	}
	d.t.Fatalf("%d notifications were delivered to a peer that takes none", most)
}

// waitingNotify is a notification that waits for room.
func (d *duo) waitingNotify() <-chan error {
	end := make(chan error, 1)
	go func() {
		for {
			if err := d.agent.Notify(d.t.Context(), farName, nil, nil); err != nil {
				end <- err
				return
			}
		}
	}()
	return end
}

// testKilledFullQueue: the death of a peer ends a notification that waits for room
// in its queue.
func testKilledFullQueue(t *testing.T, h RemoteHarness) {
	d := newDuo(t, h, 64<<10)
	d.fillQueue(func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return d.agent.Notify(ctx, farName, []byte("queue"), nil)
	})
	waits := d.waitingNotify()
	d.peer.child.kill(t)
	d.ended("the peer is killed", waits, xfer.ErrDisconnected)
}
