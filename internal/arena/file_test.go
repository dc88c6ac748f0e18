package arena_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/servers"
)

func TestFileOf(t *testing.T) {
	a, err := arena.New(2*arena.HugeBytes, &arena.Options{Memfd: true, NoHugePages: true, NoPopulate: true, ChunkBytes: arena.HugeBytes})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	second := arena.Addr(a.Chunks()[1])
	for _, tt := range []struct {
		addr, n uint64
		fd      int
		off     int64
		ok      bool
	}{
		{arena.Addr(a.Chunks()[0]), arena.HugeBytes, a.Fd(0), 0, true},
		{second + 4096, 100, a.Fd(1), 4096, true},
		{second + arena.HugeBytes - 1, 1, a.Fd(1), arena.HugeBytes - 1, true},
		{second + arena.HugeBytes - 1, 2, -1, 0, false},
		{second - 1<<30, 1, -1, 0, false},
		{second, ^uint64(0), -1, 0, false},
	} {
		if fd, off, ok := a.FileOf(tt.addr, tt.n); fd != tt.fd || off != tt.off || ok != tt.ok {
			t.Errorf("FileOf(%#x, %d) = %d, %d, %v, want %d, %d, %v", tt.addr, tt.n, fd, off, ok, tt.fd, tt.off, tt.ok)
		}
	}
	anonymous, err := arena.New(1, &arena.Options{NoPopulate: true})
	if err != nil {
		t.Fatal(err)
	}
	defer anonymous.Close()
	if _, _, ok := anonymous.FileOf(arena.Addr(anonymous.Chunks()[0]), 1); ok {
		t.Error("an anonymous arena has a file")
	}
}

// TestPassedForReading: another user who is passed a chunk for reading cannot open it for
// writing.
func TestPassedForReading(t *testing.T) {
	a, err := arena.New(arena.HugeBytes, &arena.Options{Memfd: true, NoHugePages: true, NoPopulate: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", a.Fd(0)), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	s, err := arena.MapFile(fd, a.Size())
	if err != nil || s.Writable() {
		t.Fatalf("writable, or error %v", err)
	}
	defer s.Close()
	if a.Slice(0, 1)[0] = 7; s.Bytes()[0] != 7 {
		t.Error("it is other memory")
	}
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "it takes that to be another user")
	}
	path := fmt.Sprintf("/proc/self/fd/%d", fd)
	again := make(chan error)
	go func() {
		runtime.LockOSThread() // and it ends with the goroutine, whose user nobody else may be
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 12345, ^uintptr(0)); errno != 0 {
			again <- errno
			return
		}
		_, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		again <- err
	}()
	if err := <-again; !errors.Is(err, unix.EACCES) {
		t.Errorf("opened for writing by another user: error %v, want %v", err, unix.EACCES)
	}
}

func TestMapFile(t *testing.T) {
	a, err := arena.New(arena.HugeBytes, &arena.Options{Memfd: true, NoHugePages: true, NoPopulate: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	s, err := arena.MapFile(a.Fd(0), a.Size())
	if err != nil {
		t.Fatal(err)
	}
	a.Slice(0, 1)[0] = 7
	s.Bytes()[1] = 8
	if s.Bytes()[0] != 7 || a.Slice(1, 1)[0] != 8 || !s.Writable() || arena.Addr(s.Bytes())%arena.HugeBytes != 0 {
		t.Errorf("a mapping at %#x, writable %v, starts %v; the arena %v", arena.Addr(s.Bytes()), s.Writable(), s.Bytes()[:2], a.Slice(0, 2))
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	for _, n := range []int64{0, -1, a.Size() + 1} {
		if _, err := arena.MapFile(a.Fd(0), n); err == nil || errors.Is(err, arena.ErrUnsafe) {
			t.Errorf("%d bytes of %d: %v", n, a.Size(), err)
		}
	}
}

func TestMapFileRefusesWhatCanShrink(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := arena.MapFile(fd, 4096); !errors.Is(err, arena.ErrUnsafe) {
		t.Errorf("without seals: %v, want ErrUnsafe", err)
	}
	// A file that may not be written to is mapped for reading.
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	s, err := arena.MapFile(fd, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Writable() || s.Bytes()[0] != 0 {
		t.Errorf("writable %v, %d", s.Writable(), s.Bytes()[0])
	}
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	if _, err := arena.MapFile(pipe[0], 1); !errors.Is(err, arena.ErrUnsafe) {
		t.Errorf("a pipe: %v, want ErrUnsafe", err)
	}
}
