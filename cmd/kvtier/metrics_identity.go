package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvtier/kvtier/api/access"
)

// identityCollector turns what identities have into Prometheus metrics.
type identityCollector struct {
	take     func() []access.Usage
	identity group[access.Usage]
}

func newIdentityCollector(take func() []access.Usage) *identityCollector {
	c := &identityCollector{take: take, identity: group[access.Usage]{prefix: "kvtier_identity_", labels: []string{"identity"}}}
	c.identity.add(gauge, "sessions", "Sessions that an identity of --access has open.", func(u *access.Usage) float64 { return float64(u.Sessions) })
	c.identity.add(gauge, "sessions_limit", "Sessions that it may have.", func(u *access.Usage) float64 { return float64(u.SessionsLimit) })
	c.identity.add(counter, "sessions_refused_total", "Sessions refused because it had as many as it may.", func(u *access.Usage) float64 { return float64(u.SessionsRefused) })
	c.identity.add(gauge, "leases", "Leases that it holds, in sessions and over gRPC.", func(u *access.Usage) float64 { return float64(u.Leases) })
	c.identity.add(gauge, "leases_limit", "Leases that it may hold.", func(u *access.Usage) float64 { return float64(u.LeasesLimit) })
	c.identity.add(counter, "leases_refused_total", "Leases refused because it had as many as it may.", func(u *access.Usage) float64 { return float64(u.LeasesRefused) })
	return c
}

// Describe lists the metrics.
func (c *identityCollector) Describe(ch chan<- *prometheus.Desc) { c.identity.describe(ch) }

// Collect takes a snapshot.
func (c *identityCollector) Collect(ch chan<- prometheus.Metric) {
	for _, u := range c.take() {
		c.identity.collect(ch, &u, u.Name)
	}
}
