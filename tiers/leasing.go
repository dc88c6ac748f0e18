package tiers

import (
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// maxLease is the longest that a lease runs without being renewed: who holds
// blocks for longer must be alive to say so.
const maxLease = 24 * time.Hour

// RenewLease lets a lease run for d from now; see api.Store.
func (s *Store) RenewLease(id uint64, d time.Duration) (block.Lease, error) {
	if d > maxLease {
		return block.Lease{}, fmt.Errorf("renew lease: %w: lease %v, at most %v", block.ErrInvalid, d, maxLease)
	}
	return s.leases.Renew(id, d)
}

// ReleaseLease ends a lease; see api.Store.
func (s *Store) ReleaseLease(id uint64) error {
	hs, err := s.leases.Release(id)
	for _, h := range hs {
		s.release(h)
	}
	return err
}

// EndSession releases every lease and reservation of a session; see api.Store.
func (s *Store) EndSession(session uint64) {
	if session == 0 {
		return
	}
	for _, hs := range s.leases.EndSession(session) {
		for _, h := range hs {
			s.release(h)
		}
	}
	for _, r := range s.reservations.takeIf(func(r *reservation) bool { return r.opts.Session == session }) {
		s.giveBack(r)
	}
}

// sweepEvery is how often reservations and times to live are looked at.
const sweepEvery = time.Second

// sweeper ends what has run out, until the store's life ends: leases when they
// are due, reservations and blocks once a second.
func (s *Store) sweeper() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	due := time.NewTimer(time.Hour)
	defer due.Stop()
	for {
		if at, ok := s.leases.Next(); ok {
			due.Reset(time.Until(at))
		} else {
			due.Reset(time.Hour)
		}
		select {
		case <-s.life.Done():
			return
		case <-s.leases.Earlier():
		case <-due.C:
		case <-tick.C:
			now := s.reservations.now()
			for _, r := range s.reservations.takeIf(func(r *reservation) bool { return r.expires.Load() < now }) {
				s.giveBack(r)
			}
			s.sweepExpired()
		}
		for _, hs := range s.leases.Expire(time.Now()) {
			for _, h := range hs {
				s.release(h)
			}
		}
	}
}

// sweepExpired removes the blocks whose time has passed. A lookup treats them
// as gone already; this gives their room back.
func (s *Store) sweepExpired() {
	// Cleared before the scan, set again by what it finds, and by each put after
	// its block is in the table: so none is overlooked.
	if !s.mortal.Swap(false) {
		return
	}
	now := nowUnix()
	var due []block.Handle
	var any bool
	s.table.Range(1, func(h block.Handle, e *index.Entry) bool {
		any = any || e.Expires != 0
		if expired(e, now) && resident(e) {
			due = append(due, h)
		}
		return true
	})
	if any {
		s.mortal.Store(true)
	}
	for _, h := range due {
		s.expire(h)
	}
}
