package arena

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newArena(t *testing.T, size int64, o *Options) *Arena {
	t.Helper()
	a, err := New(size, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func TestShapes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		size   int64
		o      *Options
		chunks []int
	}{
		{"nil options", 5000, nil, []int{HugeBytes}},
		{"anonymous", 3 * HugeBytes, &Options{ChunkBytes: 2 * HugeBytes}, []int{2 * HugeBytes, HugeBytes}},
		{"memfd", 5*HugeBytes - 1, &Options{Memfd: true, ChunkBytes: 2 * HugeBytes}, []int{2 * HugeBytes, 2 * HugeBytes, HugeBytes}},
		{"small pages", HugeBytes, &Options{NoHugePages: true}, []int{HugeBytes}},
		{"memfd small pages", HugeBytes, &Options{NoHugePages: true, Memfd: true}, []int{HugeBytes}},
		{"background", 40 * HugeBytes, &Options{Background: true, Lock: true}, []int{40 * HugeBytes}},
		{"not populated", HugeBytes, &Options{NoPopulate: true}, []int{HugeBytes}},
		{"locked only", HugeBytes, &Options{NoPopulate: true, Lock: true}, []int{HugeBytes}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := newArena(t, tt.size, tt.o)
			if len(a.Chunks()) != len(tt.chunks) {
				t.Fatalf("%d chunks, want %d", len(a.Chunks()), len(tt.chunks))
			}
			var sum int64
			for i, c := range a.Chunks() {
				if len(c) != tt.chunks[i] {
					t.Errorf("chunk %d has %d bytes, want %d", i, len(c), tt.chunks[i])
				}
				if Addr(c)%HugeBytes != 0 {
					t.Errorf("chunk %d at %#x is not aligned to %d", i, Addr(c), HugeBytes)
				}
				// Use it while it may still be populating.
				c[0], c[len(c)-1] = byte(i+1), byte(i+101)
				sum += int64(len(c))
			}
			if a.Size() != sum || a.Size() < tt.size {
				t.Errorf("size %d, chunks have %d, asked for %d", a.Size(), sum, tt.size)
			}
			<-a.Populated()
			for i, c := range a.Chunks() {
				if c[0] != byte(i+1) || c[len(c)-1] != byte(i+101) {
					t.Errorf("chunk %d lost what was written to it", i)
				}
			}
			got := a.Obtained()
			populates := tt.o == nil || !tt.o.NoPopulate
			if got.Bytes != sum || got.Populated != populates || got.PageBytes < 4096 || got.HugeBytes > sum {
				t.Errorf("obtained %+v", got)
			}
			if tt.o != nil && tt.o.NoHugePages && got.HugeBytes != 0 {
				t.Errorf("huge pages though refused: %+v", got)
			}
			if tt.o != nil && tt.o.Lock && got.LockedBytes != sum && len(got.Warnings) == 0 {
				t.Errorf("less is locked than asked and no warning: %+v", got)
			}
		})
	}
}

// Every piece that is not on huge pages must have been warned about, or nobody
// learns why a host is slow.
func TestHugePagesOrWarning(t *testing.T) {
	for _, memfd := range []bool{false, true} {
		a := newArena(t, 8*HugeBytes, &Options{Memfd: memfd})
		got := a.Obtained()
		if (got.HugeBytes == got.Bytes) != (len(got.Warnings) == 0) || (got.HugeBytes == got.Bytes) != (got.PageBytes == HugeBytes) {
			t.Errorf("memfd %v: %+v", memfd, got)
		}
	}
}

func TestSlice(t *testing.T) {
	a := newArena(t, 3*HugeBytes, &Options{ChunkBytes: 2 * HugeBytes})
	a.Slice(2*HugeBytes+5, 3)[1] = 9
	if a.Chunks()[1][6] != 9 {
		t.Error("a slice is not the memory at its offset")
	}
	if s := a.Slice(0, 10); cap(s) != 10 {
		t.Errorf("a slice can grow to %d bytes, into its neighbour", cap(s))
	}
	if n := len(a.Slice(2*HugeBytes-4, 4)) + len(a.Slice(a.Size(), 0)); n != 4 {
		t.Errorf("slices at the ends have %d bytes", n)
	}
	for _, bad := range [][2]int64{{-1, 1}, {0, -1}, {0, 3*HugeBytes + 1}, {3 * HugeBytes, 1}, {2*HugeBytes - 1, 2}, {1, 1<<63 - 1}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("slice [%d,+%d) did not panic", bad[0], bad[1])
				}
			}()
			a.Slice(bad[0], bad[1])
		}()
	}
}

