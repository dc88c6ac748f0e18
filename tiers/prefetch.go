package tiers

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// prefetchWorkers is how many blocks are brought up side by side: the depth at
// which a device gives its bandwidth without queueing.
const prefetchWorkers = 4

// Prefetch brings blocks up to G2; see api.Store.
func (s *Store) Prefetch(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error {
	if err := o.Check(); err != nil {
		return fmt.Errorf("prefetch: %w", err)
	}
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return fmt.Errorf("prefetch: %w", err)
	}
	type known struct {
		i      int
		reason block.MissReason
	}
	var items []prefetchItem
	var absent []block.Key
	var far []farBlock
	var sure, maybe []known
	for i := range n {
		k := keyAt(nsID, hashLen, hashes, i)
		g := s.grip(k)
		switch {
		case g.h == 0 && g.reason == block.MissAbsent && s.objects != nil:
			absent, maybe = append(absent, k), append(maybe, known{i, g.reason})
		case g.h == 0 || live(&g.e, ixG2):
			sure = append(sure, known{i, g.reason})
		default:
			slot, _ := SlotBytes(int64(g.e.Len))
			items = append(items, prefetchItem{key: k, bytes: slot, index: i})
		}
		s.ungrip(&g)
	}
	if len(absent) > 0 {
		found, err := s.objects.findAll(ctx, absent, true)
		if err != nil {
			return fmt.Errorf("prefetch: %w", err)
		}
		for j := range found {
			if found[j].why != block.Hit {
				sure = append(sure, maybe[j])
				continue
			}
			slot, _ := SlotBytes(int64(found[j].rec.Len))
			items = append(items, prefetchItem{key: absent[j], bytes: slot, index: maybe[j].i})
			far = append(far, farBlock{absent[j], slot})
		}
		slices.SortFunc(items, func(a, b prefetchItem) int { return a.index - b.index })
	}
	for i := range items {
		if len(far) > 0 && items[i].key == far[0].key {
			far = far[1:]
			items[i].ahead = far
		}
	}
	r, err := s.prefetches.add(ctx, o, n, items)
	if err != nil {
		return fmt.Errorf("prefetch: %w", err)
	}
	defer func() { r.end(errors.Is(ctx.Err(), context.DeadlineExceeded)) }()
	for _, k := range sure {
		tier := block.NoTier
		if k.reason == block.Hit {
			tier = block.G2
		}
		r.know(k.i, k.reason, tier)
	}
	for i := range n {
		p, err := r.wait(ctx, i)
		if err != nil {
			return err
		}
		if err := progress(p); err != nil {
			return err
		}
	}
	return nil
}

// CancelPrefetch ends a prefetch by its id.
func (s *Store) CancelPrefetch(id string) error { return s.prefetches.cancel(id) }

// prefetcher brings up what is queued until the store's life ends.
func (s *Store) prefetcher() {
	for {
		it, err := s.prefetches.next(s.life)
		if err != nil {
			return
		}
		reason, tier := s.bringUp(it.context(), it.key, it.ahead)
		if reason == block.Hit {
			s.markPrefetched(it.key)
		}
		s.prefetches.done(it, reason, tier)
	}
}

// bringUp brings one block up. ahead are those of the same request behind this one that
// were in G4: they come along, so that neighbours in an object are read together.
func (s *Store) bringUp(ctx context.Context, k block.Key, ahead []farBlock) (block.MissReason, block.TierID) {
	g := s.grip(k)
	if g.h == 0 && g.reason == block.MissAbsent && s.objects != nil {
		return s.bringUpFar(ctx, k, ahead)
	}
	if g.h == 0 {
		return g.reason, block.NoTier
	}
	defer s.release(g.h)
	if err := s.copyTo(ctx, s.g2, []block.Handle{g.h})[0]; err != nil {
		return missOf(err), block.G3
	}
	return block.Hit, block.G2
}

// markPrefetched notes that a block was brought up ahead of a read.
func (s *Store) markPrefetched(k block.Key) {
	g := s.grip(k)
	if g.h == 0 {
		return
	}
	s.table.Update(g.h, func(e *index.Entry) {
		if live(e, ixG2) && e.Flags&flagDeleted == 0 {
			e.Flags |= flagFetched
		}
	})
	s.ungrip(&g)
}

// usePrefetched counts the first read of a block that a prefetch has brought up. e is how it
// was found.
func (s *Store) usePrefetched(h block.Handle, e *index.Entry) {
	if e.Flags&flagFetched == 0 {
		return
	}
	s.table.Update(h, func(e *index.Entry) {
		if e.Flags&flagFetched != 0 {
			e.Flags &^= flagFetched
			s.prefetches.useful.Add(1)
		}
	})
}
