package policy

import "github.com/kvtier/kvtier/index/block"

// prints is a map of fingerprints that gives each a dense handle: a hash table
// with chains that grows a bucket at a time, so that no call takes long (linear hashing,
// Litwin 1980). It has 12 bytes an entry beside the value, and 3.2 for its buckets.
type prints[T any] struct {
	entries column[print[T]]
	heads   column[block.Handle] // first entry of each bucket
	buckets uint32               // 0 before the first entry, then more than mask
	mask    uint32               // as many low bits as all buckets were split by
	last    block.Handle         // latest handle that was made
	unused  block.Handle         // first of those given back, linked by chain
	count   int
}

// print is an entry. What belongs together is in one place, since most of the cost
// is memory that is not in the cache.
type print[T any] struct {
	high, low uint32 // the fingerprint, in two words to have no padding
	chain     block.Handle
	value     T
}

// minBuckets is the least number of buckets, a power of two.
const minBuckets = 64

// bucket is the number of a fingerprint's bucket.
func (s *prints[T]) bucket(hash uint64) block.Handle {
	// Fingerprints may differ in few bits only, so they are mixed.
	hash = (hash ^ hash>>32) * 0x9e3779b97f4a7c15
	i := uint32(hash>>32^hash>>48) & (2*s.mask + 1)
	if i >= s.buckets {
		i &= s.mask
	}
	return block.Handle(i)
}

// find returns the handle of a fingerprint, 0 when it is not there.
func (s *prints[T]) find(hash uint64) block.Handle {
	if s.count == 0 {
		return 0
	}
	high, low := uint32(hash>>32), uint32(hash)
	for h := *s.heads.at(s.bucket(hash)); h != 0; {
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
	switch {
	case s.buckets == 0:
		s.heads.grow(0)
		s.buckets, s.mask = minBuckets, minBuckets-1
	case 4*s.count >= 5*int(s.buckets):
		s.split()
	}
	h := s.unused
	if h != 0 {
		s.unused = s.entries.at(h).chain
	} else {
		s.last++
		h = s.last
	}
	s.count++
	b := s.heads.at(s.bucket(hash))
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
	at := s.heads.at(s.bucket(s.hash(h)))
	for *at != h {
		at = &s.entries.at(*at).chain
	}
	*at = e.chain
	e.chain, s.unused = s.unused, h
	s.count--
}

// sift removes all fingerprints but those to keep.
func (s *prints[T]) sift(keep func(hash uint64) bool) {
	for i := range s.buckets {
		for h := *s.heads.at(block.Handle(i)); h != 0; {
			next := s.entries.at(h).chain
			if !keep(s.hash(h)) {
				s.remove(h)
			}
			h = next
		}
	}
}

// split adds a bucket, which takes its entries from the one whose number differs in the
// highest bit.
func (s *prints[T]) split() {
	if s.buckets > 2*s.mask+1 {
		s.mask = 2*s.mask + 1
	}
	more := block.Handle(s.buckets)
	s.buckets++
	to := s.heads.grow(more)
	from := s.heads.at(more & block.Handle(s.mask))
	for *from != 0 {
		h := *from
		e := s.entries.at(h)
		if s.bucket(s.hash(h)) != more {
			from = &e.chain
			continue
		}
		*from, e.chain, *to = e.chain, *to, h
	}
}
