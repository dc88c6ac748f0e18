package tiers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// walker goes over extents for the scrub or the sweep. It belongs to one
// goroutine.
type walker struct {
	s      *Store
	ctx    context.Context
	pace   *pacer
	mem    *arena.Arena
	desc   xfer.DescList
	buf    []byte // holds any slot
	errors int    // blocks in a row that could not be read
	unread []unreadable
	counts
}

// counts is what a walker has found.
type counts struct{ blocks, damaged, repaired, dropped, stale int64 }

// walkHeads is how many headers of free slots are read at a time.
const walkHeads = 256

func (s *Store) newWalker(ctx context.Context, pace *pacer) (*walker, error) {
	size, _ := SlotBytes(block.MaxBlockBytes)
	mem, err := arena.New(size, &arena.Options{Name: "kvtier-scrub", NoPopulate: true})
	if err != nil {
		return nil, fmt.Errorf("map the scrub's buffer: %w", err)
	}
	w := &walker{s: s, ctx: ctx, pace: pace, mem: mem, desc: xfer.DescList{Type: xfer.DRAM, Descs: arenaDescs(mem)}, buf: mem.Slice(0, size)}
	if err := s.agent.Register(ctx, w.desc, nil); err != nil {
		return nil, fmt.Errorf("register the scrub's buffer: %w", errors.Join(err, mem.Close()))
	}
	return w, nil
}

func (w *walker) close() {
	// What fails here leaves an unused mapping, and the walk has its own error to tell.
	if err := w.s.agent.Deregister(context.Background(), w.desc); err != nil {
		w.s.log.Warn("deregister the scrub's buffer", "err", err)
		return
	}
	if err := w.mem.Close(); err != nil {
		w.s.log.Warn("unmap the scrub's buffer", "err", err)
	}
}

// scrubOrder are the devices of G3 in the order of their identities.
func (s *Store) scrubOrder() []*device {
	devs := slices.Clone(s.g3.devs)
	slices.SortFunc(devs, func(a, b *device) int {
		x, y := a.slab.ID(), b.slab.ID()
		return bytes.Compare(x[:], y[:])
	})
	return devs
}

func (d *device) extents() int {
	return int((d.slab.DataBytes() + d.slab.ExtentBytes() - 1) / d.slab.ExtentBytes())
}

// extent goes over the slots of one extent as they are now.
func (w *walker) extent(d *device, e int) error {
	t := w.s.g3
	t.mu.Lock()
	class, owners := d.slots.Extent(e)
	t.mu.Unlock()
	start := int64(e) * d.slab.ExtentBytes()
	if class == 0 {
		return w.ctx.Err()
	}
	var free []int64
	for i, h := range owners {
		off := start + int64(i)*class
		switch {
		case h == 0:
			free = append(free, off)
		case h != reserved:
			if err := w.block(d, h, block.PlaceAt(d.number, off)); err != nil {
				return err
			}
		}
	}
	for part := range slices.Chunk(free, walkHeads) {
		if err := w.freeSlots(d, part, class); err != nil {
			return err
		}
	}
	return nil
}

// freeSlots looks for headers in slots that were free.
func (w *walker) freeSlots(d *device, offs []int64, class int64) error {
	const head = smallHeaderBytes
	if err := w.read(d, offs, head); err != nil {
		// Nothing is lost by it, unless it is the whole device.
		if w.errors++; w.ctx.Err() != nil || w.errors >= scrubErrors {
			return err
		}
		return nil
	}
	for i, off := range offs {
		if _, err := DecodeHeader(w.buf[i*head:], d.slab.Seal(off)); err != nil {
			continue
		}
		if err := w.stamp(d, off, class); err != nil {
			return err
		}
	}
	return nil
}

// read reads n bytes at each of some offsets of a device, one behind the other
// into the walker's buffer.
func (w *walker) read(d *device, offs []int64, n int64) error {
	return w.move(xfer.Read, d, offs, n)
}

// move reads as read does, or writes what is in the buffer.
func (w *walker) move(op xfer.Op, d *device, offs []int64, n int64) error {
	if err := w.pace.wait(w.ctx, int64(len(offs))*n); err != nil {
		return err
	}
	local := xfer.DescList{Type: xfer.DRAM}
	remote := xfer.DescList{Type: d.kind}
	for i, off := range offs {
		mem := w.buf[int64(i)*n:][:n]
		local.Descs = append(local.Descs, xfer.Desc{Addr: arena.Addr(mem), Len: uint64(n)})
		remote.Descs = append(remote.Descs, w.s.g3.fileDesc(block.PlaceAt(d.number, off), 0, n))
	}
	ctx, done := d.health.while(w.ctx) // a device that goes down is not waited for
	defer done()
	var failed error
	w.s.transfer(ctx, op, local, remote, func(_ int, err error) {
		if failed == nil {
			failed = err
		}
	})
	if failed != nil {
		return fmt.Errorf("%v g3: %w: %w", op, block.ErrUnavailable, failed)
	}
	return nil
}

// stamp invalidates the header of a slot, if the slot is free still. It takes it
// meanwhile.
func (w *walker) stamp(d *device, off, class int64) error {
	t := w.s.g3
	t.mu.Lock()
	err := d.slots.Take(off, class, reserved)
	t.mu.Unlock()
	if err != nil {
		return nil // a block has it since, and its header the place
	}
	defer w.untake(d, off)
	saved := bytes.Clone(w.buf[:smallHeaderBytes])
	defer copy(w.buf, saved)
	if err := w.read(d, []int64{off}, smallHeaderBytes); err != nil {
		return err
	}
	if _, err := DecodeHeader(w.buf, d.slab.Seal(off)); err != nil {
		return nil
	}
	return w.erase(d, off)
}

// untake gives back what was taken from the slots beside the tier's own count.
func (w *walker) untake(d *device, off int64) {
	t := w.s.g3
	t.mu.Lock()
	d.slots.Free(off)
	t.roomLocked()
	t.mu.Unlock()
}

// eraseAt is an operation that erases the header at off and tells done.
func eraseAt(d *device, off int64, done chan<- error) catalogOp {
	return catalogOp{
		place: block.PlaceAt(d.number, off), header: smallHeaderBytes,
		fin: func(err error) { done <- err },
	}
}

// erase erases the header at off, in room that the walker has taken.
func (w *walker) erase(d *device, off int64) error {
	done := make(chan error, 1)
	w.s.commits.add(eraseAt(d, off, done))
	return w.erased(<-done)
}

// erased counts a header that was erased, unless that failed.
func (w *walker) erased(err error) error {
	if err == nil {
		w.stale++
	}
	return err
}
