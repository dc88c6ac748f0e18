package tiers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// fetch is a block on its way from G4 to G2, from when it is looked up there. All who want
// it meet in one.
type fetch struct {
	key  block.Key
	stay bool        // it is only looked up: who wants it reads it himself
	void atomic.Bool // the block was deleted meanwhile
	lead int64       // bytes that it counts in objects.mu.lead
	// users, under objects.mu, are those who wait for it or use the block.
	users int
	done  chan struct{}
	// rec is where it lies, if it was found. h is the block in G2, with a reference that goes
	// with the last user; err is why there is none. Valid when done is closed.
	rec index.PackedRecord
	h   block.Handle
	err error
}

var (
	// errFetchVoid: the block was deleted while it was on its way up.
	errFetchVoid = fmt.Errorf("fetch from g4: %w: deleted meanwhile", block.ErrNotFound)
	// errFetchStays: the block is not to come up.
	errFetchStays = fmt.Errorf("fetch from g4: %w: it is to stay there", block.ErrNoSpace)
	// errFetchUnread: it could not be looked up by the time of the call that made the fetch.
	errFetchUnread = fmt.Errorf("fetch from g4: %w: the catalog does not answer", block.ErrUnavailable)
	// errExpired: the block's time has passed.
	errExpired = fmt.Errorf("%w: its time has passed", block.ErrNotFound)
)

// fetchRange is the most that one request reads: a range of this length is as fast as a
// connection is.
const fetchRange = 8 << 20

// leadShare is the part of G2, 1/leadShare, that may be on its way up before somebody waits
// for it. It cannot be evicted until it is there: without a bound what runs ahead takes the
// room of what is waited for.
const leadShare = 4

// farBlock is a block of G4 and what bringing it up takes.
type farBlock struct {
	key  block.Key
	slot int64
}

// start has a block brought up that no local tier has, and those ahead as far as they may be
// begun with before somebody waits for them. It returns the block's fetch, which the caller
// leaves, or nil when the block is being deleted. Blocks that lie one behind the other in an
// object are read together. ctx is for the beginning only.
func (o *objects) start(ctx context.Context, k block.Key, ahead []farBlock) *fetch {
	var mine []*fetch
	f, made, _ := o.join(k, 0)
	if made {
		mine = append(mine, f)
	}
	for _, a := range ahead {
		if _, e, there := o.s.table.Lookup(a.key); there && resident(&e) {
			continue
		}
		before, made, full := o.join(a.key, a.slot)
		if full {
			break
		}
		if made {
			mine = append(mine, before)
		}
		if before != nil {
			o.leave(before) // it comes all the same, and may be evicted then
		}
	}
	o.bring(ctx, mine)
	return f
}

// bring begins fetches that join or standing made. They go on when ctx ends, unless it ends
// before they can be looked up. It waits for nothing else.
func (o *objects) bring(ctx context.Context, fs []*fetch) {
	if len(fs) == 0 {
		return
	}
	if err := o.s.catalogReads.begin(ctx); err != nil {
		for _, f := range fs {
			o.land(f, errFetchUnread)
		}
		return
	}
	o.s.wg.Go(func() {
		// Looked up now that a delete would find the fetch.
		there := o.lookUpAll(fs)
		o.s.catalogReads.end()
		for _, run := range runs(there) {
			o.s.wg.Go(func() { o.fetch(run) })
		}
	})
}

// lookUpAll looks the blocks of fetches up, ends those that are not to come up or not there,
// and returns the others.
func (o *objects) lookUpAll(fs []*fetch) (there []*fetch) {
	why := make([]block.MissReason, len(fs))
	for i, f := range fs {
		f.rec, why[i] = o.lookUp(f.key)
	}
	// The first last: who has waited for it finds the others ended, and reads those that stay
	// with it.
	for i, f := range slices.Backward(fs) {
		switch {
		case why[i] == block.MissAbsent:
			o.land(f, fmt.Errorf("fetch from g4: %w", block.ErrNotFound))
		case why[i] == block.MissExpired:
			o.land(f, fmt.Errorf("fetch from g4: %w", errExpired))
		case why[i] != block.Hit:
			o.land(f, fmt.Errorf("fetch from g4: %w: the catalog cannot be read", block.ErrUnavailable))
		case f.stay:
			o.land(f, errFetchStays)
		default:
			there = append(there, f)
		}
	}
	return there
}

