package tiers

import (
	"container/heap"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// Leases says who may go on reading which blocks, and until when. A lease has a
// random number, so that nobody ends another's by guessing, belongs to a
// session, and lasts until it is released, its session ends or its time is
// over; time is monotonic.
//
// It only keeps the books: the caller takes and drops the references that
// handles stand for, and calls Expire when Next says so. It is safe for
// concurrent use and starts no goroutine.
type Leases struct {
	maxLeases  int
	maxHandles int
	earlier    chan struct{}
	mu         struct {
		sync.Mutex
		byID      map[uint64]*leaseRecord
		bySession map[uint64]map[uint64]*leaseRecord
		due       leaseHeap
		awaited   time.Time // what Next answered last; zero: none
		stats     LeaseStats
	}
}

// LeaseStats counts leases. Leases and Handles are how many there are now; each
// of the others is a total since the start.
type LeaseStats struct {
	Leases   int
	Handles  int
	Granted  uint64
	Refused  uint64 // for lack of room
	Renewed  uint64
	Released uint64 // by their holders
	Ended    uint64 // with their session
	Expired  uint64
}

type leaseRecord struct {
	id      uint64
	session uint64
	handles []block.Handle
	expires time.Time
	at      int // place in the heap
}

// NewLeases makes a table for at most maxLeases leases that hold at most
// maxHandles blocks altogether, a block counted once for each lease on it.
func NewLeases(maxLeases, maxHandles int) *Leases {
	l := &Leases{maxLeases: maxLeases, maxHandles: maxHandles, earlier: make(chan struct{}, 1)}
	l.mu.byID = make(map[uint64]*leaseRecord)
	l.mu.bySession = make(map[uint64]map[uint64]*leaseRecord)
	return l
}

// Grant leases blocks to a session for d; session 0 is none, and such a lease
// ends by time or release only. It copies handles. It fails with
// block.ErrInvalid without a handle or a positive d, and with block.ErrNoSpace
// when the table is full; the handles are then the caller's still.
func (l *Leases) Grant(session uint64, handles []block.Handle, d time.Duration) (block.Lease, error) {
	if len(handles) == 0 {
		return block.Lease{}, fmt.Errorf("%w: lease of no blocks", block.ErrInvalid)
	}
	if d <= 0 {
		return block.Lease{}, fmt.Errorf("%w: lease for %v", block.ErrInvalid, d)
	}
	r := &leaseRecord{session: session, handles: append([]block.Handle(nil), handles...)}
	l.mu.Lock()
	defer l.mu.Unlock()
	st := &l.mu.stats
	switch {
	case st.Leases >= l.maxLeases:
		st.Refused++
		return block.Lease{}, fmt.Errorf("grant lease: %w: there are %d leases", block.ErrNoSpace, st.Leases)
	case len(handles) > l.maxHandles-st.Handles:
		st.Refused++
		return block.Lease{}, fmt.Errorf("grant lease of %d blocks: %w: leases hold %d of at most %d", len(handles), block.ErrNoSpace, st.Handles, l.maxHandles)
	}
	for r.id == 0 || l.mu.byID[r.id] != nil {
		r.id = randomID()
	}
	r.expires = time.Now().Add(d)
	l.mu.byID[r.id] = r
	if session != 0 {
		if l.mu.bySession[session] == nil {
			l.mu.bySession[session] = make(map[uint64]*leaseRecord)
		}
		l.mu.bySession[session][r.id] = r
	}
	heap.Push(&l.mu.due, r)
	l.tellEarlier(r)
	st.Leases++
	st.Handles += len(r.handles)
	st.Granted++
	return block.Lease{ID: r.id, Left: d, Count: len(r.handles)}, nil
}

// Renew lets a lease run for d from now, also when that is shorter than what
// was left. It fails with block.ErrLeaseExpired when there is no such lease any
// more, and with block.ErrInvalid unless d is positive.
func (l *Leases) Renew(id uint64, d time.Duration) (block.Lease, error) {
	if d <= 0 {
		return block.Lease{}, fmt.Errorf("%w: lease for %v", block.ErrInvalid, d)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r, err := l.alive(id)
	if err != nil {
		return block.Lease{}, fmt.Errorf("renew lease: %w", err)
	}
	r.expires = time.Now().Add(d)
	heap.Fix(&l.mu.due, r.at)
	l.tellEarlier(r)
	l.mu.stats.Renewed++
	return block.Lease{ID: id, Left: d, Count: len(r.handles)}, nil
}

// Release ends a lease and returns what it held. It fails with
// block.ErrLeaseExpired when there is no such lease any more; one whose time is
// over is left to Expire, which alone returns its handles.
func (l *Leases) Release(id uint64) ([]block.Handle, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, err := l.alive(id)
	if err != nil {
		return nil, fmt.Errorf("release lease: %w", err)
	}
	l.drop(r)
	l.mu.stats.Released++
	return r.handles, nil
}

// EndSession ends all leases of a session and returns what each held.
func (l *Leases) EndSession(session uint64) [][]block.Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	var held [][]block.Handle
	for _, r := range l.mu.bySession[session] {
		l.drop(r)
		l.mu.stats.Ended++
		held = append(held, r.handles)
	}
	return held
}

// Expire ends the leases whose time is over at now and returns what each held,
// the first due first.
func (l *Leases) Expire(now time.Time) [][]block.Handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	var held [][]block.Handle
	for len(l.mu.due) > 0 && !now.Before(l.mu.due[0].expires) {
		r := l.mu.due[0]
		l.drop(r)
		l.mu.stats.Expired++
		held = append(held, r.handles)
	}
	return held
}

