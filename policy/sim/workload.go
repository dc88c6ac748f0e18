package sim

import (
	"fmt"
	"math"

	"github.com/kvtier/kvtier/index/block"
)

// Workload is the block paths of a trace's requests, held in four bytes a
// reference.
type Workload struct {
	refs   []uint32          // all paths behind each other, blocks numbered by first appearance
	ends   []int             // by request, where its path ends in refs
	prints []uint64          // by block, its fingerprint
	tails  []bool            // by block: it is the last of a prompt, and not full
	blocks map[uint64]uint32 // by hash id
}

// NewWorkload returns a workload without requests.
func NewWorkload() *Workload { return &Workload{blocks: make(map[uint64]uint32)} }

// Add appends one request: the hash ids of its blocks, root first, and whether the
// last one is not full. It fails with block.ErrInvalid when there are more different
// blocks than handles.
func (w *Workload) Add(path []uint64, partial bool) error {
	for i, id := range path {
		b, known := w.blocks[id]
		if !known {
			if len(w.prints) >= math.MaxUint32 {
				return fmt.Errorf("%w: more than %d unique blocks", block.ErrInvalid, uint32(math.MaxUint32))
			}
			b = uint32(len(w.prints))
			w.blocks[id] = b
			w.prints = append(w.prints, fingerprint(id))
			w.tails = append(w.tails, partial && i == len(path)-1)
		}
		w.refs = append(w.refs, b)
	}
	w.ends = append(w.ends, len(w.refs))
	return nil
}

// Requests is the number of requests.
func (w *Workload) Requests() int { return len(w.ends) }

// Unique is the number of different blocks in all requests.
func (w *Workload) Unique() int { return len(w.prints) }

// path returns the blocks of one request.
func (w *Workload) path(i int) []uint32 {
	begin := 0
	if i > 0 {
		begin = w.ends[i-1]
	}
	return w.refs[begin:w.ends[i]]
}

// fingerprint spreads hash ids, which traces number densely, over 64 bits as
// real hashes are: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), which
// gives different values to different ids.
func fingerprint(id uint64) uint64 {
	id += 0x9e3779b97f4a7c15
	id = (id ^ id>>30) * 0xbf58476d1ce4e5b9
	id = (id ^ id>>27) * 0x94d049bb133111eb
	return id ^ id>>31
}
