package tiers

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

const (
	// maxConversations bounds the conversations of which pauses are known.
	maxConversations = 1 << 16
	// shortestLease is what a conversation's lease lasts at least: a pause on a machine with
	// more to do is longer than those before it.
	shortestLease = time.Second
)

// conversations knows how long conversations pause between their requests, so that their
// leases last until the next one.
type conversations struct {
	seed maphash.Seed // nobody can choose a name to be taken for another
	mu   struct {
		sync.Mutex
		pauses *policy.Pauses
	}
}

func (c *conversations) init() {
	c.seed = maphash.MakeSeed()
	c.mu.pauses = policy.NewPauses(maxConversations)
}

// conversing notes a match of a conversation, unless it is quiet, and returns how long its
// lease is to be: what was asked for, or until the next match will nearly always have
// come. That is 0 without a lease.
func (s *Store) conversing(ns block.NamespaceID, o *block.MatchOptions) time.Duration {
	if o.Conversation == "" {
		return o.Lease
	}
	c := &s.conversations
	name := maphash.Comparable(c.seed, struct {
		ns   block.NamespaceID
		name string
	}{ns, o.Conversation})
	class := uint64(ns)<<8 | uint64(o.Class)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !o.Quiet {
		c.mu.pauses.Request(name, class, time.Since(s.start))
	}
	if until := c.mu.pauses.Until(name, class); until > 0 {
		return min(o.Lease, max(until, shortestLease))
	}
	return o.Lease
}
