package posix

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
)

// ring is one io_uring: the two rings that are shared with the kernel, nothing
// else. push is for one caller at a time, reap likewise; enter is for many.
type ring struct {
	fd      int
	mem     []byte // both rings
	sqeMem  []byte
	sqHead  *uint32 // moved by the kernel
	sqTail  *uint32 // moved by push
	sqMask  uint32
	sqes    []sqe
	cqHead  *uint32 // moved by reap
	cqTail  *uint32 // moved by the kernel
	cqMask  uint32
	cqes    []cqe
	buffers uint32 // size of the table of registered buffers; 0: none
}

// newRing sets a ring up. The completion ring has more room than is ever in
// flight with a few devices; beyond that the kernel keeps completions for us.
func newRing(sqEntries, cqEntries, buffers uint32) (*ring, error) {
	p := params{flags: setupClamp | setupCQSize, cqEntries: cqEntries}
	fd, err := sysSetup(sqEntries, &p)
	if err != nil {
		return nil, err
	}
	r := &ring{fd: fd}
	if p.features&featSingleMmap == 0 || p.features&featNoDrop == 0 {
		return nil, errors.Join(fmt.Errorf("io_uring features %#x: too old a kernel", p.features), r.close())
	}
	size := max(p.sq.array+p.sqEntries*4, p.cq.cqes+p.cqEntries*16)
	if r.mem, err = unix.Mmap(fd, offSQRing, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, errors.Join(fmt.Errorf("mmap rings: %w", err), r.close())
	}
	if r.sqeMem, err = unix.Mmap(fd, offSQEs, int(p.sqEntries)*64, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, errors.Join(fmt.Errorf("mmap submission entries: %w", err), r.close())
	}
	r.sqHead, r.sqTail, r.sqMask = word(r.mem, p.sq.head), word(r.mem, p.sq.tail), *word(r.mem, p.sq.ringMask)
	r.cqHead, r.cqTail, r.cqMask = word(r.mem, p.cq.head), word(r.mem, p.cq.tail), *word(r.mem, p.cq.ringMask)
	r.sqes = array[sqe](r.sqeMem, 0, p.sqEntries)
	r.cqes = array[cqe](r.mem, p.cq.cqes, p.cqEntries)
	// Entry i of the ring is always submission entry i.
	for i, index := 0, array[uint32](r.mem, p.sq.array, p.sqEntries); i < len(index); i++ {
		index[i] = uint32(i)
	}
	if sysRegisterSparse(fd, buffers) == nil { // since Linux 5.19
		r.buffers = buffers
	}
	return r, nil
}

// push adds an entry, which the next enter submits. It reports false when the
// ring is full.
func (r *ring) push(e *sqe) bool {
	tail := *r.sqTail
	if tail-atomic.LoadUint32(r.sqHead) > r.sqMask {
		return false
	}
	r.sqes[tail&r.sqMask] = *e
	atomic.StoreUint32(r.sqTail, tail+1)
	return true
}

// behind is how many entries before tail the kernel has not taken yet.
func (r *ring) behind(tail uint32) uint32 {
	return uint32(max(0, int32(tail-atomic.LoadUint32(r.sqHead))))
}

// enter submits up to n entries and, when wait is set, blocks until a completion
// is there. It may return early; callers look again at what they wanted. It
// reports false when the kernel was out of room and nothing was done.
func (r *ring) enter(n uint32, wait bool) bool {
	var want, flags uint32
	if wait {
		want, flags = 1, enterGetEvents
	}
	_, e := sysEnter(r.fd, n, want, flags)
	switch e {
	case 0, unix.EINTR:
		return true
	case unix.EAGAIN, unix.EBUSY, unix.ENOMEM:
		return false
	}
	// The ring is ours alone and was tried when it was made: any other errno
	// means that it was used wrongly.
	panic(fmt.Sprintf("posix: io_uring_enter: %v", e))
}

// reap takes up to len(out) completions, without blocking.
func (r *ring) reap(out []cqe) int {
	head, tail := *r.cqHead, atomic.LoadUint32(r.cqTail)
	n := 0
	for ; n < len(out) && head != tail; n++ {
		out[n] = r.cqes[head&r.cqMask]
		head++
	}
	atomic.StoreUint32(r.cqHead, head)
	return n
}

// close gives everything back, buffers first: memory is unpinned when it returns.
func (r *ring) close() error {
	var errs []error
	if r.buffers > 0 {
		errs = append(errs, sysUnregisterBuffers(r.fd))
	}
	for _, m := range [][]byte{r.mem, r.sqeMem} {
		if m != nil {
			errs = append(errs, unix.Munmap(m))
		}
	}
	errs = append(errs, unix.Close(r.fd))
	return errors.Join(errs...)
}

// probe does a read of each kind that is going to be used: a ring can be set up
// where its operations are forbidden.
func (r *ring) probe() error {
	a, err := arena.New(4096, &arena.Options{NoPopulate: true})
	if err != nil {
		return fmt.Errorf("memory to read into: %w", err)
	}
	defer a.Close()
	fd, err := unix.MemfdCreate("kvtier-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("file to read: %w", err)
	}
	defer unix.Close(fd)
	const text = "io_uring"
	if _, err := unix.Pwrite(fd, []byte(text), 0); err != nil {
		return fmt.Errorf("file to read: %w", err)
	}
	b := a.Slice(0, 4096)
	ops := []uint8{opRead}
	if r.buffers > 0 {
		if sysUpdateBuffer(r.fd, 0, iovec{arena.Addr(b), 4096}) == nil {
			ops = append(ops, opReadFixed)
			defer func() { _ = sysUpdateBuffer(r.fd, 0, iovec{}) }()
		}
	}
	for _, op := range ops {
		clear(b)
		r.push(&sqe{opcode: op, fd: int32(fd), addr: arena.Addr(b), len: uint32(len(text)), userData: uint64(op)})
		var c [1]cqe
		for tail := *r.sqTail; r.reap(c[:]) == 0; {
			if !r.enter(r.behind(tail), true) {
				return fmt.Errorf("io_uring_enter: %w", unix.EAGAIN)
			}
		}
		if c[0].res < 0 {
			return fmt.Errorf("read: %w", unix.Errno(-c[0].res))
		}
		if c[0].userData != uint64(op) || string(b[:c[0].res]) != text {
			return fmt.Errorf("read gave %q, want %q", b[:c[0].res], text)
		}
	}
	return nil
}
