package arena_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/servers"
)

// foreign makes a memory file that nothing keeps from being cut short, and maps it.
func foreign(t *testing.T, n int64, writable bool) (*os.File, *arena.Foreign) {
	t.Helper()
	fd, err := unix.MemfdCreate("foreign", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "foreign")
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	m, err := arena.MapForeign(fd, n, writable)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return f, m
}

func TestForeign(t *testing.T) {
	const n = 3<<20 + 100
	f, m := foreign(t, n, true)
	if m.Len() != n || !m.Writable() || arena.Addr(m.Bytes())%arena.HugeBytes != 0 {
		t.Errorf("%d bytes at %#x, writable: %t", m.Len(), arena.Addr(m.Bytes()), m.Writable())
	}
	at := arena.Addr(m.Bytes())
	for _, tt := range []struct {
		addr uint64
		want bool
	}{{at, true}, {at + n - 1, true}, {at + n, false}, {at - 1, false}, {0, false}} {
		if got := m.Holds(tt.addr); got != tt.want {
			t.Errorf("address %#x of a mapping at %#x: %t", tt.addr, at, got)
		}
	}
	if err := arena.Guard(func() { copy(m.Bytes()[n-5:], "hello") }); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := f.ReadAt(got, n-5); err != nil || string(got) != "hello" {
		t.Errorf("the file has %q, error %v", got, err)
	}
}

// TestForeignHuge maps a file of reserved huge pages, of which it uses the last in part.
func TestForeignHuge(t *testing.T) {
	fd, err := unix.MemfdCreate("foreign", unix.MFD_CLOEXEC|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	if err != nil {
		t.Skipf("no huge pages: %v", err)
	}
	f := os.NewFile(uintptr(fd), "foreign")
	defer f.Close()
	if err := f.Truncate(2 * arena.HugeBytes); err != nil {
		t.Fatal(err)
	}
	const n = arena.HugeBytes + 4096
	m, err := arena.MapForeign(fd, n, true)
	if err != nil {
		t.Fatal(err)
	}
	// There may be no page: then it is a fault, as when the file is cut short.
	var fault *arena.Fault
	touch := func() { copy(m.Bytes()[n-5:], "hello") }
	if err := arena.Guard(touch); err != nil && !errors.As(err, &fault) {
		t.Errorf("error %v", err)
	}
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := arena.Guard(touch); !errors.As(err, &fault) || !m.Holds(fault.Addr) {
		t.Errorf("cut short: error %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func TestForeignRefused(t *testing.T) {
	fd, err := unix.MemfdCreate("foreign", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	mem := os.NewFile(uintptr(fd), "foreign")
	defer mem.Close()
	if err := mem.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	proc, err := os.Open("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	for _, tt := range []struct {
		name string
		f    *os.File
		n    int64
		want string
	}{
		{"longer than the file", mem, 4097, "4097 bytes of a file of 4096"},
		{"nothing", mem, 0, "0 bytes of a file"},
		{"less", mem, -1, "-1 bytes of a file"},
		{"open for reading only", ro, 4096, "permission denied"},
		{"device", null, 4096, "want a regular one"},
		{"no memory", proc, 4096, "want one in memory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, err := arena.MapForeign(int(tt.f.Fd()), tt.n, true)
			if err == nil {
				_ = m.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// TestForeignDisk shows that a file whose pages may have to be waited for is refused.
func TestForeignDisk(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type == unix.TMPFS_MAGIC {
		t.Skip("temporary files are in memory")
	}
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	if m, err := arena.MapForeign(int(f.Fd()), 4096, true); err == nil || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("mapped %v, error %v", m, err)
	}
}

// TestGuardTruncated cuts a file short, and makes it long again, while it is copied to
// and from.
func TestGuardTruncated(t *testing.T) {
	const n = 4 << 20
	f, m := foreign(t, n, true)
	var faults, good int
	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cutter.Go(func() {
		for {
			for _, to := range []int64{0, n, n / 2, n} {
				if err := f.Truncate(to); err != nil {
					t.Error(err)
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		}
	})
	mem := make([]byte, 256<<10)
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end) || faults == 0 || good == 0; {
		for at := 0; at < n; at += len(mem) {
			part := m.Bytes()[at:][:len(mem)]
			for _, touch := range []func(){func() { copy(part, mem) }, func() { copy(mem, part) }} {
				err := arena.Guard(touch)
				var fault *arena.Fault
				switch {
				case err == nil:
					good++
				case errors.As(err, &fault) && m.Holds(fault.Addr):
					faults++
				default:
					t.Fatalf("error %v", err)
				}
			}
		}
	}
	close(stop)
	cutter.Wait()
	t.Logf("%d copies, %d faults", good, faults)
}

// TestGuardPunched takes pages out of a file: they are zeros then, and no fault.
func TestGuardPunched(t *testing.T) {
	f, m := foreign(t, 1<<20, true)
	if err := arena.Guard(func() { copy(m.Bytes(), bytes.Repeat([]byte{7}, 1<<20)) }); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096, 8192); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1<<20)
	if err := arena.Guard(func() { copy(got, m.Bytes()) }); err != nil {
		t.Fatal(err)
	}
	if got[4095] != 7 || got[4096] != 0 || got[12287] != 0 || got[12288] != 7 {
		t.Errorf("around the hole: %v %v %v %v", got[4095], got[4096], got[12287], got[12288])
	}
}

// TestGuardFull writes to a hole of a file on a file system that has no page left.
func TestGuardFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		servers.Missing(t, "root", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	m, err := arena.MapForeign(int(f.Fd()), 1<<20, true)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var fault *arena.Fault
	if err := arena.Guard(func() { copy(m.Bytes(), make([]byte, 1<<20)) }); !errors.As(err, &fault) || !m.Holds(fault.Addr) {
		t.Errorf("error %v, want a fault of the mapping", err)
	}
}

// TestGuardPanics shows that what is no fault of a mapping goes on as it was.
func TestGuardPanics(t *testing.T) {
	for _, tt := range []struct {
		name  string
		touch func()
	}{
		{"nil", func() { var p *int; *p = 1 }},
		{"index", func() { var p []byte; i := 3; p[i] = 1 }},
		{"value", func() { panic("for somebody else") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			t.Errorf("returned %v", arena.Guard(tt.touch))
		})
	}
}
