package xfertest

import (
	"context"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// testRemoteLengths: pieces of any length at any offset arrive, and nothing
// around them changes.
func testRemoteLengths(t *testing.T, h RemoteHarness, op xfer.Op) {
	const size = 160 << 10
	d := newDuo(t, h, size)
	for _, n := range []int64{1, 2, 511, 513, 4095, 4096, 4097, 16384, 65537, 100_001} {
		for _, off := range []struct{ local, remote int64 }{{0, 0}, {1, 0}, {0, 1}, {511, 513}, {4097, 8191}, {size - n, 0}, {size - n, size - n}} {
			p := piece{off.local, off.remote, n}
			src := p.local
			if op == xfer.Read {
				src = p.remote
			}
			d.refill(d.source(op), src, n)
			d.move(t.Context(), op, p)
			if d.check(); t.Failed() {
				t.Fatalf("%d bytes, near offset %d, far offset %d", n, p.local, p.remote)
			}
		}
	}
}

// testRemoteScatter: many pieces, some of them adjacent, in any order.
func testRemoteScatter(t *testing.T, h RemoteHarness, op xfer.Op) {
	size := min(h.maxBytes(), 4<<20)
	d := newDuo(t, h, size)
	for _, pieces := range [][]piece{
		{{10, 20, 30}, {100, 50, 3}},
		stripes(64, 4096),
		stripes(333, 1001),
		reversed(stripes(64, 4096)),
		d.scatter(100, size/64),
		d.scatter(4000, 700),
		d.blocks(int(size/(16<<10)), 16<<10),
		{{0, 0, size}},
		{{1, 3, size - 3}},
		stripes(3, size/3),
	} {
		d.fill(d.source(op))
		d.move(t.Context(), op, pieces...)
		if d.check(); t.Failed() {
			t.Fatalf("%d pieces", len(pieces))
		}
	}
}

// testManyDescriptors: one request of 100,000 pieces.
func testManyDescriptors(t *testing.T, h RemoteHarness, op xfer.Op) {
	n := int64(100_000)
	if !soak && (op != xfer.Write || !h.wide()) {
		n = 10_000 // the full number once
	}
	d := newDuo(t, h, min(h.maxBytes(), 8<<20))
	pieces := d.blocks(int(n), d.size/n)
	for i := range pieces {
		pieces[i].n -= int64(i % 7)
	}
	r := d.request(op, pieces)
	for range 2 {
		d.fill(d.source(op))
		if err := r.Run(t.Context()); err != nil {
			t.Fatalf("%d descriptors: %v", len(pieces), err)
		}
		d.moved(op, pieces...)
		d.check()
	}
}

// testParallel: 64 requests in flight at once, each on its own memory, over and
// over.
func testParallel(t *testing.T, h RemoteHarness, op xfer.Op) {
	const (
		n      = 64
		rounds = 5
	)
	d := newDuo(t, h, min(h.maxBytes(), 4<<20))
	share := d.size / n
	var requests []*xfer.Request
	var all []piece
	for i := range int64(n) {
		pieces := stripes(1+int(i%7), (share-i)/(1+i%7))
		for k := range pieces {
			pieces[k].local += i * share
			pieces[k].remote += (n - 1 - i) * share
		}
		requests = append(requests, d.request(op, pieces))
		all = append(all, pieces...)
	}
	for range rounds {
		d.fill(d.source(op))
		for _, r := range requests {
			if err := r.Post(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for i, r := range requests {
			if err := r.Wait(t.Context()); err != nil {
				t.Fatalf("request %d: %v", i, err)
			}
		}
		d.moved(op, all...)
		d.check()
	}
}

// testRemoteRepost: one request moves what is there each time.
func testRemoteRepost(t *testing.T, h RemoteHarness, op xfer.Op) {
	posts := rounds(10_000, 10_000, 1000)
	if !soak && op != xfer.Read {
		posts = 1000 // the full number once
	}
	d := newDuo(t, h, 64<<10)
	pieces := []piece{{0, 8192, 4096}, {8192, 0, 4096}, {20_001, 30_003, 77}}
	r := d.request(op, pieces)
	for i := range posts {
		watched := i%16 == 0 || i == posts-1
		if watched {
			for _, p := range pieces {
				off := p.local
				if op == xfer.Read {
					off = p.remote
				}
				d.refill(d.source(op), off, 16) // what changes from post to post
			}
		}
		var err error
		if i%2 == 0 {
			err = r.Run(t.Context())
		} else if err = r.Post(t.Context()); err == nil {
			err = r.Wait(t.Context())
		}
		if err != nil {
			t.Fatalf("post %d: %v", i, err)
		}
		if watched {
			d.moved(op, pieces...)
			if !d.holds(op, pieces[i/16%3]) {
				t.Fatalf("post %d: piece %d is not there", i, i/16%3)
			}
		}
		if i%1000 == 0 {
			d.check()
		}
	}
	d.check()
}

// testBothAtOnce: both agents move bytes between each other at the same time,
// with many requests and notifications, and neither waits for the other for ever.
func testBothAtOnce(t *testing.T, h RemoteHarness, op xfer.Op) {
	const (
		workers = 8
		rounds  = 10
		notes   = 200
	)
	d := newDuo(t, h, h.maxBytes())
	half := d.size / 2
	share := half / workers
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var orders []<-chan outcome
	var mine, others []piece
	for w := range int64(workers) {
		mine = append(mine, piece{w * share, w * share, share - w})
		others = append(others, piece{half + w*share, half + w*share, share - w})
	}
	for _, p := range others {
		c := d.theirs(op, p)
		c.Count = rounds
		orders = append(orders, d.peer.start(c))
	}
	var wg sync.WaitGroup
	for w, p := range mine {
		r := d.request(op, []piece{p})
		wg.Go(func() {
			for i := range rounds {
				if err := r.Run(ctx); err != nil {
					t.Errorf("worker %d, round %d: %v", w, i, err)
					return
				}
			}
		})
	}
	takeFar, takeNear := d.peer.start(call{Verb: "take", Count: notes}), make(chan answer, 1)
	go func() { takeNear <- d.near.handle(call{Verb: "take", Count: notes}) }()
	wg.Go(func() {
		for range notes {
			if err := d.agent.Notify(ctx, farName, []byte("here"), nil); err != nil {
				t.Errorf("notify: %v", err)
				return
			}
		}
	})
	tell := d.peer.start(call{Verb: "notify", Name: nearName, Data: []byte("there"), Count: notes})
	wg.Wait()
	for i, o := range append(orders, tell, takeFar) {
		if got := <-o; got.error != nil {
			t.Errorf("the peer's order %d: %v", i, got.error)
		}
	}
	if a := <-takeNear; a.err() != nil {
		t.Error(a.err())
	}
	d.moved(op, mine...)
	d.moved(opposite(op), others...)
	d.check()
}
