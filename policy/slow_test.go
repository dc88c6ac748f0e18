package policy_test

import (
	"cmp"
	"slices"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// slowPolicy is a policy by the book: it looks at all blocks for each victim.
type slowPolicy interface {
	request(path []uint64)
	hit(h block.Handle)
	insert(h block.Handle, b policy.Block)
	remove(h block.Handle, why block.Reason)
	victims(need int, ok func(block.Handle) bool) []block.Handle
}

func newSlow(name string) slowPolicy {
	switch name {
	case "lru-leaf":
		return &slowLRU{}
	case "s3-ghost":
		return &slowS3{}
	case "arc":
		return &slowARC{}
	case "gdsf":
		return &slowGDSF{}
	case "switch":
		return &slowSwitch{shadows: []*slowShadow{{p: &slowLRU{}}, {p: &slowS3{}}}}
	}
	return nil
}

// slowTier is the resident blocks.
type slowTier struct {
	clock  int
	blocks []*slowBlock // in the order of insertion
}

type slowBlock struct {
	h        block.Handle
	b        policy.Block
	used     int // when
	uses     int
	queue    string
	priority float64
}

func (t *slowTier) find(h block.Handle) *slowBlock {
	for _, b := range t.blocks {
		if b.h == h {
			return b
		}
	}
	return nil
}

func (t *slowTier) use(h block.Handle) *slowBlock {
	b := t.find(h)
	t.clock++
	b.used = t.clock
	b.uses++
	return b
}

func (t *slowTier) add(h block.Handle, b policy.Block, queue string) *slowBlock {
	t.blocks = append(t.blocks, &slowBlock{h: h, b: b, queue: queue})
	return t.use(h)
}

func (t *slowTier) drop(h block.Handle) *slowBlock {
	b := t.find(h)
	t.blocks = slices.DeleteFunc(t.blocks, func(o *slowBlock) bool { return o == b })
	return b
}

// size counts the blocks of a queue that are not chosen.
func (t *slowTier) size(queue string, chosen []block.Handle) (n int) {
	for _, b := range t.blocks {
		if b.queue == queue && !slices.Contains(chosen, b.h) {
			n++
		}
	}
	return n
}

// choose takes need victims, each the first in the order that before gives of
// those that may leave. The order may depend on what is chosen.
func (t *slowTier) choose(need int, ok func(block.Handle) bool, before func(a, b *slowBlock, chosen []block.Handle) int) (chosen []block.Handle) {
	for len(chosen) < need {
		var best *slowBlock
		for _, b := range t.blocks {
			child := func(o *slowBlock) bool { return o.b.Parent == b.h && !slices.Contains(chosen, o.h) }
			if slices.Contains(chosen, b.h) || !ok(b.h) || slices.ContainsFunc(t.blocks, child) {
				continue
			}
			if best == nil || before(b, best, chosen) < 0 {
				best = b
			}
		}
		if best == nil {
			break
		}
		chosen = append(chosen, best.h)
	}
	return chosen
}

func byUse(a, b *slowBlock, _ []block.Handle) int { return cmp.Compare(a.used, b.used) }

// slowLRU is leaf-first LRU.
type slowLRU struct{ slowTier }

func (p *slowLRU) request([]uint64)                      {}
func (p *slowLRU) hit(h block.Handle)                    { p.use(h) }
func (p *slowLRU) insert(h block.Handle, b policy.Block) { p.add(h, b, "") }
func (p *slowLRU) remove(h block.Handle, _ block.Reason) { p.drop(h) }
func (p *slowLRU) victims(need int, ok func(block.Handle) bool) []block.Handle {
	return p.choose(need, ok, byUse)
}

// slowGhosts are the fingerprints of blocks that left, oldest first.
type slowGhosts []uint64

func (g *slowGhosts) take(hash uint64) bool {
	i := slices.Index(*g, hash)
	if i >= 0 {
		*g = slices.Delete(*g, i, i+1)
	}
	return i >= 0
}

func (g *slowGhosts) add(hash uint64, most int) {
	g.take(hash)
	*g = append(*g, hash)
	g.trim(most)
}

func (g *slowGhosts) trim(most int) {
	if n := len(*g) - max(most, 0); n > 0 {
		*g = (*g)[n:]
	}
}

// slowSize is the size of the tier as far as can be seen.
type slowSize int

func (s *slowSize) insert(count int) {
	if n := int(*s); count < n {
		*s = slowSize(n - (n-count+1023)/1024)
	} else {
		*s = slowSize(count)
	}
}

// slowS3 has a tenth of its blocks in a small queue and remembers four times as many.
type slowS3 struct {
	slowTier
	ghosts slowGhosts
	tier   slowSize
}

func (p *slowS3) request([]uint64)   {}
func (p *slowS3) hit(h block.Handle) { p.use(h).queue = "main" }

func (p *slowS3) insert(h block.Handle, b policy.Block) {
	queue := "small"
	if p.ghosts.take(b.Hash) {
		queue = "main"
	}
	p.add(h, b, queue)
	p.tier.insert(len(p.blocks))
}

func (p *slowS3) remove(h block.Handle, why block.Reason) {
	if b := p.drop(h); b.queue == "small" && why == block.Evicted {
		p.ghosts.add(b.b.Hash, 4*int(p.tier))
	}
}

func (p *slowS3) victims(need int, ok func(block.Handle) bool) []block.Handle {
	return p.choose(need, ok, func(a, b *slowBlock, chosen []block.Handle) int {
		first := "main"
		if small := p.size("small", chosen); 10*small > len(p.blocks)-len(chosen) {
			first = "small"
		}
		return inQueue(a, b, first)
	})
}

// inQueue orders by queue, and in one by use.
func inQueue(a, b *slowBlock, first string) int {
	if (a.queue == first) != (b.queue == first) {
		if a.queue == first {
			return -1
		}
		return 1
	}
	return byUse(a, b, nil)
}

// slowARC is ARC, with the lists of its authors: T1 and T2 resident, B1 and B2 gone.
type slowARC struct {
	slowTier
	b1, b2 slowGhosts
	p      int
	tier   slowSize
}

func (p *slowARC) request([]uint64)   {}
func (p *slowARC) hit(h block.Handle) { p.use(h).queue = "T2" }

func (p *slowARC) insert(h block.Handle, b policy.Block) {
	n1, n2 := len(p.b1), len(p.b2)
	queue := "T2"
	switch {
	case p.b1.take(b.Hash):
		p.p = min(p.p+max(1, n2/n1), int(p.tier))
	case p.b2.take(b.Hash):
		p.p = max(p.p-max(1, n1/n2), 0)
	default:
		queue = "T1"
	}
	p.add(h, b, queue)
	p.tier.insert(len(p.blocks))
}

func (p *slowARC) remove(h block.Handle, why block.Reason) {
	b := p.drop(h)
	if why != block.Evicted {
		return
	}
	if b.queue == "T1" {
		p.b1.add(b.b.Hash, 1<<30)
	} else {
		p.b2.add(b.b.Hash, 1<<30)
	}
	c := int(p.tier)
	p.b1.trim(c - p.size("T1", nil))
	p.b2.trim(2*c - len(p.blocks) - len(p.b1))
}

func (p *slowARC) victims(need int, ok func(block.Handle) bool) []block.Handle {
	return p.choose(need, ok, func(a, b *slowBlock, chosen []block.Handle) int {
		first := "T2"
		if p.size("T1", chosen) > p.p {
			first = "T1"
		}
		return inQueue(a, b, first)
	})
}

// slowGDSF has priorities of floor + uses * time / bytes.
type slowGDSF struct {
	slowTier
	floor float64
}

func (p *slowGDSF) request([]uint64)   {}
func (p *slowGDSF) hit(h block.Handle) { p.rank(p.use(h)) }

func (p *slowGDSF) insert(h block.Handle, b policy.Block) { p.rank(p.add(h, b, "")) }

func (p *slowGDSF) rank(b *slowBlock) {
	b.priority = p.floor + float64(b.uses)*float64(b.b.Recompute)/float64(b.b.Bytes)
}

func (p *slowGDSF) remove(h block.Handle, why block.Reason) {
	if b := p.drop(h); why == block.Evicted {
		p.floor = max(p.floor, b.priority)
	}
}

func (p *slowGDSF) victims(need int, ok func(block.Handle) bool) []block.Handle {
	return p.choose(need, ok, func(a, b *slowBlock, _ []block.Handle) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), byUse(a, b, nil))
	})
}

