package tiers

import (
	"sync"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// curves says what a tier would have hit if it were another. Its evictor tells it of
// requests, beside the tier's policy.
type curves struct {
	sync.Mutex
	c *policy.Curves
}

// ponder tells the curves of requests. name is the tier's policy.
func (t *tier) ponder(name string, reqs []policyRequest) {
	if len(reqs) == 0 {
		return
	}
	capacity := t.blockCapacity()
	t.curves.Lock()
	defer t.curves.Unlock()
	if t.curves.c == nil {
		t.curves.c = policy.NewCurves(name)
	}
	t.curves.c.Follow(name)
	for _, r := range reqs {
		t.curves.c.Request(r.path, capacity)
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

func (c *curves) stats() (out []block.Curve) {
	c.Lock()
	defer c.Unlock()
	if c.c == nil {
		return nil
	}
	for _, k := range c.c.Curves(nil) {
		out = append(out, block.Curve{Policy: k.Policy, Size: k.Size, Asked: k.Refs, Hits: k.Hits})
	}
	return out
}
