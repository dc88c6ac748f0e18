package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer/frame"
)

// dialTimeout is the longest that Dial takes.
const dialTimeout = 10 * time.Second

// ClientOptions are what a client may be told.
type ClientOptions struct {
	Token string      // that the server wants to see; empty: none
	TLS   *tls.Config // over TCP; nil: plain text
	Name  string      // of the client, for the server's log
	Calls int         // most calls in flight; 0: what the server allows
	Bytes int64       // most payload bytes of gets in flight; 0: what the server allows
	// Message is how many bytes a message may have, either way, 64 KiB to 1 MiB, where the
	// server does not want fewer; 0: 1 MiB. Calls are cut to what it has room for.
	Message int
	Logger  *slog.Logger // nil: silent
	// NoShared does not map the store's memory: over a unix socket, too, the server
	// sends and receives the bytes.
	NoShared bool
	// NoGrants keeps no places for puts to come: each put asks for its own, which costs
	// it a round trip, and holds nothing of the store's memory when it is over.
	NoGrants bool
	// GiveBack are places that Leftover told of an earlier session of this process with
	// the same server.
	GiveBack []uint64
	// Regions are memory files of this process's for RegionGet and RegionPut, for as
	// long as the session lasts. They need a unix socket, and a server that takes them.
	Regions []Region
	Frame   frame.Options // of the connection
}

// Namespace is a namespace as the messages name it.
type Namespace struct {
	ID      block.NamespaceID
	Tag     uint64 // of its descriptor, as OpenNamespace answered; 0: the server does not check the handle
	HashLen int    // bytes of a hash that count
}

func (n *Namespace) keys(packed []byte) Keys {
	return Keys{NS: n.ID, Tag: n.Tag, HashLen: uint8(n.HashLen), Hashes: packed}
}

// check refuses lengths that no hash has.
func (n *Namespace) check() error {
	if !block.ValidHashLen(n.HashLen) {
		return invalid("namespace %d: hash length %d bytes, want 8, 16, 20 or 32", n.ID, n.HashLen)
	}
	return nil
}

// Client is one session: one connection with what it has leased and been granted.
// All methods may be called concurrently, and return errors that wrap block's
// sentinels or the context's errors. When the connection ends every call fails with
// block.ErrDisconnected, and the client is of no more use: it does not connect again.
//
// A call without a deadline is ended by the server's default. A call whose context
// ends returns at once, and nothing is written into its memory afterwards. To be sure
// of that it may have to give up the connection.
type Client struct {
	network string
	peer    string // network and address
	conn    *frame.Conn
	welcome WelcomeMessage
	log     *slog.Logger
	memory  []*arena.Shared // the store's; nil: not shared as a whole
	chunks  *chunkTable     // of its memory, those that come; nil: none do
	keep    bool            // places for puts to come
	held    *socket         // with regions: what tells when the server touches them no more

	slots   chan struct{}       // bounds the calls in flight
	flight  *semaphore.Weighted // of welcome.Bytes
	records sync.Pool           // *pending

	mu struct {
		sync.Mutex
		calls map[uint64]*pending
		id    uint64 // last one given
		err   error  // why the connection ended
		users int    // of memory, now
		quiet chan struct{}
	}
	grants  grants
	joined  joined
	later   later
	landing *pending // whose frame is being read; the reader's own

	counts struct{ gets, puts, inPlace, bytesIn, bytesOut atomic.Int64 }

	leftover []uint64      // set by Close
	ended    chan struct{} // closed when the connection has ended
	work     sync.WaitGroup
	closer   sync.Once
}

