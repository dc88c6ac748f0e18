package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// A pinned block stays in the lowest tier there is, its keeper, and may come and
// go in others. The flag is the entry's, and what the catalog has follows it: both
// change under the lock of the block's shard, the record by a place in the
// committer's queue. The keeper's policy does not know a pinned block, so that it
// costs no eviction anything.

// pins counts what is pinned.
type pins struct {
	// turn is held from when flags are changed until their records are written, so
	// that a change that fails can be taken back: nobody has built on it.
	turn            chan struct{}
	blocks, payload atomic.Int64
	slots           atomic.Int64 // bytes that pinned blocks take in the keeper
}

func (p *pins) init() { p.turn = make(chan struct{}, 1) }

// maxPinnedShare is the part of a tier that may be pinned, as a divisor: the
// rest must be enough for what comes and goes.
const maxPinnedShare = 2

// take counts a slot of n bytes, unless that is more than may be pinned.
func (p *pins) take(n, capacity int64) bool {
	for {
		have := p.slots.Load()
		if have+n > capacity/maxPinnedShare {
			return false
		}
		if p.slots.CompareAndSwap(have, have+n) {
			return true
		}
	}
}

// keeper is the tier that pinned blocks stay in.
func (s *Store) keeper() *tier {
	if s.g3 != nil {
		return s.g3
	}
	return s.g2
}

func isPinned(e *index.Entry) bool { return e.Flags&flagPinned != 0 }

// keeps reports whether a block stays in a tier because it is pinned.
func (s *Store) keeps(e *index.Entry, ix int) bool { return isPinned(e) && ix == s.keeper().ix }

// setPin pins a block whose slot in the keeper is counted. Like the following, it
// runs under the shard's lock.
func (s *Store) setPin(h block.Handle, e *index.Entry) {
	e.Flags |= flagPinned
	s.pins.blocks.Add(1)
	s.pins.payload.Add(int64(e.Len))
	s.keeper().events.push(policyEvent{kind: evRemove, h: h})
}

// clearPin undoes setPin.
func (s *Store) clearPin(h block.Handle, e *index.Entry) {
	e.Flags &^= flagPinned
	s.pins.blocks.Add(-1)
	s.pins.payload.Add(-int64(e.Len))
	if k := s.keeper(); counted(e, k.ix) {
		s.pins.slots.Add(-k.class(e.Place[k.ix]))
		k.events.push(policyEvent{kind: evInsert, h: h})
	}
}

// pinArrived counts the slot of a block that was pinned before it came.
func (s *Store) pinArrived(e *index.Entry, ix int) {
	if s.keeps(e, ix) {
		s.pins.slots.Add(s.keeper().class(e.Place[ix]))
	}
}

// pinMoved counts the slot that a block moves to instead of the one it leaves.
func (s *Store) pinMoved(e *index.Entry, from, to block.Place) {
	if s.keeps(e, ixG2) {
		s.pins.slots.Add(s.g2.class(to) - s.g2.class(from))
	}
}

// pinLeft ends the pin of a block with its last copy. The slot is not free yet.
func (s *Store) pinLeft(e *index.Entry, ix int, last bool) {
	if s.keeps(e, ix) {
		s.pins.slots.Add(-s.keeper().class(e.Place[ix]))
	}
	if last && isPinned(e) {
		e.Flags &^= flagPinned
		s.pins.blocks.Add(-1)
		s.pins.payload.Add(-int64(e.Len))
	}
}

// pinRecord has the record of a block that has come into G3 say what the flag
// says, if that has changed since it was queued.
func (s *Store) pinRecord(e *index.Entry, rec *index.Record) {
	if rec.Pinned == isPinned(e) {
		return
	}
	now := *rec
	now.Pinned = isPinned(e)
	s.commits.add(catalogOp{put: &now, dev: int(e.Place[ixG3].Device()), rewrite: true, fin: func(err error) {
		if err != nil {
			s.log.Error("record does not follow its pin", "key", now.Key, "pinned", now.Pinned, "err", err)
		}
	}})
}

// Pin keeps blocks in the store; see api.Store.
func (s *Store) Pin(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte) ([]error, error) {
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return nil, fmt.Errorf("pin: %w", err)
	}
	errs := make([]error, n)
	for at := 0; at < n; at += windowKeys {
		end := min(at+windowKeys, n)
		if err := s.pinWindow(ctx, nsID, hashLen, hashes[at*hashLen:end*hashLen], errs[at:end]); err != nil {
			return nil, fmt.Errorf("pin: %w", err)
		}
	}
	return errs, nil
}

func (s *Store) pinWindow(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, errs []error) error {
	defer s.raise(ctx, nsID, hashLen, hashes)()
	held := s.hold(nsID, hashLen, hashes)
	defer s.letGo(held)
	s.pinDown(ctx, held, errs)
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	err := s.changePins(ctx, nsID, held, func(i int, h block.Handle, e *index.Entry) (fin func(e *index.Entry, err error)) {
		k := s.keeper()
		switch {
		case errs[i] != nil || isPinned(e):
		case e.Flags&flagDeleted != 0 || !resident(e):
			errs[i] = fmt.Errorf("pin: %w: deleted meanwhile", block.ErrNotFound)
		case !live(e, k.ix):
			errs[i] = fmt.Errorf("pin: %w: its copy in %s was damaged meanwhile", block.ErrUnavailable, k.id)
		case !s.pins.take(k.class(e.Place[k.ix]), k.capacity):
			errs[i] = s.tooMuchPinned()
		default:
			s.setPin(h, e)
			if k.ix == ixG3 {
				return func(e *index.Entry, err error) {
					if err == nil {
						return
					}
					errs[i] = fmt.Errorf("pin: %w", err)
					if isPinned(e) {
						s.clearPin(h, e)
					}
				}
			}
		}
		return nil
	})
	return err
}