// join finds the fetch of a block, or makes one; nil when the block is being deleted, or when
// too much is on its way ahead already.
func (o *objects) join(k block.Key, lead int64) (f *fetch, won, full bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.leaving[k] > 0 {
		return nil, false, false
	}
	f = o.mu.fetches[k]
	if won = f == nil; won {
		if lead > 0 && o.mu.lead+lead > o.s.g2.capacity/leadShare {
			return nil, false, true
		}
		f = &fetch{key: k, lead: lead, done: make(chan struct{})}
		o.mu.lead += lead
		o.mu.fetches[k] = f
	}
	f.users++
	return f, won, false
}

// standing is a fetch of a block that stays in G4.
func standing(k block.Key) *fetch {
	return &fetch{key: k, stay: true, users: 1, done: make(chan struct{})}
}

// leave ends a use of a fetch.
func (o *objects) leave(f *fetch) {
	o.mu.Lock()
	f.users--
	last := f.users == 0 && o.mu.fetches[f.key] != f
	o.mu.Unlock()
	if last && f.h != 0 {
		o.s.release(f.h)
	}
}

// land ends a fetch.
func (o *objects) land(f *fetch, err error) {
	f.err = err
	o.mu.Lock()
	if o.mu.fetches[f.key] == f {
		delete(o.mu.fetches, f.key)
	}
	o.mu.lead -= f.lead
	unused := f.users == 0
	close(f.done)
	o.mu.Unlock()
	if unused && f.h != 0 {
		o.s.release(f.h)
	}
}

// await says how a fetch has ended, or why the caller does not wait for it.
func (f *fetch) await(ctx context.Context) error {
	if !f.over() {
		select {
		case <-f.done:
		case <-ctx.Done():
		}
	}
	if !f.over() || f.err == errFetchUnread && ctx.Err() != nil {
		return fmt.Errorf("fetch from g4: %w", context.Cause(ctx))
	}
	return f.err
}

// over reports whether a fetch has ended.
func (f *fetch) over() bool {
	select {
	case <-f.done:
		return true
	default:
		return false
	}
}

// runs are fetches that lie one behind the other in an object, in ranges of at most
// fetchRange, or of one block.
func runs(fs []*fetch) (out [][]*fetch) {
	slices.SortFunc(fs, func(a, b *fetch) int {
		return cmp.Or(cmp.Compare(a.rec.Object, b.rec.Object), cmp.Compare(a.rec.Offset, b.rec.Offset))
	})
	from := 0
	for i, f := range fs {
		if i == from {
			continue
		}
		first, before := &fs[from].rec, &fs[i-1].rec
		if f.rec.Object != first.Object || f.rec.Offset != memberEnd(before) || memberEnd(&f.rec)-first.Offset > fetchRange {
			out = append(out, fs[from:i])
			from = i
		}
	}
	if len(fs) > 0 {
		out = append(out, fs[from:])
	}
	return out
}

// memberEnd is where what follows a block in its object begins.
func memberEnd(r *index.PackedRecord) int64 { return r.Offset + packed.HeaderBytes + int64(r.Len) }

