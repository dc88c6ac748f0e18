package tiers

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// uploads is the queue of blocks that are to go into objects. An evictor puts there what is
// to leave the lowest local tier, and goes on: the block stays where it is, held by a
// reference, until its object is committed, and then leaves. Several objects go up at a time,
// and what waits meanwhile makes the next ones larger. A queue that is full holds eviction
// back; who waits too long in it is given back to the evictor, which may choose better by
// then.
type uploads struct {
	o    *objects
	most int64 // bytes of slots
	age  time.Duration
	kick chan struct{} // buffer of 1
	mu   struct {
		sync.Mutex
		queue []*leaver
		// through are blocks that stay, and wait for others of theirs: throughBytes.
		through      []*leaver
		throughBytes int64
		pause        *time.Timer // nil: no block waits so
		bytes        int64       // of slots, of what waits and what is under way
		blocks       int64
		closed       bool
	}
	heldBack, aged, failed, past atomic.Int64 // blocks
}

// leaver is a block in the queue, on which a reference is held.
type leaver struct {
	parcel
	stays bool
	t     *tier
	bytes int64  // of its slot
	share uint64 // of its slot
	since time.Time
	ahead paid        // to be given back when it is written, which pays again, or not
	party *departures // nil: nobody waits for it
}

// departures are blocks that somebody waits for.
type departures struct {
	all   sync.WaitGroup
	freed atomic.Int64
}

func (u *uploads) init(o *objects) {
	u.o, u.most, u.age, u.kick = o, o.s.opts.UploadBytes, o.s.opts.UploadAge, make(chan struct{}, 1)
}

// add queues blocks of a tier that are to leave it, and takes over the references that are
// held on them. The bytes of those for which there is room count as leaving; the others it
// lets go. With d not nil there is room for all, and who asked waits for d. What was paid
// ahead for a block is given back when it is written or not, at once for one that does not
// wait.
func (u *uploads) add(t *tier, hs []block.Handle, d *departures, ahead map[block.Handle]paid) (queued int64) {
	var rest []block.Handle
	now := time.Now()
	u.mu.Lock()
	for _, h := range hs {
		l := &leaver{parcel: parcel{h: h}, t: t, since: now, party: d}
		u.o.s.table.View(h, func(e *index.Entry) {
			l.bytes, _ = SlotBytes(int64(e.Len))
			l.share = u.o.s.shareIn(t, e.NS)
		})
		if u.mu.closed || d == nil && u.mu.bytes > 0 && u.mu.bytes+l.bytes > u.most {
			rest = append(rest, h)
			continue
		}
		l.ahead = ahead[h]
		delete(ahead, h)
		u.mu.queue = append(u.mu.queue, l)
		u.mu.bytes += l.bytes
		u.mu.blocks++
		queued += l.bytes
		t.leaves(want{l.share, l.bytes}, 1)
		if d != nil {
			d.all.Add(1)
		}
	}
	u.mu.Unlock()
	u.heldBack.Add(int64(len(rest)))
	for _, h := range rest {
		u.o.s.release(h)
	}
	for _, p := range ahead {
		u.o.s.toG4.giveBack(&u.o.s.names, p)
	}
	if queued > 0 {
		select {
		case u.kick <- struct{}{}:
		default:
		}
	}
	return queued
}

// throughLinger is how long blocks that go up as soon as they were put wait for others of
// their sequence.
const throughLinger = 500 * time.Millisecond

// addThrough queues blocks of G2 that stay there, and takes over the references that are held
// on them. Those for which there is no room it lets go.
func (u *uploads) addThrough(hs []block.Handle) {
	var rest []block.Handle
	now := time.Now()
	u.mu.Lock()
	for _, h := range hs {
		l := &leaver{parcel: parcel{h: h}, t: u.o.s.g2, since: now, stays: true}
		u.o.s.table.View(h, func(e *index.Entry) { l.bytes, _ = SlotBytes(int64(e.Len)) })
		if u.mu.closed || u.mu.bytes+l.bytes > u.most {
			rest = append(rest, h)
			continue
		}
		u.mu.through = append(u.mu.through, l)
		u.mu.throughBytes += l.bytes
		u.mu.bytes += l.bytes
		u.mu.blocks++
	}
	switch {
	case u.mu.throughBytes >= objectTarget:
		u.releaseLocked()
	case len(u.mu.through) > 0 && u.mu.pause == nil:
		u.mu.pause = time.AfterFunc(throughLinger, func() {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.releaseLocked()
		})
	}
	u.mu.Unlock()
	u.past.Add(int64(len(rest)))
	for _, h := range rest {
		u.o.s.release(h)
	}
}

