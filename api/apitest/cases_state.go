package apitest

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// A block past its time is a miss, by its own time to live or its namespace's.
func testTimeToLive(e *env) {
	short, err := e.s.OpenNamespace(e.ctx, block.Descriptor{Name: "short", MaxBlockBytes: 1 << 20}, time.Second)
	e.ok(err)
	ns := e.open("ns")
	e.put(ns, 1, 100, api.PutOptions{TTL: time.Second}, block.Stored)
	e.put(ns, 2, 100, api.PutOptions{TTL: time.Hour}, block.Stored)
	e.put(ns, 3, 100, api.PutOptions{}, block.Stored)
	e.put(short, 1, 100, api.PutOptions{}, block.Stored)
	e.put(short, 2, 100, api.PutOptions{TTL: time.Hour}, block.Stored)
	for _, n := range []block.Namespace{ns, short} {
		e.eventually("block 1 has expired", func() bool {
			return e.match(n, block.MatchOptions{}, hash(1, hashLen)).Prefix == 0
		})
		p, err := e.get(n, block.Wanted{Hash: hash(1, hashLen)})
		e.ok(err)
		if p.Reason != block.MissExpired && p.Reason != block.MissAbsent {
			e.Fatalf("get of an expired block: %v", p.Reason)
		}
		e.has(n, 2, 100)
	}
	e.has(ns, 3, 100)
	entries, _, err := e.s.List(e.ctx, ns.ID, "", 10)
	e.ok(err)
	for _, l := range entries {
		if l.Hash == hash(3, hashLen) != l.Expires.IsZero() {
			e.Fatalf("listed %s expires at %v", l.Hash, l.Expires)
		}
	}
	e.put(ns, 1, 100, api.PutOptions{}, block.Stored) // the key is free again
	e.has(ns, 1, 100)
}

func testDelete(e *env) {
	ns := e.open("ns")
	for i := range 5 {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	l := e.match(ns, block.MatchOptions{Lease: time.Hour}, hash(1, hashLen)).Lease
	n, err := e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(1, hashLen), hash(3, hashLen), hash(9, hashLen)))
	e.ok(err)
	if n != 2 {
		e.Fatalf("deleted %d, want 2", n)
	}
	if got := states(e.match(ns, block.MatchOptions{All: true}, hashes(0, 5)...)); got != "1:R-R-R" {
		e.Fatalf("after the delete: %s", got)
	}
	e.misses(ns, 1, block.MissAbsent) // leased blocks too are gone at once
	e.ok(e.s.ReleaseLease(l.ID))
	n, err = e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(1, hashLen)))
	e.ok(err)
	if n != 0 {
		e.Fatalf("deleted %d of a key that was gone", n)
	}
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	e.has(ns, 1, 1000)
}

func testClear(e *env) {
	ns, other := e.open("ns"), e.open("other")
	for i := range 5 {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	e.put(other, 1, 1000, api.PutOptions{}, block.Stored)
	before, err := e.s.NamespaceByID(ns.ID)
	e.ok(err)
	n, err := e.s.Clear(e.ctx, ns.ID)
	e.ok(err)
	if n != 5 {
		e.Fatalf("cleared %d, want 5", n)
	}
	after, err := e.s.NamespaceByID(ns.ID)
	e.ok(err)
	if after.Epoch <= before.Epoch {
		e.Fatalf("epoch %d after a clear at %d", after.Epoch, before.Epoch)
	}
	e.misses(ns, 1, block.MissAbsent)
	e.has(other, 1, 1000)
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	e.has(ns, 1, 1000)
	_, err = e.s.Clear(e.ctx, 99)
	e.is(err, block.ErrNotFound)
}

// listAll pages through a namespace and calls between after each page.
func (e *env) listAll(ns block.Namespace, limit int, between func()) []block.ListEntry {
	e.Helper()
	var out []block.ListEntry
	for cursor := ""; ; {
		page, next, err := e.s.List(e.ctx, ns.ID, cursor, limit)
		e.ok(err)
		if len(page) > limit {
			e.Fatalf("a page of %d, limit %d", len(page), limit)
		}
		out = append(out, page...)
		if next == "" {
			return out
		}
		if next == cursor {
			e.Fatalf("cursor %q does not move", cursor)
		}
		cursor = next
		between()
	}
}

func testList(e *env) {
	ns := e.open("ns")
	if got := e.listAll(ns, 10, func() {}); len(got) != 0 {
		e.Fatalf("an empty namespace lists %+v", got)
	}
	for i := range 25 {
		item := api.PutItem{Hash: hash(i, hashLen), Parent: hash(i-1, hashLen), HasParent: i > 0, Data: data(i, 100+i)}
		res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{item}, api.PutOptions{})
		e.ok(err)
		e.ok(res[0].Err)
	}
	for _, limit := range []int{1, 7, 25, 26, 1000} {
		seen := map[block.Hash]block.ListEntry{}
		for _, l := range e.listAll(ns, limit, func() {}) {
			if _, twice := seen[l.Hash]; twice {
				e.Fatalf("limit %d: %s is listed twice", limit, l.Hash)
			}
			seen[l.Hash] = l
		}
		for i := range 25 {
			l, ok := seen[hash(i, hashLen)]
			switch {
			case !ok || len(seen) != 25:
				e.Fatalf("limit %d: block %d of %d is listed: %v", limit, i, len(seen), ok)
			case int(l.Len) != 100+i || l.Sum != sumOf(data(i, 100+i)) || len(l.Tiers) == 0:
				e.Fatalf("block %d is listed as %+v", i, l)
			case l.HasPar != (i > 0) || i > 0 && l.Parent != hash(i-1, hashLen):
				e.Fatalf("block %d is listed with parent %v %s", i, l.HasPar, l.Parent)
			}
		}
	}
}

