package session

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index/block"
)

// regionShare is how many bytes are worth a goroutine, and maxMovers how many
// goroutines one call has at most: more take turns at the memory.
const (
	regionShare = 2 << 20
	maxMovers   = 16
)

// movers is how many goroutines copy so many blocks and bytes of one call.
func movers(blocks int, bytes int64) int {
	return max(1, min(runtime.GOMAXPROCS(0), maxMovers, blocks, int(bytes/regionShare)))
}

// regionPart is what one goroutine of a get into regions does, to be used again.
type regionPart struct {
	w     *regionGetWork
	want  []block.Wanted // of w's, one behind the other
	at    []int          // of each, its place in the message
	again []int          // places in want of blocks that came with another checksum
	err   error          // the call's, when it has failed or ended

	// Of the block that is being moved.
	to     segmented
	failed error
	whole  summer
	pieces xxh3.Hasher

	use func(i int, p block.Payload) error
}

func newRegionPart() *regionPart {
	m := new(regionPart)
	m.use = m.take
	return m
}

// run moves the blocks of the part.
func (m *regionPart) run() {
	w := m.w
	g := &w.m
	o := block.GetOptions{Class: g.Class, Quiet: g.Flags&FlagQuiet != 0, NoPromote: g.Flags&FlagNoPromote != 0, Pieces: true}
	m.again = m.again[:0]
	m.err = w.s.srv.store.Get(w.c.ctx, g.NS, int(g.HashLen), m.want, o, m.use)
	if len(m.again) > 0 && m.err == nil {
		// The store looks at them itself, and drops what is damaged.
		o.Verify, o.Quiet, o.Pieces = true, true, false
		want, at := make([]block.Wanted, len(m.again)), make([]int, len(m.again))
		for j, i := range m.again {
			want[j], at[j] = m.want[i], m.at[i]
		}
		m.want, m.at = want, at
		m.err = w.s.srv.store.Get(w.c.ctx, g.NS, int(g.HashLen), want, o, m.use)
	}
	m.whole.drop()
	m.to = segmented{}
}

// take moves what the store hands out: the payload is valid until it returns. It fails
// only when the call has ended.
func (m *regionPart) take(i int, p block.Payload) error {
	w, key := m.w, m.at[i]
	g := &w.got.Blocks[key]
	if p.Reason == block.Hit {
		if p.At == 0 {
			m.to, m.failed = segmented{rs: &w.s.regions, segs: w.segs[key]}, nil
			m.whole.drop()
			m.pieces.Reset()
			if int64(p.Total) > w.room[key] {
				m.failed = invalid("segments of %d bytes for a block of %d", w.room[key], p.Total)
			}
		}
		if m.failed == nil {
			m.failed = m.move(w.c.ctx, &p)
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
	case m.failed != nil:
		*g = GotBlock{Status: StatusOf(m.failed), Tier: p.Tier, Total: p.Total, Chunk: NoChunk}
	case m.sum(&p) != p.Sum:
		*g = GotBlock{Reason: block.MissCorrupt, Tier: p.Tier, Chunk: NoChunk}
		m.again = append(m.again, i)
	default:
		*g = GotBlock{Tier: p.Tier, Len: p.Total, Total: p.Total, Chunk: NoChunk, Sum: p.Sum}
	}
	return nil
}

// move copies a piece of a block and hashes what it copied, a step at a time, while
// that is in the cache: the store's bytes, since the client may change its own.
func (m *regionPart) move(ctx context.Context, p *block.Payload) error {
	pieces := p.At > 0 || p.More
	deadline, _ := ctx.Deadline()
	for at := 0; at < len(p.Bytes); {
		// By the clock: a process that was stopped goes on before its timers do, and a
		// client that has given the call up must not find bytes in its memory.
		if ctx.Err() != nil || time.Now().After(deadline) {
			return fmt.Errorf("get: %w", context.DeadlineExceeded)
		}
		part := p.Bytes[at:min(at+regionStep, len(p.Bytes))]
		if err := m.to.move(part, true); err != nil {
			return err
		}
		at += len(part)
		switch {
		case pieces:
			_, _ = m.pieces.Write(part) // it never fails
		case len(p.Bytes) > regionStep:
			m.whole.add(p.Bytes[:at])
		}
		m.w.s.srv.stats.regionOut.Add(int64(len(part)))
	}
	return nil
}

// sum is the checksum of a block of which p is the last piece.
func (m *regionPart) sum(p *block.Payload) block.Sum {
	switch {
	case p.At > 0:
		return m.pieces.Sum128().Bytes()
	case len(p.Bytes) > regionStep:
		return m.whole.sum()
	}
	return sumOf(p.Bytes)
}
