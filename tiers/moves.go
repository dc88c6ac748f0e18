package tiers

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// Moving is one verb: copy a block to a tier, then commit it there. Offload,
// onboard, prefetch, drain and a durable put all end in copyTo.

// moves are the copies under way, one flight per block and tier.
type moves struct {
	mu struct {
		sync.Mutex
		m map[moveKey]*move
		// doomed are the flights to G3 of blocks that were removed meanwhile: what
		// they write is still to be erased.
		doomed map[block.Key][]*move
	}
}

type moveKey struct {
	h  block.Handle
	to int
}

type move struct {
	done  chan struct{}
	err   error         // valid when done is closed
	key   block.Key     // of one that is doomed
	lost  chan struct{} // closed when the medium goes down while the copy is under way
	why   error         // valid when lost is closed
	rise  rise          // of a copy to G2
	trace trace         // of the record of a copy to G3
}

func (m *moves) init() {
	m.mu.m = map[moveKey]*move{}
	m.mu.doomed = map[block.Key][]*move{}
}

// join finds the flight of a block to a tier, or starts one.
func (m *moves) join(k moveKey) (v *move, won bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v := m.mu.m[k]; v != nil {
		return v, false
	}
	v = &move{done: make(chan struct{}), lost: make(chan struct{})}
	m.mu.m[k] = v
	return v, true
}

// doom notes that the block of a flight to G3 was removed. The caller holds the
// lock of the block's shard.
func (m *moves) doom(h block.Handle, k block.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v := m.mu.m[moveKey{h, ixG3}]; v != nil {
		v.key = k
		m.mu.doomed[k] = append(m.mu.doomed[k], v)
	}
}

// traceOf is the trace of the copy of a block to G3 whose record is queued. The
// caller holds the lock of the block's shard.
func (m *moves) traceOf(h block.Handle) *trace {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &m.mu.m[moveKey{h, ixG3}].trace
}

// doomed are the flights of a key that are.
func (m *moves) doomed(k block.Key) []*move {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mu.doomed[k])
}

func (m *moves) leave(k moveKey, v *move) {
	m.mu.Lock()
	delete(m.mu.m, k)
	if rest := slices.DeleteFunc(m.mu.doomed[v.key], func(o *move) bool { return o == v }); len(rest) > 0 {
		m.mu.doomed[v.key] = rest
	} else {
		delete(m.mu.doomed, v.key)
	}
	m.mu.Unlock()
}

// job is one block of a copy.
type job struct {
	h     block.Handle
	m     *move
	e     index.Entry // as it was when it was claimed
	above block.Hash  // of its parent, if it has one
	place block.Place // in the new tier
	size  int64       // that header, payload and padding take
	class int64       // of the slot, which may be larger
	err   error
	gen   uint64
	late  bool          // deleted while its record was on the way: the slot is the deletion's to free
	epoch uint32        // of the namespace, when it was claimed
	note  uint64        // Slab.Failures before the write
	gone  chan struct{} // closed when what was written is erased; see forsake
	left  error         // why it is not, valid when gone is closed
}

// copyTo copies blocks to a tier and commits them there. The caller holds a
// reference on each. It returns one error per block, nil when the tier has the
// block now, and answers when ctx ends or the medium goes down, though the copies
// go on.
func (s *Store) copyTo(ctx context.Context, to *tier, hs []block.Handle) []error {
	if len(hs) == 0 {
		return nil
	}
	errs := make([]error, len(hs))
	for i, m := range s.launch(to, hs) {
		errs[i] = m.await(ctx, to)
	}
	return errs
}

// launch starts the copies of copyTo, but for those that are under way.
func (s *Store) launch(to *tier, hs []block.Handle) []*move {
	flights := make([]*move, len(hs))
	var jobs []*job
	for i, h := range hs {
		m, won := s.moves.join(moveKey{h, to.ix})
		flights[i] = m
		if won {
			// The flight has a reference of its own, since the caller may leave.
			s.known(h, s.table.Update(h, func(e *index.Entry) { e.Refs++ }))
			jobs = append(jobs, &job{h: h, m: m})
		}
	}
	if len(jobs) > 0 {
		s.wg.Go(func() { s.fly(to, jobs) }) // the caller may leave early
	}
	return flights
}

