package tiers

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// ledger changes what the catalog says of G4. An object's record counts the blocks that
// live in it, so a change reads before it writes: one goroutine does both, for all that
// waits at a time, in one commit by way of the committer, which keeps it in order with the
// clearing of namespaces.
type ledger struct {
	s    *Store
	kick chan struct{}
	mu   struct {
		sync.Mutex
		queue  []*change
		closed bool
	}
}

// change is one of them.
type change struct {
	// plan says what is to be written. It may run more than once, and the last time counts:
	// none of the namespaces ns is cleared between that and the commit.
	plan func(v *view) error
	ns   []*namespace
	// applied, which may be nil, is called behind the commit and before that of the changes
	// that came later.
	applied func()
	done    chan struct{}
	err     error // valid when done is closed
}

func (l *ledger) init(s *Store) {
	l.s, l.kick = s, make(chan struct{}, 1)
}

// do makes a change, and returns when it is durable. When ctx ends before, the change goes
// on.
func (l *ledger) do(ctx context.Context, c *change) error {
	l.submit(c)
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// submit queues a change.
func (l *ledger) submit(c *change) {
	c.done = make(chan struct{})
	l.mu.Lock()
	closed := l.mu.closed
	if !closed {
		l.mu.queue = append(l.mu.queue, c)
	}
	l.mu.Unlock()
	if closed {
		c.err = fmt.Errorf("commit: %w", block.ErrClosed)
		close(c.done)
		return
	}
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// run works until the store's life ends.
func (l *ledger) run() {
	for {
		select {
		case <-l.kick:
		case <-l.s.life.Done():
			l.mu.Lock()
			l.mu.closed = true
			l.mu.Unlock()
		}
		l.mu.Lock()
		all, closed := l.mu.queue, l.mu.closed
		l.mu.queue = nil
		l.mu.Unlock()
		if len(all) > 0 {
			l.round(all)
		}
		if closed {
			return
		}
	}
}

// round makes changes together, all or none.
func (l *ledger) round(all []*change) {
	err := l.commit(all)
	for _, c := range all {
		if c.err = err; err == nil && c.applied != nil {
			c.applied()
		}
		close(c.done)
	}
}

func (l *ledger) commit(all []*change) error {
	v, done, err := l.queue(all)
	if err != nil {
		return err
	}
	if err := <-done; err != nil {
		return err
	}
	l.s.objects.blocks.Add(v.blocks)
	l.s.objects.payload.Add(v.payload)
	return nil
}

// queue plans changes and hands the commit to the committer. Puts and clearings wait for the
// gates of namespaces, and a plan reads the catalog, which may take as long as the disk
// wants: so it runs without them, and again when a namespace was cleared meanwhile.
func (l *ledger) queue(all []*change) (*view, <-chan error, error) {
	for {
		epochs := map[*namespace]uint32{}
		for _, c := range all {
			for _, ns := range c.ns {
				epochs[ns] = ns.state.Load().Epoch
			}
		}
		v := &view{catalog: l.s.catalog, objects: map[uint64]*index.ObjectRecord{}, packed: map[block.Key]*index.PackedRecord{}, owes: map[owedTo]*index.OwedRecord{}}
		for _, c := range all {
			if err := c.plan(v); err != nil {
				return nil, nil, err
			}
		}
		if done := l.hand(v, epochs); done != nil {
			return v, done, nil
		}
	}
}

// hand gives what was planned to the committer, unless a namespace is of another epoch now.
func (l *ledger) hand(v *view, epochs map[*namespace]uint32) <-chan error {
	for ns, epoch := range epochs {
		ns.gate.RLock()
		defer ns.gate.RUnlock()
		if ns.state.Load().Epoch != epoch {
			return nil
		}
	}
	done := make(chan error, 1)
	l.s.commits.add(catalogOp{more: v.write, fin: func(err error) { done <- err }})
	return done
}

// view is the catalog's part on G4 as it will be behind the changes of one round.
type view struct {
	catalog         *index.Catalog
	objects         map[uint64]*index.ObjectRecord // that were read or changed; nil: there is none
	packed          map[block.Key]*index.PackedRecord
	owes            map[owedTo]*index.OwedRecord
	writes          []func(*index.Batch)
	blocks, payload int64 // more than before
}

func (v *view) write(b *index.Batch) {
	for _, w := range v.writes {
		w(b)
	}
}

// object is the record of an object, nil when there is none.
func (v *view) object(number uint64) (*index.ObjectRecord, error) {
	return once(v.objects, number, func() (index.ObjectRecord, bool, error) { return v.catalog.GetObject(number) })
}

// once is the record of a key, nil when there is none: what is known of it, or else what the
// catalog says, which is known then.
func once[K comparable, R any](known map[K]*R, k K, get func() (R, bool, error)) (*R, error) {
	if r, ok := known[k]; ok {
		return r, nil
	}
	r, ok, err := get()
	if err != nil {
		return nil, err
	}
	known[k] = nil
	if ok {
		known[k] = &r
	}
	return known[k], nil
}

func (v *view) putObject(o *index.ObjectRecord) {
	now := *o
	v.objects[o.Number] = &now
	v.writes = append(v.writes, func(b *index.Batch) { b.PutObject(&now) })
}

func (v *view) dropObject(number uint64) {
	v.objects[number] = nil
	v.writes = append(v.writes, func(b *index.Batch) { b.DropObject(number) })
}

// block is the record of a block, nil when there is none.
func (v *view) block(k block.Key, hashLen int) (*index.PackedRecord, error) {
	return once(v.packed, k, func() (index.PackedRecord, bool, error) { return v.catalog.GetPacked(k, hashLen) })
}

// seat puts the record of a block in object o, in the place of an older one, and counts it.
func (v *view) seat(o *index.ObjectRecord, r *index.PackedRecord) error {
	old, err := v.block(r.Key, r.HashLen)
	if err != nil {
		return err
	}
	if old != nil {
		if err := v.uncount(old); err != nil {
			return err
		}
	}
	now := *r
	v.packed[r.Key] = &now
	v.writes = append(v.writes, func(b *index.Batch) { b.PutPacked(&now) })
	o.Live++
	o.LiveBytes += int64(r.Len)
	v.blocks++
	v.payload += int64(r.Len)
	return nil
}

// drop drops the record of a block.
func (v *view) drop(r *index.PackedRecord) error {
	if err := v.uncount(r); err != nil {
		return err
	}
	k, hashLen := r.Key, r.HashLen
	v.packed[k] = nil
	v.writes = append(v.writes, func(b *index.Batch) { b.DropPacked(k, hashLen) })
	return nil
}

// owedTo names a tombstone that a bucket is owed.
type owedTo struct {
	bucket uint16
	key    block.Key
}

// owed is the record of the tombstone that a bucket is owed of a block, nil when there is none.
func (v *view) owed(bucket uint16, k block.Key, hashLen int) (*index.OwedRecord, error) {
	return once(v.owes, owedTo{bucket, k}, func() (index.OwedRecord, bool, error) { return v.catalog.GetOwed(bucket, k, hashLen) })
}

func (v *view) putOwed(r *index.OwedRecord) {
	now := *r
	v.owes[owedTo{r.Bucket, r.Key}] = &now
	v.writes = append(v.writes, func(b *index.Batch) { b.PutOwed(&now) })
}

// paid drops the record of a tombstone that is in its bucket, unless there is one of a later
// delete meanwhile.
func (v *view) paid(r *index.OwedRecord) error {
	now, err := v.owed(r.Bucket, r.Key, r.HashLen)
	if err != nil || now == nil || now.Stamp != r.Stamp {
		return err
	}
	was := *r
	v.owes[owedTo{r.Bucket, r.Key}] = nil
	v.writes = append(v.writes, func(b *index.Batch) { b.DropOwed(&was) })
	return nil
}

// uncount counts a block out of its object. One that was cleared has none left.
func (v *view) uncount(r *index.PackedRecord) error {
	o, err := v.object(r.Object)
	if err != nil || o == nil || o.Live == 0 {
		return err
	}
	now := *o
	now.Live--
	now.LiveBytes -= int64(r.Len)
	v.blocks--
	v.payload -= int64(r.Len)
	v.putObject(&now)
	return nil
}
