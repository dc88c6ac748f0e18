package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// endpoint is an address to listen on or to dial.
type endpoint struct {
	network string // tcp or unix
	address string // HOST:PORT or a path
}

// String writes the endpoint as flags take it.
func (e endpoint) String() string {
	if e.network == "unix" {
		return "unix:" + e.address
	}
	return e.address
}

// maxUnixPath is the room for a path in Linux's sockaddr_un, less its end.
const maxUnixPath = 107

// parseEndpoint reads HOST:PORT or unix:PATH.
func parseEndpoint(s string) (endpoint, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		if path == "" || len(path) > maxUnixPath {
			return endpoint{}, fmt.Errorf("address %q: a socket's path has 1 to %d bytes", s, maxUnixPath)
		}
		if strings.ContainsRune(path, 0) {
			return endpoint{}, fmt.Errorf("address %q: a byte of zero in the path", s)
		}
		return endpoint{"unix", path}, nil
	}
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return endpoint{}, fmt.Errorf("address %q: want HOST:PORT or unix:PATH", s)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return endpoint{}, fmt.Errorf("address %q: port %q: want a number from 0 to 65535", s, port)
	}
	return endpoint{"tcp", s}, nil
}

// checkEndpoint is parseEndpoint for a flag's check.
func checkEndpoint(s string) error {
	_, err := parseEndpoint(s)
	return err
}

// checkTCP refuses what is not HOST:PORT; "" is off.
func checkTCP(s string) error {
	if s == "" {
		return nil
	}
	e, err := parseEndpoint(s)
	if err != nil {
		return err
	}
	if e.network != "tcp" {
		return fmt.Errorf("address %q: want HOST:PORT", s)
	}
	return nil
}

// isLoopback reports whether only this machine can reach an endpoint. A name
// is one when all addresses it stands for are.
func isLoopback(ctx context.Context, e endpoint) bool {
	if e.network == "unix" {
		return true
	}
	host, _, err := net.SplitHostPort(e.address)
	if err != nil || host == "" {
		return false
	}
	if host == "localhost" {
		return true
	}
	if ip := net.ParseIP(host); ip != nil {
		return ip.IsLoopback()
	}
	ips, err := net.DefaultResolver.LookupIPAddr(ctx, host)
	if err != nil || len(ips) == 0 {
		return false
	}
	for _, ip := range ips {
		if !ip.IP.IsLoopback() {
			return false
		}
	}
	return true
}

// listen opens an endpoint. A socket file that nobody listens on any more is
// replaced.
func listen(ctx context.Context, e endpoint) (net.Listener, error) {
	if e.network == "unix" {
		if err := removeStaleSocket(ctx, e.address); err != nil {
			return nil, fmt.Errorf("listen on %s: %w", e, err)
		}
	}
	return listenWith(ctx, e, net.ListenConfig{})
}

// listenWith opens an endpoint.
func listenWith(ctx context.Context, e endpoint, lc net.ListenConfig) (net.Listener, error) {
	l, err := lc.Listen(ctx, e.network, e.address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", e, shortNetError(err))
	}
	return l, nil
}

// ownerOnly makes a socket that only its owner can connect to: what it is bound to
// takes the mode that it has itself.
func ownerOnly(_, _ string, c syscall.RawConn) error {
	var err error
	if cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
		return cerr
	}
	return err
}

// shortNetError takes the operation and address off a network error, since its
// caller names them.
func shortNetError(err error) error {
	var oe *net.OpError
	if errors.As(err, &oe) {
		return oe.Err
	}
	return err
}

// removeStaleSocket removes the socket file that a killed daemon left. It never
// removes anything but a socket.
func removeStaleSocket(ctx context.Context, path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is there and is not a socket", path)
	}
	d := net.Dialer{Timeout: time.Second}
	c, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		c.Close()
		return syscall.EADDRINUSE
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return shortNetError(err)
	}
	return os.Remove(path)
}

// boundTo is the endpoint that a listener really has: with its port.
func boundTo(l net.Listener) endpoint {
	return endpoint{l.Addr().Network(), l.Addr().String()}
}
