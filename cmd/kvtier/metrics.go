package main

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// group is a list of metrics that are all taken from a snapshot of type T and
// have the same labels.
type group[T any] struct {
	prefix  string // of the names
	labels  []string
	metrics []metric[T]
}

// metric is one number of a snapshot.
type metric[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*T) float64
}

func (g *group[T]) add(kind prometheus.ValueType, name, help string, value func(*T) float64) {
	d := prometheus.NewDesc(g.prefix+name, help, g.labels, nil)
	g.metrics = append(g.metrics, metric[T]{d, kind, value})
}

func (g *group[T]) describe(ch chan<- *prometheus.Desc) {
	for _, m := range g.metrics {
		ch <- m.desc
	}
}

func (g *group[T]) collect(ch chan<- prometheus.Metric, snapshot *T, labels ...string) {
	for _, m := range g.metrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(snapshot), labels...)
	}
}

// storeSnapshot is what the store says of itself at one time.
type storeSnapshot struct {
	stats   block.Stats
	catalog index.CatalogMetrics
	ready   bool // committed blocks are served
}

// storeCollector turns snapshots of the store into Prometheus metrics. Each
// scrape takes one snapshot, so the values of one scrape belong together.
type storeCollector struct {
	take    func() (storeSnapshot, bool) // false while there is no store
	store   group[block.Stats]
	tier    group[block.TierStats]
	admit   group[block.AdmissionStats]
	upload  group[block.UploadStats]
	budget  group[block.BudgetStats]
	turned  *prometheus.Desc
	curve   *prometheus.Desc
	device  group[block.DeviceStats]
	wear    group[block.DeviceWear]
	written *prometheus.Desc
	scrub   group[block.ScrubStatus]
	sweep   group[block.ObjectSweep]
	catalog group[index.CatalogMetrics]
	health  group[block.CatalogStats]
	misses  *prometheus.Desc
	removed *prometheus.Desc
	ready   *prometheus.Desc
	info    *prometheus.Desc
	opened  *prometheus.Desc
	policy  *prometheus.Desc
	space   group[block.NamespaceStats]
	missed  *prometheus.Desc
}

// newStoreCollector makes the collector of what take returns.
func newStoreCollector(take func() (storeSnapshot, bool)) *storeCollector {
	c := &storeCollector{
		take:   take,
		store:  group[block.Stats]{prefix: "kvtier_"},
		tier:   group[block.TierStats]{prefix: "kvtier_tier_", labels: []string{"tier"}},
		admit:  group[block.AdmissionStats]{prefix: "kvtier_tier_", labels: []string{"tier"}},
		upload: group[block.UploadStats]{prefix: "kvtier_upload_"},
		budget: group[block.BudgetStats]{prefix: "kvtier_tier_write_budget_", labels: []string{"tier", "namespaces"}},
		turned: prometheus.NewDesc("kvtier_tier_rejected_total", "Blocks that left the tier above, were in no other, and were not admitted to the tier, by reason.", []string{"tier", "reason"}, nil),
		curve: prometheus.NewDesc("kvtier_tier_would_hit_ratio", "Share of the blocks asked for that the tier would have had with another policy or size, in capacities; estimated.",
			[]string{"tier", "policy", "size"}, nil),
		device:  group[block.DeviceStats]{prefix: "kvtier_device_", labels: []string{"tier", "device"}},
		wear:    group[block.DeviceWear]{prefix: "kvtier_device_wear_", labels: []string{"tier", "device"}},
		written: prometheus.NewDesc("kvtier_device_wear_written_bytes_total", "Bytes that all who ever used the NVMe device have written to it; absent where it does not say.", []string{"tier", "device"}, nil),
		scrub:   group[block.ScrubStatus]{prefix: "kvtier_scrub_"},
		sweep:   group[block.ObjectSweep]{prefix: "kvtier_bucket_sweep_", labels: []string{"bucket"}},
		catalog: group[index.CatalogMetrics]{prefix: "kvtier_catalog_"},
		health:  group[block.CatalogStats]{prefix: "kvtier_catalog_"},
		misses:  prometheus.NewDesc("kvtier_misses_total", "Keys that were not served, by reason.", []string{"reason"}, nil),
		removed: prometheus.NewDesc("kvtier_removed_total", "Blocks that left the store for good, by reason.", []string{"reason"}, nil),
		ready:   prometheus.NewDesc("kvtier_ready", "1 when committed blocks are served.", nil, nil),
		info: prometheus.NewDesc("kvtier_device_info", "A device of a tier: identity of its slab, I/O engine and state. Always 1.",
			[]string{"tier", "device", "id", "engine", "state"}, nil),
		opened: prometheus.NewDesc("kvtier_store_info", "The store: its incarnation, which is drawn when it is opened. Always 1.", []string{"incarnation"}, nil),
		space:  group[block.NamespaceStats]{prefix: "kvtier_namespace_", labels: []string{"namespace"}},
		missed: prometheus.NewDesc("kvtier_namespace_misses_total", "Keys of a namespace that a match or get did not find, or a get did not serve, by reason.", []string{"namespace", "reason"}, nil),
		policy: prometheus.NewDesc("kvtier_tier_policy_info", "Which policy decides what leaves a tier. Always 1.", []string{"tier", "policy"}, nil),
	}
	c.addStore()
	c.addTier()
	c.addAdmission()
	c.addUploads()
	c.addNamespace()
	c.addDevice()
	c.addScrub()
	addSweep(&c.sweep)
	c.addCatalog()
	return c
}

