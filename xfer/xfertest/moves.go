package xfertest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// testLengths: pieces of any length at any offset arrive, and nothing around
// them changes.
func testLengths(t *testing.T, h Harness, pair xfer.Pair) {
	const size = 256 << 10
	g := newRig(t, h, pair, size)
	for _, n := range []int64{1, 2, 511, 512, 513, 4095, 4096, 4097, 16384, 65536, 65537, 100_001} {
		for _, off := range []struct{ local, remote int64 }{{0, 0}, {1, 0}, {0, 1}, {511, 513}, {4096, 512}, {4097, 8191}, {size - n, size - n}, {0, size - n}} {
			for _, op := range ops {
				p := piece{off.local, off.remote, n}
				src := p.local
				if op == xfer.Read {
					src = p.remote
				}
				g.refill(g.source(op), src, n)
				g.move(t.Context(), op, p)
				if g.check(); t.Failed() {
					t.Fatalf("%s of %d bytes, local offset %d, remote offset %d", op, n, p.local, p.remote)
				}
			}
		}
	}
}

// testScatter: many pieces, some of them adjacent, in any order.
func testScatter(t *testing.T, h Harness, pair xfer.Pair) {
	const size = 4 << 20
	g := newRig(t, h, pair, size)
	for name, pieces := range map[string][]piece{
		"two":            {{10, 20, 30}, {100, 50, 3}},
		"adjacent":       stripes(64, 4096),
		"adjacent, odd":  stripes(333, 1001),
		"adjacent, back": reversed(stripes(64, 4096)),
		"adjacent, shifted": func() []piece {
			p := stripes(32, 8192)
			for i := range p {
				p[i].remote += 512
			}
			return p
		}(),
		"adjacent on one side": func() []piece {
			p := stripes(32, 8192)
			for i := range p {
				p[i].remote *= 2
			}
			return p
		}(),
		"random":    g.scatter(100, 64<<10),
		"thousands": g.scatter(h.few(4000), 700),
		"blocks":    g.blocks(256, 16<<10),
	} {
		for _, op := range ops {
			t.Run(fmt.Sprintf("%s/%s", name, op), func(t *testing.T) {
				g.t = t
				g.fill(g.source(op))
				g.move(t.Context(), op, pieces...)
				g.check()
			})
		}
	}
	g.t = t
}

// blocks makes all n blocks of a length, in another order on each side.
func (g *rig) blocks(n int, length int64) []piece {
	l, r := g.rand.Perm(n), g.rand.Perm(n)
	pieces := make([]piece, n)
	for i := range pieces {
		pieces[i] = piece{int64(l[i]) * length, int64(r[i]) * length, length}
	}
	return pieces
}

// testLarge: one piece, and a list, of as much as there is.
func testLarge(t *testing.T, h Harness, pair xfer.Pair) {
	size := h.maxBytes()
	g := newRig(t, h, pair, size)
	for _, op := range ops {
		for _, pieces := range [][]piece{
			{{0, 0, size}},
			{{1, 3, size - 3}},
			{{0, size / 2, size / 2}, {size / 2, 0, size / 2}},
			stripes(int(size/(1<<20)), 1<<20),
			g.blocks(int(size/(64<<10)), 64<<10),
		} {
			g.fill(g.source(op))
			g.move(t.Context(), op, pieces...)
			g.check()
		}
	}
}

// testRegions: pieces of one transfer lie in many registrations, of odd
// addresses and lengths too.
func testRegions(t *testing.T, h Harness, pair xfer.Pair) {
	g := newMemory(t, h, pair, 1<<20)
	g.backend = h.New(t)
	agent, err := xfer.NewAgent("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.AddBackend(g.backend); err != nil {
		t.Fatal(err)
	}
	g.agent = agent
	t.Cleanup(func() {
		if err := agent.Close(); err != nil {
			t.Errorf("close agent: %v", err)
		}
	})
	pieces := stripes(37, 20_011)
	for _, s := range g.sides() {
		l := xfer.DescList{Type: s.typ}
		for _, p := range pieces {
			d := s.desc(p.local, p.n)
			d.Meta = s.mem.Desc.Meta
			l.Descs = append(l.Descs, d)
		}
		if err := agent.Register(t.Context(), l, nil); err != nil {
			t.Fatalf("register %d pieces of %s memory: %v", len(l.Descs), s.name, err)
		}
	}
	for _, op := range ops {
		g.fill(g.source(op))
		g.move(t.Context(), op, pieces...)
		g.check()
		inner := g.blocks(len(pieces), 20_011)
		for i := range inner {
			inner[i].local += 5
			inner[i].remote += 7
			inner[i].n -= 11
		}
		g.fill(g.source(op))
		g.move(t.Context(), op, inner...)
		g.check()
	}
}

