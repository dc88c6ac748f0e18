package tiers

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// A tier's policy is changed while the tier works: the evictor takes the blocks out
// of the old one in the order in which they would leave, and gives them to the new
// one in that order, some at a time, with events and evictions in between. What
// comes meanwhile comes into the new one, so every block is in one of the two.

// handoverBlocks is about how many blocks a step moves, and handoverLook how many it
// looks at while it prepares: some milliseconds, in which nothing is evicted.
const (
	handoverBlocks = 1 << 10
	handoverLook   = 1 << 15
)

// policyChange asks an evictor for another policy.
type policyChange struct {
	p    policy.Policy
	done chan struct{} // closed when it has all blocks
}

// handover is a change under way.
type handover struct {
	old    policy.Policy // still has blocks; nil: no change is under way
	done   chan struct{}
	freed  bool         // what the store said of leaves does not hold blocks back in old any more
	at     block.Handle // until there
	blocks []block.Handle
}

// policyState is what others may know of an evictor's policy.
type policyState struct {
	name, start string
	moving      int
}

// SetPolicy changes the policy of a tier; see api.Store.
func (s *Store) SetPolicy(ctx context.Context, id block.TierID, name string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("set policy: %w", err)
	}
	var changes []policyChange
	var ts []*tier
	for _, t := range s.tiers() {
		if id != block.NoTier && id != t.id {
			continue
		}
		p, err := policy.New(name)
		if err != nil {
			return fmt.Errorf("set policy: %w", err)
		}
		ts = append(ts, t)
		changes = append(changes, policyChange{p: p, done: make(chan struct{})})
	}
	if len(ts) == 0 {
		return fmt.Errorf("set policy: %w: this store has no tier %s", block.ErrUnavailable, id)
	}
	for i, t := range ts {
		select {
		case t.change <- changes[i]: // one change waits until the one before it is done
		case <-ctx.Done():
			return fmt.Errorf("set policy of %s: another change is not done yet: %w", t.id, context.Cause(ctx))
		case <-s.life.Done():
			return fmt.Errorf("set policy of %s: %w", t.id, block.ErrClosed)
		}
		t.wake()
	}
	for i, t := range ts {
		select {
		case <-changes[i].done:
		case <-ctx.Done():
			return fmt.Errorf("set policy of %s: blocks are still being moved to it: %w", t.id, context.Cause(ctx))
		case <-s.life.Done():
			return fmt.Errorf("set policy of %s: %w", t.id, block.ErrClosed)
		}
	}
	return nil
}

// Policies tells which policies the tiers have; see api.Store.
func (s *Store) Policies() (out []block.TierPolicy) {
	for _, t := range s.tiers() {
		t.mu.Lock()
		p := t.mu.policy
		t.mu.Unlock()
		out = append(out, block.TierPolicy{Tier: t.id, Policy: p.name, Start: p.start, Moving: int64(p.moving)})
	}
	return out
}

// handOver does a step of the change under way, or begins one that is asked for.
func (v *evictor) handOver() {
	if v.old == nil {
		select {
		case c := <-v.t.change:
			v.begin(c)
		default:
			return
		}
	}
	switch {
	case v.old == nil: // it has that policy
	case !v.freed:
		v.freeSome()
	default:
		v.moveSome()
	}
	v.show()
	v.t.wake() // for the next step, or the next change
}

func (v *evictor) begin(c policyChange) {
	if c.p.Name() == v.p.Name() {
		close(c.done)
		return
	}
	v.s.log.Info("policy changes", "tier", v.t.id, "from", v.p.Name(), "to", c.p.Name(), "blocks", v.p.Len())
	v.handover = handover{old: v.p, done: c.done}
	v.p = c.p
}

// freeSome tells the old policy of some blocks that they are leaves, as far as the
// store is concerned: else a block whose child it does not know would never come out.
// It goes on keeping parents behind the children that it knows.
func (v *evictor) freeSome() {
	n := 0
	from := v.at
	v.freed = true
	v.s.table.Range(from, func(h block.Handle, _ *index.Entry) bool {
		if n == handoverLook {
			v.at, v.freed = h, false
			return false
		}
		n++
		v.old.Leaf(h, true)
		return true
	})
}

// moveSome moves blocks from the old policy to the new one.
func (v *evictor) moveSome() {
	blocks := max(v.t.blocks.Load(), 1)
	need := (v.t.payload.Load()/blocks + 1) * handoverBlocks
	v.blocks = v.old.Victims(v.blocks[:0], need, func(block.Handle) bool { return true })
	for _, h := range v.blocks {
		v.old.Remove(h, block.Discarded) // by no choice of its own
		v.insert(h)
	}
	switch {
	case v.old.Len() == 0:
		v.s.log.Info("policy changed", "tier", v.t.id, "policy", v.p.Name(), "blocks", v.p.Len())
		close(v.done)
		v.handover = handover{}
	case len(v.blocks) == 0:
		v.freed, v.at = false, 0 // a block came into the table behind the look
	}
}

// show lets others know.
func (v *evictor) show() {
	moving := 0
	if v.old != nil {
		moving = v.old.Len()
	}
	v.t.mu.Lock()
	v.t.mu.policy.name, v.t.mu.policy.moving = v.p.Name(), moving
	v.t.mu.Unlock()
}
