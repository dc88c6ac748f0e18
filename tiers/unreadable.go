package tiers

import (
	"context"
	"errors"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer"
)

// What a device cannot read may be lost for good, a sector, or away for a while, a
// path or a part of the device. A scrub tells them apart: a block is lost when it
// cannot be read again and again and all around it can. Then it is dropped, so that it
// is put anew, and not missed for ever. Its slot is nobody's until it has been written
// and read again: handed out as it is it would lose the next block.

const (
	// unreadableTries is how often a block is read again, with Options.ProbeEvery
	// between.
	unreadableTries = 3
	// unreadableMost is how many blocks of an extent may be lost to single sectors:
	// with more the extent is away.
	unreadableMost = 64
)

// unreadable is a block that could not be read.
type unreadable struct {
	h     block.Handle
	place block.Place
	gen   uint64
	err   error // of the last try
}

// judge decides on the blocks of an extent that could not be read.
func (w *walker) judge(d *device) error {
	left := w.unread
	w.unread = nil
	if len(left) > unreadableMost {
		return w.keep(d, left, "so many in one extent cannot be read")
	}
	for range unreadableTries {
		if len(left) == 0 {
			return nil
		}
		select {
		case <-time.After(w.s.opts.ProbeEvery):
		case <-w.ctx.Done():
			return context.Cause(w.ctx)
		}
		still := left[:0]
		for _, u := range left {
			near, err := w.near(d, u.place)
			if err != nil {
				return err
			}
			if !near {
				still = append(still, u) // the next try may find the device well
				continue
			}
			if u.err = w.again(d, &u); u.err != nil {
				still = append(still, u)
			}
		}
		left = still
	}
	var kept []unreadable
	for _, u := range left {
		near, err := w.near(d, u.place)
		if err != nil {
			return err
		}
		if !near {
			kept = append(kept, u)
			continue
		}
		w.lost(d, &u)
	}
	if len(kept) > 0 {
		if err := w.keep(d, kept, "what is around them cannot be read either"); err != nil {
			return err
		}
	}
	// What was dropped is in quarantine when the drop of its record is synced.
	done := make(chan struct{})
	w.s.commits.add(catalogOp{fin: func(error) { close(done) }})
	select {
	case <-done:
		return w.release(d)
	case <-w.ctx.Done():
		return context.Cause(w.ctx)
	}
}

// keep leaves blocks where they are: they are misses until the device is well.
func (w *walker) keep(d *device, us []unreadable, why string) error {
	w.damaged += int64(len(us))
	w.s.log.Warn("scrub: blocks cannot be read, and stay", "blocks", len(us), "slab", d.slab.Path(),
		"offset", us[0].place.Offset(), "why", why, "err", us[0].err)
	return w.ctx.Err()
}

// hold takes a reference on a block, if it is in G3 at a place still.
func (w *walker) hold(h block.Handle, place block.Place) (e index.Entry, held bool) {
	w.s.table.Update(h, func(now *index.Entry) {
		if held = live(now, ixG3) && now.Place[ixG3] == place; held {
			now.Refs++
			e = *now
		}
	})
	return e, held
}

// again reads a block again and returns why it cannot be read; nil when it can, or is
// gone.
func (w *walker) again(d *device, u *unreadable) error {
	e, held := w.hold(u.h, u.place)
	if !held || e.Gen != u.gen {
		if held {
			w.s.release(u.h)
		}
		return nil
	}
	defer w.s.release(u.h)
	size, header := SlotBytes(int64(e.Len))
	if err := w.pace.wait(w.ctx, size); err != nil {
		return err
	}
	err := w.s.readG3(w.ctx, u.h, &e, w.buf[:header], w.buf[header:size], nil)
	switch {
	case errors.Is(err, block.ErrNotFound):
		return nil
	case errors.Is(err, block.ErrCorrupt): // it can be read, and has been dropped
		w.renew(u.h, &e)
		return nil
	}
	return err
}

// lost drops a block, unless G2 has it to write it anew.
func (w *walker) lost(d *device, u *unreadable) {
	e, held := w.hold(u.h, u.place)
	if !held {
		return
	}
	defer w.s.release(u.h)
	if e.Gen == u.gen {
		w.s.loseG3(u.h, &e, block.Unreadable, u.err)
		w.renew(u.h, &e)
	}
}

// near reports whether what lies around a slot can be read: pages right before and
// behind it, and one farther away to each side. One of four may be another bad
// sector. That they cannot be read does not make the device any sicker than it is,
// since it was not asked for them; that they can is a success among the failures. It
// fails with ctx's error only.
func (w *walker) near(d *device, p block.Place) (bool, error) {
	const page = largeHeaderBytes
	if d.rank() == rankDown {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(w.ctx, w.s.opts.StallAfter)
	defer cancel()
	begin, end := p.Offset(), p.Offset()+w.s.g3.class(p)
	tried, bad := 0, 0
	for _, at := range []int64{begin - page, begin - sweepStep, end + page - 1, end + sweepStep} {
		if at &^= page - 1; at < 0 || at+page > d.slab.DataBytes() {
			continue
		}
		tried++
		if w.s.probePages(ctx, xfer.Read, d, w.buf[:page], d.base+uint64(at)) != nil {
			bad++
		}
	}
	if w.ctx.Err() != nil {
		return false, context.Cause(w.ctx)
	}
	if tried < 2 || 4*bad > tried {
		return false, nil
	}
	d.health.end(d.health.enter())
	return true, nil
}

// quarantine keeps a slot that is nobody's any more from being handed out.
func (t *tier) quarantine(p block.Place) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.devs[p.Device()]
	d.slots.SetOwner(p.Offset(), reserved)
	if d.bad == nil {
		d.bad = map[int64]int64{}
	}
	d.bad[p.Offset()] = d.slots.Class(p.Offset())
	t.roomLocked() // who waits for the block to be gone looks again
}

// badBytes is what the slots in quarantine take.
func (t *tier) badBytes(d *device) (n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, class := range d.bad {
		n += class
	}
	return n
}

// release gives back the slots of a device in quarantine that can be written and
// read again.
func (w *walker) release(d *device) error {
	t := w.s.g3
	t.mu.Lock()
	mine := d.bad // for as long as it takes no other walker looks at them
	d.bad = nil
	t.mu.Unlock()
	for off, class := range mine {
		if w.ctx.Err() == nil {
			err := w.blank(d, off, class)
			if err == nil {
				t.free(block.PlaceAt(d.number, off))
				continue
			}
			w.s.log.Warn("slot is left out: it cannot be written and read", "slab", d.slab.Path(), "offset", off, "bytes", class, "err", err)
		}
		t.quarantine(block.PlaceAt(d.number, off))
	}
	return context.Cause(w.ctx)
}

// blank writes zeros over a slot that is nobody's, and reads them again.
func (w *walker) blank(d *device, off, n int64) error {
	for at := off; at < off+n; at += sweepStep {
		part := min(sweepStep, off+n-at)
		clear(w.buf[:part])
		if err := w.move(xfer.Write, d, []int64{at}, part); err != nil {
			return err
		}
	}
	if err := d.slab.Flush(); err != nil {
		return err
	}
	for at := off; at < off+n; at += sweepStep {
		part := min(sweepStep, off+n-at)
		if err := w.read(d, []int64{at}, part); err != nil {
			return err
		}
		if !allZero(w.buf[:part]) {
			return block.ErrCorrupt
		}
	}
	return nil
}
