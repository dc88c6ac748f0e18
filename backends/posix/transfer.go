package posix

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// maxTries bounds how often an operation that the kernel broke off without
// moving a byte is begun again.
const maxTries = 16

// flight is a transfer under way: where engines leave what they completed, and
// what wakes its owner, the goroutine in Transfer. Everything but mu and wake
// is the owner's.
type flight struct {
	wake     chan struct{} // holds one: look at mu.done, or try to start more
	inFlight int
	sqTail   uint32 // of the io_uring engine: how far the ring must be submitted
	own      *piece // left for the owner to do, while it waits
	mu       struct {
		sync.Mutex
		done *piece // a list, latest first
	}
}

// deliver hands a completed piece to the owner. The piece and the flight may be
// reused as soon as it is in the list.
func (f *flight) deliver(p *piece, res int) {
	f.mu.Lock()
	p.res = res
	p.next = f.mu.done
	f.mu.done = p
	f.wakeUp()
	f.mu.Unlock()
}

func (f *flight) wakeUp() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// take takes what was delivered, in the order of delivery.
func (f *flight) take() *piece {
	f.mu.Lock()
	p := f.mu.done
	f.mu.done = nil
	f.mu.Unlock()
	var q *piece
	for p != nil {
		p, p.next, q = p.next, q, p
	}
	return q
}

// Transfer performs a prepared transfer on the caller's goroutine.
func (b *Backend) Transfer(ctx context.Context, r xfer.Prepared, done func(i int, err error)) error {
	p := r.(*prepared)
	if err := b.begin(); err != nil {
		for i := range p.pairs {
			done(i, err)
		}
		return err
	}
	defer b.inFlight.Done()
	for i := range p.pairs {
		q := &p.pairs[i]
		q.left, q.moved, q.cause = q.pieces, 0, nil
	}
	for i := range p.parts {
		p.parts[i].next = p.parts[i].from
	}
	cancel := ctx.Done()
	for left := len(p.pieces); ; {
		if cause := ctx.Err(); cause != nil {
			left -= b.abandon(p, context.Cause(ctx), done)
			cancel = nil // what is in flight is waited for
		} else {
			b.startMore(p)
		}
		if left == 0 {
			return nil
		}
		b.engine.await(&p.flight, cancel)
		for q := p.flight.take(); q != nil; {
			next := q.next
			p.flight.inFlight--
			if b.complete(p, q, done) {
				left--
			}
			q = next
		}
	}
}

// startMore starts as many pieces as their devices have room for.
func (b *Backend) startMore(p *prepared) {
	for i := range p.parts {
		pt := &p.parts[i]
		if pt.next == pt.end {
			continue
		}
		n, waited, alone := pt.dev.admit(pt, p.pieces[pt.next:pt.end])
		if waited {
			b.count.waits.Add(1)
		}
		if n == 0 {
			continue
		}
		ps := p.pieces[pt.next : pt.next+n]
		pt.next += n
		for j := range ps {
			q := &ps[j]
			q.moved, q.tries = 0, 0
			if q.write && q.how == bounced {
				copy(q.bounce, arena.View(q.mem, q.n))
			}
		}
		p.flight.inFlight += n
		if alone && len(p.pieces) == 1 && ps[0].write {
			// The kernel ends an asynchronous write in a thread of its own, a
			// synchronous one in the waiting thread: a tenth of the time of a 1 MiB
			// write to a fast disk. With more in flight it does not show.
			p.flight.own = &ps[0]
			continue
		}
		b.engine.start(&p.flight, ps)
	}
}

// abandon ends every piece that was not started and says how many there were.
func (b *Backend) abandon(p *prepared, cause error, done func(int, error)) int {
	n := 0
	for i := range p.parts {
		pt := &p.parts[i]
		pt.dev.leave(pt)
		for ; pt.next < pt.end; pt.next++ {
			b.count.canceled.Add(1)
			p.credit(&p.pieces[pt.next], 0, fmt.Errorf("%w: %w", xfer.ErrCanceled, cause), done)
			n++
		}
	}
	return n
}

// complete looks at what an operation did. It reports false when it began
// another one for the rest.
func (b *Backend) complete(p *prepared, q *piece, done func(int, error)) bool {
	var cause error
	switch {
	case q.res > 0:
		q.moved += q.res
		// Short in the middle of a file is legal; the rest is asked for again. A
		// direct operation that stops inside a block is at the end of the file.
		if q.moved < q.ioLen && (q.how == buffered || int64(q.moved)%q.file.align == 0) && q.described() < q.n {
			b.again(p, q)
			return false
		}
	case q.res < 0:
		errno := unix.Errno(-q.res)
		// ECANCELED and EINTR: the thread that submitted ended, which is nobody's
		// wish here.
		if (errno == unix.EINTR || errno == unix.EAGAIN || errno == unix.ECANCELED) && q.tries < maxTries {
			q.tries++
			b.again(p, q)
			return false
		}
		cause = errno
	}
	moved := q.described()
	if moved < q.n {
		b.count.failed.Add(1)
		if cause == nil {
			cause = errEnd
		}
	}
	if !q.write && q.how == bounced {
		copy(arena.View(q.mem, moved), q.bounce[q.off-q.ioOff:])
	}
	switch q.how {
	case bounced:
		b.count.bounced.Add(1)
	case buffered:
		b.count.buffered.Add(1)
	}
	if q.write {
		b.count.writes.Add(1)
		b.count.writeBytes.Add(uint64(moved))
	} else {
		b.count.reads.Add(1)
		b.count.readBytes.Add(uint64(moved))
	}
	q.file.dev.release(q)
	p.credit(q, moved, cause, done)
	return true
}

// errEnd is why a transfer without an errno is short.
var errEnd = errors.New("end of file")

// described is how many of the described bytes were moved: those of the blocks
// around them do not count.
func (q *piece) described() int {
	return min(max(0, q.moved-int(q.off-q.ioOff)), q.n)
}

// again begins another operation for what is left of q, which keeps its room in
// the queue.
func (b *Backend) again(p *prepared, q *piece) {
	p.flight.inFlight++
	b.engine.start(&p.flight, p.pieces[q.index:q.index+1])
}

// credit books what a piece moved to its pairs, and ends those that have no
// further piece.
func (p *prepared) credit(q *piece, moved int, cause error, done func(int, error)) {
	for i := q.first; i <= q.last; i++ {
		pr := &p.pairs[i]
		from, to := max(pr.start, q.at), min(pr.start+pr.n, q.at+q.n)
		got := min(max(0, q.at+moved-from), to-from)
		pr.moved += got
		if got < to-from && pr.cause == nil {
			pr.cause = cause
		}
		if pr.left--; pr.left == 0 {
			done(i, p.result(i))
		}
	}
}

// result is the error of a pair that is complete.
func (p *prepared) result(i int) error {
	pr, far := &p.pairs[i], &p.far[i]
	if pr.cause == nil {
		return nil
	}
	where := fmt.Sprintf("posix %s %s [%d,+%d)", p.op, far.Region.(*file).path, far.Addr, far.Len)
	if errors.Is(pr.cause, xfer.ErrCanceled) {
		return fmt.Errorf("%s: %w", where, pr.cause)
	}
	return fmt.Errorf("%s: %w: %d of %d bytes: %w", where, xfer.ErrShort, pr.moved, pr.n, pr.cause)
}
