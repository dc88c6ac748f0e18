package tiers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// Store is a node's blocks over its tiers, and the only orchestrator: every
// call goes through it. It is safe for concurrent use.
type Store struct {
	opts    Options
	log     *slog.Logger
	dir     *os.File // holds the lock of the data directory
	agent   *xfer.Agent
	arena   *arena.Arena // G2
	staging *staging
	table   *index.Table
	catalog *index.Catalog
	commits *committer

	catalogRoom   catalogRoom
	catalogHealth catalogHealth
	catalogReads  catalogReads
	g2, g3        *tier    // g3 is nil when there is none
	objects       *objects // G4; nil when there is none
	slabs         []*Slab  // by device number of g3
	slabNo        []uint16 // by which the catalog knows them
	opened        bool     // Open has succeeded
	// absent are the slabs of the catalog that are not here now, each with a
	// generation that nothing on it has reached.
	absent     []index.Floor
	tombstones *tombstones
	registered []xfer.DescList
	chunks     *chunks // of a partitioned G2; else nil

	names         namespaces
	reservations  reservations
	grants        grants
	leases        *Leases
	conversations conversations
	moves         moves
	events        *eventHub
	pins          pins
	prefetches    *prefetchQueue
	toG3, toG4    *admission // nil where there is no such tier
	scrubs        scrubber
	lineage       sync.Mutex // held while a block that has children gets a parent

	start     time.Time
	gen       atomic.Uint64
	firstGen  uint64 // below which all of earlier openings are
	gone      *goneSet
	misses    [block.MissRecompute + 1]atomic.Int64 // by MissReason
	removed   [block.Rejected + 1]atomic.Int64      // by Reason
	conflicts atomic.Int64
	corrupt   atomic.Int64
	damage    logRate
	mortal    atomic.Bool  // a block with a time to live was seen
	reads     atomic.Int64 // blocks being read from G3

	life     context.Context // ends with Close
	endLife  context.CancelFunc
	wg       sync.WaitGroup // all that startWork starts, the scrub, and what calls leave under way
	closing  sync.Once
	closeErr error
}

// tier is the tier of an index in an entry's arrays, nil when there is none.
func (s *Store) tier(ix int) *tier {
	if ix == ixG2 {
		return s.g2
	}
	return s.g3
}

// tiers are those that there are, nearest first.
func (s *Store) tiers() []*tier {
	if s.g3 == nil {
		return []*tier{s.g2}
	}
	return []*tier{s.g2, s.g3}
}

// ---- put: reserve, fill, commit

// Reserve takes room for a block; see api.Store.
func (s *Store) Reserve(ctx context.Context, nsID block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error) {
	var none block.Reserved
	ns, err := s.names.byID(nsID)
	if err != nil {
		return none, block.Existing{}, fmt.Errorf("reserve: %w", err)
	}
	if err := s.checkPut(ctx, ns, hashLen, h, n, &o); err != nil {
		return none, block.Existing{}, fmt.Errorf("reserve %s: %w", h.Hex(min(max(hashLen, 0), block.HashBytes)), err)
	}
	key := block.Key{NS: nsID, Hash: h}
	switch ex, ok, err := s.existing(ctx, key); {
	case err != nil:
		return none, block.Existing{}, fmt.Errorf("reserve %s: %w", h.Hex(hashLen), err)
	case ok:
		return block.Reserved{Status: block.Exists}, ex, nil
	}
	size, header := SlotBytes(n)
	place, err := s.g2.alloc(ctx, ns.share, size, reserved)
	if err != nil {
		return none, block.Existing{}, err
	}
	r := &reservation{ns: ns, key: key, hlen: hashLen, n: n, opts: o, place: place, slot: s.g2.slot(place, size), header: header}
	if err := s.reservations.add(r); err != nil {
		s.g2.free(place)
		s.g2.refused.Add(1)
		return none, block.Existing{}, err
	}
	return block.Reserved{ID: r.id, Status: block.Stored, Left: s.opts.ReserveTTL, Place: place}, block.Existing{}, nil
}