// Dial opens a session at an address of "tcp" or "unix". It is an ErrDisconnected
// when nobody answers there, an ErrDenied when the token is wrong, ErrInvalid when
// what answers speaks no version of this protocol. It gives up after ten seconds, or
// when ctx ends before that.
func Dial(ctx context.Context, network, address string, opts *ClientOptions) (*Client, error) {
	var o ClientOptions
	if opts != nil {
		o = *opts
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Message == 0 {
		o.Message = frame.MaxMessage
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	peer := network + " " + address
	fail := func(err error) error {
		switch {
		case ctx.Err() != nil:
			err = errors.Join(err, ctx.Err())
		case errors.Is(err, os.ErrDeadlineExceeded): // the connection's clock was first
			err = errors.Join(err, context.DeadlineExceeded)
		}
		return fmt.Errorf("open session at %s: %w", peer, err)
	}
	if o.Message < MinMessage || o.Message > frame.MaxMessage {
		return nil, fail(invalid("message: %d bytes, want %d to %d", o.Message, MinMessage, frame.MaxMessage))
	}
	conn, err := connect(ctx, network, address, &o)
	if err != nil {
		return nil, fail(&lost{err})
	}
	welcome, files, err := greet(ctx, conn, &o)
	if err != nil {
		_ = conn.Close() // the error says more
		return nil, fail(err)
	}
	var memory []*arena.Shared
	var chunks *chunkTable
	switch {
	case welcome.Features&FeatureShared != 0:
		memory, err = mapChunks(files, welcome.Chunks)
		if err != nil {
			o.Logger.Warn("session goes on without shared memory", "peer", peer, "err", err)
		}
	case welcome.Features&FeatureChunks != 0:
		if len(files) == 0 {
			_ = conn.Close() // it is of no use
			return nil, fail(invalid("server has passed no socket for the files of its memory"))
		}
		if chunks, err = newChunkTable(files[0], o.Logger); err != nil {
			_ = conn.Close() // the error says more
			closeFiles(files[1:])
			return nil, fail(&lost{err})
		}
		files = files[1:]
	}
	closeFiles(files)
	var held *socket
	if len(o.Regions) > 0 {
		if held, err = holdSocket(conn); err != nil {
			_ = conn.Close() // the error says more
			return nil, errors.Join(fail(err), unmapChunks(memory), chunks.close())
		}
	}
	c := newClient(network, peer, conn, welcome, held, &o)
	c.memory, c.chunks = memory, chunks
	c.start(&o)
	return c, nil
}

// connect opens the connection and, where it is wanted, its TLS.
func connect(ctx context.Context, network, address string, o *ClientOptions) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	if err != nil || o.TLS == nil || network == "unix" {
		return conn, err
	}
	cfg := o.TLS
	if cfg.ServerName == "" && !cfg.InsecureSkipVerify {
		cfg = cfg.Clone()
		if cfg.ServerName, _, err = net.SplitHostPort(address); err != nil {
			cfg.ServerName = address
		}
	}
	secure := tls.Client(conn, cfg)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close() // of no use without TLS
		return nil, err
	}
	return secure, nil
}

// greet exchanges the hellos. The files are the caller's to close.
func greet(ctx context.Context, conn net.Conn, o *ClientOptions) (w WelcomeMessage, files []int, err error) {
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return w, nil, &lost{err}
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // ends what waits
	defer stop()
	h := HelloMessage{
		MinVersion: Version, MaxVersion: Version, Calls: uint32(max(0, o.Calls)), Bytes: uint64(max(0, o.Bytes)), Token: o.Token, Name: o.Name,
		Features: FeatureHints, Message: uint32(o.Message),
	}
	if _, ok := conn.(*net.UnixConn); ok && !o.NoShared {
		h.Features |= FeatureShared | FeatureChunks
	}
	fds, err := offer(&h, o.Regions, conn)
	if err != nil {
		return w, nil, err
	}
	if err := frame.SendHello(conn, h.Append(nil), fds); err != nil {
		return w, nil, &lost{err}
	}
	p, files, err := frame.RecvHello(conn)
	if err != nil {
		if errors.Is(err, frame.ErrFrame) {
			return w, nil, fmt.Errorf("%w: %w", block.ErrInvalid, err)
		}
		return w, nil, &lost{err}
	}
	if err = w.Decode(p); err == nil {
		err = w.check(&h)
	}
	if err == nil && !stop() {
		err = &lost{ctx.Err()}
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		closeFiles(files)
		return w, nil, err
	}
	return w, files, nil
}

