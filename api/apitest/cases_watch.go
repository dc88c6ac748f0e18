package apitest

import (
	"context"
	"maps"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// watching is a watch that runs beside the case.
type watching struct {
	e      *env
	start  block.WatchStart
	events chan block.Event
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // why it ended
}

// watch begins a watch and returns when it is ready.
func (e *env) watch(o block.WatchOptions) *watching {
	e.Helper()
	ctx, cancel := context.WithCancel(e.ctx)
	w := &watching{e: e, events: make(chan block.Event), cancel: cancel, ended: make(chan struct{})}
	ready := make(chan block.WatchStart, 1)
	o.Ready = func(at block.WatchStart) { ready <- at }
	go func() {
		defer close(w.ended)
		w.err = e.s.Watch(ctx, o, func(ev block.Event) error {
			select {
			case w.events <- ev:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	e.Cleanup(w.stop)
	select {
	case w.start = <-ready:
	case <-w.ended:
		e.Fatalf("watch ended before it was ready: %v", w.err)
	}
	return w
}

func (w *watching) stop() {
	w.cancel()
	<-w.ended
}

func (w *watching) next() block.Event {
	w.e.Helper()
	select {
	case ev := <-w.events:
		return ev
	case <-w.ended:
		w.e.Fatalf("watch ended early: %v", w.err)
	case <-time.After(30 * time.Second):
		w.e.Fatal("waited in vain for an event")
	}
	return block.Event{}
}

// until lists the events up to the first that is ok, this one included.
func (w *watching) until(ok func(block.Event) bool) []block.Event {
	w.e.Helper()
	for out := []block.Event{}; ; {
		out = append(out, w.next())
		if ok(out[len(out)-1]) {
			return out
		}
	}
}

func isStored(i int) func(block.Event) bool {
	return func(ev block.Event) bool {
		return ev.Kind == block.EventStored && ev.Hash == hash(i, hashLen) && ev.Tier == block.G2
	}
}

func isGone(i int) func(block.Event) bool {
	return func(ev block.Event) bool {
		return ev.Kind == block.EventRemoved && ev.Hash == hash(i, hashLen) && ev.Last
	}
}

func isKind(k block.EventKind) func(block.Event) bool {
	return func(ev block.Event) bool { return ev.Kind == k }
}

// delete removes one block that is there.
func (e *env) delete(ns block.Namespace, i int) {
	e.Helper()
	n, err := e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(i, hashLen)))
	e.ok(err)
	if n != 1 {
		e.Fatalf("delete of block %d: %d were there", i, n)
	}
}

// A watch says of which store and from where on it tells.
func testWatchStart(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 100, api.PutOptions{}, block.Stored)
	before := e.s.Stats()
	w := e.watch(block.WatchOptions{})
	if w.start.Incarnation == 0 || w.start.Incarnation != before.Incarnation || w.start.Seq < before.EventSeq || w.start.Resumed {
		e.Fatalf("watch of store %d at %d begins with %+v", before.Incarnation, before.EventSeq, w.start)
	}
	e.put(ns, 2, 100, api.PutOptions{}, block.Stored)
	if ev := w.next(); ev.Seq != w.start.Seq+1 {
		e.Fatalf("a watch from %d begins with event %+v", w.start.Seq, ev)
	}
}

// A watcher that comes back is told of all that happened meanwhile, without a gap.
func testWatchResume(e *env) {
	ns := e.open("ns")
	w := e.watch(block.WatchOptions{})
	for i := range 3 {
		e.put(ns, i, 100, api.PutOptions{}, block.Stored)
	}
	seen := w.until(isStored(2))
	last := seen[len(seen)-1].Seq
	w.stop()
	e.put(ns, 3, 100, api.PutOptions{}, block.Stored)
	e.delete(ns, 0)

	for range 2 { // more than one may do so
		w = e.watch(block.WatchOptions{Incarnation: w.start.Incarnation, After: last})
		if !w.start.Resumed || w.start.Seq != last {
			e.Fatalf("resumed behind %d at %+v", last, w.start)
		}
		stored := 0
		for i, ev := range w.until(isGone(0)) {
			if ev.Seq != last+1+uint64(i) {
				e.Fatalf("event %d behind %d is %+v", i+1, last, ev)
			}
			if isStored(3)(ev) {
				stored++
			}
		}
		if stored != 1 {
			e.Fatalf("a block stored meanwhile was told of %d times", stored)
		}
		w.stop()
	}

	at := e.s.Stats()
	w = e.watch(block.WatchOptions{Incarnation: at.Incarnation, After: at.EventSeq})
	if !w.start.Resumed {
		e.Fatalf("resumed behind the last event at %+v", w.start)
	}
	e.put(ns, 4, 100, api.PutOptions{}, block.Stored)
	if ev := w.next(); ev.Seq != at.EventSeq+1 {
		e.Fatalf("behind the last event, %d, comes %+v", at.EventSeq, ev)
	}
}

// What happened in other namespaces is no gap.
func testWatchResumeNamespace(e *env) {
	ns, other := e.open("ns"), e.open("other")
	w := e.watch(block.WatchOptions{NS: ns.ID})
	e.put(ns, 1, 100, api.PutOptions{}, block.Stored)
	seen := w.until(isStored(1))
	at := seen[len(seen)-1].Seq
	w.stop()
	e.put(other, 2, 100, api.PutOptions{}, block.Stored)
	e.put(ns, 3, 100, api.PutOptions{}, block.Stored)

	w = e.watch(block.WatchOptions{NS: ns.ID, Incarnation: w.start.Incarnation, After: at})
	if !w.start.Resumed {
		e.Fatalf("resumed behind %d at %+v", at, w.start)
	}
	for _, ev := range w.until(isStored(3)) {
		if ev.NS != "ns" || ev.Seq <= at || ev.Kind != block.EventStored {
			e.Fatalf("after number %d of ns comes %+v", at, ev)
		}
		at = ev.Seq
	}
}

// A watch that cannot go on where it was says so, and goes on from now.
func testWatchCannotResume(e *env) {
	ns := e.open("ns")
	e.put(ns, 1, 100, api.PutOptions{}, block.Stored)
	at := e.s.Stats()
	for name, o := range map[string]block.WatchOptions{
		"an event of another incarnation":    {Incarnation: at.Incarnation + 1, After: 1},
		"the start of another incarnation":   {Incarnation: at.Incarnation + 1},
		"an event that has not happened":     {Incarnation: at.Incarnation, After: at.EventSeq + 1000},
		"another incarnation, one namespace": {NS: ns.ID, Incarnation: at.Incarnation + 1, After: at.EventSeq},
	} {
		w := e.watch(o)
		if w.start.Resumed || w.start.Incarnation != at.Incarnation || w.start.Seq < at.EventSeq {
			e.Fatalf("%s: watch of store %d at %d begins with %+v", name, at.Incarnation, at.EventSeq, w.start)
		}
		if ev := w.next(); ev.Kind != block.EventLost || ev.Count != 0 || ev.Seq != w.start.Seq {
			e.Fatalf("%s: the first event is %+v", name, ev)
		}
		e.delete(ns, 1)
		e.put(ns, 1, 100, api.PutOptions{}, block.Stored)
		for _, ev := range w.until(isStored(1)) {
			if ev.Kind == block.EventLost || ev.Seq <= w.start.Seq {
				e.Fatalf("%s: after %+v comes %+v", name, w.start, ev)
			}
		}
		w.stop()
	}
}

// held is what a watcher believes to be there.
type held map[heldBlock]bool

type heldBlock struct {
	ns   string
	hash block.Hash
	tier block.TierID
}

func (h held) apply(ev block.Event) {
	at := heldBlock{ev.NS, ev.Hash, ev.Tier}
	switch ev.Kind {
	case block.EventStored, block.EventPresent:
		h[at] = true
	case block.EventRemoved:
		delete(h, at)
	case block.EventCleared:
		maps.DeleteFunc(h, func(b heldBlock, _ bool) bool { return b.ns == ev.NS })
	}
}

// listed is what the store says to be there.
func (e *env) listed(spaces ...block.Namespace) held {
	e.Helper()
	h := held{}
	for _, ns := range spaces {
		for _, l := range e.listAll(ns, 100, func() {}) {
			for _, t := range l.Tiers {
				h[heldBlock{ns.Desc.Name, l.Hash, t}] = true
			}
		}
	}
	return h
}

// converges applies events to h until it is what the store lists.
func (w *watching) converges(h held, spaces ...block.Namespace) {
	w.e.Helper()
	w.e.eventually("the watcher knows what is there", func() bool {
		for {
			select {
			case ev := <-w.events:
				h.apply(ev)
				continue
			case <-time.After(5 * time.Millisecond):
			}
			return maps.Equal(h, w.e.listed(spaces...))
		}
	})
}

// A snapshot tells of each block in each tier, and of how many it told.
func testWatchSnapshot(e *env) {
	ns, other := e.open("ns"), e.open("other")
	empty := e.watch(block.WatchOptions{NS: ns.ID, Snapshot: true})
	if ev := empty.next(); ev.Kind != block.EventSnapshot || ev.Count != 0 {
		e.Fatalf("the snapshot of an empty namespace begins with %+v", ev)
	}
	empty.stop()

	for i := range 10 {
		item := api.PutItem{Hash: hash(i, hashLen), Parent: hash(i-1, hashLen), HasParent: i > 0, Data: data(i, 100+i)}
		res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{item}, api.PutOptions{})
		e.ok(err)
		e.ok(res[0].Err)
	}
	e.put(other, 20, 100, api.PutOptions{}, block.Stored)
	e.delete(ns, 9)
	for _, c := range []struct {
		of     block.NamespaceID
		spaces []block.Namespace
		blocks int
	}{{ns.ID, []block.Namespace{ns}, 9}, {0, []block.Namespace{ns, other}, 10}} {
		w := e.watch(block.WatchOptions{NS: c.of, Snapshot: true})
		if w.start.Resumed || w.start.Incarnation != e.s.Stats().Incarnation {
			e.Fatalf("a snapshot begins with %+v", w.start)
		}
		h, blocks := held{}, map[block.Hash]bool{}
		told := w.until(isKind(block.EventSnapshot))
		for _, ev := range told[:len(told)-1] {
			i := 0
			for ev.Hash != hash(i, hashLen) && i < 20 {
				i++
			}
			size := 100 + i%20
			if ev.Kind != block.EventPresent || ev.Seq != 0 || ev.Hlen != hashLen || int(ev.Len) != size || ev.HasPar != (i > 0 && i < 20) || ev.HasPar && ev.Parent != hash(i-1, hashLen) {
				e.Fatalf("in a snapshot comes %+v", ev)
			}
			h.apply(ev)
			blocks[ev.Hash] = true
		}
		if end := told[len(told)-1]; end.Seq != w.start.Seq || end.Count != int64(len(told)-1) || len(h) != len(told)-1 || len(blocks) != c.blocks {
			e.Fatalf("a snapshot told of %d blocks, %d times, %d different ones, and ends with %+v", len(blocks), len(told)-1, len(h), end)
		}
		w.converges(h, c.spaces...)
		w.stop()
	}
}

// Whoever applies a snapshot and the events behind it ends with what is there,
// whatever happens meanwhile.
func testWatchSnapshotWhileChanging(e *env) {
	ns := e.open("ns")
	for i := range 200 {
		e.put(ns, i, 100, api.PutOptions{}, block.Stored)
	}
	changed := make(chan error, 1)
	go func() {
		changed <- func() error {
			for i := range 200 {
				if _, err := e.s.Delete(e.ctx, ns.ID, hashLen, pack(hashLen, hash(i, hashLen))); err != nil {
					return err
				}
				if i%3 == 0 { // it comes back
					continue
				}
				items := []api.PutItem{{Hash: hash(i, hashLen), Data: data(i, 100)}, {Hash: hash(1000+i, hashLen), Data: data(i, 100)}}
				res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, items, api.PutOptions{})
				if err != nil {
					return err
				}
				for _, r := range res {
					if r.Err != nil {
						return r.Err
					}
				}
			}
			return nil
		}()
	}()
	w := e.watch(block.WatchOptions{NS: ns.ID, Snapshot: true})
	h := held{}
	for _, ev := range w.until(isKind(block.EventSnapshot)) {
		h.apply(ev)
	}
	for more := true; more; {
		select {
		case ev := <-w.events:
			h.apply(ev)
		case err := <-changed:
			e.ok(err)
			more = false
		}
	}
	w.converges(h, ns)
	if len(h) == 0 {
		e.Fatal("nothing is there at the end")
	}
}

