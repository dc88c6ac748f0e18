package session

import (
	"slices"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// keyed checks the flags of a request that names keys, and its namespace as namespace
// does. It leaves in k the keys that are to be served, and says how many are beyond them:
// those are busy. Got and Located have room for twice as many as are served, all other
// answers for all: a key takes less in them than it does in the request.
func (s *session) keyed(k *Keys, flags, known uint16, right access.Right) (ns *namespace, beyond int, err error) {
	if flags&^known != 0 {
		return nil, 0, invalid("flags: %#x, want none but %#x here", flags, known)
	}
	if ns, err = s.namespace(k.NS, k.Tag, right); err != nil {
		return nil, 0, err
	}
	beyond = s.beyond(k.Len())
	k.Hashes = k.Hashes[:len(k.Hashes)-beyond*int(k.HashLen)]
	return ns, beyond, nil
}

// beyond says how many of n that a message names are more than it may, and are busy.
func (s *session) beyond(n int) int {
	n = max(0, n-s.keys)
	s.srv.stats.busy.Add(int64(n))
	return n
}

// namespace finds the namespace of a request, and refuses a client that has no such
// right there. It is for the reading goroutine.
func (s *session) namespace(id block.NamespaceID, tag uint64, right access.Right) (*namespace, error) {
	ns, err := s.srv.namespace(id, tag)
	if err != nil || s.identity == nil {
		return ns, err
	}
	have, ok := s.rights[ns]
	if !ok {
		have = s.identity.Rights(ns.name)
		s.rights[ns] = have
	}
	if have&right == 0 {
		return nil, s.identity.CheckHandle(right, id, ns.name)
	}
	return ns, nil
}

// match answers CodeMatch, at once: it touches no device.
func (s *session) match(id uint64, p []byte) error {
	m := &s.in.match
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	_, beyond, err := s.keyed(&m.Keys, m.Flags, FlagAll|FlagQuiet|FlagPlan|s.hints(FlagConversation), access.Read)
	if err == nil {
		err = block.CheckConversation(m.Conversation)
	}
	if err != nil {
		return s.fail(id, err)
	}
	o := block.MatchOptions{
		All: m.Flags&FlagAll != 0, Quiet: m.Flags&FlagQuiet != 0, Class: m.Class,
		Lease: time.Duration(m.LeaseMS) * time.Millisecond, Session: s.id, Conversation: m.Conversation,
	}
	if m.Flags&FlagPlan != 0 {
		if beyond > 0 {
			return s.fail(id, invalid("plan of %d keys, at most %d", m.Len()+beyond, m.Len()))
		}
		o.Plan = &m.Plan
	}
	if o.Lease > 0 {
		if err := s.leases.take(); err != nil {
			return s.fail(id, err)
		}
	}
	r := &s.found
	*r = block.MatchResult{Blocks: r.Blocks[:0]}
	if err := s.srv.store.Match(s.ctx, m.NS, int(m.HashLen), m.Hashes, o, r); err != nil {
		if o.Lease > 0 {
			s.leases.cancel()
		}
		return s.fail(id, err)
	}
	if o.Lease > 0 {
		s.leases.add(r.Lease)
	}
	if !o.All && r.Prefix < m.Len() {
		beyond = 0 // the list has ended before them
	} else if !o.All {
		beyond = min(beyond, 1)
	}
	for range beyond {
		r.Blocks = append(r.Blocks, block.Found{State: BusyKey})
	}
	s.matched = MatchedMessage{
		Prefix: uint32(r.Prefix), Lease: r.Lease.ID, LeaseMS: millis(r.Lease.Left), Leased: uint32(r.Lease.Count), Blocks: r.Blocks, Plan: r.Plan,
	}
	return s.reply(id, CodeMatched, &s.matched)
}

// millis rounds down: a lease does not seem longer than it is.
func millis(d time.Duration) uint32 { return uint32(min(d/time.Millisecond, 1<<32-1)) }

// locate answers CodeLocate, at once.
func (s *session) locate(id uint64, p []byte) error {
	var m LocateMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	_, beyond, err := s.keyed(&m.Keys, 0, 0, access.Read)
	if err != nil {
		return s.fail(id, err)
	}
	places, err := s.srv.store.Locate(s.ctx, m.NS, int(m.HashLen), m.Hashes)
	if err != nil {
		return s.fail(id, err)
	}
	return s.reply(id, CodeLocated, &LocatedMessage{Places: places, Busy: min(beyond, s.keys)})
}

// The progress of a prefetch is told when so many keys are done, or after so long.
const (
	progressKeys  = 256
	progressAfter = 100 * time.Millisecond
)

// prefetch answers CodePrefetch.
func (s *session) prefetch(id uint64, p []byte) error {
	var m PrefetchMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	_, beyond, err := s.keyed(&m.Keys, m.Flags, s.hints(FlagUrgency), access.Read)
	o := block.PrefetchOptions{Priority: m.Priority, Within: time.Duration(m.WithinMS) * time.Millisecond}
	if err == nil {
		err = o.Check()
	}
	if err != nil {
		return s.fail(id, err)
	}
	m.Hashes = slices.Clone(m.Hashes) // the next message is read over them
	c, err := s.open(id, m.Deadline)
	return s.spawn(id, c, err, func(c *call) error {
		var done PrefetchedMessage
		told := time.Now()
		over := false
		err := s.srv.store.Prefetch(c.ctx, m.NS, int(m.HashLen), m.Hashes, o, func(p block.Progress) error {
			done.Results = append(done.Results, PrefetchResult{Reason: p.Reason, Tier: p.Tier})
			last := p.Index == m.Len()-1
			if now := time.Now(); last || len(done.Results) >= progressKeys || now.Sub(told) >= progressAfter {
				told = now
			} else {
				return nil
			}
			if last {
				for range beyond {
					done.Results = append(done.Results, PrefetchResult{Reason: BusyKey})
				}
				c.end()
			}
			err := s.send(s.patient(c), id, CodePrefetched, done.Append(nil))
			done.First += uint32(len(done.Results))
			done.Results = done.Results[:0]
			over = last && err == nil
			return err
		})
		if over {
			return nil // the last message was the answer
		}
		return err
	})
}
