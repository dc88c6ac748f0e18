package sim

import (
	"container/heap"
	"context"
	"fmt"
	"math"
	"time"
)

// Belady replays the workload with the knowledge of all its future: without
// watermarks no policy has more hits, prefix or plain, at the same capacity
// (Belady 1966). Of resident and
// requested blocks it keeps those whose next request is nearest, and of several
// with the same the shallower ones: in a tree of prefixes that is optimal for both
// counts at once, since a parent's next use is never later than its child's. It
// fails with block.ErrInvalid on options that cannot be, and when ctx ends.
func Belady(ctx context.Context, w *Workload, o Options) (Result, error) {
	capacity, err := o.capacity(w)
	if err != nil {
		return Result{}, err
	}
	high, low := o.marks(capacity)
	begin := time.Now()
	b := newBelady(w)
	for i := range w.Requests() {
		if i%64 == 0 && ctx.Err() != nil {
			return Result{}, fmt.Errorf("simulate: request %d: %w", i+1, ctx.Err())
		}
		b.request(i)
		b.evict(capacity)
		if high > 0 && b.resident > high {
			b.evict(low)
		}
	}
	return w.result(capacity, b.prefixHits, b.hits, b.evictions, time.Since(begin)), nil
}

// belady is a replay under way.
type belady struct {
	w        *Workload
	after    []int32 // by reference: the request that uses the block next
	next     []int32 // by block: the same, as of now
	present  []bool  // by block
	resident int64
	queue    farthest // resident blocks, and entries that are no longer true

	prefixHits, hits, evictions int64
}

func newBelady(w *Workload) *belady {
	b := &belady{w: w, after: make([]int32, len(w.refs)), next: make([]int32, w.Unique()), present: make([]bool, w.Unique())}
	for i := range b.next {
		b.next[i] = math.MaxInt32
	}
	for i := w.Requests() - 1; i >= 0; i-- {
		path := w.path(i)
		first := w.ends[i] - len(path)
		for j, id := range path {
			b.after[first+j] = b.next[id]
		}
		for _, id := range path {
			b.next[id] = int32(i)
		}
	}
	return b
}

// request counts the hits of request i and makes all its blocks resident.
func (b *belady) request(i int) {
	path := b.w.path(i)
	first := b.w.ends[i] - len(path)
	unbroken := true
	for depth, id := range path {
		unbroken = unbroken && b.present[id]
		if b.present[id] {
			b.hits++
		}
		if unbroken {
			b.prefixHits++
		}
		b.next[id] = b.after[first+depth]
		heap.Push(&b.queue, use{block: id, next: b.next[id], depth: int32(depth)})
	}
	for _, id := range path {
		if !b.present[id] {
			b.present[id] = true
			b.resident++
		}
	}
}

func (b *belady) evict(capacity int64) {
	for b.resident > capacity {
		if u := heap.Pop(&b.queue).(use); b.present[u.block] && b.next[u.block] == u.next {
			b.present[u.block] = false
			b.resident--
			b.evictions++
		}
	}
}

// use is a block with its next request.
type use struct {
	block       uint32
	next, depth int32
}

// farthest is a heap with the block on top that is used last, of those the deepest.
type farthest []use

func (q farthest) Len() int { return len(q) }

func (q farthest) Less(i, j int) bool {
	if q[i].next != q[j].next {
		return q[i].next > q[j].next
	}
	return q[i].depth > q[j].depth
}

func (q farthest) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q *farthest) Push(x any) { *q = append(*q, x.(use)) }

func (q *farthest) Pop() any {
	u := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return u
}
