package session

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// GetItem is a block, or a range of its bytes, and the memory that it goes to.
type GetItem struct {
	Hash           block.Hash
	Offset, Length int64 // Length 0: to the end
	// Into must hold what is wanted. The caller leaves it alone until Get returns;
	// what is in it counts only with a hit.
	Into []byte
}

// GetResult is the answer for one key.
type GetResult struct {
	Reason block.MissReason // Hit, or why there are no bytes
	Tier   block.TierID     // that served it
	Len    int              // bytes in Into
	Total  uint32           // of the whole block
	Sum    block.Sum        // of the whole block
	// Err is nil, or why the key could not be answered; then Reason means nothing.
	// ErrInvalid: Into is too short (Total says how long the block is), or the range
	// goes past the end. ErrBusy: more bytes than the session may have in flight.
	Err error
}

// Get reads blocks straight into memory of the caller's, in one round trip. A whole
// block is checked against its checksum; one that fails is a miss with the reason
// MissCorrupt. There is one result for each item; the error is of the whole call.
//
// With a plan it is two round trips: a match says what is worth loading, whole blocks of as
// many keys as one message takes, and what is there else is a miss with MissRecompute.
func (c *Client) Get(ctx context.Context, ns Namespace, items []GetItem, o block.GetOptions) ([]GetResult, error) {
	if len(items) == 0 {
		return nil, nil
	}
	if err := ns.check(); err != nil {
		return nil, fmt.Errorf("get: %w", err)
	}
	for i := range items {
		it := &items[i]
		if it.Offset < 0 || it.Offset > block.MaxBlockBytes || it.Length < 0 || it.Length > block.MaxBlockBytes {
			return nil, fmt.Errorf("get: %w", invalid("range of item %d: %d:%d, want 0 to %d", i, it.Offset, it.Length, block.MaxBlockBytes))
		}
	}
	if o.Plan != nil {
		return c.getPlanned(ctx, ns, items, o)
	}
	res := make([]GetResult, len(items))
	for at := 0; at < len(items); {
		n, bytes := c.getWindow(items[at:])
		if err := c.getPart(ctx, &ns, items[at:at+n], bytes, o, res[at:at+n]); err != nil {
			return nil, c.fail("get", err)
		}
		at += n
	}
	return res, nil
}

// getPlanned gets what a match says is worth loading.
func (c *Client) getPlanned(ctx context.Context, ns Namespace, items []GetItem, o block.GetOptions) ([]GetResult, error) {
	hashes := make([]byte, 0, len(items)*ns.HashLen)
	for i := range items {
		hashes = append(hashes, items[i].Hash[:ns.HashLen]...)
	}
	from, to, reasons, err := c.Worth(ctx, ns, hashes, *o.Plan)
	if err != nil {
		return nil, fmt.Errorf("get: %w", err)
	}
	o.Plan = nil
	res := make([]GetResult, len(items))
	for i := range res {
		res[i].Reason = reasons[i]
	}
	got, err := c.Get(ctx, ns, items[from:to], o)
	copy(res[from:], got)
	return res, err
}

// Worth says which keys of a prompt are worth loading, those from one up to another. Why the
// others are not is in reasons: MissRecompute for those that are there.
func (c *Client) Worth(ctx context.Context, ns Namespace, hashes []byte, o block.PlanOptions) (from, to int, reasons []block.MissReason, err error) {
	var m block.MatchResult
	if err := c.Match(ctx, ns, hashes, block.MatchOptions{All: true, Quiet: true, Plan: &o}, &m); err != nil {
		return 0, 0, nil, err
	}
	reasons = make([]block.MissReason, len(m.Blocks))
	for i, f := range m.Blocks {
		switch f.State {
		case block.Resident:
			reasons[i] = block.MissRecompute
		case block.Pending:
			reasons[i] = block.MissPending
		default:
			reasons[i] = block.MissAbsent
		}
	}
	return m.Plan.From, m.Plan.To, reasons, nil
}

// wanted is how many bytes an item can be answered with.
func (it *GetItem) wanted() int64 {
	n := int64(len(it.Into))
	if it.Length > 0 {
		n = min(n, it.Length)
	}
	return min(n, block.MaxBlockBytes)
}

