package tiers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// An object from which blocks were deleted takes room that nothing needs. When less than
// half of it lives, that goes into a new object, together with what lives in others of the
// namespace. The new one is written, then the records of the blocks move to it, then the
// old ones are removed, as all are in which nothing lives.
//
// Another node may have deleted a block of which this catalog says that it lives. Its
// tombstone must hold for the new object, too. So the stamp of that is the latest of the
// old ones: a tombstone that is later is later than the new object's, and those that are
// earlier have been in the bucket for as long as the objects are not young any more, and
// are obeyed here.

const (
	// repackShare is the live part of an object below which it is rewritten.
	repackShare = 0.5
	// repackRate is how many bytes a second are read to be written anew.
	repackRate = 32 << 20
	// restObject is how long an object stays that was rewritten: who has looked its blocks up
	// there may read them still.
	restObject = 2 * time.Minute
)

// halfDead reports whether an object is to be rewritten. The young are left alone: they are
// about to change as their sequences do. Only the one who wrote an object does it: another
// would not be allowed to remove it.
func (w *bucketSweep) halfDead(r *index.ObjectRecord) bool {
	return r.Bucket == w.p.no && r.Live > 0 && float64(r.LiveBytes) < repackShare*float64(packed.PayloadBytes(r.Bytes, r.Members, r.HashLen)) &&
		w.p.Wrote(r.ID) && w.o.current(r) && !w.o.busy(r.Number) && !w.young(packedAt(r.Stamp))
}

// repack rewrites the objects that are half dead.
func (w *bucketSweep) repack() error {
	type heap struct {
		objects []index.ObjectRecord
		bytes   int64
	}
	pace := pacer{rate: repackRate}
	var left []index.ObjectRecord
	if err := w.o.s.catalog.ScanObjects(0, func(r *index.ObjectRecord) error {
		if w.halfDead(r) {
			left = append(left, *r)
		}
		if len(left) == sweepObjects {
			return errFull
		}
		return w.ctx.Err()
	}); err != nil && err != errFull {
		return err
	}
	if len(left) == 0 {
		return nil
	}
	graves, err := w.b.Graves(w.ctx)
	if err != nil {
		return err
	}
	heaps := map[block.NamespaceID]*heap{}
	flush := func(h *heap) error {
		if len(h.objects) == 0 {
			return nil
		}
		if err := pace.wait(w.ctx, h.bytes); err != nil {
			return err
		}
		err := w.rewrite(h.objects, graves)
		*h = heap{}
		if err != nil {
			return err
		}
		return w.save(func(*index.ObjectSweepRecord) {})
	}
	for _, r := range left {
		h := heaps[r.NS]
		if h == nil {
			h = &heap{}
			heaps[r.NS] = h
		}
		// Of slots that are somewhat longer than their blocks.
		if 2*(h.bytes+r.LiveBytes) > maxObject {
			if err := flush(h); err != nil {
				return err
			}
		}
		h.objects = append(h.objects, r)
		h.bytes += r.LiveBytes
		if h.bytes >= objectTarget {
			if err := flush(h); err != nil {
				return err
			}
		}
	}
	for _, h := range heaps {
		if err := flush(h); err != nil {
			return err
		}
	}
	return nil
}

// mover is a block on its way from one object into another.
type mover struct {
	from    index.PackedRecord
	to      index.PackedRecord
	payload []byte
}

