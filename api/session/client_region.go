package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Region is a memory file that the server may move bytes to and from.
type Region struct {
	// Fd is the open file, a memfd or one in a memory file system. It stays the
	// caller's, and is needed only while Dial runs.
	Fd int
	// Path names the file instead, as the server sees it.
	Path     string
	Length   int64 // of the region, from the file's start
	ReadOnly bool  // the server may only read it
}

// RegionItem is a block and where in the regions it goes. The pieces have at least as
// much room together as the block takes.
type RegionItem struct {
	Hash     block.Hash
	Segments []Segment
}

// RegionBlock is a block to put and where in the regions its bytes lie.
type RegionBlock struct {
	Hash      block.Hash
	Parent    block.Hash
	HasParent bool
	Segments  []Segment
}

// regionQuiet is how long Close waits for the server to let go of the regions.
const regionQuiet = 5 * time.Second

// offer adds regions to a hello, and returns the files that go with it.
func offer(h *HelloMessage, list []Region, conn net.Conn) (fds []int, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	if _, ok := conn.(*net.UnixConn); !ok {
		return nil, invalid("regions: they need a unix socket")
	}
	if len(list) > MaxRegions {
		return nil, invalid("regions: %d of them, at most %d", len(list), MaxRegions)
	}
	h.Features |= FeatureRegions
	for i := range list {
		r := &list[i]
		if r.Length < 1 {
			return nil, invalid("region %d: length %d, want at least 1", i, r.Length)
		}
		if r.Path == "" {
			fds = append(fds, r.Fd)
		}
		h.Regions = append(h.Regions, HelloRegion{Length: uint64(r.Length), ReadOnly: r.ReadOnly, Path: r.Path})
	}
	return fds, nil
}

// RegionGet has the server write blocks into the regions of the session. It returns
// when the server does not touch them any more, also when ctx ends; only after an
// ErrDisconnected the regions are quiet no sooner than Close has returned. The server has
// checked the bytes of a hit. There is one result for each item; the error is of the
// whole call.
func (c *Client) RegionGet(ctx context.Context, ns Namespace, items []RegionItem, o block.GetOptions) ([]GetResult, error) {
	if len(items) == 0 {
		return nil, nil
	}
	if err := ns.check(); err != nil {
		return nil, fmt.Errorf("region get: %w", err)
	}
	res := make([]GetResult, len(items))
	for at := 0; at < len(items); {
		n, bytes, err := c.regionWindow(len(items)-at, ns.HashLen, func(i int) []Segment { return items[at+i].Segments })
		if err == nil {
			err = c.regionGetPart(ctx, &ns, items[at:at+n], bytes, o, res[at:at+n])
		}
		if err != nil {
			return nil, c.fail("region get", err)
		}
		at += n
	}
	return res, nil
}

// regionWindow is how many of the next keys go into one message, and their bytes.
func (c *Client) regionWindow(keys, hashLen int, segs func(i int) []Segment) (n int, bytes int64, err error) {
	most := c64(c.welcome.Bytes)
	size, room := 0, min(regionMessage, int(c.welcome.Message))-regionHead // of the message, without its head
	for n < keys && n < int(c.welcome.Keys) {
		s := segs(n)
		if len(s) < 1 || len(s) > MaxSegments {
			return 0, 0, invalid("segments: %d of them for a key, want 1 to %d", len(s), MaxSegments)
		}
		more := 2*hashLen + 3 + len(s)*segmentBytes
		b := min(segmentsLen(s), block.MaxBlockBytes)
		if n > 0 && (bytes+b > most || size+more > room) {
			break
		}
		bytes, size = bytes+b, size+more
		n++
	}
	return n, min(bytes, most), nil
}

// regionMessage is how long a message of regions is, as a rule, and regionHead what it
// has beside keys and segments.
const (
	regionMessage = 512 << 10
	regionHead    = 64
)

func segmentsLen(s []Segment) (n int64) {
	for i := range s {
		n += int64(s[i].Length)
	}
	return n
}

func (s *Segments) add(one []Segment) {
	s.Counts, s.All = append(s.Counts, uint16(len(one))), append(s.All, one...)
}

// regionRecord is what calls on regions keep in their call's record.
type regionRecord struct {
	regionGet RegionGetMessage
	regionPut RegionPutMessage
}

func (c *Client) regionGetPart(ctx context.Context, ns *Namespace, items []RegionItem, bytes int64, o block.GetOptions, res []GetResult) error {
	k, err := c.begin(ctx, bytes)
	if err != nil {
		return err
	}
	defer c.release(k)
	c.counts.gets.Add(int64(len(items)))
	m := &k.regionGet
	k.packed, m.Counts, m.All = k.packed[:0], m.Counts[:0], m.All[:0]
	for i := range items {
		k.packed = append(k.packed, items[i].Hash[:ns.HashLen]...)
		m.Segments.add(items[i].Segments)
	}
	m.Keys, m.Class, m.Flags, m.Deadline = ns.keys(k.packed), o.Class, 0, millisLeft(ctx)
	if o.Quiet {
		m.Flags |= FlagQuiet
	}
	if o.NoPromote {
		m.Flags |= FlagNoPromote
	}
	if err := c.regionTrip(ctx, k, CodeRegionGet, m, CodeGot, &k.got); err != nil {
		return err
	}
	if len(k.got.Blocks) != len(items) {
		return c.giveUp("server answered %d keys of a region get of %d", len(k.got.Blocks), len(items))
	}
	for i := range items {
		g, r := &k.got.Blocks[i], &res[i]
		switch {
		case g.Status == StatusInvalid && int64(g.Total) > segmentsLen(items[i].Segments):
			*r = GetResult{Total: g.Total, Err: fmt.Errorf("region get %s: %w", items[i].Hash.Hex(ns.HashLen),
				invalid("segments of %d bytes for a block of %d", segmentsLen(items[i].Segments), g.Total))}
		case g.Status != StatusOK:
			*r = GetResult{Total: g.Total, Err: g.Status.Err(fmt.Sprintf("region get %s: %s", items[i].Hash.Hex(ns.HashLen), g.Status))}
		default:
			*r = GetResult{Reason: g.Reason, Tier: g.Tier, Len: int(g.Len), Total: g.Total, Sum: g.Sum}
			c.counts.bytesIn.Add(int64(g.Len))
		}
	}
	return nil
}

