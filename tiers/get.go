package tiers

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer"
)

// A get works through its keys in windows: while one is handed out, the blocks
// of the next that are in G3 are on their way up.
const (
	windowKeys  = 64
	windowBytes = 16 << 20
)

// grip is a block that a get holds a reference on.
type grip struct {
	h      block.Handle // 0: a miss
	e      index.Entry
	reason block.MissReason
	up     *move // the copy from G3 that it waits for
	// far is its way up from G4. When that has led to G2, h is the block by the reference
	// that the fetch holds.
	far *fetch
	// ride holds the bytes of a block that stays in G4, once they are read; failed is why they
	// could not be.
	ride   *ride
	bytes  []byte
	failed error
}

// near reports whether serving the block waits for nothing.
func (g *grip) near() bool {
	if g.far != nil {
		return g.far.missing()
	}
	return g.h == 0 || g.up == nil && live(&g.e, ixG2)
}

// Get reads blocks in order; see api.Store.
func (s *Store) Get(ctx context.Context, nsID block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return fmt.Errorf("get: %w", err)
	}
	if err := ns.state.Load().CheckHashLen(hashLen); err != nil {
		return fmt.Errorf("get: %w", err)
	}
	for i := range want {
		if w := &want[i]; w.Offset < 0 || w.Length < 0 {
			return fmt.Errorf("get %s: %w: range %d:%d", w.Hash.Hex(hashLen), block.ErrInvalid, w.Offset, w.Length)
		}
	}
	if o.Plan != nil {
		return s.getPlanned(ctx, ns, nsID, hashLen, want, o, use)
	}
	var hits []block.Handle
	var cur, next []grip
	defer func() {
		for _, g := range cur {
			s.ungrip(&g)
		}
		for _, g := range next {
			s.ungrip(&g)
		}
	}()
	taken := 0
	take := func() []grip {
		w := s.gripWindow(ctx, nsID, want[taken:], o)
		taken += len(w)
		return w
	}
	cur = take()
	for i := 0; i < len(want); {
		next = take()
		held := 0 // the first of cur that is held
		for j := range cur {
			g := &cur[j]
			holds := j+1 < len(cur) && g.near() && cur[j+1].near()
			err := s.serve(ctx, nsID, hashLen, &want[i], cur[j:], o, func(p block.Payload) error {
				p.Held = holds
				return use(i, p)
			})
			if g.h != 0 && !o.Quiet {
				hits = append(hits, g.h)
			}
			if err != nil {
				return err
			}
			i++
			if holds {
				continue
			}
			for ; held <= j; held++ {
				s.ungrip(&cur[held])
			}
		}
		cur, next = next, nil
	}
	s.hintHits(hits)
	return nil
}

// gripWindow takes references on the next keys and sends for those in G3 and G4.
func (s *Store) gripWindow(ctx context.Context, nsID block.NamespaceID, want []block.Wanted, o block.GetOptions) []grip {
	var w []grip
	var bytes int64
	var low []block.Handle
	var at []int // in w
	var made []*fetch
	for i := 0; i < len(want) && len(w) < windowKeys && bytes < windowBytes; i++ {
		k := block.Key{NS: nsID, Hash: want[i].Hash}
		g := s.grip(k)
		if s.objects != nil && g.mayBeFar() {
			if f := s.objects.gripFar(k, &g, !o.NoPromote); f != nil {
				made = append(made, f)
			}
			bytes += s.objects.typical() // before it is looked up its length is not known
		} else if g.h != 0 {
			bytes += int64(g.e.Len)
			if !live(&g.e, ixG2) && !o.NoPromote {
				low, at = append(low, g.h), append(at, i)
			}
		}
		w = append(w, g)
	}
	for j, m := range s.launch(s.g2, low) {
		w[at[j]].up = m
	}
	if s.objects != nil {
		s.objects.bring(ctx, made)
	}
	return w
}

// grip takes a reference on a block that can be read.
func (s *Store) grip(k block.Key) (g grip) {
	g.reason = block.MissAbsent
	now := nowUnix()
	s.table.UpdateKey(k, func(h block.Handle, e *index.Entry) {
		switch {
		case !resident(e):
			if e.State[ixG2] == index.SlotFilling {
				g.reason = block.MissPending
			}
		case expired(e, now):
			g.reason = block.MissExpired
		default:
			e.Refs++
			g.h, g.e, g.reason = h, *e, block.Hit
		}
	})
	if g.reason == block.MissAbsent && s.reservations.open.Load() > 0 && s.reservations.isPending(k) {
		g.reason = block.MissPending
	}
	return g
}

// ungrip gives the reference back. It is safe to call twice.
func (s *Store) ungrip(g *grip) {
	s.leaveRide(g)
	switch {
	case g.far != nil:
		s.objects.leave(g.far)
	case g.h != 0:
		s.release(g.h)
	}
	g.h, g.far = 0, nil
}

