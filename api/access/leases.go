package access

import (
	"container/heap"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Leases are the leases that count against one limit, until they are released or run
// out. Who wants one takes room for it first, and then either adds the lease or cancels.
// A nil one counts nothing, and always has room.
type Leases struct {
	most int // 0: no limit
	mu   struct {
		sync.Mutex
		byID    map[uint64]*lease
		due     leaseHeap
		taken   int // room for leases that are not there yet
		blocks  int // in all of them
		refused int64
	}
}

// lease is what is known of one.
type lease struct {
	id      uint64
	session uint64 // whose end is its end; 0: none
	until   time.Time
	blocks  int
	at      int // place in the heap
}

// NewLeases makes an empty set for so many leases; 0: any number.
func NewLeases(most int) *Leases {
	l := &Leases{most: most}
	l.mu.byID = make(map[uint64]*lease)
	return l
}

// Most is how many there may be, 0 for any number.
func (l *Leases) Most() int {
	if l == nil {
		return 0
	}
	return l.most
}

// Take takes room for a lease, or counts a refusal. What has run out gives its room back.
func (l *Leases) Take() bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.most > 0 && len(l.mu.byID)+l.mu.taken >= l.most {
		l.forget()
		if len(l.mu.byID)+l.mu.taken >= l.most {
			l.mu.refused++
			return false
		}
	}
	l.mu.taken++
	return true
}

// Cancel gives room back for which there is no lease.
func (l *Leases) Cancel() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.taken--
}

// Add puts a lease of a session, 0 for none, in the room taken for it; the zero lease is
// none, and cancels.
func (l *Leases) Add(b block.Lease, session uint64) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.taken--
	if b.ID == 0 {
		return
	}
	e := &lease{id: b.ID, session: session, until: time.Now().Add(b.Left), blocks: b.Count}
	l.drop(l.mu.byID[b.ID])
	l.mu.byID[b.ID] = e
	l.mu.blocks += e.blocks
	heap.Push(&l.mu.due, e)
	if l.most == 0 {
		l.forget() // there is no limit at which it would be done
	}
}

// Has reports whether a lease is counted. One that has run out may be.
func (l *Leases) Has(id uint64) bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.byID[id] != nil
}

// Renew lets a lease count for as long as it runs now. It does nothing when it is not
// counted.
func (l *Leases) Renew(b block.Lease) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.mu.byID[b.ID]; e != nil {
		e.until = time.Now().Add(b.Left)
		heap.Fix(&l.mu.due, e.at)
	}
}

// Drop forgets a lease.
func (l *Leases) Drop(id uint64) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(l.mu.byID[id])
}

// EndSession forgets all leases of a session.
func (l *Leases) EndSession(session uint64) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.mu.byID {
		if e.session == session {
			l.drop(e)
		}
	}
}

// Now counts the leases that have not run out, the blocks in them, and how often there
// was no room for one.
func (l *Leases) Now() (n, blocks int, refused int64) {
	if l == nil {
		return 0, 0, 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
	return len(l.mu.byID), l.mu.blocks, l.mu.refused
}

// forget drops what has run out. It needs the lock, as drop does.
func (l *Leases) forget() {
	now := time.Now()
	for len(l.mu.due) > 0 && now.After(l.mu.due[0].until) {
		l.drop(l.mu.due[0])
	}
}

func (l *Leases) drop(e *lease) {
	if e != nil {
		heap.Remove(&l.mu.due, e.at)
		delete(l.mu.byID, e.id)
		l.mu.blocks -= e.blocks
	}
}

// leaseHeap has the lease that runs out first in front.
type leaseHeap []*lease

func (h leaseHeap) Len() int           { return len(h) }
func (h leaseHeap) Less(i, j int) bool { return h[i].until.Before(h[j].until) }
func (h leaseHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push implements heap.Interface.
func (h *leaseHeap) Push(x any) {
	e := x.(*lease)
	e.at = len(*h)
	*h = append(*h, e)
}

// Pop implements heap.Interface.
func (h *leaseHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return e
}
