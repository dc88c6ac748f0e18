package session

import (
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/blocksum"
)

var sums = sync.Pool{New: func() any { return new(blocksum.Sum) }}

// summer computes a checksum in steps; the zero value has none.
type summer struct{ steps *blocksum.Sum }

// add takes in what has been appended to all since the last call.
func (s *summer) add(all []byte) {
	if s.steps == nil {
		s.steps = sums.Get().(*blocksum.Sum)
		s.steps.Reset()
	}
	s.steps.Add(all)
}

// sum is the checksum of all steps; the next one begins anew.
func (s *summer) sum() block.Sum {
	if s.steps == nil {
		return sumOf(nil)
	}
	sum := block.Sum(s.steps.Sum())
	s.drop()
	return sum
}

// drop forgets the steps.
func (s *summer) drop() {
	if s.steps != nil {
		sums.Put(s.steps)
		s.steps = nil
	}
}

func sumOf(p []byte) block.Sum { return xxh3.Hash128(p).Bytes() }

// copySum copies src to dst, which is at least as long, and computes the checksum of
// the copy on the way.
func copySum(dst, src []byte) block.Sum {
	if len(src) <= step {
		copy(dst, src)
		return sumOf(dst[:len(src)])
	}
	var s summer
	for at := 0; at < len(src); {
		at += copy(dst[at:min(at+step, len(src))], src[at:])
		s.add(dst[:at])
	}
	return s.sum()
}