func (c *storeCollector) addStore() {
	c.store.add(gauge, "uptime_seconds", "Time since the store was opened.", func(s *block.Stats) float64 { return s.Uptime.Seconds() })
	c.store.add(gauge, "namespaces", "Namespaces.", func(s *block.Stats) float64 { return float64(s.Namespaces) })
	c.store.add(gauge, "blocks", "Blocks in any tier.", func(s *block.Stats) float64 { return float64(s.Blocks) })
	c.store.add(counter, "conflicts_total", "Puts of a key that was there with other bytes.", func(s *block.Stats) float64 { return float64(s.Conflicts) })
	c.store.add(counter, "corrupt_total", "Blocks dropped because their bytes failed their checksum.", func(s *block.Stats) float64 { return float64(s.Corrupt) })
	c.store.add(gauge, "leases", "Leases that are held.", func(s *block.Stats) float64 { return float64(s.Leases) })
	c.store.add(counter, "chunks_passed_total", "Chunks of the DRAM tier that went to namespaces with other readers and writers.", func(s *block.Stats) float64 { return float64(s.ChunksPassed) })
	c.store.add(counter, "chunks_stuck_total", "Chunks of the DRAM tier that should have gone to others and could not.", func(s *block.Stats) float64 { return float64(s.ChunksStuck) })
	c.store.add(gauge, "reservations", "Reservations not committed yet.", func(s *block.Stats) float64 { return float64(s.Reservations) })
	c.store.add(gauge, "watchers", "Watchers of events.", func(s *block.Stats) float64 { return float64(s.Watchers) })
	c.store.add(counter, "events_lost_total", "Events that a watcher was too slow for.", func(s *block.Stats) float64 { return float64(s.EventsLost) })
	c.store.add(counter, "events_total", "Events that happened.", func(s *block.Stats) float64 { return float64(s.EventSeq) })
	c.store.add(gauge, "pinned_blocks", "Blocks that are pinned.", func(s *block.Stats) float64 { return float64(s.Pinned) })
	c.store.add(gauge, "pinned_bytes", "Bytes of payload of blocks that are pinned.", func(s *block.Stats) float64 { return float64(s.PinnedBytes) })
	c.store.add(gauge, "table_bytes", "Memory of the resident table.", func(s *block.Stats) float64 { return float64(s.TableBytes) })
	c.store.add(counter, "prefetch_queued_total", "Blocks queued for prefetch.", func(s *block.Stats) float64 { return float64(s.Prefetch.Queued) })
	c.store.add(counter, "prefetch_done_total", "Blocks brought up by prefetch.", func(s *block.Stats) float64 { return float64(s.Prefetch.Done) })
	c.store.add(counter, "prefetch_dropped_total", "Blocks not prefetched because the queue was full.", func(s *block.Stats) float64 { return float64(s.Prefetch.Dropped) })
	c.store.add(counter, "prefetch_displaced_total", "Blocks whose prefetch gave way to one of a higher priority.", func(s *block.Stats) float64 { return float64(s.Prefetch.Displaced) })
	c.store.add(counter, "prefetch_stale_total", "Blocks whose prefetch had not begun when they were of no use any more.", func(s *block.Stats) float64 { return float64(s.Prefetch.Stale) })
	c.store.add(counter, "prefetch_cancelled_total", "Blocks whose prefetch was cancelled.", func(s *block.Stats) float64 { return float64(s.Prefetch.Cancelled) })
	c.store.add(counter, "prefetch_useful_total", "Prefetched blocks that were read in DRAM then.", func(s *block.Stats) float64 { return float64(s.Prefetch.Useful) })
	c.store.add(counter, "prefetch_wasted_total", "Prefetched blocks that left DRAM without having been read.", func(s *block.Stats) float64 { return float64(s.Prefetch.Wasted) })
}