func (it *GetItem) ranged() bool { return it.Offset != 0 || it.Length != 0 }

// getWindow is how many items go into one message, and their bytes.
func (c *Client) getWindow(items []GetItem) (n int, bytes int64) {
	most := c64(c.welcome.Bytes)
	for n < len(items) && n < int(c.welcome.Keys) {
		b := items[n].wanted()
		if n > 0 && bytes+b > most {
			break
		}
		bytes += b
		n++
	}
	return n, min(bytes, most)
}

// getPart does what one message can name. What was to be copied by this side and
// could not be is asked for again, to be sent.
func (c *Client) getPart(ctx context.Context, ns *Namespace, items []GetItem, bytes int64, o block.GetOptions, res []GetResult) error {
	k, err := c.begin(ctx, bytes)
	if err != nil {
		return err
	}
	defer c.release(k)
	c.counts.gets.Add(int64(len(items)))
	var flags uint16
	if c.Shared() && !o.NoPromote {
		flags = FlagInPlace
	}
	for i := range items {
		if items[i].ranged() {
			flags = FlagRanges // what is lent are whole blocks
		}
	}
	if flags != FlagInPlace {
		return c.getOnce(ctx, k, ns, items, flags, o, res)
	}
	if err := c.useMemory(); err != nil {
		return err
	}
	defer c.doneMemory()
	if err := c.getOnce(ctx, k, ns, items, flags, o, res); err != nil {
		return err
	}
	var again []GetItem
	var index []int
	for i := range res {
		if res[i].Err == nil && res[i].Reason == block.MissNoRoom {
			again, index = append(again, items[i]), append(index, i)
		}
	}
	if len(again) == 0 {
		return nil
	}
	k.gathering.clear()
	more := make([]GetResult, len(again))
	if err := c.getOnce(ctx, k, ns, again, 0, o, more); err != nil {
		return err
	}
	for i, r := range more {
		res[index[i]] = r
	}
	return nil
}

func (c *Client) getOnce(ctx context.Context, k *pending, ns *Namespace, items []GetItem, flags uint16, o block.GetOptions, res []GetResult) error {
	k.packed, k.get.Ranges = k.packed[:0], k.get.Ranges[:0]
	k.gathering.want(items)
	for i := range items {
		it := &items[i]
		k.packed = append(k.packed, it.Hash[:ns.HashLen]...)
		if flags&FlagRanges != 0 {
			k.get.Ranges = append(k.get.Ranges, Range{uint32(it.Offset), uint32(it.Length)})
		}
	}
	if o.Quiet {
		flags |= FlagQuiet
	}
	if o.NoPromote {
		flags |= FlagNoPromote
	}
	if o.Verify {
		flags |= FlagVerify
	}
	m := &k.get
	m.Keys, m.Class, m.Flags, m.Deadline = ns.keys(k.packed), o.Class, flags, millisLeft(ctx)
	start := time.Now()
	if err := c.trip(ctx, k, CodeGet, m, CodeGot, &k.got); err != nil {
		return err
	}
	if k.got.Lease != 0 {
		defer c.later.lease(k.got.Lease)
	}
	if len(k.got.Blocks) != len(items) {
		return c.giveUp("server answered %d keys of a get of %d", len(k.got.Blocks), len(items))
	}
	for i := range items {
		var err error
		if res[i], err = c.gotBlock(k, i, &items[i], ns.HashLen); err != nil {
			return err
		}
	}
	if k.got.Lease != 0 && time.Since(start) >= time.Duration(k.got.LeaseMS)*time.Millisecond {
		// The memory may have been given to others while it was read: this process was
		// stopped, say.
		for i := range res {
			if k.got.Blocks[i].Chunk != NoChunk && res[i].Err == nil && res[i].Reason == block.Hit {
				res[i] = GetResult{Reason: block.MissNoRoom}
			}
		}
	}
	return nil
}

// giveUp ends the session after an answer that makes no sense.
func (c *Client) giveUp(format string, args ...any) error {
	_ = c.conn.Close()
	return &lost{fmt.Errorf("%w: %s", ErrMessage, fmt.Sprintf(format, args...))}
}

