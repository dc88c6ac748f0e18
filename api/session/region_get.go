package session

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// regionGet answers CodeRegionGet.
func (s *session) regionGet(id uint64, p []byte) error {
	w := regionGets.Get().(*regionGetWork)
	w.s, w.id = s, id
	c, err := w.begin(p)
	switch {
	case errors.Is(err, ErrBusy):
		s.srv.stats.busy.Add(int64(len(w.got.Blocks)))
		err = s.reply(id, CodeGot, &w.got) // in which every key is busy
	case err == nil || errors.Is(err, errTwice):
		return s.spawn(id, c, err, w.run)
	default:
		err = s.fail(id, err)
	}
	regionGets.Put(w)
	return err
}

// regionGetWork is what one get into regions needs, to be used again.
type regionGetWork struct {
	s     *session
	id    uint64
	c     *call
	m     RegionGetMessage
	want  []block.Wanted // of the keys that are asked for
	at    []int          // of each, its place in the message
	segs  [][]Segment    // of each key of the message
	room  []int64        // bytes of them; -1: they are none
	lens  []int64        // bytes of each block, as far as they are known
	again []int          // places of blocks that came with another checksum
	got   GotMessage
	out   []byte

	// Of the block that is being moved.
	to     segmented
	failed error
	whole  summer
	pieces xxh3.Hasher

	use func(i int, p block.Payload) error
}

var regionGets = sync.Pool{New: func() any {
	w := new(regionGetWork)
	w.use = w.take
	return w
}}

// begin reads a request and opens its call. The bytes of p are not needed behind it.
func (w *regionGetWork) begin(p []byte) (*call, error) {
	s, m := w.s, &w.m
	if err := m.Decode(p); err != nil {
		return nil, err
	}
	ns, err := s.keyed(&m.Keys, m.Flags, FlagQuiet|FlagNoPromote, access.Read)
	if err != nil {
		return nil, err
	}
	n, hl := m.Len(), int(m.HashLen)
	if ns.blockBytes == 0 {
		if err := s.look(&m.Keys); err != nil {
			return nil, err
		}
	}
	w.want, w.at, w.again = w.want[:0], w.at[:0], w.again[:0]
	w.segs, w.room, w.lens, w.got.Blocks = m.split(w.segs[:0]), sized(w.room, n), sized(w.lens, n), sized(w.got.Blocks, n)
	w.got.Lease, w.got.LeaseMS = 0, 0
	for i := range n {
		w.got.Blocks[i] = GotBlock{Status: StatusBusy, Chunk: NoChunk}
		if w.lens[i] = ns.blockBytes; w.lens[i] == 0 {
			w.lens[i] = int64(s.found.Blocks[i].Len)
		}
		if w.room[i], err = s.regions.check(w.segs[i], true); err != nil {
			w.room[i], w.lens[i] = -1, 0
		}
	}
	if w.c, err = s.open(w.id, m.Deadline); err != nil {
		return nil, err
	}
	admitted := w.c.admit(w.lens, s.bytes)
	s.srv.stats.busy.Add(int64(n - admitted))
	for i := range admitted {
		if w.room[i] < 0 {
			w.got.Blocks[i].Status = StatusInvalid
			continue
		}
		w.got.Blocks[i].Status = StatusOK
		one := block.Wanted{}
		copy(one.Hash[:], m.Hashes[i*hl:(i+1)*hl])
		w.want, w.at = append(w.want, one), append(w.at, i)
	}
	return w.c, nil
}

// split is the segments of each key.
func (s *Segments) split(into [][]Segment) [][]Segment {
	all := s.All
	for _, n := range s.Counts {
		into, all = append(into, all[:n:n]), all[n:]
	}
	return into
}

