package session

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a second hold on a unix connection: its other end sees no end before that
// is let go as well. So whoever touches memory of the other's says when he has stopped.
type socket struct{ f *os.File }

// holdSocket takes one.
func holdSocket(c net.Conn) (*socket, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("hold a connection of %T: not a unix socket", c)
	}
	f, err := u.File()
	if err != nil {
		return nil, fmt.Errorf("hold a connection: %w", err)
	}
	return &socket{f}, nil
}

// close lets go; nil is allowed.
func (s *socket) close() {
	if s != nil {
		_ = s.f.Close() // what there was to send was sent
	}
}

// leave tells the other end that nothing more comes from here.
func (s *socket) leave() {
	if raw, err := s.f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_WR) }) // it fails when the connection has ended
	}
}

// ended waits for the other end to let go, and throws away what it still sends. It
// reports whether that came before the time was over.
func (s *socket) ended(within time.Duration) bool {
	if err := s.f.SetReadDeadline(time.Now().Add(within)); err != nil {
		return false
	}
	b := make([]byte, 64<<10)
	for {
		if _, err := s.f.Read(b); err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
	}
}
