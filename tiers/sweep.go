package tiers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// A header without a record stands for a block that has left, or that was never
// answered. Where a record is dropped the header is invalidated behind it; but a
// crash may come between, or find a block written and not recorded. Such a
// header does no harm until the catalog is lost: then a repair would take it for
// a block, also when it was deleted since, but for a tombstone that the delete has
// left. So after a stop that was not in order, all room that no record claims is
// swept of headers; then no tombstone is needed any more.
//
// They can lie anywhere in it: an extent gets slots of other sizes when it was
// empty, and a block is not always as long as its slot. So the sweep reads all but
// the bytes of blocks, and takes slots only for what they are when it has found
// something.

const (
	sweepRate  = 256 << 20             // bytes per second
	sweepStep  = 1 << 20               // bytes read at a time
	sweepPause = 10 * time.Millisecond // before room that is being written is looked at again
	sweepTries = 1000                  // so often; who uses a slot that should be free may do so for long

	maxSweepPause = time.Hour // between sweeps that fail
)

// keepSwept sweeps when there may be something to sweep, until the store's life
// ends: after a stop that was not in order, on a slab that was not here at the last
// one, and when a header could not be erased since. With it go the slots in
// quarantine. A device that is down is waited for, and keeps no other from being swept.
func (s *Store) keepSwept() {
	pause := s.opts.SweepAfter
	for {
		select {
		case <-time.After(pause):
		case <-s.life.Done():
			return
		}
		found, swept, err := s.sweep()
		if swept {
			s.commits.add(catalogOp{lifts: true, keep: true})
			s.log.Info("free room is swept of old headers", "found", found)
		}
		switch {
		case err == nil:
			pause = s.opts.SweepAfter
		case s.life.Err() == nil:
			pause = min(2*pause, maxSweepPause)
			s.log.Warn("free room is not swept of old headers to the end", "again in", pause, "err", err)
		}
	}
}

// unsweep has all slabs swept that are here.
func (s *Store) unsweep() {
	if s.g3 == nil {
		return
	}
	for _, d := range s.g3.devs {
		d.unswept.Store(true)
	}
}

// sweep invalidates all headers in room that no record claims, on the devices that
// are unswept and not down, and says whether there was one that is swept now.
func (s *Store) sweep() (found int64, swept bool, err error) {
	var due []*device
	for _, d := range s.scrubOrder() {
		if unclean := &s.commits.unclean[d.number]; unclean.Load() {
			d.unswept.Store(true) // first: at no moment is it neither
			unclean.Store(false)
		}
		if (d.unswept.Load() || s.g3.badBytes(d) > 0) && d.rank() != rankDown {
			due = append(due, d)
		}
	}
	if len(due) == 0 {
		return 0, false, nil
	}
	w, err := s.newWalker(s.life, &pacer{rate: sweepRate})
	if err != nil {
		return 0, false, err
	}
	defer w.close()
	for _, d := range due {
		e := w.release(d)
		if e == nil && d.unswept.Load() {
			if e = w.sweep(d); e == nil {
				d.unswept.Store(false)
				swept = true
			}
		}
		if n := s.g3.badBytes(d); e == nil && n > 0 {
			e = fmt.Errorf("%w: %d bytes in slots that cannot be written and read", block.ErrUnavailable, n)
		}
		if e != nil {
			err = errors.Join(err, fmt.Errorf("sweep slab %s: %w", d.slab.Path(), e))
		}
	}
	return w.stale, swept, err
}

// sweep sweeps one device.
func (w *walker) sweep(d *device) error {
	for e := range d.extents() {
		if err := w.sweepExtent(d, e); err != nil {
			return err
		}
	}
	return d.slab.Flush()
}

// sweepExtent invalidates the headers in one extent that are no block's. What is
// written meanwhile needs no sweep: who writes a header sees to its end.
func (w *walker) sweepExtent(d *device, e int) error {
	for try := 1; ; try++ {
		busy := false
		for _, r := range w.s.unclaimed(d, e) {
			for at := r.from; at < r.to; at += sweepStep {
				part, err := w.sweepPart(d, at, min(sweepStep, r.to-at))
				if err != nil {
					return err
				}
				busy = busy || part
			}
		}
		if !busy {
			return w.ctx.Err()
		}
		if try == sweepTries {
			return fmt.Errorf("%w: there are headers in slots that are in use still", block.ErrUnavailable)
		}
		select {
		case <-time.After(sweepPause):
		case <-w.ctx.Done():
			return context.Cause(w.ctx)
		}
	}
}

// extentRange is a part of an extent, in offsets on the device.
type extentRange struct{ from, to int64 }

