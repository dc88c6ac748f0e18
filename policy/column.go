package policy

import "github.com/kvtier/kvtier/index/block"

const (
	chunkBits = 12
	chunkLen  = 1 << chunkBits
)

// column holds one value for each handle, in chunks, so that it grows without
// copying and holds little more than what is used.
type column[T any] struct {
	chunks []*[chunkLen]T // nil where no handle was seen yet
}

// at returns the value of a handle that was given to grow before.
func (c *column[T]) at(h block.Handle) *T {
	return &c.chunks[h>>chunkBits][h%chunkLen]
}

// find returns the value of any handle, nil when it never came near to grow.
func (c *column[T]) find(h block.Handle) *T {
	i := int(h >> chunkBits)
	if i >= len(c.chunks) || c.chunks[i] == nil {
		return nil
	}
	return &c.chunks[i][h%chunkLen]
}

// grow returns the value of any handle and makes room for it.
func (c *column[T]) grow(h block.Handle) *T {
	i := int(h >> chunkBits)
	for i >= len(c.chunks) {
		c.chunks = append(c.chunks, nil)
	}
	if c.chunks[i] == nil {
		c.chunks[i] = new([chunkLen]T)
	}
	return &c.chunks[i][h%chunkLen]
}
