package policy

import (
	"math"

	"github.com/kvtier/kvtier/index/block"
)

// Curves tells what share of its requests a tier would have had if it were another:
// with each of the policies, with half and twice the room, and with room for all that
// ever was there. It sees the paths of requests and no tier.
//
// Each of these runs as a shadow over a sample of the blocks, chosen by a hash of
// their fingerprints, in a tier that is smaller by as much (SHARDS, Waldspurger et al.
// 2015): the same blocks in each, so that they can be compared. A sampled block's
// parent is the nearest ancestor in the sample, so suffixes leave before their
// prefixes there, too. Hits are corrected by how far the sample's references are from
// their share of all, since a few blocks, as those of a common prompt, have many.
//
// State is bounded: about 8192 blocks and their ghosts for the largest shadow, half as
// many for the others, and 16 bytes for each of 65536 fingerprints.
type Curves struct {
	shadows  []*ghostTier
	follow   string // policy of the tier itself, which has half and twice the room
	capacity int64  // blocks; 0: not known yet
	shift    uint   // one in 1 << shift blocks is in the sample
	seen     ceiling
	sample   []uint64 // of the request under way
}

const (
	curveBlocks = 4096    // the most in a sample as large as the tier
	warmTimes   = 2       // capacities of references that fill a shadow
	curveSeen   = 1 << 16 // the most fingerprints of all that ever was there
)

// Curve is what one of the tiers would have had.
type Curve struct {
	Policy string  // "" where there is room for all: no policy matters
	Size   float64 // in capacities of the real tier; 0: room for all
	Refs   int64   // blocks of requests
	Hits   int64   // of those, blocks that would have been there; estimated
}

// NewCurves returns curves without requests, of a tier with the policy of that name.
func NewCurves(follow string) *Curves { return &Curves{follow: follow} }

// Follow tells that the tier has another policy now. What half and twice the room would
// do is counted anew.
func (c *Curves) Follow(name string) {
	if name == c.follow {
		return
	}
	c.follow = name
	for i, g := range c.shadows {
		if g.size != 1 {
			c.shadows[i] = newGhostTier(name, g.size)
			c.shadows[i].warm = warmTimes * c.capacity
		}
	}
}

// Request tells of one request's whole path, root first, by fingerprint, and how many
// blocks the tier holds as a rule.
func (c *Curves) Request(path []uint64, capacity int64) {
	c.seen.request(path)
	if capacity < 1 {
		return
	}
	c.scale(capacity)
	c.sample = c.sample[:0]
	for _, hash := range path {
		if sampled(hash, c.shift) {
			c.sample = append(c.sample, hash)
		}
	}
	for _, g := range c.shadows {
		room := max(1, int(math.Round(float64(capacity)*g.size/float64(uint64(1)<<c.shift))))
		hits := g.request(c.sample, room)
		if g.warm > 0 {
			g.warm -= int64(len(path))
			continue
		}
		g.count.add(len(path), len(c.sample), hits)
	}
}

// scale chooses how large the sample is. When the tier turns out to be of quite another
// size, which is seldom, the shadows begin anew.
func (c *Curves) scale(capacity int64) {
	shift := uint(0)
	for capacity>>shift > curveBlocks {
		shift++
	}
	first := c.capacity == 0
	c.capacity = capacity
	switch {
	case first:
		for _, name := range Names() {
			c.shadows = append(c.shadows, newGhostTier(name, 1))
		}
		c.shadows = append(c.shadows, newGhostTier(c.follow, 0.5), newGhostTier(c.follow, 2))
	case shift > c.shift+1 || shift+1 < c.shift: // not for a size that varies a little
		for i, g := range c.shadows {
			g.count.fold(c.shift)
			now := newGhostTier(g.s.p.Name(), g.size)
			now.count, now.warm = g.count, warmTimes*capacity
			c.shadows[i] = now
		}
	default:
		return
	}
	c.shift = shift
}

// Curves appends what the tiers would have had: one for each policy, of half and twice
// the room, and with room for all.
func (c *Curves) Curves(dst []Curve) []Curve {
	for _, g := range c.shadows {
		refs, hits := g.count.total(c.shift)
		dst = append(dst, Curve{g.s.p.Name(), g.size, refs, hits})
	}
	refs, hits := c.seen.count.total(c.seen.shift)
	return append(dst, Curve{"", 0, refs, hits})
}