// RegionPut has the server make blocks of what lies in the regions of the session,
// parents before children. It returns when the server does not read them any more, with
// the exception of RegionGet. It computes the checksums as it copies. There is one result for each block; the error
// is of the whole call, and blocks without a result then carry it too.
func (c *Client) RegionPut(ctx context.Context, ns Namespace, blocks []RegionBlock, o PutOptions) ([]block.CommitResult, error) {
	if len(blocks) == 0 {
		return nil, nil
	}
	if err := ns.check(); err != nil {
		return nil, fmt.Errorf("region put: %w", err)
	}
	res := make([]block.CommitResult, len(blocks))
	for at := 0; at < len(blocks); {
		n, bytes, err := c.regionWindow(len(blocks)-at, ns.HashLen, func(i int) []Segment { return blocks[at+i].Segments })
		if err == nil {
			err = c.regionPutPart(ctx, &ns, blocks[at:at+n], bytes, o, res[at:at+n])
		}
		if err != nil {
			err = c.fail("region put", err)
			for i := at; i < len(res); i++ {
				res[i].Err = err
			}
			return res, err
		}
		at += n
	}
	return res, nil
}

func (c *Client) regionPutPart(ctx context.Context, ns *Namespace, blocks []RegionBlock, bytes int64, o PutOptions, res []block.CommitResult) error {
	k, err := c.begin(ctx, bytes)
	if err != nil {
		return err
	}
	defer c.release(k)
	c.counts.puts.Add(int64(len(blocks)))
	m := &k.regionPut
	k.packed, k.parents, m.HasParent, m.Counts, m.All = k.packed[:0], k.parents[:0], m.HasParent[:0], m.Counts[:0], m.All[:0]
	for i := range blocks {
		b := &blocks[i]
		k.packed, k.parents = append(k.packed, b.Hash[:ns.HashLen]...), append(k.parents, b.Parent[:ns.HashLen]...)
		m.HasParent = append(m.HasParent, b.HasParent)
		m.Segments.add(b.Segments)
	}
	m.Keys, m.Class, m.Flags, m.Deadline = ns.keys(k.packed), o.Class, 0, millisLeft(ctx)
	m.Durable, m.TTLMS, m.Parents = o.Durable, ttlMillis(o.TTL), k.parents
	if slices.Contains(m.HasParent, true) {
		m.Flags = FlagParents
	}
	if err := c.regionTrip(ctx, k, CodeRegionPut, m, CodePutDone, &k.putDone); err != nil {
		return err
	}
	if len(k.putDone.Results) != len(blocks) || len(k.putDone.Grants.Places) != 0 {
		return c.giveUp("server answered %d blocks and %d places of a region put of %d",
			len(k.putDone.Results), len(k.putDone.Grants.Places), len(blocks))
	}
	for i := range blocks {
		r := &k.putDone.Results[i]
		text := r.Text
		if r.Status != StatusOK && text == "" {
			text = fmt.Sprintf("region put %s: %s", blocks[i].Hash.Hex(ns.HashLen), r.Status)
		}
		if res[i] = (block.CommitResult{Status: r.Put, Err: r.Status.Err(text)}); res[i].Err == nil {
			c.counts.bytesOut.Add(segmentsLen(blocks[i].Segments))
		}
	}
	return nil
}

// regionTrip is trip for a call that has the server touch memory of this process: when
// ctx ends the call is cancelled, and its answer waited for.
func (c *Client) regionTrip(ctx context.Context, k *pending, code Code, m message, want Code, reply message) error {
	k.want, k.reply = want, reply
	if err := c.enter(k); err != nil {
		return err
	}
	if err := c.send(ctx, k, code, m); err != nil {
		return c.wait(ctx, k, err)
	}
	select {
	case <-k.done:
		return k.err
	case <-ctx.Done():
	}
	c.later.cancel(k.id)
	<-k.done // with the end of the connection at the latest
	if k.err != nil && !errors.Is(k.err, block.ErrDisconnected) {
		return ctx.Err()
	}
	return k.err
}

// quietRegions waits until the server touches the regions no more, behind the end of
// this side's connection.
func (c *Client) quietRegions() error {
	if c.held == nil {
		return nil
	}
	defer c.held.close()
	c.held.leave()
	if !c.held.ended(regionQuiet) {
		return fmt.Errorf("close session at %s: %w: regions may still be in use", c.peer, block.ErrUnavailable)
	}
	return nil
}
