package api

import (
	"context"

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
		b := block.ListEntry{
			HasPar: len(e.GetParent()) > 0, Len: e.GetLength(), Sum: sumFromPB(e.GetSum()), Expires: fromUnixMillis(e.GetExpiresUnixMs()),
		}
		copy(b.Hash[:], e.GetHash())
		copy(b.Parent[:], e.GetParent())
		for _, t := range e.GetTiers() {
			b.Tiers = append(b.Tiers, block.TierID(t))
		}
		entries[i] = b
	}
	return entries, r.GetNext(), nil
}
