package main

import (
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/policy/trace"
)

// startRecord begins the recording that the flags ask for; nil when they ask for none.
func startRecord(f *serveFlags, c *closers, log *slog.Logger) (*trace.Recorder, error) {
	if f.record == "" {
		return nil, nil
	}
	r, err := trace.NewRecorder(f.record, f.recordBytes, log)
	if err != nil {
		return nil, fmt.Errorf("--record: %w", err)
	}
	c.add(r.Close)
	log.Info("requests are recorded", "file", f.record, "bytes", formatSize(f.recordBytes))
	return r, nil
}

// recordCollector turns what a recording counts into Prometheus metrics.
type recordCollector struct {
	take   func() trace.RecorderStats
	record group[trace.RecorderStats]
}

func newRecordCollector(take func() trace.RecorderStats) *recordCollector {
	c := &recordCollector{take: take, record: group[trace.RecorderStats]{prefix: "kvtier_record_"}}
	c.record.add(counter, "requests_total", "Requests that were written to the file of --record.", func(s *trace.RecorderStats) float64 { return float64(s.Requests) })
	c.record.add(counter, "dropped_total", "Requests that were not, because the queue was full or the disk refused them.", func(s *trace.RecorderStats) float64 { return float64(s.Dropped) })
	c.record.add(counter, "bytes_total", "Bytes that were written.", func(s *trace.RecorderStats) float64 { return float64(s.Bytes) })
	return c
}

// Describe lists the metrics.
func (c *recordCollector) Describe(ch chan<- *prometheus.Desc) { c.record.describe(ch) }

// Collect takes a snapshot.
func (c *recordCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.take()
	c.record.collect(ch, &s)
}