// slowSwitch evicts what its best shadow has not.
type slowSwitch struct {
	slowTier
	shadows []*slowShadow
	best    int
	tier    slowSize
	full    bool
}

// slowShadow is a policy with a tier of its own, in which the handle of a block is
// its place in the universe of fingerprints.
type slowShadow struct {
	p     slowPolicy
	all   []uint64 // by handle - 1
	has   map[uint64]bool
	score float64
}

func (s *slowShadow) handle(hash uint64) block.Handle {
	if !slices.Contains(s.all, hash) {
		s.all = append(s.all, hash)
	}
	return block.Handle(slices.Index(s.all, hash) + 1)
}

func (s *slowShadow) trim(n int, path []uint64) {
	ok := func(h block.Handle) bool { return !slices.Contains(path, s.all[h-1]) }
	for _, h := range s.p.victims(len(s.has)-n, ok) {
		s.p.remove(h, block.Evicted)
		delete(s.has, s.all[h-1])
	}
}

func (p *slowSwitch) request(path []uint64) {
	for _, s := range p.shadows {
		prefix, hits := 0, 0
		for i, hash := range path {
			if s.has[hash] {
				hits++
				if prefix == i {
					prefix++
				}
			}
		}
		s.score = 0.999*s.score + float64(prefix)
		if p.full {
			insert := min(len(path)-hits, int(p.tier)-hits)
			s.trim(int(p.tier)-insert, path)
		}
	}
	for i, s := range p.shadows {
		if s.score > 1.01*p.shadows[p.best].score {
			p.best = i
		}
	}
}

