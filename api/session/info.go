package session

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvtier/kvtier/api/access"
)

// Info is a snapshot of one session.
type Info struct {
	ID       uint64
	Name     string // that the client gave itself
	Identity string // by which its rights were chosen, "" where clients are not told apart
	Peer     string // HOST:PORT of the client; "unix" over a unix socket
	PID      int32  // of the process that connected over a unix socket, else 0; seen from the server
	UID      uint32 // and of its user
	Shared   bool   // it has the store's memory, to read or to write, too
	Age      time.Duration

	Regions      int   // of the client's memory, that the server may reach
	RegionBytes  int64 // of all of them
	Leases       int   // now
	LeasesLimit  int   // that it may have; its identity may have fewer left
	LeasedBlocks int   // in its leases, each as often as it is leased
	Places       int   // for puts, that it holds
	PlaceBytes   int64
	Calls        int   // in flight, watches among them
	CallBytes    int64 // of blocks that they move, those of gets as far as they are known

	IdentityUsage access.Usage // what its identity has, over all sessions and gRPC; without one nothing
}

// Local reports whether the client is a process of this host, over a unix socket.
func (i *Info) Local() bool { return i.Peer == unixPeer }

const unixPeer = "unix"

// Sessions lists the sessions that are open, oldest first.
func (s *Server) Sessions() []Info {
	var all []*session
	s.mu.Lock()
	for _, sess := range s.mu.sessions {
		all = append(all, sess)
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b *session) int {
		return cmp.Or(a.began.Compare(b.began), cmp.Compare(a.id, b.id))
	})
	out := make([]Info, len(all))
	for i, sess := range all {
		out[i] = sess.info()
	}
	return out
}

func (s *session) info() Info {
	i := Info{
		ID: s.id, Name: s.name, Identity: s.identity.Name(), Peer: s.peer, Shared: s.shares(), Age: time.Since(s.began),
		LeasesLimit: s.leases.own.Most(), IdentityUsage: s.identity.Usage(),
	}
	i.Calls, i.CallBytes = s.flight.count()
	if s.cred != nil {
		i.Peer, i.PID, i.UID = unixPeer, s.cred.Pid, s.cred.Uid
	}
	s.srv.mu.Lock() // under which they are dropped
	i.Regions, i.RegionBytes = len(s.regions.all), s.regions.bytes
	s.srv.mu.Unlock()
	i.Leases, i.LeasedBlocks, _ = s.leases.own.Now()
	i.Places, i.PlaceBytes = s.places.held()
	return i
}
