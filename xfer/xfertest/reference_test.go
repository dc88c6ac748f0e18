package xfertest

import (
	"bufio"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// reference is a simple backend with the roles Remote and Notifier: it exchanges
// gobs over abstract unix sockets, one transfer or notification at a time on each
// connection, and lands bytes through a bounce buffer under the region's lock.
type reference struct {
	fault  string // how it breaks the contract, one of remoteFaults
	ln     net.Listener
	notes  chan xfer.Notification
	closed chan struct{}
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		self    xfer.PeerID
		tokens  uint64
		regions map[uint64]*refRegion
		peers   map[xfer.PeerID]*refPeer
		served  map[refConnID]*refServed
		left    []*refConn // by the fault of that name
	}
	once sync.Once
}

// refRegion is memory that is registered here.
type refRegion struct {
	token uint64
	desc  xfer.Desc
	mu    sync.RWMutex // held for reading while a piece of it is touched
	gone  bool
}

// refLoaded is memory of a peer.
type refLoaded struct {
	peer  xfer.PeerID
	token uint64
}

// refPeer is what is known of a peer: its address, connections that nobody uses,
// and those given up that it must have left before it gets bytes again.
type refPeer struct {
	addr    string
	idle    []*refConn
	used    map[*refConn]bool
	fence   []uint64
	backoff time.Duration
	after   time.Time
}

type refConnID struct {
	from xfer.PeerID
	id   uint64
}

type (
	refHello struct {
		From, To xfer.PeerID
		ID       uint64
		Fence    []uint64
	}
	refWelcome struct{ Self xfer.PeerID }
	refPiece   struct{ Token, Addr, Len uint64 }
	refCall    struct {
		Op     xfer.Op
		Pieces []refPiece
		Notify bool
		Msg    []byte
	}
	refAnswer struct{ Refused []bool }
)

const refStep = 64 << 10

func newReference(t testing.TB, fault string, addr string) *reference {
	t.Helper()
	if addr == "" {
		addr = fmt.Sprintf("@xfertest-%016x", rand.Uint64())
	}
	ln, err := net.Listen("unix", addr)
	if err != nil {
		t.Fatal(err)
	}
	b := &reference{fault: fault, ln: ln, notes: make(chan xfer.Notification, 64), closed: make(chan struct{})}
	b.mu.regions = map[uint64]*refRegion{}
	b.mu.peers = map[xfer.PeerID]*refPeer{}
	b.mu.served = map[refConnID]*refServed{}
	b.wg.Go(b.accept)
	return b
}

func (b *reference) Name() string { return "reference" }
func (b *reference) Caps() xfer.Caps {
	return xfer.Caps{Pairs: []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}}, Remote: true, Notify: true, Align: 1, Engine: "gob"}
}

func (b *reference) Register(_ context.Context, _ xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.tokens++
	r := &refRegion{token: b.mu.tokens<<32 | uint64(rand.Uint32()), desc: d}
	b.mu.regions[r.token] = r
	return r, nil
}

func (b *reference) Deregister(region xfer.Region) error {
	r := region.(*refRegion)
	b.mu.Lock()
	delete(b.mu.regions, r.token)
	b.mu.Unlock()
	if b.fault == "lands after Deregister" {
		return nil
	}
	r.mu.Lock()
	r.gone = true
	r.mu.Unlock()
	return nil
}

type refTransfer struct {
	op     xfer.Op
	peer   xfer.PeerID
	local  []xfer.Bound
	pieces []refPiece
}

func (b *reference) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	t := &refTransfer{op: op, peer: remote[0].Region.(*refLoaded).peer, local: local}
	for _, r := range remote {
		l := r.Region.(*refLoaded)
		if l.peer != t.peer {
			return nil, fmt.Errorf("%w: remote pieces of %s and %s", xfer.ErrInvalid, t.peer, l.peer)
		}
		t.pieces = append(t.pieces, refPiece{l.token, r.Addr, r.Len})
	}
	return t, nil
}

func (b *reference) Release(xfer.Prepared) {}

