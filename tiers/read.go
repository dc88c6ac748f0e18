package tiers

import (
	"context"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/xfer"
)

// staging holds the buffers that blocks of G3 are read into when G2 has no room,
// the header blocks of reads that go straight to the caller's memory, the zeros
// that headers are erased with, and the pages that probes use.
type staging struct {
	mem    *arena.Arena
	slots  chan []byte
	heads  chan []byte
	zeros  []byte // stays as it is
	probes []byte // two pages for each device
}

// How many there are of each: enough to keep a device busy.
const (
	stagingSlots = 4
	stagingHeads = 256
)

func newStaging(agent *xfer.Agent) (*staging, error) {
	slot, header := SlotBytes(block.MaxBlockBytes)
	probes := stagingSlots*slot + (stagingHeads+1)*header
	mem, err := arena.New(probes+maxSlabs*2*probeBytes, &arena.Options{Name: "kvtier-staging", NoPopulate: true})
	if err != nil {
		return nil, fmt.Errorf("map staging buffers: %w", err)
	}
	s := &staging{mem: mem, slots: make(chan []byte, stagingSlots), heads: make(chan []byte, stagingHeads)}
	s.probes = mem.Slice(probes, maxSlabs*2*probeBytes)
	for i := range int64(stagingSlots) {
		s.slots <- mem.Slice(i*slot, slot)
	}
	for i := range int64(stagingHeads) {
		s.heads <- mem.Slice(stagingSlots*slot+i*header, header)
	}
	s.zeros = mem.Slice(stagingSlots*slot+stagingHeads*header, header)
	return s, nil
}

// get borrows a buffer that holds a slot of any block.
func (s *staging) get(ctx context.Context) ([]byte, error) { return borrow(ctx, s.slots) }

func (s *staging) put(b []byte) { giveBack(s.slots, b) }

// giveBack ends a borrow: nobody may look at the buffer any more.
func giveBack(to chan<- []byte, b []byte) {
	invariants.Poison(b)
	to <- b
}

// probe is the pages for the one probe that a device has at a time.
func (s *staging) probe(device uint8) []byte {
	return s.probes[int(device)*2*probeBytes:][: 2*probeBytes : 2*probeBytes]
}

func borrow(ctx context.Context, from chan []byte) ([]byte, error) {
	select {
	case b := <-from:
		return b, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for a staging buffer: %w", context.Cause(ctx))
	}
}

