package frame

import (
	"crypto/tls"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// link is the stream below a connection. TCP and unix sockets are read and written
// by system calls of our own, for two things that net.Conn has not: one read into
// two places, and the knowledge of how much of a blocked write was taken. Any other
// stream, such as TLS, is a net.Conn. The sizes of socket buffers are left to the
// kernel: fixed ones from 0.5 to 4 MiB were no faster (BenchmarkGet), on unix sockets
// neither.
type link struct {
	c      net.Conn
	socket syscall.RawConn // that carries the stream, however wrapped; nil when there is none
	direct bool            // nothing is between us and the socket
	secure *tls.Conn
}

func newLink(c net.Conn) link {
	l := link{c: c}
	below := c
	if t, ok := c.(*tls.Conn); ok {
		l.secure, below = t, t.NetConn()
	}
	if s, ok := below.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil { // else it is closed, as the first read will say
			l.socket = raw
		}
	}
	switch c.(type) {
	case *net.TCPConn, *net.UnixConn: // and nothing that holds one and does more
		l.direct = l.socket != nil
	}
	return l
}

// queued is how many bytes the peer has not taken yet of those that were written; 0
// when nobody knows.
func (l *link) queued() (n int) {
	if l.socket != nil {
		_ = l.socket.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	}
	return n
}

// looks reports whether a write that may have to wait begins with a look whether
// there is room: one that is broken off leaves TLS useless.
func (l *link) looks() bool { return l.secure != nil && l.socket != nil }

// writable reports whether the socket takes bytes now.
func writable(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(p, 0)
	return n > 0 || err != nil && err != unix.EINTR
}

// close closes the stream without waiting for the peer.
func (l *link) close() {
	c := l.c
	if l.secure != nil {
		// TLS says goodbye first, and for that would wait five seconds when nobody
		// takes it.
		free := false
		if l.socket != nil {
			_ = l.socket.Control(func(fd uintptr) { free = writable(fd) })
		}
		if !free {
			c = l.secure.NetConn()
		}
	}
	_ = c.Close() // what ended the connection is what there is to tell
}
