package e2e

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// fate is what a client knows of a block from the answers that it got.
type fate uint8

const (
	gone    fate = iota // never put, or answered as deleted: it may not be there
	unsure              // put or deleted without an answer, or refused: it may be there or not
	inDRAM              // answered as stored: there until a crash
	durable             // answered as durable: there
)

// known is one block of a history. Every put of a block that is gone has other
// bytes, so that a deleted block that comes back is told from its successor.
type known struct {
	busy    bool // a client works on it
	version int  // of the bytes that were put last
	fate    fate
}

// history is the journal of a crash test: what its clients know of a fixed
// number of blocks. It is written after each answer. One client works on a block
// at a time, so there is no doubt about the order of what happened to it.
type history struct {
	// evicts: the tiers are too small. A block that was answered may be missing
	// then, and one that was missed may be back after a crash.
	evicts bool

	mu struct {
		sync.Mutex
		blocks []known
		counts
	}
}

// counts are what a history has seen.
type counts struct {
	durable, stored, deleted, refused, abandoned, conflicts, read, missed, leased, prefetched int
}

func newHistory(blocks int, evicts bool) *history {
	h := &history{evicts: evicts}
	h.mu.blocks = make([]known, blocks)
	return h
}

// bytesOf are the bytes of block i in a version: of lengths in several slot
// classes, on both sides of where headers change.
func bytesOf(i, version int) []byte {
	sizes := [...]int{1, 511, 4096, 16 << 10, 64<<10 - 1, 64 << 10, largestBlock, 5000}
	return payload(i+version<<32, sizes[(i+version)%len(sizes)])
}

// largestBlock is more than goes in one frame, so that a put can be abandoned in
// the middle of it.
const largestBlock = 300 << 10

// take takes up to n blocks that nobody works on and that ok agrees to, at
// random.
func (h *history) take(r *rand.Rand, n int, ok func(i int, b known) bool) []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	var got []int
	for range 20 * n {
		i := r.IntN(len(h.mu.blocks))
		if b := &h.mu.blocks[i]; !b.busy && ok(i, *b) {
			b.busy = true
			if got = append(got, i); len(got) == n {
				break
			}
		}
	}
	return got
}

// give gives blocks back.
func (h *history) give(blocks []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range blocks {
		h.mu.blocks[i].busy = false
	}
}

// note changes what is known of a block.
func (h *history) note(i int, f fate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.blocks[i].fate = f
}

// renew draws the version for a put of block i, which stays what it is as long
// as that may be there.
func (h *history) renew(i int) (b known) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := &h.mu.blocks[i]; p.fate == gone {
		p.version++
	}
	return h.mu.blocks[i]
}

// put notes how the put of a block ended that was was before.
func (h *history) put(i int, was fate, tier block.TierID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.mu.blocks[i]
	if tier == block.G3 || was == durable {
		b.fate = durable
		h.mu.durable++
		return
	}
	b.fate = inDRAM
	h.mu.stored++
}

// count counts.
func (h *history) count(add func(c *counts)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	add(&h.mu.counts)
}

// look is what is known of a block now.
func (h *history) look(i int) known {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.blocks[i]
}

// saw compares what a daemon answered for a block with what is known of it.
func (h *history) saw(i int, p block.Payload) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.mu.blocks[i]
	what := fmt.Sprintf("block %d version %d", i, b.version)
	switch p.Reason {
	case block.Hit:
		h.mu.read++
		if !bytes.Equal(p.Bytes, bytesOf(i, b.version)) {
			if b.version > 0 && bytes.Equal(p.Bytes, bytesOf(i, b.version-1)) {
				return fmt.Errorf("%s: the bytes of the version before, which was deleted", what)
			}
			return fmt.Errorf("%s: %d wrong bytes from %v", what, len(p.Bytes), p.Tier)
		}
		if b.fate == gone {
			return fmt.Errorf("%s is there in %v, and was answered as deleted or never put", what, p.Tier)
		}
	case block.MissAbsent:
		h.mu.missed++
		switch {
		case b.fate < inDRAM:
		case h.evicts:
			b.fate = unsure
		default:
			return fmt.Errorf("%s was answered as stored and is a miss", what)
		}
	default:
		// Nothing is damaged and nobody else works on the block.
		return fmt.Errorf("%s: miss: %v", what, p.Reason)
	}
	return nil
}

// crashed notes that what was only in DRAM may be lost.
func (h *history) crashed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.mu.blocks {
		if b := &h.mu.blocks[i]; b.fate == inDRAM {
			b.fate = unsure
		}
	}
}

// settle makes what was found at a start the truth: there is nothing but what is
// committed.
func (h *history) settle(i int, there bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := &h.mu.blocks[i]
	switch {
	case there:
		b.fate = durable
	case h.evicts && b.fate == unsure:
		// A drop for want of room may have come too late for the catalog.
	default:
		b.fate = gone
	}
}

// totals are the counts so far, and how many blocks are answered as stored.
func (h *history) totals() (c counts, there int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.mu.blocks {
		if b.fate >= inDRAM {
			there++
		}
	}
	return h.mu.counts, there
}

// all are the numbers of all blocks, in pieces of n.
func (h *history) all(n int) func(func([]int) bool) {
	return slices.Chunk(numbers(0, len(h.mu.blocks)), n)
}
