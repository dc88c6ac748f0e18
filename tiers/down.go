package tiers

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/xfer"
)

// writeG3 writes claimed blocks from G2 to one device of G3: header and payload in
// one write from one piece of memory, then the flush and the record. Only then are
// they resident there. Where others can write to the memory each block is checked while
// the next are on their way: what they have spoiled goes no further.
func (s *Store) writeG3(d *device, jobs []*job) {
	local := xfer.DescList{Type: xfer.DRAM}
	remote := xfer.DescList{Type: d.kind}
	for _, j := range jobs {
		j.gen = s.gen.Add(1)
		j.note = d.slab.Failures()
		s.toG3.charge(j.e.NS, &s.names, j.size, 0)
		mem := s.g2.slot(j.e.Place[ixG2], j.size)
		_, header := SlotBytes(int64(j.e.Len))
		s.encode(mem[:header], j)
		local.Descs = append(local.Descs, s.g2.memDesc(j.e.Place[ixG2], 0, j.size))
		remote.Descs = append(remote.Descs, s.g3.fileDesc(j.place, 0, j.size))
	}
	s.transfer(s.life, xfer.Write, local, remote, func(i int, err error) {
		switch j := jobs[i]; {
		case err != nil:
			j.err = fmt.Errorf("write to g3: %w: %w", block.ErrUnavailable, err)
		case s.exposed(j.e.Place[ixG2]) && !s.intact(j.e.Place[ixG2], &j.e):
			j.err = fmt.Errorf("write to g3: %w: the block was spoiled in g2", block.ErrCorrupt)
		}
	})
	invariants.CrashAt("g3-written")
	var fins sync.WaitGroup
	for _, j := range jobs {
		if j.err == nil {
			fins.Add(1)
			s.record(j, fins.Done)
		}
	}
	fins.Wait()
	for _, j := range jobs {
		// Until gone is closed the error is the committer's.
		if j.gone == nil && j.err != nil && !j.late { // it has no record
			s.table.Update(j.h, func(e *index.Entry) { s.forsake(j, e) })
		}
	}
	for _, j := range jobs {
		if j.gone != nil {
			<-j.gone
			if j.left != nil {
				j.err = errors.Join(j.err, j.left)
			}
		}
		if j.err != nil {
			s.unclaim(s.g3, j)
		}
		if errors.Is(j.err, block.ErrCorrupt) {
			s.damagedG2(j.h, &j.e)
		}
	}
}

// record queues the catalog record of a written block under the shard's lock,
// and makes the block resident in G3 once it is committed.
func (s *Store) record(j *job, done func()) {
	e := j.e
	e.Place[ixG3], e.Gen = j.place, j.gen
	rec := s.newRecord(&e)
	rec.Parent, rec.HasParent = s.parentHash(&e)
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
		rec.Pinned = isPinned(e)
		e.Place[ixG3], e.Gen = j.place, j.gen
		e.Flags |= flagRecording
		e.Ops++
		s.commits.add(catalogOp{put: rec, trace: &j.m.trace, dev: int(j.place.Device()), note: j.note, fin: func(err error) {
			s.settle(j.h, func(e *index.Entry) {
				e.Ops--
				e.Flags &^= flagRecording
				if err = s.seat(j, e, err); err == nil {
					s.pinRecord(e, rec)
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

// newRecord is the record of a block in G3 as an entry says, but for what the entry
// does not know: its parent's hash and the epoch of its namespace.
func (s *Store) newRecord(e *index.Entry) *index.Record {
	p := e.Place[ixG3]
	return &index.Record{
		Key: block.Key{NS: e.NS, Hash: e.Hash}, HashLen: int(e.HashLen), Sum: e.Sum, Len: e.Len,
		Slab: s.slabNo[p.Device()], Offset: p.Offset(), Slot: uint32(s.g3.class(p)), Gen: e.Gen,
		Expires: int64(e.Expires), Pinned: isPinned(e),
	}
}

// seat makes a committed block resident in G3, unless its record failed. When it
// was deleted while its record was on the way, the drop of that record is queued
// behind it, and until that is synced the slot may not be used again: it is freed
// with the entry.
func (s *Store) seat(j *job, e *index.Entry, failed error) error {
	switch {
	case e.Flags&flagDeleted != 0:
		e.State[ixG3], j.late = index.SlotLeaving, true
		return fmt.Errorf("copy to g3: %w: deleted meanwhile", block.ErrNotFound)
	case failed != nil:
		s.forsake(j, e)
		return failed
	}
	e.Flags &^= flagTentative
	e.State[ixG3] = index.SlotResident
	s.arrive(j.h, e, ixG3, j.above)
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
		hd.Digest, hd.Epoch = ns.digest, j.epoch
	}
	hd.Parent, hd.HasParent = s.parentHash(&j.e)
	EncodeHeader(dst, &hd, s.g3.devs[j.place.Device()].slab.Seal(j.place.Offset()))
}