// await says how a copy ended, or why nobody waits for it any more.
func (m *move) await(ctx context.Context, to *tier) error {
	var left error
	select {
	case <-m.done:
	case <-m.lost:
		left = m.why
	case <-ctx.Done():
		left = context.Cause(ctx)
	}
	if m.ended() {
		return m.err
	}
	return fmt.Errorf("copy to %s: %w", to.id, left)
}

func (m *move) ended() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

// fly carries out jobs that were won, those of each device on their own, so that
// one that stalls holds up no other's.
func (s *Store) fly(to *tier, jobs []*job) {
	byDevice := map[*device][]*job{}
	for _, j := range jobs {
		if !s.claim(to, j) {
			s.land(to, j)
			continue
		}
		d := s.g3.devs[j.onG3().Device()]
		byDevice[d] = append(byDevice[d], j)
	}
	var others sync.WaitGroup
	for d, part := range byDevice {
		if len(byDevice) == 1 { // without another goroutine for it
			s.carry(to, d, part)
			return
		}
		others.Go(func() { s.carry(to, d, part) })
	}
	others.Wait()
}

// carry copies claimed blocks to or from one device of G3. Who waits for them is
// told when it goes down; they themselves go on until it answers.
func (s *Store) carry(to *tier, d *device, jobs []*job) {
	up := d.health.up()
	stop := context.AfterFunc(up, func() {
		for _, j := range jobs {
			j.m.why = context.Cause(up)
			close(j.m.lost)
		}
	})
	defer stop()
	if to.ix == ixG3 {
		s.writeG3(d, jobs)
	} else {
		s.readUp(d, jobs)
	}
	for _, j := range jobs {
		s.land(to, j)
	}
}

// land ends the flight of a job.
func (s *Store) land(to *tier, j *job) {
	s.moves.leave(moveKey{j.h, to.ix}, j.m)
	s.release(j.h) // before anybody is told, who may then want nobody to use the block
	j.m.err = j.err
	close(j.m.done)
}

// onG3 is the place in G3 that a claimed job copies to or from.
func (j *job) onG3() block.Place {
	if j.e.State[ixG3] == index.SlotResident {
		return j.e.Place[ixG3]
	}
	return j.place
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
		var room, lost <-chan struct{}
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
				lost = to.devs[e.Place[ixG3].Device()].health.up().Done()
			case !live(e, 1-to.ix):
				j.err = fmt.Errorf("copy to %s: %w: no tier has it", to.id, block.ErrNotFound)
			case full:
				j.err = fmt.Errorf("copy to %s: %w: the file system of %s is full", to.id, block.ErrNoSpace, s.opts.Dir)
			default:
				if to.ix == ixG2 {
					if err := s.g3.devs[e.Place[ixG3].Device()].health.lost(); err != nil {
						j.err = fmt.Errorf("copy to %s: %w", to.id, err)
						return
					}
				}
				e.State[to.ix] = index.SlotFilling
				j.e = *e
				// A clearing that comes later finds the block, and its header is of the
				// old epoch however late it is written.
				if ns, err := s.names.byID(e.NS); err == nil {
					j.epoch = ns.state.Load().Epoch
				}
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
		case <-lost:
			j.err = fmt.Errorf("copy to %s: %w: its old record is still being dropped, and the device is down", to.id, block.ErrUnavailable)
			return false
		case <-s.life.Done():
			j.err = fmt.Errorf("copy to %s: %w", to.id, block.ErrClosed)
			return false
		}
	}
	j.above, _ = s.parentHash(&j.e)
	s.kid(j.e.Parent, to.ix, 1)
	j.size, _ = SlotBytes(int64(j.e.Len))
	j.place, j.err = to.alloc(s.life, s.shareIn(to, j.e.NS), j.size, j.h)
	if j.err != nil {
		s.unclaim(to, j)
		return false
	}
	j.class = to.class(j.place)
	return true
}

// unclaim takes back what claim did, but for the slot.
func (s *Store) unclaim(to *tier, j *job) {
	if !j.late {
		s.table.Update(j.h, func(e *index.Entry) { e.State[to.ix] = index.SlotNone })
	}
	s.kid(j.e.Parent, to.ix, -1)
}