// readG3 reads a block's slot from G3 and verifies it, without making it
// resident anywhere else. header and payload take the slot's two parts; the
// payload's memory may be longer than the block. came, which may be nil, is told how
// many bytes of the slot are there, in order, once the header is checked: whether
// they are right shows only in the end. The caller holds a reference.
func (s *Store) readG3(ctx context.Context, h block.Handle, e *index.Entry, header, payload []byte, came func(n int64)) error {
	d := s.g3.devs[e.Place[ixG3].Device()]
	op, err := d.health.begin()
	if err != nil {
		return fmt.Errorf("read from g3: %w", err)
	}
	defer d.health.end(op)
	ctx, leave := d.health.while(ctx)
	defer leave()
	piece := s.beginReads(1)
	defer s.endReads(1)
	local := xfer.DescList{Type: xfer.DRAM, Descs: make([]xfer.Desc, 0, 8)}
	remote := xfer.DescList{Type: d.kind, Descs: make([]xfer.Desc, 0, 8)}
	at := int64(0)
	add := func(mem []byte) {
		local.Descs = append(local.Descs, xfer.Desc{Addr: arena.Addr(mem), Len: uint64(len(mem))})
		remote.Descs = append(remote.Descs, s.g3.fileDesc(e.Place[ixG3], at, int64(len(mem))))
		at += int64(len(mem))
	}
	add(header)
	for rest := payload; len(rest) > 0; {
		n := min(int(piece), len(rest))
		add(rest[:n])
		rest = rest[n:]
	}
	req, err := s.agent.NewRequest(xfer.Read, local, remote, nil)
	if err != nil {
		op.failure(err)
		return fmt.Errorf("read from g3: %w: %w", block.ErrUnavailable, err)
	}
	defer req.Release()
	read := s.g3.speed.begin(at)
	defer func() { read.end(err == nil) }()
	var c check
	c.begin(s, e, header, payload)
	err = req.Each(ctx, func(i int, err error) error {
		op.goesOn()
		if err != nil {
			d.blame(op, remote.Descs[i], err)
			return err
		}
		op.worked = true
		if err := c.piece(local.Descs[i].Len); err != nil || came == nil {
			return err
		}
		came(c.have)
		return nil
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("read from g3: %w", context.Cause(ctx))
	case errors.Is(err, ErrVersion):
		return err
	case !errors.Is(err, block.ErrCorrupt):
		err = s.readFailure(e, err)
	}
	if errors.Is(err, block.ErrCorrupt) {
		return s.damagedG3(h, e, err)
	}
	return err
}

// readFailure says what a failed read of a slot means. A failing device may be
// well again, and the block stays; where the slab has been cut off, the bytes are gone.
func (s *Store) readFailure(e *index.Entry, err error) error {
	d := s.g3.devs[e.Place[ixG3].Device()]
	size, _ := SlotBytes(int64(e.Len))
	if d.slab.cutBefore(e.Place[ixG3].Offset() + size) {
		return fmt.Errorf("read from g3: %w: the slab has been cut off: %w", block.ErrCorrupt, err)
	}
	return fmt.Errorf("read from g3: %w: %w", block.ErrUnavailable, err)
}

// ReadResult is what ReadInto did for one key.
type ReadResult struct {
	Reason block.MissReason // Hit, or why there are no bytes
	Tier   block.TierID     // that served it
	Len    uint32           // payload bytes
	Sum    block.Sum
	Err    error // more about a miss that is not plain absence
}

// ReadInto reads a whole block into the caller's memory, dst, which must lie in
// memory that is registered with the store's agent as DRAM, and be at least as
// long as the block. It is a get for callers in the same process: one copy from
// G2, or straight from the device for a block in G3, which stays where it is.
// The checksum is verified when the bytes come from G3, and with o.Verify also
// when they come from G2; else the stored one is handed out. A dst that is too
// short is an ErrInvalid in Err. It answers when nothing touches dst any more: a
// device that stalls and cannot be interrupted may hold it up beyond the end of ctx.
func (s *Store) ReadInto(ctx context.Context, k block.Key, dst []byte, o block.GetOptions) (r ReadResult) {
	g := s.grip(k)
	r.Reason = g.reason
	if g.h == 0 && s.objects != nil && g.reason == block.MissAbsent {
		if r = s.objects.readInto(ctx, k, dst); r.Reason == block.Hit {
			return r
		}
	}
	if g.h == 0 {
		s.missed(k, r.Reason)
		return r
	}
	defer s.release(g.h)
	n := int64(g.e.Len)
	if int64(len(dst)) < n {
		r.Reason = block.MissNoRoom
		r.Err = fmt.Errorf("read %s: %w: memory of %d bytes for a block of %d", k, block.ErrInvalid, len(dst), n)
		return r
	}
	dst = dst[:n]
	t := s.g2
	slot, header := SlotBytes(n)
	switch {
	case live(&g.e, ixG2) && o.Verify:
		r.Err = copyVerify(dst, s.g2.slot(g.e.Place[ixG2], slot)[header:], g.e.Sum)
		if r.Err != nil {
			s.damagedG2(g.h, &g.e)
		}
	case live(&g.e, ixG2):
		r.Err = s.copyOut(ctx, dst, g.e.Place[ixG2], header)
	default:
		t = s.g3
		head, err := borrow(ctx, s.staging.heads)
		if err != nil {
			r.Err = err
			break
		}
		r.Err = s.readG3(ctx, g.h, &g.e, head[:header], dst, nil)
		giveBack(s.staging.heads, head)
	}
	if r.Err != nil {
		r.Reason = missOf(r.Err)
		s.missed(k, r.Reason)
		return r
	}
	r.Tier, r.Len, r.Sum = t.id, g.e.Len, g.e.Sum
	t.hits.Add(1)
	s.usePrefetched(g.h, &g.e)
	t.bytesOut.Add(n)
	if !o.Quiet {
		s.hintHits([]block.Handle{g.h})
	}
	return r
}

// copyOut copies a payload from G2 by the agent.
func (s *Store) copyOut(ctx context.Context, dst []byte, p block.Place, header int64) error {
	local := [1]xfer.Desc{{Addr: arena.Addr(dst), Len: uint64(len(dst))}}
	remote := [1]xfer.Desc{s.g2.memDesc(p, header, int64(len(dst)))}
	req, err := s.agent.NewRequest(xfer.Read,
		xfer.DescList{Type: xfer.DRAM, Descs: local[:]}, xfer.DescList{Type: xfer.DRAM, Descs: remote[:]}, nil)
	if err != nil {
		return fmt.Errorf("copy from g2: %w", err)
	}
	defer req.Release()
	if err := req.Run(ctx); err != nil {
		return fmt.Errorf("copy from g2: %w", err)
	}
	return nil
}

// copyVerify copies src to dst and hashes what it copied in the same steps.
func copyVerify(dst, src []byte, want block.Sum) error {
	var h xxh3.Hasher
	src = src[:len(dst)]
	for len(src) > 0 {
		n := min(CopyStep, len(src))
		copy(dst, src[:n])
		h.Write(dst[:n])
		dst, src = dst[n:], src[n:]
	}
	if sum := block.Sum(h.Sum128().Bytes()); sum != want {
		return fmt.Errorf("block in g2: %w: checksum %s, want %s", block.ErrCorrupt, sum, want)
	}
	return nil
}
