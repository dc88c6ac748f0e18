package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// scrubRate is how fast a scrub reads when nobody says otherwise.
	scrubRate = 64 << 20
	// scrubSave is how often it writes down how far it is.
	scrubSave = 5 * time.Second
	// scrubErrors is how many blocks in a row may be unreadable before it ends: then
	// it is the device, not the blocks.
	scrubErrors = 16
)

// scrubber is the scrub of a store: one goroutine at most, which goes over the
// slabs from extent to extent. What is written behind it while it runs is not
// looked at: it is fresh.
type scrubber struct {
	mu struct {
		sync.Mutex
		rec  index.ScrubRecord
		stop context.CancelFunc
		done chan struct{} // of the run that is under way; nil: none
	}
}

// StartScrub starts a scrub in the background; see api.Store.
func (s *Store) StartScrub(o block.ScrubOptions) error {
	if o.BytesPerSecond < 0 {
		return fmt.Errorf("scrub: %w: %d bytes per second", block.ErrInvalid, o.BytesPerSecond)
	}
	if s.g3 == nil {
		return fmt.Errorf("scrub: %w: this store has no NVMe tier", block.ErrUnavailable)
	}
	if o.BytesPerSecond == 0 {
		o.BytesPerSecond = scrubRate
	}
	ctx, rec, err := s.scrubs.begin(s.life, o.Restart)
	if err != nil {
		return fmt.Errorf("scrub: %w", err)
	}
	if err := s.catalog.PutScrubState(rec); err != nil {
		s.scrubs.end(func(r *index.ScrubRecord) { r.State = block.ScrubStopped })
		return fmt.Errorf("scrub: %w", err)
	}
	s.wg.Go(func() { s.runScrub(ctx, o.BytesPerSecond) })
	return nil
}

// begin makes room for one run, whose context is ctx's until it ends, and returns
// the record to begin with.
func (b *scrubber) begin(ctx context.Context, restart bool) (context.Context, index.ScrubRecord, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	rec := &b.mu.rec
	if b.mu.done != nil {
		return nil, *rec, fmt.Errorf("%w: one is running", block.ErrUnavailable)
	}
	if ctx.Err() != nil {
		return nil, *rec, block.ErrClosed
	}
	if restart || rec.State == block.ScrubDone || rec.State == block.ScrubNever {
		*rec = index.ScrubRecord{Started: time.Now()}
	}
	rec.State, rec.Ended, rec.Error = block.ScrubRunning, time.Time{}, ""
	ctx, b.mu.stop = context.WithCancel(ctx)
	b.mu.done = make(chan struct{})
	return ctx, *rec, nil
}

// end ends the run that is under way.
func (b *scrubber) end(change func(r *index.ScrubRecord)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.mu.rec)
	b.mu.stop()
	close(b.mu.done)
	b.mu.done = nil
}

// StopScrub ends the scrub; see api.Store.
func (s *Store) StopScrub() {
	s.scrubs.mu.Lock()
	stop, done := s.scrubs.mu.stop, s.scrubs.mu.done
	s.scrubs.mu.Unlock()
	if done != nil {
		stop()
		<-done
	}
}

// resumeScrub goes on with a scrub that was running when the store was closed.
func (s *Store) resumeScrub() error {
	rec, ok, err := s.catalog.ScrubState()
	if err != nil || !ok {
		return err
	}
	s.scrubs.mu.rec = rec
	if rec.State != block.ScrubRunning {
		return nil
	}
	s.scrubs.mu.rec.State = block.ScrubStopped
	if s.g3 == nil {
		return nil
	}
	return s.StartScrub(block.ScrubOptions{})
}

// scrubStatus tells how far the scrub is.
func (s *Store) scrubStatus() block.ScrubStatus {
	s.scrubs.mu.Lock()
	defer s.scrubs.mu.Unlock()
	r := &s.scrubs.mu.rec
	st := block.ScrubStatus{
		State: r.State, Started: r.Started, Ended: r.Ended, Done: r.Done, Blocks: r.Blocks, Damaged: r.Damaged,
		Repaired: r.Repaired, Dropped: r.Dropped, Stale: r.Stale, Error: r.Error,
	}
	if s.g3 != nil {
		for _, d := range s.g3.devs {
			st.Total += d.slab.DataBytes()
		}
	}
	return st
}

// runScrub is one run of the scrub, to its end or until ctx ends.
func (s *Store) runScrub(ctx context.Context, rate int64) {
	err := s.scrub(ctx, &pacer{rate: rate})
	s.scrubs.mu.Lock()
	rec := s.scrubs.mu.rec
	s.scrubs.mu.Unlock()
	switch {
	case err == nil:
		rec.State, rec.Ended = block.ScrubDone, time.Now()
	case s.life.Err() != nil:
		// It stays running, and goes on when the store is opened again.
	case ctx.Err() != nil:
		rec.State, rec.Ended = block.ScrubStopped, time.Now()
	default:
		rec.State, rec.Ended, rec.Error = block.ScrubFailed, time.Now(), err.Error()
	}
	if err := s.catalog.PutScrubState(rec); err != nil {
		s.log.Warn("the state of the scrub is not kept", "err", err)
	}
	s.log.Info("scrub ended", "state", rec.State.String(), "blocks", rec.Blocks, "damaged", rec.Damaged,
		"repaired", rec.Repaired, "dropped", rec.Dropped, "stale", rec.Stale, "err", rec.Error)
	s.scrubs.end(func(r *index.ScrubRecord) { *r = rec })
}

