package shm_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

func TestMove(t *testing.T) {
	for _, m := range []memory{anonymous, memfd} {
		t.Run(m.String(), func(t *testing.T) {
			a, b := newSide(t, "a", anonymous, 40<<20), newSide(t, "b", m, 40<<20)
			a.meet(t, b)
			r := a.load(t, b)
			a.fill()
			b.fill()
			small := [][2]int{{0, 1}, {1, 4096}, {10_000, 77}, {1 << 20, 3<<20 + 5}}
			a.mustMove(t, xfer.Read, b, r, small...)
			same(t, a, b, small...)
			large := [2]int{4<<20 + 3, 32<<20 + 1}
			a.mustMove(t, xfer.Write, b, r, large)
			same(t, a, b, large)
			for range 3 {
				if err := a.Notify(t.Context(), b.id, []byte("hello")); err != nil {
					t.Fatal(err)
				}
				if n := <-b.Notifications(); n.Peer != a.id || string(n.Msg) != "hello" {
					t.Errorf("%+v", n)
				}
			}
			if err := b.Deregister(b.region); err != nil {
				t.Fatal(err)
			}
			errs, err := a.move(t, t.Context(), xfer.Write, b, r, [2]int{0, 10})
			if err != nil || !errors.Is(errs[0], xfer.ErrInvalid) {
				t.Errorf("after Deregister: %v, %v, want ErrInvalid of the pair", errs[0], err)
			}
		})
	}
}

func TestRegisterRefuses(t *testing.T) {
	b := newSide(t, "a", anonymous, 4096)
	for name, c := range map[string]struct {
		typ xfer.MemType
		d   xfer.Desc
	}{
		"memory type": {xfer.FILE, xfer.Desc{Addr: 4096, Len: 1}},
		"address":     {xfer.DRAM, xfer.Desc{Len: 1}},
		"device":      {xfer.DRAM, xfer.Desc{Addr: 4096, Len: 1, Dev: 1}},
	} {
		if _, err := b.Register(t.Context(), c.typ, c.d); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}

// TestPrepareRefuses what is no peer's, and two peers' at once.
func TestPrepareRefuses(t *testing.T) {
	a, b, c := newSide(t, "a", anonymous, 4096), newSide(t, "b", memfd, 4096), newSide(t, "c", memfd, 4096)
	a.meet(t, b)
	a.meet(t, c)
	local, remote := pairs(a, b, a.load(t, b), [2]int{0, 1})
	locals, others := pairs(a, c, a.load(t, c), [2]int{1, 1})
	if p, err := a.Prepare(xfer.Read, append(local, locals...), append(remote, others...)); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("two peers: %v, %v, want ErrInvalid", p, err)
	}
	if p, err := a.Prepare(xfer.Read, local, local); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("own memory as remote: %v, %v, want ErrInvalid", p, err)
	}
}

