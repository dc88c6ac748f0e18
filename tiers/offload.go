package tiers

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/tiers/packed"
)

const (
	// uploadDepth is how many objects go up side by side.
	uploadDepth = 8
	// objectTarget is the length from which on an object takes in no further sequence.
	objectTarget = 4 << 20
	// maxObject is the most bytes of slots that go into one object.
	maxObject = 32 << 20
)

// parcel is a block that is to go into an object. A reference is held on it.
type parcel struct {
	h      block.Handle
	e      index.Entry
	parent block.Hash
	has    bool // a parent
	at     int  // in the list that offload was given
	rec    index.PackedRecord
	err    error
}

// offload writes blocks of a tier, on each of which the caller holds a reference, into
// objects, those that G4 does not have. It returns one error for each, nil when G4 has the
// block, durably recorded. Until then it is where it was. The bytes under way are bounded:
// who offloads waits, until ctx ends; what is under way may succeed still.
func (o *objects) offload(ctx context.Context, t *tier, hs []block.Handle) []error {
	errs := make([]error, len(hs))
	var left []*parcel
	for i, h := range hs {
		p := &parcel{h: h, at: i}
		if errs[i] = o.lookAt(ctx, p); errs[i] == nil && p.e.Flags&flagPacked == 0 {
			left = append(left, p)
		}
	}
	all := loads(left)
	over := make([]chan struct{}, len(all)) // nil: not begun
	turns := make(chan struct{}, uploadDepth)
	for i := 0; i < len(all) && ctx.Err() == nil; i++ {
		load, done := all[i], make(chan struct{})
		select {
		case turns <- struct{}{}:
		case <-ctx.Done():
			continue
		}
		for _, p := range load { // the caller may leave
			o.s.known(p.h, o.s.table.Update(p.h, func(e *index.Entry) { e.Refs++ }))
		}
		over[i] = done
		o.s.wg.Go(func() {
			o.upload(ctx, t, load)
			for _, p := range load {
				o.s.release(p.h)
			}
			<-turns
			close(done)
		})
	}
	for i, load := range all {
		ended := false
		if over[i] != nil {
			select {
			case <-over[i]:
				ended = true
			case <-ctx.Done():
			}
		}
		for _, p := range load {
			if ended {
				errs[p.at] = p.err
			} else {
				errs[p.at] = fmt.Errorf("copy to g4: %w", context.Cause(ctx))
			}
		}
	}
	return errs
}

// lookAt reads a block's entry, and marks it when the catalog has the block in G4.
func (o *objects) lookAt(ctx context.Context, p *parcel) error {
	s := o.s
	deleted := false
	s.table.View(p.h, func(e *index.Entry) { p.e, deleted = *e, e.Flags&flagDeleted != 0 })
	switch {
	case deleted:
		return fmt.Errorf("copy to g4: %w: deleted meanwhile", block.ErrNotFound)
	case p.e.Flags&flagPacked != 0:
		return nil
	}
	p.parent, p.has = s.parentHash(&p.e)
	k := block.Key{NS: p.e.NS, Hash: p.e.Hash}
	r, why, err := o.find(ctx, k)
	if err != nil {
		return fmt.Errorf("copy to g4: %w", err)
	}
	if why != block.Hit || r.Sum != p.e.Sum || r.Len != p.e.Len || !o.lasts(&r, &p.e) {
		return nil
	}
	o.mark(p)
	// Looked up again: who gives a block of G4 up takes the mark away, and may have done so
	// before it was there.
	if now, why, _ := o.find(ctx, k); why != block.Hit || now.Object != r.Object || now.Offset != r.Offset {
		s.table.Update(p.h, func(e *index.Entry) { e.Flags &^= flagPacked })
		p.e.Flags &^= flagPacked
	}
	return nil
}

// mark notes that the catalog has a block in G4.
func (o *objects) mark(p *parcel) {
	o.s.table.Update(p.h, func(e *index.Entry) {
		if e.Flags&flagDeleted == 0 {
			e.Flags |= flagPacked
			p.e.Flags |= flagPacked
		}
	})
}