// gotBlock is the result of one key. What is lent it copies.
func (c *Client) gotBlock(k *pending, i int, it *GetItem, hashLen int) (GetResult, error) {
	g, p := &k.got.Blocks[i], &k.spots[i]
	if g.Status != StatusOK {
		return GetResult{Err: g.Status.Err(fmt.Sprintf("get %s: %s", it.Hash.Hex(hashLen), g.Status))}, nil
	}
	r := GetResult{Reason: g.Reason, Tier: g.Tier, Len: int(g.Len), Total: g.Total, Sum: g.Sum}
	if r.Reason != block.Hit {
		r.Len = 0
		return r, nil
	}
	whole := it.Offset == 0 && g.Len == g.Total
	switch {
	case g.Total > block.MaxBlockBytes || g.Len > g.Total || it.Length > 0 && int64(g.Len) != it.Length:
		return r, c.giveUp("server answered key %d of a get with %d bytes of a block of %d", i, g.Len, g.Total)
	case int(g.Len) > len(it.Into):
		r.Err = fmt.Errorf("get %s: %w", it.Hash.Hex(hashLen), invalid("memory of %d bytes for %d of a block", len(it.Into), g.Len))
		return r, nil
	case g.Chunk != NoChunk:
		src, ok := c.at(g.Chunk, g.Offset, int(g.Len), false)
		if !ok || !whole {
			return r, c.giveUp("server lent %d bytes at %d of chunk %d", g.Len, g.Offset, g.Chunk)
		}
		defer c.letGo(src)
		if src.mem == nil {
			return GetResult{Reason: block.MissNoRoom}, nil // and it is sent
		}
		if copySum(it.Into[:g.Len], src.mem) != g.Sum {
			return GetResult{Reason: block.MissCorrupt, Tier: g.Tier, Total: g.Total}, nil
		}
		c.counts.inPlace.Add(1)
	case p.bytes != int(g.Len):
		return r, c.giveUp("server sent %d of %d bytes of key %d of a get", p.bytes, g.Len, i)
	case whole && p.total(it.Into[:g.Len]) != g.Sum:
		return GetResult{Reason: block.MissCorrupt, Tier: g.Tier, Total: g.Total}, nil
	}
	c.counts.bytesIn.Add(int64(g.Len))
	return r, nil
}

// gathering is where the bytes of a get land.
type gathering struct{ spots []spot }

// spot is the memory of one key, and what is known of the bytes in it.
type spot struct {
	mem    []byte
	bytes  int  // that have landed
	loose  bool // they are hashed when all are there, if at all
	single bool // there was one frame, of which digest is the checksum
	digest block.Sum
	summer
}

// want makes places for items.
func (g *gathering) want(items []GetItem) {
	g.spots = sized(g.spots, len(items))
	for i := range items {
		g.spots[i] = spot{mem: items[i].Into, loose: items[i].ranged()}
	}
}

// clear forgets the callers' memory.
func (g *gathering) clear() {
	for i := range g.spots {
		g.spots[i].drop()
	}
	clear(g.spots)
	g.spots = g.spots[:0]
}

// land finds the memory for a frame; nil when there is none.
func (g *gathering) land(h *frame.Header) []byte {
	if h.Token >= uint64(len(g.spots)) {
		return nil
	}
	mem := g.spots[h.Token].mem
	if h.Offset > uint64(len(mem)) || uint64(h.Length) > uint64(len(mem))-h.Offset {
		return nil
	}
	return mem[h.Offset : h.Offset+uint64(h.Length)]
}

// landed hashes what has just been read, while it is in the cache.
func (g *gathering) landed(h *frame.Header, b []byte) {
	p := &g.spots[h.Token]
	first := p.bytes == 0
	if p.single || h.Offset != uint64(p.bytes) {
		p.loose, p.single = true, false // no order to hash in: it is done at the end
	}
	p.bytes += len(b)
	switch {
	case p.loose:
	case first && (len(b) < frame.MaxData || len(b) == len(p.mem)):
		p.digest, p.single = sumOf(b), true
	default:
		p.add(p.mem[:p.bytes])
	}
}

// total is the checksum of what has landed, which is all.
func (p *spot) total(all []byte) block.Sum {
	switch {
	case p.loose:
		return sumOf(all)
	case p.single:
		return p.digest
	}
	return p.sum()
}
