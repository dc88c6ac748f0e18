package tiers

import (
	"context"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// rise is a slot of G2 while a block comes up into it. Who hands out what is there
// already holds it meanwhile, so that when the block turns out to be damaged the
// slot is given back with the last of them.
type rise struct {
	mu    sync.Mutex
	slot  []byte        // header block, payload, padding; nil while nothing is there
	came  int64         // bytes of it that are there; all of them: the block is right
	more  chan struct{} // closed when came has grown; nil when nobody waits
	users int
	free  func() // gives the slot back; set when no block has it
}

// tell notes that bytes have come, the header checked.
func (r *rise) tell(slot []byte, came int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slot, r.came = slot, came
	if r.more != nil {
		close(r.more)
		r.more = nil
	}
}

// look says what is there; more is closed when that has grown.
func (r *rise) look() (slot []byte, came int64, more <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.more == nil {
		r.more = make(chan struct{})
	}
	return r.slot, r.came, r.more
}

// hold keeps the slot, unless it was given back.
func (r *rise) hold() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.free != nil {
		return false
	}
	r.users++
	return true
}

// letGo ends a hold.
func (r *rise) letGo() {
	r.mu.Lock()
	r.users--
	free := r.free
	last := r.users == 0
	r.mu.Unlock()
	if last && free != nil {
		free()
	}
}

// forsake has free give the slot back as soon as nobody holds it.
func (r *rise) forsake(free func()) {
	r.mu.Lock()
	r.free = free
	now := r.users == 0
	r.mu.Unlock()
	if now {
		free()
	}
}

// serveRising hands n bytes at off of a block that is on its way up to use, in
// pieces as they come, the last of them when the whole block is there and right. It
// has not served when it has nothing to hand out before the copy has ended, or ends
// for this call: how, await says. A miss says why there is no last piece; err is what
// use failed with.
func (s *Store) serveRising(ctx context.Context, g *grip, p block.Payload, off, n int64, use func(block.Payload) error) (served bool, why block.MissReason, err error) {
	m := g.up
	_, header := SlotBytes(int64(g.e.Len))
	off += header
	for {
		slot, came, more := m.rise.look()
		k := n - p.At
		if p.More = slot == nil || came < int64(len(slot)); p.More {
			k = nextPiece(off+p.At, off+n, came)
		}
		if k > 0 && m.rise.hold() {
			p.Bytes = slot[off+p.At:][:k]
			if !p.More {
				s.countHit(p.Tier, n)
			}
			err := use(p)
			m.rise.letGo()
			if err != nil || !p.More {
				return true, block.Hit, err
			}
			p.At += k
			continue
		}
		select {
		case <-more:
			continue
		case <-m.done:
		case <-m.lost:
		case <-ctx.Done():
		}
		if m.ended() && m.err == nil && slot != nil {
			continue // all is there now
		}
		if p.At == 0 {
			return false, block.Hit, nil
		}
		return true, missOf(m.await(ctx, s.g2)), nil
	}
}
