package api

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Get reads blocks, or ranges of them, and calls use for each key in order, hit
// or miss, on the caller's goroutine. The bytes are valid until use returns. A
// whole block is checked against its checksum; one that fails is a miss with the
// reason MissCorrupt. An error of use ends the call and is returned as it is.
func (c *Client) Get(ctx context.Context, ns block.Namespace, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	if len(want) == 0 {
		return nil
	}
	n, err := hashLen(ns)
	if err != nil {
		return err
	}
	if s := c.session(ctx); s != nil && (o.Plan == nil || len(want) <= MaxKeys) {
		return c.getSession(ctx, s, ns, want, o, use)
	}
	for at := 0; at < len(want); at += MaxKeys {
		part := want[at:min(at+MaxKeys, len(want))]
		err := c.getInline(ctx, ns, n, part, o, func(i int, p block.Payload) error { return use(at+i, p) })
		if err != nil {
			return err
		}
	}
	return nil
}

// getInline is Get over gRPC, of as many keys as one call may name.
func (c *Client) getInline(ctx context.Context, ns block.Namespace, n int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.Get(ctx, c.getRequest(ns, n, want, o))
	if err != nil {
		return c.fail("get", err)
	}
	buf := c.blocks.Get().(*[]byte)
	defer c.blocks.Put(buf)
	var f getFrame
	defer f.release()
	for i := range want {
		p, err := getBlock(stream, &f, i, buf)
		if err != nil {
			return c.fail("get", err)
		}
		if whole := want[i].Offset == 0 && len(p.Bytes) == int(p.Total); p.Reason == block.Hit && whole {
			if block.Sum(xxh3.Hash128(p.Bytes).Bytes()) != p.Sum {
				p = block.Payload{Reason: block.MissCorrupt, Tier: p.Tier, Total: p.Total}
			}
		}
		if err := use(i, p); err != nil {
			return err
		}
	}
	// The status comes after the last block: wait for it, so that the call is over.
	if err := stream.RecvMsg(&f); !errors.Is(err, io.EOF) {
		if err == nil {
			err = errors.New("server answered more blocks than were asked for")
		}
		return c.fail("get", err)
	}
	return nil
}

func (c *Client) getRequest(ns block.Namespace, hashLen int, want []block.Wanted, o block.GetOptions) *pb.GetRequest {
	req := &pb.GetRequest{
		Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), HashLen: uint32(hashLen), Hashes: make([]byte, 0, hashLen*len(want)),
		Class: uint32(o.Class), NoPromote: o.NoPromote, Quiet: o.Quiet, Verify: o.Verify, Plan: planToPB(o.Plan),
	}
	ranged := false
	for i := range want {
		req.Hashes = append(req.Hashes, want[i].Hash[:hashLen]...)
		ranged = ranged || want[i].Offset != 0 || want[i].Length != 0
	}
	if ranged {
		for i := range want {
			req.Offsets = append(req.Offsets, want[i].Offset)
			req.Lengths = append(req.Lengths, want[i].Length)
		}
	}
	return req
}

// getBlock assembles one key of a get in buf, which it may replace.
func getBlock(stream grpc.ServerStreamingClient[pb.GetResponse], f *getFrame, i int, buf *[]byte) (block.Payload, error) {
	var p block.Payload
	length := -1
	b := (*buf)[:0]
	for length < 0 || len(b) < length {
		if err := stream.RecvMsg(f); err != nil {
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("server ended before block %d", i)
			}
			return p, err
		}
		if int(f.index) != i {
			return p, fmt.Errorf("server answered block %d in the place of %d", f.index, i)
		}
		if length < 0 {
			if f.length > block.MaxBlockBytes {
				return p, fmt.Errorf("server announced %d bytes for block %d, more than %d", f.length, i, block.MaxBlockBytes)
			}
			length = int(f.length)
			p = block.Payload{Reason: block.MissReason(f.reason), Tier: block.TierID(f.tier), Total: f.total, Sum: f.sum}
			if cap(b) < length {
				b = make([]byte, 0, length)
			}
		} else if f.bytes == 0 {
			return p, fmt.Errorf("server sent an empty piece of block %d after %d of %d bytes", i, len(b), length)
		}
		if len(b)+f.bytes > length {
			return p, fmt.Errorf("server sent %d bytes of block %d, announced %d", len(b)+f.bytes, i, length)
		}
		for _, piece := range f.pieces {
			b = append(b, piece...)
		}
	}
	*buf = b
	if length > 0 {
		p.Bytes = b
	}
	return p, nil
}
