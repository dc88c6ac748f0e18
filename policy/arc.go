package policy

import "github.com/kvtier/kvtier/index/block"

// ARC is the adaptive replacement cache (Megiddo and Modha 2003) with leaves
// only: blocks used once and blocks used more often are kept apart, each in the
// order of last use, and ghosts of both decide how much room each has.
//
// State is 40 bytes a handle, at most 8 a resident block for heap and scratch, and
// at most 24 a ghost. There are at most as many ghosts as resident blocks.
type ARC struct {
	l      leaves
	hashes column[uint64]
	gone   [2]ghosts // of each queue
	target int       // blocks that the queue of those used once should have
	extent extent
	next   func() *queue
}

// The queues of ARC.
const (
	arcOnce = iota
	arcOften
)

// NewARC returns an empty policy.
func NewARC() *ARC {
	p := &ARC{}
	p.l.reset(2)
	p.next = p.choose
	return p
}

// Name is arc.
func (p *ARC) Name() string { return "arc" }

// Len is the number of resident blocks.
func (p *ARC) Len() int { return p.l.count }

// Request does nothing.
func (p *ARC) Request([]uint64, int, uint8) {}

// Hit makes h the most recently used block of those used often.
func (p *ARC) Hit(h block.Handle) {
	if n := p.l.resident(h); n != nil {
		p.l.move(h, n, arcOften, p.l.tick())
	}
}

// Insert makes h resident. If it is a ghost of one queue, that queue should have
// had more room.
func (p *ARC) Insert(h block.Handle, b Block) {
	if h == 0 {
		return
	}
	if p.l.resident(h) != nil {
		p.Hit(h)
		return
	}
	q := uint8(arcOften)
	once, often := p.gone[arcOnce].len(), p.gone[arcOften].len()
	switch {
	case p.gone[arcOnce].take(b.Hash):
		p.target = min(p.target+max(1, often/once), p.extent.blocks)
	case p.gone[arcOften].take(b.Hash):
		p.target = max(p.target-max(1, once/often), 0)
	default:
		q = arcOnce
	}
	p.l.insert(h, b, q, p.l.tick())
	*p.hashes.grow(h) = b.Hash
	p.extent.insert(p.l.count)
}

// Leaf records what the store says of h.
func (p *ARC) Leaf(h block.Handle, leaf bool) { p.l.setLeaf(h, leaf) }

// Remove forgets h, and remembers it as a ghost when it left for want of room.
func (p *ARC) Remove(h block.Handle, why block.Reason) {
	n := p.l.resident(h)
	if n == nil {
		return
	}
	p.l.remove(n)
	if !evicted(why) {
		return
	}
	p.gone[n.queue].add(*p.hashes.at(h))
	// Those used once and their ghosts are as many as the tier's blocks, all
	// together twice as many.
	size := p.extent.blocks
	p.gone[arcOnce].trim(size - p.l.queues[arcOnce].size)
	p.gone[arcOften].trim(2*size - p.l.count - p.gone[arcOnce].len())
}

// Victims appends blocks used once while they have more room than they should,
// and blocks used more often otherwise.
func (p *ARC) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	return p.l.victims(dst, need, ok, p.next)
}

func (p *ARC) choose() *queue {
	if p.l.queues[arcOnce].left() > p.target {
		return p.l.either(arcOnce, arcOften)
	}
	return p.l.either(arcOften, arcOnce)
}
