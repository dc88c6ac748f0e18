package tiers

import (
	"context"
	"errors"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// A slot's header is erased when the slot stops being a block's, before it may be
// another's: a catalog that is rebuilt from the media must not have the block again.

// erases makes the operation erase the header of a slot with a payload of n bytes.
func (op *catalogOp) erases(p block.Place, n uint32) {
	op.place = p
	_, op.header = SlotBytes(int64(n))
}

// eraseWait is the longest that headers are being erased: while it lasts nothing is
// recorded, on no slab.
const eraseWait = 2 * time.Second

// eraseHeaders writes zeros over the slot headers of operations, on each device as
// long as that is up. It goes on when the store ends: the committer outlives the
// other work.
func (s *Store) eraseHeaders(ops []*catalogOp) {
	for dev, d := range s.g3.devs {
		local := xfer.DescList{Type: xfer.DRAM}
		remote := xfer.DescList{Type: d.kind}
		var owner []*catalogOp
		for _, op := range ops {
			if int(op.place.Device()) == dev {
				local.Descs = append(local.Descs, xfer.Desc{Addr: arena.Addr(s.staging.zeros), Len: uint64(op.header)})
				remote.Descs = append(remote.Descs, s.g3.fileDesc(op.place, 0, op.header))
				owner = append(owner, op)
			}
		}
		if len(owner) == 0 {
			continue
		}
		up := d.health.up()
		errs := make([]error, len(owner))
		done := make(chan struct{})
		s.commits.apart.Go(func() {
			defer close(done)
			ctx, cancel := context.WithTimeout(context.Background(), eraseWait)
			defer cancel()
			ctx, leave := d.health.while(ctx)
			defer leave()
			s.transfer(ctx, xfer.Write, local, remote, func(i int, err error) { errs[i] = err })
		})
		select {
		case <-done:
			for i, op := range owner {
				op.err = errs[i]
			}
			continue
		case <-up.Done():
		}
		// The device may still write the zeros, so the slots are nobody's until then.
		for _, op := range owner {
			op.err, op.stuck = context.Cause(up), done
		}
	}
}

// forsake gives up the slot of a copy to G3 that does not come to be a block's:
// what was written is erased, then the slot is free. A record of it may be in the
// catalog although that told of an error, so it is dropped first: the caller holds
// the lock of the block's shard, so that no later record of the block is.
func (s *Store) forsake(j *job, e *index.Entry) {
	s.g3.own(j.place, reserved) // nobody's whom the evictor could move
	gone := make(chan struct{})
	j.gone = gone
	op := catalogOp{
		key: block.Key{NS: e.NS, Hash: e.Hash}, hlen: int(e.HashLen), undo: &j.m.trace,
		keep: true, flush: e.Flags&flagDeleted != 0,
	}
	op.erases(j.place, j.e.Len)
	op.fin = func(err error) {
		switch {
		case errors.Is(err, errUnerased) && s.g3.devs[j.place.Device()].rank() != rankDown:
			s.g3.quarantine(j.place) // the slot, not the device, fails one write after the other
		case err == nil || errors.Is(err, errUnerased):
			s.g3.free(j.place)
		}
	}
	op.tell = func(err error) {
		if errors.Is(err, errUnerased) {
			j.left = err
		}
		close(gone)
	}
	s.commits.add(op)
}
