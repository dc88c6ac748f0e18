package arena

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Foreign is a mapping of a file that somebody else owns and may cut short, or take
// pages from, at any moment. Its memory is touched only inside Guard.
type Foreign struct {
	b        []byte
	m        mapping
	writable bool
}

// MapForeign maps the first n bytes of another's file, which stays the caller's to
// close. It must be a regular file of a memory file system: on any other a touched
// page may have to be waited for, and a goroutine that waits so holds up the garbage
// collector, and with it the process. Errors: another kind of file; a size that is
// not positive or more than the file has; the kernel's refusal, with its errno.
func MapForeign(fd int, n int64, writable bool) (*Foreign, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("look at the file: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("file of mode %#o, want a regular one", st.Mode)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("look at the file system: %w", err)
	}
	huge := fs.Type == unix.HUGETLBFS_MAGIC
	switch {
	case !huge && fs.Type != unix.TMPFS_MAGIC && fs.Type != unix.RAMFS_MAGIC:
		return nil, fmt.Errorf("file of a file system of type %#x, want one in memory: tmpfs or hugetlbfs", fs.Type)
	case n <= 0 || n > st.Size:
		return nil, fmt.Errorf("%d bytes of a file of %d", n, st.Size)
	}
	f := &Foreign{writable: writable}
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	// Without a reservation: pages that cannot be had are a fault like any other.
	const flags = unix.MAP_SHARED | unix.MAP_NORESERVE
	var at unsafe.Pointer
	var err error
	if huge {
		// It is unmapped in whole pages, and the kernel aligns it to their size.
		page := int64(st.Blksize)
		f.m.n = uintptr((n + page - 1) / page * page)
		at, err = unix.MmapPtr(fd, 0, nil, f.m.n, prot, flags)
		f.m.p = at
	} else {
		if f.m, at, err = reserve(n); err != nil {
			return nil, err
		}
		if _, err = unix.MmapPtr(fd, 0, at, uintptr(n), prot, flags|unix.MAP_FIXED); err != nil {
			err = errors.Join(err, unix.MunmapPtr(f.m.p, f.m.n))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	f.b = unsafe.Slice((*byte)(at), n)
	return f, nil
}

// Len is the length of the mapping.
func (f *Foreign) Len() int64 { return int64(len(f.b)) }

// Writable says whether the memory may be written to.
func (f *Foreign) Writable() bool { return f.writable }

// Bytes is the mapped memory, until Close. It may fault: see Guard.
func (f *Foreign) Bytes() []byte { return f.b }

// Holds says whether an address is of the mapping.
func (f *Foreign) Holds(addr uint64) bool { return addr-Addr(f.b) < uint64(len(f.b)) }

// Close unmaps the memory. It is called once, when nobody touches it any more.
func (f *Foreign) Close() error {
	if err := unix.MunmapPtr(f.m.p, f.m.n); err != nil {
		return fmt.Errorf("unmap a file: %w", err)
	}
	return nil
}

// Fault: memory of a mapping was not there when it was touched. The file was cut
// short, or its file system had no page to give.
type Fault struct{ Addr uint64 }

func (f *Fault) Error() string { return fmt.Sprintf("no memory at %#x", f.Addr) }

// Guard runs touch, and returns a *Fault when memory of a mapping was not there; what
// was done up to then stays done. Whoever calls it says whether the fault is one of a
// Foreign mapping: elsewhere it is a fault of this program. touch takes no lock, and
// starts no goroutine.
func Guard(touch func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = &Fault{uint64(r.Addr())}
		default:
			panic(r)
		}
	}()
	touch()
	return nil
}
