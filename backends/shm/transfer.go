package shm

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

const (
	// pieceBytes is how much is copied between two looks at the context, the peer
	// and the gate: some 0.1 ms, and as fast as copying at once.
	pieceBytes = 1 << 20

	// pieceDescs bounds the pairs in it to what one process_vm call takes.
	pieceDescs = 1024

	// parallelBytes is the size of a transfer from which several cores share it.
	parallelBytes = 16 << 20

	// maxWorkers bounds the cores that share one transfer: memory has no bandwidth
	// for more.
	maxWorkers = 8
)

// transfer is a prepared transfer.
type transfer struct {
	op      xfer.Op
	peer    *peer
	regions []*remoteRegion // each once
	pairs   []pair
	pieces  []piece
	bytes   uint64
	split   bool // some pair is in several pieces
}

// pair is this process's side and the other's, by its offset in the region.
type pair struct {
	local []byte
	off   uint64
}

// piece is what is copied at once: several whole pairs of one region, or a part of
// one pair.
type piece struct {
	region   int // in regions
	from, to int // the pairs
	off, end int // of a single pair; all of it when end is 0
}

// Prepare finds the memory behind the descriptors. All remote memory must be one
// peer's.
func (b *Backend) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	t := &transfer{op: op, pairs: make([]pair, len(local)), pieces: make([]piece, 0, 1)}
	var known map[*remoteRegion]int // made for the second
	var last *remoteRegion
	index, sum := 0, 0 // the region of last, bytes of the piece under way
	for i := range local {
		r, ok := remote[i].Region.(*remoteRegion)
		if !ok {
			return nil, fmt.Errorf("%w: descriptor %d: the remote region is a %T, not a peer's", xfer.ErrInvalid, i, remote[i].Region)
		}
		n := int(local[i].Len)
		t.pairs[i] = pair{arena.View(local[i].Addr, n), remote[i].Addr - r.addr}
		t.bytes += uint64(n)
		fits := r == last && n <= pieceBytes-sum && i-t.pieces[len(t.pieces)-1].from < pieceDescs
		if r != last {
			if t.peer != nil && r.peer != t.peer {
				return nil, fmt.Errorf("%w: descriptor %d: memory of %s and of %s", xfer.ErrInvalid, i, r.peer.id, t.peer.id)
			}
			last, t.peer = r, r.peer
			if index, ok = known[r]; !ok {
				index = len(t.regions)
				if index == 1 {
					known = map[*remoteRegion]int{t.regions[0]: 0}
				}
				if index > 0 {
					known[r] = index
				}
				t.regions = append(t.regions, r)
			}
		}
		switch {
		case fits:
			t.pieces[len(t.pieces)-1].to++
			sum += n
		case n <= pieceBytes:
			t.pieces = append(t.pieces, piece{region: index, from: i, to: i + 1})
			sum = n
		default:
			t.split = true
			for off := 0; off < n; off += pieceBytes {
				t.pieces = append(t.pieces, piece{index, i, i + 1, off, min(off+pieceBytes, n)})
			}
			sum = pieceBytes
		}
	}
	return t, nil
}

// Release has nothing to undo.
func (b *Backend) Release(xfer.Prepared) {}

// run is one transfer under way.
type run struct {
	*transfer
	link   *link
	grants []*grant
	refuse []error // why there is no grant
	done   func(i int, err error)
	mu     struct {
		sync.Mutex               // done is not called concurrently
		left       []int         // pieces of each pair that are not done; nil where each pair is in one
		failed     map[int]error // pairs of which a piece failed
		err        error         // of the connection
	}
}