// check refuses a welcome that cannot be worked with.
func (w *WelcomeMessage) check(h *HelloMessage) error {
	switch {
	case w.Status != StatusOK:
		return w.Status.Err(w.Text)
	case w.Version < h.MinVersion || w.Version > h.MaxVersion:
		return invalid("server speaks version %d, want %d to %d", w.Version, h.MinVersion, h.MaxVersion)
	case w.Calls == 0 || w.Bytes == 0 || w.Keys == 0 || w.Grants == 0 || w.GrantBytes == 0:
		return invalid("server allows %d calls, %d bytes, %d keys, %d grants of %d bytes", w.Calls, w.Bytes, w.Keys, w.Grants, w.GrantBytes)
	case w.Features&^h.Features != 0:
		return invalid("server has features %#x, wanted %#x", w.Features, h.Features)
	case checkMessage(w.Message) != nil:
		return invalid("server has messages of %d bytes, want %d to %d", w.Message, MinMessage, MaxTold)
	case h.Features&^w.Features&FeatureRegions != 0:
		return fmt.Errorf("%w: server takes no regions", block.ErrUnavailable)
	}
	return nil
}

// lost is ErrDisconnected with what was met.
type lost struct{ cause error }

func (e *lost) Error() string   { return block.ErrDisconnected.Error() + ": " + e.cause.Error() }
func (e *lost) Unwrap() []error { return []error{block.ErrDisconnected, e.cause} }

func newClient(network, peer string, conn net.Conn, w WelcomeMessage, held *socket, o *ClientOptions) *Client {
	w.Message = min(w.Message, uint32(o.Message))
	w.Keys = min(w.Keys, uint32(keysOf(int(w.Message))))
	w.Grants = min(w.Grants, w.Keys)
	fo := o.Frame
	fo.MaxMessage = int(w.Message)
	calls := min(int(w.Calls), 1<<16)
	if o.Calls > 0 {
		calls = min(calls, o.Calls)
	}
	c := &Client{
		network: network, peer: peer, conn: frame.NewConn(conn, &fo), welcome: w, log: o.Logger, keep: !o.NoGrants, held: held,
		slots: make(chan struct{}, calls), flight: semaphore.NewWeighted(c64(w.Bytes)), ended: make(chan struct{}),
	}
	c.mu.calls = make(map[uint64]*pending)
	c.mu.quiet = make(chan struct{})
	c.records.New = func() any { return &pending{done: make(chan struct{}, 1)} }
	c.grants.init(int(w.Grants), c64(w.GrantBytes))
	c.later.wake = make(chan struct{}, 1)
	return c
}

// start lets the connection be read.
func (c *Client) start(o *ClientOptions) {
	if c.passed() {
		for _, id := range o.GiveBack {
			c.later.grant(id)
		}
	}
	c.work.Go(func() {
		err := c.conn.Serve((*reader)(c))
		c.end(err)
	})
	c.work.Go(c.housekeeping)
}

// c64 is a count of bytes that the other side told, as far as it fits.
func c64(n uint64) int64 { return int64(min(n, 1<<62)) }

// end fails all calls.
func (c *Client) end(cause error) {
	c.mu.Lock()
	c.mu.err = &lost{cause}
	for id, k := range c.mu.calls {
		delete(c.mu.calls, id)
		k.finish(c.mu.err)
	}
	c.mu.Unlock()
	if c.held != nil {
		c.held.leave() // else the server does not hear of it before Close
	}
	close(c.ended)
}

// farewell is how long a server may take to hear that the session gives everything
// back.
const farewell = time.Second

