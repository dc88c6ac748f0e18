package session

import (
	"fmt"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// leases are those of a session: nobody else may renew or release them. They count
// against its limit, and against that of its identity.
type leases struct {
	session  uint64
	identity *access.Identity
	own      *access.Leases
}

func (l *leases) init(session uint64, identity *access.Identity, most int) {
	l.session, l.identity, l.own = session, identity, access.NewLeases(most)
}

// take takes room for a lease, to be added or cancelled. It fails with ErrBusy when the
// session, or its identity, has as many as it may.
func (l *leases) take() error {
	if !l.own.Take() {
		return fmt.Errorf("%w: %d leases, at most %d", ErrBusy, l.own.Most(), l.own.Most())
	}
	if err := l.identity.TakeLease(); err != nil {
		l.own.Cancel()
		return fmt.Errorf("%w: %w", ErrBusy, err)
	}
	return nil
}

// cancel gives room back for which there is no lease.
func (l *leases) cancel() {
	l.own.Cancel()
	l.identity.Leases().Cancel()
}

// add notes a lease for which there is room; the zero lease is none, and cancels.
func (l *leases) add(lease block.Lease) {
	l.own.Add(lease, l.session)
	l.identity.Leases().Add(lease, l.session)
}

func (l *leases) renew(lease block.Lease) {
	l.own.Renew(lease)
	l.identity.Leases().Renew(lease)
}

func (l *leases) drop(id uint64) {
	l.own.Drop(id)
	l.identity.Leases().Drop(id)
}

// has fails with ErrLeaseExpired for a lease that is not this session's.
func (l *leases) has(id uint64) error {
	if !l.own.Has(id) {
		return fmt.Errorf("lease %016x: %w: it is none of this session", id, block.ErrLeaseExpired)
	}
	return nil
}

// end lets go of all when the session is over, in the store too.
func (l *leases) end() { l.identity.Leases().EndSession(l.session) }

// release answers CodeRelease.
func (s *session) release(id uint64, p []byte) error {
	m := &s.in.release
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	leases, grants := s.beyond(len(m.Leases)), s.beyond(len(m.Grants))
	s.statuses = s.statuses[:0]
	for _, l := range m.Leases[:len(m.Leases)-leases] {
		err := s.leases.has(l)
		if err == nil {
			s.leases.drop(l)
			err = s.srv.store.ReleaseLease(l)
		}
		s.statuses = append(s.statuses, StatusOf(err))
	}
	s.statuses = appendBusy(s.statuses, leases)
	s.statuses = s.places.release(m.Grants[:len(m.Grants)-grants], s.statuses)
	s.statuses = appendBusy(s.statuses, grants)
	return s.reply(id, CodeReleased, &ReleasedMessage{Results: s.statuses})
}

// appendBusy appends the outcome of what is beyond the limit of a message.
func appendBusy(all []Status, n int) []Status {
	for range n {
		all = append(all, StatusBusy)
	}
	return all
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
	beyond := s.beyond(len(m.Leases))
	s.statuses = s.statuses[:0]
	for _, l := range m.Leases[:len(m.Leases)-beyond] {
		err := s.leases.has(l)
		if err == nil {
			var lease block.Lease
			if lease, err = s.srv.store.RenewLease(l, time.Duration(m.LeaseMS)*time.Millisecond); err == nil {
				s.leases.renew(lease)
			}
		}
		s.statuses = append(s.statuses, StatusOf(err))
	}
	s.statuses = appendBusy(s.statuses, beyond)
	return s.reply(id, CodeRenewed, &RenewedMessage{Results: s.statuses})
}
