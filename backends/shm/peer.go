package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// Bounds of the time in which a peer that could not be connected to is left alone.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// peer is another agent that was made known.
type peer struct {
	id      xfer.PeerID
	socket  string
	dialing chan struct{} // holds one, for who connects
	mu      struct {
		sync.Mutex
		link    *link // the one in use; nil when there is none
		backoff time.Duration
		after   time.Time // when to try again
		why     error     // what the last try said
		gone    bool      // it was forgotten
	}
}

// remoteRegion is memory of a peer.
type remoteRegion struct {
	peer             *peer
	token, addr, len uint64
}

// ConnInfo names the host and the socket.
func (b *Backend) ConnInfo() ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.listener == nil {
		return nil, fmt.Errorf("%w: backend shm is not bound", xfer.ErrInvalid)
	}
	host, err := bootID()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", xfer.ErrUnavailable, err)
	}
	return appendText(appendText([]byte{version}, host), b.mu.socket), nil
}

// bootID names this host, until it is started again.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// LoadConnInfo makes a peer known. It is an xfer.ErrUnavailable when the peer is on
// another host.
func (b *Backend) LoadConnInfo(id xfer.PeerID, info []byte) error {
	d := decoder{b: info}
	d.version("connection info")
	host, socket := d.text(maxName), d.text(maxSocketPath)
	if err := d.end("connection info"); err != nil {
		return errors.Join(xfer.ErrInvalid, err)
	}
	if socket == "" {
		return fmt.Errorf("%w: connection info without a socket", xfer.ErrInvalid)
	}
	if here, err := bootID(); err != nil || here != host {
		return errors.Join(fmt.Errorf("%w: peer %s is on another host", xfer.ErrUnavailable, id), err)
	}
	p := &peer{id: id, socket: socket, dialing: make(chan struct{}, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.closed:
		return fmt.Errorf("%w: backend shm", xfer.ErrClosed)
	case b.mu.peers[id] != nil:
		return fmt.Errorf("%w: peer %s is known already", xfer.ErrInvalid, id)
	}
	b.mu.peers[id] = p
	return nil
}

// ForgetPeer undoes LoadConnInfo and ends the connections with the peer.
func (b *Backend) ForgetPeer(id xfer.PeerID) {
	b.mu.Lock()
	p := b.mu.peers[id]
	delete(b.mu.peers, id)
	b.mu.Unlock()
	if p != nil {
		p.mu.Lock()
		p.mu.gone = true
		p.mu.Unlock()
	}
	b.disconnect(id, p)
}

// Disconnect ends the connections with a peer, whoever made them.
func (b *Backend) Disconnect(id xfer.PeerID) { b.disconnect(id, b.peer(id)) }

func (b *Backend) disconnect(id xfer.PeerID, p *peer) {
	var l *link
	if p != nil {
		p.mu.Lock()
		l, p.mu.link = p.mu.link, nil
		p.mu.Unlock()
	}
	if l != nil {
		l.end(fmt.Errorf("%w: peer %s: disconnected here", xfer.ErrDisconnected, id))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.mu.served {
		if s.peer == id {
			s.cut()
		}
	}
}

// Connect connects to a peer, without regard to a back-off.
func (b *Backend) Connect(ctx context.Context, id xfer.PeerID) error {
	p := b.peer(id)
	if p == nil {
		return fmt.Errorf("%w: peer %s", xfer.ErrNotFound, id)
	}
	l, err := b.link(ctx, p, true)
	if err == nil {
		l.release()
	}
	return err
}

func (b *Backend) peer(id xfer.PeerID) *peer {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.peers[id]
}

// link gives the connection to a peer, which the caller releases. It makes one
// where there is none, unless the peer is being left alone and that is not to be
// disregarded.
func (b *Backend) link(ctx context.Context, p *peer, now bool) (*link, error) {
	if l := p.use(); l != nil {
		return l, nil
	}
	select {
	case p.dialing <- struct{}{}:
		defer func() { <-p.dialing }()
	case <-ctx.Done():
		return nil, canceled(ctx)
	}
	if l := p.use(); l != nil {
		return l, nil
	}
	p.mu.Lock()
	wait, why, gone := time.Until(p.mu.after), p.mu.why, p.mu.gone
	p.mu.Unlock()
	switch {
	case gone:
		return nil, fmt.Errorf("%w: peer %s was forgotten", xfer.ErrDisconnected, p.id)
	case wait > 0 && !now:
		return nil, fmt.Errorf("%w: peer %s: tried again in %v: %w", xfer.ErrDisconnected, p.id, wait.Round(time.Millisecond), why)
	}
	l, err := b.dialLink(ctx, p)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		if ctx.Err() != nil {
			return nil, canceled(ctx)
		}
		p.mu.backoff = min(max(2*p.mu.backoff, minBackoff), maxBackoff)
		p.mu.after, p.mu.why = time.Now().Add(p.mu.backoff), err
		return nil, fmt.Errorf("%w: peer %s: %w", xfer.ErrDisconnected, p.id, err)
	}
	p.mu.backoff, p.mu.after, p.mu.why = 0, time.Time{}, nil
	if p.mu.gone {
		l.end(fmt.Errorf("%w: peer %s was forgotten", xfer.ErrDisconnected, p.id))
	} else {
		p.mu.link = l
	}
	return l, nil
}

// use gives the connection that there is.
func (p *peer) use() *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.mu.link; l != nil {
		if l.gate.isShut(0) {
			l.end(fmt.Errorf("%w: peer %s closed the connection", xfer.ErrDisconnected, p.id))
		} else if l.use() {
			return l
		}
	}
	p.mu.link = nil
	return nil
}

// drop forgets a connection that has ended.
func (p *peer) drop(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.link == l {
		p.mu.link = nil
	}
}

// canceled is the error of what a context ended.
func canceled(ctx context.Context) error {
	return fmt.Errorf("%w: %w", xfer.ErrCanceled, context.Cause(ctx))
}
