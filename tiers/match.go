package tiers

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// Match looks keys up; see api.Store. It touches no device, and for G4 only the catalog.
func (s *Store) Match(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return fmt.Errorf("match: %w", err)
	}
	if o.Lease < 0 || o.Lease > maxLease {
		return fmt.Errorf("match: %w: lease %v, at most %v", block.ErrInvalid, o.Lease, maxLease)
	}
	if o.Lease > 0 && o.Plan != nil {
		return fmt.Errorf("match: %w: a lease and a plan exclude each other: lease what the plan says", block.ErrInvalid)
	}
	*res = block.MatchResult{Blocks: res.Blocks[:0]}
	now, broken := nowUnix(), false
	o.Lease = s.conversing(nsID, &o)
	if o.Lease > 0 {
		return s.matchLeased(ctx, nsID, hashLen, hashes, n, o, res)
	}
	s.table.LookupAll(nsID, hashLen, hashes, func(i int, _ block.Handle, e *index.Entry) bool {
		f := found(e, now)
		if f.State == block.Absent && s.pending(nsID, hashLen, hashes, i) {
			f.State = block.Pending
		}
		broken = broken || f.State != block.Resident
		if !broken {
			res.Prefix++
		}
		res.Blocks = append(res.Blocks, f)
		return o.All || !broken || s.objects != nil
	})
	if s.objects != nil {
		if err := s.objects.matchFar(ctx, nsID, hashLen, hashes, o.All, res); err != nil {
			return fmt.Errorf("match: %w", err)
		}
	}
	if !o.Quiet {
		s.countMatch(nsID, hashLen, hashes, n, res)
		s.hintRequest(nsID, hashLen, hashes, n, res.Prefix, o.Class)
	}
	if err := s.planMatch(nsID, o, res); err != nil {
		return err
	}
	return ctx.Err()
}

// found is what an entry says of its block.
func found(e *index.Entry, now uint32) block.Found {
	switch {
	case e == nil || expired(e, now):
		return block.Found{}
	case live(e, ixG2):
		return block.Found{State: block.Resident, Tier: block.G2, Len: e.Len}
	case live(e, ixG3):
		return block.Found{State: block.Resident, Tier: block.G3, Len: e.Len}
	case e.State[ixG2] == index.SlotFilling:
		return block.Found{State: block.Pending}
	}
	return block.Found{}
}

// pending reports whether key i is being put. Most stores have few open
// reservations at any time, so the common answer costs one load.
func (s *Store) pending(nsID block.NamespaceID, hashLen int, hashes []byte, i int) bool {
	if s.reservations.open.Load() == 0 {
		return false
	}
	return s.reservations.isPending(keyAt(nsID, hashLen, hashes, i))
}

// matchLeased looks keys up one by one, taking a reference on each that is
// there, so that what is answered is what is leased.
func (s *Store) matchLeased(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, n int, o block.MatchOptions, res *block.MatchResult) error {
	now, broken := nowUnix(), false
	var held []block.Handle
	letGo := func() {
		for _, h := range held {
			s.release(h)
		}
	}
	var far map[int]block.Found // what was looked for in G4
	for i := 0; i < n && (o.All || !broken); i++ {
		k := keyAt(nsID, hashLen, hashes, i)
		var f block.Found
		s.table.UpdateKey(k, func(h block.Handle, e *index.Entry) {
			if f = found(e, now); f.State == block.Resident {
				e.Refs++
				held = append(held, h)
			}
		})
		if f.State == block.Absent {
			// What is in G4 stays there: it needs no lease.
			if _, known := far[i]; !known && s.objects != nil {
				var err error
				if far, err = s.absentFar(ctx, nsID, hashLen, hashes, i, n, o.All); err != nil {
					letGo()
					return fmt.Errorf("match: %w", err)
				}
			}
			f = far[i]
		}
		if f.State == block.Absent && s.pending(nsID, hashLen, hashes, i) {
			f.State = block.Pending
		}
		broken = broken || f.State != block.Resident
		if !broken {
			res.Prefix++
		}
		res.Blocks = append(res.Blocks, f)
	}
	if !o.Quiet {
		s.countMatch(nsID, hashLen, hashes, n, res)
		s.hintRequest(nsID, hashLen, hashes, n, res.Prefix, o.Class)
		s.hintHits(held)
	}
	if len(held) == 0 {
		return nil
	}
	lease, err := s.leases.Grant(o.Session, held, o.Lease)
	if err != nil {
		letGo()
		return fmt.Errorf("match: %w", err)
	}
	res.Lease = lease
	return nil
}