func (c *storeCollector) addNamespace() {
	c.space.add(counter, "asked_blocks_total", "Blocks of a namespace in matches.", func(n *block.NamespaceStats) float64 { return float64(n.Asked) })
	c.space.add(counter, "matched_blocks_total", "Of those, blocks in unbroken prefixes.", func(n *block.NamespaceStats) float64 { return float64(n.Matched) })
}

func (c *storeCollector) addTier() {
	c.tier.add(gauge, "capacity_bytes", "Bytes that slots of the tier may take.", func(t *block.TierStats) float64 { return float64(t.Capacity) })
	c.tier.add(gauge, "used_bytes", "Bytes that slots take, with headers and rounding.", func(t *block.TierStats) float64 { return float64(t.Used) })
	c.tier.add(gauge, "reserve_bytes", "Bytes that are free without waiting for the evictor.", func(t *block.TierStats) float64 { return float64(t.Reserve) })
	c.tier.add(gauge, "blocks", "Blocks in the tier.", func(t *block.TierStats) float64 { return float64(t.Blocks) })
	c.tier.add(gauge, "payload_bytes", "Bytes of payload in the tier.", func(t *block.TierStats) float64 { return float64(t.Payload) })
	c.tier.add(gauge, "high_watermark_bytes", "Used bytes above which the evictor works.", func(t *block.TierStats) float64 { return float64(t.High) })
	c.tier.add(gauge, "low_watermark_bytes", "Used bytes down to which the evictor works.", func(t *block.TierStats) float64 { return float64(t.Low) })
	c.tier.add(counter, "evictions_total", "Blocks that left the tier by eviction, moved down or dropped.", func(t *block.TierStats) float64 { return float64(t.Evictions) })
	c.tier.add(counter, "dropped_total", "Evicted blocks of which no other copy was left.", func(t *block.TierStats) float64 { return float64(t.Dropped) })
	c.tier.add(counter, "reclaimed_bytes_total", "Bytes reclaimed by eviction.", func(t *block.TierStats) float64 { return float64(t.Reclaimed) })
	c.tier.add(counter, "in_bytes_total", "Bytes written into the tier.", func(t *block.TierStats) float64 { return float64(t.BytesIn) })
	c.tier.add(counter, "out_bytes_total", "Bytes read from the tier.", func(t *block.TierStats) float64 { return float64(t.BytesOut) })
	c.tier.add(counter, "refused_total", "Puts for which the tier had no room.", func(t *block.TierStats) float64 { return float64(t.Refused) })
	c.tier.add(counter, "hits_total", "Blocks served from the tier.", func(t *block.TierStats) float64 { return float64(t.Hits) })
	c.tier.add(gauge, "eviction_behind_seconds", "How long the tier has been above its high watermark although it should not; 0 when eviction keeps up.", func(t *block.TierStats) float64 { return t.Behind.Seconds() })
	c.tier.add(counter, "eviction_fell_behind_total", "How often eviction fell behind.", func(t *block.TierStats) float64 { return float64(t.FellBehind) })
	c.tier.add(counter, "policy_hints_dropped_total", "Hints to the policy, and requests to its curves, that their queues had no room for.", func(t *block.TierStats) float64 { return float64(t.QueueDrops) })
}

