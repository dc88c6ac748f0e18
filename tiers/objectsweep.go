package tiers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// A bucket and the catalog may come to say different things: a request that was given up
// arrives late, somebody removes objects by hand, a time to live passes. The sweep of a
// bucket compares the two, and mends it:
//
//   - Blocks whose time has passed are dropped from the catalog.
//   - Objects that this catalog's store wrote and that are not in the catalog are orphans:
//     they are removed. A name says who wrote it, so that no object of another node is
//     judged, whatever this catalog says; and what is being written is in the catalog
//     before it is in the bucket.
//   - Blocks of objects that are not there are dropped from the catalog.
//   - Objects of others that this catalog knew, and in which nothing lives any more, are
//     forgotten; they are removed only when the tombstones and times in the bucket say of
//     all their blocks that they are dead, which is so for every node.
//   - What lives in objects that are half dead goes into new ones: repack.go.
//
// In the background it goes on where it was, also after a restart. What came to be behind
// the place where it is it does not see, and who asks for a sweep is to have seen what
// there was at that time: so a call is answered by one that began later.

const (
	// sweepRequests is how many requests a second a sweep makes.
	sweepRequests = 20
	// sweepObjects is for how many objects of the catalog one sweep looks whether they are
	// there: the next one looks for those behind them.
	sweepObjects = 1 << 18
	// sweepLook is how often it is looked whether a sweep is due.
	sweepLook = time.Minute
	// expireScan is how many records are looked at between two pauses.
	expireScan  = 4096
	expireBatch = 1000
)

// sweeper sweeps the buckets when it is time, until the store's life ends.
func (o *objects) sweeper() {
	look := min(sweepLook, o.s.opts.SweepAfter)
	failed := time.Duration(0)
	for {
		select {
		case <-time.After(max(look, failed)):
		case <-o.s.life.Done():
			return
		}
		look = min(sweepLook, o.s.opts.SweepObjectsEvery)
		o.sweep() // what has rested
		var errs []error
		for _, p := range o.buckets {
			if number, due := p.sweeps.due(o.s.opts.SweepObjectsEvery); due && p.health.rank() != rankDown {
				errs = append(errs, o.sweepBucket(o.s.life, p, number, nil))
			}
		}
		if err := errors.Join(errs...); err == nil {
			failed = 0
		} else if o.s.life.Err() == nil {
			failed = min(max(2*failed, sweepLook), maxSweepPause)
			o.s.log.Warn("sweep of a bucket goes on later", "in", failed, "err", err)
		}
	}
}

