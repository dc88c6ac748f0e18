package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// sessionDial is the longest that a call waits for a session before it goes
	// another way.
	sessionDial = 2 * time.Second
	// sessionPauseMin and sessionPauseMax are the first and the longest pause before
	// a session is dialled again after a failure.
	sessionPauseMin = 100 * time.Millisecond
	sessionPauseMax = 30 * time.Second
	// windowBytes bounds the memory that a get assembles blocks in.
	windowBytes = 16 << 20
	// firstPlace is how long a block of a namespace is taken to be of which nothing is
	// known.
	firstPlace = 1 << 20
)

// Ways that Get, Put and Match go.
const (
	WayShared = "shared memory" // a session over a unix socket: the client copies in and out of the store's memory
	WayUnix   = "unix"          // a session over a unix socket
	WayTCP    = "tcp"           // a session over TCP
	WayGRPC   = "grpc"
)

// SessionInfo says which way the calls that move blocks go.
type SessionInfo struct {
	Way  string
	Peer string // that the session is with, "" without
	Why  string // with WayGRPC: why there is no session
}

// link is a client's session, which is dialled when a call wants it, and again after
// it is lost.
type link struct {
	now  atomic.Pointer[session.Client] // nil: none
	turn chan struct{}                  // one token: the right to dial
	gone chan struct{}                  // with the turn: closed when the last session that was dialled is closed
	had  bool                           // with the turn: there was a session
	ends sync.WaitGroup                 // the goroutines that wait for a session's end

	mu struct {
		sync.Mutex
		places *pb.Sessions // where the server said that it serves sessions; nil: nowhere
		why    string       // why there is none
		next   time.Time    // not dialled before
		pause  time.Duration
		closed bool
		left   []uint64 // places of sessions that were lost, to be given back by another
	}
	blocks sync.Map // block.NamespaceID -> int: longest block met
}

var errInline = errors.New("ClientOptions.Inline")

func (l *link) init(inline bool) {
	l.turn = make(chan struct{}, 1)
	l.turn <- struct{}{}
	l.gone = make(chan struct{})
	close(l.gone)
	l.mu.why = "no call has asked for one yet"
	if inline {
		l.mu.why, l.mu.closed = errInline.Error(), true
	}
}

// learn notes where the server says that it serves sessions.
func (l *link) learn(p *pb.Sessions) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.places = p
}

// close ends the session, and there will be no other.
func (l *link) close() error {
	l.mu.Lock()
	l.mu.closed = true
	l.mu.why = "the client is closed"
	l.mu.Unlock()
	var err error
	if s := l.now.Load(); s != nil {
		err = s.Close()
	}
	l.ends.Wait()
	return err
}

// adopt makes a session the one that calls go by until it ends. Then it is closed,
// whether there are calls or not: a client without any must not keep the memory of a
// store that is no more.
func (c *Client) adopt(s *session.Client) {
	l := &c.link
	gone := make(chan struct{})
	l.gone, l.had = gone, true
	l.now.Store(s)
	l.ends.Go(func() {
		<-s.Ended()
		err := s.Err()
		l.now.CompareAndSwap(s, nil)
		if e := s.Close(); e != nil {
			err = errors.Join(err, e)
		}
		l.mu.Lock()
		closed := l.mu.closed
		l.mu.left = append(l.mu.left, s.Leftover()...)
		if !closed {
			l.mu.why = "the session is lost"
		}
		l.mu.Unlock()
		if !closed {
			c.log.Info("session lost", "server", c.addr, "err", err)
		}
		close(gone)
	})
}

// SessionInfo says which way the calls that move blocks go now. Before the first of
// them there is no session.
func (c *Client) SessionInfo() SessionInfo {
	s := c.link.now.Load()
	if s == nil || s.Err() != nil {
		c.link.mu.Lock()
		defer c.link.mu.Unlock()
		return SessionInfo{Way: WayGRPC, Why: c.link.mu.why}
	}
	i := SessionInfo{Way: WayTCP, Peer: s.Peer()}
	switch {
	case s.Shared():
		i.Way = WayShared
	case s.Network() == "unix":
		i.Way = WayUnix
	}
	return i
}

