// Package blocksum computes the checksum of a block, xxh3-128, while its bytes
// arrive: in steps, each while it is in the cache, and without a copy.
package blocksum

import (
	"unsafe"

	"github.com/zeebo/xxh3"
)

// Sum is the checksum of bytes that lie behind each other in memory. The zero value
// is that of none.
type Sum struct{ h xxh3.Hasher }

// layout is the start of a Hasher of the pinned version. After its first Write a
// Hasher copies all further bytes into its buffer before it takes them in, which
// halves its speed. It does so because it cannot know that the bytes before them are
// still there; here they are. So what is in the buffer is forgotten, by its length,
// and given again in place. A test compares with what xxh3 computes at once.
type layout struct {
	acc [8]uint64
	blk uint64 // blocks taken in
	len uint64 // bytes in the buffer
	key unsafe.Pointer
	buf [blockBytes + stripeBytes]byte
	_   uint64
}

// Of the xxh3 specification, for the secret that it has by default.
const (
	stripeBytes = 64
	blockBytes  = 1024
)

// The sizes differ when the layout does, and this does not compile.
var _ = [1]struct{}{}[unsafe.Sizeof(layout{})-unsafe.Sizeof(xxh3.Hasher{})]

// Add takes in what has been appended to all since the last call. all begins with the
// first byte of the block, and what was in it is still the same.
func (s *Sum) Add(all []byte) {
	l := (*layout)(unsafe.Pointer(&s.h))
	l.len = 0
	_, _ = s.h.Write(all[l.blk*blockBytes:]) // it never fails
}

// Sum is the checksum of what was added.
func (s *Sum) Sum() [16]byte { return s.h.Sum128().Bytes() }

// Reset begins anew.
func (s *Sum) Reset() { s.h.Reset() }
