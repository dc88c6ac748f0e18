package memstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Reserve implements api.Store.
func (s *Store) Reserve(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, size int64, o block.PutOptions) (block.Reserved, block.Existing, error) {
	for {
		r, there, wait, err := s.reserve(ns, hashLen, h, size, o)
		if wait == nil {
			return r, there, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			s.mu.Lock()
			s.mu.refused++
			s.mu.Unlock()
			return block.Reserved{}, block.Existing{}, fmt.Errorf("reserve %d bytes: %w: %w", size, block.ErrNoSpace, ctx.Err())
		}
	}
}

// reserve tries once; wait is what to wait for when there is no room.
func (s *Store) reserve(ns block.NamespaceID, hashLen int, h block.Hash, size int64, o block.PutOptions) (r block.Reserved, there block.Existing, wait <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, _, err := s.keys(ns, hashLen, nil)
	if err != nil {
		return r, there, nil, err
	}
	if err := n.Desc.CheckLen(size); err != nil {
		return r, there, nil, err
	}
	if o.Durable == block.G3 && !s.opts.Durable {
		return r, there, nil, fmt.Errorf("put to g3: %w: this store has no NVMe tier", block.ErrUnavailable)
	}
	s.expire()
	if e, _ := s.find(n, h); e != nil {
		return block.Reserved{Status: block.Exists}, block.Existing{Len: uint32(len(e.data)), Sum: e.sum}, nil, nil
	}
	if !s.room(size) {
		return r, there, s.mu.freed, nil
	}
	s.mu.used += size
	id := rand.Uint64() | 1
	if n.HashLen == 0 {
		n.HashLen = hashLen
	}
	n.filled[h]++
	s.mu.reservations[id] = &reservation{ns: n, hash: h, data: make([]byte, size), opts: o, expires: time.Now().Add(reservationLife)}
	return block.Reserved{ID: id, Left: reservationLife, Place: block.PlaceAt(0, 1024)}, there, nil, nil
}

// room reports whether there is room for size bytes, after it has made some if it
// may.
func (s *Store) room(size int64) bool {
	for s.mu.used+size > s.opts.Capacity {
		var from *space
		var oldest *entry
		for _, n := range s.mu.byID {
			for _, e := range n.blocks {
				if !e.pinned && e.leases == 0 && (oldest == nil || e.born < oldest.born) {
					from, oldest = n, e
				}
			}
		}
		if !s.opts.Evict || oldest == nil {
			return false
		}
		s.remove(from, oldest, block.Evicted)
	}
	return true
}

// expire ends leases and reservations whose time has come.
func (s *Store) expire() {
	now := time.Now()
	for id, l := range s.mu.leases {
		if !now.Before(l.until) {
			s.endLease(id, l)
		}
	}
	for id, r := range s.mu.reservations {
		if !now.Before(r.expires) {
			s.abort(id)
		}
	}
}

func (s *Store) endLease(id uint64, l *lease) {
	for _, e := range l.blocks {
		e.leases--
	}
	delete(s.mu.leases, id)
}

func (s *Store) reservation(id uint64) (*reservation, error) {
	s.expire()
	r, ok := s.mu.reservations[id]
	if !ok {
		return nil, fmt.Errorf("reservation %d: %w", id, block.ErrLeaseExpired)
	}
	return r, nil
}

// Fill implements api.Store.
func (s *Store) Fill(_ context.Context, id uint64, off int64, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.reservation(id)
	if err != nil {
		return err
	}
	if off != r.got || off+int64(len(p)) > int64(len(r.data)) {
		return fmt.Errorf("%w: fill reservation %d: %d bytes at offset %d: %d of %d are there", block.ErrInvalid, id, len(p), off, r.got, len(r.data))
	}
	r.got += int64(copy(r.data[off:], p))
	return nil
}

