package access

import (
	"fmt"
	"sync"
)

// What an identity may have at once when the list does not say: a quarter of what a
// server has for all, so that one that forgets to give back leaves room for others.
const (
	DefaultMaxSessions = 256
	DefaultMaxLeases   = 16384
)

// usage is what an identity has, over all servers that the list is given to.
type usage struct {
	leases *Leases // taken in sessions and over gRPC

	maxSessions int // 0: no limit
	mu          struct {
		sync.Mutex
		sessions int
		refused  int64
	}
}

// Usage is a snapshot of what an identity has, and may have. A limit of 0 is none.
type Usage struct {
	Name            string
	Sessions        int // open now
	SessionsLimit   int
	SessionsRefused int64 // because there were as many as may be
	Leases          int   // now, of its sessions and of its gRPC calls
	LeasesLimit     int
	LeasesRefused   int64
}

// TakeSession counts a session that begins, until EndSession. The error says that the
// identity has as many as it may; it is no sentinel, which the caller adds.
func (i *Identity) TakeSession() error {
	if i == nil {
		return nil
	}
	u := &i.usage
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.maxSessions > 0 && u.mu.sessions >= u.maxSessions {
		u.mu.refused++
		return fmt.Errorf("identity %q has %d sessions, at most %d", i.name, u.mu.sessions, u.maxSessions)
	}
	u.mu.sessions++
	return nil
}

// EndSession takes one back that TakeSession counted.
func (i *Identity) EndSession() {
	if i == nil {
		return
	}
	i.usage.mu.Lock()
	defer i.usage.mu.Unlock()
	i.usage.mu.sessions--
}

// TakeLease takes room in Leases. The error is as that of TakeSession.
func (i *Identity) TakeLease() error {
	if l := i.Leases(); !l.Take() {
		return fmt.Errorf("identity %q has %d leases, at most %d", i.name, l.Most(), l.Most())
	}
	return nil
}

// Leases are those of the identity; nil for a nil one.
func (i *Identity) Leases() *Leases {
	if i == nil {
		return nil
	}
	return i.usage.leases
}

// Usage says what the identity has; nothing for a nil one.
func (i *Identity) Usage() Usage {
	if i == nil {
		return Usage{}
	}
	u := Usage{Name: i.name, SessionsLimit: i.usage.maxSessions, LeasesLimit: i.usage.leases.Most()}
	u.Leases, _, u.LeasesRefused = i.usage.leases.Now()
	i.usage.mu.Lock()
	defer i.usage.mu.Unlock()
	u.Sessions, u.SessionsRefused = i.usage.mu.sessions, i.usage.mu.refused
	return u
}

// Usage says what everybody has, in the order of the list; nil for a nil list.
func (l *List) Usage() []Usage {
	if l == nil {
		return nil
	}
	all := make([]Usage, len(l.all))
	for k, i := range l.all {
		all[k] = i.Usage()
	}
	return all
}
