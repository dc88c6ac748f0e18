package tiers_test

import (
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestConversationLeases: a conversation that comes back soon is given leases that are
// short, and so are others of its class; one that nothing is known of gets what it asks for.
func TestConversationLeases(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, NoSlabs: true})
	ns, other := space(t, s, "a", 1<<20), space(t, s, "b", 1<<20)
	mustPut(t, s, ns, 0, 4<<10, block.PutOptions{})
	mustPut(t, s, other, 0, 4<<10, block.PutOptions{})
	lease := func(ns block.Namespace, o block.MatchOptions) time.Duration {
		t.Helper()
		o.Lease = tiers.MaxLease
		var m block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, pack(hashOf(0)), o, &m); err != nil || m.Lease.ID == 0 {
			t.Fatalf("%+v, %v", m, err)
		}
		if err := s.ReleaseLease(m.Lease.ID); err != nil {
			t.Fatal(err)
		}
		return m.Lease.Left
	}
	agent := block.MatchOptions{Conversation: "agent", Class: 1}
	for range 11 {
		lease(ns, agent)
		time.Sleep(60 * time.Millisecond)
	}
	// The test may be slow, but not by hours.
	const long = tiers.MaxLease / 2
	for _, c := range []struct {
		name  string
		ns    block.Namespace
		o     block.MatchOptions
		short bool
	}{
		{"its own", ns, agent, true},
		{"of a tool that looks", ns, block.MatchOptions{Conversation: "agent", Quiet: true}, true},
		{"another of its class", ns, block.MatchOptions{Conversation: "new", Class: 1}, true},
		{"one of another class", ns, block.MatchOptions{Conversation: "chat", Class: 2}, false},
		{"one of that name elsewhere", other, agent, false},
		{"none", ns, block.MatchOptions{Class: 1}, false},
	} {
		if d := lease(c.ns, c.o); (d < long) != c.short || d <= 0 {
			t.Errorf("%s: leased for %v", c.name, d)
		}
	}
	// Nothing is leased longer than was asked for.
	agent.Lease = 10 * time.Millisecond
	var m block.MatchResult
	if err := s.Match(t.Context(), ns.ID, hashLen, pack(hashOf(0)), agent, &m); err != nil || m.Lease.Left > agent.Lease {
		t.Errorf("asked for %v: %+v, %v", agent.Lease, m.Lease, err)
	}
}
