package sim

import (
	"cmp"
	"container/heap"
	"math"
)

// belady replays the workload with the knowledge of all its future, and returns
// prefix and plain hits. Of resident and requested blocks it keeps those whose
// next request is nearest, and of several with the same the shallower ones: in
// a tree of prefixes that is optimal for both counts at once, since a parent's
// next use is never later than its child's.
func belady(w *Workload, capacity int) (prefixHits, hits int64) {
	const never = math.MaxInt
	next := make([]int, w.Unique()) // by block: the request that uses it next
	after := make([][]int, w.Requests())
	for i := range next {
		next[i] = never
	}
	for i := w.Requests() - 1; i >= 0; i-- {
		for _, id := range w.path(i) {
			after[i] = append(after[i], next[id])
		}
		for _, id := range w.path(i) {
			next[id] = i
		}
	}
	resident := make(map[uint32]bool)
	var q farthest // resident blocks, and entries that are no longer true
	for i := range w.Requests() {
		unbroken := true
		for depth, id := range w.path(i) {
			unbroken = unbroken && resident[id]
			if resident[id] {
				hits++
			}
			if unbroken {
				prefixHits++
			}
			next[id] = after[i][depth]
			heap.Push(&q, use{id: id, next: next[id], depth: depth})
		}
		for _, id := range w.path(i) {
			resident[id] = true
		}
		for len(resident) > capacity {
			if u := heap.Pop(&q).(use); next[u.id] == u.next {
				delete(resident, u.id)
			}
		}
	}
	return prefixHits, hits
}

type use struct {
	id          uint32
	next, depth int
}

// farthest is a heap with the block on top that is used last.
type farthest []use

func (q farthest) Len() int { return len(q) }

func (q farthest) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].next, q[j].next), cmp.Compare(q[i].depth, q[j].depth)) > 0
}

func (q farthest) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q *farthest) Push(x any) { *q = append(*q, x.(use)) }

func (q *farthest) Pop() any {
	u := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return u
}