func (c *storeCollector) addAdmission() {
	c.budget.add(gauge, "bytes", "Bytes that may be written to the tier in a day; 0: any number.", func(b *block.BudgetStats) float64 { return float64(b.Bytes) })
	c.budget.add(gauge, "available_bytes", "Bytes of the budget that may be written now; below 0 when others have overdrawn it.", func(b *block.BudgetStats) float64 { return float64(b.AvailableBytes) })
	c.budget.add(gauge, "requests", "Requests that may write to the tier in a day; 0: any number.", func(b *block.BudgetStats) float64 { return float64(b.Requests) })
	c.budget.add(gauge, "available_requests", "Requests of the budget that may be made now; below 0 when others have overdrawn it.", func(b *block.BudgetStats) float64 { return float64(b.AvailableRequests) })
	c.admit.add(counter, "admitted_total", "Blocks that left the tier above, were in no other, and were admitted to the tier.", func(a *block.AdmissionStats) float64 { return float64(a.Admitted) })
}

func (c *storeCollector) addUploads() {
	c.upload.add(gauge, "queued_blocks", "Blocks in local tiers that wait for the bucket, or are on their way.", func(u *block.UploadStats) float64 { return float64(u.Blocks) })
	c.upload.add(gauge, "queued_bytes", "Bytes of their slots.", func(u *block.UploadStats) float64 { return float64(u.Bytes) })
	c.upload.add(counter, "held_back_total", "Blocks that did not leave their tier since the queue was full.", func(u *block.UploadStats) float64 { return float64(u.HeldBack) })
	c.upload.add(counter, "dropped_total", "Blocks that stayed in their tier since they had waited too long.", func(u *block.UploadStats) float64 { return float64(u.Dropped) })
	c.upload.add(counter, "through_dropped_total", "Blocks that were to go up as soon as they were put, for which the queue had no room.", func(u *block.UploadStats) float64 { return float64(u.Through) })
	c.upload.add(counter, "failed_total", "Blocks that could not be written to the bucket, and stayed.", func(u *block.UploadStats) float64 { return float64(u.Failed) })
}

func (c *storeCollector) addDevice() {
	c.device.add(gauge, "bytes", "Size of the device.", func(d *block.DeviceStats) float64 { return float64(d.Bytes) })
	c.device.add(gauge, "filesystem_free_bytes", "Free bytes of the file system under the device; 0 for block devices.", func(d *block.DeviceStats) float64 { return float64(d.FreeOnFS) })
	c.device.add(gauge, "healthy", "1 when the device is healthy.", func(d *block.DeviceStats) float64 { return oneIf(d.State == block.Healthy) })
	c.device.add(gauge, "down", "1 when the device is not used until a probe succeeds.", func(d *block.DeviceStats) float64 { return oneIf(d.State == block.Down) })
	c.device.add(counter, "errors_total", "Errors of the device's I/O.", func(d *block.DeviceStats) float64 { return float64(d.Errors) })
	c.device.add(gauge, "quarantined_bytes", "Bytes of slots that are left out until they can be read and written again.", func(d *block.DeviceStats) float64 { return float64(d.Quarantined) })
	c.device.add(gauge, "page_bytes", "Size of the memory pages obtained; 0 for devices that are not memory.", func(d *block.DeviceStats) float64 { return float64(d.PageBytes) })
	c.device.add(gauge, "locked_bytes", "Bytes locked in memory.", func(d *block.DeviceStats) float64 { return float64(d.Locked) })
	c.wear.add(gauge, "used_ratio", "Share of its rated endurance that the NVMe device has used, by its own estimate; may be above 1. Absent where it does not tell.", func(w *block.DeviceWear) float64 { return float64(w.UsedPercent) / 100 })
	c.wear.add(gauge, "spare_ratio", "Share of the NVMe device's spare capacity that is left.", func(w *block.DeviceWear) float64 { return float64(w.SparePercent) / 100 })
	c.wear.add(gauge, "spare_threshold_ratio", "Share of the spare capacity below which the NVMe device warns.", func(w *block.DeviceWear) float64 { return float64(w.SpareThreshold) / 100 })
	c.wear.add(gauge, "critical_warning", "Bits of the NVMe device's critical warning; 0 when there is none.", func(w *block.DeviceWear) float64 { return float64(w.CriticalWarning) })
}