// run serves the call on a goroutine of its own.
func (w *regionGetWork) run(c *call) error {
	defer regionGets.Put(w)
	defer w.whole.drop()
	s, m := w.s, &w.m
	o := block.GetOptions{Class: m.Class, Quiet: m.Flags&FlagQuiet != 0, NoPromote: m.Flags&FlagNoPromote != 0, Pieces: true}
	if len(w.want) > 0 {
		if err := s.srv.store.Get(c.ctx, m.NS, int(m.HashLen), w.want, o, w.use); err != nil {
			return err
		}
	}
	if again := w.again; len(again) > 0 {
		// The store looks at them itself, and drops what is damaged.
		o.Verify, o.Quiet, o.Pieces = true, true, false
		want := make([]block.Wanted, len(again))
		for j, i := range again {
			want[j] = w.want[i]
			again[j] = w.at[i]
		}
		w.want, w.at, w.again = want, again, nil
		if err := s.srv.store.Get(c.ctx, m.NS, int(m.HashLen), w.want, o, w.use); err != nil {
			return err
		}
	}
	c.end()
	w.out = w.got.Append(w.out[:0])
	return s.send(s.ctx, w.id, CodeGot, w.out)
}

// take moves what the store hands out: the payload is valid until it returns. It fails
// only when the call has ended.
func (w *regionGetWork) take(i int, p block.Payload) error {
	key := w.at[i]
	g := &w.got.Blocks[key]
	if p.Reason == block.Hit {
		if p.At == 0 {
			w.to, w.failed = segmented{rs: &w.s.regions, segs: w.segs[key]}, nil
			w.whole.drop()
			w.pieces.Reset()
			if int64(p.Total) > w.room[key] {
				w.failed = invalid("segments of %d bytes for a block of %d", w.room[key], p.Total)
			}
		}
		if w.failed == nil {
			w.failed = w.move(w.c.ctx, &p)
		}
		if err := w.c.ctx.Err(); err != nil {
			return context.Cause(w.c.ctx)
		}
	}
	switch {
	case p.More:
		return nil
	case p.Reason != block.Hit:
		*g = GotBlock{Reason: p.Reason, Tier: p.Tier, Chunk: NoChunk}
	case w.failed != nil:
		*g = GotBlock{Status: StatusOf(w.failed), Tier: p.Tier, Total: p.Total, Chunk: NoChunk}
	case w.sum(&p) != p.Sum:
		*g = GotBlock{Reason: block.MissCorrupt, Tier: p.Tier, Chunk: NoChunk}
		w.again = append(w.again, i)
	default:
		*g = GotBlock{Tier: p.Tier, Len: p.Total, Total: p.Total, Chunk: NoChunk, Sum: p.Sum}
	}
	return nil
}

// move copies a piece of a block and hashes what it copied, a step at a time, while
// that is in the cache: the store's bytes, since the client may change its own.
func (w *regionGetWork) move(ctx context.Context, p *block.Payload) error {
	pieces := p.At > 0 || p.More
	deadline, _ := ctx.Deadline()
	for at := 0; at < len(p.Bytes); {
		// By the clock: a process that was stopped goes on before its timers do, and a
		// client that has given the call up must not find bytes in its memory.
		if ctx.Err() != nil || time.Now().After(deadline) {
			return fmt.Errorf("get: %w", context.DeadlineExceeded)
		}
		part := p.Bytes[at:min(at+regionStep, len(p.Bytes))]
		if err := w.to.move(part, true); err != nil {
			return err
		}
		at += len(part)
		switch {
		case pieces:
			_, _ = w.pieces.Write(part) // it never fails
		case len(p.Bytes) > regionStep:
			w.whole.add(p.Bytes[:at])
		}
		w.s.srv.stats.regionOut.Add(int64(len(part)))
	}
	return nil
}

// sum is the checksum of a block of which p is the last piece.
func (w *regionGetWork) sum(p *block.Payload) block.Sum {
	switch {
	case p.At > 0:
		return w.pieces.Sum128().Bytes()
	case len(p.Bytes) > regionStep:
		return w.whole.sum()
	}
	return sumOf(p.Bytes)
}
