package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// lineKey names a connection of a peer's: a new one of the same key replaces the old.
type lineKey struct {
	from xfer.PeerID
	line uint64
}

// strangers are connections of which it is not known whose they are, oldest first.
type strangers struct{ list []net.Conn }

func (s *strangers) remove(c net.Conn) {
	for i := range s.list {
		if s.list[i] == c {
			s.list = append(s.list[:i], s.list[i+1:]...)
			return
		}
	}
}

func (s *strangers) endAll() {
	for _, c := range s.list {
		_ = c.Close() // nobody is told
	}
}

// accept takes connections until the listener is closed.
func (b *Backend) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			b.running.Go(func() { b.welcome(c) })
		case errors.Is(err, net.ErrClosed):
			return
		default: // such as no file descriptor: it may pass
			b.log.Error("tcp: accept", "err", err)
			select {
			case <-b.ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

// welcome finds out whose a connection is, and serves it.
func (b *Backend) welcome(raw net.Conn) {
	defer raw.Close()
	b.mu.Lock()
	if b.mu.closed {
		b.mu.Unlock()
		return
	}
	if len(b.mu.strangers.list) >= helloBacklog {
		_ = b.mu.strangers.list[0].Close() // its goroutine removes it
		b.mu.strangers.list = b.mu.strangers.list[1:]
	}
	b.mu.strangers.list = append(b.mu.strangers.list, raw)
	b.mu.Unlock()

	s, c, err := b.greet(raw)
	b.mu.Lock()
	b.mu.strangers.remove(raw)
	b.mu.Unlock()
	if err != nil {
		b.count.strangers.Add(1)
		b.log.Warn("tcp: connection refused", "from", raw.RemoteAddr().String(), "err", err)
		return
	}
	s.serve(c)
}

// greet answers the hello of a new connection. c is raw, or TLS over it.
func (b *Backend) greet(raw net.Conn) (_ *server, c net.Conn, err error) {
	if err := raw.SetDeadline(time.Now().Add(b.opt.HelloTimeout)); err != nil {
		return nil, nil, err
	}
	c = raw
	if b.tls != nil {
		t := tls.Server(raw, b.tls)
		if err := t.HandshakeContext(b.ctx); err != nil {
			return nil, nil, err
		}
		c = t
	}
	payload, _, err := frame.RecvHello(c)
	if err != nil {
		return nil, nil, err
	}
	h, err := parseHello(payload)
	if err != nil {
		return nil, nil, err
	}
	a := answer{version: min(h.max, maxVersion), calls: uint32(b.opt.Calls), identity: b.self}
	switch {
	case h.min > maxVersion || h.max < minVersion:
		a.status, a.version = helloVersion, maxVersion
		err = fmt.Errorf("%w: agent %s speaks versions %d to %d, and we %d to %d", errProtocol, h.from, h.min, h.max, minVersion, maxVersion)
	case h.to != b.self:
		a.status = helloStranger
		err = fmt.Errorf("agent %s wants %s, and we are %s", h.from, h.to, b.self)
	case h.from.Name == "" || h.from.Incarnation == 0:
		return nil, nil, fmt.Errorf("%w: hello from %s, which is nobody", errProtocol, h.from)
	}
	if err != nil {
		_ = frame.SendHello(c, a.append(nil), nil) // a courtesy
		return nil, nil, err
	}
	s := newServer(b, raw, lineKey{h.from, h.line})
	if err := b.replace(s); err != nil {
		return nil, nil, err
	}
	if err := frame.SendHello(c, a.append(nil), nil); err != nil {
		s.end()
		b.leave(s)
		return nil, nil, err
	}
	return s, c, nil
}

// replace puts a connection into the place of the one that it follows. When it returns
// nothing of the old one's lands any more, so that what was sent on the new one is not
// overtaken by what was on the way before.
func (b *Backend) replace(s *server) error {
	ctx, cancel := context.WithTimeout(b.ctx, b.opt.HelloTimeout)
	defer cancel()
	for {
		b.mu.Lock()
		old := b.mu.served[s.key]
		switch {
		case b.mu.closed:
			b.mu.Unlock()
			return errClosed()
		case old == nil && len(b.mu.served) >= b.opt.Inbound:
			b.mu.Unlock()
			return fmt.Errorf("%w: %d connections of peers, which is the limit", xfer.ErrUnavailable, b.opt.Inbound)
		case old == nil:
			b.mu.served[s.key] = s
			b.count.accepted.Add(1)
			b.mu.Unlock()
			return nil
		}
		b.mu.Unlock()
		old.end()
		select {
		case <-old.left:
		case <-ctx.Done():
			return fmt.Errorf("the connection before this one does not end: %w", ctx.Err())
		}
	}
}

// leave removes a connection that was put by replace, when nothing of it lands any more.
func (b *Backend) leave(s *server) {
	b.mu.Lock()
	delete(b.mu.served, s.key)
	b.count.accepted.Add(-1)
	b.mu.Unlock()
	close(s.left)
}
