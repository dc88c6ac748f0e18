package xfer

import (
	"sync/atomic"
	"time"
)

// Telemetry says what a request did. Times are zero unless the agent was made
// with AgentOptions.Telemetry.
type Telemetry struct {
	Posts        uint64        // how often it was posted or run
	Descs        int           // descriptors in one post
	Bytes        uint64        // bytes that the last finished post moved
	Started      time.Time     // when the last post began
	PostTime     time.Duration // from the post to the backend's start
	TransferTime time.Duration // in the backend, of the last finished post
}

// Stats is a snapshot of an agent's counters since it was made.
type Stats struct {
	Requests  int    // not released
	InFlight  int    // posted and not done, without those in Run
	Limit     int    // bound of InFlight
	PostWaits uint64 // posts that waited for a place under Limit
	Peers     int    // known now
	Waiting   int    // notifications that nobody took yet
	Backends  []BackendStats
}

// BackendStats is what one backend did.
type BackendStats struct {
	Name            string
	Regions         int    // registered now
	RegisteredBytes uint64 // of those with a length
	Transfers       uint64 // finished, in whatever way
	Failed          uint64 // of them, with an error
	Canceled        uint64 // of them, cancelled or past their deadline
	Descs           uint64 // descriptors whose bytes all arrived
	BytesRead       uint64
	BytesWritten    uint64
	Peers           int    // known to it now
	PeerRegions     int    // registrations of theirs
	Notified        uint64 // notifications delivered to peers, with requests or alone
	Notifications   uint64 // that came from peers
}

// counters are written once per transfer.
type counters struct {
	transfers, failed, canceled, descs atomic.Uint64
	notified, notes                    atomic.Uint64
	bytes                              [2]atomic.Uint64 // by Op
}

// Stats gives a snapshot of the agent's counters.
func (a *Agent) Stats() Stats {
	s := Stats{InFlight: len(a.slots), Limit: cap(a.slots), PostWaits: a.waits.Load(), Waiting: len(a.notes)}
	a.live.Lock()
	s.Requests = a.live.count
	a.live.Unlock()
	a.mu.RLock()
	defer a.mu.RUnlock()
	s.Peers = len(a.mu.peers)
	for _, b := range a.mu.backends {
		n := BackendStats{
			Name:         b.name,
			Transfers:    b.counts.transfers.Load(),
			Failed:       b.counts.failed.Load(),
			Canceled:     b.counts.canceled.Load(),
			Descs:        b.counts.descs.Load(),
			BytesRead:    b.counts.bytes[Read].Load(),
			BytesWritten: b.counts.bytes[Write].Load(),

			Notified:      b.counts.notified.Load(),
			Notifications: b.counts.notes.Load(),
		}
		for _, p := range a.mu.peers {
			if pb := p.backend(b); pb != nil {
				n.Peers++
				n.PeerRegions += pb.regions()
			}
		}
		for t := range b.sections {
			n.Regions += len(b.sections[t].regs)
			n.RegisteredBytes += b.sections[t].bytes
		}
		s.Backends = append(s.Backends, n)
	}
	return s
}
