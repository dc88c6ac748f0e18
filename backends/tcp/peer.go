package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// peer is another agent with our connections to it. All of them are there or are
// made before a transfer begins: a connection that was lost may have left bytes on
// the way, and only its successor's hello makes sure that they arrive no more.
type peer struct {
	b      *Backend
	id     xfer.PeerID
	addrs  []string
	keys   []uint64        // a number for each connection, which its successors keep
	ctx    context.Context // ends when the peer is forgotten
	cancel context.CancelFunc
	ready  atomic.Pointer[[]*line] // all connections; nil when one is missing

	mu struct {
		sync.Mutex
		forgotten bool
		lines     []*line // nil where there is none
		made      []bool  // there was one once
		making    *making // under way
		until     time.Time
		backoff   time.Duration
		err       error // of the last attempt
		good      int   // the address that answered last
	}
}

// making is one attempt to make the connections that are missing.
type making struct {
	done chan struct{}
	err  error
}

// LoadConnInfo makes a peer known.
func (b *Backend) LoadConnInfo(id xfer.PeerID, info []byte) error {
	addrs, err := parseConnInfo(info)
	if err != nil {
		return fmt.Errorf("tcp load peer %s: %w", id, err)
	}
	if len(id.Name) > maxNameBytes {
		return fmt.Errorf("tcp load peer: %w: a name of %d bytes, at most %d", xfer.ErrInvalid, len(id.Name), maxNameBytes)
	}
	p := &peer{b: b, id: id, addrs: addrs, keys: make([]uint64, b.opt.Conns)}
	for i := range p.keys {
		p.keys[i] = random()
	}
	p.mu.lines, p.mu.made = make([]*line, len(p.keys)), make([]bool, len(p.keys))
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.closed:
		return errClosed()
	case b.mu.peers[id] != nil:
		return fmt.Errorf("tcp load peer %s: %w: it is loaded", id, xfer.ErrInvalid)
	}
	p.ctx, p.cancel = context.WithCancel(b.ctx)
	b.mu.peers[id] = p
	return nil
}

func (b *Backend) peer(id xfer.PeerID) (*peer, error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if p := b.mu.peers[id]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: peer %s", xfer.ErrNotFound, id)
}

// ForgetPeer ends the connections with the peer, from both sides.
func (b *Backend) ForgetPeer(id xfer.PeerID) {
	b.mu.Lock()
	p := b.mu.peers[id]
	delete(b.mu.peers, id)
	for key, s := range b.mu.served {
		if key.from == id {
			s.end()
		}
	}
	b.mu.Unlock()
	if p != nil {
		p.forget()
	}
}

func (p *peer) forget() {
	p.mu.Lock()
	p.mu.forgotten = true
	p.mu.Unlock()
	p.cancel()
	p.disconnect(errors.New("the peer was forgotten"))
}

// Connect makes the connections to the peer.
func (b *Backend) Connect(ctx context.Context, id xfer.PeerID) error {
	p, err := b.peer(id)
	if err != nil {
		return fmt.Errorf("tcp connect: %w", err)
	}
	if _, err := p.connect(ctx, true); err != nil {
		return fmt.Errorf("tcp connect: %w", err)
	}
	return nil
}

// Disconnect ends our connections to the peer.
func (b *Backend) Disconnect(id xfer.PeerID) {
	if p, err := b.peer(id); err == nil {
		p.disconnect(errors.New("disconnected on request"))
	}
}

func (p *peer) disconnect(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.mu.lines {
		if l != nil {
			l.end(why)
		}
	}
}

// connect returns all connections, and makes those that are missing: force without
// regard to the back-off. Errors: ErrDisconnected, ErrCanceled.
func (p *peer) connect(ctx context.Context, force bool) ([]*line, error) {
	for attempt := 0; ; attempt++ {
		if ls := p.ready.Load(); ls != nil {
			return *ls, nil
		}
		if attempt == 3 { // they are lost as soon as they are made
			return nil, disconnected(p.id, errors.New("connections do not last"))
		}
		p.mu.Lock()
		m := p.mu.making
		switch {
		case p.ready.Load() != nil:
			p.mu.Unlock()
			continue
		case p.mu.forgotten:
			p.mu.Unlock()
			return nil, disconnected(p.id, errors.New("the peer was forgotten"))
		case m == nil && !force && time.Now().Before(p.mu.until):
			err := p.mu.err
			p.mu.Unlock()
			return nil, err
		case m == nil:
			m = &making{done: make(chan struct{})}
			if !p.b.start(func() { p.make(m) }) {
				p.mu.Unlock()
				return nil, errClosed()
			}
			p.mu.making = m
		}
		p.mu.Unlock()
		select {
		case <-m.done:
			if m.err != nil {
				return nil, m.err
			}
		case <-ctx.Done():
			return nil, xfer.ErrCanceled
		}
	}
}

