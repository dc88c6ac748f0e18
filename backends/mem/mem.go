// Package mem is the backend that copies between two places in this process's
// memory. It copies on the goroutine that runs the transfer, and with the help
// of other cores only where the list is so long that starting them is worth it.
// It needs nothing at run time. Memory must not be Go heap (which may move or
// be freed under the copy); use arenas.
package mem

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

const (
	// pieceBytes is how much is copied between two looks at the context: some
	// 0.1 ms, and as fast as copying at once (BenchmarkCopy).
	pieceBytes = 1 << 20

	// parallelBytes is the size of a transfer from which several cores share
	// it.
	parallelBytes = 16 << 20

	// maxWorkers bounds the cores that share one transfer: memory has no
	// bandwidth for more.
	maxWorkers = 8
)

// Kind is the backend's name.
const Kind = "mem"

// Backend copies between DRAM and DRAM.
type Backend struct {
	speed  speed
	closed atomic.Bool
}

// New makes the backend.
func New() *Backend { return &Backend{} }

// Name is "mem".
func (b *Backend) Name() string { return Kind }

// Caps says that it copies DRAM to DRAM within this process.
func (b *Backend) Caps() xfer.Caps {
	return xfer.Caps{
		Pairs:  []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}},
		Local:  true,
		Align:  1,
		Engine: "copy",
	}
}

// region holds nothing: an address is all that a copy needs.
type region struct{}

// Register accepts any piece of mapped memory; it cannot see whether it is
// mapped.
func (b *Backend) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	if b.closed.Load() {
		return nil, fmt.Errorf("%w: backend mem", xfer.ErrClosed)
	}
	if err := xfer.CheckDRAM(t, d); err != nil {
		return nil, err
	}
	return region{}, ctx.Err()
}

// Deregister has nothing to undo.
func (b *Backend) Deregister(xfer.Region) error { return nil }

// transfer is a prepared transfer.
type transfer struct {
	pairs []pair
	bytes uint64
	parts []part // how workers share it; nil when it is small
}

type pair struct{ to, from []byte }

// part is a piece of one pair.
type part struct {
	pair     int
	off, end int
}

// Prepare finds the memory behind the descriptors.
func (b *Backend) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	one := new(struct {
		transfer
		pair [1]pair
	})
	t := &one.transfer
	t.pairs = one.pair[:]
	if len(local) > 1 {
		t.pairs = make([]pair, len(local))
	}
	for i := range local {
		n := int(local[i].Len)
		l, r := arena.View(local[i].Addr, n), arena.View(remote[i].Addr, n)
		t.pairs[i] = pair{to: r, from: l}
		if op == xfer.Read {
			t.pairs[i] = pair{to: l, from: r}
		}
		t.bytes += local[i].Len
	}
	if t.bytes >= parallelBytes {
		t.split()
	}
	return t, nil
}

func (t *transfer) split() {
	for i, p := range t.pairs {
		for off := 0; off < len(p.to); off += pieceBytes {
			t.parts = append(t.parts, part{pair: i, off: off, end: min(off+pieceBytes, len(p.to))})
		}
	}
}

// Transfer copies.
func (b *Backend) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	t := p.(*transfer)
	if b.closed.Load() {
		err := fmt.Errorf("%w: backend mem", xfer.ErrClosed)
		for i := range t.pairs {
			done(i, err)
		}
		return err
	}
	timer := b.speed.begin(t.bytes)
	if workers := min(runtime.GOMAXPROCS(0), maxWorkers, len(t.parts)); workers > 1 {
		t.share(ctx, workers, done)
	} else {
		t.copyAll(ctx, done)
	}
	if ctx.Err() == nil {
		timer.end()
	}
	return nil
}

// copyAll copies pair by pair on this goroutine.
func (t *transfer) copyAll(ctx context.Context, done func(i int, err error)) {
	budget := 0 // bytes to copy before the next look at ctx
	stopped := ctx.Err() != nil
	for i, p := range t.pairs {
		for off := 0; off < len(p.to) && !stopped; {
			if budget <= 0 {
				if stopped = ctx.Err() != nil; stopped {
					break
				}
				budget = pieceBytes
			}
			n := copy(p.to[off:], p.from[off:min(off+budget, len(p.from))])
			off += n
			budget -= n
		}
		if stopped {
			done(i, xfer.ErrCanceled)
			continue
		}
		done(i, nil)
	}
}

// share copies on several goroutines, this one among them, and returns when
// all have ended.
func (t *transfer) share(ctx context.Context, workers int, done func(i int, err error)) {
	var (
		next   atomic.Int64
		wg     sync.WaitGroup
		report struct {
			sync.Mutex        // done is not called concurrently
			left       []int  // parts of each pair that are not done
			canceled   []bool // pairs of which a part was not copied
		}
	)
	report.left = make([]int, len(t.pairs))
	report.canceled = make([]bool, len(t.pairs))
	for _, c := range t.parts {
		report.left[c.pair]++
	}
	work := func() {
		for {
			k := next.Add(1) - 1
			if k >= int64(len(t.parts)) {
				return
			}
			c := t.parts[k]
			stopped := ctx.Err() != nil
			if !stopped {
				p := t.pairs[c.pair]
				copy(p.to[c.off:c.end], p.from[c.off:c.end])
			}
			report.Lock()
			report.canceled[c.pair] = report.canceled[c.pair] || stopped
			if report.left[c.pair]--; report.left[c.pair] == 0 {
				var err error
				if report.canceled[c.pair] {
					err = xfer.ErrCanceled
				}
				done(c.pair, err)
			}
			report.Unlock()
		}
	}
	for range workers - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}

// Release has nothing to undo.
func (b *Backend) Release(xfer.Prepared) {}

// Estimate predicts from the speed of earlier transfers.
func (b *Backend) Estimate(p xfer.Prepared) (xfer.Cost, error) {
	return b.speed.estimate(p.(*transfer).bytes), nil
}

// Close ends the backend.
func (b *Backend) Close() error {
	b.closed.Store(true)
	return nil
}