// SweepObjects sweeps the buckets of G4 now, and tells how far it is; see api.Store.
func (s *Store) SweepObjects(ctx context.Context, progress func(block.ObjectSweep) error) error {
	if s.objects == nil {
		return fmt.Errorf("sweep objects: %w: this store has no object tier", block.ErrUnavailable)
	}
	var numbers []int
	for _, p := range s.objects.buckets {
		numbers = append(numbers, p.sweeps.next())
	}
	err := apart(ctx, s, progress, func(ctx context.Context, tell func(block.ObjectSweep) error) error {
		for i, p := range s.objects.buckets {
			if err := s.objects.sweepBucket(ctx, p, numbers[i], tell); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("sweep objects: %w", err)
	}
	return nil
}

// bucketSweep is a sweep under way.
type bucketSweep struct {
	o        *objects
	p        *objectBucket
	b        *bucket.Bucket // p's, paced
	ctx      context.Context
	pace     *sharedPacer
	progress func(block.ObjectSweep) error // may be nil
}

// sweepBucket returns when the sweep of a bucket with a number, or a later one, is at its
// end: it begins it, or goes on with it, when nobody else does.
func (o *objects) sweepBucket(ctx context.Context, p *objectBucket, number int, progress func(block.ObjectSweep) error) error {
	select {
	case p.sweeps.turn <- struct{}{}:
		defer func() { <-p.sweeps.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	w := &bucketSweep{o: o, p: p, ctx: ctx, pace: &sharedPacer{p: pacer{rate: sweepRequests}}, progress: progress}
	w.b = p.Through(watched{p, w.pace})
	if p.sweeps.begin(number) {
		return w.tell() // another has brought it to its end meanwhile
	}
	err := w.run()
	switch {
	case err == nil:
		err = w.save(func(r *index.ObjectSweepRecord) { r.Ended = time.Now() })
		r := p.sweeps.get()
		o.s.log.Info("bucket is swept", "bucket", p.health.name, "objects", r.Listed, "orphans", r.Orphans, "missing", r.Missing, "lost", r.Lost,
			"expired", r.Expired, "rewritten", r.Rewritten)
	case ctx.Err() != nil:
		return err
	default:
		_ = w.save(func(r *index.ObjectSweepRecord) { // the first failure is the one to tell
			r.Error = err.Error()
			if !errors.Is(err, bucket.ErrNoAnswer) && !errors.Is(err, block.ErrUnavailable) {
				r.Cursor, r.After = "", "" // it may be what is wrong
			}
		})
	}
	if err != nil {
		return err
	}
	return w.tell()
}

func (w *bucketSweep) tell() error {
	if w.progress == nil {
		return nil
	}
	return w.progress(w.p.sweepStatus())
}

// save changes the record, durably.
func (w *bucketSweep) save(f func(r *index.ObjectSweepRecord)) error {
	return w.o.s.catalog.PutObjectSweep(w.p.sweeps.change(f))
}

func (w *bucketSweep) run() error {
	if err := w.save(func(*index.ObjectSweepRecord) {}); err != nil {
		return err
	}
	for _, step := range []func() error{w.expire, w.compare, w.buryStrangers, w.repack} {
		if err := step(); err != nil {
			return err
		}
		if err := w.tell(); err != nil {
			return err
		}
	}
	return nil
}

// young reports whether what was written at a time is not to be judged yet.
func (w *bucketSweep) young(at time.Time) bool {
	return at.IsZero() || time.Since(at) < w.o.s.opts.ObjectGrace
}

// packedAt is when an object was packed, by its stamp.
func packedAt(stamp uint64) time.Time { return time.Unix(0, int64(min(stamp, 1<<63-1))) }

// expire drops the records of blocks whose time has passed.
func (w *bucketSweep) expire() error {
	for _, ns := range w.o.s.names.all() {
		for after := []byte(nil); ; {
			if err := w.pace.wait(w.ctx, 1); err != nil {
				return err
			}
			now := int64(nowUnix())
			var late []index.PackedRecord
			looked := 0
			err := w.o.s.catalog.ScanPacked(ns.id, after, func(r *index.PackedRecord) error {
				after = append(after[:0], r.Key.Hash[:r.HashLen]...)
				if r.Expires != 0 && r.Expires <= now {
					late = append(late, *r)
				}
				if looked++; looked == expireScan || len(late) == expireBatch {
					return errFull
				}
				return nil
			})
			if err != nil && err != errFull {
				return err
			}
			n, e := w.drop(late, block.Expired)
			if e != nil {
				return e
			}
			w.p.sweeps.change(func(r *index.ObjectSweepRecord) { r.Expired += n })
			if err == nil {
				break
			}
		}
	}
	return nil
}

// drop drops the records of blocks in this bucket's objects, those that are still as they
// were, and says how many.
func (w *bucketSweep) drop(recs []index.PackedRecord, why block.Reason) (n int64, err error) {
	if len(recs) == 0 {
		return 0, nil
	}
	o := w.o
	keys := make([]block.Key, len(recs))
	for i := range recs {
		keys[i] = recs[i].Key
	}
	var out []index.PackedRecord
	unmark := func() {
		for i := range recs {
			o.s.table.UpdateKey(keys[i], func(_ block.Handle, e *index.Entry) { e.Flags &^= flagPacked })
		}
	}
	// Found no more before they are dropped: a copy in a local tier is the last one then.
	o.markLeaving(keys)
	defer o.unmarkLeaving(keys)
	unmark()
	err = o.ledger.do(o.s.life, &change{
		plan: func(v *view) error {
			out = nil
			for i := range recs {
				now, err := v.block(keys[i], recs[i].HashLen)
				if err != nil {
					return err
				}
				if now == nil || now.Object != recs[i].Object || now.Offset != recs[i].Offset {
					continue
				}
				obj, err := v.object(now.Object)
				if err != nil {
					return err
				}
				if obj != nil && obj.Bucket != w.p.no {
					continue
				}
				out = append(out, *now)
				if err := v.drop(now); err != nil {
					return err
				}
			}
			return nil
		},
		applied: func() {
			unmark() // an upload may have marked it since
			for i := range out {
				o.told(&out[i], why)
			}
			o.sweep()
		},
	})
	return int64(len(out)), err
}

// compare lists the bucket, removes orphans, and drops what is not there.
func (w *bucketSweep) compare() error {
	r := w.p.sweeps.get()
	unseen, err := w.known(r.After)
	if err != nil {
		return err
	}
	for cursor := r.Cursor; ; {
		page, last, next, err := w.b.List(w.ctx, cursor)
		if err != nil {
			return err
		}
		var orphans []packed.Name
		var bytes int64
		for _, l := range page {
			_, known := unseen[l.Name.ID]
			delete(unseen, l.Name.ID)
			if known || !w.p.Wrote(l.Name.ID) || w.young(l.Modified) {
				continue
			}
			// Asked now: it was in the catalog before it was in the bucket.
			number := l.Name.ID.Number()
			obj, ok, err := w.o.s.catalog.GetObject(number)
			if err != nil {
				return err
			}
			if ok && obj.ID == l.Name.ID || w.o.busy(number) {
				continue
			}
			orphans = append(orphans, l.Name)
			bytes += l.Bytes
		}
		if len(orphans) > 0 {
			if err := w.b.Remove(w.ctx, orphans); err != nil {
				return err
			}
		}
		cursor = next
		if err := w.save(func(r *index.ObjectSweepRecord) {
			r.Listed += int64(len(page))
			r.Orphans += int64(len(orphans))
			r.OrphanBytes += bytes
			if r.Cursor = next; last != "" {
				r.After = last
			}
			r.Error = ""
		}); err != nil {
			return err
		}
		if err := w.tell(); err != nil {
			return err
		}
		if cursor == "" {
			break
		}
	}
	return w.missing(unseen)
}

// known are the catalog's objects in the bucket whose names come after a key, by their IDs:
// their numbers. Of very many it is a part, another one each time.
func (w *bucketSweep) known(after string) (map[packed.ID]uint64, error) {
	all := map[packed.ID]uint64{}
	scan := func(from uint64, fn func(*index.ObjectRecord) bool) error {
		err := w.o.s.catalog.ScanObjects(from, func(r *index.ObjectRecord) error {
			if r.Bucket == w.p.no && w.o.nameOf(r).String() > after {
				if !fn(r) {
					return errFull
				}
			}
			return nil
		})
		if err == errFull {
			err = nil
		}
		return err
	}
	add := func(r *index.ObjectRecord) bool {
		all[r.ID] = r.Number
		return len(all) < sweepObjects
	}
	from := w.p.sweeps.from
	if err := scan(from, add); err != nil {
		return nil, err
	}
	w.p.sweeps.from = 0
	if len(all) == sweepObjects {
		for _, number := range all {
			w.p.sweeps.from = max(w.p.sweeps.from, number+1)
		}
	}
	return all, nil
}

// missing drops the blocks of objects that are not in the bucket, when the bucket says so
// when it is asked for each, and says that it is the one that it was.
func (w *bucketSweep) missing(unseen map[packed.ID]uint64) error {
	gone := map[uint64]uint64{} // their stamps
	for id, number := range unseen {
		obj, ok, err := w.o.s.catalog.GetObject(number)
		if err != nil {
			return err
		}
		if !ok || obj.ID != id || obj.Live == 0 || w.o.busy(number) || w.young(packedAt(obj.Stamp)) {
			continue
		}
		there := false
		for try := 0; try < 2 && !there; try++ {
			var tail [packed.TrailerBytes]byte
			err := w.b.Read(w.ctx, w.o.nameOf(&obj), obj.Bytes-int64(len(tail)), [][]byte{tail[:]})
			if err != nil && !errors.Is(err, xfer.ErrNotFound) && !errors.Is(err, xfer.ErrShort) {
				return err
			}
			there = err == nil
		}
		if !there {
			gone[number] = obj.Stamp
		}
	}
	if len(gone) == 0 {
		return nil
	}
	if err := w.b.Claimed(w.ctx); err != nil {
		return fmt.Errorf("%d objects are missing, and their bucket is not the one that it was; nothing is dropped: %w", len(gone), err)
	}
	// Another node that has deleted all that was in an object may have removed it.
	graves, err := w.b.Graves(w.ctx)
	if err != nil {
		return err
	}
	lost, err := w.forget(gone, graves)
	if lost > 0 {
		w.o.s.log.Error("objects are not in their bucket any more", "bucket", w.p.health.name, "objects", len(gone), "blocks lost", lost)
	}
	w.p.sweeps.change(func(r *index.ObjectSweepRecord) {
		r.Missing += int64(len(gone))
		r.Lost += lost
	})
	return err
}

// forget drops the records of all blocks in objects that are gone, which have these stamps,
// and says how many were lost: not deleted by another node.
func (w *bucketSweep) forget(gone map[uint64]uint64, graves *packed.Graves) (n int64, err error) {
	for _, ns := range w.o.s.names.all() {
		for after := []byte(nil); ; {
			var recs, deleted []index.PackedRecord
			err := w.o.s.catalog.ScanPacked(ns.id, after, func(r *index.PackedRecord) error {
				after = append(after[:0], r.Key.Hash[:r.HashLen]...)
				if stamp, ok := gone[r.Object]; ok && graves.Buried(ns.digest, r.Key.Hash, stamp) {
					deleted = append(deleted, *r)
				} else if ok {
					recs = append(recs, *r)
				}
				if len(recs)+len(deleted) == expireBatch {
					return errFull
				}
				return w.ctx.Err()
			})
			if err != nil && err != errFull {
				return n, err
			}
			dropped, e := w.drop(recs, block.Damaged)
			if n += dropped; e == nil {
				_, e = w.drop(deleted, block.Deleted)
			}
			if e != nil {
				return n, e
			}
			if err == nil {
				break
			}
		}
	}
	return n, nil
}

// buryStrangers forgets objects that others wrote and in which nothing lives by this
// catalog. An object is removed when it is dead by what the bucket says, for longer than
// the grace: then it is so for everybody.
func (w *bucketSweep) buryStrangers() error {
	var dead []index.ObjectRecord
	err := w.o.s.catalog.ScanObjects(0, func(r *index.ObjectRecord) error {
		if r.Bucket == w.p.no && r.Live == 0 && !w.p.Wrote(r.ID) && !w.young(packedAt(r.Stamp)) {
			dead = append(dead, *r)
		}
		if len(dead) == reapBatch {
			return errFull
		}
		return nil
	})
	if err != nil && err != errFull || len(dead) == 0 {
		return err
	}
	graves, err := w.b.Graves(w.ctx)
	if err != nil {
		return err
	}
	for i := range dead {
		r := &dead[i]
		name := w.o.nameOf(r)
		foot, err := w.b.Footer(w.ctx, name, r.Bytes)
		switch {
		case err == nil:
			if allOf(bucket.Dead(foot, graves, time.Now().Add(-w.o.s.opts.ObjectGrace).Unix())) {
				if err := w.b.Remove(w.ctx, []packed.Name{name}); err != nil {
					return err
				}
				w.p.sweeps.change(func(s *index.ObjectSweepRecord) {
					s.Orphans++
					s.OrphanBytes += r.Bytes
				})
			}
		case errors.Is(err, xfer.ErrNotFound), errors.Is(err, xfer.ErrShort), errors.Is(err, index.ErrVersion), errors.Is(err, block.ErrCorrupt):
		default:
			return err
		}
		if err := w.o.ledger.do(w.ctx, &change{plan: func(v *view) error {
			if now, err := v.object(r.Number); err != nil || now == nil || now.Live > 0 {
				return err
			}
			v.dropObject(r.Number)
			return nil
		}}); err != nil {
			return err
		}
	}
	return nil
}

func allOf(bs []bool) bool {
	for _, b := range bs {
		if !b {
			return false
		}
	}
	return true
}
