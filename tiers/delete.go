package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer"
)

// lostDevice reports whether a copy failed because its medium did, so that
// waiting for room would be in vain.
func lostDevice(err error) bool {
	return errors.Is(err, block.ErrUnavailable) && !errors.Is(err, xfer.ErrCanceled)
}

// Delete removes blocks from all tiers; see api.Store. It answers when the drops
// of their records are synced and the headers of their slots erased and flushed,
// so that neither the catalog nor one that is rebuilt from the media has them.
// For headers that are out of reach there are tombstones.
func (s *Store) Delete(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return 0, fmt.Errorf("delete: %w", err)
	}
	there := 0
	gone := make([]bool, n) // from a local tier
	far := s.objects.farewell(nsID, hashLen, hashes)
	defer far.end()
	var copies []*move // of what was removed, now or before
	stones := make([]index.Tombstone, 0, n)
	w := &removals{erase: true, flush: true}
	for i := range n {
		k := keyAt(nsID, hashLen, hashes, i)
		if gone[i] = s.remove(k, block.Deleted, w, always); gone[i] {
			there++
		}
		stones = append(stones, index.Tombstone{Key: k, Gen: w.gen})
		copies = append(copies, s.moves.doomed(k)...)
		if s.unserved() {
			// A slab that is not here now may have it: it must not come back with it.
			w.wg.Add(1)
			s.commits.add(catalogOp{key: k, hlen: hashLen, fin: w.fin})
		}
	}
	if err := awaitCopies(ctx, copies); err != nil {
		return there, fmt.Errorf("delete: %w", err)
	}
	// A block that is not there may have left a moment ago, and its record not yet.
	w.wg.Add(1)
	s.commits.barrier(stones, w.fin)
	if err := w.wait(ctx); err != nil {
		return there, fmt.Errorf("delete: %w", err)
	}
	packed, err := far.drop(ctx, hashLen, stones)
	for i, also := range packed {
		if also && !gone[i] {
			there++
		}
	}
	if err != nil {
		return there, fmt.Errorf("delete: %w", err)
	}
	return there, nil
}

// removals waits for the records of removed blocks.
type removals struct {
	erase bool // the headers of their slots, not only the records
	flush bool // what was erased, before it is told
	// gen is that of the youngest slot which the key removed last may have had: one
	// of a block that is put afterwards is of a later one.
	gen uint64
	wg  sync.WaitGroup
	mu  struct {
		sync.Mutex
		err error
	}
}

func (w *removals) fin(err error) {
	if err != nil {
		w.mu.Lock()
		w.mu.err = err
		w.mu.Unlock()
	}
	w.wg.Done()
}

