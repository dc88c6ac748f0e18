package shm_test

import (
	"encoding/binary"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/backends/shm"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// files are the memfd arenas of a test's process.
type files struct {
	mu struct {
		sync.Mutex
		arenas []*arena.Arena
	}
}

func (f *files) FileOf(addr, n uint64) (fd int, off int64, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.mu.arenas {
		if fd, off, ok = a.FileOf(addr, n); ok {
			return fd, off, ok
		}
	}
	return -1, 0, false
}

// memory makes memory in a memfd arena.
func (f *files) memory(t testing.TB, _ xfertest.Side, size int64) xfertest.Memory {
	t.Helper()
	a, err := arena.New(size, &arena.Options{Memfd: true, NoHugePages: true})
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.mu.arenas = append(f.mu.arenas, a)
	f.mu.Unlock()
	t.Cleanup(func() {
		f.mu.Lock()
		f.mu.arenas = slices.DeleteFunc(f.mu.arenas, func(o *arena.Arena) bool { return o == a })
		f.mu.Unlock()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	b := bytesAt(a.Slice(0, size))
	return xfertest.Memory{Desc: xfer.Desc{Addr: arena.Addr(b), Len: uint64(size)}, ReaderAt: b, WriterAt: b}
}

type bytesAt []byte

func (b bytesAt) ReadAt(p []byte, off int64) (int, error)  { return copy(p, b[off:]), nil }
func (b bytesAt) WriteAt(p []byte, off int64) (int, error) { return copy(b[off:], p), nil }

// harness is for memory files where f is not nil.
func harness(f *files) xfertest.RemoteHarness {
	h := xfertest.RemoteHarness{Direct: true}
	o := shm.Options{}
	if f != nil {
		h.Memory = f.memory
		o.FileOf = f.FileOf
	}
	make := func(t testing.TB, o shm.Options) xfer.Backend {
		t.Helper()
		b, err := shm.New(&o)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	h.New = func(t testing.TB, _ xfertest.Side) xfer.Backend { return make(t, o) }
	h.Again = func(t testing.TB, _ xfertest.Side, info []byte) xfer.Backend {
		o := o
		// Behind the version come the host's and the socket's names.
		b := info[1:]
		b = b[2+binary.LittleEndian.Uint16(b):]
		o.Socket = string(b[2:])
		return make(t, o)
	}
	return h
}

// socketsIn gives the test and the processes that it starts a directory for their
// sockets, of which those that are killed leave theirs.
func socketsIn(t *testing.T) {
	t.Helper()
	const given = "KVTIER_SHM_TEST_SOCKETS"
	if os.Getenv(given) == "" {
		dir := t.TempDir()
		t.Setenv("XDG_RUNTIME_DIR", dir)
		t.Setenv(given, dir)
	}
}

// TestProcessVM runs the narrow suite over memory that is in no file.
func TestProcessVM(t *testing.T) {
	socketsIn(t)
	h := harness(nil)
	h.Narrow = true
	xfertest.RunRemote(t, h)
}

// TestMemoryFile runs the suite over memfd arenas on both sides.
func TestMemoryFile(t *testing.T) {
	socketsIn(t)
	xfertest.RunRemote(t, harness(&files{}))
}