// loads says which blocks go into one object: those of one sequence, parents before their
// children, and short sequences together.
func loads(ps []*parcel) (out [][]*parcel) {
	by := make(map[block.Handle]*parcel, len(ps))
	for _, p := range ps {
		by[p.h] = p
	}
	kids := make(map[block.Handle][]*parcel)
	var roots []*parcel
	for _, p := range ps {
		if p.e.Parent != 0 && by[p.e.Parent] != nil {
			kids[p.e.Parent] = append(kids[p.e.Parent], p)
		} else {
			roots = append(roots, p)
		}
	}
	type open struct {
		load         []*parcel
		slots, bytes int64
		hashLen      int64
	}
	current := map[block.NamespaceID]*open{}
	for _, root := range roots {
		c := current[root.e.NS]
		if c == nil {
			c = &open{hashLen: int64(root.e.HashLen)}
			current[root.e.NS] = c
		}
		if c.bytes >= objectTarget {
			out = append(out, c.load)
			*c = open{hashLen: c.hashLen}
		}
		for stack := []*parcel{root}; len(stack) > 0; {
			p := stack[len(stack)-1]
			stack = append(stack[:len(stack)-1], kids[p.h]...)
			slot, _ := SlotBytes(int64(p.e.Len))
			if len(c.load) == packed.MaxMembers || c.slots+slot > maxObject-uploadUnit {
				out = append(out, c.load)
				*c = open{hashLen: c.hashLen}
			}
			c.load = append(c.load, p)
			c.slots += slot
			c.bytes += packed.HeaderBytes + int64(p.e.Len)
		}
	}
	for _, c := range current {
		if len(c.load) > 0 {
			out = append(out, c.load)
		}
	}
	return out
}

// upload makes an object of blocks. What became of each is in its err.
func (o *objects) upload(ctx context.Context, t *tier, load []*parcel) {
	fail := func(err error) {
		for _, p := range load {
			if p.err == nil {
				p.err = fmt.Errorf("copy to g4: %w", err)
			}
		}
	}
	p := o.target()
	if p == nil {
		fail(o.lost())
		return
	}
	payloads, giveBack, err := o.payloads(ctx, t, load)
	if err != nil {
		fail(err)
		return
	}
	defer giveBack()
	if err := o.send(ctx, p, load, payloads); err != nil {
		fail(err)
	}
}

// lost says why no bucket takes objects.
func (o *objects) lost() error {
	for _, p := range o.buckets {
		if err := p.health.lost(); err != nil {
			return err
		}
		if r := p.writes.refused.Load(); r != nil {
			return fmt.Errorf("%w: %w", block.ErrUnavailable, r.err)
		}
	}
	return fmt.Errorf("%w: no bucket", block.ErrUnavailable)
}

// payloads are the verified bytes of blocks, nil for one that has an err: those of G2 where
// they are, others in memory that giveBack gives back.
func (o *objects) payloads(ctx context.Context, t *tier, load []*parcel) (out [][]byte, giveBack func(), err error) {
	s := o.s
	out = make([][]byte, len(load))
	if t.ix == ixG2 {
		for i, p := range load {
			size, header := SlotBytes(int64(p.e.Len))
			if s.exposed(p.e.Place[ixG2]) && !s.intact(p.e.Place[ixG2], &p.e) {
				s.damagedG2(p.h, &p.e)
				p.err = fmt.Errorf("copy to g4: %w: the block was spoiled in g2", block.ErrCorrupt)
				continue
			}
			out[i] = s.g2.slot(p.e.Place[ixG2], size)[header:][:p.e.Len]
		}
		return out, func() {}, nil
	}
	var bytes int64
	for _, p := range load {
		size, _ := SlotBytes(int64(p.e.Len))
		bytes += size
	}
	mem, giveBack, err := o.room.take(ctx, bytes)
	if err != nil {
		return nil, nil, err
	}
	for i, p := range load {
		size, header := SlotBytes(int64(p.e.Len))
		slot := mem[:size]
		mem = mem[size:]
		if p.err = s.readG3(ctx, p.h, &p.e, slot[:header], slot[header:], nil); p.err == nil {
			out[i] = slot[header:][:p.e.Len]
		}
	}
	return out, giveBack, nil
}

