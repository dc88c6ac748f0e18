package policy

import "github.com/kvtier/kvtier/index/block"

// LRULeaf evicts the least recently used block among those without a resident
// child. Since a request's blocks are told leaf to root, suffixes leave before
// their prefixes: it is the leaf-first LRU of radix caches.
//
// Every block carries the stamp of its last use. The blocks that may leave are
// kept in the order of their stamps, in two parts: a list for those that were
// used while they had no child, which arrive in order, and a heap for those that
// became childless later and belong somewhere in its middle. A block that is
// refused as pinned is put aside, so that not every call meets it again; blocks
// put aside are asked about again a few at a time.
//
// A block may leave when the store calls it a leaf and no resident block named
// it as parent; children are counted also before their parent comes. A handle
// must not be given to another block while a resident block names it as parent.
//
// State is 32 bytes a handle, and at most 8 a resident block for heap and scratch.
type LRULeaf struct {
	chunks []*[chunkLen]node // by handle; nil where no handle was seen yet
	clock  uint64            // stamp of the last use
	count  int               // resident blocks
	list   chain             // may leave; oldest use first
	aside  chain             // may leave but were refused as pinned; oldest refusal first
	heap   []block.Handle    // may leave; oldest use on top
	popped []block.Handle    // scratch of Victims: taken out of heap by the call under way
}

// node is the state of one handle. It holds no pointer, so that the garbage
// collector does not look into the chunks.
type node struct {
	stamp  uint64       // of the last use
	prev   block.Handle // older neighbour in list or aside; in heap, the index there
	next   block.Handle // newer neighbour in list or aside
	parent block.Handle
	kids   uint32 // resident blocks that name this handle as parent
	bytes  uint32
	place  place
	leaf   bool // as told by Leaf
	lent   bool // during Victims: all its children are in the answer
}

// place says where a block stands.
type place uint8

const (
	absent place = iota // not resident
	inner               // has a child
	listed              // in list
	heaped              // in heap
	passed              // in aside
	popped              // in popped
)

const (
	chunkBits = 12 // 128 KiB a chunk
	chunkLen  = 1 << chunkBits

	// askAgain is how many blocks put aside one call of Victims asks about,
	// beside one for each victim: enough that a block comes back soon after its
	// pin has ended, few enough that pinned blocks cost next to nothing.
	askAgain = 8
)

// NewLRULeaf returns an empty policy.
func NewLRULeaf() *LRULeaf { return &LRULeaf{} }

// Name is lru-leaf.
func (p *LRULeaf) Name() string { return "lru-leaf" }

// Len is the number of resident blocks.
func (p *LRULeaf) Len() int { return p.count }

// Request does nothing: recency needs no path.
func (p *LRULeaf) Request([]uint64, int, uint8) {}

// Hit makes h the most recently used block.
func (p *LRULeaf) Hit(h block.Handle) {
	n := p.resident(h)
	if n == nil {
		return
	}
	p.unplace(n)
	p.clock++
	n.stamp = p.clock
	p.settle(h, n)
}

// Insert makes h resident, as the most recently used block.
func (p *LRULeaf) Insert(h block.Handle, b Block) {
	if h == 0 {
		return
	}
	n := p.grow(h)
	if n.place != absent {
		p.Hit(h)
		return
	}
	p.count++
	p.clock++
	n.stamp, n.bytes, n.leaf, n.parent = p.clock, b.Bytes, true, 0
	if b.Parent != 0 && b.Parent != h {
		n.parent = b.Parent
		up := p.grow(b.Parent)
		up.kids++
		if up.place != absent {
			p.unplace(up)
		}
	}
	p.settle(h, n)
}

// Leaf records what the store says of h.
func (p *LRULeaf) Leaf(h block.Handle, leaf bool) {
	n := p.resident(h)
	if n == nil || n.leaf == leaf {
		return
	}
	n.leaf = leaf
	p.unplace(n)
	p.settle(h, n)
}

