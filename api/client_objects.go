package api

import (
	"context"
	"errors"
	"io"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// ListObjects lists objects that the catalog knows in the buckets of the object tier, from
// where cursor says ("" for the start), limit at most (0: a thousand). next is "" at the
// end. ErrUnavailable without such a tier, as with the three calls below.
func (c *Client) ListObjects(ctx context.Context, cursor string, limit int) (objects []block.ObjectInfo, next string, err error) {
	r, err := c.rpc.ListObjects(ctx, &pb.ListObjectsRequest{Cursor: cursor, Limit: uint32(limit)})
	if err != nil {
		return nil, "", c.fail("list objects", err)
	}
	for _, o := range r.GetObjects() {
		objects = append(objects, objectFromPB(o))
	}
	return objects, r.GetCursor(), nil
}

// ObjectUsage sums up the objects of each namespace in each bucket.
func (c *Client) ObjectUsage(ctx context.Context) (usage []block.ObjectUsage, err error) {
	r, err := c.rpc.ObjectUsage(ctx, &pb.ObjectUsageRequest{})
	if err != nil {
		return nil, c.fail("object usage", err)
	}
	for _, u := range r.GetUsage() {
		usage = append(usage, objectUsageFromPB(u))
	}
	return usage, nil
}

// SweepObjects compares each bucket of the object tier with the catalog, mends the
// differences, and calls progress, which may be nil. It ends with a sweep that began after
// the call came: it waits for one that runs, and begins another. When ctx ends, the daemon
// goes on by itself later.
func (c *Client) SweepObjects(ctx context.Context, progress func(block.ObjectSweep) error) error {
	stream, err := c.rpc.SweepObjects(ctx, &pb.SweepObjectsRequest{})
	if err != nil {
		return c.fail("sweep objects", err)
	}
	return follow(c, "sweep objects", stream.Recv, func(p *pb.ObjectSweep) error {
		if progress == nil {
			return nil
		}
		return progress(sweepFromPB(p))
	})
}

// ImportObjects has the catalog know what is in each bucket of the object tier, and calls
// progress, which may be nil. It never raises what was deleted or cleared, or is past its
// time. When it returns without an error, what it has found is served; when ctx ends
// before, what it has found until then stays. ErrUnavailable also when one is running.
func (c *Client) ImportObjects(ctx context.Context, progress func(block.ObjectImport) error) error {
	stream, err := c.rpc.ImportObjects(ctx, &pb.ImportObjectsRequest{})
	if err != nil {
		return c.fail("import objects", err)
	}
	return follow(c, "import objects", stream.Recv, func(p *pb.ObjectImport) error {
		if progress == nil {
			return nil
		}
		return progress(importFromPB(p))
	})
}

// follow hands on what a stream tells until it ends.
func follow[T any](c *Client, what string, recv func() (*T, error), use func(*T) error) error {
	for {
		p, err := recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.fail(what, err)
		}
		if err := use(p); err != nil {
			return err
		}
	}
}