// releaseLocked has what waits for others go up.
func (u *uploads) releaseLocked() {
	if u.mu.pause != nil {
		u.mu.pause.Stop()
		u.mu.pause = nil
	}
	if u.mu.closed || len(u.mu.through) == 0 {
		return
	}
	u.mu.queue = append(u.mu.queue, u.mu.through...)
	u.mu.through, u.mu.throughBytes = nil, 0
	select {
	case u.kick <- struct{}{}:
	default:
	}
}

// run has objects written until the store's life ends.
func (u *uploads) run() {
	s := u.o.s
	turns := make(chan struct{}, uploadDepth)
	for {
		select {
		case <-u.kick:
		case <-s.life.Done():
			u.mu.Lock()
			u.mu.closed = true
			left := append(u.mu.queue, u.mu.through...)
			u.mu.queue, u.mu.through = nil, nil
			if u.mu.pause != nil {
				u.mu.pause.Stop()
			}
			u.mu.Unlock()
			u.end(left)
			return
		}
		u.mu.Lock()
		all := u.mu.queue
		u.mu.queue = nil
		u.mu.Unlock()
		for _, t := range s.tiers() {
			u.dispatch(t, all, turns)
		}
	}
}

// dispatch starts the uploads of what is of a tier among all.
func (u *uploads) dispatch(t *tier, all []*leaver, turns chan struct{}) {
	s := u.o.s
	by := map[*parcel]*leaver{}
	var left []*parcel
	var there []*leaver
	for _, l := range all {
		if l.t != t {
			continue
		}
		if l.err = u.o.lookAt(s.life, &l.parcel); l.err != nil || l.e.Flags&flagPacked != 0 {
			there = append(there, l)
			continue
		}
		by[&l.parcel] = l
		left = append(left, &l.parcel)
	}
	u.end(there)
	for _, load := range loads(left) {
		ls := make([]*leaver, len(load))
		for i, p := range load {
			ls[i] = by[p]
		}
		select {
		case turns <- struct{}{}:
		case <-s.life.Done():
			u.end(ls)
			continue
		}
		if time.Since(ls[0].since) > u.age {
			u.aged.Add(int64(len(ls)))
			u.end(ls)
			<-turns
			continue
		}
		s.wg.Go(func() {
			u.o.upload(s.life, t, load)
			u.end(ls)
			<-turns
		})
	}
}

// end has blocks of one tier leave it that G4 has now, or that it will not get: when no bucket
// takes objects, and when their bytes are damaged. The others stay.
func (u *uploads) end(ls []*leaver) {
	s := u.o.s
	// At the store's end nothing leaves for want of a bucket.
	takes := u.o.takes() || s.life.Err() != nil
	var bytes, freed int64
	var out []block.Handle
	for _, l := range ls {
		if l.err != nil && !errors.Is(l.err, block.ErrNotFound) {
			u.failed.Add(1)
		}
		s.release(l.h)
		if l.ahead != (paid{}) {
			s.toG4.giveBack(&s.names, l.ahead)
		}
		switch goes := !l.stays && (l.e.Flags&flagPacked != 0 || !takes || errors.Is(l.err, block.ErrCorrupt)); {
		case goes && l.party != nil:
			n := s.drop(l.t, []block.Handle{l.h})
			l.party.freed.Add(n)
			freed += n
		case goes:
			out = append(out, l.h)
		}
		bytes += l.bytes
	}
	if len(out) > 0 {
		freed += s.drop(ls[0].t, out) // all are of one tier
	}
	for _, l := range ls {
		if !l.stays {
			l.t.leaves(want{l.share, l.bytes}, -1)
		}
		if l.party != nil {
			l.party.all.Done()
		}
	}
	u.mu.Lock()
	u.mu.bytes -= bytes
	u.mu.blocks -= int64(len(ls))
	u.mu.Unlock()
	if freed > 0 { // else the evictor looks again by itself, after a while
		for _, t := range s.tiers() {
			t.wake()
		}
	}
}

func (u *uploads) stats() *block.UploadStats {
	u.mu.Lock()
	defer u.mu.Unlock()
	return &block.UploadStats{
		Blocks: u.mu.blocks, Bytes: u.mu.bytes, HeldBack: u.heldBack.Load(), Dropped: u.aged.Load(), Through: u.past.Load(), Failed: u.failed.Load(),
	}
}