// rewrite writes what lives in objects of a namespace into a new one.
func (w *bucketSweep) rewrite(objects []index.ObjectRecord, graves *packed.Graves) error {
	o := w.o
	ns, err := o.s.names.byID(objects[0].NS)
	if err != nil {
		return nil // it was dropped meanwhile
	}
	var movers []*mover
	var bytes int64
	var stamp uint64
	for i := range objects {
		ms, err := w.living(&objects[i], graves)
		if err != nil {
			return err
		}
		stamp = max(stamp, objects[i].Stamp)
		for _, m := range ms {
			bytes += packed.HeaderBytes + int64(m.from.Len)
		}
		movers = append(movers, ms...)
	}
	if len(movers) == 0 {
		return nil
	}
	if bytes > maxObject {
		return fmt.Errorf("rewrite objects: %w: %d bytes for one", block.ErrInvalid, bytes)
	}
	mem, giveBack, err := o.room.take(w.ctx, bytes)
	if err != nil {
		return err
	}
	defer giveBack()
	for _, m := range movers {
		m.payload = mem[:m.from.Len:m.from.Len]
		mem = mem[m.from.Len:]
	}
	if movers, err = w.fetch(movers); err != nil || len(movers) == 0 {
		return err
	}
	o.mu.Lock()
	for i := range objects {
		o.mu.rested[objects[i].Number] = time.Now()
	}
	o.mu.Unlock()
	moved, movedBytes, err := w.send(ns, movers, stamp)
	if err != nil {
		return err
	}
	w.p.sweeps.change(func(r *index.ObjectSweepRecord) {
		r.Rewritten += int64(len(objects))
		r.Moved += moved
		r.MovedBytes += movedBytes
	})
	return nil
}

// living are the blocks that live in an object, by what it says of itself and the catalog of
// them, in their order. Those that another node has deleted are dropped.
func (w *bucketSweep) living(obj *index.ObjectRecord, graves *packed.Graves) (ms []*mover, err error) {
	foot, err := w.b.Footer(w.ctx, w.o.nameOf(obj), obj.Bytes)
	switch {
	case errors.Is(err, xfer.ErrNotFound), errors.Is(err, xfer.ErrShort), errors.Is(err, block.ErrCorrupt):
		return nil, nil // those who read it, or the next sweep, find that
	case err != nil:
		return nil, err
	}
	dead := bucket.Dead(foot, graves, int64(nowUnix()))
	var deleted []index.PackedRecord
	for i := range foot.Members {
		r, ok, err := w.o.s.catalog.GetPacked(block.Key{NS: obj.NS, Hash: foot.Members[i].Hash}, obj.HashLen)
		if err != nil {
			return nil, err
		}
		switch {
		case !ok || r.Object != obj.Number || r.Offset != foot.Members[i].Offset:
		case dead[i]:
			deleted = append(deleted, r)
		default:
			ms = append(ms, &mover{from: r})
		}
	}
	_, err = w.drop(deleted, block.Deleted)
	return ms, err
}

// fetch reads the payloads, and leaves out the blocks that are lost.
func (w *bucketSweep) fetch(ms []*mover) (out []*mover, err error) {
	for len(ms) > 0 {
		n := 1
		for n < len(ms) && ms[n].from.Object == ms[0].from.Object && ms[n].from.Offset == memberEnd(&ms[n-1].from) &&
			memberEnd(&ms[n].from)-ms[0].from.Offset <= fetchRange {
			n++
		}
		var recs []*index.PackedRecord
		var payloads [][]byte
		for _, m := range ms[:n] {
			recs, payloads = append(recs, &m.from), append(payloads, m.payload)
		}
		if err := w.pace.wait(w.ctx, 1); err != nil {
			return nil, err
		}
		for i, err := range w.o.read(w.ctx, recs, payloads) {
			switch {
			case err == nil:
				out = append(out, ms[i])
			case !errors.Is(err, block.ErrNotFound) && !errors.Is(err, block.ErrCorrupt):
				return nil, err
			}
		}
		ms = ms[n:]
	}
	return out, nil
}

