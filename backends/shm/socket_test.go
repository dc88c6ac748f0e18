package shm

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/xfer"
)

// leave makes a socket's file as a killed process leaves it.
func leave(t *testing.T, path string) {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	leave(t, path)
	b, err := New(&Options{Socket: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Bind(nearID); err != nil {
		t.Fatalf("where a killed process was: %v", err)
	}
	other, err := New(&Options{Socket: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Bind(farID); !errors.Is(err, xfer.ErrUnavailable) {
		t.Errorf("where another one is: %v, want ErrUnavailable", err)
	}
	for _, b := range []*Backend{b, other, b} {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket's file after Close: %v", err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err = New(&Options{Socket: path}); err != nil {
		t.Fatal(err)
	}
	if err := b.Bind(nearID); !errors.Is(err, xfer.ErrUnavailable) {
		t.Errorf("where a file is: %v, want ErrUnavailable", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "precious" {
		t.Errorf("the file is %q, %v", b, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

func TestSocketTooLong(t *testing.T) {
	if b, err := New(&Options{Socket: strings.Repeat("x", 108)}); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("%v, %v, want ErrInvalid", b, err)
	}
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(t.TempDir(), strings.Repeat("x", 100)))
	if err := os.Mkdir(os.Getenv("XDG_RUNTIME_DIR"), 0o700); err != nil {
		t.Fatal(err)
	}
	b, err := New(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Bind(nearID); !errors.Is(err, xfer.ErrUnavailable) || !strings.Contains(err.Error(), "at most 107") {
		t.Errorf("in a long directory: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

func TestPrivateDirectory(t *testing.T) {
	base := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", base)
	bind := func() error {
		b, err := New(nil)
		if err != nil {
			t.Fatal(err)
		}
		err = b.Bind(nearID)
		return errors.Join(err, b.Close())
	}
	if err := bind(); err != nil {
		t.Fatal(err)
	}
	dir, err := privateDir()
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 || !strings.HasPrefix(dir, base) {
		t.Errorf("%s: %v, %v", dir, st, err)
	}
	// Of what lies there only sockets go that are old and that nobody serves.
	fresh, old, text := filepath.Join(dir, "fresh.sock"), filepath.Join(dir, "old.sock"), filepath.Join(dir, "text.sock")
	leave(t, fresh)
	leave(t, old)
	if err := os.WriteFile(text, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	served, err := net.Listen("unix", filepath.Join(dir, "served.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer served.Close()
	yesterday := time.Now().Add(-24 * time.Hour)
	for _, path := range []string{old, text, served.Addr().String()} {
		if err := os.Chtimes(path, yesterday, yesterday); err != nil {
			t.Fatal(err)
		}
	}
	if err := bind(); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	left := ""
	for _, e := range entries {
		left += e.Name() + " "
	}
	if left != "fresh.sock served.sock text.sock " {
		t.Errorf("left are %s", left)
	}

	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := bind(); !errors.Is(err, xfer.ErrUnavailable) {
		t.Errorf("in a directory that all may write to: %v, want ErrUnavailable", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(t.TempDir(), dir); err != nil {
		t.Fatal(err)
	}
	if err := bind(); !errors.Is(err, xfer.ErrUnavailable) {
		t.Errorf("in a directory behind a link: %v, want ErrUnavailable", err)
	}
}

// TestAllowPtrace: where there is no Yama there is nothing to allow.
func TestAllowPtrace(t *testing.T) { bound(t, nearID, &Options{AllowPtrace: true}) }

func TestConnInfo(t *testing.T) {
	d := newDuo(t)
	info, err := d.far.ConnInfo()
	if err != nil {
		t.Fatal(err)
	}
	id := xfer.PeerID{Name: "other", Incarnation: 5}
	for name, tt := range map[string]struct {
		info []byte
		want error
	}{
		"empty":        {nil, xfer.ErrInvalid},
		"cut":          {info[:len(info)-1], xfer.ErrInvalid},
		"too much":     {append(info[:len(info):len(info)], 0), xfer.ErrInvalid},
		"version":      {append([]byte{7}, info[1:]...), xfer.ErrInvalid},
		"another host": {appendText(appendText([]byte{version}, "host"), "/s"), xfer.ErrUnavailable},
	} {
		if err := d.near.LoadConnInfo(id, tt.info); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if err := d.near.LoadConnInfo(farID, info); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("a peer that is known: %v, want ErrInvalid", err)
	}
	b, err := New(nil)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := b.ConnInfo(); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("before Bind: %q, %v, want ErrInvalid", info, err)
	}
	if err := b.Bind(xfer.PeerID{Name: "x"}); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("without an incarnation: %v, want ErrInvalid", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := b.Bind(nearID); !errors.Is(err, xfer.ErrClosed) {
		t.Errorf("after Close: %v, want ErrClosed", err)
	}
	if err := d.near.Bind(farID); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("twice: %v, want ErrInvalid", err)
	}
}

// TestFilesOfRegions: a file is the backend's for as long as memory of it is
// registered, and a file that can shrink is none.
func TestFilesOfRegions(t *testing.T) {
	d := newDuo(t)
	again, _ := d.register(t)
	for i, r := range []xfer.Region{d.region, again} {
		if n := len(d.far.mu.files); n != 1 {
			t.Errorf("%d files, %d regions of one deregistered", n, i)
		}
		if err := d.far.Deregister(r); err != nil {
			t.Fatal(err)
		}
		if err := d.far.Deregister(r); !errors.Is(err, xfer.ErrNotFound) {
			t.Errorf("deregistered twice: %v, want ErrNotFound", err)
		}
	}
	if n := len(d.far.mu.files); n != 0 {
		t.Errorf("%d files are left", n)
	}
	for name, tt := range map[string]struct {
		fd   int
		off  int64
		want error
		file bool
	}{
		"sealed":     {memFile(t, 8192, unix.F_SEAL_SHRINK), 4096, nil, true},
		"not sealed": {memFile(t, 8192, unix.F_SEAL_GROW), 0, nil, false},
		"too short":  {memFile(t, 8192, unix.F_SEAL_SHRINK), 4097, xfer.ErrInvalid, false},
		"negative":   {memFile(t, 8192, unix.F_SEAL_SHRINK), -1, xfer.ErrInvalid, false},
		"closed":     {1 << 30, 0, nil, false},
	} {
		b := bound(t, nearID, &Options{FileOf: func(uint64, uint64) (int, int64, bool) { return tt.fd, tt.off, true }})
		r, err := b.Register(t.Context(), xfer.DRAM, xfer.Desc{Addr: 4096, Len: 4096})
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		if err == nil && (r.(*region).file != nil) != tt.file {
			t.Errorf("%s: file %v", name, r.(*region).file)
		}
	}
}
