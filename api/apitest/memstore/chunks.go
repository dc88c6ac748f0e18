package memstore

import (
	"fmt"

	"github.com/kvtier/kvtier/index/block"
)

// Partitioned is false: the memory is one file.
func (s *Store) Partitioned() bool { return false }

// OpenChunk fails.
func (s *Store) OpenChunk(number uint32, _ bool) (block.MemoryFile, error) {
	return block.MemoryFile{}, fmt.Errorf("open chunk %d: %w", number, block.ErrNotFound)
}

// ChunkGone is true: there are none.
func (s *Store) ChunkGone(uint32) bool { return true }
