package tiers

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// This file holds the small steps of an entry's life. The rules:
//
//   - Refs keeps every copy where it is: leases, transfers and reads hold one.
//   - Ops keeps the entry: a catalog record or a piece of bookkeeping is on its way.
//   - Named keeps the entry: children know it as their parent.
//   - An entry that was deleted while it had references is unlinked and flagged;
//     whoever takes the last reference away frees its slots.
//   - What a tier's policy and the watchers must know is queued under the lock of
//     the block's shard, so that arrivals and departures reach them in the order
//     they happened.

// Flags of an entry.
const (
	flagDeleted   = 1 << iota // it was deleted while it was in use
	flagPinned                // see pin.go
	flagRecording             // the record of its copy in G3 is queued, and Place[ixG3] is that copy's
	flagTentative             // no put of it was answered yet: the first one waits for G3
	flagUsed                  // since it came into the local tiers; kept only where an admission asks
	flagFetched               // a prefetch has brought it up to G2, and nobody has read it since
	flagPacked                // the catalog has the block in G4, too; not set does not say that it has not
)

// Indices of the tiers in an entry's arrays.
const (
	ixG2 = 0
	ixG3 = 1
)

// live reports whether the block can be read from a tier.
func live(e *index.Entry, ix int) bool { return e.State[ix] == index.SlotResident }

// resident reports whether the block can be read from anywhere.
func resident(e *index.Entry) bool { return live(e, ixG2) || live(e, ixG3) }

// counted reports whether a tier has the block, be it on its way out of G3. A
// slot that leaves G2, or that was deleted, is its block's no more.
func counted(e *index.Entry, ix int) bool {
	return live(e, ix) || ix == ixG3 && e.State[ix] == index.SlotLeaving && e.Flags&flagDeleted == 0
}

// staysPacked reports whether a block that leaves a tier for this reason can be read from
// G4 still.
func staysPacked(e *index.Entry, why block.Reason) bool {
	return e.Flags&flagPacked != 0 && (why == block.Evicted || why == block.Moved || why == block.Damaged || why == block.Unreadable)
}

// dirty reports whether a block that can be read from nowhere still has slots:
// one on its way out, or one that others use. A put does not build on such an
// entry, it makes a new one.
func dirty(e *index.Entry) bool {
	return !resident(e) && (e.State[ixG2] != index.SlotNone || e.State[ixG3] != index.SlotNone)
}

// expired reports whether the block's time has passed.
func expired(e *index.Entry, now uint32) bool { return e.Expires != 0 && now >= e.Expires }

// nowUnix is the clock that expiry times are compared with.
func nowUnix() uint32 { return uint32(time.Now().Unix()) }

// expiry is when a time to live that begins now is over, not early and at the
// latest when the clock of entries ends.
func expiry(ttl time.Duration) uint32 {
	ttl = min(ttl, math.MaxUint32*time.Second) // what follows must not overflow
	return uint32(min(time.Now().Add(ttl+time.Second-1).Unix(), math.MaxUint32))
}

// age is the store's coarse clock for Entry.Born: tenths of a second since it
// was opened, from 1 on, so that 0 means that the block was there before.
func (s *Store) age() uint32 { return uint32(time.Since(s.start)/(100*time.Millisecond)) + 1 }

// graced reports whether a block is too young to be dropped for good.
func (s *Store) graced(e *index.Entry) bool {
	return e.Born != 0 && time.Duration(s.age()-e.Born)*100*time.Millisecond < s.opts.Grace
}

// fingerprint is how policies know a key.
func fingerprint(ns block.NamespaceID, h *block.Hash) uint64 {
	return binary.LittleEndian.Uint64(h[:8]) ^ binary.LittleEndian.Uint64(h[8:16])*0x9e3779b97f4a7c15 ^ uint64(ns)<<40
}

// facts is what a policy is told of a block.
func (s *Store) facts(e *index.Entry) policy.Block {
	return policy.Block{
		Hash:   fingerprint(e.NS, &e.Hash),
		Parent: e.Parent,
		Depth:  e.Depth,
		Tokens: uint16(min(s.names.tokens(e.NS), 1<<16-1)),
		Bytes:  e.Len,
	}
}

// aftermath is what a settled entry leaves to be given back.
type aftermath struct {
	places [index.LocalTiers]block.Place
	free   [index.LocalTiers]bool
	parent block.Handle
	dead   bool
}

// settle changes an entry and takes away what nothing holds any more.
func (s *Store) settle(h block.Handle, fn func(e *index.Entry)) {
	for h != 0 {
		var a aftermath
		s.known(h, s.table.Settle(h, func(e *index.Entry) bool {
			fn(e)
			wantCounts(h, e)
			a = s.reap(e)
			return a.dead
		}))
		for ix, free := range a.free {
			if free {
				s.tier(ix).free(a.places[ix])
			}
		}
		if !a.dead || a.parent == 0 {
			return
		}
		h, fn = a.parent, func(e *index.Entry) { e.Named-- }
	}
}

