package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// hashLen is the bytes of each hash that count. A namespace without one is new:
// its caller sets HashLen to the length that it uses before the first put.
func hashLen(ns block.Namespace) (int, error) {
	if !block.ValidHashLen(ns.HashLen) {
		return 0, invalid("namespace %q: hash length %d bytes, want 8, 16, 20 or 32: set HashLen of a new namespace", ns.Desc.Name, ns.HashLen)
	}
	return ns.HashLen, nil
}

// pack concatenates hashes in a pooled buffer, which free gives back.
func (c *Client) pack(ns block.Namespace, hashes []block.Hash) (packed []byte, free func(), err error) {
	n, err := hashLen(ns)
	if err != nil {
		return nil, nil, err
	}
	buf := c.packed.Get().(*[]byte)
	b := (*buf)[:0]
	for i := range hashes {
		b = append(b, hashes[i][:n]...)
	}
	*buf = b
	return b, func() { c.packed.Put(buf) }, nil
}

// Match looks keys up, root first. ns.HashLen says how many bytes of each hash
// count. No hashes is an empty result.
func (c *Client) Match(ctx context.Context, ns block.Namespace, hashes []block.Hash, o block.MatchOptions) (block.MatchResult, error) {
	var res block.MatchResult
	if len(hashes) == 0 {
		return res, nil
	}
	packed, free, err := c.pack(ns, hashes)
	if err != nil {
		return res, err
	}
	defer free()
	err = c.MatchPacked(ctx, ns, packed, o, &res)
	return res, err
}

// MatchPacked is Match for a caller who keeps its hashes packed, ns.HashLen bytes
// each. It fills res, reusing its slice. With a lease there are at most MaxMatchKeys.
func (c *Client) MatchPacked(ctx context.Context, ns block.Namespace, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	n, err := hashLen(ns)
	if err != nil {
		return err
	}
	if len(hashes) == 0 {
		*res = block.MatchResult{Blocks: res.Blocks[:0]}
		return nil
	}
	// A lease belongs to the gRPC connection, by which it is renewed.
	if o.Lease <= 0 && (o.Plan == nil || len(hashes) <= MaxKeys*n) {
		if s := c.session(ctx); s != nil && (o.Conversation == "" || s.Hints()) {
			return s.Match(ctx, c.handleOf(ns), hashes, o, res)
		}
	}
	most := MaxMatchKeys * n
	if o.Lease > 0 || o.Plan != nil {
		most = len(hashes) // one message, since it makes one lease, and a plan is of a whole prefix
	}
	into, unbroken := res, true
	for {
		part := hashes[:min(len(hashes), most)]
		hashes = hashes[len(part):]
		r, err := c.rpc.Match(ctx, &pb.MatchRequest{
			Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(n), Hashes: part,
			All: o.All, LeaseMs: millis(o.Lease), Class: uint32(o.Class), Quiet: o.Quiet, Plan: planToPB(o.Plan), Conversation: o.Conversation,
		})
		if err != nil {
			return c.fail("match", err)
		}
		o.Conversation = "" // it is one request of it
		matchFromPB(r, into)
		if into != res {
			res.Blocks = append(res.Blocks, into.Blocks...)
			if unbroken {
				res.Prefix += into.Prefix
			}
		}
		unbroken = unbroken && into.Prefix == len(part)/n
		if len(hashes) == 0 || !unbroken && !o.All {
			return nil
		}
		into = new(block.MatchResult)
	}
}

// Locate lists for each key every place where it lies, nearest first.
func (c *Client) Locate(ctx context.Context, ns block.Namespace, hashes []block.Hash) ([][]block.Located, error) {
	if len(hashes) == 0 {
		return nil, nil
	}
	packed, free, err := c.pack(ns, hashes)
	if err != nil {
		return nil, err
	}
	defer free()
	r, err := c.rpc.Locate(ctx, &pb.LocateRequest{
		Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(ns.HashLen), Hashes: packed,
	})
	if err != nil {
		return nil, c.fail("locate", err)
	}
	out := make([][]block.Located, len(r.GetKeys()))
	for i, k := range r.GetKeys() {
		for _, p := range k.GetPlaces() {
			out[i] = append(out[i], block.Located{Tier: block.TierID(p.GetTier()), Place: block.Place(p.GetPlace()), Len: p.GetLength()})
		}
	}
	return out, nil
}

