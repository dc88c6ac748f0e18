package session

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// place is a grant of the store's that the session may fill. Data lands in order
// from its start, and is hashed while it is in the cache.
type place struct {
	id      uint64
	ns      block.NamespaceID
	mem     []byte
	used    time.Time // when it was granted, or data began to land
	mapped  bool      // the client can write there itself
	landing bool
	filled  int64
	whole   block.Sum // the checksum when all came in one frame
	summer            // else
}

// places are the grants of a session. Nobody else's data finds them.
type places struct {
	s  *session
	at *place // that lands now; of the reading goroutine
	mu struct {
		sync.Mutex
		open    map[uint64]*place
		revoked map[uint64]int64 // bytes of places that ran out while the client can still write them
		count   int              // of open and revoked, and those that the store is being asked for
		bytes   int64
		timer   *time.Timer // nil while there are none open
	}
}

func (ps *places) init(s *session) {
	ps.s = s
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.mu.open = make(map[uint64]*place)
	ps.mu.revoked = make(map[uint64]int64)
}

// land is the memory for data of n bytes at off of a grant, or nil: it is not one of
// this session's, or no longer, or the data does not follow what is there. Data at
// offset 0 begins anew.
func (ps *places) land(id, off uint64, n uint32) []byte {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.mu.open[id]
	if p == nil || n == 0 {
		return nil
	}
	if off == 0 {
		p.filled = 0
		p.drop()
	}
	if off != uint64(p.filled) || uint64(n) > uint64(len(p.mem))-off {
		return nil
	}
	p.landing, p.used = true, time.Now()
	ps.at = p
	return p.mem[off:][:n:n]
}

// landed follows land.
func (ps *places) landed(b []byte, err error) {
	p := ps.at
	ps.at = nil
	// It is still open: only the reading goroutine closes one whose data lands.
	if err == nil {
		if p.filled == 0 && len(b) == len(p.mem) {
			p.whole = sumOf(b)
		} else {
			p.add(p.mem[:p.filled+int64(len(b))])
		}
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p.landing = false
	if err == nil {
		p.filled += int64(len(b))
	}
}

// reserve says for how many more places of size bytes there is room, want at most,
// and counts them.
func (ps *places) reserve(size int64, want int) int {
	o := &ps.s.srv.o
	ps.mu.Lock()
	defer ps.mu.Unlock()
	n := min(want, ps.s.grants-ps.mu.count)
	if left := o.GrantBytes - ps.mu.bytes; int64(n) > left/size {
		n = int(max(0, left/size))
	}
	if n <= 0 {
		n = 0
		if ps.mu.count == 0 && want > 0 {
			n = 1
		}
	}
	ps.mu.count += n
	ps.mu.bytes += int64(n) * size
	return n
}

// add takes what the store granted of n places of size bytes that were reserved, and
// appends them to what is told to the client.
func (ps *places) add(ns block.NamespaceID, size int64, n int, grants []block.Grant, told []GrantedPlace) []GrantedPlace {
	now := time.Now()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	less := n - len(grants)
	ps.mu.count -= less
	ps.mu.bytes -= int64(less) * size
	for i := range grants {
		g := &grants[i]
		p := &place{id: g.ID, ns: ns, mem: g.Mem, mapped: ps.s.mapsChunk(g.Chunk, ns, access.Write), used: now}
		ps.mu.open[g.ID] = p
		t := GrantedPlace{Grant: g.ID, Size: uint32(size), Chunk: NoChunk}
		if p.mapped {
			t.Chunk, t.Offset = uint32(g.Chunk), uint64(g.Offset)
		}
		told = append(told, t)
	}
	if ps.mu.timer == nil && len(ps.mu.open) > 0 {
		ps.mu.timer = time.AfterFunc(ps.s.srv.o.GrantTTL, ps.expire)
	}
	return told
}

// close takes a place out, so that data for it is skipped from now on. It needs the
// lock.
func (ps *places) close(p *place) {
	delete(ps.mu.open, p.id)
	ps.mu.count--
	ps.mu.bytes -= int64(len(p.mem))
}

// take closes a place for the put of a block in it, after which the store has it
// unless there is an error: then it is the caller's to abort when size is not 0.
// unseen are the bytes that the client wrote there itself: their checksum is still to be
// compared. Nil: they came as data, and it was.
func (ps *places) take(ns block.NamespaceID, it *PutItem) (size int64, unseen []byte, err error) {
	ps.mu.Lock()
	p := ps.mu.open[it.Grant]
	if p != nil {
		ps.close(p)
	}
	ps.mu.Unlock()
	if p == nil {
		return 0, nil, fmt.Errorf("grant %016x: %w: this session has no such place", it.Grant, block.ErrLeaseExpired)
	}
	defer p.drop()
	size = int64(len(p.mem))
	n := int64(it.Len)
	switch {
	case p.ns != ns:
		return size, nil, invalid("namespace: %d, the grant is one of %d", ns, p.ns)
	case n == 0 || n > size:
		return size, nil, invalid("length: %d bytes in a place of %d", n, size)
	case p.mapped && p.filled == 0:
		return size, p.mem[:n:n], nil
	case p.filled != n:
		return size, nil, invalid("length: %d bytes, of which %d have come in order", n, p.filled)
	}
	return size, nil, ps.s.compare(n, p.total(), it.Sum)
}

// compare refuses a block whose bytes have another checksum than the client says.
func (s *session) compare(n int64, have, want block.Sum) error {
	if have == want {
		return nil
	}
	s.srv.stats.corrupt.Add(1)
	return fmt.Errorf("put: %w: %d bytes came with sum %s, not %s", block.ErrCorrupt, n, have, want)
}

// total is the checksum of what is there.
func (p *place) total() block.Sum {
	if p.filled == int64(len(p.mem)) && p.steps == nil {
		return p.whole
	}
	return p.sum()
}

// release gives places back, and appends how that went for each.
func (ps *places) release(ids []uint64, out []Status) []Status {
	var back []uint64
	for _, id := range ids {
		if !ps.drop(id) && (ps.s.process == nil || !ps.s.srv.dropPlace(id)) {
			out = append(out, StatusLeaseExpired)
			continue
		}
		out = append(out, StatusOK)
		back = append(back, id)
	}
	ps.s.srv.store.AbortGrants(back)
	return out
}

// drop takes a place out that is open or revoked. It is false when there is none, and
// when data lands there.
func (ps *places) drop(id uint64) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.mu.open[id]; p != nil {
		if p.landing {
			return false
		}
		ps.close(p)
		p.drop()
		return true
	}
	n, ok := ps.mu.revoked[id]
	if ok {
		delete(ps.mu.revoked, id)
		ps.mu.count--
		ps.mu.bytes -= n
	}
	return ok
}

