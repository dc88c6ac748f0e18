package apitest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// Odd sizes, around every border that a path may have: sectors, frames, chunks.
func testRoundTrip(e *env) {
	ns := e.open("ns")
	sizes := []int{1, 7, 511, 512, 513, 4096, 16383, 16384, 16385, 65536, 100_003, 262_143, 262_144, 262_145, 1<<20 - 1, 1 << 20}
	for i, n := range sizes {
		e.put(ns, i, n, api.PutOptions{}, block.Stored)
	}
	for i, n := range sizes {
		e.has(ns, i, n)
	}
	e.misses(ns, len(sizes), block.MissAbsent)
}

// One call of many keys, hits and misses mixed: each key has its own answer.
func testBatch(e *env) {
	ns := e.open("ns")
	const n = 100
	var items []api.PutItem
	for i := range n {
		items = append(items, api.PutItem{Hash: hash(i, hashLen), Parent: hash(i-1, hashLen), HasParent: i > 0, Data: data(i, 1000+i)})
	}
	items[50].Data = make([]byte, 1<<20+1) // too long for the namespace
	res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, items, api.PutOptions{})
	e.ok(err)
	for i, r := range res {
		switch {
		case i == 50:
			e.is(r.Err, block.ErrInvalid)
		case r.Err != nil || r.Status != block.Stored:
			e.Fatalf("put of block %d: %v, %v", i, r.Status, r.Err)
		}
	}
	var want []block.Wanted
	for i := range n + 10 {
		want = append(want, block.Wanted{Hash: hash(i, hashLen)})
	}
	next := 0
	var held []block.Payload // of the keys before next
	err = e.s.Get(e.ctx, ns.ID, hashLen, want, block.GetOptions{}, func(i int, p block.Payload) error {
		if i != next {
			return fmt.Errorf("key %d in the place of %d", i, next)
		}
		next++
		if held = append(held, p); !p.Held {
			for j, p := range held {
				if at := i + 1 - len(held) + j; p.Reason == block.Hit && !bytes.Equal(p.Bytes, data(at, 1000+at)) {
					return fmt.Errorf("key %d: other bytes while it is held", at)
				}
			}
			held = nil
		}
		switch hit := i < n && i != 50; {
		case hit && (p.Reason != block.Hit || !bytes.Equal(p.Bytes, data(i, 1000+i))):
			return fmt.Errorf("key %d: %v, %d bytes", i, p.Reason, len(p.Bytes))
		case !hit && (p.Reason != block.MissAbsent || p.Bytes != nil):
			return fmt.Errorf("key %d: %v, %d bytes, want absent", i, p.Reason, len(p.Bytes))
		}
		return nil
	})
	e.ok(err)
	if next != len(want) || len(held) > 0 {
		e.Fatalf("%d of %d keys were answered, the last %d are held", next, len(want), len(held))
	}

	stop := errors.New("enough")
	calls := 0
	err = e.s.Get(e.ctx, ns.ID, hashLen, want, block.GetOptions{}, func(int, block.Payload) error {
		calls++
		return stop
	})
	e.is(err, stop)
	if calls != 1 {
		e.Fatalf("called back %d times after an error", calls)
	}
}

// A namespace takes any allowed length, fixed by its first put; no value is special.
func testHashLengths(e *env) {
	for _, n := range []int{8, 16, 20, 32} {
		ns := e.open(fmt.Sprint("ns", n))
		for _, h := range []block.Hash{{}, hash(1, n)} {
			res, err := e.s.putBlocks(e.ctx, ns.ID, n, []api.PutItem{{Hash: h, Data: data(1, 100)}}, api.PutOptions{})
			e.ok(err)
			e.ok(res[0].Err)
			var m block.MatchResult
			e.ok(e.s.Match(e.ctx, ns.ID, n, pack(n, h), block.MatchOptions{}, &m))
			if m.Prefix != 1 {
				e.Fatalf("hash %s is not there after its put", h.Hex(n))
			}
		}
		now, err := e.s.NamespaceByID(ns.ID)
		e.ok(err)
		if now.HashLen != n {
			e.Fatalf("hash length is %d after a put with %d", now.HashLen, n)
		}
		other := 8
		if n == 8 {
			other = 32
		}
		var m block.MatchResult
		e.is(e.s.Match(e.ctx, ns.ID, other, make([]byte, other), block.MatchOptions{}, &m), block.ErrInvalid)
		res, err := e.s.putBlocks(e.ctx, ns.ID, other, []api.PutItem{{Hash: hash(9, other), Data: data(1, 100)}}, api.PutOptions{})
		e.ok(err)
		e.is(res[0].Err, block.ErrInvalid)
		err = e.s.Get(e.ctx, ns.ID, other, []block.Wanted{{}}, block.GetOptions{}, func(int, block.Payload) error { return nil })
		e.is(err, block.ErrInvalid)
	}
}