// unclaimed is what of an extent is no committed block's bytes.
func (s *Store) unclaimed(d *device, e int) (rs []extentRange) {
	add := func(from, to int64) {
		if n := len(rs); n > 0 && rs[n-1].to == from {
			rs[n-1].to = to
		} else if from < to {
			rs = append(rs, extentRange{from, to})
		}
	}
	s.g3.mu.Lock()
	class, owners := d.slots.Extent(e)
	s.g3.mu.Unlock()
	at := int64(e) * d.slab.ExtentBytes()
	end := min(at+d.slab.ExtentBytes(), d.slab.DataBytes())
	for _, h := range owners {
		n := int64(0)
		if h != 0 && h != reserved {
			place := block.PlaceAt(d.number, at)
			s.table.View(h, func(e *index.Entry) { n = blockBytes(e, place) })
		}
		add(at+n, at+class)
		at += class
	}
	add(at, end)
	return rs
}

// blockBytes is how much of the slot at a place a block has written, 0 when it is
// not committed there.
func blockBytes(e *index.Entry, place block.Place) (n int64) {
	if live(e, ixG3) && e.Place[ixG3] == place {
		n, _ = SlotBytes(int64(e.Len))
	}
	return n
}

// sweepPart invalidates the headers in n bytes at off. busy says that there was one
// where somebody may be writing.
func (w *walker) sweepPart(d *device, at, n int64) (busy bool, err error) {
	if err := w.read(d, []int64{at}, n); err != nil {
		return false, err
	}
	var found []int64
	for off := int64(0); off+headerUsed <= n; off += slotUnit {
		if string(w.buf[off:][:len(headerMagic)]) != headerMagic {
			continue
		}
		if _, err := DecodeHeader(w.buf[off:n], d.slab.Seal(at+off)); err == nil {
			found = append(found, at+off)
		}
	}
	for _, off := range found {
		wait, err := w.sweepHeader(d, off)
		if err != nil {
			return false, err
		}
		busy = busy || wait
	}
	return busy, nil
}

// sweepHeader invalidates a header that was found at off, unless it is a block's.
func (w *walker) sweepHeader(d *device, off int64) (busy bool, err error) {
	t := w.s.g3
	e := int(off / d.slab.ExtentBytes())
	room := int64(e) * d.slab.ExtentBytes() // begin of the slot, or of the empty extent
	size := min(d.slab.ExtentBytes(), d.slab.DataBytes()-room)
	var owners []block.Handle // of slots, one of which keeps the room as it is
	t.mu.Lock()
	if class, all := d.slots.Extent(e); class != 0 {
		if i := (off - room) / class; i < int64(len(all)) {
			room, size, owners = room+i*class, class, all[i:i+1]
		} else {
			room, owners = -1, all // behind the last slot
		}
	}
	_, bad := d.bad[room]
	free := room >= 0 && (len(owners) == 0 || owners[0] == 0)
	if free {
		err = d.slots.Take(room, size, reserved)
	}
	t.mu.Unlock()
	switch {
	case err != nil:
		return false, err
	case free:
		defer w.untake(d, room)
		return false, w.erase(d, off)
	case off == room && bad:
		return false, fmt.Errorf("slot at %d: %w", room, errUnerased)
	case off == room:
		return !w.s.sees(owners[0], block.PlaceAt(d.number, room)), nil
	}
	return w.sweepBeside(d, off, room, owners)
}

// sees reports whether the owner of a slot sees to the header at its begin: that is its
// own, or comes there. Of one that leaves the header is being erased; when that fails it
// stays, and the slot is free soon.
func (s *Store) sees(owner block.Handle, place block.Place) (ok bool) {
	if owner != reserved {
		s.table.View(owner, func(e *index.Entry) {
			ok = e.State[ixG3] == index.SlotFilling || live(e, ixG3) && e.Place[ixG3] == place
		})
	}
	return ok
}

// sweepBeside invalidates a header in a slot that is taken, behind the bytes of the
// block that has it; or behind the last slot of an extent, then room is -1. A slot
// comes free only behind what is queued while its block is committed, so the room
// stays what it is until the header is erased. busy says that no block is
// committed there now.
func (w *walker) sweepBeside(d *device, off, room int64, owners []block.Handle) (busy bool, err error) {
	for _, h := range owners {
		if h == 0 || h == reserved {
			continue
		}
		var queued, inside bool
		done := make(chan error, 1)
		w.s.table.Update(h, func(e *index.Entry) {
			p := e.Place[ixG3]
			switch {
			case !live(e, ixG3) || p.Device() != d.number || p.Offset()/d.slab.ExtentBytes() != off/d.slab.ExtentBytes():
			case room >= 0 && p.Offset() != room:
			case room >= 0 && off < room+blockBytes(e, p):
				inside = true
			default:
				queued = true
				w.s.commits.add(eraseAt(d, off, done))
			}
		})
		switch {
		case inside:
			return false, nil // written since it was found
		case queued:
			return false, w.erased(<-done)
		}
	}
	return true, nil
}
