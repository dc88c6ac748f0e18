package session

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// putWindow is how many bytes one message commits, as a rule: enough to make trips
// cheap, few enough for the store to find room.
const putWindow = 16 << 20

// PutBlock is a block to put.
type PutBlock struct {
	Hash      block.Hash
	Parent    block.Hash
	HasParent bool
	Bytes     []byte // the caller leaves them as they are until Put returns
}

// PutOptions go with a put of several blocks.
type PutOptions struct {
	Durable block.TierID  // G2 (default): in memory is enough; G3: on NVMe when the put returns, ErrNotFound when deleted meanwhile
	TTL     time.Duration // 0: the namespace's
	Class   uint8         // hint to the policy
}

// putting is what a put keeps in its call's record.
type putting struct {
	uses    []grant // a place for each block of the message
	more    []grant // new ones
	items   []PutItem
	parents []byte
	put     PutMessage
	putDone PutDoneMessage
}

// Put stores blocks, parents before children. Where there is a place for each block
// it is one round trip: the bytes go into the places, and the commit behind them. The
// checksums are computed here, on the way. There is one result for each block; the
// error is of the whole call, and blocks without a result then carry it too.
func (c *Client) Put(ctx context.Context, ns Namespace, blocks []PutBlock, o PutOptions) ([]block.CommitResult, error) {
	if len(blocks) == 0 {
		return nil, nil
	}
	if err := ns.check(); err != nil {
		return nil, fmt.Errorf("put: %w", err)
	}
	for i := range blocks {
		if n := len(blocks[i].Bytes); n < 1 || n > block.MaxBlockBytes {
			return nil, fmt.Errorf("put: %w", invalid("payload of item %d: %d bytes, want 1 to %d", i, n, block.MaxBlockBytes))
		}
	}
	if o.Durable == block.NoTier {
		o.Durable = block.G2
	}
	res := make([]block.CommitResult, len(blocks))
	at, err := c.putAll(ctx, &ns, blocks, o, res)
	if err != nil {
		err = c.fail("put", err)
		for i := at; i < len(res); i++ {
			res[i].Err = err
		}
	}
	return res, err
}

// putAll puts one window after another, and returns how many blocks have a result.
func (c *Client) putAll(ctx context.Context, ns *Namespace, blocks []PutBlock, o PutOptions, res []block.CommitResult) (at int, err error) {
	k, err := c.begin(ctx, 0)
	if err != nil {
		return 0, err
	}
	defer c.release(k)
	if c.Shared() {
		if err := c.useMemory(); err != nil {
			return 0, err
		}
		defer c.doneMemory()
	}
	c.counts.puts.Add(int64(len(blocks)))
	for at < len(blocks) {
		n, err := c.putSome(ctx, k, ns, blocks[at:], o, res[at:], false)
		if err != nil {
			return at, err
		}
		// A place may run out between its grant and the commit: once more with new ones.
		for i := at; i < at+n; i++ {
			if errors.Is(res[i].Err, block.ErrLeaseExpired) {
				if _, err := c.putSome(ctx, k, ns, blocks[i:i+1], o, res[i:i+1], true); err != nil {
					return at, err
				}
			}
		}
		at += n
	}
	return at, nil
}