// expire takes back what has been unused for too long, and tells the client. Memory
// that it shares stays away from others until it has answered.
func (ps *places) expire() {
	if !ps.s.flight.enter() {
		return
	}
	defer ps.s.flight.work.Done()
	ttl := ps.s.srv.o.GrantTTL
	var out, back []uint64
	ps.mu.Lock()
	now := time.Now()
	next := ttl
	for id, p := range ps.mu.open {
		if left := ttl - now.Sub(p.used); left > 0 || p.landing {
			next = min(next, max(left, time.Millisecond))
			continue
		}
		p.drop()
		out = append(out, id)
		if !p.mapped {
			ps.close(p)
			back = append(back, id)
			continue
		}
		delete(ps.mu.open, id)
		ps.mu.revoked[id] = int64(len(p.mem))
	}
	ps.mu.timer = nil
	if len(ps.mu.open) > 0 {
		ps.mu.timer = time.AfterFunc(next, ps.expire)
	}
	ps.mu.Unlock()
	if len(out) == 0 {
		return
	}
	ps.s.srv.stats.expired.Add(int64(len(out)))
	ps.s.srv.store.AbortGrants(back)
	m := RevokeMessage{Grants: out}
	_ = ps.s.send(ps.s.ctx, 0, CodeRevoke, m.Append(nil)) // it fails with the connection, and then all are revoked
}

// end gives all places back: at once, or when nobody can write them any more. No
// data lands, and no goroutine of the session runs.
func (ps *places) end() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var ids, own []uint64 // that the client can write, and that only this side can
	for id, p := range ps.mu.open {
		if p.mapped {
			ids = append(ids, id)
		} else {
			own = append(own, id)
		}
		p.drop()
	}
	for id := range ps.mu.revoked {
		ids = append(ids, id)
	}
	clear(ps.mu.open)
	clear(ps.mu.revoked)
	if ps.mu.timer != nil {
		ps.mu.timer.Stop()
	}
	ps.s.srv.store.AbortGrants(own)
	switch p := ps.s.process; {
	case len(ids) == 0:
		p.close()
	default:
		ps.s.srv.orphans.add(p, ids)
	}
}

// held is how many places count as the session's, and their bytes.
func (ps *places) held() (n int, bytes int64) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.mu.count, ps.mu.bytes
}

// now counts the places that are open, and those that wait for the client's answer.
func (ps *places) now() (open, revoked int) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return len(ps.mu.open), len(ps.mu.revoked)
}
