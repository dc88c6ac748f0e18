package tiers

import (
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// Stats is a snapshot of the store's counters.
func (s *Store) Stats() block.Stats {
	st := block.Stats{
		Uptime:       time.Since(s.start),
		Namespaces:   int64(s.names.len()),
		Misses:       map[string]int64{},
		Removed:      map[string]int64{},
		Conflicts:    s.conflicts.Load(),
		Corrupt:      s.corrupt.Load(),
		Leases:       int64(s.leases.Stats().Leases),
		Reservations: s.reservations.open.Load() + s.grants.count(),
		Prefetch:     s.prefetches.stats(),
		TableBytes:   s.table.Bytes(),
		Scrub:        s.scrubStatus(),
		Catalog:      s.catalogStats(),
	}
	if s.chunks != nil {
		st.ChunksPassed, st.ChunksStuck = s.chunks.passed.Load(), s.chunks.stuck.Load()
	}
	ev := s.events.stats()
	st.Watchers, st.EventsLost = int64(ev.Watchers), ev.Lost
	st.Incarnation, st.EventSeq = s.events.incarnation, ev.Published
	st.Pinned, st.PinnedBytes = s.pins.blocks.Load(), s.pins.payload.Load()
	for r := block.MissAbsent; r <= block.MissRecompute; r++ {
		st.Misses[r.String()] = s.misses[r].Load()
	}
	for r := block.Evicted; r <= block.Rejected; r++ {
		st.Removed[r.String()] = s.removed[r].Load()
	}
	for _, n := range s.names.all() {
		st.Blocks += n.blocks.Load()
		of := n.lookups.stats(n.get().Desc.Name)
		if c := s.prefillCost(n); c != (block.PrefillCost{}) {
			of.Prefill = &c
		}
		st.ByNamespace = append(st.ByNamespace, of)
	}
	for _, t := range s.tiers() {
		st.Tiers = append(st.Tiers, t.stats(s))
	}
	if s.objects != nil {
		far := s.objects.stats()
		far.Admission = s.toG4.stats()
		st.Tiers = append(st.Tiers, far)
		for _, p := range s.objects.buckets {
			st.ObjectSweeps = append(st.ObjectSweeps, p.sweepStatus())
		}
	}
	return st
}

func (t *tier) stats(s *Store) block.TierStats {
	t.mu.Lock()
	used, policy := t.mu.used, t.mu.policy.name
	t.mu.Unlock()
	st := block.TierStats{
		Tier: t.id, Capacity: t.capacity, Used: used, Reserve: t.capacity - used,
		Blocks: t.blocks.Load(), Payload: t.payload.Load(), High: t.high, Low: t.low,
		Evictions: t.evictions.Load(), Dropped: t.dropped.Load(), Reclaimed: t.reclaimed.Load(),
		BytesIn: t.bytesIn.Load(), BytesOut: t.bytesOut.Load(), Refused: t.refused.Load(),
		Hits: t.hits.Load(), QueueDrops: t.events.drops.Load(), Policy: policy,
		Behind: time.Duration(t.behind.Load()), FellBehind: t.fellBehind.Load(),
	}
	st.Curves = t.curves.stats()
	st.Admission = s.to(t.id).stats()
	for _, d := range t.devs {
		st.Devices = append(st.Devices, d.stats(s))
	}
	return st
}

func (d *device) stats(s *Store) block.DeviceStats {
	if d.slab == nil {
		got := d.mem.Obtained()
		return block.DeviceStats{Path: "memory", Bytes: d.mem.Size(), State: block.Healthy, Since: s.start, PageBytes: got.PageBytes, Locked: got.LockedBytes}
	}
	st := block.DeviceStats{Path: d.slab.Path(), ID: d.slab.ID().String(), Bytes: d.slab.Bytes()}
	d.health.stats(&st)
	st.Wear = d.wear.last.Load()
	st.Quarantined = s.g3.badBytes(d)
	if free, err := d.slab.FreeOnFS(); err == nil {
		st.FreeOnFS = free
	} else if st.Reason == "" {
		st.Reason = err.Error()
	}
	for _, b := range s.agent.Backends() {
		for _, p := range b.Caps.Pairs {
			if p.Remote == d.kind && st.Engine == "" {
				st.Engine = b.Caps.Engine
			}
		}
	}
	return st
}

// CatalogMetrics is a snapshot of the catalog's own metrics.
func (s *Store) CatalogMetrics() index.CatalogMetrics { return s.catalog.Metrics() }

// Table is the resident table, for a benchmark that looks keys up in it and does
// nothing else. Only the store may change it.
func (s *Store) Table() *index.Table { return s.table }
