package posix_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var engines = []string{posix.EngineURing, posix.EngineGoroutines}

func newBackend(t testing.TB, o posix.Options) *posix.Backend {
	t.Helper()
	b, err := posix.New(&o)
	if err != nil {
		servers.Missing(t, o.Engine, err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

func TestConformance(t *testing.T) {
	for _, tt := range []struct {
		name   string
		o      posix.Options
		remote xfer.MemType
		// The rarer ways move less, to save time.
		maxBytes int64
	}{
		{"io_uring", posix.Options{Engine: posix.EngineURing}, xfer.FILE, 32 << 20},
		{"goroutines", posix.Options{Engine: posix.EngineGoroutines}, xfer.FILE, 8 << 20},
		// With hardly any room everything waits, which is another path.
		{"io_uring, narrow", posix.Options{Engine: posix.EngineURing, Depth: 2, DepthBytes: 64 << 10}, xfer.FILE, 2 << 20},
		{"goroutines, narrow", posix.Options{Engine: posix.EngineGoroutines, Depth: 1}, xfer.FILE, 2 << 20},
		{"io_uring, block device", posix.Options{Engine: posix.EngineURing}, xfer.BLK, 2 << 20},
		{"goroutines, block device", posix.Options{Engine: posix.EngineGoroutines}, xfer.BLK, 2 << 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.remote == xfer.BLK {
				loopDevice(t, 4096) // one skip says it all
			}
			h := harness(tt.o, tt.remote, xfertest.File)
			h.MaxBytes = tt.maxBytes
			xfertest.Run(t, h)
		})
	}
}

// TestConformanceBuffered runs the suite where there is no O_DIRECT.
func TestConformanceBuffered(t *testing.T) {
	dir := mount(t, "ramfs", "")
	file := func(t testing.TB, size int64) xfertest.Memory {
		f, err := os.CreateTemp(dir, "file")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close(); os.Remove(f.Name()) })
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		return xfertest.Memory{Desc: xfer.Desc{Len: uint64(size), Dev: devs.Add(1), Meta: f.Name()}, ReaderAt: f, WriterAt: f}
	}
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			xfertest.Run(t, harness(posix.Options{Engine: engine}, xfer.FILE, file))
		})
	}
}

func harness(o posix.Options, remote xfer.MemType, file func(testing.TB, int64) xfertest.Memory) xfertest.Harness {
	return xfertest.Harness{
		New: func(t testing.TB) xfer.Backend { return oneKind{newBackend(t, o), remote} },
		Memory: map[xfer.MemType]func(testing.TB, int64) xfertest.Memory{
			xfer.FILE: file,
			xfer.BLK:  loopDevice,
		},
		Absent: map[xfer.MemType]func(testing.TB) xfer.Desc{
			xfer.FILE: xfertest.AbsentFile,
			xfer.BLK:  xfertest.AbsentFile,
		},
		MaxBytes: 2 << 20,
	}
}

// oneKind shows one of the backend's pairs, so that one that cannot be tested
// here does not hide the other.
type oneKind struct {
	*posix.Backend
	remote xfer.MemType
}

func (k oneKind) Caps() xfer.Caps {
	c := k.Backend.Caps()
	c.Pairs = []xfer.Pair{{Local: xfer.DRAM, Remote: k.remote}}
	return c
}

var devs atomic.Uint64 // so that each file has a Dev of its own

// loopDevice makes a block device of a file.
func loopDevice(t testing.TB, size int64) xfertest.Memory {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, make([]byte, (size+4095)/4096*4096), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", "--direct-io=on", image).CombinedOutput()
	if err != nil {
		servers.Missing(t, "loop", fmt.Sprintf("losetup: %v: %s", err, bytes.TrimSpace(out)))
	}
	path := string(bytes.TrimSpace(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", path).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", path, err, out)
		}
	})
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		servers.Missing(t, "loop", err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return xfertest.Memory{Desc: xfer.Desc{Len: uint64(size), Dev: devs.Add(1), Meta: path}, ReaderAt: f, WriterAt: f}
}

// mount mounts a filesystem that is kept in memory.
func mount(t *testing.T, kind, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount(kind, dir, kind, 0, options); err != nil {
		servers.Missing(t, "mount", fmt.Sprintf("mount %s: %v", kind, err))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", kind, err)
		}
	})
	return dir
}
