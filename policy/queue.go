package policy

import "github.com/kvtier/kvtier/index/block"

// queue keeps blocks that may leave in the order of their stamps, in two parts: a
// list for those that come in order, and a heap for those that became childless
// later and belong somewhere in its middle.
type queue struct {
	size  int            // resident blocks that belong here, whether or not they may leave
	list  chain          // may leave; lowest stamp first
	aside chain          // may leave but were refused as pinned; oldest refusal first
	heap  []block.Handle // may leave; lowest stamp on top

	// Of the call of victims under way.
	cursor  block.Handle // what is older in the list is chosen already
	follow  block.Handle // lent, and neither chosen nor in the heap
	pending int          // put aside by earlier calls and not yet asked about
	taken   int          // chosen
}

// left is the number of its blocks that are not chosen as victims.
func (q *queue) left() int { return q.size - q.taken }

// chain is a doubly linked list through the nodes.
type chain struct {
	oldest, newest block.Handle
	len            int
}

func (l *leaves) linkNewest(c *chain, h block.Handle, n *node) {
	n.prev, n.next = c.newest, 0
	if c.newest != 0 {
		l.nodes.at(c.newest).next = h
	} else {
		c.oldest = h
	}
	c.newest = h
	c.len++
}

func (l *leaves) linkOldest(c *chain, h block.Handle, n *node) {
	n.prev, n.next = 0, c.oldest
	if c.oldest != 0 {
		l.nodes.at(c.oldest).prev = h
	} else {
		c.newest = h
	}
	c.oldest = h
	c.len++
}

func (l *leaves) unlink(c *chain, n *node) {
	if n.prev != 0 {
		l.nodes.at(n.prev).next = n.next
	} else {
		c.oldest = n.next
	}
	if n.next != 0 {
		l.nodes.at(n.next).prev = n.prev
	} else {
		c.newest = n.prev
	}
	c.len--
}

func (l *leaves) heapPush(q *queue, h block.Handle, n *node) {
	n.place = heaped
	q.heap = append(q.heap, h)
	l.heapUp(q.heap, len(q.heap)-1, h, n)
}

// heapRemove takes a block out of the heap and leaves its place to the caller.
func (l *leaves) heapRemove(q *queue, n *node) {
	i, last := int(n.prev), len(q.heap)-1
	h := q.heap[last]
	q.heap = q.heap[:last]
	if i == last {
		return
	}
	m := l.nodes.at(h)
	if i > 0 && m.stamp < l.nodes.at(q.heap[(i-1)/2]).stamp {
		l.heapUp(q.heap, i, h, m)
		return
	}
	l.heapDown(q.heap, i, h, m)
}

// heapUp puts h at i, or nearer to the top.
func (l *leaves) heapUp(heap []block.Handle, i int, h block.Handle, n *node) {
	for i > 0 {
		up := (i - 1) / 2
		m := l.nodes.at(heap[up])
		if m.stamp < n.stamp {
			break
		}
		heap[i] = heap[up]
		m.prev = block.Handle(i)
		i = up
	}
	heap[i] = h
	n.prev = block.Handle(i)
}

// heapDown puts h at i, or farther from the top.
func (l *leaves) heapDown(heap []block.Handle, i int, h block.Handle, n *node) {
	for {
		kid := 2*i + 1
		if kid >= len(heap) {
			break
		}
		m := l.nodes.at(heap[kid])
		if kid+1 < len(heap) {
			if r := l.nodes.at(heap[kid+1]); r.stamp < m.stamp {
				kid, m = kid+1, r
			}
		}
		if n.stamp < m.stamp {
			break
		}
		heap[i] = heap[kid]
		m.prev = block.Handle(i)
		i = kid
	}
	heap[i] = h
	n.prev = block.Handle(i)
}