// putSome puts the first of blocks, as many as there are places for, and returns how
// many have a result. fresh wants new places.
func (c *Client) putSome(ctx context.Context, k *pending, ns *Namespace, blocks []PutBlock, o PutOptions, res []block.CommitResult, fresh bool) (int, error) {
	n, err := c.obtain(ctx, k, ns, blocks, fresh)
	if err != nil {
		if perBlock(err) {
			res[0].Err = fmt.Errorf("put %s: %w", blocks[0].Hash.Hex(ns.HashLen), err)
			return 1, nil
		}
		return 0, err
	}
	blocks, res = blocks[:n], res[:n]
	err = c.commit(ctx, k, ns, blocks, o)
	if err == nil && len(k.putDone.Results) != n {
		err = c.giveUp("server answered %d blocks of a put of %d", len(k.putDone.Results), n)
	}
	// The places are used up, if the server has taken the commit. If not it shall have
	// them back, as where this side wrote into a place that was revoked meanwhile.
	var bytes int64
	for i := range k.uses {
		bytes += int64(k.uses[i].size)
		if revoked := c.grants.wasRevoked(k.uses[i].id); revoked || err != nil || k.putDone.Results[i].kept() {
			c.later.grant(k.uses[i].id)
		}
	}
	more := k.more[:0]
	if err == nil {
		more, err = c.newGrants(more, ns.ID, &k.putDone.Grants)
	}
	k.more = more
	var added int64
	for i := range more {
		added += int64(more[i].size)
	}
	c.grants.counted(len(more)-len(k.uses), added-bytes)
	c.keepGrants(more...)
	if err != nil {
		return 0, err
	}
	for i := range k.putDone.Results {
		r := &k.putDone.Results[i]
		text := r.Text
		if r.Status != StatusOK && text == "" {
			text = fmt.Sprintf("put %s: %s", blocks[i].Hash.Hex(ns.HashLen), r.Status)
		}
		res[i] = block.CommitResult{Status: r.Put, Err: r.Status.Err(text)}
	}
	return n, nil
}

// kept reports whether the server has left the place as it was: the session had too much
// in flight, or the place was revoked, of which the word may come only later.
func (r *PutResult) kept() bool { return r.Status == StatusBusy || r.Status == StatusLeaseExpired }

// perBlock reports whether an answer to the question for places is one for the block
// that they were for.
func perBlock(err error) bool {
	return errors.Is(err, block.ErrNoSpace) || errors.Is(err, block.ErrInvalid) && !errors.Is(err, block.ErrDisconnected)
}

// obtain finds places for the first of blocks, in k.uses, and returns for how many.
// An error is about the first.
func (c *Client) obtain(ctx context.Context, k *pending, ns *Namespace, blocks []PutBlock, fresh bool) (int, error) {
	k.uses = k.uses[:0]
	now := time.Now()
	missing := 0
	for i, bytes := 0, 0; i < len(blocks) && i < min(int(c.welcome.Keys), c.grants.most); i++ {
		if bytes += len(blocks[i].Bytes); i > 0 && bytes > putWindow {
			break
		}
		var g grant
		if !fresh {
			g, _ = c.grants.take(ns.ID, len(blocks[i].Bytes), now)
		}
		if g.id == 0 {
			missing++
		}
		k.uses = append(k.uses, g)
	}
	var err error
	for i := 0; missing > 0 && i < len(k.uses); i++ {
		if k.uses[i].id != 0 {
			continue
		}
		var got int
		if got, err = c.ask(ctx, k, ns, blocks, i, missing == len(k.uses)); err != nil {
			break
		}
		if got == 0 && i == 0 {
			// Who waits for a place holds none, or two would wait for each other.
			c.giveUpPlaces(k)
			missing = len(k.uses)
			if got, err = c.ask(ctx, k, ns, blocks, i, true); err != nil {
				break
			}
		}
		missing -= got
		if k.uses[i].id == 0 {
			break
		}
	}
	n := slices.IndexFunc(k.uses, func(g grant) bool { return g.id == 0 })
	if n < 0 {
		return len(k.uses), nil
	}
	for _, g := range k.uses[n:] {
		if g.id != 0 {
			c.keepGrants(g)
		}
	}
	k.uses = k.uses[:n]
	if n > 0 {
		err = nil // it comes again when the block is the first
	} else if err == nil {
		err = fmt.Errorf("%w: no place was granted", block.ErrNoSpace)
	}
	return n, err
}

// giveUpPlaces keeps the places of a put for others.
func (c *Client) giveUpPlaces(k *pending) {
	for i := range k.uses {
		if k.uses[i].id != 0 {
			c.keepGrants(k.uses[i])
			k.uses[i] = grant{}
		}
	}
}

