package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/xfer"
)

// xferCollector turns snapshots of the transfer agent and of its posix backend
// into Prometheus metrics.
type xferCollector struct {
	agent func() xfer.Stats
	posix func() posix.Stats

	requests group[xfer.Stats]
	backends group[xfer.BackendStats]
	files    group[posix.Stats]
	info     *prometheus.Desc
}

func newXferCollector(agent func() xfer.Stats, files func() posix.Stats) *xferCollector {
	c := &xferCollector{
		agent:    agent,
		posix:    files,
		requests: group[xfer.Stats]{prefix: "kvtier_xfer_"},
		backends: group[xfer.BackendStats]{prefix: "kvtier_xfer_", labels: []string{"backend"}},
		files:    group[posix.Stats]{prefix: "kvtier_posix_"},
		info: prometheus.NewDesc("kvtier_posix_info", "The I/O engine of the posix backend, and why it is not a better one. Always 1.",
			[]string{"engine", "note"}, nil),
	}
	c.requests.add(gauge, "requests", "Transfer requests not released.", func(s *xfer.Stats) float64 { return float64(s.Requests) })
	c.requests.add(gauge, "in_flight_requests", "Transfer requests posted and not done.", func(s *xfer.Stats) float64 { return float64(s.InFlight) })
	c.requests.add(counter, "post_waits_total", "Posts that waited for others to end.", func(s *xfer.Stats) float64 { return float64(s.PostWaits) })

	c.backends.add(gauge, "regions", "Pieces of memory registered.", func(b *xfer.BackendStats) float64 { return float64(b.Regions) })
	c.backends.add(gauge, "registered_bytes", "Bytes of the registered pieces that have a length.", func(b *xfer.BackendStats) float64 { return float64(b.RegisteredBytes) })
	c.backends.add(counter, "transfers_total", "Transfers that ended, in whatever way.", func(b *xfer.BackendStats) float64 { return float64(b.Transfers) })
	c.backends.add(counter, "failed_transfers_total", "Transfers that ended with an error.", func(b *xfer.BackendStats) float64 { return float64(b.Failed) })
	c.backends.add(counter, "canceled_transfers_total", "Failed transfers that were cancelled or past their deadline.", func(b *xfer.BackendStats) float64 { return float64(b.Canceled) })
	c.backends.add(counter, "descriptors_total", "Descriptors whose bytes all arrived.", func(b *xfer.BackendStats) float64 { return float64(b.Descs) })
	c.backends.add(counter, "read_bytes_total", "Bytes read.", func(b *xfer.BackendStats) float64 { return float64(b.BytesRead) })
	c.backends.add(counter, "written_bytes_total", "Bytes written.", func(b *xfer.BackendStats) float64 { return float64(b.BytesWritten) })

	c.files.add(counter, "reads_total", "Read operations that ended.", func(s *posix.Stats) float64 { return float64(s.Reads) })
	c.files.add(counter, "writes_total", "Write operations that ended.", func(s *posix.Stats) float64 { return float64(s.Writes) })
	c.files.add(counter, "joined_descriptors_total", "Descriptors that travelled in another one's operation.", func(s *posix.Stats) float64 { return float64(s.Joined) })
	c.files.add(counter, "bounced_operations_total", "Operations that took an aligned copy.", func(s *posix.Stats) float64 { return float64(s.Bounced) })
	c.files.add(counter, "buffered_operations_total", "Operations through the page cache.", func(s *posix.Stats) float64 { return float64(s.Buffered) })
	c.files.add(counter, "queue_waits_total", "Times that a transfer found its device's queue full.", func(s *posix.Stats) float64 { return float64(s.Waits) })
	c.files.add(counter, "failed_operations_total", "Operations that failed.", func(s *posix.Stats) float64 { return float64(s.Failed) })
	c.files.add(gauge, "in_flight_operations", "Operations in flight on all devices.", func(s *posix.Stats) float64 { return float64(s.InFlightOps) })
	c.files.add(gauge, "in_flight_bytes", "Bytes in flight on all devices.", func(s *posix.Stats) float64 { return float64(s.InFlightBytes) })
	c.files.add(gauge, "registered_bytes", "Memory that the kernel knows, so that operations need not pin it.", func(s *posix.Stats) float64 { return float64(s.RegisteredBytes) })
	c.files.add(gauge, "unregistered_bytes", "Memory that the kernel would not take.", func(s *posix.Stats) float64 { return float64(s.UnregisteredBytes) })
	return c
}

// Describe lists the metrics.
func (c *xferCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.info
	c.requests.describe(ch)
	c.backends.describe(ch)
	c.files.describe(ch)
}

// Collect takes the snapshots.
func (c *xferCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.agent()
	c.requests.collect(ch, &s)
	for i := range s.Backends {
		c.backends.collect(ch, &s.Backends[i], s.Backends[i].Name)
	}
	p := c.posix()
	ch <- prometheus.MustNewConstMetric(c.info, gauge, 1, p.Engine, p.Note)
	c.files.collect(ch, &p)
}
