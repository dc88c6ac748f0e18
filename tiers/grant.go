package tiers

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// grantShare is the part of G2 that grants may take, 1/grantShare, so that those
// that nobody fills leave room for puts of other kinds. One is given in any case.
const grantShare = 4

// grant is a slot of G2 that somebody fills for a block that has no key yet.
type grant struct {
	ns     *namespace
	n      int64 // payload bytes that there is room for
	place  block.Place
	slot   []byte // header block, room for the payload, padding
	header int64
	class  int64 // bytes of the slot
}

// grants are the open ones, by id.
type grants struct {
	max      int
	maxBytes int64
	mu       struct {
		sync.Mutex
		byID  map[uint64]*grant
		bytes int64 // of their slots
	}
}

func (g *grants) init(maxGrants int, maxBytes int64) {
	g.max, g.maxBytes = maxGrants, maxBytes
	g.mu.byID = map[uint64]*grant{}
}

// full says why there may be no grant of n more bytes, nil when there may.
func (g *grants) full(n int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.fullLocked(n)
}

func (g *grants) fullLocked(n int64) error {
	switch open := len(g.mu.byID); {
	case open >= g.max:
		return fmt.Errorf("%w: %d grants are open", block.ErrNoSpace, open)
	case open > 0 && n > g.maxBytes-g.mu.bytes:
		return fmt.Errorf("%w: %d grants have %d of at most %d bytes", block.ErrNoSpace, open, g.mu.bytes, g.maxBytes)
	}
	return nil
}

// add opens a grant and returns its id.
func (g *grants) add(v *grant) (id uint64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fullLocked(v.class); err != nil {
		return 0, err
	}
	for id == 0 || g.mu.byID[id] != nil {
		id = randomID()
	}
	g.mu.byID[id] = v
	g.mu.bytes += v.class
	return id, nil
}

// take closes a grant and returns it, or nil when there is none.
func (g *grants) take(id uint64) *grant {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := g.mu.byID[id]
	if v != nil {
		delete(g.mu.byID, id)
		g.mu.bytes -= v.class
	}
	return v
}

func (g *grants) count() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return int64(len(g.mu.byID))
}

// Grant takes up to count places of n payload bytes each in G2, for blocks of a
// namespace whose keys are not known yet. It waits for room for the first one only.
// They stay until each is put or aborted, and count as reservations. Errors:
// ErrNotFound for the namespace; ErrInvalid for a length that the namespace or G2
// has no blocks of, or no count; ErrNoSpace when there is no room, and when there
// are as many as may be (Options.MaxReservations, and a quarter of G2's bytes).
func (s *Store) Grant(ctx context.Context, nsID block.NamespaceID, n int64, count int) ([]block.Grant, error) {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return nil, fmt.Errorf("grant: %w", err)
	}
	if count < 1 {
		return nil, fmt.Errorf("grant: %w: count %d, want at least 1", block.ErrInvalid, count)
	}
	if err := s.checkLen(ns, n); err != nil {
		return nil, fmt.Errorf("grant: %w", err)
	}
	size, header := SlotBytes(n)
	var out []block.Grant
	for len(out) < count {
		// Asked before there is room, so that none is made for a grant that is refused.
		if err = s.grants.full(size); err != nil {
			break
		}
		var place block.Place
		if len(out) == 0 {
			if place, err = s.g2.alloc(ctx, ns.share, size, reserved); err != nil {
				return nil, fmt.Errorf("grant: %w", err)
			}
		} else if p, ok := s.g2.tryAlloc(ns.share, size, reserved); ok {
			place = p
		} else {
			break
		}
		v := &grant{ns: ns, n: n, place: place, slot: s.g2.slot(place, size), header: header, class: s.g2.class(place)}
		var id uint64
		if id, err = s.grants.add(v); err != nil {
			s.g2.free(place)
			break
		}
		chunk, off := s.inMemory(place, header)
		out = append(out, block.Grant{ID: id, Mem: v.slot[header:][:n:n], Chunk: chunk, Offset: off})
	}
	if len(out) == 0 {
		s.g2.refused.Add(1)
		return nil, fmt.Errorf("grant: %w", err)
	}
	return out, nil
}