// send writes an object: its record, so that it is removed when what follows does not come
// to its end; the object; then the records of its blocks.
func (o *objects) send(ctx context.Context, p *objectBucket, load []*parcel, payloads [][]byte) error {
	s := o.s
	ns, err := s.names.byID(load[0].e.NS)
	if err != nil {
		return err
	}
	if err := o.describe(ctx, p, ns); err != nil {
		return err
	}
	obj := &index.ObjectRecord{Number: s.gen.Add(1), Bucket: p.no, NS: ns.id, Digest: ns.digest, HashLen: int(load[0].e.HashLen)}
	o.begin(obj.Number, p, load)
	defer o.over(obj.Number, load)
	// The stamp is drawn when a delete finds the blocks among those that are being packed, and
	// before it is looked whether they are deleted: so what is deleted now has a later one.
	obj.Epoch = ns.state.Load().Epoch
	foot := p.New(obj.Number, obj.Digest, uint8(obj.HashLen), obj.Epoch)
	obj.ID, obj.Stamp = foot.ID, foot.Stamp
	heads := make([]byte, len(load)*packed.HeaderBytes)
	var parts [][]byte
	var members []*parcel
	for i, l := range load {
		if l.err != nil {
			continue
		}
		if l.err = o.stillThere(l); l.err != nil {
			continue
		}
		m := packed.Member{Hash: l.e.Hash, Parent: l.parent, HasParent: l.has, Len: l.e.Len, Gen: s.gen.Add(1), Expires: o.expires(&l.e), Sum: l.e.Sum}
		if !foot.Add(&m) {
			l.err = fmt.Errorf("copy to g4: %w: object is full", block.ErrNoSpace)
			continue
		}
		head := heads[:packed.HeaderBytes:packed.HeaderBytes]
		heads = heads[packed.HeaderBytes:]
		EncodeHeader(head, &SlotHeader{
			Digest: obj.Digest, Hash: m.Hash, Parent: m.Parent, HasParent: m.HasParent, HashLen: foot.HashLen, Len: m.Len,
			Slot: packed.HeaderBytes + m.Len, Gen: m.Gen, Epoch: obj.Epoch, Expires: m.Expires, Sum: m.Sum,
		}, packedSeal(obj.ID, m.Offset))
		parts = append(parts, head, payloads[i])
		members = append(members, l)
		l.rec = index.PackedRecord{
			Key: block.Key{NS: ns.id, Hash: m.Hash}, HashLen: obj.HashLen, Parent: m.Parent, HasParent: m.HasParent, Sum: m.Sum, Len: m.Len,
			Object: obj.Number, Offset: m.Offset, Gen: m.Gen, Epoch: obj.Epoch, Expires: m.Expires,
		}
	}
	if len(members) == 0 {
		return nil
	}
	obj.First, obj.Bytes, obj.Members = foot.Members[0].Hash, foot.Bytes(), uint32(len(members))
	if err := o.ledger.do(ctx, &change{plan: func(v *view) error { v.putObject(obj); return nil }}); err != nil {
		return err
	}
	invariants.CrashAt("object-intent")
	err = p.do(ctx, obj.Bytes, func(ctx context.Context) error {
		_, err := p.Write(ctx, foot, parts)
		return err
	})
	if err != nil {
		o.sweep() // it may be there, or come to be there
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	invariants.CrashAt("object-written")
	o.bytesIn.Add(obj.Bytes)
	s.toG4.charge(obj.NS, &s.names, obj.Bytes, 1)
	if err := o.seat(ns, obj, members); err != nil {
		return err
	}
	invariants.CrashAt("object-committed")
	return nil
}

// describe has the bucket know what the namespace's digest stands for.
func (o *objects) describe(ctx context.Context, p *objectBucket, ns *namespace) error {
	p.mu.Lock()
	done := p.mu.described[ns.id]
	p.mu.Unlock()
	if done {
		return nil
	}
	n := ns.get()
	rec := packed.Namespace{Desc: n.Desc, HashLen: n.HashLen, TTL: n.TTL}
	if err := p.do(ctx, 0, func(ctx context.Context) error { return p.Describe(ctx, &rec) }); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	p.mu.Lock()
	p.mu.described[ns.id] = true
	p.mu.Unlock()
	return nil
}

// begin notes an object that is going to be written, and its blocks.
func (o *objects) begin(number uint64, p *objectBucket, load []*parcel) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.underWay[number] = struct{}{}
	for _, l := range load {
		o.mu.packing[block.Key{NS: l.e.NS, Hash: l.e.Hash}] = p
	}
}