// Next is when the first lease expires; ok is false when there is none.
func (l *Leases) Next() (at time.Time, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.mu.due) == 0 {
		l.mu.awaited = time.Time{}
		return time.Time{}, false
	}
	l.mu.awaited = l.mu.due[0].expires
	return l.mu.awaited, true
}

// Earlier receives when what Next answers has become earlier than what it answered
// last. It is for the one goroutine that calls Next and Expire.
func (l *Leases) Earlier() <-chan struct{} { return l.earlier }

// Stats is a snapshot of the counters.
func (l *Leases) Stats() LeaseStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.stats
}

// alive finds a lease whose time is not over.
func (l *Leases) alive(id uint64) (*leaseRecord, error) {
	r := l.mu.byID[id]
	if r == nil || !time.Now().Before(r.expires) {
		return nil, fmt.Errorf("%016x: %w", id, block.ErrLeaseExpired)
	}
	return r, nil
}

func (l *Leases) drop(r *leaseRecord) {
	delete(l.mu.byID, r.id)
	if of := l.mu.bySession[r.session]; of != nil {
		delete(of, r.id)
		if len(of) == 0 {
			delete(l.mu.bySession, r.session)
		}
	}
	heap.Remove(&l.mu.due, r.at)
	l.mu.stats.Leases--
	l.mu.stats.Handles -= len(r.handles)
	if st := &l.mu.stats; invariants.Enabled && (st.Leases != len(l.mu.byID) || st.Handles < 0) {
		panic(fmt.Sprintf("tiers: %d leases on %d blocks are counted, %d are known", st.Leases, st.Handles, len(l.mu.byID)))
	}
}

// tellEarlier tells of a lease that is due before what is waited for: waking who waits
// costs more than all else about a lease, and most end before their time.
func (l *Leases) tellEarlier(r *leaseRecord) {
	if at := l.mu.awaited; r.at != 0 || !at.IsZero() && !r.expires.Before(at) {
		return
	}
	select {
	case l.earlier <- struct{}{}:
	default: // told already
	}
}

// randomID draws a number that cannot be guessed.
func randomID() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails: the runtime ends the program when there is no entropy
	return binary.LittleEndian.Uint64(b[:])
}

// leaseHeap orders leases by expiry, for container/heap.
type leaseHeap []*leaseRecord

func (h leaseHeap) Len() int           { return len(h) }
func (h leaseHeap) Less(i, j int) bool { return h[i].expires.Before(h[j].expires) }
func (h leaseHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push is called by container/heap.
func (h *leaseHeap) Push(x any) {
	r := x.(*leaseRecord)
	r.at = len(*h)
	*h = append(*h, r)
}

// Pop is called by container/heap.
func (h *leaseHeap) Pop() any {
	last := len(*h) - 1
	r := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return r
}