// addScrub adds what is said of the scrub that runs, or else ran last. A scrub that
// begins anew counts from 0, so these are no counters.
func (c *storeCollector) addScrub() {
	c.scrub.add(gauge, "running", "1 while a scrub runs.", func(s *block.ScrubStatus) float64 { return oneIf(s.State == block.ScrubRunning) })
	c.scrub.add(gauge, "failed", "1 when the last scrub ended with an error.", func(s *block.ScrubStatus) float64 { return oneIf(s.State == block.ScrubFailed) })
	c.scrub.add(gauge, "done_bytes", "Bytes of the slabs that the last scrub is through with.", func(s *block.ScrubStatus) float64 { return float64(s.Done) })
	c.scrub.add(gauge, "size_bytes", "Bytes of the slabs that the last scrub goes through.", func(s *block.ScrubStatus) float64 { return float64(s.Total) })
	c.scrub.add(gauge, "blocks", "Blocks that the last scrub has read and compared.", func(s *block.ScrubStatus) float64 { return float64(s.Blocks) })
	c.scrub.add(gauge, "damaged_blocks", "Of those, blocks whose header or payload was wrong or could not be read.", func(s *block.ScrubStatus) float64 { return float64(s.Damaged) })
	c.scrub.add(gauge, "repaired_blocks", "Of the damaged, blocks written anew from another tier.", func(s *block.ScrubStatus) float64 { return float64(s.Repaired) })
	c.scrub.add(gauge, "dropped_blocks", "Of the damaged, blocks that no other tier had.", func(s *block.ScrubStatus) float64 { return float64(s.Dropped) })
	c.scrub.add(gauge, "stale_headers", "Headers of blocks that are gone, which the last scrub invalidated.", func(s *block.ScrubStatus) float64 { return float64(s.Stale) })
	c.scrub.add(gauge, "ended_timestamp_seconds", "When the last scrub ended; 0 while it runs, and when there was none.", func(s *block.ScrubStatus) float64 { return unixSeconds(s.Ended) })
}

func (c *storeCollector) addCatalog() {
	c.health.add(gauge, "healthy", "1 when the catalog records what is new.", func(s *block.CatalogStats) float64 { return oneIf(s.State == block.Healthy) })
	c.health.add(counter, "errors_total", "Times that the catalog left its healthy state.", func(s *block.CatalogStats) float64 { return float64(s.Errors) })
	c.catalog.add(gauge, "disk_bytes", "Bytes of the catalog on disk.", func(m *index.CatalogMetrics) float64 { return float64(m.DiskBytes) })
	c.catalog.add(gauge, "wal_bytes", "Bytes of the catalog's log on disk.", func(m *index.CatalogMetrics) float64 { return float64(m.WALBytes) })
	c.catalog.add(gauge, "memtable_bytes", "Memory of records not yet in a table.", func(m *index.CatalogMetrics) float64 { return float64(m.MemTableBytes) })
	c.catalog.add(gauge, "cache_bytes", "Memory of the catalog's block cache.", func(m *index.CatalogMetrics) float64 { return float64(m.CacheBytes) })
	c.catalog.add(counter, "cache_hits_total", "Reads that the block cache served.", func(m *index.CatalogMetrics) float64 { return float64(m.CacheHits) })
	c.catalog.add(counter, "cache_misses_total", "Reads that the block cache did not serve.", func(m *index.CatalogMetrics) float64 { return float64(m.CacheMisses) })
	c.catalog.add(counter, "flushes_total", "Flushes of memory to a table.", func(m *index.CatalogMetrics) float64 { return float64(m.Flushes) })
	c.catalog.add(counter, "compactions_total", "Compactions.", func(m *index.CatalogMetrics) float64 { return float64(m.Compactions) })
	c.catalog.add(gauge, "compaction_debt_bytes", "Bytes that compactions still have to move.", func(m *index.CatalogMetrics) float64 { return float64(m.CompactionDebt) })
	c.catalog.add(gauge, "level0_files", "Tables in level 0.", func(m *index.CatalogMetrics) float64 { return float64(m.L0Files) })
	c.catalog.add(counter, "wal_syncs_total", "Syncs of the log.", func(m *index.CatalogMetrics) float64 { return float64(m.WALSyncs) })
	c.catalog.add(counter, "wal_sync_seconds_total", "Time of all syncs of the log together.", func(m *index.CatalogMetrics) float64 { return m.WALSyncTime.Seconds() })
	c.catalog.add(gauge, "wal_sync_longest_seconds", "The longest sync of the log.", func(m *index.CatalogMetrics) float64 { return m.WALSyncMax.Seconds() })
	c.catalog.add(gauge, "failed", "1 when the catalog takes no commits any more.", func(m *index.CatalogMetrics) float64 { return oneIf(m.Failed) })
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func unixSeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// Describe lists the metrics.
func (c *storeCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.ready, c.info, c.opened, c.policy, c.missed, c.misses, c.removed, c.turned, c.curve, c.written} {
		ch <- d
	}
	c.store.describe(ch)
	c.tier.describe(ch)
	c.admit.describe(ch)
	c.upload.describe(ch)
	c.space.describe(ch)
	c.device.describe(ch)
	c.wear.describe(ch)
	c.scrub.describe(ch)
	c.sweep.describe(ch)
	c.catalog.describe(ch)
	c.health.describe(ch)
}

