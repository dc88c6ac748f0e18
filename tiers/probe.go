package tiers

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// maxProbePause is the longest pause between two probes that failed.
const maxProbePause = 30 * time.Second

// attend watches over one device until the store's life ends.
func (s *Store) attend(d *device) { s.attendTo(d.health, func() error { return s.probe(d) }) }

// attendTo watches over one medium until the store's life ends: it notices that an
// operation stalls, and probes the medium while it is not healthy. A probe that
// hangs holds up no other's.
func (s *Store) attendTo(h *health, probe func() error) {
	tick := time.NewTicker(max(min(s.opts.StallAfter/4, s.opts.ProbeEvery), time.Millisecond))
	defer tick.Stop()
	pause := s.opts.ProbeEvery
	var due time.Time     // of the next probe; zero while the device is healthy
	var answer chan error // of the probe under way
	var asked chan bool   // of the question under way
	defer func() {
		if answer != nil {
			<-answer
		}
		if asked != nil {
			<-asked
		}
	}()
	for {
		select {
		case <-s.life.Done():
			return
		case <-tick.C:
		case <-h.kick:
			due = time.Now()
		case err := <-answer:
			answer = nil
			if s.life.Err() != nil {
				return // it was cancelled
			}
			h.probed(err)
			if err != nil && h.rank() == rankDown {
				pause = min(2*pause, maxProbePause)
			}
			due = time.Now().Add(pause)
		case ok := <-asked:
			asked = nil
			if s.life.Err() != nil {
				return
			}
			h.asked(ok)
		}
		now := time.Now()
		if asked == nil && h.look() {
			asked = make(chan bool, 1)
			go func(asked chan<- bool) {
				ctx, cancel := context.WithTimeout(s.life, h.stallAfter)
				defer cancel()
				asked <- h.answers(ctx)
			}(asked)
		}
		switch {
		case h.rank() == rankHealthy:
			due, pause = time.Time{}, s.opts.ProbeEvery
		case due.IsZero():
			due = now.Add(pause)
		case answer == nil && !now.Before(due):
			answer = make(chan error, 1)
			go func(answer chan<- error) { answer <- probe() }(answer)
		}
	}
}

// probe finds out whether a device does all that is asked of it: it must still be
// the slab that was opened, keep a page that is written to it, and flush.
func (s *Store) probe(d *device) error {
	ctx, cancel := context.WithTimeout(s.life, s.opts.StallAfter)
	defer cancel()
	mem := s.staging.probe(d.number)
	one, two := mem[:probeBytes], mem[probeBytes:]
	if err := s.probePages(ctx, xfer.Read, d, mem, 0, superTwinAt); err != nil {
		return fmt.Errorf("read superblocks: %w", err)
	}
	super, err := decodeSuperblock(one)
	if err != nil {
		super, err = decodeSuperblock(two)
	}
	if err != nil {
		return err
	}
	if SlabID(super.id) != d.slab.ID() {
		return fmt.Errorf("%w: slab %s is there instead", block.ErrUnavailable, SlabID(super.id))
	}
	if d.slab.DataOffset() >= probeAt+probeBytes {
		rand.Read(one) // never fails
		clear(two)
		if err := s.probePages(ctx, xfer.Write, d, one, probeAt); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		if err := s.probePages(ctx, xfer.Read, d, two, probeAt); err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if !bytes.Equal(one, two) {
			return fmt.Errorf("%w: it does not read what was written", block.ErrCorrupt)
		}
	}
	return d.slab.Flush()
}

// probePages moves pages between memory and places on a device, counted from its
// beginning.
func (s *Store) probePages(ctx context.Context, op xfer.Op, d *device, mem []byte, at ...uint64) error {
	local, remote := xfer.DescList{Type: xfer.DRAM}, xfer.DescList{Type: d.kind}
	for i, off := range at {
		page := mem[i*probeBytes:][:probeBytes]
		local.Descs = append(local.Descs, xfer.Desc{Addr: arena.Addr(page), Len: probeBytes})
		remote.Descs = append(remote.Descs, xfer.Desc{Dev: uint64(d.number), Addr: off, Len: probeBytes})
	}
	req, err := s.agent.NewRequest(op, local, remote, nil)
	if err != nil {
		return err
	}
	defer req.Release()
	return req.Run(ctx)
}

// blame notes that a descriptor of a transfer failed. The device is not to blame
// when it was cancelled, nor where the slab has been cut off.
func (d *device) blame(op *healthOp, at xfer.Desc, err error) {
	if errors.Is(err, xfer.ErrCanceled) || d.slab.cutBefore(int64(at.Addr+at.Len-d.base)) {
		op.void = true
		return
	}
	op.failure(err)
}
