package posix

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
)

const (
	sqEntries     = 512
	cqEntries     = 4096
	bufferEntries = 4096
	maxBufferLen  = 1 << 30 // the kernel's limit for one registered buffer
)

// uring is the engine on one io_uring, shared by all transfers. There is no
// goroutine of its own: one of those that wait for a piece, the one that holds
// the token, waits in the kernel and delivers completions to all of them. So a
// lone transfer submits and waits in one system call and is woken by the kernel
// directly, as with pread, and takes as long (BenchmarkRead).
type uring struct {
	ring  *ring
	token chan struct{} // holds one, or the holder does
	out   [64]cqe       // the token holder's
	mu    struct {
		sync.Mutex
		slots []*piece // by user data; grows to what is in flight at most, which the devices bound
		free  []uint32
	}
	buffers struct {
		sync.Mutex
		used []bool
	}
}

func newURing() (*uring, error) {
	r, err := newRing(sqEntries, cqEntries, bufferEntries)
	if err != nil {
		return nil, err
	}
	if err := r.probe(); err != nil {
		_ = r.close() // the first error says what is wrong
		return nil, fmt.Errorf("io_uring probe: %w", err)
	}
	u := &uring{ring: r, token: make(chan struct{}, 1)}
	u.token <- struct{}{}
	u.buffers.used = make([]bool, r.buffers)
	return u, nil
}

func (u *uring) name() string { return EngineURing }

// start puts the pieces into the submission ring. await submits them, so that
// submitting and waiting can be one system call.
func (u *uring) start(f *flight, ps []piece) {
	u.mu.Lock()
	for i := range ps {
		p := &ps[i]
		var slot uint32
		if n := len(u.mu.free); n > 0 {
			slot = u.mu.free[n-1]
			u.mu.free = u.mu.free[:n-1]
			u.mu.slots[slot] = p
		} else {
			slot = uint32(len(u.mu.slots))
			u.mu.slots = append(u.mu.slots, p)
		}
		e := p.entry()
		e.userData = uint64(slot)
		for !u.ring.push(&e) {
			tail := *u.ring.sqTail
			u.mu.Unlock()
			u.submit(tail)
			u.mu.Lock()
		}
	}
	f.sqTail = *u.ring.sqTail
	u.mu.Unlock()
}

// entry is the operation for what is left of p.
func (p *piece) entry() sqe {
	e := sqe{fd: int32(p.fd()), off: uint64(p.ioOff) + uint64(p.moved), len: uint32(p.ioLen - p.moved)}
	e.addr = p.mem
	if p.how == bounced {
		e.addr = arena.Addr(p.bounce)
	}
	e.addr += uint64(p.moved)
	switch {
	case p.write && p.buf >= 0:
		e.opcode, e.bufIndex = opWriteFixed, uint16(p.buf)
	case p.write:
		e.opcode = opWrite
	case p.buf >= 0:
		e.opcode, e.bufIndex = opReadFixed, uint16(p.buf)
	default:
		e.opcode = opRead
	}
	return e
}

// submit makes the kernel take every entry before tail.
func (u *uring) submit(tail uint32) {
	for {
		n := u.ring.behind(tail)
		if n == 0 {
			return
		}
		if !u.ring.enter(n, false) {
			backOff()
		}
	}
}

// backOff gives a kernel that is out of memory for requests some time to
// complete others.
func backOff() { time.Sleep(50 * time.Microsecond) }

func (u *uring) await(f *flight, cancel <-chan struct{}) {
	if f.own != nil { // then it is all there is in flight
		f.doOwn()
		<-f.wake
		return
	}
	if f.inFlight == 0 { // it waits for room only, and must not get stuck in the kernel
		select {
		case <-f.wake:
		case <-cancel:
		}
		return
	}
	select {
	case <-u.token:
		u.lead(f)
		return
	default:
	}
	u.submit(f.sqTail)
	select {
	case <-f.wake:
	case <-cancel:
	case <-u.token:
		u.lead(f)
	}
}

// lead waits in the kernel and delivers, until there is something to do for f.
// It has pieces in flight, so that will come. The caller holds the token; it
// goes to another waiting goroutine, if there is one.
func (u *uring) lead(f *flight) {
	for u.drain(); len(f.wake) == 0; u.drain() {
		if !u.ring.enter(u.ring.behind(f.sqTail), true) {
			backOff()
		}
	}
	u.submit(f.sqTail) // woken for another reason, it may not have been
	u.token <- struct{}{}
	<-f.wake
}

// drain delivers the completions that are there and says how many.
func (u *uring) drain() int {
	total := 0
	for {
		n := u.ring.reap(u.out[:])
		if n == 0 {
			return total
		}
		total += n
		var ps [len(u.out)]*piece
		u.mu.Lock()
		for i, c := range u.out[:n] {
			slot := uint32(c.userData)
			ps[i] = u.mu.slots[slot]
			u.mu.slots[slot] = nil
			u.mu.free = append(u.mu.free, slot)
		}
		u.mu.Unlock()
		for i, c := range u.out[:n] {
			ps[i].flight.deliver(ps[i], int(c.res))
		}
	}
}

// registered is a piece of memory that the kernel knows, in buffers of at most
// maxBufferLen.
type registered struct{ index0 []uint32 }

// index is the buffer that has n bytes at an offset of the memory, or -1 when no
// single one has.
func (r *registered) index(off uint64, n int) int32 {
	i := off / maxBufferLen
	if (off+uint64(n)-1)/maxBufferLen != i {
		return -1
	}
	return int32(r.index0[i])
}

func (u *uring) register(addr, n uint64) (*registered, error) {
	r := &registered{}
	for off := uint64(0); off < n; off += maxBufferLen {
		i, err := u.takeBuffer()
		if err == nil {
			if err = sysUpdateBuffer(u.ring.fd, i, iovec{addr + off, min(maxBufferLen, n-off)}); err != nil {
				u.giveBuffer(i)
			} else {
				r.index0 = append(r.index0, i)
			}
		}
		if err != nil {
			_ = u.deregister(r) // the first error says what is wrong
			return nil, err
		}
	}
	return r, nil
}

func (u *uring) deregister(r *registered) error {
	var first error
	for _, i := range r.index0 {
		if err := sysUpdateBuffer(u.ring.fd, i, iovec{}); err != nil {
			if first == nil {
				first = err
			}
			continue // never to be used again: the kernel still has it
		}
		u.giveBuffer(i)
	}
	return first
}

func (u *uring) takeBuffer() (uint32, error) {
	u.buffers.Lock()
	defer u.buffers.Unlock()
	for i, used := range u.buffers.used {
		if !used {
			u.buffers.used[i] = true
			return uint32(i), nil
		}
	}
	if len(u.buffers.used) == 0 {
		return 0, fmt.Errorf("the kernel has no table of buffers that can be changed (Linux 5.19)")
	}
	return 0, fmt.Errorf("all %d registered buffers are in use", len(u.buffers.used))
}

func (u *uring) giveBuffer(i uint32) {
	u.buffers.Lock()
	u.buffers.used[i] = false
	u.buffers.Unlock()
}

func (u *uring) close() error { return u.ring.close() }