// sampled reports whether a block is among one in 1 << shift.
func sampled(hash uint64, shift uint) bool {
	// Not the bits by which prints finds its buckets: the finalizer of MurmurHash3.
	hash = (hash ^ hash>>33) * 0xff51afd7ed558ccd
	hash = (hash ^ hash>>33) * 0xc4ceb9fe1a85ec53
	return (hash^hash>>33)>>1>>(63-shift) == 0
}

// tally counts in a sample, and what it comes to in all.
type tally struct {
	refs, sample, hits int64   // at the present rate
	allRefs            int64   // at the rates before
	allHits            float64 // estimated
}

func (t *tally) add(refs, sample, hits int) {
	t.refs += int64(refs)
	t.sample += int64(sample)
	t.hits += int64(hits)
}

// estimate is the hits in all at the present rate.
func (t *tally) estimate(shift uint) float64 {
	rate := 1 / float64(uint64(1)<<shift)
	hits := float64(t.hits) + float64(t.refs)*rate - float64(t.sample)
	return min(max(0, hits/rate), float64(t.refs))
}

// fold ends the counting at a rate.
func (t *tally) fold(shift uint) {
	*t = tally{allRefs: t.allRefs + t.refs, allHits: t.allHits + t.estimate(shift)}
}

func (t *tally) total(shift uint) (refs, hits int64) {
	return t.allRefs + t.refs, int64(math.Round(t.allHits + t.estimate(shift)))
}

// ceiling is a tier that nothing ever leaves.
type ceiling struct {
	prints prints[struct{}]
	shift  uint
	count  tally
}

func (c *ceiling) request(path []uint64) {
	sample, hits := 0, 0
	for _, hash := range path {
		switch {
		case !sampled(hash, c.shift):
			continue
		case c.prints.find(hash) != 0:
			hits++
		default:
			c.prints.add(hash)
		}
		sample++
	}
	c.count.add(len(path), sample, hits)
	if c.prints.count > curveSeen {
		c.count.fold(c.shift)
		c.shift++
		c.prints.sift(func(hash uint64) bool { return sampled(hash, c.shift) })
	}
}

// ghostTier is a tier of which there is nothing but a shadow.
type ghostTier struct {
	s     *shadow
	size  float64 // of the real tier
	count tally
	warm  int64        // references that pass before it counts, since it began while the tier was full
	path  []ghostBlock // of the request under way
}

// ghostBlock is a block of a path.
type ghostBlock struct {
	h    block.Handle
	came bool
}

func newGhostTier(name string, size float64) *ghostTier {
	p, err := New(name)
	if err != nil {
		panic("policy: " + err.Error()) // the name is one of a tier's policy
	}
	return &ghostTier{s: newShadow(p), size: size}
}

// request replays a request in a tier with room for so many blocks, and returns the
// hits. As in a tier, its blocks are pinned while it is served, and what does not fit
// is cut off at the leaf end.
func (g *ghostTier) request(path []uint64, room int) int {
	prefix, hits, misses := g.s.request(path)
	insert := min(misses, max(0, room-hits))
	for victims := g.s.excess(room - insert); len(victims) > 0; victims = g.s.excess(room - insert) {
		for _, h := range victims {
			g.s.forget(h, block.Evicted)
		}
	}
	insert = min(insert, max(0, room-g.s.p.Len()))
	g.s.p.Request(path, prefix, 0)
	g.path = g.path[:0]
	for _, hash := range path {
		b := ghostBlock{h: g.s.prints.find(hash)}
		if b.h == 0 {
			if insert == 0 {
				break
			}
			insert--
			b = ghostBlock{g.s.prints.add(hash), true}
		}
		g.path = append(g.path, b)
	}
	for i := len(g.path) - 1; i >= 0; i-- {
		b := g.path[i]
		if !b.came {
			g.s.p.Hit(b.h)
			continue
		}
		x := Block{Hash: path[i], Bytes: 1, Tokens: 1, Depth: uint32(i)}
		if i > 0 {
			x.Parent = g.path[i-1].h
		}
		g.s.p.Insert(b.h, x)
	}
	return hits
}
