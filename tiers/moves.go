package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// Moving is one verb: copy a block to a tier, then commit it there. Offload,
// onboard, prefetch, drain and a durable put all end in copyTo.

// moves are the copies under way, one flight per block and tier.
type moves struct {
	mu struct {
		sync.Mutex
		m map[moveKey]*move
	}
}

type moveKey struct {
	h  block.Handle
	to int
}

type move struct {
	done chan struct{}
	err  error // valid when done is closed
}

func (m *moves) init() { m.mu.m = map[moveKey]*move{} }

// join finds the flight of a block to a tier, or starts one.
func (m *moves) join(k moveKey) (v *move, won bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v := m.mu.m[k]; v != nil {
		return v, false
	}
	v = &move{done: make(chan struct{})}
	m.mu.m[k] = v
	return v, true
}

func (m *moves) land(k moveKey, v *move, err error) {
	m.mu.Lock()
	delete(m.mu.m, k)
	m.mu.Unlock()
	v.err = err
	close(v.done)
}

// job is one block of a copy.
type job struct {
	h     block.Handle
	m     *move
	e     index.Entry // as it was when it was claimed
	place block.Place // in the new tier
	size  int64       // that header, payload and padding take
	class int64       // of the slot, which may be larger
	err   error
	gen   uint64
	late  bool // deleted while its record was on the way: the slot is the deletion's to free
}

// copyTo copies blocks to a tier and commits them there. The caller holds a
// reference on each. It returns one error per block, nil when the tier has the
// block now, and answers when ctx ends, though copies that other calls may wait
// for go on.
func (s *Store) copyTo(ctx context.Context, to *tier, hs []block.Handle) []error {
	if len(hs) == 0 {
		return nil
	}
	errs := make([]error, len(hs))
	flights := make([]*move, len(hs))
	var jobs []*job
	for i, h := range hs {
		m, won := s.moves.join(moveKey{h, to.ix})
		flights[i] = m
		if won {
			// The flight has a reference of its own, since the caller may leave.
			s.table.Update(h, func(e *index.Entry) { e.Refs++ })
			jobs = append(jobs, &job{h: h, m: m})
		}
	}
	if len(jobs) > 0 {
		if ctx == s.life || ctx.Done() == nil { // nobody leaves early
			s.fly(to, jobs)
		} else {
			s.wg.Go(func() { s.fly(to, jobs) })
		}
	}
	for i, m := range flights {
		select {
		case <-m.done:
			errs[i] = m.err
		case <-ctx.Done():
			select {
			case <-m.done:
				errs[i] = m.err
			default:
				errs[i] = fmt.Errorf("copy to %s: %w", to.id, context.Cause(ctx))
			}
		}
	}
	return errs
}

// fly carries out jobs that were won.
func (s *Store) fly(to *tier, jobs []*job) {
	var work []*job
	for _, j := range jobs {
		if s.claim(to, j) {
			work = append(work, j)
		}
	}
	if len(work) > 0 {
		if to.ix == ixG3 {
			s.writeG3(work)
		} else {
			s.readUp(work)
		}
	}
	for _, j := range jobs {
		s.moves.land(moveKey{j.h, to.ix}, j.m, j.err)
		s.release(j.h)
	}
}

// claim looks again now that the flight is won, and takes a slot. It reports
// whether there is anything to copy.
func (s *Store) claim(to *tier, j *job) bool {
	full := to.ix == ixG3 && s.catalogRoom.isFull()
	for {
		var failed error // nothing more can be recorded
		if to.ix == ixG3 {
			failed = s.catalog.Err()
		}
		var room <-chan struct{}
		var there bool
		s.table.Update(j.h, func(e *index.Entry) {
			switch {
			case e.Flags&flagDeleted != 0:
				j.err = fmt.Errorf("copy to %s: %w: deleted meanwhile", to.id, block.ErrNotFound)
			case live(e, to.ix):
				there = true
			case failed != nil:
				j.err = fmt.Errorf("copy to %s: %w", to.id, failed)
			case to.ix == ixG2 && e.State[ixG2] == index.SlotLeaving:
				// A damaged copy that somebody uses still, for as long as they like.
				j.err = fmt.Errorf("copy to %s: %w: a damaged copy is in use", to.id, block.ErrNoSpace)
			case e.State[to.ix] == index.SlotLeaving:
				// Its record is being dropped; a new one may only follow that.
				to.mu.Lock()
				room = to.mu.room
				to.mu.Unlock()
			case !live(e, 1-to.ix):
				j.err = fmt.Errorf("copy to %s: %w: no tier has it", to.id, block.ErrNotFound)
			case full:
				j.err = fmt.Errorf("copy to %s: %w: the file system of %s is full", to.id, block.ErrNoSpace, s.opts.Dir)
			default:
				e.State[to.ix] = index.SlotFilling
				j.e = *e
			}
		})
		if there || j.err != nil {
			return false
		}
		if room == nil {
			break
		}
		select {
		case <-room:
		case <-s.life.Done():
			j.err = fmt.Errorf("copy to %s: %w", to.id, block.ErrClosed)
			return false
		}
	}
	s.kid(j.e.Parent, to.ix, 1)
	j.size, _ = SlotBytes(int64(j.e.Len))
	j.place, j.err = to.alloc(s.life, j.size, j.h)
	if j.err != nil {
		s.unclaim(to, j, false)
		return false
	}
	j.class = to.class(j.place)
	return true
}

