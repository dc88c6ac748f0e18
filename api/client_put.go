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

// PutItem is one block to put.
type PutItem struct {
	Hash      block.Hash
	Parent    block.Hash
	HasParent bool
	Data      []byte
}

// PutOptions go with a put of several blocks.
type PutOptions struct {
	Durable block.TierID  // G2 (default): in memory is enough; G3: on NVMe when the put returns, ErrNotFound when deleted meanwhile
	TTL     time.Duration // 0: the namespace's
}

// PutResult is how the put of one block ended.
type PutResult struct {
	Status block.PutStatus
	Err    error // nil, or why the block was not stored; Status means nothing then
}

func (c *Client) putOpen(ns block.Namespace, o PutOptions) *pb.PutOpen {
	return &pb.PutOpen{Namespace: uint32(ns.ID), NamespaceTag: c.tag(ns), Durable: pb.Tier(o.Durable), TtlMs: millis(o.TTL)}
}

func putBlock(n int, h, parent block.Hash, hasParent bool, length int64) *pb.PutBlock {
	return &pb.PutBlock{Hash: h[:n], Parent: hashBytes(parent, n, hasParent), Length: uint32(length)}
}

// Put stores blocks in one call, parents before children. ns.HashLen says how
// many bytes of each hash count. There is one result per item; the error is of
// the whole call, and items without a result then carry it too.
func (c *Client) Put(ctx context.Context, ns block.Namespace, items []PutItem, o PutOptions) ([]PutResult, error) {
	if len(items) == 0 {
		return nil, nil
	}
	n, err := hashLen(ns)
	if err != nil {
		return nil, err
	}
	for i := range items {
		if err := checkPayload(int64(len(items[i].Data))); err != nil {
			return nil, fmt.Errorf("put item %d: %w", i, err)
		}
	}
	if s := c.session(ctx); s != nil {
		return c.putSession(ctx, s, ns, items, o)
	}
	return c.put(ctx, len(items), func(send func(*putFrame) error) error {
		f := putFrame{open: c.putOpen(ns, o)}
		for i := range items {
			it := &items[i]
			f.block = putBlock(n, it.Hash, it.Parent, it.HasParent, int64(len(it.Data)))
			if err := sendBytes(&f, it.Data, send); err != nil {
				return err
			}
		}
		return nil
	})
}

// PutFrom stores one block of exactly size bytes from r, without holding it in
// memory. A reader that ends early or goes on is ErrInvalid, and nothing is stored.
func (c *Client) PutFrom(ctx context.Context, ns block.Namespace, item PutItem, size int64, r io.Reader, o PutOptions) (PutResult, error) {
	n, err := hashLen(ns)
	if err != nil {
		return PutResult{}, err
	}
	if err := checkPayload(size); err != nil {
		return PutResult{}, fmt.Errorf("put %s: %w", item.Hash.Hex(n), err)
	}
	res, err := c.put(ctx, 1, func(send func(*putFrame) error) error {
		f := putFrame{open: c.putOpen(ns, o), block: putBlock(n, item.Hash, item.Parent, item.HasParent, size)}
		return sendFrom(&f, item.Hash.Hex(n), size, r, send)
	})
	if err != nil {
		return PutResult{}, err
	}
	return res[0], nil
}

func checkPayload(n int64) error {
	if n < 1 || n > block.MaxBlockBytes {
		return invalid("payload of %d bytes, want 1 to %d", n, block.MaxBlockBytes)
	}
	return nil
}

// sendBytes sends one block whose header is in f.
func sendBytes(f *putFrame, data []byte, send func(*putFrame) error) error {
	for {
		n := min(len(data), chunkBytes)
		f.data, data = data[:n], data[n:]
		f.end = len(data) == 0
		if err := send(f); err != nil {
			return err
		}
		f.open, f.block = nil, nil
		if f.end {
			return nil
		}
	}
}

// sendFrom is sendBytes for a reader. The last piece goes out only when the
// reader is known to end with it: a block once complete may be committed.
func sendFrom(f *putFrame, name string, size int64, r io.Reader, send func(*putFrame) error) error {
	buf := make([]byte, min(size, chunkBytes))
	for got := int64(0); got < size; {
		n, err := io.ReadFull(r, buf[:min(size-got, chunkBytes)])
		got += int64(n)
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return fmt.Errorf("put %s: %w", name, invalid("payload: announced %d bytes, the reader ended after %d", size, got))
		case err != nil:
			return fmt.Errorf("put %s: read payload: %w", name, err)
		}
		if got == size {
			var one [1]byte
			if extra, err := io.ReadFull(r, one[:]); extra > 0 {
				return fmt.Errorf("put %s: %w", name, invalid("payload: announced %d bytes, the reader has more", size))
			} else if !errors.Is(err, io.EOF) {
				return fmt.Errorf("put %s: read payload: %w", name, err)
			}
		}
		f.data, f.end = buf[:n], got == size
		if err := send(f); err != nil {
			return err
		}
		f.open, f.block = nil, nil
	}
	return nil
}

// put runs one stream: feed sends while the results of n blocks come in. An
// error of feed that is not the stream's own breaks the stream off.
func (c *Client) put(ctx context.Context, n int, feed func(send func(*putFrame) error) error) ([]PutResult, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.Put(ctx)
	if err != nil {
		return nil, c.fail("put", err)
	}
	results := make([]PutResult, n)
	got := make(chan error, 1)
	var have int
	go func() {
		var err error
		have, err = putResults(stream, results)
		got <- err
	}()
	feedErr := feed(func(f *putFrame) error { return stream.SendMsg(f) })
	if feedErr == nil {
		feedErr = stream.CloseSend()
	} else if !errors.Is(feedErr, io.EOF) {
		cancel() // nothing half sent may be taken for a block
	}
	err = <-got
	switch {
	case feedErr != nil && !errors.Is(feedErr, io.EOF):
		err = feedErr // ours, or why the stream could not be written
	case err == nil && have < n:
		err = fmt.Errorf("put: server answered %d of %d blocks", have, n)
	case err == nil:
		return results, nil
	}
	err = c.fail("put", err)
	for i := have; i < n; i++ {
		results[i].Err = err
	}
	return results, err
}

// putResults collects the results of a stream until it ends, and returns how
// many there were.
func putResults(stream grpc.BidiStreamingClient[pb.PutRequest, pb.PutResponse], results []PutResult) (int, error) {
	have := 0
	for {
		r, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return have, nil
		case err != nil:
			return have, err
		case int(r.GetFirst()) != have || have+len(r.GetResults()) > len(results):
			return have, fmt.Errorf("server answered blocks %d to %d of %d, after %d", r.GetFirst(), int(r.GetFirst())+len(r.GetResults()), len(results), have)
		}
		for _, p := range r.GetResults() {
			results[have] = putResultFromPB(p)
			have++
		}
	}
}

func putResultFromPB(p *pb.PutResult) PutResult {
	switch p.GetStatus() {
	case pb.PutStatus_PUT_STATUS_FAILED:
		return PutResult{Err: fromFailure(p.GetFailure())}
	case pb.PutStatus_PUT_STATUS_EXISTS:
		return PutResult{Status: block.Exists}
	}
	return PutResult{Status: block.Stored}
}
