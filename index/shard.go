package index

import (
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/index/block"
)

// A hash is used as follows: bits 0 to 11 say where in a segment the probing
// begins, the bits from 12 on choose the segment, bits 48 to 55 are the tag kept
// in the slot, and the top five bits choose the shard.
const (
	shardBits  = 5
	shardCount = 1 << shardBits

	tagMask  = 0xff << 24
	maxShard = 1<<24 - 1 // entries of a shard: what is left of a slot beside the tag
	maxDepth = 24        // directory bits; beyond it they would meet the tag

	// A segment is split when four fifths of it are used: half a cache line is
	// then read for a hit, and one for a miss.
	maxUsed = segmentSlots * 4 / 5
)

func shardOf(hash uint64) uint32 { return uint32(hash >> (64 - shardBits)) }
func homeOf(hash uint64) uint32  { return uint32(hash) % segmentSlots }
func tagOf(hash uint64) uint32   { return uint32(hash>>48) << 24 }

// shard is a part of the table with a lock of its own: dense entries in chunks,
// and a hash index by extendible hashing, which grows by splitting one segment
// at a time, so that no writer waits for the whole index to be rebuilt.
type shard struct {
	mu struct {
		sync.RWMutex
		dir    []*segment // by the directory bits of a hash; nil when closed
		chunks []*chunk
		taken  uint32 // entries that have been in use: indexes below it
		free   uint32 // 1 + index of the first free entry, which leads to the next; 0: none
	}
	linked atomic.Int64
	_      [2 * lineBytes]byte // keep the locks of neighbours apart
}

func (s *shard) entry(i uint32) *Entry {
	return &s.mu.chunks[i>>chunkBits].entries[i%chunkEntries]
}

func (s *shard) life(i uint32) life {
	if i >= s.mu.taken {
		return lifeFree
	}
	return s.mu.chunks[i>>chunkBits].life[i%chunkEntries]
}

func (s *shard) setLife(i uint32, l life) {
	s.mu.chunks[i>>chunkBits].life[i%chunkEntries] = l
}

// segment is where the keys of a hash are; nil when the table is closed.
func (s *shard) segment(hash uint64) *segment {
	if len(s.mu.dir) == 0 {
		return nil
	}
	return s.mu.dir[uint32(hash>>segmentBits)&uint32(len(s.mu.dir)-1)]
}

func (s *shard) find(hash uint64, k block.Key) (uint32, bool) {
	g := s.segment(hash)
	if g == nil {
		return 0, false
	}
	tag := tagOf(hash)
	for p := homeOf(hash); ; p = (p + 1) % segmentSlots {
		v := g.slots[p]
		if v == 0 {
			return 0, false
		}
		if v&tagMask == tag {
			if e := s.entry(v&^tagMask - 1); e.Hash == k.Hash && e.NS == k.NS {
				return v&^tagMask - 1, true
			}
		}
	}
}

// room sees to it that the segment of a hash can take one more.
func (s *shard) room(t *Table, hash uint64) bool {
	for {
		g := s.segment(hash)
		if g == nil {
			return false
		}
		if g.used < maxUsed {
			return true
		}
		if !s.split(t, g, hash) {
			return false
		}
	}
}

// split moves the keys of a full segment whose next directory bit is set into a
// new one. hash is one of its keys.
func (s *shard) split(t *Table, g *segment, hash uint64) bool {
	if g.depth == maxDepth {
		return false
	}
	other, err := t.mem.segment()
	if err != nil {
		return false
	}
	bit := uint32(1) << g.depth
	if uint32(len(s.mu.dir)) == bit {
		s.mu.dir = append(s.mu.dir, s.mu.dir...)
	}
	g.depth++
	other.depth = g.depth
	for d := uint32(hash>>segmentBits)&(bit-1) | bit; d < uint32(len(s.mu.dir)); d += 2 * bit {
		s.mu.dir[d] = other
	}
	old := g.slots
	g.slots, g.used = [segmentSlots]uint32{}, 0
	for _, v := range old {
		if v != 0 {
			i := v&^tagMask - 1
			s.insert(t.hashOf(s.entry(i)), i)
		}
	}
	return true
}

// insert writes a slot for an entry into its segment, which has room.
func (s *shard) insert(hash uint64, i uint32) {
	g := s.segment(hash)
	p := homeOf(hash)
	for g.slots[p] != 0 {
		p = (p + 1) % segmentSlots
	}
	g.slots[p] = tagOf(hash) | (i + 1)
	g.used++
}

// unlink takes a linked entry out of the hash index. The slots behind it move
// up, so that no tombstone remains to be probed.
func (s *shard) unlink(t *Table, i uint32) bool {
	if s.life(i) != lifeLinked {
		return false
	}
	hash := t.hashOf(s.entry(i))
	g := s.segment(hash)
	hole := homeOf(hash)
	for g.slots[hole] != tagOf(hash)|(i+1) {
		hole = (hole + 1) % segmentSlots
	}
	for p := (hole + 1) % segmentSlots; g.slots[p] != 0; p = (p + 1) % segmentSlots {
		home := homeOf(t.hashOf(s.entry(g.slots[p]&^tagMask - 1)))
		if (p-home)%segmentSlots >= (p-hole)%segmentSlots {
			g.slots[hole] = g.slots[p]
			hole = p
		}
	}
	g.slots[hole] = 0
	g.used--
	s.setLife(i, lifeUnlinked)
	s.linked.Add(-1)
	return true
}

// take finds a free entry, zeroed, and makes it one that is not linked.
func (s *shard) take(t *Table, i *uint32) bool {
	if s.mu.free != 0 {
		*i = s.mu.free - 1
		e := s.entry(*i)
		s.mu.free = binary.LittleEndian.Uint32(e.Hash[:])
		wantPoisoned(e)
		*e = Entry{}
	} else {
		if s.mu.taken == maxShard {
			return false
		}
		if s.mu.taken%chunkEntries == 0 {
			c, err := t.mem.chunk()
			if err != nil {
				return false
			}
			s.mu.chunks = append(s.mu.chunks, c)
		}
		*i = s.mu.taken
		s.mu.taken++
	}
	s.setLife(*i, lifeUnlinked)
	return true
}

func (s *shard) give(i uint32) {
	poison(s.entry(i))
	binary.LittleEndian.PutUint32(s.entry(i).Hash[:], s.mu.free)
	s.mu.free = i + 1
	s.setLife(i, lifeFree)
}