// Blocks that are there throughout are listed exactly once, whatever else comes
// and goes.
func testListWhileChanging(e *env) {
	ns := e.open("ns")
	for i := range 40 {
		e.put(ns, i, 100, api.PutOptions{}, block.Stored)
	}
	added, deleted := 100, 1
	seen := map[block.Hash]int{}
	for _, l := range e.listAll(ns, 3, func() {
		e.put(ns, added, 100, api.PutOptions{}, block.Stored)
		added++
		if deleted < 40 {
			_, err := e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(deleted, hashLen)))
			e.ok(err)
			deleted += 2
		}
	}) {
		seen[l.Hash]++
	}
	for i := 0; i < 40; i += 2 {
		if n := seen[hash(i, hashLen)]; n != 1 {
			e.Fatalf("block %d, there throughout, is listed %d times", i, n)
		}
	}
	for h, n := range seen {
		if n != 1 {
			e.Fatalf("%s is listed %d times", h, n)
		}
	}
}

// A watcher that is ready is told of what happens next, in order, with parent,
// tier and reason, and of its namespace only.
func testWatch(e *env) {
	ns, other := e.open("ns"), e.open("other")
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	ready := make(chan struct{})
	events := make(chan block.Event, 100)
	done := make(chan error, 1)
	go func() {
		done <- e.s.Watch(ctx, block.WatchOptions{NS: ns.ID, Ready: func(block.WatchStart) { close(ready) }}, func(ev block.Event) error {
			if ev.Tier == block.G2 || ev.Kind != block.EventStored && ev.Kind != block.EventRemoved {
				events <- ev // G3 may follow in its own time
			}
			return nil
		})
	}()
	select {
	case <-ready:
	case err := <-done:
		e.Fatalf("watch ended before it was ready: %v", err)
	}
	e.put(other, 1, 100, api.PutOptions{}, block.Stored)
	e.put(ns, 1, 100, api.PutOptions{}, block.Stored)
	child := api.PutItem{Hash: hash(2, hashLen), Parent: hash(1, hashLen), HasParent: true, Data: data(2, 200)}
	res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{child}, api.PutOptions{})
	e.ok(err)
	e.ok(res[0].Err)
	_, err = e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(2, hashLen)))
	e.ok(err)
	_, err = e.s.Clear(e.ctx, ns.ID)
	e.ok(err)

	last := uint64(0)
	next := func() block.Event {
		select {
		case ev := <-events:
			if ev.Seq <= last || ev.NS != "ns" {
				e.Fatalf("event %+v after number %d", ev, last)
			}
			last = ev.Seq
			return ev
		case err := <-done:
			e.Fatalf("watch ended early: %v", err)
		case <-time.After(30 * time.Second):
			e.Fatal("waited in vain for an event")
		}
		return block.Event{}
	}
	if ev := next(); ev.Kind != block.EventStored || ev.Hash != hash(1, hashLen) || ev.Hlen != hashLen || ev.HasPar || ev.Len != 100 {
		e.Fatalf("first event %+v", ev)
	}
	if ev := next(); ev.Kind != block.EventStored || ev.Hash != hash(2, hashLen) || !ev.HasPar || ev.Parent != hash(1, hashLen) || ev.Tier != block.G2 {
		e.Fatalf("second event %+v", ev)
	}
	if ev := next(); ev.Kind != block.EventRemoved || ev.Hash != hash(2, hashLen) || ev.Reason != block.Deleted || !ev.Last {
		e.Fatalf("third event %+v", ev)
	}
	ev := next()
	for ev.Kind == block.EventRemoved { // a clear may tell of blocks too
		ev = next()
	}
	if ev.Kind != block.EventCleared || ev.Count != 1 {
		e.Fatalf("event of the clear %+v", ev)
	}
	cancel()
	e.is(<-done, context.Canceled)

	stop := errors.New("enough")
	got := make(chan struct{})
	go func() {
		done <- e.s.Watch(e.ctx, block.WatchOptions{Ready: func(block.WatchStart) { close(got) }}, func(block.Event) error { return stop })
	}()
	<-got
	e.put(other, 2, 100, api.PutOptions{}, block.Stored)
	e.is(<-done, stop)
}

// A store that nothing has happened to is healthy in all its parts.
func testStatsOfHealth(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	st := e.s.Stats()
	if st.Catalog.State != block.Healthy || st.Catalog.Reason != "" || st.Catalog.Errors != 0 || st.Scrub.State != block.ScrubNever {
		e.Fatalf("catalog %+v, scrub %+v", st.Catalog, st.Scrub)
	}
	for _, t := range st.Tiers {
		for _, d := range t.Devices {
			if d.State != block.Healthy || d.Reason != "" || d.Errors != 0 {
				e.Fatalf("device of %s: %+v", t.Tier, d)
			}
		}
	}
}

func testStats(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 1000, api.PutOptions{}, block.Stored)
	e.put(ns, 2, 2000, api.PutOptions{}, block.Stored)
	e.misses(ns, 3, block.MissAbsent)
	_, err := e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(2, hashLen)))
	e.ok(err)
	st := e.s.Stats()
	if st.Namespaces != 1 || st.Blocks != 1 || st.Misses["absent"] != 1 || st.Removed["deleted"] != 1 {
		e.Fatalf("stats %+v", st)
	}
	i := slices.IndexFunc(st.Tiers, func(t block.TierStats) bool { return t.Tier == block.G2 })
	if i < 0 || st.Tiers[i].Capacity <= 0 || st.Tiers[i].Used < 1000 || st.Tiers[i].Payload != 1000 || len(st.Tiers[i].Devices) == 0 {
		e.Fatalf("stats of the tiers %+v", st.Tiers)
	}
}
