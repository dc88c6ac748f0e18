package tcp

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// settleTime is how long a call whose context has ended waits for its memory to
// become quiet before it gives the connection up.
const settleTime = 40 * time.Millisecond

// line is a connection that we dialed: we call on it, and the peer serves.
type line struct {
	p    *peer
	raw  net.Conn // under TLS; closing it never waits
	conn *frame.Conn

	turn    chan struct{} // held by who sends
	credits chan struct{} // one for each unanswered call
	load    atomic.Int64  // bytes under way, for the choice of a line
	gone    chan struct{} // closed when the connection is given up
	left    chan struct{} // closed when nothing lands any more

	mu struct {
		sync.Mutex
		why     error // why it is gone
		calls   map[uint32]*call
		last    uint32
		landing *call // into whose memory a frame is read now
	}
}

// call is something that the peer answers by Done. The fields below done are
// guarded by the line's mutex, until done is closed.
type call struct {
	id      uint32
	pieces  []piece       // of a read: where its bytes go
	done    chan struct{} // closed when Done came
	got     []uint32      // bytes of each piece that landed
	over    bool          // nothing may land any more
	quiet   chan struct{} // made when something lands although it is over; closed when that has ended
	status  uint16
	refused []span
}

// newLine takes over a connection on which the hellos were said.
func newLine(p *peer, d dialed) *line {
	l := &line{
		p: p, raw: d.raw, conn: frame.NewConn(d.c, &p.b.opt.Frame),
		turn: make(chan struct{}, 1), credits: make(chan struct{}, d.calls),
		gone: make(chan struct{}), left: make(chan struct{}),
	}
	l.mu.calls = map[uint32]*call{}
	return l
}

// serve receives until the connection ends.
func (l *line) serve() {
	defer close(l.left)
	l.end(l.conn.Serve(l))
	_ = l.conn.Close() // why is known
	l.p.lost(l)
}

// end gives the connection up. Calls under way fail.
func (l *line) end(why error) {
	l.mu.Lock()
	first := l.mu.why == nil
	if first {
		l.mu.why = disconnected(l.p.id, why)
		close(l.gone)
	}
	l.mu.Unlock()
	if first {
		l.p.ready.Store(nil)
		_ = l.raw.Close() // nothing else is to be told
	}
}

func (l *line) ended() bool {
	select {
	case <-l.gone:
		return true
	default:
		return false
	}
}

// err says why the connection is gone.
func (l *line) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.why
}

// watch gives the connection up some time after ctx has ended, unless stop is called
// before.
func (l *line) watch(ctx context.Context) (stop func()) {
	if ctx.Done() == nil {
		return func() {}
	}
	var mu sync.Mutex
	var timer *time.Timer
	stopped := false
	unhook := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		if !stopped {
			timer = time.AfterFunc(settleTime, func() { l.end(fmt.Errorf("no answer in time: %w", context.Cause(ctx))) })
		}
	})
	return func() {
		if unhook() {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		if timer != nil {
			timer.Stop()
		}
	}
}