// send is objects.send for blocks that are in G4 already.
func (w *bucketSweep) send(ns *namespace, ms []*mover, stamp uint64) (moved, bytes int64, err error) {
	o, s := w.o, w.o.s
	hashLen := ms[0].from.HashLen
	load := make([]*parcel, len(ms))
	for i, m := range ms {
		load[i] = &parcel{e: index.Entry{NS: ns.id, Hash: m.from.Key.Hash}}
	}
	obj := &index.ObjectRecord{Number: s.gen.Add(1), Bucket: w.p.no, NS: ns.id, Digest: ns.digest, HashLen: hashLen}
	o.begin(obj.Number, w.p, load)
	defer o.over(obj.Number, load)
	obj.Epoch = ns.state.Load().Epoch
	foot := w.p.New(obj.Number, obj.Digest, uint8(hashLen), obj.Epoch)
	foot.Stamp = stamp
	obj.ID, obj.Stamp = foot.ID, foot.Stamp
	heads := make([]byte, len(ms)*packed.HeaderBytes)
	var parts [][]byte
	var in []*mover
	for _, m := range ms {
		now, ok, err := s.catalog.GetPacked(m.from.Key, hashLen)
		if err != nil {
			return 0, 0, err
		}
		if !ok || now != m.from || now.Epoch != obj.Epoch {
			continue
		}
		b := packed.Member{
			Hash: now.Key.Hash, Parent: now.Parent, HasParent: now.HasParent, Len: now.Len, Gen: s.gen.Add(1), Expires: now.Expires, Sum: now.Sum,
		}
		if !foot.Add(&b) {
			continue // its old object has it
		}
		head := heads[:packed.HeaderBytes:packed.HeaderBytes]
		heads = heads[packed.HeaderBytes:]
		EncodeHeader(head, &SlotHeader{
			Digest: obj.Digest, Hash: b.Hash, Parent: b.Parent, HasParent: b.HasParent, HashLen: foot.HashLen, Len: b.Len,
			Slot: packed.HeaderBytes + b.Len, Gen: b.Gen, Epoch: obj.Epoch, Expires: b.Expires, Sum: b.Sum,
		}, packedSeal(obj.ID, b.Offset))
		parts = append(parts, head, m.payload)
		m.to = now
		m.to.Object, m.to.Offset, m.to.Gen = obj.Number, b.Offset, b.Gen
		in = append(in, m)
	}
	if len(in) == 0 {
		return 0, 0, nil
	}
	obj.First, obj.Bytes, obj.Members = foot.Members[0].Hash, foot.Bytes(), uint32(len(in))
	if err := o.ledger.do(w.ctx, &change{plan: func(v *view) error { v.putObject(obj); return nil }}); err != nil {
		return 0, 0, err
	}
	invariants.CrashAt("repack-intent")
	err = w.p.do(w.ctx, obj.Bytes, func(ctx context.Context) error {
		_, err := w.p.Write(ctx, foot, parts)
		return err
	})
	if err != nil {
		o.sweep() // it may be there, or come to be there
		return 0, 0, fmt.Errorf("rewrite objects: %w: %w", block.ErrUnavailable, err)
	}
	invariants.CrashAt("repack-written")
	o.bytesIn.Add(obj.Bytes)
	// What was deleted or put anew meanwhile stays as it is now: it has its tombstone.
	err = o.ledger.do(s.life, &change{
		ns: []*namespace{ns},
		plan: func(v *view) error {
			now := *obj
			moved, bytes = 0, 0
			if ns.state.Load().Epoch != obj.Epoch {
				return nil
			}
			for _, m := range in {
				r, err := v.block(m.from.Key, hashLen)
				if err != nil {
					return err
				}
				// Of a delete that is under way the old object is older than it, the new one not.
				if r == nil || *r != m.from || o.isLeaving(m.from.Key) {
					continue
				}
				if err := v.seat(&now, &m.to); err != nil {
					return err
				}
				moved++
				bytes += int64(m.to.Len)
			}
			v.putObject(&now)
			return nil
		},
		applied: o.sweep,
	})
	if err != nil {
		o.sweep()
		return 0, 0, err
	}
	invariants.CrashAt("repack-committed")
	return moved, bytes, nil
}