func (s *Store) tooMuchPinned() error {
	k := s.keeper()
	return fmt.Errorf("pin: %w: %d bytes of %s are pinned, at most %d may be", block.ErrNoSpace, s.pins.slots.Load(), k.id, k.capacity/maxPinnedShare)
}

// pinDown brings the blocks to be pinned to G3, if there is one, and says of
// which ones that failed.
func (s *Store) pinDown(ctx context.Context, held []heldBlock, errs []error) {
	room := s.keeper().capacity/maxPinnedShare - s.pins.slots.Load()
	var down []block.Handle
	var at []int
	for i := range held {
		b := &held[i]
		size, _ := SlotBytes(int64(b.e.Len))
		switch {
		case b.h == 0:
			errs[i] = fmt.Errorf("pin: %w", block.ErrNotFound)
		case isPinned(&b.e) || s.g3 == nil || live(&b.e, ixG3):
		case size > room: // it need not be tried
			errs[i] = s.tooMuchPinned()
		default:
			room -= size
			down, at = append(down, b.h), append(at, i)
		}
	}
	for j, err := range s.copyTo(ctx, s.g3, down) {
		if err != nil {
			errs[at[j]] = fmt.Errorf("pin: %w", err)
		}
	}
}

// Unpin lets pinned blocks go again; see api.Store.
func (s *Store) Unpin(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return 0, fmt.Errorf("unpin: %w", err)
	}
	there := 0
	for at := 0; at < n; at += windowKeys {
		end := min(at+windowKeys, n)
		k, err := s.unpinWindow(ctx, nsID, hashLen, hashes[at*hashLen:end*hashLen])
		there += k
		if err != nil {
			return there, fmt.Errorf("unpin: %w", err)
		}
	}
	return there, nil
}

func (s *Store) unpinWindow(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte) (there int, err error) {
	held := s.hold(nsID, hashLen, hashes)
	defer s.letGo(held)
	errs := make([]error, len(held))
	err = s.changePins(ctx, nsID, held, func(i int, h block.Handle, e *index.Entry) func(*index.Entry, error) {
		if !isPinned(e) {
			return nil
		}
		there++
		s.clearPin(h, e)
		if !live(e, ixG3) {
			return nil
		}
		return func(_ *index.Entry, err error) { errs[i] = err }
	})
	if err != nil {
		return there, err
	}
	return there, errors.Join(errs...)
}

// heldBlock is a block that a reference is held on; h is 0 when it cannot be read.
type heldBlock struct {
	h      block.Handle
	e      index.Entry
	parent block.Hash
}

// hold takes a reference on each block that can be read.
func (s *Store) hold(nsID block.NamespaceID, hashLen int, hashes []byte) []heldBlock {
	held := make([]heldBlock, len(hashes)/hashLen)
	for i := range held {
		k := keyAt(nsID, hashLen, hashes, i)
		g := s.grip(k)
		held[i].h, held[i].e = g.h, g.e
		held[i].parent, _ = s.parentHash(&g.e)
	}
	return held
}

func (s *Store) letGo(held []heldBlock) {
	for i := range held {
		s.release(held[i].h)
	}
}

// changePins calls change for each block under its shard's lock. When that gives
// a callback, the block's record is written anew as the entry is then, and the
// callback called under the lock when that is durable or has failed. It answers
// when all are, or ctx ends.
func (s *Store) changePins(ctx context.Context, nsID block.NamespaceID, held []heldBlock, change func(i int, h block.Handle, e *index.Entry) func(*index.Entry, error)) error {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return err
	}
	select {
	case s.pins.turn <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	var records sync.WaitGroup
	// As for a new record: the epoch is read and the record queued while no Clear
	// can come between.
	ns.gate.RLock()
	epoch := ns.state.Load().Epoch
	for i := range held {
		b := &held[i]
		s.table.Update(b.h, func(e *index.Entry) {
			fin := change(i, b.h, e)
			if fin == nil {
				return
			}
			e.Ops++
			records.Add(1)
			s.rewrite(e, b.parent, epoch, func(err error) {
				s.settle(b.h, func(e *index.Entry) {
					e.Ops--
					fin(e, err)
				})
				records.Done()
			})
		})
	}
	ns.gate.RUnlock()
	done := make(chan struct{})
	s.wg.Go(func() {
		records.Wait()
		<-s.pins.turn
		close(done)
	})
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// rewrite queues the record of a block in G3 as its entry is now.
func (s *Store) rewrite(e *index.Entry, parent block.Hash, epoch uint32, fin func(err error)) {
	rec := s.newRecord(e)
	rec.Parent, rec.HasParent, rec.Epoch = parent, e.Parent != 0, epoch
	s.commits.add(catalogOp{put: rec, dev: int(e.Place[ixG3].Device()), rewrite: true, fin: fin})
}
