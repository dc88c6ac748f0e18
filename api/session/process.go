package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
)

// process is another process, held by a descriptor that no later process can take
// the place of.
type process struct{ f *os.File }

// peerProcess finds the process at the other end of a unix socket. ErrUnavailable
// for other connections, and for a process that cannot be seen from here.
func peerProcess(c net.Conn) (*process, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("process of %s: %w: not a unix socket", c.RemoteAddr(), block.ErrUnavailable)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("process of a socket: %w", err)
	}
	fd := -1
	if cerr := raw.Control(func(s uintptr) { fd, err = peerPidfd(int(s)) }); cerr != nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("process of a socket: %w: %w", block.ErrUnavailable, err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that its end can be waited for without a thread
		return nil, errors.Join(fmt.Errorf("process of a socket: %w", err), unix.Close(fd))
	}
	return &process{f: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// peerCred says which process and user connected a unix socket; nil for other
// connections. A number in it may be another process's by now.
func peerCred(c net.Conn) (*unix.Ucred, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, nil
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("user of a socket: %w", err)
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(s uintptr) { cred, err = unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("user of a socket: %w", err)
	}
	return cred, nil
}

func peerPidfd(s int) (int, error) {
	fd, err := unix.GetsockoptInt(s, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err == nil {
		unix.CloseOnExec(fd)
		return fd, nil
	}
	if !errors.Is(err, unix.ENOPROTOOPT) {
		return -1, err
	}
	// Before Linux 6.5 the number must do. It has just said hello, so it is that
	// process's own, unless that has died meanwhile.
	cred, err := unix.GetsockoptUcred(s, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return -1, err
	}
	if cred.Pid == 0 {
		return -1, errors.New("it is in a namespace that cannot be seen from here")
	}
	return unix.PidfdOpen(int(cred.Pid), 0)
}

// wait returns nil when the process has ended, and the context's error when that
// ends before.
func (p *process) wait(ctx context.Context) error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for a process: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = p.f.SetReadDeadline(time.Unix(1, 0)) }) // it is one that can have deadlines, or raw.Read fails
	defer stop()
	var perr error
	err = raw.Read(func(fd uintptr) bool {
		var ended bool
		ended, perr = readable(int(fd))
		return ended || perr != nil
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("wait for a process: %w", err)
	}
	return perr
}

// readable says whether a pidfd's process has ended.
func readable(fd int) (bool, error) {
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// close lets go of the process; nil is allowed.
func (p *process) close() {
	if p != nil {
		_ = p.f.Close() // it was only looked at
	}
}
