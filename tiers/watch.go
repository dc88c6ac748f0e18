package tiers

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// Watch calls fn for each event, as o says; see api.Store.
func (s *Store) Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error {
	name := ""
	if o.NS != 0 {
		n, err := s.names.byID(o.NS)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		name = n.get().Desc.Name
	}
	snapshot := func(seq uint64) error { return s.snapshot(ctx, o.NS, name, seq, fn) }
	return s.events.watch(ctx, o, name, snapshot, fn)
}

// snapshot tells of each block in each tier, and then that this was all, as of
// event seq or later. What changes meanwhile is told by the events behind seq,
// since they are published under the lock under which an entry is read here. It
// takes one entry at a time, and no lock is held while fn runs. An EventPresent
// has no number: one who has not seen the whole cannot go on behind it.
func (s *Store) snapshot(ctx context.Context, ns block.NamespaceID, name string, seq uint64, fn func(block.Event) error) error {
	var told, looked int64
	var err error
	s.table.Range(1, func(_ block.Handle, e *index.Entry) bool {
		// A namespace may be a small part of the table.
		if looked++; looked%eventBatch == 0 {
			if err = ctx.Err(); err == nil {
				err = s.events.err()
			}
		}
		if ns != 0 && e.NS != ns || expired(e, nowUnix()) {
			return err == nil
		}
		for ix := range e.State {
			if err == nil && live(e, ix) {
				err = s.present(ctx, e, ix, fn)
				told++
			}
		}
		return err == nil
	})
	if err == nil && s.objects != nil {
		var far int64
		far, err = s.objects.presentFar(ctx, ns, fn)
		told += far
	}
	if err == nil {
		err = s.events.err() // the table of a store that closes is not the whole
	}
	if err != nil {
		return err
	}
	return fn(block.Event{Seq: seq, Kind: block.EventSnapshot, NS: name, Count: told})
}

func (s *Store) present(ctx context.Context, e *index.Entry, ix int, fn func(block.Event) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	parent, _ := s.parentHash(e)
	return fn(s.event(block.EventPresent, e, ix, parent))
}