// begin makes a call, as soon as the peer has room for one more.
func (l *line) begin(ctx context.Context, pieces []piece) (*call, error) {
	select {
	case l.credits <- struct{}{}:
	case <-l.gone:
		return nil, l.err()
	case <-ctx.Done():
		return nil, xfer.ErrCanceled
	}
	c := &call{pieces: pieces, done: make(chan struct{})}
	if pieces != nil {
		c.got = make([]uint32, len(pieces))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for c.id == 0 || l.mu.calls[c.id] != nil {
		l.mu.last++
		c.id = l.mu.last
	}
	l.mu.calls[c.id] = c
	return c, nil
}

// drop takes back a call of which nothing was sent.
func (l *line) drop(c *call) {
	l.mu.Lock()
	delete(l.mu.calls, c.id)
	l.mu.Unlock()
	<-l.credits
}

// send sends frames when it is our turn. ctx bounds only the wait for that.
func (l *line) send(ctx context.Context, frames []frame.Frame) error {
	select {
	case l.turn <- struct{}{}:
	case <-l.gone:
		return l.err()
	case <-ctx.Done():
		return xfer.ErrCanceled
	}
	err := l.conn.Send(context.Background(), frames...)
	<-l.turn
	if err != nil {
		l.end(err)
		return l.err()
	}
	return nil
}

// wait waits for the answer. ctx ends the wait early only where it may: not for a
// write, whose bytes may still be on their way.
func (l *line) wait(ctx context.Context, c *call) error {
	select {
	case <-c.done:
		return nil
	case <-l.gone:
		select {
		case <-c.done: // it came before
			return nil
		default:
			return l.err()
		}
	case <-ctx.Done():
		return xfer.ErrCanceled
	}
}

// giveUp ends a call before its answer: when it returns nothing lands in its memory
// any more. The peer is told, so that it need not send the rest.
func (l *line) giveUp(c *call) {
	l.mu.Lock()
	c.over = true
	if l.mu.landing == c {
		c.quiet = make(chan struct{})
	}
	quiet := c.quiet
	l.mu.Unlock()
	if quiet != nil {
		select {
		case <-quiet:
		case <-l.left:
		}
	}
	select {
	case l.turn <- struct{}{}:
		if err := l.conn.Send(context.Background(), frame.Frame{Header: frame.Header{Type: typeCancel, ID: callID(c.id, 0)}}); err != nil {
			l.end(err)
		}
		<-l.turn
	default: // it is only a favour
	}
}

// Land finds the piece of a read that is still wanted.
func (l *line) Land(h *frame.Header) []byte {
	id, i := splitID(h.ID)
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.mu.calls[id]
	if c == nil || c.over || h.Length == 0 || uint64(i) >= uint64(len(c.pieces)) {
		return l.skip(h)
	}
	p := &c.pieces[i]
	// In order and not beyond the end, so that every byte is counted once.
	if h.Offset != uint64(c.got[i]) || h.Length > p.n-c.got[i] {
		return l.skip(h)
	}
	l.mu.landing = c
	return arena.View(p.local+h.Offset, int(h.Length))
}

func (l *line) skip(h *frame.Header) []byte {
	l.p.b.count.skipped.Add(int64(h.Length))
	return nil
}

// Landed counts what arrived.
func (l *line) Landed(h *frame.Header, p []byte, err error) error {
	_, i := splitID(h.ID)
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.mu.landing
	l.mu.landing = nil
	if c.quiet != nil {
		close(c.quiet)
		c.quiet = nil
	}
	if err == nil {
		c.got[i] += uint32(len(p))
		l.p.b.count.bytesIn.Add(int64(len(p)))
	}
	return nil
}

// Frame takes answers, and small pieces of reads.
func (l *line) Frame(h *frame.Header, p []byte) error {
	switch h.Type {
	case frame.Done:
		return l.answered(h, p)
	case typeGather:
		l.gather(h, p)
	case frame.Hello, frame.Flush, frame.Read, frame.Note, frame.Message, typeScatter, typeCancel:
		return fmt.Errorf("%w: type %d from who serves", errProtocol, h.Type)
	}
	return nil // of a later version
}

func (l *line) answered(h *frame.Header, p []byte) error {
	var refused []span
	if h.Status == statusRefused {
		var err error
		if refused, err = parseSpans(p); err != nil {
			return err
		}
	}
	id, _ := splitID(h.ID)
	l.mu.Lock()
	c := l.mu.calls[id]
	delete(l.mu.calls, id)
	if c != nil {
		c.over, c.status, c.refused = true, h.Status, refused
	}
	l.mu.Unlock()
	if c == nil {
		return fmt.Errorf("%w: answer to call %d, which was not made", errProtocol, id)
	}
	<-l.credits
	close(c.done)
	return nil
}

// gather copies whole pieces that came one behind the other.
func (l *line) gather(h *frame.Header, b []byte) {
	id, i := splitID(h.ID)
	l.mu.Lock()
	defer l.mu.Unlock() // over the copying, which is short: who ends the call waits
	c := l.mu.calls[id]
	for ; c != nil && !c.over && uint64(i) < uint64(len(c.pieces)); i++ {
		p := &c.pieces[i]
		if uint64(p.n) > uint64(len(b)) || c.got[i] != 0 {
			break
		}
		copy(arena.View(p.local, int(p.n)), b)
		c.got[i] = p.n
		b = b[p.n:]
		l.p.b.count.bytesIn.Add(int64(p.n))
	}
	l.p.b.count.skipped.Add(int64(len(b)))
}
