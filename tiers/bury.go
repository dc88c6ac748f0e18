package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
)

// A delete drops the record of a block in G4, synced, and then writes a tombstone into the
// bucket, so that no import raises the block. Until that is there the catalog has a record,
// made with the drop, that it is owed. The object goes when nothing lives in it.

// burials are tombstones that wait to be written: those of one batch take one request.
type burials struct {
	mu struct {
		sync.Mutex
		queue []*burial
		busy  bool
	}
}

type burial struct {
	deleted []packed.Deleted
	cleared []packed.Cleared
	done    chan struct{}
	err     error // valid when done is closed
}

// bury writes tombstones, together with those of others, and returns when they are in the
// bucket.
func (s *Store) bury(ctx context.Context, p *objectBucket, deleted []packed.Deleted, cleared []packed.Cleared) error {
	b := &burial{deleted: deleted, cleared: cleared, done: make(chan struct{})}
	q := &p.burials.mu
	q.Lock()
	q.queue = append(q.queue, b)
	begin := !q.busy
	q.busy = true
	q.Unlock()
	if begin {
		s.wg.Go(func() { s.digger(p) })
	}
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// digger writes what waits, until nothing does.
func (s *Store) digger(p *objectBucket) {
	for {
		q := &p.burials.mu
		q.Lock()
		all := q.queue
		q.queue = nil
		q.busy = len(all) > 0
		q.Unlock()
		if len(all) == 0 {
			return
		}
		var deleted []packed.Deleted
		var cleared []packed.Cleared
		for _, b := range all {
			deleted, cleared = append(deleted, b.deleted...), append(cleared, b.cleared...)
		}
		err := p.do(s.life, 0, func(ctx context.Context) error { return p.Bury(ctx, deleted, cleared) })
		if err != nil {
			err = fmt.Errorf("bucket %s: %w: the deletion is done here, but an import could raise what was deleted; try again: %w", p.health.name, block.ErrUnavailable, err)
		}
		for _, b := range all {
			b.err = err
			close(b.done)
		}
	}
}

// farewell is a delete of keys, as far as it is about G4.
type farewell struct {
	o     *objects
	keys  []block.Key
	ended sync.Once
}

// farewell begins a delete, before the keys leave the table: from now on they are not found
// in G4, and what is on its way up does not arrive. It is nil without a G4.
func (o *objects) farewell(nsID block.NamespaceID, hashLen int, hashes []byte) *farewell {
	if o == nil {
		return nil
	}
	w := &farewell{o: o}
	for i := range len(hashes) / hashLen {
		w.keys = append(w.keys, keyAt(nsID, hashLen, hashes, i))
	}
	o.mourning.begin(w.keys)
	o.markLeaving(w.keys)
	return w
}

func (o *objects) markLeaving(keys []block.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, k := range keys {
		o.mu.leaving[k]++
		if f := o.mu.fetches[k]; f != nil {
			f.void.Store(true)
		}
	}
	o.nLeaving.Add(int64(len(keys)))
}

func (o *objects) unmarkLeaving(keys []block.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, k := range keys {
		if o.mu.leaving[k]--; o.mu.leaving[k] == 0 {
			delete(o.mu.leaving, k)
		}
	}
	o.nLeaving.Add(-int64(len(keys)))
}

// end ends a delete that drops nothing. After drop it does nothing.
func (w *farewell) end() {
	if w != nil {
		w.ended.Do(func() {
			w.o.unmarkLeaving(w.keys)
			w.o.mourning.end(w.keys)
		})
	}
}

// drop drops the records of keys that have left the table, and writes their tombstones. It
// says of which keys there was a record. stones say of which generation a block of a key may
// have been: one that was put afterwards, and has come into G4 since, is of a later one.
func (w *farewell) drop(ctx context.Context, hashLen int, stones []index.Tombstone) ([]bool, error) {
	if w == nil {
		return nil, nil
	}
	o := w.o
	// They are the change's, also when this call has returned, until it is done.
	there := make([]bool, len(w.keys))
	var dropped []index.PackedRecord
	graves := map[*objectBucket][]index.OwedRecord{}
	c := &change{
		plan: func(v *view) error {
			clear(there)
			clear(graves)
			dropped = nil
			for i, k := range w.keys {
				r, err := v.block(k, hashLen)
				if err != nil {
					return err
				}
				// Of its object's number, since the generation may be another store's.
				if r != nil && r.Object > stones[i].Gen {
					r = nil
				}
				if err := o.owe(v, graves, k, hashLen, r); err != nil {
					return err
				}
				if r == nil {
					continue
				}
				there[i] = r.Expires == 0 || r.Expires > int64(nowUnix())
				dropped = append(dropped, *r)
				if err := v.drop(r); err != nil {
					return err
				}
			}
			return nil
		},
		applied: func() {
			for i := range dropped {
				o.told(&dropped[i], block.Deleted)
			}
			if len(dropped) > 0 {
				o.sweep()
			}
		},
	}
	o.ledger.submit(c)
	told := make(chan struct{}) // closed when this call is through with the tombstones
	w.ended.Do(func() {
		o.s.wg.Go(func() { // also when ctx ends before
			<-c.done
			o.unmarkLeaving(w.keys)
			<-told
			o.mourning.end(w.keys)
		})
	})
	defer close(told)
	select {
	case <-c.done:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if c.err != nil {
		return nil, c.err
	}
	return there, o.entomb(ctx, graves)
}

// owe notes in which buckets a key that is deleted needs a tombstone: where the record r of the
// block, if not nil, says that it is; where an object under way may hold it; and where an
// earlier one is owed, so that a delete that is tried again finds what it has to write. It runs
// in the plan of a change, and thus before or after the one that records an object under way,
// which leaves out what was deleted.
func (o *objects) owe(v *view, graves map[*objectBucket][]index.OwedRecord, k block.Key, hashLen int, r *index.PackedRecord) error {
	ns, err := o.s.names.byID(k.NS)
	if err != nil {
		return nil // dropped, and cleared before
	}
	in := ^uint16(0)
	if r != nil {
		obj, err := v.object(r.Object)
		if err != nil {
			return err
		}
		if obj != nil {
			in = obj.Bucket
		}
	}
	o.mu.Lock()
	packing := o.mu.packing[k]
	o.mu.Unlock()
	for _, p := range o.buckets {
		old, err := v.owed(p.no, k, hashLen)
		if err != nil {
			return err
		}
		if old == nil && p != packing && (r == nil || p.no != in) {
			continue
		}
		rec := index.OwedRecord{Bucket: p.no, Key: k, HashLen: hashLen, Digest: ns.digest, Stamp: p.Stamp()}
		v.putOwed(&rec)
		graves[p] = append(graves[p], rec)
	}
	return nil
}

// entomb writes the tombstones that buckets are owed.
func (o *objects) entomb(ctx context.Context, graves map[*objectBucket][]index.OwedRecord) error {
	var errs []error
	for p, recs := range graves {
		deleted := make([]packed.Deleted, len(recs))
		for i := range recs {
			deleted[i] = packed.Deleted{Digest: recs[i].Digest, HashLen: uint8(recs[i].HashLen), Hash: recs[i].Key.Hash, Stamp: recs[i].Stamp}
		}
		if err := o.s.bury(ctx, p, deleted, nil); err != nil {
			errs = append(errs, err)
			continue
		}
		o.ledger.submit(&change{plan: func(v *view) error {
			for i := range recs {
				if err := v.paid(&recs[i]); err != nil {
					return err
				}
			}
			return nil
		}})
	}
	return errors.Join(errs...)
}

// owedRest is how long a tombstone that is owed is left to the delete that is about it.
const owedRest = 30 * time.Second

// payOwed writes tombstones that buckets are owed although their deletes are over, some of
// them at a time, and says whether there may be more.
func (o *objects) payOwed() (more bool, err error) {
	var errs []error
	for _, p := range o.buckets {
		if p.health.rank() == rankDown {
			continue
		}
		var due []index.OwedRecord
		err := o.s.catalog.ScanOwed(p.no, func(r *index.OwedRecord) error {
			if at := packedAt(r.Stamp); at.Before(o.opened) || time.Since(at) >= owedRest {
				due = append(due, *r)
			}
			if len(due) == reapBatch {
				return errFull
			}
			return nil
		})
		if err == errFull {
			more, err = true, nil
		}
		if err == nil && len(due) > 0 {
			err = o.entomb(o.s.life, map[*objectBucket][]index.OwedRecord{p: due})
		}
		errs = append(errs, err)
	}
	return more, errors.Join(errs...)
}

// cleared writes the tombstone of a namespace that was cleared into each bucket.
func (o *objects) cleared(ctx context.Context, ns *namespace, epoch uint32) error {
	if o == nil {
		return nil
	}
	o.sweep()
	var errs []error
	for _, p := range o.buckets {
		errs = append(errs, o.s.bury(ctx, p, nil, []packed.Cleared{{Digest: ns.digest, Epoch: epoch, Stamp: p.Stamp()}}))
	}
	return errors.Join(errs...)
}

// sweep has the objects removed in which nothing lives.
func (o *objects) sweep() {
	select {
	case o.reap <- struct{}{}:
	default:
	}
}

const (
	// reapEvery is how long the reaper rests between two looks, and reapAgain after a failure.
	reapEvery = time.Second
	reapAgain = 30 * time.Second
	reapBatch = 1000
)

// reaper removes objects in which nothing lives, until the store's life ends.
func (o *objects) reaper() {
	rest := time.NewTimer(0)
	defer rest.Stop()
	for {
		select {
		case <-rest.C:
		case <-o.s.life.Done():
			return
		}
		pause := reapEvery
		if err := o.reapAll(); err != nil && o.s.life.Err() == nil {
			o.s.log.Warn("objects that nothing lives in are not removed yet", "err", err)
			pause = reapAgain
			o.sweep()
		}
		more, err := o.payOwed()
		if err != nil && o.s.life.Err() == nil {
			o.s.log.Warn("tombstones are not written yet", "err", err)
			pause, more = reapAgain, true
		}
		if more {
			o.sweep()
		}
		select {
		case <-o.reap:
		case <-o.s.life.Done():
			return
		}
		rest.Reset(pause)
	}
}

// reapAll removes the objects of namespaces that were cleared, and those whose blocks all
// have left, a batch at a time. The record of an object goes after the object.
func (o *objects) reapAll() error {
	for from := uint64(0); ; {
		var dead []index.ObjectRecord
		var stale []uint64
		full := errors.New("batch is full")
		err := o.s.catalog.ScanObjects(from, func(r *index.ObjectRecord) error {
			from = r.Number + 1
			switch {
			case r.Live == 0:
				dead = append(dead, *r)
			case !o.current(r):
				stale = append(stale, r.Number)
				dead = append(dead, *r)
			}
			if len(dead) == reapBatch {
				return full
			}
			return nil
		})
		if err != nil && err != full {
			return err
		}
		if len(stale) > 0 {
			if err := o.wipe(stale); err != nil {
				return err
			}
		}
		if e := o.removeAll(dead); e != nil {
			return e
		}
		if err == nil {
			return nil
		}
	}
}

// wipe counts out what lived in objects of namespaces that were cleared since.
func (o *objects) wipe(numbers []uint64) error {
	return o.ledger.do(o.s.life, &change{plan: func(v *view) error {
		for _, n := range numbers {
			r, err := v.object(n)
			if err != nil {
				return err
			}
			if r == nil || o.current(r) {
				continue
			}
			now := *r
			v.blocks -= int64(now.Live)
			v.payload -= now.LiveBytes
			now.Live, now.LiveBytes = 0, 0
			v.putObject(&now)
		}
		return nil
	}})
}

// removeAll removes objects that are dead, and their records behind them.
func (o *objects) removeAll(dead []index.ObjectRecord) error {
	names := map[*objectBucket][]packed.Name{}
	numbers := map[*objectBucket][]uint64{}
	for i := range dead {
		n := dead[i].Number
		// Not before its upload has ended; then its record says for good whether it lives.
		if o.busy(n) {
			continue
		}
		r, ok, err := o.s.catalog.GetObject(n)
		if err != nil {
			return err
		}
		// What another wrote may live by its catalog: see buryStrangers.
		if p := o.byNo[r.Bucket]; ok && r.Live == 0 && p != nil && p.Wrote(r.ID) {
			names[p] = append(names[p], o.nameOf(&r))
			numbers[p] = append(numbers[p], n)
		}
	}
	var errs []error
	for p, ns := range names {
		if err := p.do(o.s.life, 0, func(ctx context.Context) error { return p.Remove(ctx, ns) }); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, o.ledger.do(o.s.life, &change{plan: func(v *view) error {
			for _, n := range numbers[p] {
				v.dropObject(n)
			}
			return nil
		}}))
	}
	return errors.Join(errs...)
}

// busy reports whether an object is being written, or may be read although its blocks have
// gone into another.
func (o *objects) busy(number uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, busy := o.mu.underWay[number]
	at, rests := o.mu.rested[number]
	if rests && time.Since(at) >= o.rest {
		delete(o.mu.rested, number)
		rests = false
	}
	return busy || rests
}

// attendBucket watches over one bucket until the store's life ends: it is probed, once a
// while, when it is not healthy.
func (s *Store) attendBucket(p *objectBucket) {
	s.attendTo(p.health, func() error {
		ctx, cancel := context.WithTimeout(s.life, bucketPatience)
		defer cancel()
		// Asked first: what follows takes its time to fail.
		short, stop := context.WithTimeout(ctx, p.health.stallAfter)
		defer stop()
		if !p.service.Answers(short) {
			return fmt.Errorf("%w within %v", bucket.ErrNoAnswer, p.health.stallAfter)
		}
		if err := p.claim(ctx); err != nil {
			return err
		}
		err := p.Probe(ctx)
		if errors.Is(err, bucket.ErrNoWrites) {
			p.refuse(err)
			return nil // it is read
		}
		return err
	})
}