func (o *objects) over(number uint64, load []*parcel) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.mu.underWay, number)
	for _, l := range load {
		delete(o.mu.packing, block.Key{NS: l.e.NS, Hash: l.e.Hash})
	}
}

// stillThere fails when a block was deleted.
func (o *objects) stillThere(l *parcel) (err error) {
	o.s.table.View(l.h, func(e *index.Entry) {
		if e.Flags&flagDeleted != 0 {
			err = fmt.Errorf("copy to g4: %w: deleted meanwhile", block.ErrNotFound)
		}
	})
	return err
}

// errCleared: the namespace was cleared while its blocks were on their way into an object.
var errCleared = fmt.Errorf("%w: cleared meanwhile", block.ErrNotFound)

// seat records the blocks of an object that is written, but for those that were deleted
// meanwhile: the drop of a record that this makes is queued behind it.
func (o *objects) seat(ns *namespace, obj *index.ObjectRecord, members []*parcel) error {
	var seated []*parcel
	c := &change{
		ns: []*namespace{ns},
		plan: func(v *view) error {
			now := *obj
			seated = nil
			if ns.state.Load().Epoch != obj.Epoch {
				return nil // nothing is seated: the object is removed
			}
			for _, l := range members {
				if o.stillThere(l) != nil {
					if err := o.oweIn(v, obj, &l.rec); err != nil {
						return err
					}
					continue
				}
				if err := v.seat(&now, &l.rec); err != nil {
					return err
				}
				seated = append(seated, l)
			}
			v.putObject(&now)
			return nil
		},
		applied: func() {
			for _, l := range seated {
				o.mark(l)
				ev := o.event(block.EventStored, &l.rec)
				ev.Parent, ev.HasPar = l.rec.Parent, l.rec.HasParent
				o.s.events.publish(ev)
			}
			if len(seated) < len(members) {
				o.sweep()
			}
		},
	}
	// Not by the caller's time: the reaper may not see the object before its record says for
	// good what lives in it.
	if err := o.ledger.do(o.s.life, c); err != nil {
		o.sweep()
		return err
	}
	there := make(map[*parcel]bool, len(seated))
	for _, l := range seated {
		there[l] = true
	}
	for _, l := range members {
		if !there[l] {
			l.err = fmt.Errorf("copy to g4: %w", errCleared)
		}
	}
	return nil
}

// oweIn notes that an object holds a block that was deleted while it was on its way.
func (o *objects) oweIn(v *view, obj *index.ObjectRecord, r *index.PackedRecord) error {
	old, err := v.owed(obj.Bucket, r.Key, r.HashLen)
	if err == nil && (old == nil || old.Stamp < obj.Stamp) {
		v.putOwed(&index.OwedRecord{Bucket: obj.Bucket, Key: r.Key, HashLen: r.HashLen, Digest: obj.Digest, Stamp: obj.Stamp})
	}
	return err
}

// takeOut has blocks leave the lowest local tier: into G4 those that it does not have and that
// are admitted there, by the queue of uploads, and then they are dropped here. When there is
// no bucket to write to, blocks leave as if there were no G4. It returns the bytes that came
// free, and those that are to; with wait none are left of the latter.
func (s *Store) takeOut(t *tier, hs []block.Handle, wait bool) (freed, leaving int64) {
	hs, turned, ahead := s.siftFar(t, hs)
	var held, out []block.Handle
	takes := s.objects.takes()
	for _, h := range hs {
		s.table.Update(h, func(e *index.Entry) {
			switch {
			case e.Refs > 0 || !live(e, t.ix):
			case e.Flags&flagPacked != 0 || !takes || s.objects.rule(e.NS).Mode == NoObjects: // a copy in G2 does not outlive a crash
				out = append(out, h)
			default:
				e.Refs++
				held = append(held, h)
			}
		})
	}
	var d *departures
	if wait {
		d = &departures{}
	}
	leaving = s.objects.uploads.add(t, held, d, ahead)
	freed = turned + s.drop(t, out)
	if wait {
		d.all.Wait()
		return freed + d.freed.Load(), 0
	}
	return freed, leaving
}

