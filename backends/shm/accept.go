package shm

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer/frame"
)

// greetTimeout bounds the exchange of hellos.
const greetTimeout = 5 * time.Second

// accept takes connections until the listener is closed.
func (b *Backend) accept(ln *net.UnixListener) {
	for {
		c, err := ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, as a rule: others may be closed by and by.
			b.log.Warn("shm: accept", "err", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		b.mu.Lock()
		welcome := !b.mu.closed && len(b.mu.greeting)+len(b.mu.served) < maxServed
		if welcome {
			b.mu.greeting[c] = struct{}{}
			b.wg.Go(func() { b.greet(c) })
		}
		b.mu.Unlock()
		if !welcome {
			b.log.Debug("shm: connection refused", "connections", maxServed)
			_ = c.Close() // that is the refusal
		}
	}
}

// greet answers a hello, and serves the connection where it is to stay.
func (b *Backend) greet(c *net.UnixConn) {
	s, err := b.welcome(c)
	b.mu.Lock()
	delete(b.mu.greeting, c)
	closed := b.mu.closed
	if s != nil {
		b.mu.served[s] = struct{}{}
	}
	b.mu.Unlock()
	if err != nil {
		b.log.Debug("shm: connection refused", "err", err)
	}
	if s == nil {
		_ = c.Close() // all was said
		return
	}
	if closed {
		s.cut()
	}
	s.run()
	b.forget(s)
}

// welcome reads a hello and answers it. It makes a served connection of one for a
// link.
func (b *Backend) welcome(c *net.UnixConn) (*served, error) {
	if err := c.SetDeadline(time.Now().Add(greetTimeout)); err != nil {
		return nil, err
	}
	if _, err := credentials(c); err != nil {
		return nil, err
	}
	var h hello
	p, files, err := frame.RecvHello(c)
	if err != nil {
		return nil, err
	}
	closeAll(files)
	if len(files) > 0 {
		return nil, fmt.Errorf("%w: hello with %d files", errProtocol, len(files))
	}
	if err := h.decode(p); err != nil {
		return nil, b.refuse(c, err.Error())
	}
	if h.want != b.self {
		return nil, b.refuse(c, fmt.Sprintf("peer %s is wanted", h.want))
	}
	switch h.purpose {
	case forLink:
		return b.welcomeLink(c, &h)
	case forFile:
		return nil, b.giveFile(c, h.token)
	}
	return nil, b.refuse(c, fmt.Sprintf("purpose %d", h.purpose))
}

// refuse says why not.
func (b *Backend) refuse(c *net.UnixConn, reason string) error {
	w := welcome{self: b.self, reason: reason}
	return errors.Join(errors.New(reason), frame.SendHello(c, w.encode(), nil))
}

func (b *Backend) welcomeLink(c *net.UnixConn, h *hello) (*served, error) {
	a, err := arena.New(gateBytes, &arena.Options{Memfd: true, Name: "kvtier-gate", NoHugePages: true, NoPopulate: true})
	if err != nil {
		return nil, b.refuse(c, err.Error())
	}
	w := welcome{self: b.self, bytes: gateBytes}
	if err := frame.SendHello(c, w.encode(), []int{a.Fd(0)}); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	l, err := newLine(c, true)
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return newServed(b, l, h.self, a), nil
}

// giveFile sends the file of a region.
func (b *Backend) giveFile(c *net.UnixConn, token uint64) error {
	w := welcome{self: b.self}
	fd := -1
	b.mu.Lock()
	if r := b.mu.regions[token]; r != nil && r.file != nil {
		w.file, w.bytes = r.file.id, uint64(r.file.bytes)
		// Another, because Deregister may close the file's while it is sent.
		var err error
		if fd, err = unix.FcntlInt(uintptr(r.file.fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			w.reason = err.Error()
		}
	} else {
		w.reason = noFile
	}
	b.mu.Unlock()
	if fd < 0 {
		return b.refuse(c, w.reason)
	}
	err := frame.SendHello(c, w.encode(), []int{fd})
	return errors.Join(err, unix.Close(fd))
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd) // it was only received
	}
}
