package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/api/session"
)

// sessionCollector turns snapshots of the server of sessions into Prometheus metrics.
type sessionCollector struct {
	take   func() (session.Stats, bool) // false while there is no server
	server group[session.Stats]
	calls  *prometheus.Desc
}

func newSessionCollector(take func() (session.Stats, bool)) *sessionCollector {
	c := &sessionCollector{
		take:   take,
		server: group[session.Stats]{prefix: "kvtier_session_"},
		calls:  prometheus.NewDesc("kvtier_session_calls_total", "Calls of sessions, by message.", []string{"call"}, nil),
	}
	c.server.add(gauge, "open", "Sessions that are open.", func(s *session.Stats) float64 { return float64(s.Sessions) })
	c.server.add(gauge, "pending", "Connections that have not said hello yet.", func(s *session.Stats) float64 { return float64(s.Pending) })
	c.server.add(gauge, "grants", "Places that clients may fill.", func(s *session.Stats) float64 { return float64(s.Grants) })
	c.server.add(gauge, "revoked_grants", "Places that ran out and that a client has not given back yet.", func(s *session.Stats) float64 { return float64(s.Revoked) })
	c.server.add(gauge, "orphaned_grants", "Places that wait for the end of a process whose session has ended.", func(s *session.Stats) float64 { return float64(s.Orphans) })
	c.server.add(counter, "accepted_total", "Sessions that began.", func(s *session.Stats) float64 { return float64(s.Accepted) })
	c.server.add(counter, "refused_total", "Connections that did not become a session.", func(s *session.Stats) float64 { return float64(s.Refused) })
	c.server.add(counter, "busy_total", "Keys and calls refused because a session had too much in flight.", func(s *session.Stats) float64 { return float64(s.Busy) })
	c.server.add(counter, "corrupt_puts_total", "Puts whose bytes came with another checksum.", func(s *session.Stats) float64 { return float64(s.Corrupt) })
	c.server.add(counter, "unpassed_total", "Places and blocks whose memory could not be passed to a client.", func(s *session.Stats) float64 { return float64(s.Unpassed) })
	c.server.add(counter, "expired_grants_total", "Places that were granted and not used in time.", func(s *session.Stats) float64 { return float64(s.Expired) })
	c.server.add(counter, "received_bytes_total", "Bytes of frames received, without those that clients of this host wrote themselves.", func(s *session.Stats) float64 { return float64(s.BytesIn) })
	c.server.add(counter, "sent_bytes_total", "Bytes of frames sent, without those that clients of this host read themselves.", func(s *session.Stats) float64 { return float64(s.BytesOut) })
	c.server.add(counter, "skipped_bytes_total", "Of the bytes received, those for places that were not there.", func(s *session.Stats) float64 { return float64(s.Skipped) })
	c.server.add(gauge, "regions", "Files of clients that are mapped, to move bytes to and from.", func(s *session.Stats) float64 { return float64(s.Regions) })
	c.server.add(gauge, "region_bytes", "Bytes of those.", func(s *session.Stats) float64 { return float64(s.RegionBytes) })
	c.server.add(counter, "region_read_bytes_total", "Bytes copied from regions of clients into the store.", func(s *session.Stats) float64 { return float64(s.RegionIn) })
	c.server.add(counter, "region_written_bytes_total", "Bytes copied from the store into regions of clients.", func(s *session.Stats) float64 { return float64(s.RegionOut) })
	c.server.add(counter, "region_faults_total", "Regions that were cut short while they were used.", func(s *session.Stats) float64 { return float64(s.RegionFaults) })
	c.server.add(gauge, "opening_regions", "Hellos whose regions are being opened; on a file system that does not answer they stay.", func(s *session.Stats) float64 { return float64(s.Openings) })
	c.server.add(counter, "late_regions_total", "Hellos refused because their regions could not be opened in time.", func(s *session.Stats) float64 { return float64(s.OpenLate) })
	return c
}

// sessionCalls names the requests, as metrics do.
var sessionCalls = map[session.Code]string{
	session.CodeMatch: "match", session.CodeGet: "get", session.CodeGrant: "grant", session.CodePut: "put",
	session.CodeRelease: "release", session.CodeRenew: "renew", session.CodePrefetch: "prefetch",
	session.CodeLocate: "locate", session.CodeWatch: "watch", session.CodeCancel: "cancel",
	session.CodeOpen: "open", session.CodePin: "pin",
	session.CodeRegionGet: "region_get", session.CodeRegionPut: "region_put",
	session.CodeReportPrefill: "report_prefill",
}

// Describe lists the metrics.
func (c *sessionCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.calls
	c.server.describe(ch)
}

// Collect takes a snapshot.
func (c *sessionCollector) Collect(ch chan<- prometheus.Metric) {
	s, ok := c.take()
	if !ok {
		return
	}
	c.server.collect(ch, &s)
	for code, name := range sessionCalls {
		ch <- prometheus.MustNewConstMetric(c.calls, counter, float64(s.Calls[code]), name)
	}
}
