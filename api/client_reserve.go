package api

import (
	"context"
	"fmt"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// ReserveItem names a block to take room for.
type ReserveItem struct {
	Hash      block.Hash
	Parent    block.Hash
	HasParent bool
	Len       int64
}

// ReserveResult is what Reserve answers for one item.
type ReserveResult struct {
	Reserved block.Reserved
	Existing block.Existing // with Reserved.Status Exists
	Err      error
}

// Reserve takes room for blocks ahead of their bytes. There is one result per
// item; reservations end with the connection.
func (c *Client) Reserve(ctx context.Context, ns block.Namespace, items []ReserveItem, o PutOptions) ([]ReserveResult, error) {
	if len(items) == 0 {
		return nil, nil
	}
	n, err := hashLen(ns)
	if err != nil {
		return nil, err
	}
	req := &pb.ReserveRequest{Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), Durable: pb.Tier(o.Durable), TtlMs: millis(o.TTL)}
	for i := range items {
		it := &items[i]
		if err := checkPayload(it.Len); err != nil {
			return nil, fmt.Errorf("reserve item %d: %w", i, err)
		}
		req.Items = append(req.Items, &pb.ReserveItem{
			Hash: it.Hash[:n], Parent: hashBytes(it.Parent, n, it.HasParent), Length: uint32(it.Len),
		})
	}
	r, err := c.rpc.Reserve(ctx, req)
	if err != nil {
		return nil, c.fail("reserve", err)
	}
	out := make([]ReserveResult, 0, len(items))
	for _, it := range r.GetItems() {
		switch it.GetStatus() {
		case pb.PutStatus_PUT_STATUS_RESERVED:
			out = append(out, ReserveResult{Reserved: block.Reserved{
				ID: it.GetId(), Left: fromMillis(it.GetLeftMs()), Place: block.Place(it.GetPlace()),
			}})
		case pb.PutStatus_PUT_STATUS_EXISTS:
			out = append(out, ReserveResult{
				Reserved: block.Reserved{Status: block.Exists},
				Existing: block.Existing{Len: it.GetLength(), Sum: sumFromPB(it.GetSum())},
			})
		default:
			out = append(out, ReserveResult{Err: fromFailure(it.GetFailure())})
		}
	}
	if len(out) != len(items) {
		return nil, fmt.Errorf("reserve: server answered %d of %d items", len(out), len(items))
	}
	return out, nil
}

// Fill writes p at off of a reservation of the namespace, in order and without
// gaps. ErrLeaseExpired.
func (c *Client) Fill(ctx context.Context, ns block.Namespace, id uint64, off int64, p []byte) error {
	if err := checkPayload(int64(len(p))); err != nil {
		return fmt.Errorf("fill reservation %d: %w", id, err)
	}
	res, err := c.put(ctx, 1, func(send func(*putFrame) error) error {
		f := putFrame{
			open:  c.putOpen(ns, PutOptions{}),
			block: &pb.PutBlock{Reservation: id, Offset: off, Length: uint32(len(p))},
		}
		return sendBytes(&f, p, send)
	})
	if err != nil {
		return err
	}
	if res[0].Err != nil {
		return fmt.Errorf("fill reservation %d: %w", id, res[0].Err)
	}
	return nil
}

// Commit makes full reservations visible together, and returns when each is as
// durable as it was asked to be. There is one result per id.
func (c *Client) Commit(ctx context.Context, ids []uint64) ([]PutResult, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	r, err := c.rpc.Commit(ctx, &pb.CommitRequest{Ids: ids})
	if err != nil {
		return nil, c.fail("commit", err)
	}
	if len(r.GetResults()) != len(ids) {
		return nil, fmt.Errorf("commit: server answered %d of %d reservations", len(r.GetResults()), len(ids))
	}
	out := make([]PutResult, len(ids))
	for i, p := range r.GetResults() {
		out[i] = putResultFromPB(p)
	}
	return out, nil
}

// Abort gives reservations back. Unknown ones are ignored.
func (c *Client) Abort(ctx context.Context, ids []uint64) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := c.rpc.Abort(ctx, &pb.AbortRequest{Ids: ids}); err != nil {
		return c.fail("abort", err)
	}
	return nil
}
