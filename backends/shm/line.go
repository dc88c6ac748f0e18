package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/xfer/frame"
)

// errProtocol: the other side said what this protocol does not know.
var errProtocol = errors.New("bad message")

// line is a connection's socket whose Close does not close it. Closing is a
// statement here: an owner that reads the end of its peer's stream knows that the
// peer touches none of its memory any more. So an initiator closes only when it is
// quiet, and an owner not before it has read that.
type line struct {
	*net.UnixConn
	owner bool
	ended atomic.Bool
}

// Close ends what reads or writes the line.
func (l *line) Close() error {
	if l.ended.Swap(true) {
		return nil
	}
	var err error
	if l.owner {
		err = l.CloseWrite() // the initiator is to hear of it
	}
	return errors.Join(err, l.SetDeadline(time.Unix(1, 0)))
}

// SetReadDeadline makes sure that no deadline outlasts Close.
func (l *line) SetReadDeadline(t time.Time) error {
	return l.until(l.UnixConn.SetReadDeadline, t)
}

// SetWriteDeadline makes sure that no deadline outlasts Close.
func (l *line) SetWriteDeadline(t time.Time) error {
	return l.until(l.UnixConn.SetWriteDeadline, t)
}

func (l *line) until(set func(time.Time) error, t time.Time) error {
	if l.ended.Load() {
		return net.ErrClosed
	}
	if err := set(t); err != nil || !l.ended.Load() {
		return err
	}
	return errors.Join(set(time.Unix(1, 0)), net.ErrClosed)
}

// finish closes the socket.
func (l *line) finish() {
	_ = l.UnixConn.Close() // all was said
}

// newLine prepares a connection whose hellos have been exchanged.
func newLine(c *net.UnixConn, owner bool) (*line, error) {
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return &line{UnixConn: c, owner: owner}, nil
}

// rawFd is the socket's descriptor, good until it is closed.
func rawFd(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	err = raw.Control(func(p uintptr) { fd = int(p) })
	return fd, err
}

// credentials says who holds the other end, and refuses other users than root and
// the one that this process runs as.
func credentials(c *net.UnixConn) (*unix.Ucred, error) {
	fd, err := rawFd(c)
	if err != nil {
		return nil, err
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, fmt.Errorf("who is the peer: %w", err)
	}
	if uid := unix.Geteuid(); cred.Uid != 0 && int(cred.Uid) != uid {
		return nil, fmt.Errorf("the peer is of user %d, this process of %d", cred.Uid, uid)
	}
	return cred, nil
}

// outbox sends frames in the background, so that neither who reads a
// connection nor who has a deadline waits for the peer to take bytes.
type outbox struct {
	conn *frame.Conn
	c    chan frame.Frame
	over chan struct{} // closed when the connection has ended
}

// outboxFrames bounds the frames that wait to be sent.
const outboxFrames = 64

func newOutbox(conn *frame.Conn) outbox {
	return outbox{conn, make(chan frame.Frame, outboxFrames), make(chan struct{})}
}

// run sends until the connection ends.
func (o *outbox) run() {
	for {
		select {
		case f := <-o.c:
			if err := o.conn.Send(context.Background(), f); err != nil {
				_ = o.conn.Close() // Serve says why it ended
				return
			}
		case <-o.over:
			return
		}
	}
}

// tryPut queues a frame. Where there is no room the peer does not read, and the
// connection is no good.
func (o *outbox) tryPut(f frame.Frame) error {
	select {
	case o.c <- f:
		return nil
	default:
		return fmt.Errorf("the peer takes no answers: %d wait", outboxFrames)
	}
}