// Remove forgets h. A parent whose last child it was may leave from now on, at
// the place that its own last use deserves.
func (p *LRULeaf) Remove(h block.Handle, _ block.Reason) {
	n := p.resident(h)
	if n == nil {
		return
	}
	p.unplace(n)
	n.place = absent
	p.count--
	if n.parent == 0 {
		return
	}
	up := p.at(n.parent)
	up.kids--
	if up.place == inner {
		p.settle(n.parent, up)
	}
}

// Victims appends the least recently used blocks that may leave. A block of
// which ok said no may be passed over for some calls after its pin has ended,
// unless there is nothing else to choose.
func (p *LRULeaf) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	first := len(dst)
	cursor := p.list.oldest // what is older in the list is chosen already
	pending := p.aside.len  // put aside by earlier calls and not yet asked about in this one
	credit := askAgain
	var follow block.Handle // lent, and neither chosen nor in the heap
	for need > 0 {
		for ; pending > 0 && credit > 0; pending, credit = pending-1, credit-1 {
			p.ask(ok)
		}
		h := p.oldest(follow, cursor)
		if h == 0 {
			if pending == 0 {
				break
			}
			credit = pending // nothing else is left, so ask about them all
			continue
		}
		n := p.at(h)
		switch h {
		case follow:
			follow = 0
		case cursor:
			cursor = n.next
		default:
			p.heapRemove(n)
			n.place = popped
			p.popped = append(p.popped, h)
		}
		if !ok(h) {
			if !n.lent {
				p.putAside(h, n)
			}
			continue
		}
		dst = append(dst, h)
		need -= int64(n.bytes)
		credit++
		if n.parent == 0 {
			continue
		}
		up := p.at(n.parent)
		up.kids--
		if up.kids == 0 && up.place == inner {
			up.lent = true
			if follow != 0 {
				p.heapPush(follow, p.at(follow))
			}
			follow = n.parent
		}
	}
	p.restore(dst[first:])
	return dst
}

// ask asks about the block that was put aside longest ago.
func (p *LRULeaf) ask(ok func(block.Handle) bool) {
	h := p.aside.oldest
	n := p.at(h)
	p.unlink(&p.aside, n)
	if ok(h) {
		p.heapPush(h, n) // not into the list, where the caller has a cursor
		return
	}
	p.linkNewest(&p.aside, h, n)
}

// oldest returns the least recently used of a, b and the top of the heap, 0
// when there is none.
func (p *LRULeaf) oldest(a, b block.Handle) block.Handle {
	if a == 0 || b != 0 && p.at(b).stamp < p.at(a).stamp {
		a = b
	}
	if len(p.heap) > 0 && (a == 0 || p.at(p.heap[0]).stamp < p.at(a).stamp) {
		a = p.heap[0]
	}
	return a
}

// putAside moves a block that Victims met in list or heap.
func (p *LRULeaf) putAside(h block.Handle, n *node) {
	if n.place == listed {
		p.unlink(&p.list, n)
	}
	n.place = passed
	p.linkNewest(&p.aside, h, n)
}

// restore undoes what Victims did to choose the blocks given, since nothing
// changes until Remove.
func (p *LRULeaf) restore(chosen []block.Handle) {
	for _, h := range chosen {
		n := p.at(h)
		if n.parent == 0 {
			continue
		}
		up := p.at(n.parent)
		up.kids++
		if up.lent {
			up.lent = false
			if up.place == heaped {
				p.heapRemove(up)
			}
			up.place = inner
		}
	}
	for _, h := range p.popped {
		if n := p.at(h); n.place == popped {
			p.heapPush(h, n)
		}
	}
	p.popped = p.popped[:0]
}

// settle puts a resident block that stands nowhere into its place.
func (p *LRULeaf) settle(h block.Handle, n *node) {
	switch {
	case !n.leaf || n.kids > 0:
		n.place = inner
	case p.list.len == 0 || n.stamp > p.at(p.list.newest).stamp:
		n.place = listed
		p.linkNewest(&p.list, h, n)
	case n.stamp < p.at(p.list.oldest).stamp: // as a rule when its last child was evicted
		n.place = listed
		p.linkOldest(&p.list, h, n)
	default:
		p.heapPush(h, n)
	}
}

