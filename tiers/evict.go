package tiers

import (
	"errors"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// Each tier has one evictor: the goroutine that owns its policy. It keeps the
// tier between its watermarks, and makes room for a size that starves although
// there would be bytes enough. Nobody else evicts.

// evictBytes is how much one round of an evictor takes on, so that events are
// looked at in between and room comes free early.
const evictBytes = 32 << 20

// evictPause is how long an evictor that found nothing waits before it looks
// again without being asked: leases and graces end by themselves.
const evictPause = 100 * time.Millisecond

type evictor struct {
	s *Store
	t *tier
	p policy.Policy
	handover
	within  uint64 // only blocks of this share leave now; 0: any
	spare   []policyEvent
	victims []block.Handle
}

// run drains events and evicts until the store's life ends.
func (v *evictor) run() {
	pause := time.NewTimer(evictPause)
	defer pause.Stop()
	for {
		select {
		case <-v.t.kick:
		case <-pause.C:
		case <-v.s.life.Done():
			return
		}
		v.drain()
		v.evict()
		v.handOver()
		pause.Reset(evictPause)
	}
}

// drain brings the policy up to date.
func (v *evictor) drain() {
	ev, reqs := v.t.events.take(v.spare)
	v.t.ponder(v.p.Name(), reqs)
	for _, r := range reqs {
		v.p.Request(r.path, r.hits, r.class)
	}
	for i := range ev {
		v.apply(ev[i])
	}
	if cap(ev) > eventRoom {
		ev = nil // what a recovery queued is not worth keeping
	}
	v.spare = ev
}

// apply tells the policy of an event as things are now, not as they were when it
// was queued. A block that came and left again is not inserted, and transitions
// of one count may be queued out of order, but the last one queued finds the
// last count.
func (v *evictor) apply(ev policyEvent) {
	switch ev.kind {
	case evInsert:
		v.insert(ev.h)
	case evRemove:
		v.p.Remove(ev.h, ev.why)
		if v.old != nil {
			v.old.Remove(ev.h, ev.why)
		}
	case evLeaf:
		v.s.table.View(ev.h, func(e *index.Entry) { v.p.Leaf(ev.h, e.Kids[v.t.ix] == 0) })
	case evHit:
		v.p.Hit(ev.h)
		if v.t.ix == ixG2 && (v.s.toG3.asks() || v.s.toG4.asks()) {
			v.s.table.Update(ev.h, func(e *index.Entry) { e.Flags |= flagUsed })
		}
		if v.old != nil {
			v.old.Hit(ev.h)
		}
	}
}

func (v *evictor) insert(h block.Handle) {
	v.s.table.View(h, func(e *index.Entry) {
		if counted(e, v.t.ix) && !v.s.keeps(e, v.t.ix) {
			v.p.Insert(h, v.s.facts(e))
			v.p.Leaf(h, e.Kids[v.t.ix] == 0)
		}
	})
}

// evict makes room until the tier is below its low watermark and nobody starves.
func (v *evictor) evict() {
	evicting := false
	for v.s.life.Err() == nil {
		need, starving := v.t.pressure(evicting)
		if need == 0 && starving.size == 0 {
			return
		}
		evicting = true
		var freed, leaving int64
		if need == 0 {
			// There are bytes enough, in slots of other sizes and shares. Where no
			// share may give any, this one makes room for itself.
			freed = v.vacate(starving)
			v.within = starving.share
		}
		if freed == 0 {
			freed, leaving = v.round(max(min(max(need, starving.size), evictBytes), v.leastRound()))
		}
		v.within = 0
		if freed == 0 && leaving == 0 && starving.size > 0 {
			freed = v.vacate(starving)
		}
		v.drain()
		if freed == 0 && leaving == 0 {
			if v.t.leaving.Load() == 0 {
				v.t.inVain()
			}
			return
		}
	}
}

// leastRound is the least that is worth a round: what leaves together goes into one object.
func (v *evictor) leastRound() int64 {
	if v.t != v.s.lowest() || !v.s.objects.takes() {
		return 0
	}
	return min(objectTarget, v.t.capacity/16)
}

// round evicts what the policy proposes and returns the bytes that came free, and those that
// will.
func (v *evictor) round(need int64) (freed, leaving int64) {
	v.victims = v.p.Victims(v.victims[:0], need, v.mayFollow)
	freed, leaving = v.s.evict(v.t, v.victims, false)
	if freed == 0 && leaving == 0 && v.old != nil {
		v.victims = v.old.Victims(v.victims[:0], need, v.mayFollow)
		freed, leaving = v.s.evict(v.t, v.victims, false)
	}
	return freed, leaving
}

// mayFollow is the store's say in what a policy proposes, which has children before
// their parents: where blocks are dropped one by one, a block with children may
// leave too, since those that have not left by its turn are found then. Else each
// round would take the ends of many prompts that are still in use, instead of whole
// prompts that are not. From NVMe blocks leave together.
func (v *evictor) mayFollow(h block.Handle) (ok bool) {
	if v.within != 0 && !v.isWithin(h) {
		return false
	}
	if v.t.ix == ixG3 || v.s.g3 != nil || v.s.objects != nil {
		return v.mayLeave(h)
	}
	v.s.table.View(h, func(e *index.Entry) {
		ok = e.Refs == 0 && live(e, v.t.ix) && !isPinned(e) && !v.s.graced(e)
	})
	return ok
}

// isWithin reports whether a block is one of the share that makes room for itself.
func (v *evictor) isWithin(h block.Handle) (ok bool) {
	v.s.table.View(h, func(e *index.Entry) { ok = v.s.shareIn(v.t, e.NS) == v.within })
	return ok
}

// mayLeave reports whether a block may leave the evictor's tier now.
func (v *evictor) mayLeave(h block.Handle) (ok bool) {
	v.s.table.View(h, func(e *index.Entry) { ok = v.s.mayLeave(v.t, e) })
	return ok
}

// mayLeave reports whether a block may leave a tier now: nobody uses it, and if
// it would be lost with this copy, its grace is over and no child of it is left
// anywhere.
func (s *Store) mayLeave(t *tier, e *index.Entry) bool {
	// It is, or will be, elsewhere, or may be lost.
	return s.idle(t, e) && (live(e, 1-t.ix) || s.goesDown(t, e) || s.mayDrop(e))
}

// idle reports whether nobody uses a block that a tier has, and nothing keeps it there.
func (s *Store) idle(t *tier, e *index.Entry) bool {
	return e.Refs == 0 && live(e, t.ix) && !s.keeps(e, t.ix)
}

// vacateTries is how many extents a round looks at that cannot be emptied.
const vacateTries = 64

// extentAt names an extent of a tier.
type extentAt struct {
	dev    *device
	extent int
}

// vacate makes room for a slot that is wanted: an empty extent of another share passes
// on, or one of another class is emptied, the one with the least in it, of those in
// which nothing is in use.
func (v *evictor) vacate(w want) (freed int64) {
	if at, ok := v.withdraw(w); ok {
		return v.passOn(at, w.share)
	}
	tried := map[extentAt]bool{}
	for range vacateTries {
		at, owners, ok := v.emptiest(w, tried)
		if !ok {
			break
		}
		tried[at] = true
		if !slices.ContainsFunc(owners, v.stays) {
			n, empty := v.clearOut(at, owners, w.share)
			if freed += n; empty {
				break
			}
		}
	}
	return freed
}

// emptiest is the extent with the least in it and who has slots there.
func (v *evictor) emptiest(w want, tried map[extentAt]bool) (at extentAt, owners []block.Handle, ok bool) {
	v.t.mu.Lock()
	defer v.t.mu.Unlock()
	used := int64(0)
	for _, d := range v.t.devs {
		not := func(e int) bool { return tried[extentAt{d, e}] }
		if e, u, some := d.slots.Emptiest(w.share, w.size, not); some && (!ok || u < used) {
			at, used, ok = extentAt{d, e}, u, true
		}
	}
	if ok {
		owners = at.dev.slots.Owners(at.extent, nil)
	}
	return at, owners, ok
}

// stays reports whether a slot's owner cannot leave, whatever else leaves.
func (v *evictor) stays(h block.Handle) (stays bool) {
	if h == reserved {
		return true
	}
	v.s.table.View(h, func(e *index.Entry) {
		stays = e.Refs > 0 || !live(e, v.t.ix) || v.last(e) && v.s.graced(e) || v.t.ix == ixG3 && isPinned(e)
	})
	return stays
}

// keeps reports whether a block stays in the tier because it is pinned.
func (v *evictor) keeps(h block.Handle) (keeps bool) {
	v.s.table.View(h, func(e *index.Entry) { keeps = v.s.keeps(e, v.t.ix) })
	return keeps
}

// last reports whether a block is lost when it leaves the tier.
func (v *evictor) last(e *index.Entry) bool {
	return !live(e, 1-v.t.ix) && !v.s.goesDown(v.t, e)
}

// clearOut moves all blocks of an extent elsewhere in G2, or evicts them, for slots of
// a share, and says whether it is empty then.
func (v *evictor) clearOut(at extentAt, owners []block.Handle, share uint64) (freed int64, empty bool) {
	v.vacating(at, true, share)
	defer func() {
		if v.vacating(at, false, share) {
			freed = max(freed, v.passOn(at, share))
		}
	}()
	left := owners[:0]
	var moved int64
	for _, h := range owners {
		n := int64(0)
		if v.t.ix == ixG2 {
			n = v.s.relocate(h)
		}
		if moved += n; n == 0 {
			left = append(left, h)
		}
	}
	if slices.ContainsFunc(left, v.keeps) {
		return freed, false
	}
	// A parent and its children may share the extent: the children go first.
	for len(left) > 0 {
		var free, rest []block.Handle
		for _, h := range left {
			if v.mayLeave(h) {
				free = append(free, h)
			} else {
				rest = append(rest, h)
			}
		}
		n, _ := v.s.evict(v.t, free, true)
		freed += n
		if n == 0 {
			break
		}
		left = rest
	}
	if len(left) > 0 {
		return freed, false // what was moved has gained nothing
	}
	return freed + moved, true
}

// vacating reports whether the extent is withdrawn, since it was emptied for another
// share.
func (v *evictor) vacating(at extentAt, on bool, share uint64) (withdrawn bool) {
	v.t.mu.Lock()
	defer v.t.mu.Unlock()
	at.dev.slots.Vacate(at.extent, on, share)
	return at.dev.slots.Withdrawn(at.extent)
}

// evict takes blocks out of a tier: from G2 down to G3 if there is one, it does not
// have them and they are admitted, from the lower of the two into G4 if there is one,
// else out of the store. It returns the bytes of the slots that came free, and of those that
// do so when their blocks are in G4; with wait that is waited for.
func (s *Store) evict(t *tier, hs []block.Handle, wait bool) (freed, leaving int64) {
	if len(hs) == 0 {
		return 0, 0
	}
	switch {
	case s.objects != nil && t == s.lowest():
		return s.takeOut(t, hs, wait)
	case t.ix == ixG3:
		return s.dropG3(hs, block.Evicted), 0
	}
	var down []block.Handle
	lost := block.NoReason
	if s.g3 == nil {
		lost = block.Evicted
	}
	for _, h := range hs {
		n, last := s.dropG2(h, lost)
		freed += n
		if last {
			down = append(down, h)
		}
	}
	if s.g3 == nil || len(down) == 0 {
		return freed, 0
	}
	down, past, turned, ahead := s.sift(down)
	freed += turned
	defer s.toG3.giveBack(&s.names, ahead...)
	held := down[:0]
	for _, h := range down {
		s.table.Update(h, func(e *index.Entry) {
			if e.Refs == 0 && live(e, ixG2) {
				e.Refs++
				held = append(held, h)
			}
		})
	}
	errs := s.copyTo(s.life, s.g3, held)
	for i, h := range held {
		s.release(h)
		// What can neither go down nor wait for room there is dropped: G3 may be
		// full of blocks that stay for the sake of their children up here, or the
		// catalog out of order for nobody knows how long.
		failed := s.catalog.Err() != nil
		stuck := errs[i] != nil && (lostDevice(errs[i]) || errors.Is(errs[i], errNothingLeaves) || failed)
		if stuck && !failed && s.objects.takes() {
			past = append(past, h)
			continue
		}
		lost := block.NoReason
		if stuck {
			lost = block.Evicted
		}
		n, _ := s.dropG2(h, lost)
		freed += n
	}
	if len(past) > 0 {
		var n int64
		n, leaving = s.takeOut(t, past, wait)
		freed += n
	}
	return freed, leaving
}

// dropG2 takes a block out of G2 if nobody uses it. The last copy goes only for a
// reason; last says that it was the last and stayed for that.
func (s *Store) dropG2(h block.Handle, lost block.Reason) (freed int64, last bool) {
	var d departure
	var gone bool
	s.table.Update(h, func(e *index.Entry) {
		if e.Refs > 0 || !live(e, ixG2) {
			return
		}
		why := block.Moved
		if !live(e, ixG3) {
			packed := e.Flags&flagPacked != 0
			if lost == block.NoReason || !packed && !s.mayDrop(e) {
				last = true
				return
			}
			if !packed {
				why = lost
			}
		}
		d, gone = s.leave(h, e, ixG2, why), true
	})
	if gone {
		freed = s.departed(d)
	}
	return freed, last
}

// mayDrop reports whether the last copy of a block may be dropped.
func (s *Store) mayDrop(e *index.Entry) bool {
	return !isPinned(e) && !s.graced(e) && e.Kids[ixG2] == 0 && e.Kids[ixG3] == 0
}

// mayDropG3 reports whether the copy of a block in G3 may go now.
func (s *Store) mayDropG3(e *index.Entry) bool {
	return s.idle(s.g3, e) && (live(e, ixG2) || e.Flags&flagPacked != 0 || s.mayDrop(e))
}

// dropG3 evicts blocks from G3, those that may leave, and returns the bytes that
// came free. lost is why those go that are nowhere else. Their slots come free when the drop of their records is synced.
func (s *Store) dropG3(hs []block.Handle, lost block.Reason) int64 {
	if s.catalog.Err() != nil {
		return 0 // they would neither be served nor make room
	}
	done := make(chan int64, len(hs))
	n := 0
	for _, h := range hs {
		s.table.Update(h, func(e *index.Entry) {
			if why := block.Evicted; s.mayDropG3(e) {
				switch {
				case e.Flags&flagPacked != 0:
					why = block.Moved
				case !live(e, ixG2):
					why = lost
				}
				s.startLeave(h, e, why, func(bytes int64) { done <- bytes })
				n++
			}
		})
	}
	var freed int64
	for range n {
		freed += <-done
	}
	return freed
}

// startLeave begins a block's way out of G3: from now on it is found no more,
// and when the drop of its record is synced and its header erased its slot comes
// free. It runs under the shard's lock; freed gets the bytes that came free, 0 when
// the catalog failed: then that happens when it works again.
func (s *Store) startLeave(h block.Handle, e *index.Entry, why block.Reason, freed func(bytes int64)) {
	e.State[ixG3] = index.SlotLeaving
	e.Ops++
	s.tellRemoved(e, ixG3, why)
	var bytes int64
	op := catalogOp{key: block.Key{NS: e.NS, Hash: e.Hash}, hlen: int(e.HashLen), keep: true}
	op.erases(e.Place[ixG3], e.Len)
	op.fin = func(err error) {
		if err == nil || errors.Is(err, errUnerased) {
			var d departure
			s.table.Update(h, func(e *index.Entry) { d = s.leave(h, e, ixG3, why) })
			bytes = s.departed(d)
		}
		s.settle(h, func(e *index.Entry) { e.Ops-- })
	}
	op.tell = func(err error) {
		if err != nil {
			s.g3.stir() // who waits for the record to be dropped does so in vain
		}
		if freed != nil {
			freed(bytes)
		}
	}
	s.commits.add(op)
}