// Transfer copies. A peer's process that dies, and a connection that ends, fail what
// was not copied until then.
func (b *Backend) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	t := p.(*transfer)
	if ctx.Err() != nil {
		return t.fail(canceled(ctx), done)
	}
	l, err := b.link(ctx, t.peer, false)
	if err != nil {
		return t.fail(err, done)
	}
	defer l.release()
	r := run{transfer: t, link: l, done: done}
	r.grants, r.refuse = make([]*grant, len(t.regions)), make([]error, len(t.regions))
	for i, g := range t.regions {
		if r.grants[i], r.refuse[i] = l.grant(ctx, g); r.refuse[i] == nil {
			defer l.unref(r.grants[i])
		}
	}
	if t.split {
		r.mu.left = make([]int, len(t.pairs))
		for i := range t.pieces {
			for k := t.pieces[i].from; k < t.pieces[i].to; k++ {
				r.mu.left[k]++
			}
		}
	}
	if workers := min(runtime.GOMAXPROCS(0), maxWorkers, len(t.pieces)); t.bytes >= parallelBytes && workers > 1 {
		r.share(ctx, workers)
	} else {
		var scratch vectors
		for i := range t.pieces {
			r.piece(ctx, &t.pieces[i], &scratch)
		}
	}
	return r.mu.err
}

// fail ends a transfer that did not begin.
func (t *transfer) fail(err error, done func(i int, err error)) error {
	for i := range t.pairs {
		done(i, err)
	}
	if errors.Is(err, xfer.ErrCanceled) {
		return nil
	}
	return err
}

// share copies on several goroutines, this one among them, and returns when all
// have ended.
func (r *run) share(ctx context.Context, workers int) {
	var next atomic.Int64
	var wg sync.WaitGroup
	work := func() {
		var scratch vectors
		for {
			k := next.Add(1) - 1
			if k >= int64(len(r.pieces)) {
				return
			}
			r.piece(ctx, &r.pieces[k], &scratch)
		}
	}
	for range workers - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}

// piece copies one piece and tells of the pairs that end with it.
func (r *run) piece(ctx context.Context, p *piece, v *vectors) {
	v.errs = v.errs[:0]
	err := r.copy(ctx, p, v)
	r.mu.Lock()
	defer r.mu.Unlock()
	if errors.Is(err, xfer.ErrDisconnected) {
		r.mu.err = err
	}
	for i := p.from; i < p.to; i++ {
		e := err
		if e == nil && len(v.errs) > 0 {
			e = v.errs[i-p.from]
		}
		if e != nil && r.mu.failed[i] == nil {
			if r.mu.failed == nil {
				r.mu.failed = map[int]error{}
			}
			r.mu.failed[i] = e
		}
		if r.mu.left != nil {
			if r.mu.left[i]--; r.mu.left[i] > 0 {
				continue
			}
		}
		r.done(i, r.mu.failed[i])
	}
}

// copy copies one piece; the error is of all its pairs, and v.errs has those of
// single ones.
func (r *run) copy(ctx context.Context, p *piece, v *vectors) error {
	l, g := r.link, r.grants[p.region]
	switch {
	case r.refuse[p.region] != nil:
		return r.refuse[p.region]
	case ctx.Err() != nil:
		return canceled(ctx)
	case l.broken.Load():
		return l.err()
	case !l.gate.enter(g.word):
		return l.refused(r.regions[p.region])
	}
	var err error
	if g.file != nil && (r.op == xfer.Read || g.file.Writable()) {
		err = r.copyMapped(p, g)
	} else if err = l.alive(); err == nil { // the number must be the peer's
		err = r.copyVM(p, g, v)
	}
	l.gate.leave(g.word)
	if err != nil {
		return err
	}
	return l.alive()
}

// span is what a piece has of one of its pairs.
func (t *transfer) span(p *piece, i int) (local []byte, off uint64) {
	c := &t.pairs[i]
	if p.end == 0 {
		return c.local, c.off
	}
	return c.local[p.off:p.end], c.off + uint64(p.off)
}

// copyMapped copies to or from the peer's memory file.
func (r *run) copyMapped(p *piece, g *grant) (err error) {
	// A sealed file cannot be cut short, but its owner can take huge pages out of it
	// for which there may be no others, and memory can be broken. That is
	// the transfer's error then, not the end of this process.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch f := recover().(type) {
		case nil:
		case interface {
			error
			Addr() uintptr
		}:
			err = fmt.Errorf("%w: fault at %#x: %w", xfer.ErrShort, f.Addr(), f)
		default:
			panic(f)
		}
	}()
	b := g.file.Bytes()
	for i := p.from; i < p.to; i++ {
		local, off := r.span(p, i)
		there := b[g.off+off:][:len(local)]
		if r.op == xfer.Read {
			copy(local, there)
		} else {
			copy(there, local)
		}
	}
	return nil
}
