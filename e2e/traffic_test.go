package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// traffic is what a client does all the time, and what it makes of the answers.
type traffic struct {
	t  *testing.T
	c  *api.Client
	ns block.Namespace
	h  *history
	r  *rand.Rand
	// ending: the daemon has been told to stop, and answers as it likes.
	ending *atomic.Bool
	// exited is closed when the daemon has ended; nil: it does not.
	exited <-chan struct{}
	inline bool // blocks move by gRPC
}

// errEnded ends a client: its daemon is gone.
var errEnded = errors.New("ended")

// run works until the daemon is gone, an answer is wrong, or ctx ends.
func (w *traffic) run(ctx context.Context) {
	for ctx.Err() == nil {
		var err error
		switch n := w.r.IntN(100); {
		case n < 35:
			err = w.put(ctx)
		case n < 39:
			err = w.abandon(ctx)
		case n < 54:
			err = w.remove(ctx)
		case n < 74:
			err = w.read(ctx)
		case n < 88:
			err = w.lease(ctx)
		default:
			err = w.prefetch(ctx)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return
		case errors.Is(err, errEnded):
			w.daemonEnds(ctx, err)
			return
		default:
			w.t.Error(err)
			return
		}
	}
}

// endsWithin is how long a daemon may take to end after its connections have.
const endsWithin = 10 * time.Second

// daemonEnds fails the test when a daemon lives on that a client has lost.
func (w *traffic) daemonEnds(ctx context.Context, err error) {
	if w.ending.Load() {
		return
	}
	late := time.NewTimer(endsWithin)
	defer late.Stop()
	select {
	case <-w.exited:
	case <-ctx.Done():
	case <-late.C:
		w.t.Errorf("the daemon lives: %v", err)
	}
}