// unplace takes a resident block out of its place.
func (p *LRULeaf) unplace(n *node) {
	switch n.place {
	case listed:
		p.unlink(&p.list, n)
	case passed:
		p.unlink(&p.aside, n)
	case heaped:
		p.heapRemove(n)
	}
	n.place = inner
}

// at returns the node of a handle that was seen before.
func (p *LRULeaf) at(h block.Handle) *node {
	return &p.chunks[h>>chunkBits][h%chunkLen]
}

// resident returns the node of a resident block, or nil.
func (p *LRULeaf) resident(h block.Handle) *node {
	c := int(h >> chunkBits)
	if c >= len(p.chunks) || p.chunks[c] == nil {
		return nil
	}
	if n := &p.chunks[c][h%chunkLen]; n.place != absent {
		return n
	}
	return nil
}

// grow returns the node of any handle.
func (p *LRULeaf) grow(h block.Handle) *node {
	c := int(h >> chunkBits)
	for c >= len(p.chunks) {
		p.chunks = append(p.chunks, nil)
	}
	if p.chunks[c] == nil {
		p.chunks[c] = new([chunkLen]node)
	}
	return &p.chunks[c][h%chunkLen]
}

// chain is a doubly linked list through the nodes.
type chain struct {
	oldest, newest block.Handle
	len            int
}

func (p *LRULeaf) linkNewest(c *chain, h block.Handle, n *node) {
	n.prev, n.next = c.newest, 0
	if c.newest != 0 {
		p.at(c.newest).next = h
	} else {
		c.oldest = h
	}
	c.newest = h
	c.len++
}

func (p *LRULeaf) linkOldest(c *chain, h block.Handle, n *node) {
	n.prev, n.next = 0, c.oldest
	if c.oldest != 0 {
		p.at(c.oldest).prev = h
	} else {
		c.newest = h
	}
	c.oldest = h
	c.len++
}

func (p *LRULeaf) unlink(c *chain, n *node) {
	if n.prev != 0 {
		p.at(n.prev).next = n.next
	} else {
		c.oldest = n.next
	}
	if n.next != 0 {
		p.at(n.next).prev = n.prev
	} else {
		c.newest = n.prev
	}
	c.len--
}

func (p *LRULeaf) heapPush(h block.Handle, n *node) {
	n.place = heaped
	p.heap = append(p.heap, h)
	p.heapUp(len(p.heap)-1, h, n)
}

// heapRemove takes a block out of the heap and leaves its place to the caller.
func (p *LRULeaf) heapRemove(n *node) {
	i, last := int(n.prev), len(p.heap)-1
	h := p.heap[last]
	p.heap = p.heap[:last]
	if i == last {
		return
	}
	m := p.at(h)
	if i > 0 && m.stamp < p.at(p.heap[(i-1)/2]).stamp {
		p.heapUp(i, h, m)
		return
	}
	p.heapDown(i, h, m)
}

// heapUp puts h at i, or nearer to the top.
func (p *LRULeaf) heapUp(i int, h block.Handle, n *node) {
	for i > 0 {
		up := (i - 1) / 2
		m := p.at(p.heap[up])
		if m.stamp < n.stamp {
			break
		}
		p.heap[i] = p.heap[up]
		m.prev = block.Handle(i)
		i = up
	}
	p.heap[i] = h
	n.prev = block.Handle(i)
}

// heapDown puts h at i, or farther from the top.
func (p *LRULeaf) heapDown(i int, h block.Handle, n *node) {
	for {
		kid := 2*i + 1
		if kid >= len(p.heap) {
			break
		}
		m := p.at(p.heap[kid])
		if kid+1 < len(p.heap) {
			if r := p.at(p.heap[kid+1]); r.stamp < m.stamp {
				kid, m = kid+1, r
			}
		}
		if n.stamp < m.stamp {
			break
		}
		p.heap[i] = p.heap[kid]
		m.prev = block.Handle(i)
		i = kid
	}
	p.heap[i] = h
	n.prev = block.Handle(i)
}