// fetch reads a run of blocks into slots of G2 and makes them resident there. Where G2 has
// no room a block stays where it is, and so do those behind it: who waits reads it himself.
func (o *objects) fetch(run []*fetch) {
	s := o.s
	var rs []*reservation
	var recs []*index.PackedRecord
	var payloads [][]byte
	for len(rs) < len(run) {
		f := run[len(rs)]
		r, err := o.reserve(f)
		if err != nil {
			for _, f := range run[len(rs):] {
				o.land(f, err)
			}
			break
		}
		rs, recs, payloads = append(rs, r), append(recs, &f.rec), append(payloads, r.slot[r.header:][:r.n])
	}
	if len(rs) == 0 {
		return
	}
	errs := o.read(s.life, recs, payloads)
	// Leaf to root, as puts do it: see commitOrder.
	for i := len(rs) - 1; i >= 0; i-- {
		f, r := run[i], rs[i]
		err := errs[i]
		if err == nil {
			clear(r.slot[r.header+r.n:])
			err = o.admit(f, r)
		} else {
			s.g2.free(r.place)
		}
		o.land(f, err)
	}
}

// reserve takes a slot of G2 for a block that comes up.
func (o *objects) reserve(f *fetch) (*reservation, error) {
	s := o.s
	ns, err := s.names.byID(f.key.NS)
	if err != nil {
		return nil, err
	}
	rec := &f.rec
	size, header := SlotBytes(int64(rec.Len))
	place, err := s.g2.alloc(s.life, ns.share, size, reserved)
	if err != nil {
		return nil, err
	}
	return &reservation{
		ns: ns, key: f.key, hlen: rec.HashLen, n: int64(rec.Len), place: place, slot: s.g2.slot(place, size), header: header, up: f,
		opts: block.PutOptions{Parent: rec.Parent, HasParent: rec.HasParent, Durable: block.G2},
	}, nil
}

// admit makes a block resident that has come up. Its slot is given back when it is not.
func (o *objects) admit(f *fetch, r *reservation) error {
	s := o.s
	h, used, _, err := s.admit(s.life, r, f.rec.Sum)
	if !used {
		s.g2.free(r.place)
	}
	switch {
	case err != nil && !errors.Is(err, block.ErrNotFound):
		// It is in the way of what was put meanwhile: who waits reads it without.
		return fmt.Errorf("fetch from g4: %w: %w", block.ErrNoSpace, err)
	case err != nil:
		return err
	case used:
		f.h = h
		return nil
	}
	g := s.grip(f.key) // somebody was faster
	if g.h == 0 {
		return errFetchVoid
	}
	if !live(&g.e, ixG2) {
		s.release(g.h)
		return fmt.Errorf("fetch from g4: %w: it is in g3 meanwhile", block.ErrNoSpace)
	}
	f.h = g.h
	return nil
}

// read reads blocks that lie one behind the other in one object, each into memory of its
// length, and verifies them. What is missing or damaged is looked into: see doubt.
func (o *objects) read(ctx context.Context, recs []*index.PackedRecord, payloads [][]byte) []error {
	errs := make([]error, len(recs))
	fail := func(err error) []error {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	obj, p, err := o.object(ctx, recs[0].Object)
	if err != nil {
		return fail(fmt.Errorf("read from g4: %w", err))
	}
	heads := make([]byte, len(recs)*packed.HeaderBytes)
	parts := make([][]byte, 0, 2*len(recs))
	var n int64
	for i := range recs {
		parts = append(parts, heads[i*packed.HeaderBytes:][:packed.HeaderBytes], payloads[i])
		n += packed.HeaderBytes + int64(recs[i].Len)
	}
	// What lies between may spoil an answer, or say that there is nothing: a block is not given
	// up before it was asked for once more.
	name := o.nameOf(&obj)
	read := o.speed.begin(n)
	err = p.fetch(ctx, name, recs[0].Offset, n, parts)
	if errors.Is(err, block.ErrNotFound) {
		err = p.fetch(ctx, name, recs[0].Offset, n, parts)
	}
	read.end(err == nil)
	if err != nil && !errors.Is(err, block.ErrNotFound) {
		return fail(err)
	}
	o.bytesOut.Add(n)
	for i, r := range recs {
		if errs[i] = err; err == nil {
			errs[i] = o.check(&obj, r, parts[2*i], parts[2*i+1])
		}
		if errors.Is(errs[i], block.ErrCorrupt) {
			if errs[i] = p.fetch(ctx, name, r.Offset, int64(r.Len), parts[2*i:2*i+2]); errs[i] == nil {
				errs[i] = o.check(&obj, r, parts[2*i], parts[2*i+1])
			}
		}
		if errors.Is(errs[i], block.ErrCorrupt) {
			o.s.corrupt.Add(1)
		}
		if errors.Is(errs[i], block.ErrCorrupt) || errors.Is(errs[i], block.ErrNotFound) {
			o.doubt(p, &obj, r, errs[i])
		}
	}
	return errs
}

// fetch reads n bytes of an object into parts, unverified. block.ErrNotFound when they are
// not there.
func (p *objectBucket) fetch(ctx context.Context, name packed.Name, off, n int64, parts [][]byte) error {
	err := p.do(ctx, n, func(ctx context.Context) error { return p.Read(ctx, name, off, parts) })
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("read from g4: %w", context.Cause(ctx))
	case errors.Is(err, xfer.ErrNotFound), errors.Is(err, xfer.ErrShort):
		return fmt.Errorf("read from g4: %w: %w", block.ErrNotFound, err)
	}
	return fmt.Errorf("read from g4: %w: %w", block.ErrUnavailable, err)
}