// checkPut says whether a put can be accepted at all, and fixes the hash length
// of a namespace that has none.
func (s *Store) checkPut(ctx context.Context, ns *namespace, hashLen int, h block.Hash, n int64, o *block.PutOptions) error {
	if err := s.checkLen(ns, n); err != nil {
		return err
	}
	switch o.Durable {
	case block.NoTier:
		o.Durable = block.G2
	case block.G2:
	case block.G3:
		if s.g3 == nil {
			return fmt.Errorf("%w: durable g3: this store has no NVMe tier", block.ErrUnavailable)
		}
	default:
		return fmt.Errorf("%w: durable %s: want g2 or g3", block.ErrInvalid, o.Durable)
	}
	if o.TTL < 0 {
		return fmt.Errorf("%w: ttl %v", block.ErrInvalid, o.TTL)
	}
	if o.HasParent && o.Parent == h {
		return fmt.Errorf("%w: parent: the block itself", block.ErrInvalid)
	}
	return s.names.fixHashLen(ctx, ns, hashLen)
}

// checkLen says whether the namespace and G2 have blocks of n bytes.
func (s *Store) checkLen(ns *namespace, n int64) error {
	desc := &ns.state.Load().Desc
	if err := desc.CheckLen(n); err != nil {
		return err
	}
	if size, _ := SlotBytes(n); size > s.g2.devs[0].slots.MaxSlot() {
		return fmt.Errorf("%w: payload of %d bytes: the DRAM tier's largest slot has %d", block.ErrInvalid, n, s.g2.devs[0].slots.MaxSlot())
	}
	return nil
}

// existing looks for a block that a put would make.
func (s *Store) existing(ctx context.Context, k block.Key) (ex block.Existing, there bool, err error) {
	h, e, ok := s.table.Lookup(k)
	if !ok || !resident(&e) {
		r, why, err := s.objects.find(ctx, k)
		return block.Existing{Len: r.Len, Sum: r.Sum}, why == block.Hit, err
	}
	if expired(&e, nowUnix()) {
		s.expire(h)
		return block.Existing{}, false, nil
	}
	return block.Existing{Len: e.Len, Sum: e.Sum}, true, nil
}

// Fill writes bytes into a reservation; see api.Store.
func (s *Store) Fill(ctx context.Context, id uint64, off int64, p []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r := s.reservations.get(id)
	if r == nil {
		return fmt.Errorf("fill reservation %d: %w", id, block.ErrLeaseExpired)
	}
	if err := r.fill(off, p); err != nil {
		return err
	}
	s.reservations.renew(r)
	return nil
}