func testExists(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 5000, api.PutOptions{}, block.Stored)
	e.put(ns, 1, 5000, api.PutOptions{}, block.Exists)
	r, there, err := e.s.Reserve(e.ctx, ns.ID, hashLen, hash(1, hashLen), 5000, block.PutOptions{Durable: block.G2})
	e.ok(err)
	if r.Status != block.Exists || there.Len != 5000 || there.Sum != sumOf(data(1, 5000)) {
		e.Fatalf("reserve of a block that is there: %+v, %+v", r, there)
	}
	if n := e.s.Stats().Reservations; n != 0 {
		e.Fatalf("%d reservations are held", n)
	}
}

// A key with other bytes is refused, counted, and leaves the block as it was.
func testConflict(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 5000, api.PutOptions{}, block.Stored)
	before := e.s.Stats().Conflicts
	for _, other := range [][]byte{data(2, 5000), data(1, 4999), data(1, 5001)} {
		res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{{Hash: hash(1, hashLen), Data: other}}, api.PutOptions{})
		e.ok(err)
		e.is(res[0].Err, block.ErrConflict)
	}
	if n := e.s.Stats().Conflicts - before; n != 3 {
		e.Fatalf("3 conflicts counted as %d", n)
	}
	e.has(ns, 1, 5000)
}

// A durable put is in G3 when it is answered, also where the block was in G2.
func testDurable(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 5000, api.PutOptions{}, block.Stored)
	if !e.h.Durable {
		res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{{Hash: hash(2, hashLen), Data: data(2, 10)}}, api.PutOptions{Durable: block.G3})
		e.ok(err)
		e.is(res[0].Err, block.ErrUnavailable)
		return
	}
	e.put(ns, 1, 5000, api.PutOptions{Durable: block.G3}, block.Exists)
	e.put(ns, 2, 5000, api.PutOptions{Durable: block.G3}, block.Stored)
	found, err := e.s.Locate(e.ctx, ns.ID, hashLen, pack(hashLen, hashes(1, 4)...))
	e.ok(err)
	for i, places := range found {
		var g3 bool
		for j, p := range places {
			g3 = g3 || p.Tier == block.G3
			if p.Len != 5000 || j > 0 && p.Tier < places[j-1].Tier {
				e.Fatalf("places of block %d: %+v", i+1, places)
			}
		}
		if want := i < 2; g3 != want {
			e.Fatalf("places of block %d: %+v; in G3: want %v", i+1, places, want)
		}
	}
	e.has(ns, 1, 5000)
	e.has(ns, 2, 5000)
}

func testRanges(e *env) {
	ns := e.open("ns")
	const n = 300_001
	e.put(ns, 1, n, api.PutOptions{}, block.Stored)
	h := hash(1, hashLen)
	all := data(1, n)
	for _, r := range []struct{ off, length, want int }{
		{0, 1, 1},
		{0, n, n},
		{1, 0, n - 1},
		{513, 4096, 4096},
		{n - 1, 1, 1},
		{n - 1, 0, 1},
		{16383, 262_146, 262_146},
	} {
		p, err := e.get(ns, block.Wanted{Hash: h, Offset: int64(r.off), Length: int64(r.length)})
		e.ok(err)
		if p.Reason != block.Hit || int(p.Total) != n || !bytes.Equal(p.Bytes, all[r.off:r.off+r.want]) {
			e.Fatalf("range %d:%d: %v, total %d, %d bytes", r.off, r.length, p.Reason, p.Total, len(p.Bytes))
		}
	}
	for _, r := range []struct{ off, length int64 }{{0, n + 1}, {n, 1}, {n + 1, 0}, {n - 1, 2}, {-1, 1}, {0, -1}} {
		_, err := e.get(ns, block.Wanted{Hash: h, Offset: r.off, Length: r.length})
		e.is(err, block.ErrInvalid)
	}
}

