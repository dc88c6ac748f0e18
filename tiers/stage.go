package tiers

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// pieceBytes is the least that a get with GetOptions.Pieces hands out of a block from
// G3 before all of it is there: two of the pieces that a device is read in, as each
// costs the caller a system call and a wake-up of its client.
const pieceBytes = 2 * smallPiece

// nextPiece is how many of the bytes from at to end can be handed out while all before
// there have come, but may still turn out to be wrong: never the last. It is cut where
// reads are.
func nextPiece(at, end, there int64) int64 {
	cut := min(there, end-1)
	return max(0, cut-cut%pieceBytes-at)
}

// staged is a block on its way from G3 into a staging buffer. Who reads it and who
// asked for it part from it; the buffer goes back with the second of them.
type staged struct {
	buf    []byte
	came   atomic.Int64  // bytes of the slot that are there
	more   chan struct{} // buffer of 1: came has grown
	done   chan struct{}
	err    error // valid when done is closed
	parted atomic.Bool
}

// stageFrom has a block read from G3 while ctx lasts. The caller parts from it.
func (s *Store) stageFrom(ctx context.Context, g *grip) (*staged, error) {
	buf, err := s.staging.get(ctx)
	if err != nil {
		return nil, err
	}
	v := &staged{buf: buf, more: make(chan struct{}, 1), done: make(chan struct{})}
	size, header := SlotBytes(int64(g.e.Len))
	h, e := g.h, g.e
	s.known(h, s.table.Update(h, func(e *index.Entry) { e.Refs++ })) // the caller may leave
	s.wg.Go(func() {
		v.err = s.readG3(ctx, h, &e, buf[:header], buf[header:size], v.tell)
		s.release(h)
		s.part(v) // first: so a call that waits for the end gives the buffer back before it returns
		close(v.done)
	})
	return v, nil
}

// part ends one of the two uses of a staging buffer.
func (s *Store) part(v *staged) {
	if v.parted.Swap(true) {
		s.staging.put(v.buf)
	}
}

func (v *staged) tell(n int64) {
	v.came.Store(n)
	select {
	case v.more <- struct{}{}:
	default:
	}
}

// over reports whether the read has ended.
func (v *staged) over() bool {
	select {
	case <-v.done:
		return true
	default:
		return false
	}
}

// stage reads a block from G3 into a staging buffer, from which the caller parts. It
// answers when ctx ends or the device goes down, also while the device does not let
// go of the buffer yet.
func (s *Store) stage(ctx context.Context, g *grip) (*staged, error) {
	ctx, leave := s.g3.devs[g.e.Place[ixG3].Device()].health.while(ctx)
	defer leave()
	v, err := s.stageFrom(ctx, g)
	if err != nil {
		return nil, err
	}
	select {
	case <-v.done:
	case <-ctx.Done():
	}
	switch {
	case !v.over():
		err = fmt.Errorf("read from g3: %w", context.Cause(ctx))
	case v.err != nil:
		err = v.err
	default:
		return v, nil
	}
	s.part(v)
	return nil, err
}

// serveStaged hands n bytes at off of a block of G3 to use, in pieces as they come,
// the last of them when the whole block is there and right. It answers as stage
// does. A miss says why there is no last piece; err is what use failed with.
func (s *Store) serveStaged(ctx context.Context, g *grip, p block.Payload, off, n int64, use func(block.Payload) error) (why block.MissReason, err error) {
	ctx, leave := s.g3.devs[g.e.Place[ixG3].Device()].health.while(ctx)
	defer leave()
	v, err := s.stageFrom(ctx, g)
	if err != nil {
		return missOf(err), nil
	}
	defer s.part(v)
	_, header := SlotBytes(int64(g.e.Len))
	for {
		over := v.over()
		if over && v.err != nil {
			return missOf(v.err), nil
		}
		k := n - p.At
		if p.More = !over; p.More {
			k = nextPiece(off+p.At, off+n, v.came.Load()-header)
		}
		if k > 0 {
			p.Bytes = v.buf[header+off+p.At:][:k]
			if !p.More {
				s.countHit(p.Tier, n)
			}
			if err := use(p); err != nil || !p.More {
				return block.Hit, err
			}
			p.At += k
			continue
		}
		select {
		case <-v.more:
		case <-v.done:
		case <-ctx.Done():
			if !v.over() {
				return missOf(context.Cause(ctx)), nil
			}
		}
	}
}