// Close ends the session, and with it its leases and grants, and unmaps the store's
// memory. Calls under way fail. With regions it waits until the server touches them no
// more, and fails with ErrUnavailable when that takes longer than 5 seconds. Closing
// twice is harmless.
func (c *Client) Close() (err error) {
	c.closer.Do(func() {
		left := c.giveAllBack()
		_ = c.conn.Close() // its error is for a connection that had ended
		c.work.Wait()
		c.mu.Lock()
		users := c.mu.users
		c.mu.Unlock()
		if users > 0 {
			<-c.mu.quiet // no more come: the connection has ended
		}
		if c.passed() {
			// Calls that ended with the connection have put theirs back since.
			c.leftover = append(append(left, c.grants.drop()...), c.later.unsent()...)
		}
		err = errors.Join(c.quietRegions(), unmapChunks(c.memory), c.chunks.close())
	})
	return err
}

// giveAllBack gives idle places back before the connection ends, and returns those of
// which the server does not know it. Where this side can write to them, the server has
// to keep them until the process has ended.
func (c *Client) giveAllBack() (left []uint64) {
	m := ReleaseMessage{Grants: c.grants.drop()}
	if len(m.Grants) == 0 && !c.later.any() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	if c.once(ctx, CodeRelease, &m, CodeReleased, new(ReleasedMessage)) == nil {
		return nil
	}
	return m.Grants // a session that is broken, or hangs, is ended as it is
}

// Leftover lists the places in shared memory that the server still holds for this
// process when the session is closed, because the connection was lost. Nothing writes
// to them any more: the next session gives them back, by ClientOptions.GiveBack. It is
// for after Close.
func (c *Client) Leftover() []uint64 { return c.leftover }

// Ended is closed when the session has ended: it is lost, or closed by this side.
func (c *Client) Ended() <-chan struct{} { return c.ended }

// Err says why the session has ended, nil while it has not.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err == nil {
		// A send may have met the end, and the reader not yet.
		if err := c.conn.Err(); err != nil {
			return &lost{err}
		}
	}
	return c.mu.err
}

// Peer is the network and the address that were dialled.
func (c *Client) Peer() string { return c.peer }

// Network is the network that was dialled.
func (c *Client) Network() string { return c.network }

// Shared reports whether the client has the store's memory, or what it may use of it, and
// copies in and out of it itself; only out where it may not write all that is there.
func (c *Client) Shared() bool { return c.memory != nil || c.chunks != nil }

// passed reports whether the server has passed its memory to be written to, so that it
// holds places until it is told that nobody does: also where it could not be mapped.
func (c *Client) passed() bool {
	return c.welcome.Features&FeatureChunks != 0 || c.welcome.Features&FeatureShared != 0 && (c.memory == nil || c.memory[0].Writable())
}

// Welcome is what the server said of itself, and the limits that it set.
func (c *Client) Welcome() WelcomeMessage { return c.welcome }

// ClientStats counts what a session has done.
type ClientStats struct {
	Gets, Puts int64 // keys
	InPlace    int64 // of those, keys whose bytes this side copied
	BytesIn    int64 // of payload
	BytesOut   int64
	Conn       frame.Stats
}

// Stats is a snapshot of the counters.
func (c *Client) Stats() ClientStats {
	return ClientStats{
		Gets: c.counts.gets.Load(), Puts: c.counts.puts.Load(), InPlace: c.counts.inPlace.Load(),
		BytesIn: c.counts.bytesIn.Load(), BytesOut: c.counts.bytesOut.Load(), Conn: c.conn.Stats(),
	}
}

// useMemory keeps the store's memory mapped until doneMemory, or says why the
// session has ended.
func (c *Client) useMemory() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err == nil {
		c.mu.users++
	}
	return c.mu.err
}

func (c *Client) doneMemory() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.users--; c.mu.users == 0 && c.mu.err != nil {
		close(c.mu.quiet)
	}
}