// failed is what a failure of a whole call means.
func (w *traffic) failed(what string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, block.ErrDisconnected) || errors.Is(err, block.ErrClosed) || w.ending.Load() {
		return fmt.Errorf("%w: %s: %w", errEnded, what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// any block will do.
func anyBlock(int, known) bool { return true }

// put puts some blocks in one stream, new ones and ones that are there.
func (w *traffic) put(ctx context.Context) error {
	blocks := w.h.take(w.r, 1+w.r.IntN(16), func(_ int, b known) bool { return b.fate <= unsure || w.r.IntN(8) == 0 })
	defer w.h.give(blocks)
	tier := block.G3
	if w.r.IntN(3) == 0 {
		tier = block.G2
	}
	before := make([]known, len(blocks))
	items := make([]api.PutItem, len(blocks))
	for k, i := range blocks {
		before[k] = w.h.renew(i)
		items[k] = api.PutItem{Hash: hashOf(i), Data: bytesOf(i, before[k].version)}
		if before[k].fate < inDRAM {
			w.h.note(i, unsure)
		}
	}
	if len(blocks) == 1 && before[0].fate >= inDRAM && !w.h.evicts {
		return w.conflict(ctx, blocks[0], before[0])
	}
	res, err := w.c.Put(ctx, w.ns, items, api.PutOptions{Durable: tier})
	for k, one := range res {
		i, was := blocks[k], before[k].fate
		switch {
		case one.Err == nil:
			w.h.put(i, was, tier)
			if was == durable && one.Status != block.Exists && !w.h.evicts {
				return fmt.Errorf("put of durable block %d: %v, want exists", i, one.Status)
			}
		case err != nil:
		case w.ending.Load():
			// It may have been too late for the answer only.
		case errors.Is(one.Err, block.ErrNoSpace):
			// The block may be in DRAM all the same: only G3 had no room.
			if was >= inDRAM {
				w.h.note(i, was)
			}
			w.h.count(func(c *counts) { c.refused++ })
		default:
			return fmt.Errorf("put block %d: %w", i, one.Err)
		}
	}
	return w.failed("put", err)
}

// conflict puts other bytes under the hash of a block that is there.
func (w *traffic) conflict(ctx context.Context, i int, b known) error {
	res, err := w.c.Put(ctx, w.ns, []api.PutItem{{Hash: hashOf(i), Data: bytesOf(i, b.version+1)}}, api.PutOptions{})
	switch {
	case err != nil:
		return w.failed("put of other bytes", err)
	case !errors.Is(res[0].Err, block.ErrConflict) && !w.ending.Load():
		return fmt.Errorf("put of other bytes for block %d: %v, want a conflict", i, res[0].Err)
	}
	w.h.count(func(c *counts) { c.conflicts++ })
	return nil
}

// halfReader gives the first half of a block, and then nothing until its stream
// has been abandoned.
type halfReader struct {
	half    []byte
	abandon context.CancelFunc
	ctx     context.Context
}

func (h *halfReader) Read(p []byte) (int, error) {
	if len(h.half) == 0 {
		h.abandon()
		<-h.ctx.Done()
		return 0, io.ErrNoProgress
	}
	n := copy(p, h.half)
	h.half = h.half[n:]
	return n, nil
}

// abandon goes away in the middle of a block. Nothing of it may be left, so it is
// known as gone before and after.
func (w *traffic) abandon(ctx context.Context) error {
	blocks := w.h.take(w.r, 1, func(_ int, b known) bool { return b.fate == gone })
	defer w.h.give(blocks)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, i := range blocks {
		data := payload(i, largestBlock)
		_, err := w.c.PutFrom(ctx, w.ns, api.PutItem{Hash: hashOf(i)}, int64(len(data)), &halfReader{data[:280<<10], cancel, ctx}, api.PutOptions{Durable: block.G3})
		if err == nil {
			return fmt.Errorf("half of block %d was stored", i)
		}
		w.h.count(func(c *counts) { c.abandoned++ })
	}
	return nil
}

// remove deletes some blocks.
func (w *traffic) remove(ctx context.Context) error {
	blocks := w.h.take(w.r, 1+w.r.IntN(4), func(_ int, b known) bool { return b.fate >= inDRAM || w.r.IntN(8) == 0 })
	defer w.h.give(blocks)
	var hashes []block.Hash
	var least, most int
	for _, i := range blocks {
		hashes = append(hashes, hashOf(i))
		switch f := w.h.look(i).fate; {
		case f == unsure:
			most++
		case f >= inDRAM:
			least, most = least+1, most+1
			w.h.note(i, unsure)
		}
	}
	if w.h.evicts {
		least = 0
	}
	if len(hashes) == 0 {
		return nil
	}
	n, err := w.c.Delete(ctx, w.ns, hashes)
	if err != nil {
		return w.failed("delete", err)
	}
	for _, i := range blocks {
		w.h.note(i, gone)
	}
	w.h.count(func(c *counts) { c.deleted += n })
	if n < least || n > most {
		return fmt.Errorf("delete of blocks %v: deleted %d, want %d to %d", blocks, n, least, most)
	}
	return nil
}

// read gets some blocks.
func (w *traffic) read(ctx context.Context) error {
	blocks := w.h.take(w.r, 1+w.r.IntN(8), anyBlock)
	defer w.h.give(blocks)
	_, err := w.get(ctx, blocks)
	return err
}

// get reads blocks, judges the answers and says which are there.
func (w *traffic) get(ctx context.Context, blocks []int) (there []bool, err error) {
	want := make([]block.Wanted, len(blocks))
	for k, i := range blocks {
		want[k].Hash = hashOf(i)
	}
	there = make([]bool, len(blocks))
	var wrong error
	err = w.c.Get(ctx, w.ns, want, block.GetOptions{NoPromote: w.r.IntN(2) == 0, Verify: true}, func(k int, p block.Payload) error {
		there[k] = p.Reason == block.Hit
		if p.Reason == block.MissUnavailable && w.ending.Load() {
			return errEnded
		}
		wrong = errors.Join(wrong, w.h.saw(blocks[k], p))
		return nil
	})
	switch {
	case wrong != nil:
		return nil, wrong
	case err != nil:
		return nil, w.failed("get", err)
	}
	return there, nil
}

// leaseTime is longer than what is done under a lease takes.
const leaseTime = time.Minute

// lease matches with a lease: what is listed is readable as long as that runs.
func (w *traffic) lease(ctx context.Context) error {
	blocks := w.h.take(w.r, 1+w.r.IntN(8), anyBlock)
	defer w.h.give(blocks)
	_, err := w.listed(ctx, blocks, w.r.IntN(4) > 0)
	return err
}

// listed reads blocks under a lease that a match gives, and says which there are.
func (w *traffic) listed(ctx context.Context, blocks []int, release bool) (there []bool, err error) {
	hashes := make([]block.Hash, len(blocks))
	for k, i := range blocks {
		hashes[k] = hashOf(i)
	}
	m, err := w.c.Match(ctx, w.ns, hashes, block.MatchOptions{All: true, Lease: leaseTime})
	if err != nil || len(blocks) == 0 {
		return nil, w.failed("match", err)
	}
	if there, err = w.get(ctx, blocks); err != nil {
		return nil, err
	}
	for k, f := range m.Blocks {
		if f.State == block.Resident && !there[k] {
			return nil, fmt.Errorf("block %d is listed in %v, leased, and not readable", blocks[k], f.Tier)
		}
		if f.State != block.Resident && there[k] {
			return nil, fmt.Errorf("block %d is readable and not listed", blocks[k])
		}
	}
	w.h.count(func(c *counts) { c.leased += m.Lease.Count })
	if release && m.Lease.ID != 0 {
		if err := w.c.ReleaseLease(ctx, m.Lease.ID); err != nil {
			return nil, w.failed("release lease", err)
		}
	}
	return there, nil
}

// prefetch brings blocks up, and often changes its mind.
func (w *traffic) prefetch(ctx context.Context) error {
	var hashes []block.Hash
	for range 1 + w.r.IntN(16) {
		hashes = append(hashes, hashOf(w.r.IntN(len(w.h.mu.blocks))))
	}
	mine, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := w.r.IntN(2 * len(hashes))
	err := w.c.Prefetch(mine, w.ns, hashes, block.PrefetchOptions{}, func(p block.Progress) error {
		if p.Index == stop {
			cancel()
		}
		return nil
	})
	if err != nil && mine.Err() == nil {
		return w.failed("prefetch", err)
	}
	w.h.count(func(c *counts) { c.prefetched += len(hashes) })
	return nil
}