// absentFar looks in G4 for key i and some of those behind it up to n that no local tier
// has now, unless all says so for no more than up to the first that is not there.
func (s *Store) absentFar(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, i, n int, all bool) (map[int]block.Found, error) {
	var keys []block.Key
	var at []int
	for j := i; j < n && len(keys) < windowKeys; j++ {
		k := keyAt(nsID, hashLen, hashes, j)
		if _, e, ok := s.table.Lookup(k); j == i || !ok || !resident(&e) {
			keys, at = append(keys, k), append(at, j)
		}
	}
	found, err := s.objects.findAll(ctx, keys, all)
	if err != nil {
		return nil, err
	}
	far := make(map[int]block.Found, len(found))
	for j := range found {
		far[at[j]] = found[j].found()
	}
	return far, nil
}

// checkHashes says how many hashes there are.
func (s *Store) checkHashes(nsID block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return 0, err
	}
	if err := ns.state.Load().CheckHashLen(hashLen); err != nil {
		return 0, err
	}
	if len(hashes)%hashLen != 0 {
		return 0, fmt.Errorf("%w: hashes: %d bytes are no multiple of %d", block.ErrInvalid, len(hashes), hashLen)
	}
	return len(hashes) / hashLen, nil
}

// hintRequest tells the policies of a request's path.
func (s *Store) hintRequest(nsID block.NamespaceID, hashLen int, hashes []byte, n, hits int, class uint8) {
	if s.opts.OnRequest != nil {
		if ns, err := s.names.byID(nsID); err == nil {
			s.opts.OnRequest(ns.get(), hashLen, hashes)
		}
	}
	path := make([]uint64, n)
	var h block.Hash
	for i := range path {
		copy(h[:], hashes[i*hashLen:(i+1)*hashLen])
		path[i] = fingerprint(nsID, &h)
	}
	r := policyRequest{path: path, hits: hits, class: class}
	s.g2.events.request(r)
	if s.g3 != nil {
		s.g3.events.request(r)
	}
}

// hintHits tells the policies that blocks were used, leaf to root.
func (s *Store) hintHits(hs []block.Handle) {
	if len(hs) == 0 {
		return
	}
	ev := make([]policyEvent, 0, len(hs))
	for i := len(hs) - 1; i >= 0; i-- {
		ev = append(ev, policyEvent{kind: evHit, h: hs[i]})
	}
	s.g2.events.hint(ev)
	if s.g3 != nil {
		s.g3.events.hint(ev)
	}
}

// Locate lists where blocks lie; see api.Store.
func (s *Store) Locate(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error) {
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return nil, fmt.Errorf("locate: %w", err)
	}
	out := make([][]block.Located, n)
	now := nowUnix()
	s.table.LookupAll(nsID, hashLen, hashes, func(i int, _ block.Handle, e *index.Entry) bool {
		if e == nil || expired(e, now) {
			return true
		}
		for ix, id := range [...]block.TierID{block.G2, block.G3} {
			if live(e, ix) {
				out[i] = append(out[i], block.Located{Tier: id, Place: e.Place[ix], Len: e.Len})
			}
		}
		return true
	})
	if s.objects != nil {
		keys := make([]block.Key, n)
		for i := range keys {
			keys[i] = keyAt(nsID, hashLen, hashes, i)
		}
		far, err := s.objects.findAll(ctx, keys, true)
		if err != nil {
			return nil, fmt.Errorf("locate: %w", err)
		}
		for i := range far {
			if far[i].why == block.Hit {
				out[i] = append(out[i], block.Located{Tier: block.G4, Len: far[i].rec.Len})
			}
		}
	}
	return out, ctx.Err()
}