// drop drops blocks from the lowest local tier, those that may leave it now, and returns the
// bytes that came free.
func (s *Store) drop(t *tier, hs []block.Handle) (freed int64) {
	if t.ix == ixG3 {
		return s.dropG3(hs, block.Evicted)
	}
	for _, h := range hs {
		n, _ := s.dropG2(h, block.Evicted)
		freed += n
	}
	return freed
}

// drainFar is Drain into G4.
func (s *Store) drainFar(ctx context.Context, hs []block.Handle, res DrainResult, progress func(DrainProgress)) (DrainResult, error) {
	var failed error
	for len(hs) > 0 && s.objects.takes() && ctx.Err() == nil && failed == nil {
		n := min(len(hs), 8*packed.MaxMembers)
		var held []block.Handle
		var bytes int64
		for i, h := range hs[:n] {
			ok := false
			s.table.Update(h, func(e *index.Entry) {
				if ok = live(e, ixG2) && e.Flags&flagDeleted == 0 && s.objects.rule(e.NS).Mode != NoObjects; ok {
					e.Refs++
					bytes += int64(e.Len)
				}
			})
			if !ok {
				res.Left--
				continue
			}
			held = append(held, h)
			if bytes >= drainBatch {
				n = i + 1
				break
			}
		}
		hs = hs[n:]
		for i, err := range s.objects.offload(ctx, s.g2, held) {
			if err == nil {
				res.Kept++
				res.Left--
				s.table.View(held[i], func(e *index.Entry) { res.Bytes += int64(e.Len) })
			} else if failed == nil && !errors.Is(err, block.ErrNotFound) {
				failed = err
			}
			s.release(held[i])
		}
		if progress != nil {
			progress(DrainProgress{Done: res.Kept, Total: res.Kept + res.Left, Bytes: res.Bytes})
		}
	}
	if failed != nil && ctx.Err() == nil {
		return res, fmt.Errorf("drain: %w", failed)
	}
	return res, nil
}

// lowest is the last local tier.
func (s *Store) lowest() *tier {
	if s.g3 != nil {
		return s.g3
	}
	return s.g2
}

// goesDown reports whether a block may leave its tier for a lower one now.
func (s *Store) goesDown(t *tier, e *index.Entry) bool {
	if t.ix == ixG2 && s.g3 != nil {
		return true
	}
	return e.Flags&flagPacked != 0 || s.objects.takesOf(e.NS)
}

// uploadRoom is the memory that blocks of G3 are in while they are written into objects.
type uploadRoom struct {
	mem *arena.Arena
	mu  struct {
		sync.Mutex
		taken uint64        // a bit for each unit
		freed chan struct{} // closed, and made anew, when some was given back
	}
}

const (
	uploadUnits = 64
	uploadUnit  = 1 << 20
)

func newUploadRoom() (*uploadRoom, error) {
	mem, err := arena.New(uploadUnits*uploadUnit, &arena.Options{Name: "kvtier-upload", NoPopulate: true})
	if err != nil {
		return nil, fmt.Errorf("map upload buffers: %w", err)
	}
	r := &uploadRoom{mem: mem}
	r.mu.freed = make(chan struct{})
	return r, nil
}

// take takes n bytes, waiting for them.
func (r *uploadRoom) take(ctx context.Context, n int64) (mem []byte, giveBack func(), err error) {
	units := int((n + uploadUnit - 1) / uploadUnit)
	for {
		r.mu.Lock()
		at := gap(r.mu.taken, units)
		freed := r.mu.freed
		if at >= 0 {
			mask := (uint64(1)<<units - 1) << at
			r.mu.taken |= mask
			r.mu.Unlock()
			mem := r.mem.Slice(int64(at)*uploadUnit, n)
			return mem, func() {
				invariants.Poison(mem)
				r.mu.Lock()
				r.mu.taken &^= mask
				close(r.mu.freed)
				r.mu.freed = make(chan struct{})
				r.mu.Unlock()
			}, nil
		}
		r.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("wait for an upload buffer: %w", context.Cause(ctx))
		}
	}
}

// gap is where n zeros are side by side in a word, -1 where they are not.
func gap(word uint64, n int) int {
	run := ^word
	for i := 1; i < n; i++ {
		run &= ^word >> i // zeros come in from above
	}
	if run == 0 {
		return -1
	}
	return bits.TrailingZeros64(run)
}
