package policy

import "github.com/kvtier/kvtier/index/block"

// shadow is a policy that runs over metadata alone: it has a tier of its own, as
// large as the real one, and shows what would be resident if it chose the
// victims. Blocks are known in it by handles of its own. Since a request's blocks
// are told leaf to root, it needs no parents: suffixes leave before their
// prefixes by themselves.
type shadow struct {
	p       Policy
	prints  prints[shadowed]
	stamp   uint32 // of the request under way
	score   float64
	ok      func(block.Handle) bool // not of the request under way
	victims []block.Handle
}

// shadowed is what a shadow knows of a block.
type shadowed struct {
	real block.Handle // its handle in the real tier, 0 when it is not there
	seen uint32       // stamp of the last request that had it
}

func newShadow(p Policy) *shadow {
	s := &shadow{p: p, stamp: 1} // no block has been seen in it
	s.ok = func(h block.Handle) bool { return s.prints.at(h).seen != s.stamp }
	return s
}

// request counts what the shadow has of a path: the length of the unbroken prefix,
// all hits, and misses.
func (s *shadow) request(path []uint64) (prefix, hits, misses int) {
	if s.stamp++; s.stamp == 0 {
		s.stamp = 1
	}
	for i, hash := range path {
		h := s.prints.find(hash)
		if h == 0 {
			misses++
			continue
		}
		s.prints.at(h).seen = s.stamp
		if hits++; prefix == i {
			prefix++
		}
	}
	return prefix, hits, misses
}

// touch uses a block, which comes in if it is not there, and returns its handle.
func (s *shadow) touch(hash uint64) block.Handle {
	h := s.prints.find(hash)
	if h != 0 {
		s.p.Hit(h)
		return h
	}
	h = s.prints.add(hash)
	s.p.Insert(h, Block{Hash: hash, Bytes: 1})
	return h
}

// forget takes a block out, whoever chose it.
func (s *shadow) forget(h block.Handle, why block.Reason) {
	s.p.Remove(h, why)
	s.prints.remove(h)
}

// excess returns victims that must leave until at most n blocks are left, none of
// them of the request under way. It is a few of them; none when all is done.
func (s *shadow) excess(n int) []block.Handle {
	over := s.p.Len() - n
	if over <= 0 {
		return nil
	}
	s.victims = s.p.Victims(s.victims[:0], int64(min(over, shadowBatch)), s.ok)
	return s.victims
}

// shadowBatch is how many victims a shadow chooses at a time.
const shadowBatch = 64