// ask asks for places for block i and those of about its size behind it that have
// none, and returns how many were granted. While the session has as many as it may it
// waits, or there are none.
func (c *Client) ask(ctx context.Context, k *pending, ns *Namespace, blocks []PutBlock, i int, wait bool) (int, error) {
	size, want := len(blocks[i].Bytes), 0
	class := sizeClass(size)
	for j := i; j < len(k.uses); j++ {
		if n := len(blocks[j].Bytes); k.uses[j].id == 0 && sizeClass(n) == class {
			size = max(size, n)
			want++
		}
	}
	places, err := c.askFor(ctx, k, ns, size, want, wait)
	if errors.Is(err, block.ErrInvalid) && size > len(blocks[i].Bytes) {
		places, err = c.askFor(ctx, k, ns, len(blocks[i].Bytes), 1, wait) // another one may be too long
	}
	got := 0
	for j := i; j < len(k.uses) && got < len(places); j++ {
		if k.uses[j].id == 0 && len(blocks[j].Bytes) <= places[got].size && sizeClass(len(blocks[j].Bytes)) == class {
			k.uses[j] = places[got]
			got++
		}
	}
	c.keepGrants(places[got:]...)
	return got, err
}

// sizeClass is the same for payloads that share a size of place: it rises by an
// eighth, from 4 KiB on.
func sizeClass(n int) int {
	unit := 4096
	for unit*16 < n {
		unit *= 2
	}
	return (n + unit - 1) / unit * unit
}

const (
	// busyFirst is the first pause before places are asked for again that the server had
	// none of; each is twice the one before.
	busyFirst = time.Millisecond
	busyTries = 10
)

// askFor asks for want places of size bytes. The server may have not heard yet, by
// another's message, of those that were given back for them: then it asks again.
func (c *Client) askFor(ctx context.Context, k *pending, ns *Namespace, size, want int, wait bool) (places []grant, err error) {
	pause := busyFirst
	for range busyTries {
		if places, err = c.askOnce(ctx, k, ns, size, want, wait); !errors.Is(err, ErrBusy) {
			return places, err
		}
		if !wait {
			return nil, nil // as when there are none
		}
		t := time.NewTimer(pause)
		pause *= 2
		select {
		case <-t.C:
		case <-ctx.Done():
			err = ctx.Err()
		case <-c.ended:
			err = c.Err()
		}
		t.Stop()
		if !errors.Is(err, ErrBusy) {
			return nil, err
		}
	}
	return nil, err
}

func (c *Client) askOnce(ctx context.Context, k *pending, ns *Namespace, size, want int, wait bool) ([]grant, error) {
	want, err := c.grants.room(ctx, c.ended, size, want, wait, &c.later)
	if err != nil {
		return nil, err
	}
	if want == 0 {
		return nil, c.Err()
	}
	m := GrantMessage{NS: ns.ID, Tag: ns.Tag, Size: uint32(size), Count: uint32(want), Deadline: millisLeft(ctx)}
	var places []grant
	if err = c.trip(ctx, k, CodeGrant, &m, CodeGranted, &k.granted); err == nil {
		places, err = c.newGrants(nil, ns.ID, &k.granted)
	}
	if err == nil && len(places) > want {
		err = c.giveUp("server granted %d places, asked for %d", len(places), want)
	}
	for i := range places {
		if err == nil && places[i].size < size {
			err = c.giveUp("server granted a place of %d bytes, asked for %d", places[i].size, size)
		}
	}
	if err != nil {
		places = nil
	}
	bytes := -int64(want) * int64(size)
	for i := range places {
		bytes += int64(places[i].size)
	}
	c.grants.counted(len(places)-want, bytes)
	return places, err
}

// commit brings blocks into their places and commits them.
func (c *Client) commit(ctx context.Context, k *pending, ns *Namespace, blocks []PutBlock, o PutOptions) error {
	k.want, k.reply = CodePutDone, &k.putDone
	if err := c.enter(k); err != nil {
		return err
	}
	return c.wait(ctx, k, c.sendPut(ctx, k, ns, blocks, o))
}

const (
	// sendAhead is how much is sent before it is hashed: while the server is busy with it,
	// and as long as it is in the cache.
	sendAhead = 2 * frame.MaxData
	// sendJoined is how much goes in one write with the message behind it, hashed before: of
	// more than that the server has not taken all when the message comes, so that a write of
	// its own costs less than it saves: store.put.1MiB.c1 of kvtier bench was faster by 7 to
	// 22 %, with a tenth less of the processors, than with the last frame hashed first.
	sendJoined = 64 << 10
)

