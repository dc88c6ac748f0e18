package posix_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/xfer"
)

func TestBadOptions(t *testing.T) {
	for text, o := range map[string]posix.Options{
		`engine "aio"`:         {Engine: "aio"},
		"depth -1":             {Depth: -1},
		"depth 5000":           {Depth: 5000},
		"depth in bytes -4096": {DepthBytes: -4096},
	} {
		if b, err := posix.New(&o); !errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), text) {
			t.Errorf("%+v: %v, %v; want ErrInvalid with %q", o, b, err, text)
		}
	}
}

// Where no ring can be made, goroutines do the work, unless io_uring was asked
// for by name.
func TestNoIOUring(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Fatal(err)
		}
	}()
	if b, err := posix.New(&posix.Options{Engine: posix.EngineURing}); !errors.Is(err, xfer.ErrUnavailable) || !errors.Is(err, unix.EMFILE) {
		t.Errorf("io_uring by name: %v, %v", b, err)
	}
	b, err := posix.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if e := b.Caps().Engine; e != posix.EngineGoroutines {
		t.Errorf("engine %s without a descriptor for a ring", e)
	}
	if s := b.Stats(); !strings.Contains(s.Note, "io_uring_setup") {
		t.Errorf("note %q does not say why", s.Note)
	}
}

func TestRegisterErrors(t *testing.T) {
	b := newBackend(t, posix.Options{})
	dir := t.TempDir()
	for _, tt := range []struct {
		name string
		typ  xfer.MemType
		d    xfer.Desc
		want error
	}{
		{"no address", xfer.DRAM, xfer.Desc{Len: 1}, xfer.ErrInvalid},
		{"no length", xfer.DRAM, xfer.Desc{Addr: 4096}, xfer.ErrInvalid},
		{"wraps", xfer.DRAM, xfer.Desc{Addr: ^uint64(0), Len: 2}, xfer.ErrInvalid},
		{"no path", xfer.FILE, xfer.Desc{}, xfer.ErrInvalid},
		{"no file", xfer.FILE, xfer.Desc{Meta: filepath.Join(dir, "none")}, xfer.ErrUnavailable},
		{"a folder", xfer.FILE, xfer.Desc{Meta: dir}, xfer.ErrUnavailable},
		{"a character device", xfer.FILE, xfer.Desc{Meta: "/dev/null"}, xfer.ErrInvalid},
		{"no block device", xfer.BLK, xfer.Desc{Meta: "/dev/null"}, xfer.ErrInvalid},
		{"another type", xfer.OBJ, xfer.Desc{Meta: "key"}, xfer.ErrInvalid},
	} {
		r, err := b.Register(t.Context(), tt.typ, tt.d)
		if !errors.Is(err, tt.want) || r != nil {
			t.Errorf("%s: %v, %v; want %v", tt.name, r, err, tt.want)
		}
	}
	if err := b.Deregister("mine"); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("a region of someone else: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Register(t.Context(), xfer.FILE, xfer.Desc{Meta: dir}); !errors.Is(err, xfer.ErrClosed) {
		t.Errorf("Register after Close: %v", err)
	}
}