// session is the session to go by, or nil: then the call goes over gRPC.
func (c *Client) session(ctx context.Context) *session.Client {
	s := c.link.now.Load()
	if s != nil && s.Err() == nil {
		return s
	}
	l := &c.link
	l.mu.Lock()
	wait := l.mu.closed || time.Now().Before(l.mu.next)
	l.mu.Unlock()
	if wait {
		return nil
	}
	select {
	case <-l.turn:
	case <-ctx.Done():
		return nil // the call over gRPC will say so
	}
	defer func() { l.turn <- struct{}{} }()
	if now := l.now.Load(); now != nil && now != s {
		return now // another call has dialled
	}
	dctx, cancel := context.WithTimeout(ctx, sessionDial)
	defer cancel()
	select {
	case <-l.gone: // and what it leaves can be given back
	case <-dctx.Done():
		return nil // a call still uses it, maybe the one that this is part of
	}
	s, err := c.dialSession(dctx, l.had)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.mu.closed {
		err = errors.Join(block.ErrClosed, s.Close())
	}
	if err != nil {
		if ctx.Err() == nil || l.mu.pause > 0 {
			l.mu.pause = min(max(2*l.mu.pause, sessionPauseMin), sessionPauseMax)
			l.mu.next = time.Now().Add(l.mu.pause)
		}
		if why := err.Error(); why != l.mu.why {
			l.mu.why = why
			level := slog.LevelWarn
			if errors.Is(err, errNoSessions) {
				level = slog.LevelDebug
			}
			c.log.Log(ctx, level, "no session: blocks move over gRPC", "server", c.addr, "why", why)
		}
		return nil
	}
	l.mu.pause, l.mu.next, l.mu.why = 0, time.Time{}, ""
	if s.Shared() {
		l.mu.left = nil
	}
	c.adopt(s)
	c.log.Debug("session open", "server", c.addr, "peer", s.Peer(), "shared", s.Shared())
	return s
}

var errNoSessions = errors.New("the server serves no sessions")