// sendPut sends what must be sent and the message behind it.
func (c *Client) sendPut(ctx context.Context, k *pending, ns *Namespace, blocks []PutBlock, o PutOptions) (err error) {
	k.items, k.packed, k.parents = k.items[:0], k.packed[:0], k.parents[:0]
	var t told
	k.frames, k.out, t = c.takeLater(k.frames[:0], k.out[:0])
	defer func() {
		if err != nil {
			c.later.back(t)
		}
	}()
	sums := sentSums{blocks: blocks, uses: k.uses}
	defer sums.drop()
	queued := 0                      // bytes
	flush := func(i, at int) error { // up to there
		if err := c.conn.Send(ctx, k.frames...); err != nil {
			return err
		}
		k.frames, k.out, queued = k.frames[:0], k.out[:0], 0
		sums.upTo(k.items, i, at)
		return nil
	}
	for i := range blocks {
		b, g := &blocks[i], &k.uses[i]
		k.items = append(k.items, PutItem{Grant: g.id, Len: uint32(len(b.Bytes)), HasParent: b.HasParent})
		k.packed = append(k.packed, b.Hash[:ns.HashLen]...)
		c.counts.bytesOut.Add(int64(len(b.Bytes)))
		if g.mem != nil {
			if err := ctx.Err(); err != nil {
				return err
			}
			k.items[i].Sum = copySum(g.mem, b.Bytes)
			c.counts.inPlace.Add(1)
			continue
		}
		for at := 0; at < len(b.Bytes); {
			n := min(sendAhead-queued, len(b.Bytes)-at)
			k.frames = append(k.frames, frame.Frame{
				Header: frame.Header{Type: frame.Data, ID: k.id, Token: g.id, Offset: uint64(at)}, Payload: b.Bytes[at:][:n],
			})
			at, queued = at+n, queued+n
			if queued == sendAhead {
				if err := flush(i, at); err != nil {
					return err
				}
			}
		}
	}
	last := len(blocks) - 1
	if queued > sendJoined {
		if err := flush(last, len(blocks[last].Bytes)); err != nil {
			return err
		}
	}
	sums.upTo(k.items, last, len(blocks[last].Bytes))
	m := &k.put
	*m = PutMessage{Keys: ns.keys(k.packed), Class: o.Class, Durable: o.Durable, TTLMS: ttlMillis(o.TTL), Deadline: millisLeft(ctx), Items: k.items}
	if slices.ContainsFunc(blocks, func(b PutBlock) bool { return b.HasParent }) {
		m.Flags |= FlagParents
		for i := range blocks {
			k.parents = append(k.parents, blocks[i].Parent[:ns.HashLen]...)
		}
		m.Parents = k.parents
	}
	if c.keep && c.grants.expected(ns.ID, len(blocks[0].Bytes), time.Now()) {
		m.Flags |= FlagRegrant
	}
	at := len(k.out)
	k.out = m.Append(k.out)
	k.frames = append(k.frames, messageFrame(CodePut, k.id, k.out[at:]))
	return c.conn.Send(ctx, k.frames...)
}

// ttlMillis rounds a time to live up, where that is still a duration.
func ttlMillis(d time.Duration) uint64 {
	return uint64(min(max(0, ceilMillis(d)), int64(math.MaxInt64/time.Millisecond)))
}

// sentSums computes the checksums of blocks behind their sending.
type sentSums struct {
	blocks []PutBlock
	uses   []grant
	sum    summer
	i, at  int // up to where it has come
}

// upTo hashes up to the first end bytes of a block.
func (s *sentSums) upTo(items []PutItem, block, end int) {
	for ; s.i <= block; s.i, s.at = s.i+1, 0 {
		all := s.blocks[s.i].Bytes
		n := len(all)
		if s.i == block {
			n = end
		}
		switch {
		case s.uses[s.i].mem != nil: // it was hashed when it was copied
		case s.at == 0 && n == len(all):
			items[s.i].Sum = sumOf(all)
		case n > s.at:
			s.sum.add(all[:n])
			if s.at = n; n < len(all) {
				return
			}
			items[s.i].Sum = s.sum.sum()
		}
	}
}

func (s *sentSums) drop() { s.sum.drop() }