// unmapped makes n bytes of addresses of which the second half has no memory.
func unmapped(t *testing.T, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mprotect(b[n/2:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestHoles: memory that is not there fails the pairs that touch it, says how far
// it came, and spares the others.
func TestHoles(t *testing.T) {
	const n = 1 << 20
	for _, m := range []memory{anonymous, memfd} {
		t.Run(m.String(), func(t *testing.T) {
			a, b := newSide(t, "a", anonymous, n), newSide(t, "b", m, n)
			a.meet(t, b)
			holes := b
			if m == memfd {
				holes = a // what is mapped of b has none
			}
			holes.mem = unmapped(t, n)
			r, err := holes.Register(t.Context(), xfer.DRAM, holes.desc(0, n))
			if err != nil {
				t.Fatal(err)
			}
			holes.region = r
			remote := a.load(t, b)
			for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
				good, half, bad := [2]int{0, 100}, [2]int{n/2 - 5000, 9000}, [2]int{n / 2, 50}
				errs, err := a.move(t, t.Context(), op, b, remote, half, good, bad, [2]int{200, 100})
				if err != nil {
					t.Errorf("%s: %v", op, err)
				}
				if m == memfd { // the fault is of the piece, which is all four
					if !errors.Is(errs[0], xfer.ErrShort) || !errors.Is(errs[2], xfer.ErrShort) {
						t.Errorf("%s: %v", op, errs)
					}
					continue
				}
				if !errors.Is(errs[0], xfer.ErrShort) || !errors.Is(errs[0], unix.EFAULT) || !strings.Contains(errs[0].Error(), "of 9000 bytes") {
					t.Errorf("%s over a hole: %v, want ErrShort of 9000 bytes", op, errs[0])
				}
				if !errors.Is(errs[2], xfer.ErrShort) || !strings.Contains(errs[2].Error(), "0 of 50 bytes") {
					t.Errorf("%s of a hole: %v, want ErrShort, 0 of 50 bytes", op, errs[2])
				}
				if errs[1] != nil || errs[3] != nil {
					t.Errorf("%s beside holes: %v, %v", op, errs[1], errs[3])
				}
				same(t, a, b, good, [2]int{200, 100})
			}
		})
	}
}

// TestTruncation: an owner that cuts its file short during a transfer makes it
// fail, and ends no process.
func TestTruncation(t *testing.T) {
	const n = 64 << 20
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, n); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	a, b := newSide(t, "a", anonymous, n), newSide(t, "b", anonymous, 4096)
	// A file that is not sealed counts for nothing, though the owner offers it.
	b.mem = mem
	b.Backend = bindWith(t, b.id, func(addr, _ uint64) (int, int64, bool) { return fd, int64(addr - arena.Addr(mem)), true })
	if b.region, err = b.Register(t.Context(), xfer.DRAM, b.desc(0, n)); err != nil {
		t.Fatal(err)
	}
	a.meet(t, b)
	r := a.load(t, b)
	local, remote := pairs(a, b, r, [2]int{0, n / 2}, [2]int{n / 2, n / 2})
	for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
		q, err := a.Prepare(op, local, remote)
		if err != nil {
			t.Fatal(err)
		}
		for {
			cut := make(chan error, 1)
			go func() { cut <- unix.Ftruncate(fd, n/2) }()
			errs, err := a.transfer(t, t.Context(), q, 2)
			if err := <-cut; err != nil {
				t.Fatal(err)
			}
			if err != nil || errs[0] != nil {
				t.Fatalf("%s: %v, %v", op, errs[0], err)
			}
			if err := errs[1]; err != nil { // it was not over before the cut
				if !errors.Is(err, xfer.ErrShort) || !errors.Is(err, unix.EFAULT) {
					t.Errorf("%s: %v, want ErrShort", op, err)
				}
				break
			}
		}
		if err := unix.Ftruncate(fd, n); err != nil {
			t.Fatal(err)
		}
		a.Release(q)
	}
}

// TestCancelled transfers do not begin, or end between pieces.
func TestCancelled(t *testing.T) {
	a, b := newSide(t, "a", anonymous, 8<<20), newSide(t, "b", memfd, 8<<20)
	a.meet(t, b)
	r := a.load(t, b)
	ctx, cancel := context.WithCancel(t.Context())
	local, remote := pairs(a, b, r, [2]int{0, 4 << 20}, [2]int{4 << 20, 4 << 20})
	q, err := a.Prepare(xfer.Write, local, remote)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Release(q)
	b.fill()
	a.fill()
	was := bytes.Clone(b.mem[4<<20:])
	var errs [2]error
	err = a.Transfer(ctx, q, func(i int, err error) {
		errs[i] = err
		cancel() // when the first is done
	})
	if err != nil || errs[0] != nil || !errors.Is(errs[1], xfer.ErrCanceled) {
		t.Errorf("%v, %v, want the second cancelled", errs, err)
	}
	if !bytes.Equal(was, b.mem[4<<20:]) {
		t.Error("what was not begun was written")
	}
	if after, err := a.transfer(t, ctx, q, 2); err != nil || !errors.Is(after[0], xfer.ErrCanceled) {
		t.Errorf("with a context that has ended: %v, %v", after, err)
	}
	if after, err := a.transfer(t, t.Context(), q, 2); err != nil || after[0] != nil || after[1] != nil {
		t.Errorf("again: %v, %v", after, err)
	}
}

// TestBusError: a fault of memory that a file is behind, such as a huge page that its
// owner took out of it, fails the transfer. Here it is this side's file that was
// cut short, because the other's is sealed.
func TestBusError(t *testing.T) {
	const n = 64 << 10
	a, b := newSide(t, "a", anonymous, n), newSide(t, "b", memfd, n)
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, n); err != nil {
		t.Fatal(err)
	}
	if a.mem, err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	mem := a.mem
	defer unix.Munmap(mem)
	if err := unix.Ftruncate(fd, n/2); err != nil {
		t.Fatal(err)
	}
	a.meet(t, b)
	r := a.load(t, b)
	for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
		errs, err := a.move(t, t.Context(), op, b, r, [2]int{0, n})
		if err != nil || !errors.Is(errs[0], xfer.ErrShort) {
			t.Errorf("%s: %v, %v, want ErrShort", op, errs[0], err)
		}
		a.mustMove(t, op, b, r, [2]int{0, n / 2})
	}
	if err := b.Deregister(b.region); err != nil { // it hangs when a fault leaves the gate entered
		t.Error(err)
	}
}
