package tcp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

const (
	// shareBytes is the least that is worth a connection of its own: to wake another
	// goroutine here and at the peer costs as much as some 100 KiB.
	shareBytes = 1 << 20
	// shareAlign is where a descriptor is cut that goes over several connections.
	shareAlign = 64 << 10
)

// piece is a pair of descriptors, or a part of one.
type piece struct {
	local      uint64 // address
	token, off uint64 // of the peer's memory
	n          uint32
	pair       int32
}

func (p piece) sub(off, n uint32) piece {
	p.local += uint64(off)
	p.off += uint64(off)
	p.n = n
	return p
}

// transfer is a prepared transfer.
type transfer struct {
	op     xfer.Op
	peer   *peer
	pieces []piece
	pairs  int
	bytes  uint64
	one    [1]piece
}

// Prepare finds the peer and its tokens.
func (b *Backend) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	t := &transfer{op: op, pairs: len(local)}
	t.pieces = t.one[:0]
	if len(local) > 1 {
		t.pieces = make([]piece, 0, len(local))
	}
	for i := range local {
		r, ok := remote[i].Region.(*remoteRegion)
		if !ok {
			return nil, fmt.Errorf("tcp prepare descriptor %d: %w: a remote region of type %T", i, xfer.ErrInvalid, remote[i].Region)
		}
		if t.peer == nil {
			t.peer = r.peer
		}
		if r.peer != t.peer {
			return nil, fmt.Errorf("tcp prepare descriptor %d: %w: it is of peer %s, those before of %s", i, xfer.ErrInvalid, r.peer.id, t.peer.id)
		}
		l, off := local[i].Addr, remote[i].Addr-r.base
		for n := local[i].Len; n > 0; {
			k := min(n, maxPieceBytes)
			t.pieces = append(t.pieces, piece{local: l, token: r.token, off: off, n: uint32(k), pair: int32(i)})
			l, off, n = l+k, off+k, n-k
		}
		t.bytes += local[i].Len
	}
	return t, nil
}

// Release has nothing to undo.
func (b *Backend) Release(xfer.Prepared) {}

// Transfer moves the bytes, over several connections when there are many.
func (b *Backend) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	t := p.(*transfer)
	lines, err := t.peer.connect(ctx, false)
	if err != nil {
		for i := range t.pairs {
			done(i, err)
		}
		return err
	}
	res := result{}
	if chosen := choose(lines, int(min(t.bytes/shareBytes, 64))); len(chosen) == 1 {
		t.move(ctx, chosen[0], t.pieces, &res)
	} else {
		var wg sync.WaitGroup
		shares := split(t.pieces, t.bytes, len(chosen))
		for k, l := range chosen[1:] {
			wg.Go(func() { t.move(ctx, l, shares[k+1], &res) })
		}
		t.move(ctx, chosen[0], shares[0], &res)
		wg.Wait()
	}
	for i := range t.pairs {
		done(i, res.of(i))
	}
	return nil
}

// choose gives the first of the idle lines, which are warm, up to the number wanted, or
// the one with the least load: where others are at work, sharing gains nothing.
func choose(lines []*line, wanted int) []*line {
	best, load := 0, lines[0].load.Load()
	for i := 1; i < len(lines) && load > 0; i++ {
		if n := lines[i].load.Load(); n < load {
			best, load = i, n
		}
	}
	end := best + 1
	for ; load == 0 && end < len(lines) && end-best < wanted && lines[end].load.Load() == 0; end++ {
	}
	return lines[best:end]
}

// split cuts pieces into parts of about the same number of bytes.
func split(pieces []piece, bytes uint64, parts int) [][]piece {
	shares := make([][]piece, parts)
	all := make([]piece, 0, len(pieces)+parts) // a cut makes one more
	var at uint64                              // bytes given out
	i, off := 0, uint32(0)
	for k := range shares {
		end := bytes / uint64(parts) * uint64(k+1) / shareAlign * shareAlign
		if k == parts-1 {
			end = bytes
		}
		begin := len(all)
		for at < end {
			n := pieces[i].n - off
			if uint64(n) > end-at {
				n = uint32(end - at)
			}
			all = append(all, pieces[i].sub(off, n))
			at += uint64(n)
			if off += n; off == pieces[i].n {
				i, off = i+1, 0
			}
		}
		shares[k] = all[begin:len(all):len(all)]
	}
	return shares
}

// result collects the failures of a transfer's parts.
type result struct {
	mu   sync.Mutex
	errs map[int32]error
}

func (r *result) fail(pair int32, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.errs == nil {
		r.errs = map[int32]error{}
	}
	// A refusal says more than that something else was cancelled.
	if old := r.errs[pair]; old == nil || errors.Is(err, xfer.ErrInvalid) {
		r.errs[pair] = err
	}
}

func (r *result) of(pair int) error { return r.errs[int32(pair)] }

func (r *result) failAll(pieces []piece, err error) {
	for i := range pieces {
		r.fail(pieces[i].pair, err)
	}
}

