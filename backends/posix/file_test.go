package posix_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
)

// rig is a backend with memory and a way to move it.
type rig struct {
	*posix.Backend
	t    *testing.T
	mem  []byte
	memR xfer.Region
}

// forEngines runs a test with each engine and 4 MiB of registered memory.
func forEngines(t *testing.T, o posix.Options, test func(t *testing.T, r *rig)) {
	for _, o.Engine = range engines {
		t.Run(o.Engine, func(t *testing.T) {
			a, err := arena.New(4<<20, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			r := &rig{Backend: newBackend(t, o), t: t, mem: a.Slice(0, 4<<20)}
			r.memR = r.register(xfer.DRAM, xfer.Desc{Addr: arena.Addr(r.mem), Len: 4 << 20})
			test(t, r)
			if err := r.Close(); err != nil { // before the memory goes
				t.Error(err)
			}
			if s := r.Stats(); s.InFlightOps != 0 || s.InFlightBytes != 0 {
				t.Errorf("after Close: %+v", s)
			}
		})
	}
}

func (r *rig) register(typ xfer.MemType, d xfer.Desc) xfer.Region {
	r.t.Helper()
	reg, err := r.Register(context.Background(), typ, d)
	if err != nil {
		r.t.Fatal(err)
	}
	return reg
}

// file makes and registers a file.
func (r *rig) file(content []byte) (path string, reg xfer.Region) {
	r.t.Helper()
	path = filepath.Join(r.t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		r.t.Fatal(err)
	}
	return path, r.register(xfer.FILE, xfer.Desc{Meta: path})
}

// pair is a descriptor pair: n bytes between offset mem of the memory and offset
// off of a file.
type pair struct {
	file   xfer.Region
	mem, n int
	off    int64
}

// move transfers pairs and gives each one's error.
func (r *rig) move(ctx context.Context, op xfer.Op, pairs ...pair) []error {
	var local, remote []xfer.Bound
	for _, p := range pairs {
		local = append(local, xfer.Bound{Type: xfer.DRAM, Region: r.memR, Desc: xfer.Desc{Addr: arena.Addr(r.mem) + uint64(p.mem), Len: uint64(p.n)}})
		remote = append(remote, xfer.Bound{Type: xfer.FILE, Region: p.file, Desc: xfer.Desc{Addr: uint64(p.off), Len: uint64(p.n)}})
	}
	p, err := r.Prepare(op, local, remote)
	if err != nil {
		r.t.Error(err)
		return make([]error, len(pairs))
	}
	defer r.Release(p)
	errs := make([]error, len(pairs))
	calls := make([]int, len(pairs))
	if err := r.Transfer(ctx, p, func(i int, err error) { errs[i] = err; calls[i]++ }); err != nil {
		r.t.Error(err)
	}
	for i, n := range calls {
		if n != 1 {
			r.t.Errorf("pair %d was done %d times", i, n)
		}
	}
	return errs
}

func pattern(seed byte, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// Joined descriptors fail each for itself, by the bytes that reached it.
func TestShortReadOfJoinedDescriptors(t *testing.T) {
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		content := pattern(1, 2*4096+100)
		path, f := r.file(content)
		errs := r.move(t.Context(), xfer.Read, pair{f, 0, 4096, 0}, pair{f, 4096, 4096, 4096}, pair{f, 8192, 4096, 8192}, pair{f, 12288, 4096, 12288})
		if s := r.Stats(); s.Joined != 3 || s.Reads != 1 || s.Failed != 1 {
			t.Errorf("not one operation: %+v", s)
		}
		for i, want := range []string{"", "", "100 of 4096 bytes", "0 of 4096 bytes"} {
			switch {
			case want == "" && errs[i] != nil:
				t.Errorf("descriptor %d: %v", i, errs[i])
			case want != "" && (!errors.Is(errs[i], xfer.ErrShort) || !strings.Contains(errs[i].Error(), want) || !strings.Contains(errs[i].Error(), path)):
				t.Errorf("descriptor %d: %v, want ErrShort with %q", i, errs[i], want)
			}
		}
		if !bytes.Equal(r.mem[:len(content)], content) {
			t.Error("wrong bytes before the end of the file")
		}
	})
}

// A write that the kernel breaks off says how far it came and why.
func TestFullDisk(t *testing.T) {
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		path := filepath.Join(mount(t, "tmpfs", "size=64k"), "file")
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		f := r.register(xfer.FILE, xfer.Desc{Meta: path})
		errs := r.move(t.Context(), xfer.Write, pair{f, 0, 128 << 10, 0})
		errs = append(errs, r.move(t.Context(), xfer.Write, pair{f, 0, 16 << 10, 1 << 20})...)
		for i, want := range []string{"65536 of 131072 bytes", "0 of 16384 bytes"} {
			if !errors.Is(errs[i], xfer.ErrShort) || !errors.Is(errs[i], unix.ENOSPC) || !strings.Contains(errs[i].Error(), want) {
				t.Errorf("descriptor %d: %v, want ErrShort, ENOSPC and %q", i, errs[i], want)
			}
		}
		if err := r.Deregister(f); err != nil {
			t.Error(err)
		}
	})
}

