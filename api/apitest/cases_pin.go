package apitest

import (
	"errors"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// pin pins blocks that are there.
func (e *env) pin(ns block.Namespace, hs ...block.Hash) {
	e.Helper()
	errs, err := e.s.Pin(e.ctx, ns.ID, hashLen, pack(hashLen, hs...))
	e.ok(err)
	if len(errs) != len(hs) {
		e.Fatalf("pin of %d keys: %d answers", len(hs), len(errs))
	}
	for _, err := range errs {
		e.ok(err)
	}
}

func (e *env) unpin(ns block.Namespace, want int, hs ...block.Hash) {
	e.Helper()
	n, err := e.s.Unpin(e.ctx, ns.ID, hashLen, pack(hashLen, hs...))
	e.ok(err)
	if n != want {
		e.Fatalf("unpinned %d of %d keys, want %d", n, len(hs), want)
	}
}

// pinned wants these blocks of a namespace to be pinned, and no others.
func (e *env) pinned(ns block.Namespace, bytes int64, want ...int) {
	e.Helper()
	if st := e.s.Stats(); st.Pinned != int64(len(want)) || st.PinnedBytes != bytes {
		e.Fatalf("%d blocks of %d bytes are pinned, want %d of %d", st.Pinned, st.PinnedBytes, len(want), bytes)
	}
	listed := map[block.Hash]bool{}
	for _, l := range e.listAll(ns, 100, func() {}) {
		if l.Pinned {
			listed[l.Hash] = true
		}
	}
	for _, i := range want {
		if !listed[hash(i, hashLen)] {
			e.Fatalf("block %d is not listed as pinned", i)
		}
	}
	if len(listed) != len(want) {
		e.Fatalf("%d blocks are listed as pinned, want %d", len(listed), len(want))
	}
}

// Each key has its own answer. To pin or unpin twice is harmless.
func testPin(e *env) {
	ns := e.open("ns")
	for i := range 3 {
		e.put(ns, i, 1000*(i+1), api.PutOptions{}, block.Stored)
	}
	e.pinned(ns, 0)
	errs, err := e.s.Pin(e.ctx, ns.ID, hashLen, pack(hashLen, hash(0, hashLen), hash(9, hashLen), hash(2, hashLen), hash(0, hashLen)))
	e.ok(err)
	if len(errs) != 4 || errs[0] != nil || errs[2] != nil || errs[3] != nil {
		e.Fatalf("pin of two blocks, one of them twice, and of one that is not there: %v", errs)
	}
	e.is(errs[1], block.ErrNotFound)
	e.pinned(ns, 4000, 0, 2)
	e.pin(ns, hash(2, hashLen), hash(1, hashLen))
	e.pinned(ns, 6000, 0, 1, 2)
	if e.h.Durable {
		found, err := e.s.Locate(e.ctx, ns.ID, hashLen, pack(hashLen, hashes(0, 3)...))
		e.ok(err)
		for i, places := range found {
			if len(places) == 0 || places[len(places)-1].Tier != block.G3 {
				e.Fatalf("block %d is pinned and not durable: %+v", i, places)
			}
		}
	}
	e.unpin(ns, 2, hash(0, hashLen), hash(9, hashLen), hash(1, hashLen), hash(0, hashLen))
	e.unpin(ns, 0, hash(0, hashLen))
	e.pinned(ns, 3000, 2)
	for i := range 3 {
		e.has(ns, i, 1000*(i+1))
	}

	_, err = e.s.Pin(e.ctx, 99, hashLen, pack(hashLen, hash(0, hashLen)))
	e.is(err, block.ErrNotFound)
	_, err = e.s.Unpin(e.ctx, 99, hashLen, pack(hashLen, hash(0, hashLen)))
	e.is(err, block.ErrNotFound)
	_, err = e.s.Pin(e.ctx, ns.ID, 8, make([]byte, 8))
	e.is(err, block.ErrInvalid)
	_, err = e.s.Unpin(e.ctx, ns.ID, 8, make([]byte, 8))
	e.is(err, block.ErrInvalid)
}

// A pinned block may be deleted, cleared and expire. The key's next block is not
// pinned.
func testPinIsOfOneLife(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	e.put(ns, 2, 1000, api.PutOptions{}, block.Stored)
	e.pin(ns, hash(1, hashLen), hash(2, hashLen))
	e.delete(ns, 1)
	e.misses(ns, 1, block.MissAbsent)
	e.pinned(ns, 1000, 2)
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	e.pinned(ns, 1000, 2)

	n, err := e.s.Clear(e.ctx, ns.ID)
	e.ok(err)
	if n != 2 {
		e.Fatalf("cleared %d, want 2", n)
	}
	e.pinned(ns, 0)
	e.put(ns, 2, 1000, api.PutOptions{}, block.Stored)
	e.pinned(ns, 0)

	e.put(ns, 3, 1000, api.PutOptions{TTL: 2 * time.Second}, block.Stored)
	e.pin(ns, hash(3, hashLen))
	e.eventually("the pinned block has expired", func() bool {
		return e.match(ns, block.MatchOptions{}, hash(3, hashLen)).Prefix == 0
	})
	e.put(ns, 3, 1000, api.PutOptions{}, block.Stored)
	e.pinned(ns, 0)
}

// capacity is how many blocks of n bytes the tiers could have room for, together.
func (e *env) capacity(n int64) int {
	var c int64
	for _, t := range e.s.Stats().Tiers {
		c += t.Capacity
	}
	return int(c/n) + 1
}

// there says which of the blocks are in the store, without the policy's knowledge.
func (e *env) there(ns block.Namespace, hs ...block.Hash) []bool {
	e.Helper()
	out := make([]bool, len(hs))
	for i, b := range e.match(ns, block.MatchOptions{All: true, Quiet: true}, hs...).Blocks {
		out[i] = b.State == block.Resident
	}
	return out
}

// Under a pressure that drives out every other block a pinned one stays, and goes
// like the others when it is unpinned.
func testPinUnderPressure(e *env) {
	const size = 1 << 20
	ns := e.open("ns")
	payload := data(1, size)
	next := 0
	put := func() {
		e.Helper()
		res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{{Hash: hash(next, hashLen), Data: payload}}, api.PutOptions{})
		e.ok(err)
		e.ok(res[0].Err)
		next++
	}
	pressUntil := func(what string, ok func() bool) {
		e.Helper()
		for range 4 * e.capacity(size) {
			if put(); ok() {
				return
			}
		}
		e.Fatalf("after %d puts of 1 MiB it is not so that %s", next, what)
	}
	for range 4 {
		put()
	}
	mine := hashes(0, 4)
	e.pin(ns, mine[1])
	pressUntil("the others are gone", func() bool {
		there := e.there(ns, mine...)
		if !there[1] {
			e.Fatal("a pinned block was evicted")
		}
		return !there[0] && !there[2] && !there[3]
	})
	pressUntil("what came behind them is gone", func() bool { return !e.there(ns, hash(next/2, hashLen))[0] })
	err := e.s.Get(e.ctx, ns.ID, hashLen, []block.Wanted{{Hash: mine[1]}}, block.GetOptions{Quiet: true, NoPromote: true}, func(_ int, p block.Payload) error {
		if p.Reason != block.Hit || p.Sum != sumOf(payload) || sumOf(p.Bytes) != p.Sum {
			e.Errorf("get of a pinned block: %v, %d bytes", p.Reason, len(p.Bytes))
		}
		return nil
	})
	e.ok(err)
	e.pinned(ns, size, 1)
	e.unpin(ns, 1, mine[1])
	pressUntil("the block that was unpinned is gone", func() bool { return !e.there(ns, mine[1])[0] })
	e.pinned(ns, 0)
}

