package policy

import "github.com/kvtier/kvtier/index/block"

// ghosts remembers blocks that left, by fingerprint, in the order in which they
// left. It has at most 24 bytes a ghost.
type ghosts struct {
	prints         prints[link]
	oldest, newest block.Handle
}

type link struct{ older, newer block.Handle }

// len is the number of ghosts.
func (g *ghosts) len() int { return g.prints.count }

// add remembers a block as the newest. What is resident is no ghost, so it was not
// there, unless two blocks have the same fingerprint: then it is there twice.
func (g *ghosts) add(hash uint64) {
	h := g.prints.add(hash)
	g.prints.at(h).older = g.newest
	if g.newest != 0 {
		g.prints.at(g.newest).newer = h
	} else {
		g.oldest = h
	}
	g.newest = h
}

// take forgets a block and reports whether it was there.
func (g *ghosts) take(hash uint64) bool {
	h := g.prints.find(hash)
	if h == 0 {
		return false
	}
	g.drop(h)
	return true
}

// trim forgets the oldest until at most n are left.
func (g *ghosts) trim(n int) {
	for g.len() > max(n, 0) {
		g.drop(g.oldest)
	}
}

func (g *ghosts) drop(h block.Handle) {
	l := *g.prints.at(h)
	if l.older != 0 {
		g.prints.at(l.older).newer = l.newer
	} else {
		g.oldest = l.newer
	}
	if l.newer != 0 {
		g.prints.at(l.newer).older = l.older
	} else {
		g.newest = l.older
	}
	g.prints.remove(h)
}

// extent follows the size of a tier, in blocks, from the number that is resident.
// That falls before each batch of insertions, and by watermarks, without the tier
// being smaller: the extent rises at once and falls slowly.
type extent struct{ blocks int }

// extentFall is in how many insertions the extent goes most of the way down.
const extentFall = 1024

// insert is told how many blocks are resident after an insertion.
func (e *extent) insert(count int) {
	if count >= e.blocks {
		e.blocks = count
		return
	}
	e.blocks -= (e.blocks - count + extentFall - 1) / extentFall
}

// evicted reports whether a block of which that was said left for want of room, and so
// is worth remembering.
func evicted(why block.Reason) bool {
	return why == block.Evicted || why == block.Moved || why == block.Rejected
}
