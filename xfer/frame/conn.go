package frame

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Frame is a frame to send. A Data frame may have a payload of any length: it is
// sent as several frames of at most MaxData. Length is filled in.
type Frame struct {
	Header
	Payload []byte
}

// Handler is the user of a connection. Its methods are called by the goroutine
// that runs Serve, one at a time, in the order in which the frames arrived. While
// one runs nothing is received: two peers whose handlers send much to each other
// and wait for it would both stall, so what may take long belongs into another
// goroutine. Keep-alive does not depend on it.
//
// Headers are valid until the method returns.
type Handler interface {
	// Land says where the payload of a data frame goes: memory of h.Length bytes,
	// or nil to skip it.
	Land(h *Header) []byte
	// Landed follows each Land that returned memory, when nothing writes into it any
	// more: with nil when the payload is there, else with what broke the connection.
	// An error ends the connection, and is told to the peer.
	Landed(h *Header, p []byte, err error) error
	// Frame takes any other frame but Ping, Pong and Bye. The payload is valid until
	// it returns. A message longer than Options.MaxMessage comes when its payload has
	// been skipped, without it: p is shorter than h.Length. An error ends the connection,
	// and is told to the peer.
	Frame(h *Header, p []byte) error
}

// Options are what a connection may be told. Times are kept to a quarter of the
// smallest of them.
type Options struct {
	// PingAfter is how long either side may be silent before the peer is sent a
	// Ping, and DeadAfter how long nothing may come from the peer, nor a byte be
	// taken by it, before the connection is given up. 0: 10 and 30 seconds.
	PingAfter, DeadAfter time.Duration
	// StallAfter is how long a send may wait without the peer taking a byte before
	// the connection is given up. 0: 30 seconds.
	StallAfter time.Duration
	// MaxMessage is how many bytes of payload a message may have, sent or received, at
	// most the constant of that name. 0: that many.
	MaxMessage int
}

// Why a connection was given up. Err, Serve and Send return them.
var (
	ErrSilent  = errors.New("nothing comes from the peer")
	ErrStalled = errors.New("the peer takes no bytes")
	ErrTorn    = errors.New("a send was broken off within a frame")
	ErrBye     = errors.New("the peer closed the connection") // with the reason that it told
)

// Conn is a connection that carries frames. Sends may come from many goroutines;
// one goroutine receives.
type Conn struct {
	link
	o       Options
	in      in
	turn    turn // to send
	out     out
	control control
	stats   counters

	broken  atomic.Pointer[error] // what ended the connection, first
	done    chan struct{}         // closed after that
	closing sync.Once
	owned   sync.WaitGroup
}

type counters struct {
	framesIn, framesOut, bytesIn, bytesOut, skipped atomic.Int64
}

// NewConn takes over a connection and clears its deadlines. The caller runs Serve
// and calls Close.
func NewConn(c net.Conn, o *Options) *Conn {
	n := &Conn{link: newLink(c), done: make(chan struct{})}
	if o != nil {
		n.o = *o
	}
	setDefault(&n.o.PingAfter, 10*time.Second)
	setDefault(&n.o.DeadAfter, 30*time.Second)
	setDefault(&n.o.StallAfter, 30*time.Second)
	if n.o.MaxMessage <= 0 || n.o.MaxMessage > MaxMessage {
		n.o.MaxMessage = MaxMessage
	}
	n.in.init(&n.link)
	n.out.init(&n.link)
	n.control.poke = make(chan struct{}, 1)
	_ = c.SetDeadline(time.Time{}) // a connection that refuses it fails at its first use
	n.owned.Go(n.watch)
	n.owned.Go(n.answer)
	return n
}

func setDefault(d *time.Duration, to time.Duration) {
	if *d <= 0 {
		*d = to
	}
}

// RemoteAddr is the peer's address.
func (c *Conn) RemoteAddr() net.Addr { return c.c.RemoteAddr() }

// fail records what ended the connection, unless something else has before, and
// closes it. It returns what was recorded.
func (c *Conn) fail(err error) error {
	c.broken.CompareAndSwap(nil, &err)
	c.closing.Do(func() {
		close(c.done)
		c.close()
	})
	return *c.broken.Load()
}

// Err is what ended the connection, nil while it is open.
func (c *Conn) Err() error {
	if p := c.broken.Load(); p != nil {
		return *p
	}
	return nil
}

// Close ends the connection: Serve returns, and sends fail with net.ErrClosed. It
// is safe to call twice, and from the handler.
func (c *Conn) Close() error {
	c.fail(net.ErrClosed)
	c.owned.Wait()
	return nil
}

// Stats counts what a connection has carried.
type Stats struct {
	FramesIn, FramesOut int64
	BytesIn, BytesOut   int64 // of payloads
	Skipped             int64 // of BytesIn, those that the handler did not want
}

// Stats is a snapshot of the counters.
func (c *Conn) Stats() Stats {
	return Stats{
		FramesIn: c.stats.framesIn.Load(), FramesOut: c.stats.framesOut.Load(),
		BytesIn: c.stats.bytesIn.Load(), BytesOut: c.stats.bytesOut.Load(),
		Skipped: c.stats.skipped.Load(),
	}
}