func (b *reference) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*refTransfer)
	if n := len(t.pieces) / 2; n > 0 && b.fault == "notifies when the first connection is done" {
		// The other half goes over another one, which is slower.
		slow := &refTransfer{t.op, t.peer, t.local[n:], t.pieces[n:]}
		defer b.wg.Go(func() { _, _ = b.transfer(context.WithoutCancel(ctx), slow) })
		for i := range slow.pieces {
			done(n+i, nil)
		}
		t = &refTransfer{t.op, t.peer, t.local[:n], t.pieces[:n]}
	}
	refused, err := b.transfer(ctx, t)
	if b.fault == "takes a lost connection for the end" && errors.Is(err, xfer.ErrDisconnected) {
		refused, err = make([]bool, len(t.pieces)), nil
	}
	for i := range t.pieces {
		switch {
		case err != nil:
			done(i, err)
		case refused[i]:
			done(i, fmt.Errorf("%w: %s refuses the piece at %#x", xfer.ErrInvalid, t.peer, t.pieces[i].Addr))
		default:
			done(i, nil)
		}
	}
	if errors.Is(err, xfer.ErrCanceled) {
		return nil
	}
	return err
}

func (b *reference) transfer(ctx context.Context, t *refTransfer) (refused []bool, err error) {
	err = b.exchange(ctx, t.peer, refCall{Op: t.op, Pieces: t.pieces}, func(c *refConn) error {
		var first, last refAnswer
		if err := c.dec.Decode(&first); err != nil {
			return err
		}
		for i, l := range t.local {
			if first.Refused[i] {
				continue
			}
			view := arena.View(l.Addr, int(l.Len))
			var err error
			if t.op == xfer.Write {
				_, err = c.w.Write(view)
			} else {
				_, err = io.ReadFull(c.r, view)
			}
			if err != nil {
				return err
			}
		}
		if err := c.w.Flush(); err != nil {
			return err
		}
		if err := c.dec.Decode(&last); err != nil {
			return err
		}
		refused = last.Refused
		return nil
	})
	return refused, err
}

// exchange sends a call on some connection to the peer and has talk do the rest.
// The connection is given up on any error.
func (b *reference) exchange(ctx context.Context, peer xfer.PeerID, call refCall, talk func(*refConn) error) error {
	c, err := b.connection(ctx, peer, false)
	if err != nil {
		return err
	}
	work := ctx
	if b.fault == "ignores its context" {
		work = context.WithoutCancel(ctx)
	}
	stop := context.AfterFunc(work, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	err = c.enc.Encode(call)
	if err == nil {
		err = c.w.Flush()
	}
	if err == nil {
		err = talk(c)
	}
	if stopped := stop(); err == nil && stopped {
		b.giveBack(peer, c)
		return nil
	}
	b.giveUp(peer, c)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", xfer.ErrCanceled, err)
	}
	return fmt.Errorf("%w: %s: %w", xfer.ErrDisconnected, peer, err)
}

// refConn is a connection to a peer.
type refConn struct {
	id   uint64
	conn *net.UnixConn
	r    *bufio.Reader
	w    *bufio.Writer
	enc  *gob.Encoder
	dec  *gob.Decoder
}

// connection takes an idle connection or makes one.
func (b *reference) connection(ctx context.Context, id xfer.PeerID, now bool) (*refConn, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", xfer.ErrCanceled, ctx.Err())
	}
	b.mu.Lock()
	p := b.mu.peers[id]
	if p == nil {
		b.mu.Unlock()
		return nil, fmt.Errorf("%w: %s is not known", xfer.ErrDisconnected, id)
	}
	if n := len(p.idle); n > 0 && !now {
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.used[c] = true
		b.mu.Unlock()
		return c, nil
	}
	if wait := time.Until(p.after); wait > 0 && !now {
		b.mu.Unlock()
		return nil, fmt.Errorf("%w: %s: next try in %v", xfer.ErrDisconnected, id, wait)
	}
	self, addr, fence := b.mu.self, p.addr, slices.Clone(p.fence)
	b.mu.Unlock()

	c, err := b.dial(ctx, addr, refHello{From: self, To: id, ID: rand.Uint64(), Fence: fence})
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: %w", xfer.ErrCanceled, err)
		}
		p.backoff = min(max(2*p.backoff, 5*time.Millisecond), 200*time.Millisecond)
		p.after = time.Now().Add(p.backoff)
		return nil, fmt.Errorf("%w: %s: %w", xfer.ErrDisconnected, id, err)
	}
	p.backoff, p.after = 0, time.Time{}
	p.fence = slices.DeleteFunc(p.fence, func(id uint64) bool { return slices.Contains(fence, id) })
	p.used[c] = true
	return c, nil
}