// admit puts a filled slot into the table, which makes it visible. used says
// that the slot is the block's now; when it is not, the block was there with
// the same bytes, or err says why not. durable says that the block still has to
// go to G3, and that a reference to it is held for that.
func (s *Store) admit(ctx context.Context, r *reservation, sum block.Sum) (h block.Handle, used, durable bool, err error) {
	if err := s.objects.agrees(ctx, r, sum); err != nil {
		if errors.Is(err, block.ErrConflict) {
			s.conflicts.Add(1)
		}
		return 0, false, false, err
	}
	r.ns.gate.RLock()
	defer r.ns.gate.RUnlock()
	ns := r.ns.state.Load()
	if r.up != nil && r.up.rec.Epoch != ns.Epoch {
		return 0, false, false, errFetchVoid
	}
	parent, depth := s.nameParent(r)
	grown := parent != 0 && s.isNamed(r.key)
	if grown {
		// From the check until the link nobody else may link such a block.
		s.lineage.Lock()
		defer s.lineage.Unlock()
		if err := s.checkParent(r, parent); err != nil {
			s.unnameParent(parent, false)
			return 0, false, false, err
		}
	}
	ttl := r.opts.TTL
	if ttl == 0 {
		ttl = ns.TTL
	}
	var expires uint32
	switch {
	case r.up != nil:
		expires = uint32(r.up.rec.Expires)
	case ttl > 0:
		expires = expiry(ttl)
	}
	var e0 index.Entry
	var linked, stale bool
	// A parent that the block has already is another one's than the put names, or
	// none is named: its hash cannot be looked up under the block's lock.
	var known, held block.Handle
	var hash block.Hash
	for {
		stale = false
		unknown := false
		h = s.table.Upsert(r.key, r.hlen, func(h block.Handle, e *index.Entry, _ bool) {
			if r.up != nil && r.up.void.Load() {
				err = errFetchVoid
				return
			}
			if resident(e) {
				if stale = expired(e, nowUnix()); stale {
					return
				}
				if e.Sum != sum || int64(e.Len) != r.n {
					err = fmt.Errorf("put %s: %w: there with %d bytes and checksum %s, put with %d and %s",
						r.key.Hash.Hex(r.hlen), block.ErrConflict, e.Len, e.Sum, r.n, sum)
					return
				}
			} else if stale = dirty(e); stale {
				return
			} else if unknown = e.Parent != 0 && e.Parent != parent && e.Parent != known; unknown {
				known = e.Parent
				e.Ops++ // keeps the parent, too
				return
			} else {
				used = true
				e.Sum, e.Len = sum, uint32(r.n)
				e.Expires, e.Born = expires, s.age()
				e.Place[ixG2], e.State[ixG2] = r.place, index.SlotResident
				// One that was named since is stored without a parent, unchecked as it is.
				if e.Parent == 0 && parent != 0 && (grown || e.Named == 0) {
					e.Parent, e.Depth, linked = parent, depth, true
				}
				e.Refs++ // until its slot is known to be its own
				if r.up != nil {
					e.Flags |= flagPacked
				}
			}
			if r.opts.Durable == block.G3 && !live(e, ixG3) {
				durable = true
				e.Refs++
			}
			switch {
			case used && durable:
				e.Flags |= flagTentative
			case !durable:
				e.Flags &^= flagTentative
			}
			if used {
				if parent != 0 && e.Parent == parent {
					hash = r.opts.Parent
				}
				s.arrive(h, e, ixG2, hash)
				e0 = *e
			}
		})
		switch {
		case unknown:
			s.unhold(held)
			held = h
			s.table.View(known, func(p *index.Entry) { hash = p.Hash })
			continue
		case stale:
			s.expire(h)
			continue
		}
		break
	}
	s.unhold(held)
	if parent != 0 && !linked {
		s.unnameParent(parent, used && e0.Parent == parent)
	}
	switch {
	case h == 0:
		return 0, false, false, fmt.Errorf("put %s: %w: the resident table cannot grow", r.key.Hash.Hex(r.hlen), block.ErrNoSpace)
	case err == errFetchVoid:
		s.settle(h, func(*index.Entry) {}) // which this may have made
		return 0, false, false, err
	case err != nil:
		s.conflicts.Add(1)
		return h, false, false, err
	case used:
		if expires != 0 {
			s.mortal.Store(true)
		}
		if !linked && e0.Parent != 0 && e0.Parent != parent {
			s.kid(e0.Parent, ixG2, 1)
		}
		s.g2.own(r.place, h)
		if r.up == nil { // else it is the fetch's
			s.release(h)
		}
	}
	return h, used, durable, nil
}

// withdraw takes a block out again whose put failed, unless another put of it was
// answered. The caller holds a reference.
func (s *Store) withdraw(h block.Handle) {
	var k block.Key
	s.table.View(h, func(e *index.Entry) { k = block.Key{NS: e.NS, Hash: e.Hash} })
	s.remove(k, block.Discarded, &removals{erase: true}, func(now block.Handle, e *index.Entry) bool {
		return now == h && e.Flags&flagTentative != 0 && !live(e, ixG3)
	})
}

// isNamed reports whether children know a block as their parent: only then can
// it be its own ancestor.
func (s *Store) isNamed(k block.Key) bool {
	_, e, ok := s.table.Lookup(k)
	return ok && e.Named > 0
}

