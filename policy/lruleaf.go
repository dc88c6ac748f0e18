package policy

import "github.com/kvtier/kvtier/index/block"

// LRULeaf evicts the least recently used block among those without a resident
// child. Since a request's blocks are told leaf to root, suffixes leave before
// their prefixes: it is the leaf-first LRU of radix caches.
//
// State is 32 bytes a handle, and at most 8 a resident block for heap and scratch.
type LRULeaf struct {
	l    leaves
	next func() *queue
}

// NewLRULeaf returns an empty policy.
func NewLRULeaf() *LRULeaf {
	p := &LRULeaf{}
	p.l.reset(1)
	p.next = func() *queue { return p.l.some(0) }
	return p
}

// Name is lru-leaf.
func (p *LRULeaf) Name() string { return "lru-leaf" }

// Len is the number of resident blocks.
func (p *LRULeaf) Len() int { return p.l.count }

// Request does nothing: recency needs no path.
func (p *LRULeaf) Request([]uint64, int, uint8) {}

// Hit makes h the most recently used block.
func (p *LRULeaf) Hit(h block.Handle) {
	if n := p.l.resident(h); n != nil {
		p.l.move(h, n, 0, p.l.tick())
	}
}

// Insert makes h resident, as the most recently used block.
func (p *LRULeaf) Insert(h block.Handle, b Block) {
	switch {
	case h == 0:
	case p.l.resident(h) != nil:
		p.Hit(h)
	default:
		p.l.insert(h, b, 0, p.l.tick())
	}
}

// Leaf records what the store says of h.
func (p *LRULeaf) Leaf(h block.Handle, leaf bool) { p.l.setLeaf(h, leaf) }

// Remove forgets h.
func (p *LRULeaf) Remove(h block.Handle, _ block.Reason) {
	if n := p.l.resident(h); n != nil {
		p.l.remove(n)
	}
}

// Victims appends the least recently used blocks that may leave. A block of
// which ok said no may be passed over for some calls after its pin has ended,
// unless there is nothing else to choose.
func (p *LRULeaf) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	return p.l.victims(dst, need, ok, p.next)
}
