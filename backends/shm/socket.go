package shm

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is what the kernel takes.
const maxSocketPath = 107

// sweepAge is how old a socket is before it can count as left behind: one that
// does not listen yet looks the same.
const sweepAge = time.Minute

// listen opens the socket at a path, or one of a name of its own.
func listen(path string) (*net.UnixListener, string, error) {
	if path == "" {
		dir, err := privateDir()
		if err != nil {
			return nil, "", err
		}
		sweep(dir)
		var name [8]byte
		_, _ = rand.Read(name[:]) // never fails
		path = filepath.Join(dir, hex.EncodeToString(name[:])+suffix)
		if n := len(path); n > maxSocketPath {
			return nil, "", fmt.Errorf("socket %s: a path of %d bytes, at most %d", path, n, maxSocketPath)
		}
	} else if abs, err := filepath.Abs(path); err == nil && len(abs) <= maxSocketPath {
		path = abs // peers have other working directories
	}
	addr := &net.UnixAddr{Name: path, Net: "unix"}
	ln, err := net.ListenUnix("unix", addr)
	if errors.Is(err, unix.EADDRINUSE) {
		if !abandoned(path) {
			return nil, "", fmt.Errorf("socket %s: another process serves it", path)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, "", err
		}
		ln, err = net.ListenUnix("unix", addr)
	}
	if err != nil {
		return nil, "", err
	}
	// Until here others could connect; credentials are checked anyway.
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, "", errors.Join(err, ln.Close())
	}
	return ln, path, nil
}

// suffix of the sockets in the private directory.
const suffix = ".sock"

// privateDir makes this user's directory for sockets and makes sure that it is.
func privateDir() (string, error) {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" {
		base = os.TempDir()
	}
	dir, err := filepath.Abs(filepath.Join(base, fmt.Sprintf("kvtier-%d", os.Geteuid())))
	if err != nil {
		return "", err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return "", fmt.Errorf("stat %s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return "", fmt.Errorf("%s: want a directory of user %d with mode 0700, found mode %#o of user %d", dir, os.Geteuid(), st.Mode, st.Uid)
	}
	return dir, nil
}

// abandoned says whether a path is a socket that nobody listens to.
func abandoned(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close() // it was to see whether it can be made
		return false
	}
	st, serr := os.Lstat(path)
	return errors.Is(err, unix.ECONNREFUSED) && serr == nil && st.Mode()&os.ModeSocket != 0
}

// sweep removes the sockets of killed processes.
func sweep(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // then nothing is swept
	}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil || !strings.HasSuffix(e.Name(), suffix) || time.Since(st.ModTime()) < sweepAge {
			continue
		}
		if path := filepath.Join(dir, e.Name()); abandoned(path) {
			_ = os.Remove(path) // another process may have been faster
		}
	}
}
