package tiers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

const testSlabBytes = 4 << 20

var testSlabOptions = SlabOptions{ExtentBytes: 1 << 20, Store: [16]byte{1, 2, 3}}

func mustCreateSlab(t *testing.T, path string) *Slab {
	t.Helper()
	s, err := CreateSlab(t.Context(), path, testSlabBytes, testSlabOptions)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// wantError checks class and text of an error: a message that does not say what
// is wrong is of no help.
func wantError(t *testing.T, err, class error, texts ...string) {
	t.Helper()
	if !errors.Is(err, class) {
		t.Fatalf("error %v, want %v", err, class)
	}
	for _, s := range texts {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("error %q does not say %q", err, s)
		}
	}
}

func TestSlabCreateAndOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	_, err := OpenSlab(path, SlabOptions{})
	wantError(t, err, ErrNoSlab, path)
	a := mustCreateSlab(t, path)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != testSlabBytes || st.Blocks*512 < testSlabBytes {
		t.Errorf("file has %d bytes and %d allocated, want %d", st.Size, st.Blocks*512, testSlabBytes)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := OpenSlab(path, SlabOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if a.ID() != b.ID() || a.ID() == (SlabID{}) || len(a.ID().String()) != 32 {
		t.Errorf("identity %s, then %s", a.ID(), b.ID())
	}
	for _, s := range []*Slab{a, b} {
		if s.Path() != path || s.Bytes() != testSlabBytes || s.ExtentBytes() != 1<<20 || s.DataOffset() != 1<<20 ||
			s.DataBytes() != 3<<20 || s.StoreID() != testSlabOptions.Store || s.IsDevice() {
			t.Errorf("slab %+v", s.super)
		}
	}
	if free, err := b.FreeOnFS(); err != nil || free <= 0 {
		t.Errorf("free on file system: %d, %v", free, err)
	}
	if names, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
	other := mustCreateSlab(t, path+"2")
	if other.ID() == a.ID() {
		t.Error("two slabs have one identity")
	}
}

func TestSlabLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	s := mustCreateSlab(t, path)
	_, err := OpenSlab(path, SlabOptions{})
	wantError(t, err, block.ErrUnavailable, path, "in use by another process")
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	again, err := OpenSlab(path, SlabOptions{})
	if err != nil {
		t.Fatalf("after close: %v", err)
	}
	again.Close()
}

// TestSlabNeverOverwrites: what somebody has there stays as it is.
func TestSlabNeverOverwrites(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("somebody's diary"), 0o600); err != nil {
		t.Fatal(err)
	}
	slab := filepath.Join(dir, "slab")
	mustCreateSlab(t, slab).Close()
	dangling := filepath.Join(dir, "dangling")
	if err := os.Symlink(filepath.Join(dir, "nowhere"), dangling); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, say string }{
		{text, "has 16 bytes"},
		{slab, "it is a slab already"},
		{dir, "neither a regular file nor a block device"},
		{dangling, "no such file"},
	} {
		_, err := CreateSlab(t.Context(), c.path, testSlabBytes, testSlabOptions)
		wantError(t, err, block.ErrInvalid, c.path, c.say)
	}
	if got, err := os.ReadFile(text); err != nil || string(got) != "somebody's diary" {
		t.Errorf("the file is %q, %v", got, err)
	}
	_, err := OpenSlab(text, SlabOptions{})
	wantError(t, err, block.ErrInvalid, text, "is no slab")
	_, err = OpenSlab(dir, SlabOptions{})
	wantError(t, err, block.ErrInvalid, dir)
	if s, err := OpenSlab(slab, SlabOptions{}); err != nil {
		t.Error(err)
	} else {
		s.Close()
	}
}