// refuse fails the pieces that the peer refused.
func (r *result) refuse(l *line, pieces []piece, refused []span) {
	for _, s := range refused {
		for i := uint64(s.first); i < uint64(s.first)+uint64(s.count) && i < uint64(len(pieces)); i++ {
			p := &pieces[i]
			r.fail(p.pair, fmt.Errorf("%w: peer %s refuses descriptor %d: %d bytes at offset %d are not within memory that is registered there now",
				xfer.ErrInvalid, l.p.id, p.pair, p.n, p.off))
		}
	}
}

// move moves pieces over one connection.
func (t *transfer) move(ctx context.Context, l *line, pieces []piece, res *result) {
	if ctx.Err() != nil {
		res.failAll(pieces, xfer.ErrCanceled)
		return
	}
	var n int64 = 1
	for i := range pieces {
		n += int64(pieces[i].n)
	}
	l.load.Add(n)
	defer l.load.Add(-n)
	defer l.watch(ctx)()
	if t.op == xfer.Write {
		l.write(ctx, pieces, res)
	} else {
		l.read(ctx, pieces, res)
	}
}

// write sends pieces and waits until the peer has them.
func (l *line) write(ctx context.Context, pieces []piece, res *result) {
	c, err := l.begin(ctx, nil)
	if err != nil {
		res.failAll(pieces, err)
		return
	}
	b := batch{call: c.id, pieces: pieces}
	defer b.free(l.p.b)
	flush := frame.Frame{Header: frame.Header{Type: frame.Flush, ID: callID(c.id, 0)}}
	flushed := false
	for b.more() && ctx.Err() == nil {
		began := b.next
		b.fill(l.p.b)
		if flushed = !b.more(); flushed {
			b.frames = append(b.frames, flush)
		}
		if err := l.send(ctx, b.frames); err != nil {
			if l.ended() {
				res.failAll(pieces, whyEnded(ctx, err))
				return
			}
			b.next, flushed = began, false // not our turn before the end of ctx
			break
		}
		l.p.b.count.bytesOut.Add(b.bytes)
	}
	if b.next == (cursor{}) {
		l.drop(c)
		res.failAll(pieces, xfer.ErrCanceled)
		return
	}
	// Whatever became of ctx: the peer's memory is quiet only when the peer says so,
	// or when the connection is given up, which watch sees to.
	if !flushed {
		err = l.send(context.Background(), []frame.Frame{flush})
	}
	if err == nil {
		err = l.wait(context.Background(), c)
	}
	if err != nil {
		res.failAll(pieces, whyEnded(ctx, err))
		return
	}
	if rest := pieces[b.next.piece:]; len(rest) > 0 {
		res.failAll(rest, xfer.ErrCanceled)
	}
	switch c.status {
	case statusOK:
	case statusRefused:
		res.refuse(l, pieces, c.refused)
	default:
		res.failAll(pieces, fmt.Errorf("%w: peer %s answers a write with status %d", xfer.ErrUnavailable, l.p.id, c.status))
	}
}

// read asks for pieces and waits until they are here.
func (l *line) read(ctx context.Context, pieces []piece, res *result) {
	var calls []*call
	for begin := 0; begin < len(pieces); {
		part := pieces[begin:min(begin+maxEntries, len(pieces))]
		c, err := l.begin(ctx, part)
		if err == nil {
			list := make([]byte, 0, len(part)*entryBytes)
			for i := range part {
				list = entry{part[i].token, part[i].off, part[i].n}.append(list)
			}
			f := frame.Frame{Header: frame.Header{Type: frame.Read, ID: callID(c.id, 0)}, Payload: list}
			if err = l.send(ctx, []frame.Frame{f}); err != nil {
				l.drop(c)
			}
		}
		if err != nil {
			res.failAll(pieces[begin:], err)
			break
		}
		calls = append(calls, c)
		begin += len(part)
	}
	for _, c := range calls {
		err := l.wait(ctx, c)
		if err != nil {
			if l.ended() {
				<-l.left // for nothing lands then
			} else {
				l.giveUp(c)
			}
		}
		l.finishRead(ctx, c, err, res)
	}
	if l.ended() {
		<-l.left // also for a call that could not be sent whole
	}
}

// finishRead judges each piece of a read that is over by what of it has landed.
func (l *line) finishRead(ctx context.Context, c *call, err error, res *result) {
	l.mu.Lock()
	status, refused := c.status, c.refused
	l.mu.Unlock()
	if status == statusRefused {
		res.refuse(l, c.pieces, refused)
	}
	for i := range c.pieces {
		p := &c.pieces[i]
		switch got := c.got[i]; {
		case got == p.n:
		case err != nil:
			res.fail(p.pair, whyEnded(ctx, err))
		case status == statusBusy:
			res.fail(p.pair, fmt.Errorf("%w: peer %s has too many reads of this connection", xfer.ErrUnavailable, l.p.id))
		case status == statusRefused && covered(refused, uint32(i)):
		default:
			res.fail(p.pair, fmt.Errorf("%w: %d of %d bytes from peer %s", xfer.ErrShort, got, p.n, l.p.id))
		}
	}
}

// whyEnded is the end of ctx, when that came first or is why the connection was given
// up, else err.
func whyEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return xfer.ErrCanceled
	}
	return err
}

// covered says whether a piece is among those that were refused.
func covered(refused []span, i uint32) bool {
	for _, s := range refused {
		if i >= s.first && i-s.first < s.count {
			return true
		}
	}
	return false
}