// make makes the connections that are missing. The first goes ahead, so that one
// attempt is enough where nobody answers.
func (p *peer) make(m *making) {
	var missing []int
	p.mu.Lock()
	for i, l := range p.mu.lines {
		if l == nil || l.ended() {
			missing = append(missing, i)
		}
	}
	p.mu.Unlock()
	var err error
	if len(missing) > 0 {
		err = p.makeOne(missing[0])
		if err == nil {
			var wg sync.WaitGroup
			errs := make([]error, len(missing))
			for k, slot := range missing[1:] {
				wg.Go(func() { errs[k] = p.makeOne(slot) })
			}
			wg.Wait()
			for _, e := range errs {
				if e != nil {
					err = e // they fail alike
				}
			}
		}
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.making = nil
	if m.err = err; err != nil {
		o := &p.b.opt
		p.mu.backoff = min(max(2*p.mu.backoff, o.BackoffMin), o.BackoffMax)
		p.mu.until, p.mu.err = time.Now().Add(p.mu.backoff), err
		p.b.count.failures.Add(1)
		p.b.log.Warn("tcp: no connection", "peer", p.id.String(), "retry", p.mu.backoff, "err", err)
	} else {
		p.mu.backoff, p.mu.until, p.mu.err = 0, time.Time{}, nil
	}
	close(m.done)
}

// makeOne makes one connection and puts it into its place.
func (p *peer) makeOne(slot int) error {
	ctx, cancel := context.WithTimeout(p.ctx, p.b.opt.DialTimeout)
	defer cancel()
	p.mu.Lock()
	good := p.mu.good
	old := p.mu.lines[slot]
	p.mu.Unlock()
	if old != nil { // ended, and its goroutine about to notice
		select {
		case <-old.left:
		case <-ctx.Done():
			return disconnected(p.id, context.Cause(ctx))
		}
	}
	var errs []error
	for k := range p.addrs {
		i := (good + k) % len(p.addrs)
		d, err := p.dial(ctx, slot, p.addrs[i], len(p.addrs)-k)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		return p.put(d, slot, i)
	}
	return disconnected(p.id, errors.Join(errs...))
}

// put takes a new connection over.
func (p *peer) put(d dialed, slot, addr int) error {
	l := newLine(p, d)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.forgotten || !p.b.start(l.serve) {
		_ = l.conn.Close() // nothing was said on it
		return disconnected(p.id, errors.New("the peer was forgotten"))
	}
	p.b.count.dialed.Add(1)
	p.b.count.connects.Add(1)
	if p.mu.made[slot] {
		p.b.count.reconnects.Add(1)
	}
	p.mu.lines[slot], p.mu.made[slot], p.mu.good = l, true, addr
	for _, l := range p.mu.lines {
		if l == nil {
			return nil
		}
	}
	all := append([]*line(nil), p.mu.lines...)
	p.ready.Store(&all)
	return nil
}

// lost takes a connection out of its place.
func (p *peer) lost(l *line) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.b.count.dialed.Add(-1)
	for i := range p.mu.lines {
		if p.mu.lines[i] == l {
			p.mu.lines[i] = nil
		}
	}
	p.ready.Store(nil)
}

// dialed is a connection on which the hellos were said.
type dialed struct {
	raw, c net.Conn // c is raw, or TLS over it
	calls  int      // unanswered calls that the peer allows
}

// dial makes a connection to one address and says hello; left is how many addresses
// share the time that ctx leaves.
func (p *peer) dial(ctx context.Context, slot int, addr string, left int) (_ dialed, err error) {
	if d, ok := ctx.Deadline(); ok && left > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(d)/time.Duration(left))
		defer cancel()
	}
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return dialed{}, err
	}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer func() {
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			raw.Close()
			err = fmt.Errorf("connect %s: %w", addr, err)
		}
	}()
	c := raw
	if o := p.b.opt.TLS; o != nil {
		cfg := o.Clone()
		if cfg.ServerName == "" {
			cfg.ServerName, _, _ = net.SplitHostPort(addr) // checked when it was loaded
		}
		t := tls.Client(raw, cfg)
		if err := t.HandshakeContext(ctx); err != nil {
			return dialed{}, err
		}
		c = t
	}
	h := hello{min: minVersion, max: maxVersion, from: p.b.self, to: p.id, line: p.keys[slot]}
	if err := frame.SendHello(c, h.append(nil), nil); err != nil {
		return dialed{}, err
	}
	payload, _, err := frame.RecvHello(c)
	if err != nil {
		return dialed{}, fmt.Errorf("hello: %w", err)
	}
	a, err := parseAnswer(payload)
	switch {
	case err != nil:
		return dialed{}, err
	case a.identity != p.id:
		return dialed{}, fmt.Errorf("%s answers, want %s", a.identity, p.id)
	case a.status == helloVersion:
		return dialed{}, fmt.Errorf("it speaks version %d at most, and we %d to %d", a.version, minVersion, maxVersion)
	case a.status != helloOK || a.version < minVersion || a.version > maxVersion || a.calls == 0:
		return dialed{}, fmt.Errorf("%w: answer %d, version %d, %d calls", errProtocol, a.status, a.version, a.calls)
	}
	return dialed{raw, c, int(min(a.calls, 1024))}, nil
}