// awaitCopies waits for copies to G3 of blocks that were removed meanwhile: each
// erases what it has written.
func awaitCopies(ctx context.Context, copies []*move) error {
	for _, m := range copies {
		select {
		case <-m.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if errors.Is(m.err, errUnerased) {
			return m.err
		}
	}
	return nil
}

// wait returns when all records are dropped, durably, or ctx ends.
func (w *removals) wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() { // ends with the committer's next rounds
		w.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.err
}

// remove takes a block out of every tier, whoever uses it: it is found no more
// from now on, and its slots come free when the last user and the last record
// are gone. It does so only if the entry, looked at under the lock, is still one
// to remove. It reports whether the block was there.
func (s *Store) remove(k block.Key, why block.Reason, w *removals, still func(h block.Handle, e *index.Entry) bool) (there bool) {
	var out []departure
	var h block.Handle
	s.table.Detach(k, func(hd block.Handle, e *index.Entry) bool {
		w.gen = s.gen.Load()
		if e == nil || !still(hd, e) {
			return false
		}
		h = hd
		there = resident(e)
		busy := e.Refs > 0
		var drop bool
		for ix := range e.State {
			switch {
			case !live(e, ix):
				// A copy to G3 whose record is queued: its drop must follow it.
				if ix == ixG3 && e.State[ix] == index.SlotFilling {
					drop = e.Flags&flagRecording != 0
					if !drop && w.erase {
						s.moves.doom(h, k)
					}
				}
			case ix == ixG3:
				drop = true
				fallthrough
			case busy:
				d := s.leave(h, e, ix, why)
				d.linger = true
				out = append(out, d)
				e.State[ix] = index.SlotLeaving // the slot is still taken
			default:
				out = append(out, s.leave(h, e, ix, why))
			}
		}
		if drop {
			e.Ops++
			w.wg.Add(1)
			op := catalogOp{
				key: k, hlen: int(e.HashLen), keep: true, tell: w.fin,
				fin: func(error) { s.settle(h, func(e *index.Entry) { e.Ops-- }) },
			}
			if why == block.Discarded && e.Flags&flagRecording != 0 {
				op.undo = s.moves.traceOf(h)
			}
			if w.erase {
				op.erases(e.Place[ixG3], e.Len)
				op.flush = w.flush
			}
			s.commits.add(op)
		}
		if busy || drop || dirty(e) {
			e.Flags |= flagDeleted
			return true
		}
		return false
	})
	for _, d := range out {
		s.departed(d)
	}
	return there
}

func always(block.Handle, *index.Entry) bool { return true }

// expire takes away a block whose time has passed, or what is left of one that
// was in use when it left.
func (s *Store) expire(h block.Handle) {
	var k block.Key
	ok := s.table.View(h, func(e *index.Entry) {
		k = block.Key{NS: e.NS, Hash: e.Hash}
	})
	if ok {
		// The header says when its time has passed: nobody waits until it is erased.
		s.remove(k, block.Expired, &removals{erase: true}, func(_ block.Handle, e *index.Entry) bool { return expired(e, nowUnix()) || dirty(e) })
	}
}

// damagedG3 drops a copy in G3 whose bytes failed their checksum; see loseG3.
func (s *Store) damagedG3(h block.Handle, e *index.Entry, cause error) error {
	return s.loseG3(h, e, block.Damaged, cause)
}

// loseG3 drops a copy in G3 whose bytes are not what they should be, or cannot be
// read, and returns what that means for the reader: of a block that was deleted
// meanwhile the header is erased, and it is as absent as for those who come later.
func (s *Store) loseG3(h block.Handle, e *index.Entry, why block.Reason, cause error) error {
	found, deleted := false, false
	s.table.Update(h, func(now *index.Entry) {
		// Other readers may hold references: they fail the same way. The slot
		// itself waits for none of them, since they verify what they read. So the
		// block may even have come down again meanwhile, to another slot.
		deleted = now.Flags&flagDeleted != 0
		if live(now, ixG3) && now.Gen == e.Gen && now.Place[ixG3] == e.Place[ixG3] {
			s.startLeave(h, now, why, nil)
			found = true
		}
	})
	switch {
	case deleted:
		return fmt.Errorf("read from g3: %w: deleted meanwhile", block.ErrNotFound)
	case !found:
		return cause
	}
	if why == block.Damaged {
		s.corrupt.Add(1)
	}
	if more, ok := s.damage.next(); ok {
		s.log.Error("block "+why.String(), "tier", "g3", "namespace", s.names.name(e.NS), "hash", e.Hash.Hex(int(e.HashLen)),
			"slab", s.g3.devs[e.Place[ixG3].Device()].slab.Path(), "offset", e.Place[ixG3].Offset(), "err", cause, "more", more)
	}
	return cause
}

// damagedG2 drops a copy in G2 whose bytes failed their checksum. References to
// it are out, so its slot is given back with the last of them.
func (s *Store) damagedG2(h block.Handle, e *index.Entry) {
	s.corrupt.Add(1)
	if more, ok := s.damage.next(); ok {
		s.log.Error("block damaged", "tier", "g2", "namespace", s.names.name(e.NS), "hash", e.Hash.Hex(int(e.HashLen)), "more", more)
	}
	var d departure
	var gone bool
	s.table.Update(h, func(e *index.Entry) {
		if live(e, ixG2) {
			d, gone = s.leave(h, e, ixG2, block.Damaged), true
			d.linger = true
			e.State[ixG2] = index.SlotLeaving
		}
	})
	if gone {
		s.departed(d)
	}
}

// Clear removes all blocks of a namespace; see api.Store.
func (s *Store) Clear(ctx context.Context, nsID block.NamespaceID) (int64, error) {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return 0, fmt.Errorf("clear: %w", err)
	}
	// Held until the clearing is in the catalog, also when ctx ends before that:
	// what changes the namespace next is written behind it.
	if err := s.names.change.lock(ctx); err != nil {
		return 0, fmt.Errorf("clear namespace %q: %w", ns.get().Desc.Name, err)
	}
	if err := s.catalog.Err(); err != nil {
		s.names.change.unlock()
		return 0, fmt.Errorf("clear namespace %q: %w", ns.get().Desc.Name, err)
	}
	// While the gate is closed no block of the namespace is committed, so the
	// records that are queued are all of the old epoch, and the clearing behind
	// them in the queue covers them.
	buried := false
	defer s.objects.clearing(nsID)(&buried)
	ns.gate.Lock()
	next := *ns.state.Load()
	next.Epoch++
	var n int64
	w := &removals{} // the epoch in the headers says that they are void
	var keys []block.Key
	s.table.Range(1, func(_ block.Handle, e *index.Entry) bool {
		if e.NS == nsID && (resident(e) || dirty(e)) {
			keys = append(keys, block.Key{NS: e.NS, Hash: e.Hash})
		}
		return true
	})
	for _, k := range keys {
		if s.remove(k, block.Deleted, w, always) {
			n++
		}
	}
	w.wg.Add(1)
	s.commits.add(catalogOp{clear: &next, keep: true, tell: func(err error) {
		s.names.change.unlock()
		w.fin(err)
	}})
	ns.state.Store(&next)
	ns.gate.Unlock()
	if err := w.wait(ctx); err != nil {
		return n, fmt.Errorf("clear namespace %q: %w", next.Desc.Name, err)
	}
	s.events.publish(block.Event{Kind: block.EventCleared, NS: next.Desc.Name, Count: n})
	if err := s.objects.cleared(ctx, ns, next.Epoch); err != nil {
		return n, fmt.Errorf("clear namespace %q: %w", next.Desc.Name, err)
	}
	buried = true
	return n, nil
}
