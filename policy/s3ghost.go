package policy

import "github.com/kvtier/kvtier/index/block"

// S3Ghost keeps new blocks apart until they are used again: S3-FIFO (Yang et al.
// 2023) with the ghosts of four times as many blocks as are resident, and
// with leaves only. A new block comes into a small queue, first in first out,
// from which it leaves soon when nothing uses it. A block that is used in the small
// queue, or comes back while it is remembered as a ghost, belongs to the main
// queue, which is in the order of last use.
//
// State is 40 bytes a handle, at most 8 a resident block for heap and scratch, and
// at most 24 a ghost.
type S3Ghost struct {
	l      leaves
	hashes column[uint64]
	ghosts ghosts
	extent extent
	next   func() *queue
}

// The queues of S3Ghost.
const (
	s3Small = iota
	s3Main
)

const (
	s3SmallShare = 10 // the small queue's part of all resident blocks is one in so many
	s3GhostTimes = 4  // ghosts for each resident block
)

// NewS3Ghost returns an empty policy.
func NewS3Ghost() *S3Ghost {
	p := &S3Ghost{}
	p.l.reset(2)
	p.next = p.choose
	return p
}

// Name is s3-ghost.
func (p *S3Ghost) Name() string { return "s3-ghost" }

// Len is the number of resident blocks.
func (p *S3Ghost) Len() int { return p.l.count }

// Request does nothing.
func (p *S3Ghost) Request([]uint64, int, uint8) {}

// Hit makes h the most recently used block of the main queue.
func (p *S3Ghost) Hit(h block.Handle) {
	if n := p.l.resident(h); n != nil {
		p.l.move(h, n, s3Main, p.l.tick())
	}
}

// Insert makes h resident.
func (p *S3Ghost) Insert(h block.Handle, b Block) {
	if h == 0 {
		return
	}
	if p.l.resident(h) != nil {
		p.Hit(h)
		return
	}
	q := uint8(s3Small)
	if p.ghosts.take(b.Hash) {
		q = s3Main
	}
	p.l.insert(h, b, q, p.l.tick())
	*p.hashes.grow(h) = b.Hash
	p.extent.insert(p.l.count)
}

// Leaf records what the store says of h.
func (p *S3Ghost) Leaf(h block.Handle, leaf bool) { p.l.setLeaf(h, leaf) }

// Remove forgets h, and remembers it as a ghost when it left the small queue for
// want of room.
func (p *S3Ghost) Remove(h block.Handle, why block.Reason) {
	n := p.l.resident(h)
	if n == nil {
		return
	}
	p.l.remove(n)
	if n.queue == s3Small && evicted(why) {
		p.ghosts.trim(s3GhostTimes*p.extent.blocks - 1)
		p.ghosts.add(*p.hashes.at(h))
	}
}

// Victims appends blocks of the small queue while that is larger than its share,
// and of the main queue otherwise.
func (p *S3Ghost) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	return p.l.victims(dst, need, ok, p.next)
}

func (p *S3Ghost) choose() *queue {
	small, main := &p.l.queues[s3Small], &p.l.queues[s3Main]
	if small.left()*s3SmallShare > small.left()+main.left() {
		return p.l.either(s3Small, s3Main)
	}
	return p.l.either(s3Main, s3Small)
}
