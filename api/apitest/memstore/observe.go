package memstore

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Stats implements api.Store.
func (s *Store) Stats() block.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire()
	st := s.mu.stats
	st.Uptime = time.Since(s.started).Truncate(time.Millisecond)
	st.Namespaces = int64(len(s.mu.byID))
	var payload int64
	for _, n := range s.mu.byID {
		st.Blocks += int64(len(n.blocks))
		for _, e := range n.blocks {
			payload += int64(len(e.data))
		}
	}
	st.Leases, st.Reservations, st.Watchers = int64(len(s.mu.leases)), int64(len(s.mu.reservations)), int64(len(s.mu.watchers))
	st.Misses, st.Removed = clone(s.mu.misses), clone(s.mu.removed)
	st.Tiers = []block.TierStats{{
		Tier: block.G2, Capacity: s.opts.Capacity, Used: s.mu.used, Blocks: st.Blocks, Payload: payload, Refused: s.mu.refused,
		Devices: []block.DeviceStats{{Path: "memory", State: "healthy", Bytes: s.opts.Capacity}},
	}}
	return st
}

func clone(m map[string]int64) map[string]int64 {
	out := make(map[string]int64, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

// Watch implements api.Store.
func (s *Store) Watch(ctx context.Context, ns block.NamespaceID, ready func(), fn func(block.Event) error) error {
	w := &watcher{ns: ns, events: make(chan block.Event, 1024)}
	s.mu.Lock()
	if ns != 0 {
		if _, err := s.space(ns); err != nil {
			s.mu.Unlock()
			return err
		}
	}
	s.mu.watchers[w] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.mu.watchers, w)
	}()
	ready()
	for {
		select {
		case e := <-w.events:
			if err := fn(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