// serve hands the first of some gripped blocks to use: from its slot in G2, where the read
// from G3 has brought it, or from a staging buffer when G2 had no room for it.
func (s *Store) serve(ctx context.Context, nsID block.NamespaceID, hashLen int, w *block.Wanted, gs []grip, o block.GetOptions, use func(block.Payload) error) (err error) {
	g := &gs[0]
	miss := func(r block.MissReason) error {
		s.missed(block.Key{NS: nsID, Hash: w.Hash}, r)
		return use(block.Payload{Reason: r})
	}
	if g.far != nil {
		served, why, err := s.serveFar(ctx, hashLen, w, gs, use)
		switch {
		case served || err != nil:
			return err
		case why != block.Hit:
			return miss(why)
		}
	}
	if g.h == 0 {
		return miss(g.reason)
	}
	n, err := lengthWanted(w, hashLen, g.e.Len)
	if err != nil {
		return err
	}
	p := block.Payload{Tier: block.G2, Total: g.e.Len, Sum: g.e.Sum}
	inPieces := o.Pieces && n > pieceBytes
	if g.far != nil {
		p.Tier = block.G4
	}
	if g.up != nil {
		p.Tier = block.G3
		if inPieces {
			if served, why, err := s.serveRising(ctx, g, p, w.Offset, n, use); served {
				if err == nil && why != block.Hit {
					err = miss(why)
				}
				return err
			}
		}
		switch err := g.up.await(ctx, s.g2); {
		case err == nil:
			s.table.View(g.h, func(e *index.Entry) { g.e.Place, g.e.State = e.Place, e.State })
		case errors.Is(err, block.ErrNoSpace):
			// No room in G2: serve it without keeping it there.
		default:
			return miss(missOf(err))
		}
	}
	size, header := SlotBytes(int64(g.e.Len))
	switch {
	case live(&g.e, ixG2):
		p.Bytes = s.g2.slot(g.e.Place[ixG2], size)[header+w.Offset:][:n]
		// Whoever gets a part cannot check it, and not all who get a whole block do.
		verify := o.Verify || s.exposed(g.e.Place[ixG2]) && (!o.Pieces || n < int64(g.e.Len))
		if verify && !s.intact(g.e.Place[ixG2], &g.e) {
			s.damagedG2(g.h, &g.e)
			return miss(block.MissCorrupt)
		}
	case inPieces:
		p.Tier = block.G3
		why, err := s.serveStaged(ctx, g, p, w.Offset, n, use)
		if err == nil && why != block.Hit {
			err = miss(why)
		}
		return err
	default:
		v, err := s.stage(ctx, g)
		if err != nil {
			return miss(missOf(err))
		}
		defer s.part(v)
		p.Tier = block.G3
		p.Bytes = v.buf[header+w.Offset:][:n]
	}
	s.countHit(p.Tier, n)
	s.usePrefetched(g.h, &g.e)
	if p.Tier == block.G2 && n >= speedBlock {
		read := s.g2.speed.begin(n)
		read.alone = false // of blocks that are handed out together the last one takes the time of all
		defer func() { read.end(err == nil) }()
	}
	return use(p)
}

// serveFar waits until the first of some gripped blocks, one of G4, has come up to G2, where
// the grip then has it, or hands it to use from a staging buffer when G2 has no room for it.
// A miss says why neither.
func (s *Store) serveFar(ctx context.Context, hashLen int, w *block.Wanted, gs []grip, use func(block.Payload) error) (served bool, why block.MissReason, err error) {
	g := &gs[0]
	switch err := g.far.await(ctx); {
	case err == nil:
		deleted := false
		s.table.View(g.far.h, func(e *index.Entry) { g.e, deleted = *e, e.Flags&flagDeleted != 0 })
		if deleted || !live(&g.e, ixG2) {
			return false, block.MissAbsent, nil
		}
		g.h = g.far.h
		return false, block.Hit, nil
	case !errors.Is(err, block.ErrNoSpace):
		return false, missedFar(err, g.reason), nil
	}
	r := &g.far.rec
	n, err := lengthWanted(w, hashLen, r.Len)
	if err != nil {
		return false, block.Hit, err
	}
	if g.ride == nil && g.failed == nil {
		s.objects.share(ctx, gs)
	}
	if g.failed != nil {
		return false, missOf(g.failed), nil
	}
	s.countHit(block.G4, n)
	return true, block.Hit, use(block.Payload{Tier: block.G4, Total: r.Len, Sum: r.Sum, Bytes: g.bytes[w.Offset:][:n]})
}

// lengthWanted is how many bytes are wanted of a block of that length.
func lengthWanted(w *block.Wanted, hashLen int, length uint32) (int64, error) {
	rest := int64(length) - w.Offset
	if rest < 0 || w.Length > rest {
		return 0, fmt.Errorf("get %s: %w: range %d:%d goes past the end at %d", w.Hash.Hex(hashLen), block.ErrInvalid, w.Offset, w.Length, length)
	}
	if w.Length == 0 {
		return rest, nil
	}
	return w.Length, nil
}

// countHit counts a hit in a tier, of n bytes.
func (s *Store) countHit(id block.TierID, n int64) {
	if id == block.G4 {
		s.objects.hits.Add(1)
		return
	}
	t := s.tier(index.TierIndex(id))
	t.hits.Add(1)
	t.bytesOut.Add(n)
}

// missOf says which miss an error is.
func missOf(err error) block.MissReason {
	switch {
	case errors.Is(err, block.ErrCorrupt):
		return block.MissCorrupt
	case errors.Is(err, errExpired):
		return block.MissExpired
	case errors.Is(err, block.ErrNotFound):
		return block.MissAbsent
	case errors.Is(err, block.ErrNoSpace):
		return block.MissNoRoom
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, xfer.ErrCanceled):
		return block.MissDeadline
	}
	return block.MissUnavailable
}