// check verifies a block of an object.
func (o *objects) check(obj *index.ObjectRecord, r *index.PackedRecord, head, payload []byte) error {
	h, err := DecodeHeader(head, packedSeal(obj.ID, r.Offset))
	if err == nil {
		err = h.differs(&SlotHeader{Digest: obj.Digest, Hash: r.Key.Hash, HashLen: uint8(r.HashLen), Gen: r.Gen, Len: r.Len, Sum: r.Sum})
	}
	if err == nil {
		if sum := block.Sum(xxh3.Hash128(payload).Bytes()); sum != r.Sum {
			err = fmt.Errorf("%w: checksum %s, want %s", block.ErrCorrupt, sum, r.Sum)
		}
	}
	if err != nil {
		return fmt.Errorf("block %s in g4: %w", r.Key.Hash.Hex(r.HashLen), err)
	}
	return nil
}

// packedSeal binds the slot header of a block to its place in an object.
func packedSeal(id [16]byte, off int64) Seal {
	return Seal{Version: headerVersion, Salt: id, Offset: off}
}

// retire drops the record of a block whose bytes are not in G4 any more, or not right. A
// copy of it in a local tier is its last one then.
func (o *objects) retire(r *index.PackedRecord, why error) {
	s := o.s
	if more, ok := s.damage.next(); ok {
		s.log.Error("block lost", "tier", "g4", "namespace", s.names.name(r.Key.NS), "hash", r.Key.Hash.Hex(r.HashLen), "err", why, "more", more)
	}
	rec, k := *r, r.Key
	o.markLeaving([]block.Key{k})
	unmark := func() {
		s.table.UpdateKey(k, func(_ block.Handle, e *index.Entry) { e.Flags &^= flagPacked })
	}
	unmark()
	s.wg.Go(func() {
		defer o.unmarkLeaving([]block.Key{k})
		err := o.ledger.do(s.life, &change{
			plan: func(v *view) error {
				now, err := v.block(k, rec.HashLen)
				if err != nil || now == nil || now.Object != rec.Object || now.Offset != rec.Offset {
					return err
				}
				return v.drop(now)
			},
			applied: func() {
				unmark() // its upload may have marked it since
				o.told(&rec, block.Damaged)
				o.sweep()
			},
		})
		if err != nil && s.life.Err() == nil {
			s.log.Warn("record of a block that is lost stays", "key", k, "err", err)
		}
	})
}

// told tells watchers of a block that has left G4.
func (o *objects) told(r *index.PackedRecord, why block.Reason) {
	ev := o.event(block.EventRemoved, r)
	_, e, there := o.s.table.Lookup(r.Key)
	ev.Reason, ev.Last = why, !there || !resident(&e)
	o.s.events.publish(ev)
}

// ride is a staging buffer with blocks that lie one behind the other in an object. It is given
// back with the last of the grips that have one.
type ride struct {
	buf  []byte
	left int
}