func (b *reference) dial(ctx context.Context, addr string, hello refHello) (*refConn, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", addr)
	if err != nil {
		return nil, err
	}
	c := &refConn{id: hello.ID, conn: conn.(*net.UnixConn), r: bufio.NewReader(conn), w: bufio.NewWriterSize(conn, refStep)}
	c.enc, c.dec = gob.NewEncoder(c.w), gob.NewDecoder(c.r)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	var welcome refWelcome
	err = errors.Join(c.enc.Encode(hello), c.w.Flush())
	if err == nil {
		err = c.dec.Decode(&welcome)
	}
	if err == nil && welcome.Self != hello.To && b.fault != "believes anyone" {
		err = fmt.Errorf("%s answers instead of %s", welcome.Self, hello.To)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return c, nil
}

func (b *reference) giveBack(id xfer.PeerID, c *refConn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.mu.peers[id]; p != nil && p.used[c] {
		delete(p.used, c)
		p.idle = append(p.idle, c)
		return
	}
	_ = c.conn.Close()
}

// giveUp ends a connection in use: the peer is given a moment to leave it, and
// if it does not, the next connection makes it.
func (b *reference) giveUp(id xfer.PeerID, c *refConn) {
	_ = c.conn.SetDeadline(time.Now().Add(30 * time.Millisecond))
	_ = c.conn.CloseWrite()
	_, err := io.Copy(io.Discard, c.conn)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fault == "leaves connections open" {
		b.mu.left = append(b.mu.left, c)
	} else {
		_ = c.conn.Close()
	}
	if p := b.mu.peers[id]; p != nil {
		delete(p.used, c)
		if err != nil {
			p.fence = append(p.fence, c.id)
		}
	}
}

func (b *reference) Bind(self xfer.PeerID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.self = self
	return nil
}

func (b *reference) ConnInfo() ([]byte, error) { return []byte(b.ln.Addr().String()), nil }

func (b *reference) LoadConnInfo(peer xfer.PeerID, info []byte) error {
	if len(info) == 0 || info[0] != '@' {
		return fmt.Errorf("%w: connection info %q", xfer.ErrInvalid, info)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.peers[peer] = &refPeer{addr: string(info), used: map[*refConn]bool{}}
	return nil
}

func (b *reference) ForgetPeer(peer xfer.PeerID) {
	b.Disconnect(peer)
	b.mu.Lock()
	delete(b.mu.peers, peer)
	b.mu.Unlock()
}

func (b *reference) RegionInfo(r xfer.Region) ([]byte, error) {
	return fmt.Appendf(nil, "token %d", r.(*refRegion).token), nil
}

func (b *reference) LoadRegion(peer xfer.PeerID, _ xfer.MemType, _ xfer.Desc, info []byte) (xfer.Region, error) {
	var token uint64
	if _, err := fmt.Sscanf(string(info), "token %d", &token); err != nil {
		return nil, fmt.Errorf("%w: region info %q", xfer.ErrInvalid, info)
	}
	return &refLoaded{peer, token}, nil
}

func (b *reference) UnloadRegion(xfer.Region) {}

func (b *reference) Connect(ctx context.Context, peer xfer.PeerID) error {
	c, err := b.connection(ctx, peer, true)
	if err != nil {
		return err
	}
	b.giveBack(peer, c)
	return nil
}

func (b *reference) Disconnect(peer xfer.PeerID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.mu.peers[peer]
	if p == nil {
		return
	}
	for _, c := range p.idle {
		_ = c.conn.Close()
	}
	p.idle = nil
	for c := range p.used {
		_ = c.conn.SetDeadline(time.Unix(1, 0)) // its user gives it up
	}
}

func (b *reference) Notify(ctx context.Context, peer xfer.PeerID, msg []byte) error {
	if len(msg) > xfer.MaxNotification {
		return fmt.Errorf("%w: notification of %d bytes", xfer.ErrInvalid, len(msg))
	}
	return b.exchange(ctx, peer, refCall{Notify: true, Msg: msg}, func(c *refConn) error {
		var answer refAnswer
		return c.dec.Decode(&answer)
	})
}

func (b *reference) Notifications() <-chan xfer.Notification { return b.notes }

func (b *reference) Close() error {
	b.once.Do(func() {
		_ = b.ln.Close()
		b.mu.Lock()
		peers := b.mu.peers
		b.mu.peers = map[xfer.PeerID]*refPeer{}
		b.mu.Unlock()
		for _, p := range peers {
			for _, c := range p.idle {
				_ = c.conn.Close()
			}
		}
		close(b.closed)
		b.wg.Wait()
		close(b.notes)
	})
	return nil
}
