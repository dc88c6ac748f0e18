package api

import (
	"context"
	"fmt"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Delete removes blocks from all tiers, durably, and returns how many there were.
func (c *Client) Delete(ctx context.Context, ns block.Namespace, hashes []block.Hash) (int, error) {
	if len(hashes) == 0 {
		return 0, nil
	}
	packed, free, err := c.pack(ns, hashes)
	if err != nil {
		return 0, err
	}
	defer free()
	r, err := c.rpc.Delete(ctx, &pb.DeleteRequest{
		Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(ns.HashLen), Hashes: packed,
	})
	if err != nil {
		return 0, c.fail("delete", err)
	}
	return int(r.GetDeleted()), nil
}

// Clear removes all blocks of a namespace, durably, and returns how many there were.
func (c *Client) Clear(ctx context.Context, ns block.Namespace) (int64, error) {
	r, err := c.rpc.Clear(ctx, &pb.ClearRequest{Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns)})
	if err != nil {
		return 0, c.fail("clear namespace "+ns.Desc.Name, err)
	}
	return r.GetCleared(), nil
}

// List lists blocks of a namespace from behind the cursor ("" for the start),
// limit at most (0: 1000). next is "" at the end.
func (c *Client) List(ctx context.Context, ns block.Namespace, cursor string, limit int) (entries []block.ListEntry, next string, err error) {
	if limit < 0 || limit > MaxKeys {
		return nil, "", invalid("limit: %d, want 1 to %d", limit, MaxKeys)
	}
	r, err := c.rpc.List(ctx, &pb.ListRequest{Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), Cursor: cursor, Limit: uint32(limit)})
	if err != nil {
		return nil, "", c.fail("list namespace "+ns.Desc.Name, err)
	}
	entries = make([]block.ListEntry, len(r.GetEntries()))
	for i, e := range r.GetEntries() {
		entries[i] = listEntryFromPB(e)
	}
	return entries, r.GetNext(), nil
}

// Pin keeps blocks in the store: they move between tiers but are not evicted.
// Where there is G3 a pin survives restarts. One error for each key, in order:
// nil, ErrNotFound, ErrNoSpace (too much is pinned, or G3 has no room),
// ErrUnavailable.
func (c *Client) Pin(ctx context.Context, ns block.Namespace, hashes []block.Hash) ([]error, error) {
	if len(hashes) == 0 {
		return nil, nil
	}
	packed, free, err := c.pack(ns, hashes)
	if err != nil {
		return nil, err
	}
	defer free()
	r, err := c.rpc.Pin(ctx, &pb.PinRequest{
		Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(ns.HashLen), Hashes: packed,
	})
	if err != nil {
		return nil, c.fail("pin", err)
	}
	if len(r.GetResults()) != len(hashes) {
		return nil, fmt.Errorf("pin: %d results for %d keys", len(r.GetResults()), len(hashes))
	}
	out := make([]error, len(hashes))
	for i, p := range r.GetResults() {
		out[i] = fromFailure(p.GetFailure())
	}
	return out, nil
}

// Unpin lets blocks go again, and returns how many of them were pinned.
func (c *Client) Unpin(ctx context.Context, ns block.Namespace, hashes []block.Hash) (int, error) {
	if len(hashes) == 0 {
		return 0, nil
	}
	packed, free, err := c.pack(ns, hashes)
	if err != nil {
		return 0, err
	}
	defer free()
	r, err := c.rpc.Unpin(ctx, &pb.UnpinRequest{
		Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(ns.HashLen), Hashes: packed,
	})
	if err != nil {
		return 0, c.fail("unpin", err)
	}
	return int(r.GetUnpinned()), nil
}

// StartScrub starts reading and comparing everything on the durable media, in
// the background, and returns its state; Stats tells how far it is. It goes on
// where an earlier scrub was stopped. ErrUnavailable when one is running or there
// is no G3.
func (c *Client) StartScrub(ctx context.Context, o block.ScrubOptions) (block.ScrubStatus, error) {
	r, err := c.rpc.StartScrub(ctx, &pb.StartScrubRequest{BytesPerSecond: o.BytesPerSecond, Restart: o.Restart})
	if err != nil {
		return block.ScrubStatus{}, c.fail("start scrub", err)
	}
	return scrubFromPB(r), nil
}

// StopScrub ends a running scrub and returns its state when it has ended. Without
// one it does nothing.
func (c *Client) StopScrub(ctx context.Context) (block.ScrubStatus, error) {
	r, err := c.rpc.StopScrub(ctx, &pb.StopScrubRequest{})
	if err != nil {
		return block.ScrubStatus{}, c.fail("stop scrub", err)
	}
	return scrubFromPB(r), nil
}

// Policies tells for each tier, nearest first, which policy decides what leaves it.
func (c *Client) Policies(ctx context.Context) ([]block.TierPolicy, error) {
	r, err := c.rpc.ListPolicies(ctx, &pb.ListPoliciesRequest{})
	if err != nil {
		return nil, c.fail("list policies", err)
	}
	out := make([]block.TierPolicy, len(r.GetTiers()))
	for i, t := range r.GetTiers() {
		out[i] = policyFromPB(t)
	}
	return out, nil
}

// SetPolicy changes the policy of a tier, NoTier for all, by name. It returns when
// the new one has all blocks of the tier, in the order in which the old one would
// have evicted them; when ctx ends before, that goes on in the server. What was set
// lasts until it is set again or the store is opened anew. ErrInvalid lists the names
// there are; ErrUnavailable when there is no such tier.
func (c *Client) SetPolicy(ctx context.Context, tier block.TierID, name string) error {
	if _, err := c.rpc.SetPolicy(ctx, &pb.SetPolicyRequest{Tier: pb.Tier(tier), Policy: name}); err != nil {
		return c.fail("set policy", err)
	}
	return nil
}

// ReportPrefill tells what computing parts of prompts of a namespace took an engine, as
// often as it likes, MaxKeys reports at most. From the last ones the store learns what
// prefill costs there, for plans without a cost: see Stats. ErrInvalid, and then none of
// them counts.
func (c *Client) ReportPrefill(ctx context.Context, ns block.Namespace, reports []block.PrefillReport) error {
	req := &pb.ReportPrefillRequest{Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns)}
	for _, r := range reports {
		if err := r.Check(); err != nil {
			return err // the message has no room for all numbers
		}
		req.Reports = append(req.Reports, &pb.PrefillReport{Position: uint32(r.Position), Tokens: uint32(r.Tokens), TookNs: int64(r.Took)})
	}
	if _, err := c.rpc.ReportPrefill(ctx, req); err != nil {
		return c.fail("report prefill of namespace "+ns.Desc.Name, err)
	}
	return nil
}

// SetWriteBudget changes what may be written to a tier for blocks that leave the tier above,
// of namespaces or all; without a bound it takes it away. What was set lasts until it is
// set again or the store is opened anew. ErrInvalid; ErrUnavailable when there is no such
// tier.
func (c *Client) SetWriteBudget(ctx context.Context, b block.WriteBudget) error {
	if _, err := c.rpc.SetWriteBudget(ctx, &pb.SetWriteBudgetRequest{Budget: budgetToPB(block.BudgetStats{WriteBudget: b})}); err != nil {
		return c.fail("set write budget", err)
	}
	return nil
}