// TestSlabWhereNothingIsLost: an empty file, a link to one, and what a crash
// left behind are used.
func TestSlabWhereNothingIsLost(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := OpenSlab(empty, SlabOptions{})
	wantError(t, err, ErrNoSlab, empty)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(empty, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(empty+".creating", make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	mustCreateSlab(t, link).Close()
	if st, err := os.Lstat(link); err != nil || st.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("the link is gone: %v", err)
	}
	s, err := OpenSlab(empty, SlabOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := os.Stat(empty + ".creating"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
}

func TestSlabSizes(t *testing.T) {
	for _, c := range []struct {
		name          string
		bytes, extent int64
		say           string
	}{
		{"no bytes", 0, 1 << 20, "in 0 bytes"},
		{"negative", -1, 1 << 20, "-1 bytes"},
		{"no data", slabDataAt, 1 << 20, "want at least"},
		{"small extents", 4 << 20, 4096, "extents of 4096"},
		{"odd extents", 4 << 20, 1<<20 + 512, "extents of 1049088"},
		{"huge extents", 4 << 20, 2 << 30, "extents of 2147483648"},
		{"too large", 1<<56 + 1, 1 << 20, "at most"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "slab")
			_, err := CreateSlab(t.Context(), path, c.bytes, SlabOptions{ExtentBytes: c.extent})
			wantError(t, err, block.ErrInvalid, path, c.say)
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a file is there: %v", err)
			}
		})
	}
}

func TestSlabNoSpace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "slab")
	_, free, err := statfs(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := free + 1<<40
	_, err = CreateSlab(t.Context(), path, want, testSlabOptions)
	wantError(t, err, block.ErrNoSpace, path, fmt.Sprintf("wanted %d bytes", want), "free")
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 0 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

func TestSlabCreateCancelled(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := CreateSlab(ctx, filepath.Join(dir, "slab"), testSlabBytes, testSlabOptions)
	wantError(t, err, context.Canceled)
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 0 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// TestSlabWithoutFallocate checks the way for file systems that cannot.
func TestSlabWithoutFallocate(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "zeros"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := writeZeros(t.Context(), f, 3<<20+512); err != nil {
		t.Fatal(err)
	}
	if st, err := f.Stat(); err != nil || st.Size() != 3<<20+512 {
		t.Errorf("size %d, %v", st.Size(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantError(t, writeZeros(ctx, f, 1<<20), context.Canceled)
}

func TestSlabDamage(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(b []byte) []byte
		want   error // nil: the slab opens
		say    string
	}{
		{"first superblock torn", func(b []byte) []byte { clear(b[512:4096]); return b }, nil, ""},
		{"first superblock gone", func(b []byte) []byte { clear(b[:4096]); return b }, nil, ""},
		{"copy gone", func(b []byte) []byte { clear(b[superTwinAt:slabDataAt]); return b }, nil, ""},
		{"both damaged", func(b []byte) []byte { b[20] ^= 1; b[superTwinAt+20] ^= 1; return b }, block.ErrCorrupt, "checksum"},
		{"magic and copy damaged", func(b []byte) []byte { b[0] ^= 1; b[superTwinAt+20] ^= 1; return b }, block.ErrCorrupt, "checksum"},
		{"both gone", func(b []byte) []byte { clear(b[:slabDataAt]); b[0] = 1; return b }, block.ErrInvalid, "is no slab"},
		{"too short", func(b []byte) []byte { return b[:testSlabBytes-1] }, block.ErrInvalid, "it has 4194303 bytes and should have 4194304"},
		{"very short", func(b []byte) []byte { return b[:100] }, block.ErrInvalid, "is no slab"},
		{"grown", func(b []byte) []byte { return append(b, 0) }, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "slab")
			id := changeSlab(t, path, c.change)
			s, err := OpenSlab(path, SlabOptions{})
			if c.want != nil {
				wantError(t, err, c.want, path, c.say)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if s.ID() != id || s.DataBytes() != 3<<20 {
				t.Errorf("slab %+v", s.super)
			}
		})
	}
}

// changeSlab makes a slab, changes its bytes, and returns its identity.
func changeSlab(t *testing.T, path string, change func(b []byte) []byte) SlabID {
	t.Helper()
	s := mustCreateSlab(t, path)
	s.Close()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
	return s.ID()
}

// TestSlabMend: a damaged superblock is written anew from its twin, whichever it
// is, and nothing else changes.
func TestSlabMend(t *testing.T) {
	for _, at := range []int64{0, superTwinAt} {
		for name, damage := range map[string]func(b []byte){
			"bit":  func(b []byte) { b[20] ^= 1 },
			"torn": func(b []byte) { clear(b[512:]) },
			"gone": func(b []byte) { clear(b) },
		} {
			t.Run(fmt.Sprintf("%s at %d", name, at), func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "slab")
				var whole []byte
				changeSlab(t, path, func(b []byte) []byte {
					whole = slices.Clone(b)
					damage(b[at:][:superBytes])
					return b
				})
				s, err := OpenSlab(path, SlabOptions{})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				if got, err := s.mend(); got != at || err != nil {
					t.Errorf("mended at %d, %v, want %d", got, err, at)
				}
				if got, err := s.mend(); got != -1 || err != nil {
					t.Errorf("mended again at %d, %v", got, err)
				}
				if b, err := os.ReadFile(path); err != nil || !slices.Equal(b, whole) {
					t.Errorf("the slab is not as it was: %v", err)
				}
			})
		}
	}
}

// TestSlabMendsNoUnknown: beside a whole superblock one of an unknown version
// stays.
func TestSlabMendsNoUnknown(t *testing.T) {
	newer, err := os.ReadFile("testdata/superblock_v3.bin")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "slab")
	changeSlab(t, path, func(b []byte) []byte { copy(b[superTwinAt:], newer); return b })
	s, err := OpenSlab(path, SlabOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if at, err := s.mend(); at != -1 || err != nil {
		t.Errorf("mended at %d, %v", at, err)
	}
}

// TestSlabUnknownVersion: it is refused and left alone, also when only the copy
// can be read.
func TestSlabUnknownVersion(t *testing.T) {
	newer, err := os.ReadFile("testdata/superblock_v3.bin")
	if err != nil {
		t.Fatal(err)
	}
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("first=%v", first), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "slab")
			changeSlab(t, path, func(b []byte) []byte {
				copy(b[superTwinAt:], newer)
				if first {
					copy(b, newer)
				} else {
					clear(b[:superBytes])
				}
				return b
			})
			before, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			_, err = OpenSlab(path, SlabOptions{})
			wantError(t, err, ErrVersion, path, "version 3", "knows up to 2")
			if after, err := os.ReadFile(path); err != nil || !slices.Equal(after, before) {
				t.Errorf("the slab was changed: %v", err)
			}
		})
	}
}

