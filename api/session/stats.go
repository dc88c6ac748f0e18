package session

import (
	"sync/atomic"

	"github.com/kvtier/kvtier/xfer/frame"
)

type counters struct {
	accepted, refused, busy, corrupt, expired, unpassed atomic.Int64

	bytesIn, bytesOut, skipped atomic.Int64 // of sessions that have ended
	calls                      [lastCode + 1]atomic.Int64

	regionIn, regionOut, regionFaults, openLate atomic.Int64
}

func (c *counters) add(s frame.Stats) {
	c.bytesIn.Add(s.BytesIn)
	c.bytesOut.Add(s.BytesOut)
	c.skipped.Add(s.Skipped)
}

// Stats is a snapshot of what a server does and has done.
type Stats struct {
	Sessions int64 // now
	Pending  int64 // connections that have not said hello yet
	Grants   int64 // places that clients may fill now
	Revoked  int64 // places that ran out and that a client of shared memory has not given back yet
	Orphans  int64 // places that wait for the end of a process whose session has ended

	Accepted int64 // sessions
	Refused  int64 // connections that did not become one
	Calls    map[Code]int64
	Busy     int64 // keys and calls refused with StatusBusy, those beyond an identity's limits included
	Corrupt  int64 // puts whose bytes came with another checksum
	Expired  int64 // places that were granted and not used in time
	Unpassed int64 // places and blocks that a client was not told of in memory, since the file could not be passed
	BytesIn  int64 // payloads of frames
	BytesOut int64
	Skipped  int64 // of BytesIn, data for places that were not there

	Regions      int64 // files of clients that are mapped now
	RegionBytes  int64 // and their bytes
	RegionIn     int64 // bytes copied from them
	RegionOut    int64 // and to them
	RegionFaults int64 // regions that were cut short while they were used
	Openings     int64 // hellos whose regions are being opened now
	OpenLate     int64 // hellos refused because that was not done in time
}

// Stats is a snapshot of the server's state and counters.
func (s *Server) Stats() Stats {
	c := &s.stats
	st := Stats{
		Orphans: s.orphans.count(), Accepted: c.accepted.Load(), Refused: c.refused.Load(), Busy: c.busy.Load(),
		Corrupt: c.corrupt.Load(), Expired: c.expired.Load(), Unpassed: c.unpassed.Load(), Calls: make(map[Code]int64),
		RegionIn: c.regionIn.Load(), RegionOut: c.regionOut.Load(), RegionFaults: c.regionFaults.Load(),
		Openings: int64(len(s.openings.slots)), OpenLate: c.openLate.Load(),
	}
	for code := range c.calls {
		if n := c.calls[code].Load(); n > 0 {
			st.Calls[Code(code)] = n
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st.BytesIn, st.BytesOut, st.Skipped = c.bytesIn.Load(), c.bytesOut.Load(), c.skipped.Load()
	st.Regions, st.RegionBytes = int64(s.mu.regions), s.mu.regionBytes
	st.Sessions, st.Pending = int64(len(s.mu.sessions)), int64(len(s.mu.pending))
	for _, sess := range s.mu.sessions {
		if sess.conn != nil { // it has been welcomed
			f := sess.conn.Stats()
			st.BytesIn, st.BytesOut, st.Skipped = st.BytesIn+f.BytesIn, st.BytesOut+f.BytesOut, st.Skipped+f.Skipped
		}
		open, revoked := sess.places.now()
		st.Grants, st.Revoked = st.Grants+int64(open), st.Revoked+int64(revoked)
	}
	return st
}

// retire forgets a session that has ended.
func (s *Server) retire(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.sessions, sess.id)
	sess.identity.EndSession()
	if sess.conn != nil {
		s.stats.add(sess.conn.Stats())
	}
}
