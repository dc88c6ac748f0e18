package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/index/block"
)

// objectCollector turns snapshots of the buckets' backends into Prometheus metrics: what
// their services bill, and how they do.
type objectCollector struct {
	buckets  []*object.Backend
	stats    group[object.Stats]
	requests *prometheus.Desc
}

func newObjectCollector(buckets []*object.Backend) *objectCollector {
	c := &objectCollector{
		buckets:  buckets,
		stats:    group[object.Stats]{prefix: "kvtier_bucket_", labels: []string{"bucket"}},
		requests: prometheus.NewDesc("kvtier_bucket_requests_total", "Requests of a bucket's service by kind, also those that failed.", []string{"bucket", "kind"}, nil),
	}
	c.stats.add(counter, "retries_total", "Requests that were made again.", func(s *object.Stats) float64 { return float64(s.Retries) })
	c.stats.add(counter, "throttled_total", "Requests that the service refused because of its load.", func(s *object.Stats) float64 { return float64(s.Throttled) })
	c.stats.add(counter, "failed_total", "Requests that failed otherwise and may succeed when they are made again.", func(s *object.Stats) float64 { return float64(s.Failed) })
	c.stats.add(counter, "refused_total", "Requests that the service answered by no: what is missing, forbidden or there already.", func(s *object.Stats) float64 { return float64(s.Refused) })
	c.stats.add(counter, "in_bytes_total", "Bytes that were read from the bucket.", func(s *object.Stats) float64 { return float64(s.BytesIn) })
	c.stats.add(counter, "out_bytes_total", "Bytes that were written to the bucket.", func(s *object.Stats) float64 { return float64(s.BytesOut) })
	c.stats.add(gauge, "request_limit", "Requests that may run at once now; the service's load decides.", func(s *object.Stats) float64 { return float64(s.Limit) })
	c.stats.add(gauge, "in_flight_requests", "Requests that run.", func(s *object.Stats) float64 { return float64(s.InFlight) })
	return c
}

// Describe lists the metrics.
func (c *objectCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.requests
	c.stats.describe(ch)
}

// Collect takes the snapshots.
func (c *objectCollector) Collect(ch chan<- prometheus.Metric) {
	for _, b := range c.buckets {
		s := b.Stats()
		c.stats.collect(ch, &s, b.String())
		for k, n := range s.Requests {
			ch <- prometheus.MustNewConstMetric(c.requests, counter, float64(n), b.String(), object.Kind(k).String())
		}
	}
}

// addSweep adds what is said of the sweep of a bucket that runs, or else ran last.
func addSweep(g *group[block.ObjectSweep]) {
	type sweep = block.ObjectSweep
	g.add(gauge, "running", "1 while a sweep of the bucket is not at its end.", func(s *sweep) float64 { return oneIf(s.Running()) })
	g.add(gauge, "failed", "1 while it does not go on because of an error.", func(s *sweep) float64 { return oneIf(s.Error != "") })
	g.add(gauge, "objects", "Objects that the last sweep has listed.", func(s *sweep) float64 { return float64(s.Listed) })
	g.add(gauge, "orphans", "Objects that it removed: the catalog does not know them, or all in them is dead.", func(s *sweep) float64 { return float64(s.Orphans) })
	g.add(gauge, "orphan_bytes", "Bytes of those.", func(s *sweep) float64 { return float64(s.OrphanBytes) })
	g.add(gauge, "missing_objects", "Objects of the catalog that were not in the bucket.", func(s *sweep) float64 { return float64(s.Missing) })
	g.add(gauge, "lost_blocks", "Blocks in those, dropped from the catalog, but for the ones that another node deleted.", func(s *sweep) float64 { return float64(s.Lost) })
	g.add(gauge, "expired_blocks", "Blocks past their time that it dropped from the catalog.", func(s *sweep) float64 { return float64(s.Expired) })
	g.add(gauge, "rewritten_objects", "Objects of which less than half lived, and that it rewrote.", func(s *sweep) float64 { return float64(s.Rewritten) })
	g.add(gauge, "moved_blocks", "Blocks that went from those into others.", func(s *sweep) float64 { return float64(s.Moved) })
	g.add(gauge, "moved_bytes", "Bytes of those.", func(s *sweep) float64 { return float64(s.MovedBytes) })
	g.add(gauge, "ended_timestamp_seconds", "When the last sweep ended; 0 while it runs, and when there was none.", func(s *sweep) float64 { return unixSeconds(s.Ended) })
}