// maxAncestors is how far up checkParent looks: deeper than any prompt.
const maxAncestors = 1 << 20

// checkParent refuses a parent that descends from the block: the two would keep
// each other in the store for ever.
func (s *Store) checkParent(r *reservation, parent block.Handle) error {
	h, _, _ := s.table.Lookup(r.key)
	up := parent
	for range maxAncestors {
		if up == 0 {
			return nil
		}
		if up == h {
			break
		}
		at := up
		up = 0
		s.table.View(at, func(e *index.Entry) { up = e.Parent })
	}
	return fmt.Errorf("put %s: %w: parent %s descends from the block", r.key.Hash.Hex(r.hlen), block.ErrInvalid, r.opts.Parent.Hex(r.hlen))
}

// nameParent finds or makes the entry of a reservation's parent, names it and
// counts the child that is about to come into G2, so that the parent is not
// evicted before it.
func (s *Store) nameParent(r *reservation) (h block.Handle, depth uint32) {
	if !r.opts.HasParent {
		return 0, 0
	}
	h = s.table.Upsert(block.Key{NS: r.key.NS, Hash: r.opts.Parent}, r.hlen, func(h block.Handle, e *index.Entry, _ bool) {
		e.Named++
		e.Kids[ixG2]++
		if e.Kids[ixG2] == 1 {
			s.g2.events.push(policyEvent{kind: evLeaf, h: h})
		}
		depth = e.Depth + r.ns.state.Load().Desc.TokensPerBlock
	})
	return h, depth
}

// unnameParent takes back what nameParent did, but for the child's count when it
// is kept.
func (s *Store) unnameParent(h block.Handle, keepKid bool) {
	if !keepKid {
		s.kid(h, ixG2, -1)
	}
	s.settle(h, func(e *index.Entry) { e.Named-- })
}

// unhold lets go of an entry that admit kept, if any.
func (s *Store) unhold(h block.Handle) {
	if h != 0 {
		s.settle(h, func(e *index.Entry) { e.Ops-- })
	}
}

// CompareExisting settles a put of a key that is there; see api.Store.
func (s *Store) CompareExisting(ctx context.Context, nsID block.NamespaceID, h block.Hash, n int64, sum block.Sum, o block.PutOptions) error {
	if o.Durable == block.G3 && s.g3 == nil {
		return fmt.Errorf("put %s: %w: durable g3: this store has no NVMe tier", h, block.ErrUnavailable)
	}
	var err error
	var held block.Handle
	there := false
	s.table.UpdateKey(block.Key{NS: nsID, Hash: h}, func(hd block.Handle, e *index.Entry) {
		if !resident(e) || expired(e, nowUnix()) {
			return
		}
		there = true
		if e.Sum != sum || int64(e.Len) != n {
			err = fmt.Errorf("put %s: %w: there with %d bytes and checksum %s, put with %d and %s",
				h.Hex(int(e.HashLen)), block.ErrConflict, e.Len, e.Sum, n, sum)
			return
		}
		if o.Durable == block.G3 && !live(e, ixG3) {
			held = hd
			e.Refs++
			return
		}
		e.Flags &^= flagTentative
	})
	if !there && s.objects != nil {
		there = true
		if err = s.objects.compare(ctx, block.Key{NS: nsID, Hash: h}, n, sum); !errors.Is(err, block.ErrConflict) {
			return err
		}
	}
	switch {
	case err != nil:
		s.conflicts.Add(1)
		return err
	case !there:
		return fmt.Errorf("put %s: %w: it was there and has left meanwhile; put it again", h, block.ErrNoSpace)
	case held != 0:
		err = s.copyTo(ctx, s.g3, []block.Handle{held})[0]
		if err != nil && ctx.Err() == nil {
			s.withdraw(held)
		}
		s.release(held)
		if err != nil {
			return fmt.Errorf("commit to g3: %w", err)
		}
	}
	return nil
}
