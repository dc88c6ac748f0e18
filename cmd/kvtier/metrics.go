package main

import (
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
	device  group[block.DeviceStats]
	catalog group[index.CatalogMetrics]
	misses  *prometheus.Desc
	removed *prometheus.Desc
	ready   *prometheus.Desc
	info    *prometheus.Desc
}

// newStoreCollector makes the collector of what take returns.
func newStoreCollector(take func() (storeSnapshot, bool)) *storeCollector {
	c := &storeCollector{
		take:    take,
		store:   group[block.Stats]{prefix: "kvtier_"},
		tier:    group[block.TierStats]{prefix: "kvtier_tier_", labels: []string{"tier"}},
		device:  group[block.DeviceStats]{prefix: "kvtier_device_", labels: []string{"tier", "device"}},
		catalog: group[index.CatalogMetrics]{prefix: "kvtier_catalog_"},
		misses:  prometheus.NewDesc("kvtier_misses_total", "Keys that were not served, by reason.", []string{"reason"}, nil),
		removed: prometheus.NewDesc("kvtier_removed_total", "Blocks that left the store for good, by reason.", []string{"reason"}, nil),
		ready:   prometheus.NewDesc("kvtier_ready", "1 when committed blocks are served.", nil, nil),
		info: prometheus.NewDesc("kvtier_device_info", "A device of a tier: identity of its slab, I/O engine and state. Always 1.",
			[]string{"tier", "device", "id", "engine", "state"}, nil),
	}
	c.addStore()
	c.addTier()
	c.addDevice()
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
	c.store.add(gauge, "reservations", "Reservations not committed yet.", func(s *block.Stats) float64 { return float64(s.Reservations) })
	c.store.add(gauge, "watchers", "Watchers of events.", func(s *block.Stats) float64 { return float64(s.Watchers) })
	c.store.add(counter, "events_lost_total", "Events that a watcher was too slow for.", func(s *block.Stats) float64 { return float64(s.EventsLost) })
	c.store.add(gauge, "table_bytes", "Memory of the resident table.", func(s *block.Stats) float64 { return float64(s.TableBytes) })
	c.store.add(counter, "prefetch_queued_total", "Blocks queued for prefetch.", func(s *block.Stats) float64 { return float64(s.Prefetch.Queued) })
	c.store.add(counter, "prefetch_done_total", "Blocks brought up by prefetch.", func(s *block.Stats) float64 { return float64(s.Prefetch.Done) })
	c.store.add(counter, "prefetch_dropped_total", "Blocks not prefetched because the queue was full.", func(s *block.Stats) float64 { return float64(s.Prefetch.Dropped) })
	c.store.add(counter, "prefetch_cancelled_total", "Blocks whose prefetch was cancelled.", func(s *block.Stats) float64 { return float64(s.Prefetch.Cancelled) })
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
	c.tier.add(counter, "policy_hints_dropped_total", "Hints to the policy that its queue had no room for.", func(t *block.TierStats) float64 { return float64(t.QueueDrops) })
}

func (c *storeCollector) addDevice() {
	c.device.add(gauge, "bytes", "Size of the device.", func(d *block.DeviceStats) float64 { return float64(d.Bytes) })
	c.device.add(gauge, "filesystem_free_bytes", "Free bytes of the file system under the device; 0 for block devices.", func(d *block.DeviceStats) float64 { return float64(d.FreeOnFS) })
	c.device.add(gauge, "healthy", "1 when the device is healthy.", func(d *block.DeviceStats) float64 { return oneIf(d.State == "healthy") })
	c.device.add(gauge, "page_bytes", "Size of the memory pages obtained; 0 for devices that are not memory.", func(d *block.DeviceStats) float64 { return float64(d.PageBytes) })
	c.device.add(gauge, "locked_bytes", "Bytes locked in memory.", func(d *block.DeviceStats) float64 { return float64(d.Locked) })
}

func (c *storeCollector) addCatalog() {
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

// Describe lists the metrics.
func (c *storeCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.ready, c.info, c.misses, c.removed} {
		ch <- d
	}
	c.store.describe(ch)
	c.tier.describe(ch)
	c.device.describe(ch)
	c.catalog.describe(ch)
}

// Collect takes a snapshot.
func (c *storeCollector) Collect(ch chan<- prometheus.Metric) {
	s, open := c.take()
	ch <- prometheus.MustNewConstMetric(c.ready, gauge, oneIf(s.ready))
	if !open {
		return
	}
	c.store.collect(ch, &s.stats)
	c.catalog.collect(ch, &s.catalog)
	for reason, n := range s.stats.Misses {
		ch <- prometheus.MustNewConstMetric(c.misses, counter, float64(n), reason)
	}
	for reason, n := range s.stats.Removed {
		ch <- prometheus.MustNewConstMetric(c.removed, counter, float64(n), reason)
	}
	for i := range s.stats.Tiers {
		t := &s.stats.Tiers[i]
		c.tier.collect(ch, t, t.Tier.String())
		for j := range t.Devices {
			d := &t.Devices[j]
			ch <- prometheus.MustNewConstMetric(c.info, gauge, 1, t.Tier.String(), d.Path, d.ID, d.Engine, d.State)
			c.device.collect(ch, d, t.Tier.String(), d.Path)
		}
	}
}
