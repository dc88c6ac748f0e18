package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/backends/object"
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