// AbortGrants gives grants back; unknown ones are ignored. Whoever calls it fills them
// no more.
func (s *Store) AbortGrants(ids []uint64) {
	for _, id := range ids {
		if g := s.grants.take(id); g != nil {
			s.g2.free(g.place)
		}
	}
}

// PutGranted makes blocks of grants that are filled, in the order given, as durable
// as each put asks for; only then does it return. One result each. The grants are
// used up, whatever the result: Stored, or Exists when the key is there with the
// same bytes.
//
// The checksum is the caller's, who has computed it: the bytes are not read for it
// again. Where others map the memory they can still change them, and then whoever
// verifies finds the block damaged.
//
// Errors: ErrLeaseExpired (no such grant), ErrInvalid (also for a key of another
// namespace than the grant's, and for more bytes than it has), ErrConflict,
// ErrNoSpace, ErrUnavailable.
func (s *Store) PutGranted(ctx context.Context, puts []block.GrantPut) []block.CommitResult {
	res := make([]block.CommitResult, len(puts))
	rs := make([]*reservation, len(puts))
	for i := range puts {
		rs[i], res[i].Err = s.redeem(ctx, &puts[i])
	}
	s.commit(ctx, rs, res, func(i int) (block.Sum, error) {
		s.fit(rs[i])
		return puts[i].Sum, nil
	})
	return res
}

// redeem takes the grant of a put and makes a reservation of it that is filled.
func (s *Store) redeem(ctx context.Context, p *block.GrantPut) (*reservation, error) {
	g := s.grants.take(p.Grant)
	if g == nil {
		return nil, fmt.Errorf("put by grant %016x: %w", p.Grant, block.ErrLeaseExpired)
	}
	o := p.PutOptions
	var err error
	switch {
	case p.Key.NS != g.ns.id:
		err = fmt.Errorf("%w: key of namespace %d, the grant is one of %d", block.ErrInvalid, p.Key.NS, g.ns.id)
	case p.Len > g.n:
		err = fmt.Errorf("%w: payload of %d bytes, the grant has %d", block.ErrInvalid, p.Len, g.n)
	default:
		err = s.checkPut(ctx, g.ns, p.Hlen, p.Key.Hash, p.Len, &o)
	}
	if err != nil {
		s.g2.free(g.place)
		return nil, fmt.Errorf("put %s: %w", p.Key.Hash.Hex(min(max(p.Hlen, 0), block.HashBytes)), err)
	}
	return &reservation{ns: g.ns, key: p.Key, hlen: p.Hlen, n: p.Len, opts: o, place: g.place, slot: g.slot, header: g.header}, nil
}

// fit makes a reservation's slot what one of its payload's length is, which may
// have come shorter than there was room for: the header is as long as it should be,
// what is behind the payload is clear, and where much of the slot would be wasted
// the block gets a smaller one, if there is any.
func (s *Store) fit(r *reservation) {
	size, header := SlotBytes(r.n)
	payload := r.slot[r.header:][:r.n]
	if class := s.g2.class(r.place); (class-size)*slotWasteShare > class {
		if to, ok := s.g2.tryAlloc(r.ns.share, size, reserved); ok && s.g2.class(to) < class {
			r.slot = s.g2.slot(to, size)
			copy(r.slot[header:], payload)
			s.g2.free(r.place)
			r.place, payload = to, r.slot[header:]
		} else if ok {
			s.g2.free(to)
		}
	}
	if r.slot = r.slot[:size:size]; &payload[0] != &r.slot[header] {
		copy(r.slot[header:], payload) // to where a shorter header ends
	}
	r.header = header
	clear(r.slot[header+r.n:])
}