// unclaim takes back what claim did.
func (s *Store) unclaim(to *tier, j *job, slot bool) {
	if !j.late {
		s.table.Update(j.h, func(e *index.Entry) { e.State[to.ix] = index.SlotNone })
		if slot {
			to.free(j.place)
		}
	}
	s.kid(j.e.Parent, to.ix, -1)
}

// memDesc is the descriptor of n bytes at off in a slot of G2.
func (t *tier) memDesc(p block.Place, off, n int64) xfer.Desc {
	mem := t.devs[p.Device()].mem.Slice(p.Offset()+off, n)
	return xfer.Desc{Addr: arena.Addr(mem), Len: uint64(n)}
}

// fileDesc is the descriptor of n bytes at off in a slot of G3.
func (t *tier) fileDesc(p block.Place, off, n int64) xfer.Desc {
	d := t.devs[p.Device()]
	return xfer.Desc{Dev: uint64(d.number), Addr: d.base + uint64(p.Offset()+off), Len: uint64(n)}
}

// writeG3 writes claimed blocks from G2 to G3: header and payload in one write
// from one piece of memory, then the flush and the record. Only then are they
// resident there.
func (s *Store) writeG3(jobs []*job) {
	for _, part := range s.byKind(jobs) {
		local := xfer.DescList{Type: xfer.DRAM}
		remote := xfer.DescList{Type: part.kind}
		for _, j := range part.jobs {
			j.gen = s.gen.Add(1)
			mem := s.g2.slot(j.e.Place[ixG2], j.size)
			_, header := SlotBytes(int64(j.e.Len))
			s.encode(mem[:header], j)
			local.Descs = append(local.Descs, s.g2.memDesc(j.e.Place[ixG2], 0, j.size))
			remote.Descs = append(remote.Descs, s.g3.fileDesc(j.place, 0, j.size))
		}
		s.transfer(xfer.Write, local, remote, func(i int, err error) {
			if err != nil {
				s.g3.devs[part.jobs[i].place.Device()].sick.Add(1)
				part.jobs[i].err = fmt.Errorf("write to g3: %w: %w", block.ErrUnavailable, err)
			}
		})
	}
	var fins sync.WaitGroup
	for _, j := range jobs {
		if j.err == nil {
			fins.Add(1)
			s.record(j, fins.Done)
		}
	}
	fins.Wait()
	for _, j := range jobs {
		if j.err != nil {
			s.unclaim(s.g3, j, true)
			continue
		}
		s.arrived(s.g3, &j.e)
	}
}

// record queues the catalog record of a written block under the shard's lock,
// and makes the block resident in G3 once it is committed.
func (s *Store) record(j *job, done func()) {
	rec := &index.Record{
		Key: block.Key{NS: j.e.NS, Hash: j.e.Hash}, HashLen: int(j.e.HashLen), Sum: j.e.Sum, Len: j.e.Len,
		Slab: s.slabNo[j.place.Device()], Offset: j.place.Offset(), Slot: uint32(j.class), Gen: j.gen, Expires: int64(j.e.Expires),
	}
	rec.Parent, rec.HasParent = s.parentHash(&j.e)
	// The epoch is read and the record queued while no Clear can come between.
	ns, err := s.names.byID(j.e.NS)
	if err != nil {
		j.err = err
		done()
		return
	}
	ns.gate.RLock()
	defer ns.gate.RUnlock()
	rec.Epoch = ns.state.Load().Epoch
	queued := false
	s.table.Update(j.h, func(e *index.Entry) {
		if e.Flags&flagDeleted != 0 {
			return
		}
		queued = true
		e.Place[ixG3], e.Gen = j.place, j.gen
		e.Ops++
		s.commits.add(catalogOp{put: rec, dev: int(j.place.Device()), fin: func(err error) {
			s.settle(j.h, func(e *index.Entry) {
				e.Ops--
				if err == nil {
					err = s.seat(j, e)
				}
			})
			j.err = err
			done()
		}})
	})
	if !queued {
		j.err = fmt.Errorf("copy to g3: %w: deleted meanwhile", block.ErrNotFound)
		done()
	}
}

// seat makes a committed block resident in G3. When it was deleted while its
// record was on the way, the drop of that record is queued behind it, and until
// that is synced the slot may not be used again: it is freed with the entry.
func (s *Store) seat(j *job, e *index.Entry) error {
	if e.Flags&flagDeleted != 0 {
		e.State[ixG3], j.late = index.SlotLeaving, true
		return fmt.Errorf("copy to g3: %w: deleted meanwhile", block.ErrNotFound)
	}
	e.State[ixG3] = index.SlotResident
	j.e = *e
	s.g3.events.push(policyEvent{kind: evInsert, h: j.h})
	return nil
}

