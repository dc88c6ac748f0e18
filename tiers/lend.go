package tiers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// Lend brings blocks up to G2 where they are not, and leases those that are there
// to the session for d: until the lease ends they stay where Mem says, also when
// they are deleted meanwhile. One loan for each key; what has no room in G2, or with
// o.NoPromote is not there, is a miss with MissNoRoom, to be got by Get. The lease is
// zero when nothing is lent. The checksum of what came up is verified, with o.Verify
// that of the others too. When ctx ends, what has not come up is a miss with
// MissDeadline. Errors: ErrNotFound for the namespace; ErrInvalid; ErrNoSpace when
// there are as many leases as may be.
func (s *Store) Lend(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, o block.GetOptions, d time.Duration, session uint64) ([]block.Loan, block.Lease, error) {
	n, err := s.checkHashes(nsID, hashLen, hashes)
	if err != nil {
		return nil, block.Lease{}, fmt.Errorf("lend: %w", err)
	}
	if d <= 0 || d > maxLease {
		return nil, block.Lease{}, fmt.Errorf("lend: %w: lease %v, want more than 0 and at most %v", block.ErrInvalid, d, maxLease)
	}
	grips := make([]grip, n)
	var low []block.Handle
	var at []int
	for i := range grips {
		k := keyAt(nsID, hashLen, hashes, i)
		g := &grips[i]
		if *g = s.grip(k); g.h != 0 && !live(&g.e, ixG2) && !o.NoPromote {
			low, at = append(low, g.h), append(at, i)
		}
	}
	loans := make([]block.Loan, n)
	s.lendFar(ctx, nsID, hashLen, hashes, !o.NoPromote, grips, loans)
	for j, err := range s.bringAllUp(ctx, low) {
		loans[at[j]] = block.Loan{Reason: missOf(err), Tier: block.G3}
		if err == nil {
			loans[at[j]].Reason = block.Hit
		}
	}
	var held, used []block.Handle
	for i := range grips {
		g := &grips[i]
		if g.h != 0 {
			used = append(used, g.h)
		}
		if s.lend(g, o, &loans[i]); loans[i].Reason == block.Hit {
			held = append(held, g.h)
			continue
		}
		k := keyAt(nsID, hashLen, hashes, i)
		s.missed(k, loans[i].Reason)
		if g.h != 0 {
			s.release(g.h)
		}
	}
	if !o.Quiet {
		s.hintHits(used)
	}
	if len(held) == 0 {
		return loans, block.Lease{}, nil
	}
	lease, err := s.leases.Grant(session, held, d)
	if err != nil {
		for _, h := range held {
			s.release(h)
		}
		return nil, block.Lease{}, fmt.Errorf("lend: %w", err)
	}
	return loans, lease, nil
}

// bringAllUp copies blocks to G2, some at a time, so that little goes on when ctx ends,
// and until there is no room for any more.
func (s *Store) bringAllUp(ctx context.Context, hs []block.Handle) (errs []error) {
	for len(hs) > 0 && ctx.Err() == nil {
		n := min(windowKeys, len(hs))
		some := s.copyTo(ctx, s.g2, hs[:n])
		errs, hs = append(errs, some...), hs[n:]
		if !slices.ContainsFunc(some, func(err error) bool { return !errors.Is(err, block.ErrNoSpace) }) {
			break
		}
	}
	left := fmt.Errorf("copy to g2: %w", block.ErrNoSpace)
	if ctx.Err() != nil {
		left = fmt.Errorf("copy to g2: %w", context.Cause(ctx))
	}
	for range hs {
		errs = append(errs, left)
	}
	return errs
}

// lend says where a block that is held lies in G2, or why it does not. When it was
// to be brought up, the loan has the tier that it was in, and how that ended.
func (s *Store) lend(g *grip, o block.GetOptions, l *block.Loan) {
	up := l.Tier != block.NoTier
	switch {
	case g.h == 0:
		*l = block.Loan{Reason: g.reason}
		return
	case l.Reason != block.Hit:
		*l = block.Loan{Reason: l.Reason}
		return
	case up:
		deleted := false
		s.table.View(g.h, func(e *index.Entry) {
			g.e.Place, g.e.State, deleted = e.Place, e.State, e.Flags&flagDeleted != 0
		})
		if deleted {
			*l = block.Loan{Reason: block.MissAbsent}
			return
		}
	}
	if !live(&g.e, ixG2) { // it may not come up, or another reader has found it damaged since
		*l = block.Loan{Reason: block.MissNoRoom}
		return
	}
	size, header := SlotBytes(int64(g.e.Len))
	mem := s.g2.slot(g.e.Place[ixG2], size)[header:][:g.e.Len:g.e.Len]
	if o.Verify && !up && !s.intact(g.e.Place[ixG2], &g.e) {
		s.damagedG2(g.h, &g.e)
		*l = block.Loan{Reason: block.MissCorrupt}
		return
	}
	if !up {
		l.Tier = block.G2
	}
	l.Len, l.Sum, l.Mem = g.e.Len, g.e.Sum, mem
	l.Chunk, l.Offset = s.inMemory(g.e.Place[ixG2], header)
	s.countHit(l.Tier, int64(g.e.Len))
	s.usePrefetched(g.h, &g.e)
}