func TestRefusedWrite(t *testing.T) {
	const size = 2 << 20
	// Of plain pages, whatever the host has: a file of huge ones takes no writes at all.
	sealed, err := unix.MemfdCreate("sealed", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sealed)
	if err := unix.Ftruncate(sealed, size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(sealed), unix.F_ADD_SEALS, unix.F_SEAL_GROW); err != nil {
		t.Fatal(err)
	}
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		f := r.register(xfer.FILE, xfer.Desc{Meta: fmt.Sprintf("/proc/self/fd/%d", sealed)})
		errs := r.move(t.Context(), xfer.Write, pair{f, 0, 4096, 0}, pair{f, 0, 8192, size})
		if errs[0] != nil || !errors.Is(errs[1], xfer.ErrShort) || !errors.Is(errs[1], unix.EPERM) {
			t.Errorf("%v; want nothing, and ErrShort with EPERM", errs)
		}
		if err := r.Deregister(f); err != nil {
			t.Error(err)
		}
	})
}

// A file that lost its name is still the registered file.
func TestDeletedFile(t *testing.T) {
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		content := pattern(2, 64<<10)
		path, f := r.file(content)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("another"), 0o600); err != nil {
			t.Fatal(err)
		}
		if errs := r.move(t.Context(), xfer.Read, pair{f, 0, 64 << 10, 0}); errs[0] != nil || !bytes.Equal(r.mem[:64<<10], content) {
			t.Errorf("%v, or wrong bytes", errs[0])
		}
		got, err := r.Query(t.Context(), xfer.FILE, []xfer.Desc{{Meta: path}, {Meta: path + "/below"}, {Meta: filepath.Dir(path)}})
		if want := []xfer.QueryResult{{Exists: true, Bytes: 7}, {}, {}}; err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("query: %v, %v; want %v", got, err, want)
		}
	})
}

// What is not aligned costs a copy or the page cache, what is aligned does not;
// and never is a byte beside it touched.
func TestAlignment(t *testing.T) {
	probe, err := unix.Open(filepath.Join(t.TempDir(), "probe"), unix.O_RDWR|unix.O_CREAT|unix.O_DIRECT, 0o600)
	if err != nil {
		servers.Missing(t, "O_DIRECT", err)
	}
	unix.Close(probe)
	type ops struct{ n, bounced, buffered uint64 }
	for _, tt := range []struct {
		name        string
		mem         int
		off         int64
		n           int
		read, write ops
	}{
		{"aligned", 0, 4096, 8192, ops{1, 0, 0}, ops{1, 0, 0}},
		{"large", 0, 0, 2<<20 + 4096, ops{3, 0, 0}, ops{3, 0, 0}},
		{"memory", 1, 4096, 8192, ops{1, 1, 0}, ops{1, 1, 0}},
		{"offset", 0, 5000, 100, ops{1, 1, 0}, ops{1, 0, 1}},
		{"offset and memory alike", 100, 100, 256 << 10, ops{3, 2, 0}, ops{3, 0, 2}},
		{"offset unlike memory", 1, 100, 256 << 10, ops{3, 3, 0}, ops{3, 1, 2}},
		{"length", 0, 0, 256<<10 + 1, ops{2, 1, 0}, ops{2, 0, 1}},
		{"small length", 0, 0, 4097, ops{1, 1, 0}, ops{2, 0, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
				content := pattern(3, 3<<20)
				path, f := r.file(content)
				for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
					before := r.Stats()
					want := bytes.Clone(content)
					memory := pattern(4, len(r.mem))
					copy(r.mem, memory)
					if op == xfer.Write {
						copy(want[tt.off:], memory[tt.mem:tt.mem+tt.n])
					} else {
						copy(memory[tt.mem:], content[tt.off:tt.off+int64(tt.n)])
					}
					if err := r.move(t.Context(), op, pair{f, tt.mem, tt.n, tt.off})[0]; err != nil {
						t.Fatal(err)
					}
					got, err := os.ReadFile(path)
					if err != nil || !bytes.Equal(got, want) {
						t.Errorf("%s: the file has wrong bytes, %v", op, err)
					}
					if !bytes.Equal(r.mem, memory) {
						t.Errorf("%s: the memory has wrong bytes", op)
					}
					s := r.Stats()
					did := ops{s.Reads + s.Writes - before.Reads - before.Writes, s.Bounced - before.Bounced, s.Buffered - before.Buffered}
					if plan := map[xfer.Op]ops{xfer.Read: tt.read, xfer.Write: tt.write}[op]; did != plan {
						t.Errorf("%s: operations, bounced, buffered: %v, want %v", op, did, plan)
					}
				}
			})
		})
	}
}

