package posix

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's interface of io_uring(7), after include/uapi/linux/io_uring.h.
// The unsafe conversions of this package are in this file: the rings are memory
// that the kernel maps for us, at offsets that it says.

const (
	opReadFixed  = 4
	opWriteFixed = 5
	opRead       = 22
	opWrite      = 23

	setupCQSize = 1 << 3
	setupClamp  = 1 << 4

	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1

	enterGetEvents = 1 << 0

	registerUnregisterBuffers = 1
	registerBuffers2          = 15
	registerBuffersUpdate     = 16
	registerSparse            = 1 << 0

	offSQRing = 0
	offSQEs   = 0x10000000
)

type sqOffsets struct {
	head, tail, ringMask, ringEntries, flags, dropped, array, resv1 uint32
	userAddr                                                        uint64
}

type cqOffsets struct {
	head, tail, ringMask, ringEntries, overflow, cqes, flags, resv1 uint32
	userAddr                                                        uint64
}

type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFd uint32
	resv                                                                   [3]uint32
	sq                                                                     sqOffsets
	cq                                                                     cqOffsets
}

// sqe is struct io_uring_sqe, for reads and writes; what these do not need
// stays 0.
type sqe struct {
	opcode    uint8
	_         uint8  // flags
	_         uint16 // ioprio
	fd        int32
	off, addr uint64
	len       uint32
	_         uint32 // rw_flags
	userData  uint64
	bufIndex  uint16
	_         uint16 // personality
	_         int32  // splice_fd_in
	_         [2]uint64
}

// cqe is struct io_uring_cqe. A negative res is an errno.
type cqe struct {
	userData uint64
	res      int32
	_        uint32 // flags
}

type rsrcRegister struct {
	nr, flags         uint32
	resv2, data, tags uint64
}

type rsrcUpdate struct {
	offset, resv uint32
	data, tags   uint64
	nr, resv2    uint32
}

// iovec is struct iovec with the base as a number: it is off-heap memory, which
// the garbage collector has no business with.
type iovec struct{ base, len uint64 }

// word is the 32-bit number at an offset of a ring.
func word(mem []byte, off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&mem[off])) }

// array is n elements of a ring from an offset on.
func array[T any](mem []byte, off, n uint32) []T {
	var t T
	end := uint64(off) + uint64(n)*uint64(unsafe.Sizeof(t))
	_ = mem[end-1] // panics when the kernel's offsets are not inside the mapping
	return unsafe.Slice((*T)(unsafe.Pointer(&mem[off])), n)
}

func sysSetup(entries uint32, p *params) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, fmt.Errorf("io_uring_setup: %w", e)
	}
	return int(fd), nil
}

// sysEnter returns the plain errno: callers tell them apart often.
func sysEnter(fd int, submit, wait, flags uint32) (int, unix.Errno) {
	n, _, e := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(submit), uintptr(wait), uintptr(flags), 0, 0)
	return int(n), e
}

func sysRegisterSparse(fd int, n uint32) error {
	r := rsrcRegister{nr: n, flags: registerSparse}
	return sysRegister(fd, registerBuffers2, unsafe.Pointer(&r), unsafe.Sizeof(r))
}

func sysUnregisterBuffers(fd int) error {
	return sysRegister(fd, registerUnregisterBuffers, nil, 0)
}

// sysUpdateBuffer puts one buffer into the table; an empty one clears its entry.
func sysUpdateBuffer(fd int, index uint32, v iovec) error {
	// The argument names v by a number: pinned, v stays at that address.
	var pin runtime.Pinner
	pin.Pin(&v)
	defer pin.Unpin()
	u := rsrcUpdate{offset: index, data: uint64(uintptr(unsafe.Pointer(&v))), nr: 1}
	return sysRegister(fd, registerBuffersUpdate, unsafe.Pointer(&u), unsafe.Sizeof(u))
}

func sysRegister(fd, op int, arg unsafe.Pointer, n uintptr) error {
	_, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(op), uintptr(arg), n, 0, 0)
	if e != 0 {
		return fmt.Errorf("io_uring_register: %w", e)
	}
	return nil
}
