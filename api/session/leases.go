package session

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// leases are those of a session: nobody else may renew or release them. What the
// client lets run out is forgotten when there are many.
type leases struct {
	most int
	mu   struct {
		sync.Mutex
		held map[uint64]held
	}
}

// held is what is known of a lease.
type held struct {
	until  time.Time
	blocks int
}

func (l *leases) init(most int) {
	l.most = most
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.held = make(map[uint64]held)
}

// room fails with ErrBusy when the session has as many leases as it may.
func (l *leases) room() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.mu.held) >= l.most {
		l.forget()
	}
	if n := len(l.mu.held); n >= l.most {
		return fmt.Errorf("%w: %d leases, at most %d", ErrBusy, n, l.most)
	}
	return nil
}

// forget takes out what has run out. It needs the lock.
func (l *leases) forget() {
	now := time.Now()
	for id, h := range l.mu.held {
		if now.After(h.until) {
			delete(l.mu.held, id)
		}
	}
}

// now counts the leases and the blocks in them.
func (l *leases) now() (n, blocks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
	for _, h := range l.mu.held {
		blocks += h.blocks
	}
	return len(l.mu.held), blocks
}

// add notes a lease; the zero lease is none.
func (l *leases) add(lease block.Lease) {
	if lease.ID == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.held[lease.ID] = held{until: time.Now().Add(lease.Left), blocks: lease.Count}
}

// has fails with ErrLeaseExpired for a lease that is not this session's.
func (l *leases) has(id uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.mu.held[id]; !ok {
		return fmt.Errorf("lease %016x: %w: it is none of this session", id, block.ErrLeaseExpired)
	}
	return nil
}

func (l *leases) drop(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.mu.held, id)
}

// release answers CodeRelease.
func (s *session) release(id uint64, p []byte) error {
	m := &s.in.release
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	s.statuses = s.statuses[:0]
	for _, l := range m.Leases {
		err := s.leases.has(l)
		if err == nil {
			s.leases.drop(l)
			err = s.srv.store.ReleaseLease(l)
		}
		s.statuses = append(s.statuses, StatusOf(err))
	}
	s.statuses = s.places.release(m.Grants, s.statuses)
	return s.reply(id, CodeReleased, &ReleasedMessage{Results: s.statuses})
}

// renew answers CodeRenew.
func (s *session) renew(id uint64, p []byte) error {
	m := &s.in.renew
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	if m.LeaseMS == 0 {
		return s.fail(id, invalid("lease_ms: 0, want more"))
	}
	s.statuses = s.statuses[:0]
	for _, l := range m.Leases {
		err := s.leases.has(l)
		if err == nil {
			var lease block.Lease
			if lease, err = s.srv.store.RenewLease(l, time.Duration(m.LeaseMS)*time.Millisecond); err == nil {
				s.leases.add(lease)
			}
		}
		s.statuses = append(s.statuses, StatusOf(err))
	}
	return s.reply(id, CodeRenewed, &RenewedMessage{Results: s.statuses})
}