// Collect takes a snapshot.
func (c *storeCollector) Collect(ch chan<- prometheus.Metric) {
	s, open := c.take()
	ch <- prometheus.MustNewConstMetric(c.ready, gauge, oneIf(s.ready))
	if !open {
		return
	}
	c.store.collect(ch, &s.stats)
	c.scrub.collect(ch, &s.stats.Scrub)
	for i := range s.stats.ObjectSweeps {
		w := &s.stats.ObjectSweeps[i]
		c.sweep.collect(ch, w, w.Bucket)
	}
	c.catalog.collect(ch, &s.catalog)
	c.health.collect(ch, &s.stats.Catalog)
	ch <- prometheus.MustNewConstMetric(c.opened, gauge, 1, formatIncarnation(s.stats.Incarnation))
	for reason, n := range s.stats.Misses {
		ch <- prometheus.MustNewConstMetric(c.misses, counter, float64(n), reason)
	}
	for reason, n := range s.stats.Removed {
		ch <- prometheus.MustNewConstMetric(c.removed, counter, float64(n), reason)
	}
	for i := range s.stats.ByNamespace {
		n := &s.stats.ByNamespace[i]
		c.space.collect(ch, n, n.Name)
		for reason, count := range n.Misses {
			ch <- prometheus.MustNewConstMetric(c.missed, counter, float64(count), n.Name, reason)
		}
	}
	for i := range s.stats.Tiers {
		t := &s.stats.Tiers[i]
		c.tier.collect(ch, t, t.Tier.String())
		ch <- prometheus.MustNewConstMetric(c.policy, gauge, 1, t.Tier.String(), t.Policy)
		if a := t.Admission; a != nil {
			c.admit.collect(ch, a, t.Tier.String())
			for j := range a.Budgets {
				c.budget.collect(ch, &a.Budgets[j], t.Tier.String(), a.Budgets[j].Namespaces)
			}
			for reason, n := range a.Rejected {
				ch <- prometheus.MustNewConstMetric(c.turned, counter, float64(n), t.Tier.String(), reason)
			}
		}
		if t.Uploads != nil {
			c.upload.collect(ch, t.Uploads)
		}
		for _, k := range t.Curves {
			if k.Asked > 0 {
				ch <- prometheus.MustNewConstMetric(c.curve, gauge, float64(k.Hits)/float64(k.Asked), t.Tier.String(), k.Policy, curveSize(k.Size))
			}
		}
		for j := range t.Devices {
			d := &t.Devices[j]
			ch <- prometheus.MustNewConstMetric(c.info, gauge, 1, t.Tier.String(), d.Path, d.ID, d.Engine, d.State)
			c.device.collect(ch, d, t.Tier.String(), d.Path)
			if w := d.Wear; w != nil {
				c.wear.collect(ch, w, t.Tier.String(), d.Path)
				if w.WrittenBytes > 0 {
					ch <- prometheus.MustNewConstMetric(c.written, counter, float64(w.WrittenBytes), t.Tier.String(), d.Path)
				}
			}
		}
	}
}