// Commit implements api.Store.
func (s *Store) Commit(_ context.Context, ids []uint64) []block.CommitResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]block.CommitResult, len(ids))
	for i, id := range ids {
		out[i].Status, out[i].Err = s.commit(id)
	}
	return out
}

func (s *Store) commit(id uint64) (block.PutStatus, error) {
	r, err := s.reservation(id)
	if err != nil {
		return 0, err
	}
	if r.got != int64(len(r.data)) {
		s.abort(id)
		return 0, fmt.Errorf("%w: commit reservation %d: %d of %d bytes are there", block.ErrInvalid, id, r.got, len(r.data))
	}
	sum := sumOf(r.data)
	if e, _ := s.find(r.ns, r.hash); e != nil {
		s.abort(id)
		return s.compare(r.ns, e, int64(len(r.data)), sum, r.opts)
	}
	s.mu.born++
	e := &entry{
		hash: r.hash, parent: r.opts.Parent, hasPar: r.opts.HasParent, data: r.data, sum: sum, durable: r.opts.Durable == block.G3, born: s.mu.born,
	}
	ttl := r.opts.TTL
	if ttl == 0 {
		ttl = r.ns.TTL
	}
	if ttl > 0 {
		e.expires = time.Now().Add(ttl)
	}
	s.drop(id, r)
	r.ns.blocks[r.hash] = e
	for _, t := range e.tiers() {
		s.tellStored(r.ns, e, t)
	}
	return block.Stored, nil
}

func (s *Store) compare(ns *space, e *entry, n int64, sum block.Sum, o block.PutOptions) (block.PutStatus, error) {
	if n != int64(len(e.data)) || sum != e.sum {
		s.mu.stats.Conflicts++
		return 0, fmt.Errorf("put %s: %w: %d bytes with sum %s are there, not %d with %s", e.hash, block.ErrConflict, len(e.data), e.sum, n, sum)
	}
	if o.Durable == block.G3 {
		s.makeDurable(ns, e)
	}
	return block.Exists, nil
}

// CompareExisting implements api.Store.
func (s *Store) CompareExisting(_ context.Context, ns block.NamespaceID, h block.Hash, n int64, sum block.Sum, o block.PutOptions) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp, err := s.space(ns)
	if err != nil {
		return err
	}
	e, _ := s.find(sp, h)
	if e == nil {
		return fmt.Errorf("compare with %s: %w", h, block.ErrNotFound)
	}
	_, err = s.compare(sp, e, n, sum, o)
	return err
}

// Abort implements api.Store.
func (s *Store) Abort(ids []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		s.abort(id)
	}
}

func (s *Store) abort(id uint64) {
	if r, ok := s.mu.reservations[id]; ok {
		s.drop(id, r)
		s.free(int64(len(r.data)))
	}
}

func (s *Store) drop(id uint64, r *reservation) {
	delete(s.mu.reservations, id)
	if r.ns.filled[r.hash]--; r.ns.filled[r.hash] == 0 {
		delete(r.ns.filled, r.hash)
	}
}

// RenewLease implements api.Store.
func (s *Store) RenewLease(id uint64, d time.Duration) (block.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire()
	l, ok := s.mu.leases[id]
	if !ok {
		return block.Lease{}, fmt.Errorf("lease %d: %w", id, block.ErrLeaseExpired)
	}
	l.until = time.Now().Add(d)
	return block.Lease{ID: id, Left: d, Count: len(l.blocks)}, nil
}

// ReleaseLease implements api.Store.
func (s *Store) ReleaseLease(id uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire()
	l, ok := s.mu.leases[id]
	if !ok {
		return fmt.Errorf("lease %d: %w", id, block.ErrLeaseExpired)
	}
	s.endLease(id, l)
	return nil
}

// EndSession implements api.Store.
func (s *Store) EndSession(session uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, l := range s.mu.leases {
		if l.session == session {
			s.endLease(id, l)
		}
	}
	for id, r := range s.mu.reservations {
		if r.opts.Session == session {
			s.abort(id)
		}
	}
}