// share reads the block of the first of some grips into a staging buffer, verified, and those
// that lie behind it in its object and are to stay in G4 as well, as many as there is room
// for. All are one get's.
func (o *objects) share(ctx context.Context, gs []grip) {
	buf, err := o.s.staging.get(ctx)
	if err != nil {
		gs[0].failed = err
		return
	}
	v := &ride{buf: buf}
	var recs []*index.PackedRecord
	var payloads [][]byte
	for i := range gs {
		g := &gs[i]
		if g.far == nil || g.ride != nil || g.failed != nil || i > 0 && !g.far.stays() {
			break
		}
		r := &g.far.rec
		if i > 0 && (r.Object != recs[0].Object || r.Offset != memberEnd(recs[i-1]) || int(r.Len) > len(buf)) {
			break
		}
		recs, payloads = append(recs, r), append(payloads, buf[:r.Len])
		buf = buf[r.Len:]
		v.left++
		g.ride, g.bytes = v, payloads[i]
	}
	for i, err := range o.read(ctx, recs, payloads) {
		gs[i].failed = err
	}
}

// leaveRide gives a grip's part of a staging buffer back.
func (s *Store) leaveRide(g *grip) {
	if g.ride == nil {
		return
	}
	if g.ride.left--; g.ride.left == 0 {
		s.staging.put(g.ride.buf)
	}
	g.ride, g.bytes = nil, nil
}

// stays reports whether a block is not going to come up: there was no room, or it was not to.
func (f *fetch) stays() bool { return f.over() && errors.Is(f.err, block.ErrNoSpace) }

// missing reports whether it is known that there is no block to be had by a fetch.
func (f *fetch) missing() bool {
	return f.over() && f.err != nil && !errors.Is(f.err, block.ErrNoSpace)
}

// mayBeFar reports whether a block that no local tier has may be in G4.
func (g *grip) mayBeFar() bool {
	return g.h == 0 && (g.reason == block.MissAbsent || g.reason == block.MissPending)
}

// gripFar has a block that a grip misses looked for in G4: it is on its way up then, or
// stays there unless promote. made is a fetch that the caller brings.
func (o *objects) gripFar(k block.Key, g *grip, promote bool) (made *fetch) {
	if !promote {
		g.far = standing(k)
		return g.far
	}
	var mine bool
	if g.far, mine, _ = o.join(k, 0); mine {
		return g.far
	}
	return nil
}

// missedFar is why a fetch led to no block, of a key that was missed for another reason
// before. One that G4 does not have is missed for that.
func missedFar(err error, before block.MissReason) block.MissReason {
	if why := missOf(err); why != block.MissAbsent {
		return why
	}
	return before
}

// typical is about how long the blocks in G4 are.
func (o *objects) typical() int64 {
	return max(0, o.payload.Load()) / max(1, o.blocks.Load())
}

// readInto reads a block into the caller's memory; see Store.ReadInto.
func (o *objects) readInto(ctx context.Context, k block.Key, dst []byte) (r ReadResult) {
	rec, why, err := o.find(ctx, k)
	if r.Reason, r.Err = why, err; why != block.Hit {
		return r
	}
	if len(dst) < int(rec.Len) {
		r.Reason = block.MissNoRoom
		r.Err = fmt.Errorf("read %s: %w: memory of %d bytes for a block of %d", k, block.ErrInvalid, len(dst), rec.Len)
		return r
	}
	if r.Err = o.read(ctx, []*index.PackedRecord{&rec}, [][]byte{dst[:rec.Len]})[0]; r.Err != nil {
		r.Reason = missOf(r.Err)
		return r
	}
	o.hits.Add(1)
	r.Tier, r.Len, r.Sum = block.G4, rec.Len, rec.Sum
	return r
}

