package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
)

// What a bucket answers may be wrong for a while: something between spoils it, or it does
// not find what it lists. So a block is given up only when it is the block, and not the way
// to it, that is at fault; and a bucket that is full, or may only be read, is still read.

// doubt looks into a block that was read twice, each time with other bytes or as one that is
// not there, and gives it up, or holds the bucket to be sick. It is done in the background,
// once at a time for a block.
func (o *objects) doubt(p *objectBucket, obj *index.ObjectRecord, r *index.PackedRecord, why error) {
	rec, object := *r, *obj
	o.mu.Lock()
	if o.mu.doubted[rec.Key] != nil {
		o.mu.Unlock()
		return
	}
	known := make(chan struct{})
	o.mu.doubted[rec.Key] = known
	o.mu.Unlock()
	o.s.wg.Go(func() {
		defer func() {
			o.mu.Lock()
			delete(o.mu.doubted, rec.Key)
			o.mu.Unlock()
			close(known)
		}()
		p.doubts.Lock() // what many reads run into at once is no reason to ask at once
		defer p.doubts.Unlock()
		if err := o.confirm(p, &object, &rec, why); err != nil {
			if more, ok := o.s.damage.next(); ok && o.s.life.Err() == nil {
				o.s.log.Warn("block in g4 cannot be read now", "bucket", p.health.name, "hash", rec.Key.Hash.Hex(rec.HashLen), "err", why, "but", err, "more", more)
			}
			return
		}
		o.retire(&rec, why)
	})
}

// settled waits until nothing is being found out about a block.
func (o *objects) settled(ctx context.Context, k block.Key) {
	o.mu.Lock()
	known := o.mu.doubted[k]
	o.mu.Unlock()
	if known != nil {
		select {
		case <-known:
		case <-ctx.Done():
		}
	}
}

// confirm asks whether it is a block's fault that it could not be read. An error says that
// it is not known to be.
func (o *objects) confirm(p *objectBucket, obj *index.ObjectRecord, r *index.PackedRecord, why error) error {
	s := o.s
	err := p.do(s.life, 0, func(ctx context.Context) error {
		if errors.Is(why, block.ErrCorrupt) {
			// What was written this moment must come back as it was.
			if err := p.Probe(ctx); err != nil && !errors.Is(err, bucket.ErrNoWrites) {
				return err
			}
			return nil
		}
		there, err := p.Has(ctx, o.nameOf(obj))
		if err == nil && there {
			err = fmt.Errorf("%w: %s is listed, and a read says that it is not there", block.ErrUnavailable, o.nameOf(obj))
		}
		return err
	})
	if err != nil {
		return err
	}
	// The way may have been mended only now.
	buf, err := s.staging.get(s.life)
	if err != nil {
		return err
	}
	defer s.staging.put(buf)
	parts := [][]byte{make([]byte, packed.HeaderBytes), buf[:r.Len]}
	err = p.fetch(s.life, o.nameOf(obj), r.Offset, packed.HeaderBytes+int64(r.Len), parts)
	if err == nil {
		err = o.check(obj, r, parts[0], parts[1])
	}
	switch {
	case err == nil:
		return errors.New("it can be read by now")
	case errors.Is(err, block.ErrNotFound), errors.Is(err, block.ErrCorrupt):
		return nil
	}
	return err
}

// writes says whether a bucket takes objects.
type writes struct {
	refused atomic.Pointer[refusal] // nil: it does
	kick    chan struct{}           // buffer of 1: it has just refused one
}

type refusal struct {
	err   error
	since time.Time
}

// refuse notes that a bucket does not take objects.
func (p *objectBucket) refuse(err error) {
	if !p.writes.refused.CompareAndSwap(nil, &refusal{err: err, since: time.Now()}) {
		return
	}
	p.health.log.Warn("bucket takes no objects", "bucket", p.health.name, "err", err)
	select {
	case p.writes.kick <- struct{}{}:
	default:
	}
}

// takes reports whether a bucket takes objects, and how well it does.
func (p *objectBucket) takes() (rank uint32, ok bool) {
	rank = p.health.rank()
	return rank, rank != rankDown && p.writes.refused.Load() == nil
}

// attendWrites looks, once in a while, whether a bucket that refused an object takes some
// again, until the store's life ends.
func (s *Store) attendWrites(p *objectBucket) {
	pause := s.opts.ProbeEvery
	rest := time.NewTimer(pause)
	defer rest.Stop()
	for {
		if p.writes.refused.Load() == nil {
			pause = s.opts.ProbeEvery
			select {
			case <-p.writes.kick:
				continue
			case <-s.life.Done():
				return
			}
		}
		rest.Reset(pause)
		select {
		case <-rest.C:
		case <-s.life.Done():
			return
		}
		if err := p.do(s.life, 0, p.Probe); err != nil {
			pause = min(2*pause, maxProbePause)
			continue
		}
		was := p.writes.refused.Swap(nil)
		s.log.Info("bucket takes objects again", "bucket", p.health.name, "after", time.Since(was.since).Round(time.Millisecond))
	}
}
