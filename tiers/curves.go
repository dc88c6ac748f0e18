package tiers

import (
	"context"
	"sync"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// curves says what a tier would have hit if it were another. Its evictor passes on the
// requests that it tells its policy of; they are looked at elsewhere, since that may
// take longer than the policy itself.
type curves struct {
	feed chan curveBatch
	mu   struct {
		sync.Mutex
		c *policy.Curves
	}
}

// curveBatch is requests, and what the tier was like when they came.
type curveBatch struct {
	requests []policyRequest
	policy   string
	capacity int64 // blocks
}

// curveRoom is how many batches wait; more are dropped, and counted.
const curveRoom = 8

// ponder passes requests on. name is the tier's policy.
func (t *tier) ponder(name string, requests []policyRequest) {
	if len(requests) == 0 {
		return
	}
	select {
	case t.curves.feed <- curveBatch{requests, name, t.blockCapacity()}:
	default:
		t.events.drops.Add(int64(len(requests)))
	}
}

// blockCapacity is how many blocks the tier holds as a rule, of the size of those that it
// has: 0 while it has none.
func (t *tier) blockCapacity() int64 {
	n := t.blocks.Load()
	if n < 1 {
		return 0
	}
	size, _ := SlotBytes(t.payload.Load() / n)
	return (t.high + t.low) / 2 / size
}

// run looks at requests until life ends.
func (c *curves) run(life context.Context) {
	for {
		select {
		case b := <-c.feed:
			for _, r := range b.requests {
				c.look(b, r)
			}
		case <-life.Done():
			return
		}
	}
}

// look looks at one request, so that who wants to know does not wait for many.
func (c *curves) look(b curveBatch, r policyRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.c == nil {
		c.mu.c = policy.NewCurves(b.policy)
	}
	c.mu.c.Follow(b.policy)
	c.mu.c.Request(r.path, b.capacity)
}

func (c *curves) stats() (out []block.Curve) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.c == nil {
		return nil
	}
	for _, k := range c.mu.c.Curves(nil) {
		out = append(out, block.Curve{Policy: k.Policy, Size: k.Size, Asked: k.Refs, Hits: k.Hits})
	}
	return out
}