func TestMemfdIsSharedAndSealed(t *testing.T) {
	a := newArena(t, 3*HugeBytes, &Options{Memfd: true, ChunkBytes: 2 * HugeBytes, Name: "sealed"})
	copy(a.Chunks()[1], "hello")
	fd := a.Fd(1)
	peer, err := unix.Mmap(fd, 0, HugeBytes, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(peer)
	if !bytes.HasPrefix(peer, []byte("hello")) {
		t.Errorf("a second mapping reads %q", peer[:5])
	}
	for _, size := range []int64{0, 4 * HugeBytes} {
		if err := unix.Ftruncate(fd, size); !errors.Is(err, unix.EPERM) {
			t.Errorf("ftruncate to %d: %v, want EPERM", size, err)
		}
	}
	if got := newArena(t, 1, nil).Fd(0); got != -1 {
		t.Errorf("anonymous arena has descriptor %d", got)
	}
}

func TestCloseTwiceWhilePopulating(t *testing.T) {
	fds := openFds(t)
	a, err := New(256<<20, &Options{Memfd: true, Background: true, NoHugePages: true})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	select {
	case <-a.Populated():
	default:
		t.Error("Close returned while a goroutine was populating")
	}
	if n := openFds(t); n != fds {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
}

func TestBadArguments(t *testing.T) {
	for _, tt := range []struct {
		size int64
		o    Options
		text string
	}{
		{0, Options{}, "size 0"},
		{-5, Options{}, "size -5"},
		{1 << 62, Options{}, "size 4611686018427387904"},
		{1, Options{ChunkBytes: 4096}, "chunk size 4096"},
		{1, Options{ChunkBytes: HugeBytes + 1}, "chunk size 2097153"},
		{1, Options{ChunkBytes: 2 << 30}, "chunk size 2147483648"},
		{1, Options{Memfd: true, Name: strings.Repeat("n", 300)}, "nnn"},
	} {
		a, err := New(tt.size, &tt.o)
		if err == nil {
			a.Close()
			t.Errorf("size %d, options %+v: no error", tt.size, tt.o)
		} else if !strings.Contains(err.Error(), tt.text) {
			t.Errorf("error %q does not name %q", err, tt.text)
		}
	}
}

func TestView(t *testing.T) {
	a := newArena(t, 1, nil)
	copy(a.Chunks()[0][7:], "view")
	if got := View(Addr(a.Chunks()[0])+7, 4); string(got) != "view" {
		t.Errorf("view is %q", got)
	}
	if View(12345, 0) != nil || Addr(nil) != 0 {
		t.Error("nothing at all has an address")
	}
}

func TestScanSmaps(t *testing.T) {
	a := newArena(t, 2*HugeBytes, &Options{ChunkBytes: HugeBytes, NoPopulate: true})
	b, err := os.ReadFile("testdata/smaps")
	if err != nil {
		t.Fatal(err)
	}
	// The golden file has the placeholders LO, MID and HI for the addresses.
	c := a.Chunks()
	hex := func(x uint64) string { return strconv.FormatUint(x, 16) }
	text := strings.NewReplacer("LO1", hex(Addr(c[0])), "HI1", hex(Addr(c[0])+HugeBytes),
		"LO2", hex(Addr(c[1])), "HI2", hex(Addr(c[1])+HugeBytes)).Replace(string(b))
	huge, page, err := scanSmaps(strings.NewReader(text), c)
	if err != nil || huge != 3072<<10 || page != 4096 {
		t.Errorf("huge %d, page %d, %v; want 3 MiB, 4096, nil", huge, page, err)
	}
	if _, _, err := scanSmaps(strings.NewReader("zz-10 r\n"), c); err == nil {
		t.Error("a mapping without addresses is accepted")
	}
	if _, _, err := scanSmaps(strings.NewReader(strings.Replace(text, "AnonHugePages:      1024 kB", "AnonHugePages: many kB", 1)), c); err == nil {
		t.Error("a size that is no number is accepted")
	}
}

func openFds(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// TestReserved: memory of reserved huge pages only is all huge, or there is none;
// without them it is what else the host gives. The files are sealed in any case.
func TestReserved(t *testing.T) {
	for _, r := range []Reserved{ReservedFirst, ReservedOnly, ReservedNever} {
		a, err := New(3*HugeBytes, &Options{Memfd: true, ChunkBytes: 2 * HugeBytes, Reserved: r})
		if err != nil {
			if r != ReservedOnly || !errors.Is(err, unix.ENOMEM) {
				t.Errorf("%d: %v", r, err)
			}
			continue
		}
		got := a.Obtained()
		if r == ReservedOnly && (got.HugeBytes != a.Size() || got.PageBytes != HugeBytes) {
			t.Errorf("reserved only: %+v", got)
		}
		for i := range a.Chunks() {
			seals, err := unix.FcntlInt(uintptr(a.Fd(i)), unix.F_GET_SEALS, 0)
			if want := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL; err != nil || seals&want != want {
				t.Errorf("%d: file %d has seals %#x, %v", r, i, seals, err)
			}
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	const tooMuch = 1 << 45 // of pages that are reserved
	if _, err := New(tooMuch, &Options{Memfd: true, Reserved: ReservedOnly, NoPopulate: true}); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("more than anybody has: %v", err)
	}
}
