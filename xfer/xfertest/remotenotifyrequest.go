package xfertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/xfer"
)

// notifyBlocks is the number of pieces of a request with a notification. They are in
// another order on each side, and large enough together for several connections.
const notifyBlocks = 64

// tails are the last bytes of pieces, those that arrive last.
func tails(pieces []piece) []piece {
	const n = 64
	var t []piece
	for _, p := range pieces {
		t = append(t, piece{p.local + p.n - n, p.remote + p.n - n, n})
	}
	return t
}

// held is the contents of pieces on the remote side's model, one behind the other.
func (g *rig) held(pieces []piece) []byte {
	var b []byte
	for _, p := range pieces {
		b = append(b, g.remote.at(p.remote, p.n)...)
	}
	return b
}

// testNotifyWithRequest: a request's notification arrives once for each post that
// succeeded, when all the bytes of the request are where they belong, on whichever
// connections they went, and not at all when the request failed.
func testNotifyWithRequest(t *testing.T, h RemoteHarness, op xfer.Op) {
	rounds := rounds(100, 12, 5)
	d := newDuo(t, h, min(h.maxBytes(), 8<<20))
	pieces := d.blocks(notifyBlocks, d.size/notifyBlocks)
	local, remote := d.lists(op, pieces)
	r, err := d.agent.NewRequest(op, local, remote, &xfer.RequestOptions{Peer: farName, Notify: []byte("yours")})
	if err != nil {
		t.Fatal(err)
	}
	looked := append(tails(pieces), pieces...) // first at what arrives last
	for round := range rounds {
		d.fill(d.source(op))
		arrived := d.peer.start(call{Verb: "expect", Pieces: farPieces(looked)})
		if err := r.Post(t.Context()); err != nil {
			t.Fatal(err)
		}
		got := <-arrived
		if got.error != nil || string(got.Info) != "yours" || got.Peer != d.me {
			t.Fatalf("round %d: %q by %s, %v", round, got.Info, got.Peer, got.error)
		}
		d.moved(op, pieces...)
		if op == xfer.Read {
			// The peer may use its memory for something else now.
			d.fill(&d.remote)
		} else if i := firstDifference(got.Data, d.held(looked)); i >= 0 {
			t.Fatalf("round %d: the notification is there, and byte %d of what was looked at is not", round, i)
		}
		d.check()
		if err := r.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if h.Several {
		// Of what each byte has gone over, all have a fair share.
		share := call{Verb: "carried", N: int64(rounds) * d.size / 16}
		var n int
		if op == xfer.Write {
			n = d.order(share).Count
		} else {
			n = d.peer.must(share).Count
		}
		if n < 2 {
			t.Errorf("requests of %d bytes went over %d connections, want several", d.size, n)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Run(ended); !errors.Is(err, xfer.ErrCanceled) {
		t.Errorf("run with an ended context: %v", err)
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	if err := d.agent.Notify(t.Context(), farName, []byte("last"), nil); err != nil {
		t.Fatal(err)
	}
	if a := d.peer.must(call{Verb: "take", Data: []byte("last")}); len(a.Msgs) != 0 {
		t.Errorf("%d notifications more than posts: %q", len(a.Msgs), a.Msgs)
	}
}

// testNotifyCut: connections are cut in the middle of requests with notifications.
// Each notification arrives once when its request succeeded, else at most once, and
// never before the request's bytes.
func testNotifyCut(t *testing.T, h RemoteHarness, op xfer.Op) {
	rounds := rounds(60, 9, 6)
	d := newDuo(t, h, min(h.maxBytes(), 8<<20))
	pieces := d.blocks(notifyBlocks, d.size/notifyBlocks-1)
	local, remote := d.lists(op, pieces)
	one := d.request(xfer.Write, []piece{{d.size - 1, d.size - 1, 1}}) // beside the pieces
	var whole time.Duration                                            // of the second one, which needs no new connections
	for range 2 {
		r := d.request(op, pieces)
		began := time.Now()
		d.eventually("a whole transfer", func() error { return r.Run(t.Context()) })
		whole = time.Since(began)
	}
	var done, failed, told int
	for round := range rounds {
		d.fill(&d.local)
		d.fill(&d.remote)
		d.moved(op, pieces...)
		msg, last := fmt.Sprintf("round %d", round), fmt.Sprintf("end %d", round)
		// When the peer is told that its bytes were read it uses the memory again.
		collected := d.peer.start(call{Verb: "collect", Data: []byte(last), Pieces: farPieces(append(tails(pieces), pieces...)), Flag: op == xfer.Read})
		r, err := d.agent.NewRequest(op, local, remote, &xfer.RequestOptions{Peer: farName, Notify: []byte(msg)})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if err := r.Post(ctx); err != nil {
			t.Fatal(err)
		}
		// One round after another a later moment.
		time.Sleep(time.Duration((float64(round) + d.rand.Float64()) / float64(rounds) * 0.75 * float64(whole)))
		d.peer.must(call{Verb: "cut", Count: []int{syscall.SHUT_RDWR, syscall.SHUT_WR, syscall.SHUT_RD}[round%3]})
		// A connection may be cut so that this side does not hear of it.
		stop := time.AfterFunc(300*time.Millisecond, cancel)
		err = r.Wait(t.Context())
		stop.Stop()
		cancel()
		if err != nil && !errors.Is(err, xfer.ErrDisconnected) && !errors.Is(err, xfer.ErrCanceled) {
			t.Fatalf("round %d: %v", round, err)
		}
		if e := r.Release(); e != nil {
			t.Error(e)
		}
		// The next transfer fences off what was under way.
		d.eventually("the next transfer", func() error { return one.Run(t.Context()) })
		d.eventually("the last notification", func() error { return d.agent.Notify(t.Context(), farName, []byte(last), nil) })
		got := <-collected
		if got.error != nil {
			t.Fatal(got.error)
		}
		times := 0
		for i, m := range got.Msgs {
			if strings.HasPrefix(string(m), "end ") {
				continue // a last one of before that was delivered though it had failed
			}
			if string(m) != msg {
				t.Fatalf("round %d: notification %q", round, m)
			}
			times++
			sum := crc32.Checksum(d.held(append(tails(pieces), pieces...)), castagnoli)
			if op == xfer.Write && binary.BigEndian.Uint32(got.Data[4*i:]) != sum {
				t.Fatalf("round %d (%v): the notification is there before the request's bytes", round, err)
			}
			if op == xfer.Read {
				for i, p := range pieces {
					if !d.holds(op, p) {
						t.Fatalf("round %d (%v): the peer is told that its memory was read, and piece %d was not", round, err, i)
					}
				}
			}
		}
		switch {
		case times > 1:
			t.Fatalf("round %d (%v): %d notifications", round, err, times)
		case err == nil && times == 0:
			t.Fatalf("round %d: the request succeeded, and its notification did not arrive", round)
		}
		told += times
		if err == nil {
			done++
		} else {
			failed++
		}
	}
	t.Logf("%d requests succeeded, %d failed, %d notifications", done, failed, told)
	d.fill(&d.local)
	d.fill(&d.remote)
	d.again()
}

// testNotifierKilled: a process is killed in the middle of its requests with
// notifications. What it has told is true.
func testNotifierKilled(t *testing.T, h RemoteHarness) {
	d := newDuo(t, h, min(h.maxBytes(), 8<<20))
	var took time.Duration
	var told int
	for round := range rounds(20, 5, 3) {
		if round > 0 {
			d.startPeer(false)
			d.meet()
		}
		d.fill(&d.local)
		d.fill(&d.remote)
		pieces := d.blocks(notifyBlocks, d.size/notifyBlocks)
		order := d.theirs(xfer.Write, pieces...)
		order.Count, order.Flag = 1, true
		began := time.Now()
		ran := d.peer.start(order)
		if round > 0 {
			time.Sleep(time.Duration(d.rand.Int64N(int64(took) * 5 / 4)))
			d.peer.child.kill(t)
		}
		got := <-ran
		if round == 0 {
			if got.error != nil {
				t.Fatal(got.error)
			}
			took = time.Since(began)
		}
		// What was on the way arrives, or never does.
		times := 0
		for rest := time.After(pause); rest != nil; {
			select {
			case n := <-d.agent.Notifications():
				times++
				for i, p := range pieces {
					if !bytes.Equal(d.arrived(p), d.remote.at(p.remote, p.n)) {
						t.Fatalf("round %d: notification %q is there, and piece %d of %d is not", round, n.Msg, i, len(pieces))
					}
				}
			case <-rest:
				rest = nil
			}
		}
		if times > 1 || round == 0 && times == 0 {
			t.Fatalf("round %d: %d notifications of one request", round, times)
		}
		told += times
		if round == 0 {
			d.peer.child.kill(t)
		}
	}
	t.Logf("%d notifications", told)
}

// arrived is what a piece of near memory holds.
func (d *duo) arrived(p piece) []byte {
	d.t.Helper()
	b := make([]byte, p.n)
	if _, err := d.local.mem.ReadAt(b, guardBytes+p.local); err != nil {
		d.t.Fatal(err)
	}
	return b
}

// collect receives notifications until the one that is Data, and sums up what the
// pieces hold when each of the others is there. When Flag is set it then writes over
// the pieces.
func (p *party) collect(ctx context.Context, c call) (a answer, err error) {
	for {
		e, err := p.expect(ctx, c)
		if err != nil || bytes.Equal(e.Info, c.Data) {
			return a, err
		}
		a.Msgs = append(a.Msgs, e.Info)
		a.Data = binary.BigEndian.AppendUint32(a.Data, crc32.Checksum(e.Data, castagnoli))
		if !c.Flag {
			continue
		}
		for _, q := range c.Pieces {
			if _, err := p.mem.WriteAt(make([]byte, q[2]), guardBytes+q[0]); err != nil {
				return a, err
			}
		}
	}
}

// carriers counts the TCP connections of the process on which n bytes or more were
// sent and acknowledged.
func carriers(n int64) (count int) {
	const ackedAt = 120 // of tcpi_bytes_acked in struct tcp_info, linux/tcp.h
	for fd := range uintptr(1024) {
		var info [ackedAt + 8]byte
		size := uint32(len(info))
		_, _, err := syscall.Syscall6(syscall.SYS_GETSOCKOPT, fd, syscall.IPPROTO_TCP, syscall.TCP_INFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
		if err == 0 && int(size) == len(info) && binary.NativeEndian.Uint64(info[ackedAt:]) >= uint64(n) {
			count++
		}
	}
	return count
}
