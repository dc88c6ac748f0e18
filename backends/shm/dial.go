package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer/frame"
)

// greeted is a connection on which hellos were exchanged.
type greeted struct {
	c     *net.UnixConn
	w     welcome
	file  int // what came with the welcome, the caller's to close
	pid   int // of the peer; 0 when this process cannot see it
	pidfd int // of the peer; -1 when there is no pid
}

// noFile is the reason of an owner that has no region, or no file of one, of a token.
const noFile = "no such file"

var errNoFile = errors.New(noFile)

// hail connects to a peer and exchanges hellos. It believes only the peer that was
// made known.
func (b *Backend) hail(ctx context.Context, p *peer, h *hello) (g greeted, err error) {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", p.socket)
	if err != nil {
		return g, err
	}
	g = greeted{c: c.(*net.UnixConn), file: -1, pidfd: -1}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) }) // it ends the exchange
	defer func() {
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err != nil {
			g.close()
		}
	}()
	cred, err := credentials(g.c)
	if err != nil {
		return g, err
	}
	// The number is the peer's still: it answers the hello behind this.
	if cred.Pid > 0 {
		if fd, err := unix.PidfdOpen(int(cred.Pid), 0); err == nil {
			g.pid, g.pidfd = int(cred.Pid), fd
		}
	}
	h.self, h.want = b.self, p.id
	if err := frame.SendHello(g.c, h.encode(), nil); err != nil {
		return g, err
	}
	payload, files, err := frame.RecvHello(g.c)
	if err != nil {
		return g, err
	}
	if len(files) != 1 {
		closeAll(files)
		files = nil
	} else {
		g.file = files[0]
	}
	if err := g.w.decode(payload); err != nil {
		return g, err
	}
	switch {
	case g.w.self != p.id:
		return g, fmt.Errorf("at its socket is %s", g.w.self)
	case g.w.reason == noFile:
		return g, errNoFile
	case g.w.reason != "":
		return g, fmt.Errorf("it says: %s", g.w.reason)
	case g.file < 0:
		return g, fmt.Errorf("%w: welcome without one file", errProtocol)
	}
	return g, nil
}

func (g *greeted) close() {
	_ = g.c.Close() // there was nothing to lose
	for _, fd := range []int{g.file, g.pidfd} {
		if fd >= 0 {
			_ = unix.Close(fd) // likewise
		}
	}
}

// dialLink makes a connection to a peer, in use once.
func (b *Backend) dialLink(ctx context.Context, p *peer) (*link, error) {
	g, err := b.hail(ctx, p, &hello{purpose: forLink})
	if err != nil {
		return nil, err
	}
	if g.w.bytes != gateBytes {
		g.close()
		return nil, fmt.Errorf("%w: gate of %d bytes, want %d", errProtocol, g.w.bytes, gateBytes)
	}
	m, err := arena.MapFile(g.file, gateBytes)
	if err != nil {
		g.close()
		return nil, err
	}
	if !m.Writable() {
		g.close()
		return nil, errors.Join(fmt.Errorf("%w: gate that may not be written", errProtocol), m.Close())
	}
	sock, err := rawFd(g.c)
	if err != nil {
		g.close()
		return nil, errors.Join(err, m.Close())
	}
	ln, err := newLine(g.c, false)
	if err != nil {
		g.close()
		return nil, errors.Join(err, m.Close())
	}
	_ = unix.Close(g.file) // the mapping stays
	l := newLink(b, p, ln, m)
	l.sock, l.pid, l.pidfd = sock, g.pid, g.pidfd
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		l.end(net.ErrClosed)
	}
	b.mu.links[l] = struct{}{}
	b.wg.Go(l.run)
	return l, nil
}

// fetch maps the file of a region.
func (b *Backend) fetch(ctx context.Context, p *peer, token, file, bytes uint64) (*arena.Shared, error) {
	g, err := b.hail(ctx, p, &hello{purpose: forFile, token: token})
	if err != nil {
		return nil, err
	}
	defer g.close()
	if g.w.file != file || g.w.bytes != bytes {
		return nil, fmt.Errorf("%w: file %d of %d bytes, want %d of %d", errProtocol, g.w.file, g.w.bytes, file, bytes)
	}
	return arena.MapFile(g.file, int64(bytes))
}