// Reserve, fill and commit as steps of their own.
func testReservations(e *env) {
	ns := e.open("ns")
	o := block.PutOptions{Durable: block.G2}
	reserve := func(i int) uint64 {
		r, _, err := e.s.Reserve(e.ctx, ns.ID, hashLen, hash(i, hashLen), 40_000, o)
		e.ok(err)
		if r.ID == 0 || r.Status != block.Stored || r.Left <= 0 {
			e.Fatalf("reservation %+v", r)
		}
		return r.ID
	}
	full, short, gone := reserve(1), reserve(2), reserve(3)
	e.ok(fillInPieces(e.ctx, e.s, full, data(1, 40_000)))
	e.ok(e.s.Fill(e.ctx, short, 0, data(2, 100)))
	e.s.Abort([]uint64{gone, 12345})
	e.is(e.s.Fill(e.ctx, gone, 0, data(3, 10)), block.ErrLeaseExpired)
	e.is(e.s.Fill(e.ctx, short, 200, data(2, 10)), block.ErrInvalid)     // a gap
	e.is(e.s.Fill(e.ctx, short, 100, data(2, 40_000)), block.ErrInvalid) // beyond the end

	res := e.s.Commit(e.ctx, []uint64{short, full, gone})
	e.is(res[0].Err, block.ErrInvalid)
	e.ok(res[1].Err)
	e.is(res[2].Err, block.ErrLeaseExpired)
	e.has(ns, 1, 40_000)
	e.misses(ns, 3, block.MissAbsent)
	e.s.Abort([]uint64{short})
	if n := e.s.Stats().Reservations; n != 0 {
		e.Fatalf("%d reservations are held", n)
	}
	e.put(ns, 2, 40_000, api.PutOptions{}, block.Stored)

	// Two reservations of one key: whoever commits second is told.
	a, b, c := reserve(4), reserve(4), reserve(4)
	e.ok(e.s.Fill(e.ctx, a, 0, data(4, 40_000)))
	e.ok(e.s.Fill(e.ctx, b, 0, data(4, 40_000)))
	e.ok(e.s.Fill(e.ctx, c, 0, data(5, 40_000)))
	res = e.s.Commit(e.ctx, []uint64{a, b, c})
	if res[0].Err != nil || res[0].Status != block.Stored || res[1].Err != nil || res[1].Status != block.Exists {
		e.Fatalf("commits of one key twice: %+v", res)
	}
	e.is(res[2].Err, block.ErrConflict)
	e.has(ns, 4, 40_000)
}

// What is reserved cannot be evicted: at some point a reservation is refused, by
// its deadline, and room comes back when reservations are given up.
func testNoSpace(e *env) {
	ns := e.open("ns")
	const n = 1 << 20
	o := block.PutOptions{Durable: block.G2}
	var ids []uint64
	refused := false
	for i := 0; int64(i) <= e.h.G2Bytes/n && !refused; i++ {
		ctx, cancel := context.WithTimeout(e.ctx, 200*time.Millisecond)
		r, _, err := e.s.Reserve(ctx, ns.ID, hashLen, hash(i, hashLen), n, o)
		cancel()
		switch {
		case err == nil:
			ids = append(ids, r.ID)
		case errors.Is(err, block.ErrNoSpace) || errors.Is(err, context.DeadlineExceeded):
			refused = true // the client's own clock may be the first to run out
		default:
			e.Fatal(err)
		}
	}
	if !refused {
		e.Fatalf("%d bytes were reserved in a tier of %d", len(ids)*n, e.h.G2Bytes)
	}
	e.s.Abort(ids)
	e.put(ns, 1000, n, api.PutOptions{}, block.Stored)
	e.has(ns, 1000, n)
}

func testSameKeyAtOnce(e *env) {
	ns := e.open("ns")
	for round := range 5 {
		var wg sync.WaitGroup
		results := make([]api.PutResult, 8)
		for i := range results {
			wg.Go(func() {
				res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{{Hash: hash(round, hashLen), Data: data(round, 50_000)}}, api.PutOptions{})
				if err != nil {
					results[i].Err = err
					return
				}
				results[i] = res[0]
			})
		}
		wg.Wait()
		stored := 0
		for _, r := range results {
			e.ok(r.Err)
			if r.Status == block.Stored {
				stored++
			}
		}
		if stored != 1 {
			e.Fatalf("%d of %d puts of one key say that they stored it", stored, len(results))
		}
		e.has(ns, round, 50_000)
	}
}

// A caller that is gone leaves nothing behind and gets its context's error.
func testCallerGone(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	ctx, cancel := context.WithCancel(e.ctx)
	want := make([]block.Wanted, 1000)
	for i := range want {
		want[i].Hash = hash(1, hashLen)
	}
	calls := 0
	err := e.s.Get(ctx, ns.ID, hashLen, want, block.GetOptions{}, func(_ int, p block.Payload) error {
		calls++
		cancel()
		if p.Reason != block.Hit && p.Reason != block.MissDeadline {
			return fmt.Errorf("get with a context that ended: %v", p.Reason)
		}
		return ctx.Err()
	})
	e.is(err, context.Canceled)
	if calls != 1 {
		e.Fatalf("called back %d times", calls)
	}
	e.eventually("nothing is held", func() bool {
		st := e.s.Stats()
		return st.Leases == 0 && st.Reservations == 0
	})
}