// testConcurrent: many requests of many goroutines at once, in both
// directions, each on its own memory.
func testConcurrent(t *testing.T, h Harness, pair xfer.Pair) {
	const (
		workers = 16
		rounds  = 20
		share   = 256 << 10
	)
	g := newRig(t, h, pair, workers*share)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 1))
			for range rounds {
				op := ops[random.IntN(2)]
				if g.remote.mem.pieces != nil { // what is written is not what is read
					op = ops[w%2]
				}
				pieces := stripes(1+random.IntN(16), 1+random.Int64N(share/16))
				for i := range pieces {
					pieces[i].local += int64(w) * share
					pieces[i].remote += int64(w) * share
				}
				local, remote := g.lists(op, pieces)
				r, err := g.agent.NewRequest(op, local, remote, nil)
				if err != nil {
					t.Errorf("worker %d: %v", w, err)
					return
				}
				if random.IntN(2) == 0 {
					err = r.Run(t.Context())
				} else if err = r.Post(t.Context()); err == nil {
					err = r.Wait(t.Context())
				}
				if err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
				if err := r.Release(); err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
				g.moved(op, pieces...) // each worker has its own part of the models
			}
		})
	}
	wg.Wait()
	g.check()
}

// testNeighbours: requests at the same time on pieces that touch each other in
// the middle of a block or page do not disturb each other.
func testNeighbours(t *testing.T, h Harness, pair xfer.Pair) {
	const workers = 8
	g := newRig(t, h, pair, 1<<20)
	for _, op := range ops {
		for round, n := range []int64{100, 511, 1000, 4097, 5000, 65_537} {
			pieces := stripes(min(int(g.size/n), h.few(256)), n)
			g.fill(g.source(op))
			requests := make([]*xfer.Request, workers)
			for w := range requests {
				var mine []piece
				for i := w; i < len(pieces); i += workers {
					mine = append(mine, pieces[i])
				}
				requests[w] = g.request(op, mine)
			}
			for _, r := range requests {
				if err := r.Post(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			for _, r := range requests {
				if err := r.Wait(t.Context()); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
			}
			g.moved(op, pieces...)
			g.check()
		}
	}
}

// testRepost: one request moves what is there each time, thousands of times.
func testRepost(t *testing.T, h Harness, pair xfer.Pair) {
	posts := h.few(2000)
	for _, op := range ops {
		t.Run(op.String(), func(t *testing.T) {
			g := newRig(t, h, pair, 64<<10)
			pieces := []piece{{0, 8192, 4096}, {8192, 0, 4096}, {20_001, 30_003, 77}}
			r := g.request(op, pieces)
			for i := range posts {
				for _, p := range pieces {
					off := p.local
					if op == xfer.Read {
						off = p.remote
					}
					g.refill(g.source(op), off, 16) // what changes from post to post
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
				g.moved(op, pieces...)
				if i%16 < 2 {
					g.check()
				}
			}
			g.check()
			if got := r.Telemetry(); got.Posts != uint64(posts) || got.Bytes != 2*4096+77 {
				t.Errorf("telemetry after %d posts of %d bytes: %+v", posts, 2*4096+77, got)
			}
		})
	}
}

// testPreparedLists: requests selected by index from lists prepared once.
func testPreparedLists(t *testing.T, h Harness, pair xfer.Pair) {
	const blockBytes = 16 << 10
	g := newRig(t, h, pair, 64*blockBytes)
	for _, op := range ops {
		local, remote := g.lists(op, stripes(64, blockBytes))
		pl, err := g.agent.Prepare(local)
		if err != nil {
			t.Fatal(err)
		}
		defer pl.Release()
		pr, err := g.agent.Prepare(remote)
		if err != nil {
			t.Fatal(err)
		}
		defer pr.Release()
		for _, n := range []int{1, 7, 64} {
			li, ri := g.rand.Perm(64)[:n], g.rand.Perm(64)[:n]
			var pieces []piece
			for i := range li {
				pieces = append(pieces, piece{int64(li[i]) * blockBytes, int64(ri[i]) * blockBytes, blockBytes})
			}
			g.fill(g.source(op))
			r, err := g.agent.Select(op, pl, li, pr, ri, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := r.Release(); err != nil {
				t.Fatal(err)
			}
			g.moved(op, pieces...)
			g.check()
		}
	}
}

// testRegisterOften: registrations come and go without a trace.
func testRegisterOften(t *testing.T, h Harness, pair xfer.Pair) {
	rounds := h.few(300)
	g := newRig(t, h, pair, 64<<10)
	g.move(t.Context(), xfer.Write, piece{0, 0, 4096})
	g.move(t.Context(), xfer.Read, piece{0, 32 << 10, 4096})
	before := openFiles(t)
	for range rounds {
		for _, s := range g.sides() {
			l := xfer.DescList{Type: s.typ, Descs: []xfer.Desc{s.registration()}}
			if err := g.agent.Deregister(t.Context(), l); err != nil {
				t.Fatal(err)
			}
			if err := g.agent.Register(t.Context(), l, nil); err != nil {
				t.Fatal(err)
			}
		}
		g.move(t.Context(), xfer.Write, piece{0, 8192, 4096})
		g.move(t.Context(), xfer.Read, piece{0, 16 << 10, 4096})
	}
	g.check()
	if after := openFiles(t); len(after) > len(before)+8 { // a backend may cache a few
		t.Errorf("%d files are open after %d registrations, %d before", len(after), rounds, len(before))
	}
}