func (p *slowSwitch) touch(hash uint64) {
	for _, s := range p.shadows {
		if s.has[hash] {
			s.p.hit(s.handle(hash))
			continue
		}
		if s.has == nil {
			s.has = make(map[uint64]bool)
		}
		s.has[hash] = true
		s.p.insert(s.handle(hash), policy.Block{Hash: hash, Bytes: 1})
	}
}

func (p *slowSwitch) hit(h block.Handle) {
	p.touch(p.find(h).b.Hash)
	p.use(h)
}

func (p *slowSwitch) insert(h block.Handle, b policy.Block) {
	p.touch(b.Hash)
	p.add(h, b, "")
	p.tier.insert(len(p.blocks))
}

func (p *slowSwitch) remove(h block.Handle, why block.Reason) {
	b := p.drop(h)
	if why == block.Evicted {
		return
	}
	for _, s := range p.shadows {
		if s.has[b.b.Hash] {
			s.p.remove(s.handle(b.b.Hash), why)
			delete(s.has, b.b.Hash)
		}
	}
}

func (p *slowSwitch) victims(need int, ok func(block.Handle) bool) []block.Handle {
	p.full = p.full || need > 0
	best := p.shadows[p.best]
	return p.choose(need, ok, func(a, b *slowBlock, _ []block.Handle) int {
		if x, y := best.has[a.b.Hash], best.has[b.b.Hash]; x != y {
			if y {
				return -1
			}
			return 1
		}
		return byUse(a, b, nil)
	})
}
