package xfertest

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// Memory is a piece of memory that a test can fill and look at without the
// backend it tests. Offset 0 is Desc.Addr. It ends with the test.
type Memory struct {
	Desc xfer.Desc // all of it, as it would be registered
	io.ReaderAt
	io.WriterAt

	pieces *objects // nil unless it is of Objects
}

// DRAM makes memory in an arena.
func DRAM(t testing.TB, size int64) Memory {
	t.Helper()
	a, err := arena.New(size, nil)
	if err != nil {
		t.Fatalf("arena of %d bytes: %v", size, err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Errorf("close arena: %v", err)
		}
	})
	b := a.Slice(0, size)
	return Memory{Desc: xfer.Desc{Addr: arena.Addr(b), Len: uint64(size)}, ReaderAt: bytesAt(b), WriterAt: bytesAt(b)}
}

// bytesAt reads and writes memory in place.
type bytesAt []byte

func (b bytesAt) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(b)) {
		return 0, fmt.Errorf("read %d bytes at %d of %d", len(p), off, len(b))
	}
	return copy(p, b[off:]), nil
}

func (b bytesAt) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(b)) {
		return 0, fmt.Errorf("write %d bytes at %d of %d", len(p), off, len(b))
	}
	return copy(b[off:], p), nil
}

var files atomic.Uint64 // so that each file has a Dev of its own

// File makes a regular file in the test's temporary directory.
func File(t testing.TB, size int64) Memory {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Errorf("close %s: %v", path, err)
		}
	})
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return Memory{
		Desc:     xfer.Desc{Len: uint64(size), Dev: files.Add(1), Meta: path},
		ReaderAt: f,
		WriterAt: f,
	}
}

// AbsentFile describes a file that does not exist.
func AbsentFile(t testing.TB) xfer.Desc {
	return xfer.Desc{Dev: files.Add(1), Meta: filepath.Join(t.TempDir(), "absent", "file")}
}