func TestSlabFlush(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	s := mustCreateSlab(t, path)
	count := func(s *Slab) *int {
		n, sync := new(int), s.sync
		s.sync = func() error { *n++; return sync() }
		return n
	}
	flushes := count(s)
	for range 3 {
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if *flushes != 3 || s.Failures() != 0 {
		t.Errorf("%d flushes, %d failures", *flushes, s.Failures())
	}
	s.Close()
	wantError(t, s.Flush(), block.ErrClosed, path)
	n, err := OpenSlab(path, SlabOptions{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	flushes = count(n)
	if err := n.Flush(); err != nil || *flushes != 0 {
		t.Errorf("with NoSync: %d flushes, %v", *flushes, err)
	}
}

// TestSlabFlushFails: a flush that failed is counted, and the next one is tried.
func TestSlabFlushFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slab")
	s := mustCreateSlab(t, path)
	bad := errors.New("input/output error")
	sync := s.sync
	s.sync = func() error { return bad }
	for n := range uint64(2) {
		wantError(t, s.Flush(), bad, path)
		if s.Failures() != n+1 {
			t.Errorf("%d failures, want %d", s.Failures(), n+1)
		}
	}
	s.sync = sync
	if err := s.Flush(); err != nil || s.Failures() != 2 {
		t.Errorf("flush %v, %d failures", err, s.Failures())
	}
}

// TestSlabMadeOnce: of several who make a slab at one path, one does, and its
// slab stays.
func TestSlabMadeOnce(t *testing.T) {
	for range 20 {
		path := filepath.Join(t.TempDir(), "slab")
		made := make(chan *Slab, 8)
		var wg sync.WaitGroup
		for range cap(made) {
			wg.Go(func() {
				s, err := CreateSlab(t.Context(), path, testSlabBytes, testSlabOptions)
				switch {
				case err == nil:
					s.Close()
					made <- s
				case !errors.Is(err, block.ErrInvalid) && !errors.Is(err, block.ErrUnavailable):
					t.Errorf("refused with %v", err)
				}
			})
		}
		wg.Wait()
		if len(made) != 1 {
			t.Fatalf("made %d times", len(made))
		}
		s, err := OpenSlab(path, SlabOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if want := (<-made).ID(); s.ID() != want {
			t.Errorf("identity %s, made as %s", s.ID(), want)
		}
		s.Close()
		if names, err := filepath.Glob(path + "*"); err != nil || len(names) != 1 {
			t.Errorf("left behind: %v, %v", names, err)
		}
	}
}

func TestSlabOnDevice(t *testing.T) {
	dev := loopDevice(t, 8<<20)
	_, err := OpenSlab(dev, SlabOptions{})
	wantError(t, err, ErrNoSlab, dev, "zeros")
	_, err = CreateSlab(t.Context(), dev, 9<<20, testSlabOptions)
	wantError(t, err, block.ErrInvalid, dev, "it has 8388608 bytes, 9437184 are asked for")
	s, err := CreateSlab(t.Context(), dev, 0, testSlabOptions)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.IsDevice() || s.Bytes() != 8<<20 || s.DataBytes() != 7<<20 {
		t.Errorf("slab %+v", s.super)
	}
	if free, err := s.FreeOnFS(); free != 0 || err != nil {
		t.Errorf("free on file system: %d, %v", free, err)
	}
	if err := s.Flush(); err != nil {
		t.Error(err)
	}
	_, err = OpenSlab(dev, SlabOptions{})
	wantError(t, err, block.ErrUnavailable, dev, "in use by another process")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = CreateSlab(t.Context(), dev, 0, testSlabOptions)
	wantError(t, err, block.ErrInvalid, dev, "is a slab already")
	again, err := OpenSlab(dev, SlabOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if again.ID() != s.ID() {
		t.Errorf("identity %s, was %s", again.ID(), s.ID())
	}
}

// TestSlabOnUsedDevice: a device with somebody's data is left as it is.
func TestSlabOnUsedDevice(t *testing.T) {
	dev := loopDevice(t, 8<<20)
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("signature"), 500_000); err != nil {
		t.Fatal(err)
	}
	_, err = OpenSlab(dev, SlabOptions{})
	wantError(t, err, block.ErrInvalid, dev, "wipe it first")
	_, err = CreateSlab(t.Context(), dev, 4<<20, testSlabOptions)
	wantError(t, err, block.ErrInvalid, dev, "wipe it first")
}

// loopDevice makes a block device of a file.
func loopDevice(t *testing.T, bytes int64) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(bytes); err != nil {
		t.Fatal(err)
	}
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		servers.Missing(t, "loop", err)
	}
	defer ctl.Close()
	for range 16 { // another process may take the one that is free
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			servers.Missing(t, "loop", err)
		}
		name := fmt.Sprintf("/dev/loop%d", n)
		dev, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			servers.Missing(t, "loop", err)
		}
		err = unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_FD, int(f.Fd()))
		if errors.Is(err, unix.EBUSY) {
			dev.Close()
			continue
		}
		if err != nil {
			dev.Close()
			servers.Missing(t, "loop", err)
		}
		t.Cleanup(func() {
			if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0); err != nil {
				t.Error(err)
			}
			dev.Close()
		})
		return name
	}
	servers.Missing(t, "loop", errors.New("none stays free"))
	return ""
}