// reap says what of an entry can go now. It runs under the shard's lock.
func (s *Store) reap(e *index.Entry) (a aftermath) {
	if e.Refs > 0 {
		return a
	}
	give := func(ix int) {
		a.places[ix], a.free[ix] = e.Place[ix], true
		e.State[ix] = index.SlotNone
	}
	if e.State[ixG2] == index.SlotLeaving {
		give(ixG2)
	}
	if e.Ops > 0 {
		return a
	}
	if e.Flags&flagDeleted != 0 && e.State[ixG3] != index.SlotNone {
		give(ixG3)
	}
	for ix := range e.State {
		if e.State[ix] != index.SlotNone {
			return a
		}
	}
	if e.Named == 0 {
		a.dead, a.parent = true, e.Parent
	}
	return a
}

// release gives a reference back.
func (s *Store) release(h block.Handle) {
	s.settle(h, func(e *index.Entry) { e.Refs-- })
}

// kid counts a child of h that came into a tier (delta 1) or left it (-1). The
// caller holds something that keeps the child's entry, and thus its parent's.
func (s *Store) kid(h block.Handle, ix int, delta int) {
	if h == 0 || s.tier(ix) == nil {
		return
	}
	s.known(h, s.table.Update(h, func(e *index.Entry) {
		if delta > 0 {
			e.Kids[ix]++
		} else {
			e.Kids[ix]--
		}
		wantCounts(h, e)
		if e.Kids[ix] == 0 || delta > 0 && e.Kids[ix] == 1 {
			s.tier(ix).events.push(policyEvent{kind: evLeaf, h: h})
		}
	}))
}

// arrive tells policy and watchers of a block that has come into a tier, and
// counts it. It runs under the shard's lock, and so is given the hash of the
// parent, which another lock guards.
func (s *Store) arrive(h block.Handle, e *index.Entry, ix int, parent block.Hash) {
	t := s.tier(ix)
	t.events.push(policyEvent{kind: evInsert, h: h})
	s.pinArrived(e, ix)
	t.blocks.Add(1)
	t.payload.Add(int64(e.Len))
	t.bytesIn.Add(int64(e.Len))
	if !counted(e, 1-ix) {
		s.gone.forget(fingerprint(e.NS, &e.Hash))
		s.names.count(e.NS, 1, int64(e.Len))
	}
	s.events.publish(s.event(block.EventStored, e, ix, parent))
}

// event is what watchers are told of a block in a tier.
func (s *Store) event(kind block.EventKind, e *index.Entry, ix int, parent block.Hash) block.Event {
	ev := block.Event{Kind: kind, NS: s.names.name(e.NS), Hash: e.Hash, Hlen: e.HashLen, Tier: s.tier(ix).id, Len: e.Len}
	if e.Parent != 0 {
		ev.Parent, ev.HasPar = parent, true
	}
	return ev
}

// departure is a block that left a tier, to be settled when the lock is released.
type departure struct {
	h      block.Handle
	ix     int
	why    block.Reason
	place  block.Place
	e      index.Entry // as it was
	last   bool        // no local tier has it any more
	linger bool        // the slot is freed with the last reference
}

// leave takes a block out of a tier and tells policy and watchers. It runs under
// the shard's lock; the caller then calls departed. Until then Ops keeps the entry.
func (s *Store) leave(h block.Handle, e *index.Entry, ix int, why block.Reason) departure {
	d := departure{h: h, ix: ix, why: why, place: e.Place[ix], e: *e}
	found := live(e, ix) // else its removal was told when it began to leave
	e.State[ix] = index.SlotNone
	if ix == ixG2 && e.Flags&flagFetched != 0 {
		e.Flags &^= flagFetched
		s.prefetches.wasted.Add(1)
	}
	e.Ops++
	if d.last = !counted(e, 1-ix); d.last {
		e.Flags &^= flagUsed
	}
	s.tier(ix).events.push(policyEvent{kind: evRemove, h: h, why: why})
	s.pinLeft(e, ix, d.last)
	if found {
		s.tellRemoved(e, ix, why)
	}
	return d
}

// tellRemoved tells watchers that a block is found no more in a tier. It runs
// under the shard's lock as that becomes true: later the key may be another
// entry's, which has told of itself.
func (s *Store) tellRemoved(e *index.Entry, ix int, why block.Reason) {
	ev := s.event(block.EventRemoved, e, ix, block.Hash{})
	ev.HasPar = false // its hash is not at hand here
	ev.Reason, ev.Last = why, !live(e, 1-ix) && !staysPacked(e, why)
	s.events.publish(ev)
}

// departed does what follows from a departure outside the lock: frees the slot,
// counts, tells the parent. It returns the bytes that came free.
func (s *Store) departed(d departure) (freed int64) {
	t := s.tier(d.ix)
	switch {
	case d.linger:
	case d.why == block.Unreadable:
		t.quarantine(d.place)
	default:
		freed = t.free(d.place)
	}
	t.blocks.Add(-1)
	t.payload.Add(-int64(d.e.Len))
	lost := d.last && !staysPacked(&d.e, d.why)
	if d.why == block.Evicted || d.why == block.Moved || d.why == block.Rejected {
		t.evictions.Add(1)
		t.reclaimed.Add(freed)
		if lost {
			t.dropped.Add(1)
		}
	}
	if d.last {
		s.names.count(d.e.NS, -1, -int64(d.e.Len))
	}
	if lost {
		s.noteGone(&d.e, d.why)
		s.removed[d.why].Add(1)
	}
	s.kid(d.e.Parent, d.ix, -1)
	s.settle(d.h, func(e *index.Entry) { e.Ops-- })
	return freed
}
