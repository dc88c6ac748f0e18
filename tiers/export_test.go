package tiers

import (
	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// TableLen is the number of entries that the resident table knows by key.
func TableLen(s *Store) int { return s.table.Len() }

// Expire is what a sweep does with a block that it found past its time.
func Expire(s *Store, h block.Handle) { s.expire(h) }

// HandleOf is the handle of a block's entry, 0 when there is none.
func HandleOf(s *Store, k block.Key) block.Handle {
	h, _, _ := s.table.Lookup(k)
	return h
}

// EntryOf is a copy of a block's entry.
func EntryOf(s *Store, k block.Key) index.Entry {
	_, e, _ := s.table.Lookup(k)
	return e
}

// HoldCommits keeps the catalog as it is until release is called: what is
// queued meanwhile is neither written nor answered.
func HoldCommits(s *Store) (release func()) {
	held, free := make(chan struct{}), make(chan struct{})
	s.commits.add(catalogOp{key: block.Key{}, hlen: block.HashBytes, fin: func(error) {
		close(held)
		<-free
	}})
	<-held
	return func() { close(free) }
}

// Catalog is the store's catalog.
func Catalog(s *Store) *index.Catalog { return s.catalog }

// EvictG3 takes a block out of G3 as its evictor does, and answers when the drop
// of its record is queued.
func EvictG3(s *Store, h block.Handle) (begun bool) {
	s.table.Update(h, func(e *index.Entry) {
		if begun = s.mayLeave(s.g3, e); begun {
			s.startLeave(h, e, block.Evicted, nil)
		}
	})
	return begun
}

// DamagedG3 is what a reader does that found a copy in G3 damaged; e is the
// entry as it was when the read began.
func DamagedG3(s *Store, h block.Handle, e *index.Entry) { s.damagedG3(h, e, block.ErrCorrupt) }

// Activity is a number that stays as it is only while nothing happens in the
// store, and the number of the event published last.
func Activity(s *Store) (work int64, seq uint64) {
	s.moves.mu.Lock()
	flights := len(s.moves.mu.m)
	s.moves.mu.Unlock()
	seq = s.events.stats().Published
	return s.commits.rounds.Load() + int64(flights)<<32 + int64(seq)<<40, seq
}

// Evict takes a block out of a tier as the tier's evictor does, and returns the
// bytes that came free there.
func Evict(s *Store, t block.TierID, h block.Handle) (freed int64) {
	return s.evict(s.tier(index.TierIndex(t)), []block.Handle{h})
}

// BeforeFlush has before called ahead of each flush of a slab. It comes before
// the first put.
func BeforeFlush(s *Store, before func(device int)) {
	for i, slab := range s.slabs {
		flush := slab.sync
		slab.sync = func() error {
			before(i)
			return flush()
		}
	}
}
