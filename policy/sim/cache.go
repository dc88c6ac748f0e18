package sim

import (
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// cache is the tier that the policy serves: it owns residency, and every block
// of it has one byte.
type cache struct {
	w        *Workload
	p        policy.Policy
	capacity int64
	high     int64 // 0: no watermarks
	low      int64

	handles []block.Handle // by block; 0: none
	slots   []slot         // by handle
	unused  []block.Handle
	stamp   uint32                  // of the request under way
	seen    []uint32                // by block, stamp of the last request with it
	ok      func(block.Handle) bool // not pinned

	// Of the request under way.
	path    []uint32 // its blocks, each once
	fresh   []bool   // by place in path: it is inserted
	prints  []uint64
	victims []block.Handle

	resident   int64
	hits       int64
	prefixHits int64
	evictions  int64
}

// slot is what the tier knows of a handle, which belongs to one block while
// that is resident.
type slot struct {
	id       uint32
	parent   block.Handle
	kids     uint32 // resident blocks that name it as parent
	resident bool
}

func newCache(w *Workload, p policy.Policy, capacity int64) *cache {
	c := &cache{
		w: w, p: p, capacity: capacity,
		handles: make([]block.Handle, w.Unique()),
		seen:    make([]uint32, w.Unique()),
		slots:   make([]slot, 1), // handle 0 is no block
	}
	c.ok = func(h block.Handle) bool { return c.seen[c.slots[h].id] != c.stamp }
	return c
}

// request replays one request.
func (c *cache) request(refs []uint32) error {
	c.stamp++
	hits, misses := c.lookup(refs)
	room := max(0, c.capacity-hits) // for misses, beside the pinned hits
	insert := min(misses, room)
	if err := c.evict(c.resident + insert - c.capacity); err != nil {
		return err
	}
	c.admit(min(insert, c.capacity-c.resident))
	if c.high == 0 || c.resident <= c.high {
		return nil
	}
	c.stamp++ // the request is over, and so are its pins
	return c.evict(c.resident - c.low)
}

// lookup counts hits, pins the blocks of the request, and tells the policy of
// it. It returns how many different blocks are resident and how many are not.
func (c *cache) lookup(refs []uint32) (hits, misses int64) {
	c.path, c.prints = c.path[:0], c.prints[:0]
	prefix, unbroken := 0, true
	for _, id := range refs {
		c.prints = append(c.prints, c.w.prints[id])
		found := c.slots[c.handles[id]].resident
		unbroken = unbroken && found
		if found {
			c.hits++
		}
		if unbroken {
			prefix++
		}
		if c.seen[id] == c.stamp {
			continue // a second time in one request
		}
		c.seen[id] = c.stamp
		c.path = append(c.path, id)
		if found {
			hits++
		} else {
			misses++
		}
	}
	c.prefixHits += int64(prefix)
	c.p.Request(c.prints, prefix, 0)
	return hits, misses
}

// admit inserts the first misses of the path, counted from the root, and tells
// the hits, leaf to root.
func (c *cache) admit(insert int64) {
	c.fresh = c.fresh[:0]
	for i, id := range c.path {
		if c.slots[c.handles[id]].resident {
			c.fresh = append(c.fresh, false)
			continue
		}
		if insert == 0 {
			c.path = c.path[:i] // what is behind an absent block is no use
			break
		}
		insert--
		c.fresh = append(c.fresh, true)
		c.take(id)
	}
	for i, id := range slices.Backward(c.path) {
		h := c.handles[id]
		if !c.fresh[i] {
			c.p.Hit(h)
			continue
		}
		b := policy.Block{Hash: c.w.prints[id], Depth: uint32(i), Tokens: 1, Bytes: 1}
		if i > 0 {
			b.Parent = c.handles[c.path[i-1]]
		}
		s := &c.slots[h]
		s.resident, s.parent = true, b.Parent
		c.resident++
		c.p.Insert(h, b)
		if s.kids > 0 {
			c.p.Leaf(h, false)
		}
		if b.Parent == 0 {
			continue
		}
		up := &c.slots[b.Parent]
		up.kids++
		if up.kids == 1 && up.resident {
			c.p.Leaf(b.Parent, false)
		}
	}
}

// evict removes need blocks, or as many as are not held by pins.
func (c *cache) evict(need int64) error {
	for need > 0 {
		c.victims = c.p.Victims(c.victims[:0], need, c.ok)
		if len(c.victims) == 0 {
			return nil
		}
		for _, h := range c.victims {
			if err := c.check(h); err != nil {
				return err
			}
			c.remove(h)
			c.evictions++
			need--
		}
	}
	return nil
}

// check holds the policy to its contract.
func (c *cache) check(h block.Handle) error {
	switch {
	case h == 0 || int(h) >= len(c.slots) || !c.slots[h].resident:
		return fmt.Errorf("%w: victim %d is not resident", ErrPolicy, h)
	case !c.ok(h):
		return fmt.Errorf("%w: victim %d is pinned", ErrPolicy, h)
	case c.slots[h].kids > 0:
		return fmt.Errorf("%w: victim %d has %d resident children", ErrPolicy, h, c.slots[h].kids)
	}
	return nil
}

func (c *cache) remove(h block.Handle) {
	s := &c.slots[h]
	s.resident = false
	c.resident--
	c.p.Remove(h, block.Evicted)
	if s.parent != 0 {
		up := &c.slots[s.parent]
		up.kids--
		if up.kids == 0 && up.resident {
			c.p.Leaf(s.parent, true)
		}
	}
	// Its children left before it, so nothing names the handle any more.
	c.handles[s.id] = 0
	c.unused = append(c.unused, h)
}

// take gives a block a handle.
func (c *cache) take(id uint32) {
	if n := len(c.unused); n > 0 {
		c.handles[id] = c.unused[n-1]
		c.unused = c.unused[:n-1]
	} else {
		c.handles[id] = block.Handle(len(c.slots))
		c.slots = append(c.slots, slot{})
	}
	c.slots[c.handles[id]] = slot{id: id}
}
