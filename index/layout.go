package index

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file maps the memory of the resident table and lays its types over it.
// It is the one place of the package that needs unsafe: the types below hold no
// Go pointers, so the collector need not know of them; regions are zeroed by
// the kernel, which is a valid value of each type; carve aligns to a cache
// line, which is more than any of them asks; and nothing is unmapped before the
// table that holds the pointers has let go of them (Table.Close).

const (
	chunkBits    = 10
	chunkEntries = 1 << chunkBits
	segmentBits  = 12
	segmentSlots = 1 << segmentBits

	regionBytes = 64 << 20
	hugeBytes   = 2 << 20
	lineBytes   = 64
)

// life is the state of an entry's place in a chunk.
type life uint8

const (
	lifeFree     life = iota
	lifeLinked        // found by its key
	lifeUnlinked      // known by its handle only
)

// chunk is a piece of a shard's dense entries: about 121 KiB, so that a shard
// grows in small steps.
type chunk struct {
	life    [chunkEntries]life
	entries [chunkEntries]Entry
}

// segment is a piece of a shard's hash index: an open-addressing table that is
// split in two when it is full. A slot is zero, or eight bits of the hash above
// the index of the entry in the shard plus one.
type segment struct {
	used  uint32
	depth uint32 // how many directory bits its keys have in common
	_     [lineBytes/4 - 2]uint32
	slots [segmentSlots]uint32
}

// memory hands out zeroed pieces of anonymous regions, which ask for huge pages
// and are touched only as far as they are carved. Pieces are not given back.
type memory struct {
	mu struct {
		sync.Mutex
		regions [][]byte // as mapped
		rest    []byte   // of the last region
		carved  int64
	}
}

func (m *memory) chunk() (*chunk, error) {
	b, err := m.carve(int(unsafe.Sizeof(chunk{})))
	if err != nil {
		return nil, err
	}
	return (*chunk)(unsafe.Pointer(unsafe.SliceData(b))), nil
}

func (m *memory) segment() (*segment, error) {
	b, err := m.carve(int(unsafe.Sizeof(segment{})))
	if err != nil {
		return nil, err
	}
	return (*segment)(unsafe.Pointer(unsafe.SliceData(b))), nil
}

func (m *memory) carve(n int) ([]byte, error) {
	n = (n + lineBytes - 1) &^ (lineBytes - 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > len(m.mu.rest) {
		// One huge page more than is used, so that the used part can begin on a
		// huge page wherever the kernel puts the mapping.
		r, err := unix.Mmap(-1, 0, regionBytes+hugeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			return nil, fmt.Errorf("map %d bytes for the resident table: %w", regionBytes, err)
		}
		// Kernels without transparent huge pages refuse the advice; the table is
		// slower then, and right.
		_ = unix.Madvise(r, unix.MADV_HUGEPAGE)
		skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(r))) & (hugeBytes - 1))
		m.mu.regions = append(m.mu.regions, r)
		m.mu.rest = r[skip : skip+regionBytes]
	}
	b := m.mu.rest[:n:n]
	m.mu.rest = m.mu.rest[n:]
	m.mu.carved += int64(n)
	return b, nil
}

func (m *memory) bytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.carved
}

// close unmaps everything; no piece may be in use.
func (m *memory) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var first error
	for _, r := range m.mu.regions {
		if err := unix.Munmap(r); err != nil && first == nil {
			first = fmt.Errorf("unmap the resident table: %w", err)
		}
	}
	m.mu.regions, m.mu.rest, m.mu.carved = nil, nil, 0
	return first
}
