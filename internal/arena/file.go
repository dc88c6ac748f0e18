package arena

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FileOf finds the memfd behind n bytes at addr: the chunk's descriptor, which the
// arena keeps owning, and the offset in it. It is not ok when they are not inside
// one chunk of this arena, or the arena is anonymous.
func (a *Arena) FileOf(addr, n uint64) (fd int, off int64, ok bool) {
	for i, c := range a.chunks {
		from := Addr(c)
		if addr < from || addr-from > uint64(len(c)) || n > uint64(len(c))-(addr-from) {
			continue
		}
		fd = a.Fd(i)
		return fd, int64(addr - from), fd >= 0
	}
	return -1, 0, false
}

// ErrUnsafe: touching a mapping of the file could end this process, because its
// owner can cut the file short.
var ErrUnsafe = errors.New("file can shrink under a mapping")

// Shared is a mapping of a memory file that another process made.
type Shared struct {
	b        []byte
	m        mapping
	writable bool
}

// MapFile maps the first n bytes of another's memory file, which stays the
// caller's to close. It is mapped for reading only where the file does not allow
// more. Errors: ErrUnsafe for a file that is not sealed against shrinking, or
// that cannot be sealed; a size that is not positive or more than the file has;
// the kernel's refusal, with its errno.
func MapFile(fd int, n int64) (*Shared, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: seals of the file: %w", ErrUnsafe, err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("%w: its seals are %#x, without F_SEAL_SHRINK", ErrUnsafe, seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("size of the memory file: %w", err)
	}
	// The size is looked at behind the seal: from here on it can only grow.
	if n <= 0 || n > st.Size {
		return nil, fmt.Errorf("map %d bytes of a memory file of %d", n, st.Size)
	}
	s := &Shared{writable: true}
	var at unsafe.Pointer
	if s.m, at, err = reserve(n); err != nil {
		return nil, err
	}
	_, err = unix.MmapPtr(fd, 0, at, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		s.writable = false
		_, err = unix.MmapPtr(fd, 0, at, uintptr(n), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_FIXED)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map a memory file of %d bytes: %w", n, err), unix.MunmapPtr(s.m.p, s.m.n))
	}
	s.b = unsafe.Slice((*byte)(at), n)
	return s, nil
}

// Bytes is the mapped memory, until Close.
func (s *Shared) Bytes() []byte { return s.b }

// Writable says whether the memory may be written to.
func (s *Shared) Writable() bool { return s.writable }

// Close unmaps the memory. It is called once.
func (s *Shared) Close() error {
	if err := unix.MunmapPtr(s.m.p, s.m.n); err != nil {
		return fmt.Errorf("unmap memory file: %w", err)
	}
	return nil
}