// agrees fails with block.ErrConflict when G4 has another block of a key that is put.
func (o *objects) agrees(ctx context.Context, r *reservation, sum block.Sum) error {
	if o == nil || r.up != nil {
		return nil
	}
	rec, why, err := o.find(ctx, r.key)
	if err != nil {
		return fmt.Errorf("put %s: %w", r.key.Hash.Hex(r.hlen), err)
	}
	if why == block.Hit && (rec.Sum != sum || int64(rec.Len) != r.n) {
		return fmt.Errorf("put %s: %w: there with %d bytes and checksum %s, put with %d and %s",
			r.key.Hash.Hex(r.hlen), block.ErrConflict, rec.Len, rec.Sum, r.n, sum)
	}
	return nil
}

// compare settles a put of a key that was there and is in no local tier; see
// Store.CompareExisting. What is in G4 is durable.
func (o *objects) compare(ctx context.Context, k block.Key, n int64, sum block.Sum) error {
	r, why, err := o.find(ctx, k)
	switch {
	case err != nil:
		return fmt.Errorf("put %s: %w", k.Hash, err)
	case why != block.Hit:
		return fmt.Errorf("put %s: %w: it was there and has left meanwhile; put it again", k.Hash, block.ErrNoSpace)
	case r.Sum != sum || int64(r.Len) != n:
		return fmt.Errorf("put %s: %w: there with %d bytes and checksum %s, put with %d and %s",
			k.Hash.Hex(r.HashLen), block.ErrConflict, r.Len, r.Sum, n, sum)
	}
	return nil
}

// lendFar brings up blocks of G4 that are to be lent, if promote says so; else they have no
// room in G2. Those that have come are held by their
// grips.
func (s *Store) lendFar(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, promote bool, grips []grip, loans []block.Loan) {
	if s.objects == nil {
		return
	}
	for from := 0; from < len(grips); from += windowKeys {
		to := min(from+windowKeys, len(grips))
		var made []*fetch
		for i := from; i < to; i++ {
			if !grips[i].mayBeFar() {
				continue
			}
			k := keyAt(nsID, hashLen, hashes, i)
			if f := s.objects.gripFar(k, &grips[i], promote && ctx.Err() == nil); f != nil {
				made = append(made, f)
			}
		}
		s.objects.bring(ctx, made)
		for i := from; i < to; i++ {
			g := &grips[i]
			f := g.far
			if f == nil {
				continue
			}
			g.far = nil
			err := f.await(ctx)
			if err == nil {
				s.known(f.h, s.table.Update(f.h, func(e *index.Entry) { e.Refs++ }))
				g.h, g.reason = f.h, block.Hit
				s.table.View(g.h, func(e *index.Entry) { g.e = *e })
				loans[i] = block.Loan{Reason: block.Hit, Tier: block.G4}
			} else {
				g.reason = missedFar(err, g.reason)
			}
			s.objects.leave(f)
		}
	}
}

// bringUpFar is bringUp for a block that no local tier has.
func (s *Store) bringUpFar(ctx context.Context, k block.Key, ahead []farBlock) (block.MissReason, block.TierID) {
	o := s.objects
	f := o.start(ctx, k, ahead[:min(len(ahead), prefetchAhead)])
	if f == nil {
		return block.MissAbsent, block.NoTier
	}
	defer o.leave(f)
	switch err := f.await(ctx); {
	case err == nil:
		return block.Hit, block.G2
	case errors.Is(err, block.ErrNotFound):
		return missOf(err), block.NoTier
	default:
		return missOf(err), block.G4
	}
}

// prefetchAhead is how many blocks of G4 a prefetch has on their way at once, beside those
// that are waited for.
const prefetchAhead = 32

// raise brings up blocks that are only in G4, and keeps them in G2 until letGo.
func (s *Store) raise(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte) (letGo func()) {
	if s.objects == nil {
		return func() {}
	}
	gs := make([]grip, len(hashes)/hashLen)
	loans := make([]block.Loan, len(gs))
	for i := range gs {
		k := keyAt(nsID, hashLen, hashes, i)
		gs[i] = s.grip(k)
	}
	s.lendFar(ctx, nsID, hashLen, hashes, true, gs, loans)
	return func() {
		for i := range gs {
			s.ungrip(&gs[i])
		}
	}
}
