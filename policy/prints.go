package policy

import (
	"math/bits"

	"github.com/kvtier/kvtier/index/block"
)

// prints is a map of fingerprints that gives each a dense handle: a hash table
// with chains. It has 12 bytes an entry beside the value, and 2.9 to 3.6 for its
// buckets, which grow in small steps so that chains are short all the time.
type prints[T any] struct {
	entries column[print[T]]
	heads   []block.Handle // first entry of each bucket
	last    block.Handle   // latest handle that was made
	unused  block.Handle   // first of those given back, linked by chain
	count   int
}

// print is an entry. What belongs together is in one place, since most of the cost
// is memory that is not in the cache.
type print[T any] struct {
	high, low uint32 // the fingerprint, in two words to have no padding
	chain     block.Handle
	value     T
}

// minHeads is the least number of buckets.
const minHeads = 64

func (s *prints[T]) bucket(hash uint64) *block.Handle {
	// Fingerprints may be numbered densely, so their bits are mixed.
	i, _ := bits.Mul64(hash*0x9e3779b97f4a7c15, uint64(len(s.heads)))
	return &s.heads[i]
}

// find returns the handle of a fingerprint, 0 when it is not there.
func (s *prints[T]) find(hash uint64) block.Handle {
	if s.count == 0 {
		return 0
	}
	high, low := uint32(hash>>32), uint32(hash)
	for h := *s.bucket(hash); h != 0; {
		e := s.entries.at(h)
		if e.low == low && e.high == high {
			return h
		}
		h = e.chain
	}
	return 0
}

// at is the value of a handle.
func (s *prints[T]) at(h block.Handle) *T { return &s.entries.at(h).value }

// add gives a fingerprint a handle, and a value that is zero. One that is there
// already gets another.
func (s *prints[T]) add(hash uint64) block.Handle {
	if 10*s.count >= 14*len(s.heads) {
		s.spread(max(minHeads, len(s.heads)*5/4))
	}
	h := s.unused
	if h != 0 {
		s.unused = s.entries.at(h).chain
	} else {
		s.last++
		h = s.last
	}
	s.count++
	b := s.bucket(hash)
	*s.entries.grow(h) = print[T]{high: uint32(hash >> 32), low: uint32(hash), chain: *b}
	*b = h
	return h
}

// hash is the fingerprint of a handle.
func (s *prints[T]) hash(h block.Handle) uint64 {
	e := s.entries.at(h)
	return uint64(e.high)<<32 | uint64(e.low)
}

// remove takes the handle back.
func (s *prints[T]) remove(h block.Handle) {
	e := s.entries.at(h)
	at := s.bucket(s.hash(h))
	for *at != h {
		at = &s.entries.at(*at).chain
	}
	*at = e.chain
	e.chain, s.unused = s.unused, h
	s.count--
}

// spread distributes all entries over n buckets.
func (s *prints[T]) spread(n int) {
	old := s.heads
	s.heads = make([]block.Handle, n)
	for _, h := range old {
		for h != 0 {
			e := s.entries.at(h)
			b := s.bucket(s.hash(h))
			next := e.chain
			e.chain, *b = *b, h
			h = next
		}
	}
}
