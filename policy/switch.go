package policy

import "github.com/kvtier/kvtier/index/block"

// Switch evicts as that policy would which would have had the most hits lately.
// Each of the policies that it chooses from runs as a shadow: over metadata, with
// a tier as large as the real one. The real tier becomes like the one of the best
// shadow: first leaves what that has not, least recently used first.
//
// State is 48 bytes a handle, 56 and 64 a block in the shadows, at most 8 a resident
// block for heap and scratch, and what the shadows keep of ghosts.
type Switch struct {
	l       leaves
	blocks  column[switched]
	shadows []*shadow
	best    int // the shadow that is followed
	extent  extent
	full    bool // victims were wanted: the extent is the tier's size
	next    func() *queue
}

// switched is what Switch knows of a handle beside its node. The queue of a block
// has a bit set for each shadow that has it.
type switched struct {
	hash   uint64
	shadow [switchShadows]block.Handle // 0: it is not there, or stands for another block of the same fingerprint
}

const (
	switchShadows = 2

	// What a hit counts falls to a third within a thousand requests. Another
	// shadow must be better by a hundredth to be followed.
	switchDecay = 0.999
	switchEdge  = 1.01
)

// NewSwitch returns an empty policy that chooses between lru-leaf and s3-ghost.
func NewSwitch() *Switch {
	p := &Switch{shadows: []*shadow{newShadow(NewLRULeaf()), newShadow(NewS3Ghost())}}
	p.l.reset(1 << switchShadows)
	p.next = p.choose
	return p
}

// Name is switch.
func (p *Switch) Name() string { return "switch" }

// Len is the number of resident blocks.
func (p *Switch) Len() int { return p.l.count }

// Request counts what the shadows would have had of the request, and makes room in
// them for the rest of it.
func (p *Switch) Request(path []uint64, _ int, _ uint8) {
	for i, s := range p.shadows {
		prefix, hits, misses := s.request(path)
		s.score = switchDecay*s.score + float64(prefix)
		if p.full {
			size := p.extent.blocks
			p.trim(i, size-min(misses, size-hits))
		}
	}
	for i, s := range p.shadows {
		if s.score > switchEdge*p.shadows[p.best].score {
			p.best = i
		}
	}
}

// Hit uses h, in the real tier and in the shadows.
func (p *Switch) Hit(h block.Handle) {
	if n := p.l.resident(h); n != nil {
		p.l.move(h, n, p.touch(h), p.l.tick())
	}
}

// Insert makes h resident.
func (p *Switch) Insert(h block.Handle, b Block) {
	if h == 0 {
		return
	}
	if p.l.resident(h) != nil {
		p.Hit(h)
		return
	}
	*p.blocks.grow(h) = switched{hash: b.Hash}
	p.l.insert(h, b, p.touch(h), p.l.tick())
	p.extent.insert(p.l.count)
}

// touch uses a block in the shadows, and returns its queue.
func (p *Switch) touch(h block.Handle) (bits uint8) {
	x := p.blocks.at(h)
	for i, s := range p.shadows {
		if s.p.Len() > 2*p.extent.blocks+shadowBatch {
			p.trim(i, p.extent.blocks) // nobody tells of requests
		}
		if sh := x.shadow[i]; sh != 0 {
			s.p.Hit(sh)
			bits |= 1 << i
			continue
		}
		sh := s.touch(x.hash)
		if f := s.prints.at(sh); f.real == 0 {
			f.real, x.shadow[i] = h, sh
			bits |= 1 << i
		}
	}
	return bits
}

// trim evicts blocks from a shadow until at most n are left.
func (p *Switch) trim(i, n int) {
	s := p.shadows[i]
	for victims := s.excess(n); len(victims) > 0; victims = s.excess(n) {
		for _, sh := range victims {
			if h := s.prints.at(sh).real; h != 0 {
				p.blocks.at(h).shadow[i] = 0
				real := p.l.nodes.at(h)
				p.l.move(h, real, real.queue&^(1<<i), real.stamp)
			}
			s.forget(sh, block.Evicted)
		}
	}
}

// Leaf records what the store says of h.
func (p *Switch) Leaf(h block.Handle, leaf bool) { p.l.setLeaf(h, leaf) }

// Remove forgets h. The shadows keep it when it left for want of room, for they
// may have had room.
func (p *Switch) Remove(h block.Handle, why block.Reason) {
	n := p.l.resident(h)
	if n == nil {
		return
	}
	p.l.remove(n)
	x := p.blocks.at(h)
	for i, s := range p.shadows {
		if sh := x.shadow[i]; sh != 0 {
			s.prints.at(sh).real = 0
			if !evicted(why) {
				s.forget(sh, why)
			}
		}
	}
}

// Victims appends blocks that the best shadow has not, and when there are none,
// others: of both the least recently used.
func (p *Switch) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	p.full = p.full || need > 0
	return p.l.victims(dst, need, ok, p.next)
}

// choose returns of the queues of blocks that the best shadow has not the one with
// the least recently used block, then of the others.
func (p *Switch) choose() *queue {
	if q := p.older(0); q != nil {
		return q
	}
	return p.older(1 << p.best)
}

// older returns the queue with the least recently used block, of those in which
// the bit of the best shadow is as wanted.
func (p *Switch) older(bit int) (oldest *queue) {
	var stamp uint64
	for i := range p.l.queues {
		if i&(1<<p.best) != bit {
			continue
		}
		q := &p.l.queues[i]
		if h := p.l.peek(q); h != 0 && (oldest == nil || p.l.nodes.at(h).stamp < stamp) {
			oldest, stamp = q, p.l.nodes.at(h).stamp
		}
	}
	return oldest
}