// parentHash is the hash of an entry's parent.
func (s *Store) parentHash(e *index.Entry) (h block.Hash, ok bool) {
	if e.Parent != 0 {
		ok = s.table.View(e.Parent, func(p *index.Entry) { h = p.Hash })
	}
	return h, ok
}

// encode writes the slot header of a job into dst.
func (s *Store) encode(dst []byte, j *job) {
	hd := SlotHeader{
		Hash: j.e.Hash, HashLen: j.e.HashLen, Len: j.e.Len, Slot: uint32(j.class),
		Gen: j.gen, Expires: int64(j.e.Expires), Sum: j.e.Sum,
	}
	if ns, err := s.names.byID(j.e.NS); err == nil {
		hd.Digest, hd.Epoch = ns.digest, ns.state.Load().Epoch
	}
	hd.Parent, hd.HasParent = s.parentHash(&j.e)
	EncodeHeader(dst, &hd)
}

// kindJobs are the jobs whose place is in one kind of medium.
type kindJobs struct {
	kind xfer.MemType
	jobs []*job
}

// byKind sorts jobs by the memory type of their device, since a descriptor list
// has one.
func (s *Store) byKind(jobs []*job) []kindJobs {
	var out []kindJobs
next:
	for _, j := range jobs {
		p := j.place
		if j.e.State[ixG3] == index.SlotResident {
			p = j.e.Place[ixG3]
		}
		kind := s.g3.devs[p.Device()].kind
		for i := range out {
			if out[i].kind == kind {
				out[i].jobs = append(out[i].jobs, j)
				continue next
			}
		}
		out = append(out, kindJobs{kind, []*job{j}})
	}
	return out
}

// transfer runs one request on this goroutine and calls each for its
// descriptors in order, as they complete.
func (s *Store) transfer(op xfer.Op, local, remote xfer.DescList, each func(i int, err error)) {
	fail := func(err error) {
		for i := range local.Descs {
			each(i, err)
		}
	}
	req, err := s.agent.NewRequest(op, local, remote, nil)
	if err != nil {
		fail(err)
		return
	}
	defer req.Release()
	seen := 0
	err = req.Each(s.life, func(i int, err error) error {
		each(i, err)
		seen = i + 1
		return nil
	})
	for ; seen < len(local.Descs); seen++ {
		if err == nil {
			err = errors.New("transfer ended early")
		}
		each(seen, err)
	}
}

// A large slot is read in pieces. When it is the only one, they are small, so
// that one is hashed while the next ones are on their way; when there are others,
// whose transfers go on meanwhile, they are what the device is fastest with.
const (
	smallPiece = 256 << 10
	largePiece = 1 << 20
)

// beginReads counts reads from G3 and says in which pieces to read.
func (s *Store) beginReads(n int) (piece int64) {
	if s.reads.Add(int64(n)) > 1 {
		return largePiece
	}
	return smallPiece
}

func (s *Store) endReads(n int) { s.reads.Add(-int64(n)) }

// readUp reads claimed blocks from G3 into G2, verifies them, and makes them
// resident there.
func (s *Store) readUp(jobs []*job) {
	piece := s.beginReads(len(jobs))
	defer s.endReads(len(jobs))
	for _, part := range s.byKind(jobs) {
		local := xfer.DescList{Type: xfer.DRAM}
		remote := xfer.DescList{Type: part.kind}
		var owner []int // of each descriptor
		for i, j := range part.jobs {
			for off := int64(0); off < j.size; off += piece {
				n := min(piece, j.size-off)
				local.Descs = append(local.Descs, s.g2.memDesc(j.place, off, n))
				remote.Descs = append(remote.Descs, s.g3.fileDesc(j.e.Place[ixG3], off, n))
				owner = append(owner, i)
			}
		}
		checks := make([]check, len(part.jobs))
		for i, j := range part.jobs {
			slot := s.g2.slot(j.place, j.size)
			_, header := SlotBytes(int64(j.e.Len))
			checks[i].begin(s, &j.e, slot[:header], slot[header:])
		}
		s.transfer(xfer.Read, local, remote, func(i int, err error) {
			j, c := part.jobs[owner[i]], &checks[owner[i]]
			if err != nil && j.err == nil {
				j.err = s.readFailure(&j.e, err)
			}
			if j.err == nil {
				j.err = c.piece(local.Descs[i].Len)
			}
		})
	}
	for _, j := range jobs {
		if j.err == nil {
			s.table.Update(j.h, func(e *index.Entry) {
				if e.Flags&flagDeleted != 0 {
					j.err = fmt.Errorf("copy to g2: %w: deleted meanwhile", block.ErrNotFound)
					return
				}
				e.Place[ixG2], e.State[ixG2] = j.place, index.SlotResident
				j.e = *e
				s.g2.events.push(policyEvent{kind: evInsert, h: j.h})
			})
		}
		if j.err != nil {
			s.unclaim(s.g2, j, true)
			if errors.Is(j.err, block.ErrCorrupt) {
				s.damagedG3(j.h, &j.e, j.err)
			}
			continue
		}
		s.arrived(s.g2, &j.e)
	}
}
