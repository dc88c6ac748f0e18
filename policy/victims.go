package policy

import "github.com/kvtier/kvtier/index/block"

// askAgain is how many blocks put aside one call of victims asks about, beside
// one for each victim: enough that a block comes back soon after its pin has
// ended, few enough that pinned blocks cost next to nothing.
const askAgain = 8

// victims does what Policy.Victims says. Before each choice it asks next for the
// queue to take from: one that is not empty, nil when there is none.
//
// A block that is refused as pinned is put aside, so that not every call meets
// it again; it may then be passed over for some calls after its pin has ended,
// unless there is nothing else to choose.
func (l *leaves) victims(dst []block.Handle, need int64, ok func(block.Handle) bool, next func() *queue) []block.Handle {
	first := len(dst)
	for i := range l.queues {
		q := &l.queues[i]
		q.cursor, q.pending, q.follow, q.taken = q.list.oldest, q.aside.len, 0, 0
	}
	credit := askAgain
	for need > 0 {
		credit = l.askSome(credit, ok)
		q := next()
		if q == nil {
			if !l.askAll(ok) {
				break
			}
			continue
		}
		h := l.take(q)
		n := l.nodes.at(h)
		if !ok(h) {
			if !n.lent {
				l.putAside(q, h, n)
			}
			continue
		}
		dst = append(dst, h)
		need -= int64(n.bytes)
		q.taken++
		credit++
		if n.parent != 0 {
			l.lend(n.parent)
		}
	}
	l.restore(dst[first:])
	return dst
}

// peek returns the block of q that leaves next, 0 when there is none.
func (l *leaves) peek(q *queue) block.Handle {
	h := q.follow
	if h == 0 || q.cursor != 0 && l.nodes.at(q.cursor).stamp < l.nodes.at(h).stamp {
		h = q.cursor
	}
	if h == 0 || len(q.heap) > 0 && l.nodes.at(q.heap[0]).stamp < l.nodes.at(h).stamp {
		if len(q.heap) == 0 {
			return 0
		}
		h = q.heap[0]
	}
	return h
}

// some returns the queue of that number, nil when nothing of it may leave.
func (l *leaves) some(i uint8) *queue {
	if q := &l.queues[i]; l.peek(q) != 0 {
		return q
	}
	return nil
}

// either returns queue a, queue b when nothing of that may leave, nil when
// nothing of both.
func (l *leaves) either(a, b uint8) *queue {
	if q := l.some(a); q != nil {
		return q
	}
	return l.some(b)
}

// take takes the block that leaves next.
func (l *leaves) take(q *queue) block.Handle {
	h := l.peek(q)
	n := l.nodes.at(h)
	switch h {
	case q.follow:
		q.follow = 0
	case q.cursor:
		q.cursor = n.next
	default:
		l.heapRemove(q, n)
		n.place = popped
		l.popped = append(l.popped, h)
	}
	return h
}

// lend counts a child of h as gone, which makes h a candidate when it was the last.
func (l *leaves) lend(h block.Handle) {
	up := l.nodes.at(h)
	up.kids--
	if up.kids > 0 || up.place != inner {
		return
	}
	up.lent = true
	q := &l.queues[up.queue]
	if q.follow != 0 {
		l.heapPush(q, q.follow, l.nodes.at(q.follow))
	}
	q.follow = h
}

// askSome asks about blocks that were put aside longest ago and not yet asked
// about in this call, credit at the most, and returns the credit left.
func (l *leaves) askSome(credit int, ok func(block.Handle) bool) int {
	for i := range l.queues {
		q := &l.queues[i]
		for ; q.pending > 0 && credit > 0; credit-- {
			l.ask(q, ok)
		}
	}
	return credit
}

// askAll asks about all of them, and reports whether there was one.
func (l *leaves) askAll(ok func(block.Handle) bool) (some bool) {
	for i := range l.queues {
		for q := &l.queues[i]; q.pending > 0; some = true {
			l.ask(q, ok)
		}
	}
	return some
}

func (l *leaves) ask(q *queue, ok func(block.Handle) bool) {
	q.pending--
	h := q.aside.oldest
	n := l.nodes.at(h)
	l.unlink(&q.aside, n)
	if ok(h) {
		l.heapPush(q, h, n) // not into the list, where the call has a cursor
		return
	}
	l.linkNewest(&q.aside, h, n)
}

// putAside moves a block that was met in list or heap.
func (l *leaves) putAside(q *queue, h block.Handle, n *node) {
	if n.place == listed {
		l.unlink(&q.list, n)
	}
	n.place = passed
	l.linkNewest(&q.aside, h, n)
}

// restore undoes what the call did to choose the blocks given, since nothing
// changes until Remove.
func (l *leaves) restore(chosen []block.Handle) {
	for _, h := range chosen {
		n := l.nodes.at(h)
		if n.parent == 0 {
			continue
		}
		up := l.nodes.at(n.parent)
		up.kids++
		if up.lent {
			up.lent = false
			if up.place == heaped {
				l.heapRemove(&l.queues[up.queue], up)
			}
			up.place = inner
		}
	}
	for _, h := range l.popped {
		if n := l.nodes.at(h); n.place == popped {
			l.heapPush(&l.queues[n.queue], h, n)
		}
	}
	l.popped = l.popped[:0]
	for i := range l.queues {
		q := &l.queues[i]
		q.cursor, q.follow, q.taken = 0, 0, 0
	}
}