// Slots whose payloads end anywhere are written and read at once, again and
// again in other lengths: the page cache and direct writes must not undo each
// other.
func TestUnalignedNeighbours(t *testing.T) {
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		const slot, workers = 16 << 10, 8
		_, f := r.file(make([]byte, slot*workers))
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				out, in := w*2*slot, (w*2+1)*slot
				rnd := rand.New(rand.NewPCG(uint64(w), 7))
				whole := make([]byte, slot) // what the slot holds
				for i := range 60 {
					from, to := 0, 1+rnd.IntN(slot)
					if i%3 == 0 {
						from = rnd.IntN(to)
					}
					copy(whole[from:to], pattern(byte(i*workers+w), to-from))
					copy(r.mem[out:out+slot], whole)
					off := int64(w) * slot
					if err := r.move(t.Context(), xfer.Write, pair{f, out + from, to - from, off + int64(from)})[0]; err != nil {
						t.Error(err)
					}
					if err := r.move(t.Context(), xfer.Read, pair{f, in, slot, off})[0]; err != nil {
						t.Error(err)
					}
					if !bytes.Equal(r.mem[in:in+slot], whole) {
						t.Errorf("slot %d reads wrong bytes after write %d of [%d,%d)", w, i, from, to)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

// Transfers of many requests that end at any time leave nothing behind, and a
// transfer that waits for room ends with its context.
func TestCancelUnderLoad(t *testing.T) {
	forEngines(t, posix.Options{Depth: 2}, func(t *testing.T, r *rig) {
		_, f := r.file(pattern(5, 4<<20))
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(w), 8))
				for range 30 {
					ctx, cancel := context.WithCancel(t.Context())
					stop := make(chan struct{})
					go func() {
						defer close(stop)
						for range rnd.IntN(2000) {
							_ = ctx.Err()
						}
						cancel()
					}()
					var ps []pair
					for i := range 16 {
						ps = append(ps, pair{f, w * 512 << 10, 16<<10 + i, int64(i) * 256 << 10})
					}
					for i, err := range r.move(ctx, xfer.Read, ps...) {
						if err != nil && (!errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.Canceled)) {
							t.Errorf("descriptor %d: %v", i, err)
						}
					}
					<-stop
				}
			})
		}
		wg.Wait()
		if s := r.Stats(); s.Canceled == 0 || s.Waits == 0 {
			t.Errorf("nothing was cancelled or had to wait: %+v", s)
		}
		if err := r.move(t.Context(), xfer.Read, pair{f, 0, 1 << 20, 0})[0]; err != nil {
			t.Errorf("after all that: %v", err)
		}
	})
}

func TestManyFiles(t *testing.T) {
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		const files, n = 200, 4096
		dir := t.TempDir()
		before := openFiles(t)
		var write, read []pair
		var regions []xfer.Region
		for i := range files {
			path := filepath.Join(dir, fmt.Sprint(i))
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			f := r.register(xfer.FILE, xfer.Desc{Meta: path})
			again := r.register(xfer.FILE, xfer.Desc{Meta: path, Dev: 1})
			regions = append(regions, f, again)
			write = append(write, pair{f, i * n, n, 0})
			read = append(read, pair{again, (i + files) * n, n, 0})
		}
		if got := openFiles(t) - before; got != 2*files {
			t.Errorf("%d descriptors for %d files", got, files)
		}
		copy(r.mem, pattern(6, files*n))
		for _, errs := range [][]error{r.move(t.Context(), xfer.Write, write...), r.move(t.Context(), xfer.Read, read...)} {
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
		}
		if !bytes.Equal(r.mem[:files*n], r.mem[files*n:2*files*n]) {
			t.Error("wrong bytes came back")
		}
		for _, f := range regions {
			if err := r.Deregister(f); err != nil {
				t.Error(err)
			}
		}
		if got := openFiles(t); got != before {
			t.Errorf("%d descriptors open, %d before", got, before)
		}
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// Memory that cannot be pinned for writing, or of which nothing is left to pin,
// works as well, and is accounted for.
func TestUnregisteredMemory(t *testing.T) {
	forEngines(t, posix.Options{}, func(t *testing.T, r *rig) {
		s := r.Stats()
		if s.RegisteredBytes+s.UnregisteredBytes != int64(len(r.mem)) {
			t.Errorf("%d bytes of memory, but %+v", len(r.mem), s)
		}
		before := s.UnregisteredBytes
		ro, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(ro)
		path, f := r.file(pattern(7, 64<<10))
		mem := r.register(xfer.DRAM, xfer.Desc{Addr: arena.Addr(ro), Len: 64 << 10})
		if got := r.Stats().UnregisteredBytes - before; got != 64<<10 {
			t.Errorf("unregistered bytes: %d more", got)
		}
		zeros := *r
		zeros.mem, zeros.memR = ro, mem
		if err := zeros.move(t.Context(), xfer.Write, pair{f, 0, 64 << 10, 0})[0]; err != nil {
			t.Error(err)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, make([]byte, 64<<10)) {
			t.Errorf("wrong bytes in the file, %v", err)
		}
		if err := r.Deregister(mem); err != nil {
			t.Error(err)
		}
		if got := r.Stats().UnregisteredBytes; got != before {
			t.Errorf("unregistered bytes: %d, want %d", got, before)
		}
	})
}
