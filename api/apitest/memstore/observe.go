package memstore

import (
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
	st.Incarnation, st.EventSeq, st.PinnedBytes = s.incarnation, s.mu.events.seq, s.mu.pinned
	st.Catalog.State = block.Healthy
	var payload int64
	for _, n := range s.mu.byID {
		st.Blocks += int64(len(n.blocks))
		for _, e := range n.blocks {
			payload += int64(len(e.data))
			if e.pinned {
				st.Pinned++
			}
		}
	}
	st.Leases, st.Reservations, st.Watchers = int64(len(s.mu.leases)), int64(len(s.mu.reservations)+len(s.mu.grants)), s.mu.events.watchers
	st.Misses, st.Removed = clone(s.mu.misses), clone(s.mu.removed)
	st.Tiers = []block.TierStats{{
		Tier: block.G2, Capacity: s.opts.Capacity, Used: s.mu.used, Blocks: st.Blocks, Payload: payload, Refused: s.mu.refused, Policy: s.mu.policy,
		Devices: []block.DeviceStats{{Path: "memory", State: block.Healthy, Since: s.started.Truncate(time.Millisecond), Bytes: s.opts.Capacity}},
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