// Pins are refused before they take the room that puts need.
func testPinLimit(e *env) {
	const size = 1 << 20
	ns := e.open("ns")
	payload := data(1, size)
	put := func(i int) error {
		res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{{Hash: hash(i, hashLen), Data: payload}}, api.PutOptions{})
		if err != nil {
			return err
		}
		return res[0].Err
	}
	pins := 0
	for {
		if err := put(pins); err != nil {
			e.Fatalf("put with %d blocks pinned: %v", pins, err)
		}
		errs, err := e.s.Pin(e.ctx, ns.ID, hashLen, pack(hashLen, hash(pins, hashLen)))
		e.ok(err)
		if errors.Is(errs[0], block.ErrNoSpace) {
			break
		}
		e.ok(errs[0])
		if pins++; pins > e.capacity(size) {
			e.Fatalf("%d blocks of 1 MiB are pinned", pins)
		}
	}
	if st := e.s.Stats(); pins == 0 || st.Pinned != int64(pins) || st.PinnedBytes != int64(pins)*size {
		e.Fatalf("%d blocks were pinned: stats %d, %d bytes", pins, st.Pinned, st.PinnedBytes)
	}
	for i := range 5 {
		if err := put(10_000 + i); err != nil {
			e.Fatalf("put with as many blocks pinned as may be, %d: %v", pins, err)
		}
	}
	e.unpin(ns, 1, hash(0, hashLen))
	e.pin(ns, hash(10_004, hashLen)) // the room is free again
	for i, there := range e.there(ns, hashes(1, pins)...) {
		if !there {
			e.Fatalf("pinned block %d is gone", i+1)
		}
	}
}

// Without a durable medium there is nothing to scrub. To stop no scrub is harmless.
func testScrub(e *env) {
	e.s.StopScrub()
	err := e.s.StartScrub(block.ScrubOptions{})
	if err != nil || !e.h.Durable {
		e.is(err, block.ErrUnavailable)
	}
	e.s.StopScrub()
	if st := e.s.Stats().Scrub; st.State == block.ScrubRunning {
		e.Fatalf("a scrub that was stopped: %+v", st)
	}
}