// With a snapshot wanted, a watch that can go on does, and one that cannot begins
// with the snapshot instead of a loss.
func testWatchResumeOrSnapshot(e *env) {
	ns := e.open("ns")
	w := e.watch(block.WatchOptions{Snapshot: true})
	e.put(ns, 1, 100, api.PutOptions{}, block.Stored)
	seen := w.until(isStored(1))
	last := seen[len(seen)-1].Seq
	w.stop()
	e.put(ns, 2, 100, api.PutOptions{}, block.Stored)

	o := block.WatchOptions{Incarnation: w.start.Incarnation, After: last, Snapshot: true}
	w = e.watch(o)
	if !w.start.Resumed {
		e.Fatalf("resumed behind %d at %+v", last, w.start)
	}
	for _, ev := range w.until(isStored(2)) {
		if ev.Kind != block.EventStored {
			e.Fatalf("a watch that goes on tells %+v", ev)
		}
	}
	w.stop()

	o.Incarnation++
	w = e.watch(o)
	if w.start.Resumed {
		e.Fatalf("a watch of another incarnation begins with %+v", w.start)
	}
	h := held{}
	told := w.until(isKind(block.EventSnapshot))
	for _, ev := range told[:len(told)-1] {
		if ev.Kind != block.EventPresent {
			e.Fatalf("a snapshot tells %+v", ev)
		}
		h.apply(ev)
	}
	w.converges(h, ns)
}

// The numbers of events that Stats and Watch tell are the same.
func testStatsOfEvents(e *env) {
	ns := e.open("ns")
	before := e.s.Stats()
	w := e.watch(block.WatchOptions{})
	for i := range 3 {
		e.put(ns, i, 100, api.PutOptions{}, block.Stored)
	}
	seen := w.until(isStored(2))
	after := e.s.Stats()
	if last := seen[len(seen)-1].Seq; after.EventSeq < last || after.EventSeq < before.EventSeq+3 {
		e.Fatalf("event %d of %d after %d", last, after.EventSeq, before.EventSeq)
	}
	if before.Incarnation == 0 || after.Incarnation != before.Incarnation || after.Watchers != 1 || after.EventsLost != 0 {
		e.Fatalf("stats %+v", after)
	}
	w.stop()
	e.eventually("the watcher is gone", func() bool { return e.s.Stats().Watchers == 0 })
}