// RenewLease lets a lease run for d from now. ErrLeaseExpired.
func (c *Client) RenewLease(ctx context.Context, id uint64, d time.Duration) (block.Lease, error) {
	l, err := c.rpc.RenewLease(ctx, &pb.RenewLeaseRequest{Id: id, LeaseMs: millis(d)})
	if err != nil {
		return block.Lease{}, c.fail(fmt.Sprintf("renew lease %d", id), err)
	}
	return leaseFromPB(l), nil
}

// ReleaseLease ends a lease. ErrLeaseExpired when it has ended already.
func (c *Client) ReleaseLease(ctx context.Context, id uint64) error {
	if _, err := c.rpc.ReleaseLease(ctx, &pb.ReleaseLeaseRequest{Id: id}); err != nil {
		return c.fail(fmt.Sprintf("release lease %d", id), err)
	}
	return nil
}

// Prefetch brings blocks up to G2, root first, and calls progress (nil: not wanted)
// for each key in order. It returns when all are settled, when ctx ends, when progress
// fails (with its error), or when CancelPrefetch names the id (context.Canceled).
func (c *Client) Prefetch(ctx context.Context, ns block.Namespace, hashes []block.Hash, o block.PrefetchOptions, progress func(block.Progress) error) error {
	if len(hashes) == 0 {
		return nil
	}
	packed, free, err := c.pack(ns, hashes)
	if err != nil {
		return err
	}
	defer free()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.Prefetch(ctx, &pb.PrefetchRequest{
		Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(ns.HashLen), Hashes: packed,
		RequestId: o.ID, Priority: uint32(o.Priority), WithinMs: millis(o.Within),
	})
	if err != nil {
		return c.fail("prefetch", err)
	}
	return each(c, "prefetch", stream, func(r *pb.PrefetchResponse) error {
		if progress == nil {
			return nil
		}
		return progress(block.Progress{Index: int(r.GetIndex()), Reason: block.MissReason(r.GetReason()), Tier: block.TierID(r.GetTier())})
	})
}

// CancelPrefetch ends the prefetch of that request id. ErrNotFound.
func (c *Client) CancelPrefetch(ctx context.Context, id string) error {
	if _, err := c.rpc.CancelPrefetch(ctx, &pb.CancelPrefetchRequest{RequestId: id}); err != nil {
		return c.fail("cancel prefetch "+id, err)
	}
	return nil
}

// Watch calls fn for each event of a namespace (nil: of all) as o says, until ctx
// ends, fn fails (with its error), or the server shuts down (ErrClosed). o.Ready
// is called once, when the server listens: what is done after it is told. A
// watcher that is too slow loses events and is told so with EventLost. o.NS does
// not count.
func (c *Client) Watch(ctx context.Context, ns *block.Namespace, o block.WatchOptions, fn func(block.Event) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := &pb.WatchRequest{Incarnation: o.Incarnation, After: o.After, Snapshot: o.Snapshot}
	if ns != nil {
		req.Namespace, req.NamespaceTag = uint32(ns.ID), c.tag(*ns)
	}
	stream, err := c.rpc.Watch(ctx, req)
	if err != nil {
		return c.fail("watch", err)
	}
	return each(c, "watch", stream, func(r *pb.WatchResponse) error {
		if r.GetReady() && o.Ready != nil {
			o.Ready(block.WatchStart{Incarnation: r.GetIncarnation(), Seq: r.GetSeq(), Resumed: r.GetResumed()})
		}
		if r.GetEvent() == nil {
			return nil
		}
		return fn(eventFromPB(r.GetEvent()))
	})
}

// each hands the messages of a stream to fn, whose errors are returned as they are.
func each[R any](c *Client, verb string, stream grpc.ServerStreamingClient[R], fn func(*R) error) error {
	for {
		r, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.fail(verb, err)
		}
		if err := fn(r); err != nil {
			return err
		}
	}
}