// dialSession opens a session: over the unix socket when the server is on this host
// and the socket is there, else over TCP. Where the server was lost before, it is asked
// anew: another one may have taken its place.
func (c *Client) dialSession(ctx context.Context, again bool) (*session.Client, error) {
	c.link.mu.Lock()
	at := c.link.mu.places
	again = again || c.link.mu.pause > 0
	c.link.mu.Unlock()
	if again {
		r, err := c.rpc.Ping(ctx, &pb.PingRequest{})
		if err != nil {
			return nil, c.fail("ping", err)
		}
		at = r.GetSessions()
		c.link.learn(at)
	}
	if at.GetAddress() == "" && at.GetSocket() == "" {
		return nil, errNoSessions
	}
	var errs []error
	if path := at.GetSocket(); path != "" && c.sameHost() {
		if _, err := os.Stat(path); err == nil {
			s, err := c.dialOne(ctx, "unix", path, at.GetIncarnation())
			if err == nil {
				return s, nil
			}
			errs = append(errs, err)
		}
	}
	if addr := at.GetAddress(); addr != "" {
		addr, err := c.sessionAddr(addr)
		if err == nil {
			var s *session.Client
			if s, err = c.dialOne(ctx, "tcp", addr, at.GetIncarnation()); err == nil {
				return s, nil
			}
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("%w: %s is not on this host", block.ErrUnavailable, at.GetSocket())
	}
	return nil, errors.Join(errs...)
}

// dialOne opens a session with the store of that incarnation. Another one that
// answers at the address is not ours.
func (c *Client) dialOne(ctx context.Context, network, addr string, incarnation uint64) (*session.Client, error) {
	o := &session.ClientOptions{Token: c.opts.Token, Name: c.opts.Name, Logger: c.log, NoShared: c.opts.NoShared, NoGrants: c.opts.NoGrants}
	c.link.mu.Lock()
	o.GiveBack = slices.Clone(c.link.mu.left)
	c.link.mu.Unlock()
	if network == "tcp" {
		o.TLS = c.opts.TLS
		if o.TLS != nil && o.TLS.ServerName == "" {
			o.TLS = o.TLS.Clone()
			o.TLS.ServerName, _, _ = net.SplitHostPort(c.target) // the name that gRPC checks; "" over a unix socket
		}
	}
	s, err := session.Dial(ctx, network, addr, o)
	if err != nil {
		return nil, err
	}
	if have := s.Welcome().Incarnation; have != incarnation {
		err := fmt.Errorf("%w: at %s %s is another store, incarnation %016x instead of %016x", block.ErrDisconnected, network, addr, have, incarnation)
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// sameHost reports whether the gRPC connection does not leave this host.
func (c *Client) sameHost() bool {
	if c.network == "unix" {
		return true
	}
	ends := c.ends.Load()
	return ends != nil && (ends.remote.IP.IsLoopback() || ends.remote.IP.Equal(ends.local.IP))
}

// ends are the addresses of a TCP connection.
type ends struct{ local, remote *net.TCPAddr }

// noteEnds remembers between which addresses gRPC has connected.
func (c *Client) noteEnds(conn net.Conn) {
	local, ok1 := conn.LocalAddr().(*net.TCPAddr)
	remote, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	if ok1 && ok2 {
		c.ends.Store(&ends{local, remote})
	}
}

// sessionAddr is the address to dial for one that the server announced. A wildcard
// stands for the host that gRPC was dialled at, and a loopback address of another host
// is nobody's.
func (c *Client) sessionAddr(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", invalid("session address %q that the server announced: %v", addr, err)
	}
	ip := net.ParseIP(host)
	switch {
	case host == "" || ip != nil && ip.IsUnspecified():
		if host, _, err = net.SplitHostPort(c.target); err != nil {
			host = "localhost" // gRPC goes over a unix socket
		}
	case ip != nil && ip.IsLoopback() && !c.sameHost():
		return "", fmt.Errorf("%w: the server serves sessions at %s, on its own host only", block.ErrUnavailable, addr)
	}
	return net.JoinHostPort(host, port), nil
}

// handleOf is a namespace as sessions name it.
func (c *Client) handleOf(ns block.Namespace) session.Namespace {
	return session.Namespace{ID: ns.ID, Tag: c.tag(ns), HashLen: ns.HashLen}
}

// placeBytes is how much memory a block of a namespace gets.
func (c *Client) placeBytes(ns block.Namespace) int {
	if n := max(ns.Desc.BlockBytes, ns.Desc.MaxBlockBytes); n > 0 {
		return int(min(n, block.MaxBlockBytes))
	}
	if n, ok := c.link.blocks.Load(ns.ID); ok {
		return n.(int)
	}
	return firstPlace
}

// getSession is Get over a session. It reads as many blocks at a time as fit into
// its memory, and hands them on.
func (c *Client) getSession(ctx context.Context, s *session.Client, ns block.Namespace, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	handle := c.handleOf(ns)
	if o.Plan != nil {
		return c.getWorth(ctx, s, handle, ns, want, o, use)
	}
	buf := c.windows.Get().(*[]byte)
	defer c.windows.Put(buf)
	size := c.placeBytes(ns)
	var items []session.GetItem
	for at := 0; at < len(want); {
		n := min(len(want)-at, max(1, windowBytes/size), MaxKeys)
		if len(*buf) < n*size {
			*buf = make([]byte, n*size)
		}
		items = items[:0]
		for i, w := range want[at : at+n] {
			items = append(items, session.GetItem{
				Hash: w.Hash, Offset: w.Offset, Length: w.Length, Into: (*buf)[i*size : (i+1)*size : (i+1)*size],
			})
		}
		res, err := s.Get(ctx, handle, items, o)
		if err != nil {
			return err
		}
		for i := range res {
			r := &res[i]
			if need := int(r.Total); r.Err != nil && need > size && need <= block.MaxBlockBytes {
				// Longer than any before: it and those behind it once more, with more memory.
				c.link.blocks.Store(ns.ID, need)
				size, n = need, i
				break
			}
			if r.Err != nil {
				return r.Err
			}
			p := block.Payload{Reason: r.Reason, Tier: r.Tier, Total: r.Total, Sum: r.Sum}
			if r.Len > 0 {
				p.Bytes = items[i].Into[:r.Len]
			}
			if err := use(at+i, p); err != nil {
				return err
			}
		}
		at += n
	}
	return nil
}

// getWorth is getSession of what is worth loading. What is not has no bytes.
func (c *Client) getWorth(ctx context.Context, s *session.Client, handle session.Namespace, ns block.Namespace, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	hashes := make([]byte, 0, len(want)*handle.HashLen)
	for i := range want {
		hashes = append(hashes, want[i].Hash[:handle.HashLen]...)
	}
	from, to, reasons, err := s.Worth(ctx, handle, hashes, *o.Plan)
	if err != nil {
		return fmt.Errorf("get: %w", err)
	}
	skip := func(at, end int) error {
		for ; at < end; at++ {
			if err := use(at, block.Payload{Reason: reasons[at]}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := skip(0, from); err != nil {
		return err
	}
	o.Plan = nil
	err = c.getSession(ctx, s, ns, want[from:to], o, func(i int, p block.Payload) error { return use(from+i, p) })
	if err != nil {
		return err
	}
	return skip(to, len(want))
}

// putSession is Put over a session.
func (c *Client) putSession(ctx context.Context, s *session.Client, ns block.Namespace, items []PutItem, o PutOptions) ([]PutResult, error) {
	blocks := make([]session.PutBlock, len(items))
	for i := range items {
		it := &items[i]
		blocks[i] = session.PutBlock{Hash: it.Hash, Parent: it.Parent, HasParent: it.HasParent, Bytes: it.Data}
	}
	res, err := s.Put(ctx, c.handleOf(ns), blocks, session.PutOptions{Durable: o.Durable, TTL: o.TTL})
	if res == nil {
		return nil, err
	}
	out := make([]PutResult, len(res))
	for i, r := range res {
		out[i] = PutResult{Status: r.Status, Err: r.Err}
	}
	return out, err
}