// scrub goes over the slabs from where the record says.
func (s *Store) scrub(ctx context.Context, pace *pacer) error {
	w, err := s.newWalker(ctx, pace)
	if err != nil {
		return err
	}
	defer w.close()
	saved := time.Now()
	for i, d := range s.scrubFrom() {
		from := int64(0)
		if i == 0 {
			from = s.scrubOffset(d)
		}
		if err := w.release(d); err != nil {
			return err
		}
		for off := from; off < d.slab.DataBytes(); off += d.slab.ExtentBytes() {
			err := w.extent(d, int(off/d.slab.ExtentBytes()))
			if err == nil {
				err = w.judge(d)
			}
			if err != nil {
				return err
			}
			rec := s.scrubAt(d, off+d.slab.ExtentBytes(), w)
			if time.Since(saved) > scrubSave {
				saved = time.Now()
				if err := s.catalog.PutScrubState(rec); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// scrubFrom are the devices that the scrub has not gone over, in the order of
// their identities, which stays when devices are reordered.
func (s *Store) scrubFrom() []*device {
	devs := s.scrubOrder()
	s.scrubs.mu.Lock()
	defer s.scrubs.mu.Unlock()
	for i, d := range devs {
		if d.slab.ID() == SlabID(s.scrubs.mu.rec.Slab) {
			return devs[i:]
		}
	}
	return devs
}

func (s *Store) scrubOffset(d *device) int64 {
	s.scrubs.mu.Lock()
	defer s.scrubs.mu.Unlock()
	if d.slab.ID() != SlabID(s.scrubs.mu.rec.Slab) {
		return 0
	}
	return s.scrubs.mu.rec.Offset
}

// scrubAt notes that the scrub is through with a device up to an offset, and
// what the walker has found since the last time.
func (s *Store) scrubAt(d *device, off int64, w *walker) index.ScrubRecord {
	s.scrubs.mu.Lock()
	defer s.scrubs.mu.Unlock()
	r := &s.scrubs.mu.rec
	off = min(off, d.slab.DataBytes())
	if d.slab.ID() != SlabID(r.Slab) {
		r.Slab, r.Offset = d.slab.ID(), 0
	}
	r.Done += off - r.Offset
	r.Offset = off
	r.Blocks += w.blocks
	r.Damaged += w.damaged
	r.Repaired += w.repaired
	r.Dropped += w.dropped
	r.Stale += w.stale
	w.counts = counts{}
	return *r
}

// block reads one block and compares it. What is damaged is written anew when G2
// has the right bytes, else it is dropped. What cannot be read is judged later.
func (w *walker) block(d *device, h block.Handle, place block.Place) error {
	s := w.s
	e, held := w.hold(h, place)
	if !held {
		return nil // it has left since
	}
	defer s.release(h)
	size, header := SlotBytes(int64(e.Len))
	if err := w.pace.wait(w.ctx, size); err != nil {
		return err
	}
	err := s.readG3(w.ctx, h, &e, w.buf[:header], w.buf[header:size], nil)
	w.blocks++
	switch {
	case err == nil:
		w.errors = 0
	case w.ctx.Err() != nil:
		return err
	case errors.Is(err, block.ErrNotFound):
		// deleted meanwhile, and its header erased
	case errors.Is(err, block.ErrCorrupt):
		w.renew(h, &e)
	default:
		if w.errors++; w.errors >= scrubErrors {
			return err
		}
		w.unread = append(w.unread, unreadable{h, place, e.Gen, err})
	}
	return nil
}

// renew has a block that was dropped from G3 written anew, if G2 or G4 has it. One that
// stays in G4 only, since it could not come up, is not dropped. The caller holds a
// reference.
func (w *walker) renew(h block.Handle, e *index.Entry) {
	w.damaged++
	far := false
	ok := w.inG2(h, e) && w.s.copyTo(w.ctx, w.s.g3, []block.Handle{h})[0] == nil
	if !ok {
		ok, far = w.fromG4(e)
	}
	switch {
	case ok:
		w.repaired++
	case !far:
		w.dropped++
	}
}

// fromG4 brings a block up from G4 and writes it to G3. far is whether G4 has it.
func (w *walker) fromG4(e *index.Entry) (ok, far bool) {
	o := w.s.objects
	if o == nil {
		return false, false
	}
	k := block.Key{NS: e.NS, Hash: e.Hash}
	if r, why, _ := o.find(w.ctx, k); why != block.Hit || r.Sum != e.Sum {
		return false, false
	}
	if f := o.start(w.ctx, k, nil); f != nil {
		if f.await(w.ctx) == nil {
			ok = w.s.copyTo(w.ctx, w.s.g3, []block.Handle{f.h})[0] == nil
		}
		o.leave(f)
	}
	o.settled(w.ctx, k) // a copy that is damaged too is dropped after it was read
	_, why, _ := o.find(w.ctx, k)
	return ok, why == block.Hit
}

// inG2 reports whether G2 has the right bytes of a block that is referenced.
func (w *walker) inG2(h block.Handle, e *index.Entry) (ok bool) {
	var place block.Place
	w.s.table.View(h, func(now *index.Entry) {
		place, ok = now.Place[ixG2], live(now, ixG2)
	})
	return ok && w.s.intact(place, e)
}

// pacer keeps what is read below a rate.
type pacer struct {
	rate int64 // bytes per second
	next time.Time
}

// wait returns when n more bytes may be read, or with ctx's error.
func (p *pacer) wait(ctx context.Context, n int64) error {
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	pause := p.next.Sub(now)
	p.next = p.next.Add(time.Duration(float64(n) / float64(p.rate) * float64(time.Second)))
	if pause <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
