package policy

import "github.com/kvtier/kvtier/index/block"

// leaves is the state that all policies share: the resident blocks, who is whose
// parent, and one or several queues in which those wait that may leave. A block
// belongs to one queue, and has a stamp in it; of each queue the lowest stamp
// leaves first. Policies choose queue and stamp, and from which queue the next
// victim comes.
//
// A block may leave when the store calls it a leaf and no resident block named
// it as parent; children are counted also before their parent comes. A handle
// must not be given to another block while a resident block names it as parent.
//
// State is 32 bytes a handle, and at most 8 a resident block for heap and scratch.
type leaves struct {
	nodes  column[node]
	clock  uint64         // stamp of the last use
	count  int            // resident blocks
	queues []queue        // made by the policy
	popped []block.Handle // scratch of victims: taken out of a heap by the call under way
}

// node is the state of one handle. It holds no pointer, so that the garbage
// collector does not look into the chunks.
type node struct {
	stamp  uint64
	prev   block.Handle // older neighbour in list or aside; in heap, the index there
	next   block.Handle // newer neighbour in list or aside
	parent block.Handle
	kids   uint32 // resident blocks that name this handle as parent
	bytes  uint32
	place  place
	queue  uint8
	leaf   bool // as told by Leaf
	lent   bool // during victims: all its children are in the answer
}

// place says where a block stands.
type place uint8

const (
	absent place = iota // not resident
	inner               // has a child
	listed              // in its queue's list
	heaped              // in its queue's heap
	passed              // in its queue's aside
	popped              // in popped
)

// reset forgets all blocks and makes n empty queues.
func (l *leaves) reset(n int) { *l = leaves{queues: make([]queue, n)} }

// resident returns the node of a resident block, or nil.
func (l *leaves) resident(h block.Handle) *node {
	if n := l.nodes.find(h); n != nil && n.place != absent {
		return n
	}
	return nil
}

// tick returns a stamp above all that it returned before.
func (l *leaves) tick() uint64 {
	l.clock++
	return l.clock
}

// insert makes h, which is not resident, resident in queue q.
func (l *leaves) insert(h block.Handle, b Block, q uint8, stamp uint64) {
	n := l.nodes.grow(h)
	l.count++
	l.queues[q].size++
	n.stamp, n.queue, n.bytes, n.leaf, n.parent = stamp, q, b.Bytes, true, 0
	if b.Parent != 0 && b.Parent != h {
		n.parent = b.Parent
		up := l.nodes.grow(b.Parent)
		up.kids++
		if up.place != absent {
			l.unplace(up)
		}
	}
	l.settle(h, n)
}

// move gives a resident block another queue, or stamp, or both.
func (l *leaves) move(h block.Handle, n *node, q uint8, stamp uint64) {
	l.unplace(n)
	l.queues[n.queue].size--
	l.queues[q].size++
	n.stamp, n.queue = stamp, q
	l.settle(h, n)
}

// setLeaf records what the store says of h.
func (l *leaves) setLeaf(h block.Handle, leaf bool) {
	n := l.resident(h)
	if n == nil || n.leaf == leaf {
		return
	}
	n.leaf = leaf
	l.unplace(n)
	l.settle(h, n)
}

// remove forgets a resident block. A parent whose last child it was may leave
// from now on, at the place that its own stamp deserves.
func (l *leaves) remove(n *node) {
	l.unplace(n)
	n.place = absent
	l.count--
	l.queues[n.queue].size--
	if n.parent == 0 {
		return
	}
	up := l.nodes.at(n.parent)
	up.kids--
	if up.place == inner {
		l.settle(n.parent, up)
	}
}

// settle puts a resident block that stands nowhere into its place.
func (l *leaves) settle(h block.Handle, n *node) {
	q := &l.queues[n.queue]
	switch {
	case !n.leaf || n.kids > 0:
		n.place = inner
	case q.list.len == 0 || n.stamp > l.nodes.at(q.list.newest).stamp:
		n.place = listed
		l.linkNewest(&q.list, h, n)
	case n.stamp < l.nodes.at(q.list.oldest).stamp: // as a rule when its last child was evicted
		n.place = listed
		l.linkOldest(&q.list, h, n)
	default:
		l.heapPush(q, h, n)
	}
}

// unplace takes a resident block out of its place.
func (l *leaves) unplace(n *node) {
	q := &l.queues[n.queue]
	switch n.place {
	case listed:
		l.unlink(&q.list, n)
	case passed:
		l.unlink(&q.aside, n)
	case heaped:
		l.heapRemove(q, n)
	}
	n.place = inner
}
