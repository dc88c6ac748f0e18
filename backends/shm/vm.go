package shm

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/xfer"
)

// vectors is what a process_vm call needs, kept from piece to piece.
type vectors struct {
	local  []unix.Iovec
	remote []unix.RemoteIovec
	errs   []error // of single pairs; empty when there are none
}

// copyVM copies a piece through the kernel.
func (r *run) copyVM(p *piece, g *grant, v *vectors) error {
	if r.link.pid == 0 {
		return fmt.Errorf("%w: the process of peer %s is not visible here, as in another pid namespace; "+
			"only memory files can be reached", xfer.ErrUnavailable, r.link.p.id)
	}
	v.local, v.remote = v.local[:0], v.remote[:0]
	for i := p.from; i < p.to; i++ {
		local, off := r.span(p, i)
		v.local = append(v.local, unix.Iovec{Base: &local[0], Len: uint64(len(local))})
		v.remote = append(v.remote, unix.RemoteIovec{Base: uintptr(g.addr + off), Len: len(local)})
	}
	move := unix.ProcessVMReadv
	if r.op == xfer.Write {
		move = unix.ProcessVMWritev
	}
	moved := 0 // of the first pair that is left
	for k := 0; k < len(v.local); {
		n, err := move(r.link.pid, v.local[k:], v.remote[k:], 0)
		if err != nil && !errors.Is(err, unix.EFAULT) {
			return r.link.vmError(err)
		}
		if err == nil && n > 0 {
			for k < len(v.local) && n >= v.remote[k].Len {
				n -= v.remote[k].Len
				k, moved = k+1, 0
			}
			if k < len(v.local) && n > 0 {
				// Once more from where it stopped, for the errno.
				local := r.rest(p, k, moved+n)
				v.local[k] = unix.Iovec{Base: &local[0], Len: uint64(len(local))}
				v.remote[k].Base += uintptr(n)
				v.remote[k].Len -= n
				moved += n
			}
			continue
		}
		if len(v.errs) == 0 {
			v.errs = append(v.errs, make([]error, p.to-p.from)...)
		}
		v.errs[k] = fmt.Errorf("%w: %d of %d bytes: %w", xfer.ErrShort, moved, moved+v.remote[k].Len, unix.EFAULT)
		k, moved = k+1, 0
	}
	return nil
}

// rest is what is left of a pair of a piece.
func (r *run) rest(p *piece, k, moved int) []byte {
	local, _ := r.span(p, p.from+k)
	return local[moved:]
}

// vmError says what a refusal of the kernel means.
func (l *link) vmError(err error) error {
	switch {
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("%w: peer %s: process %d has gone", xfer.ErrDisconnected, l.p.id, l.pid)
	case errors.Is(err, unix.EPERM):
		cure := "it runs as another user, or is not dumpable"
		if scope, rerr := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); rerr == nil && strings.TrimSpace(string(scope)) != "0" {
			cure = "kernel.yama.ptrace_scope is " + strings.TrimSpace(string(scope)) +
				": set it to 0, or let the peer allow it (Options.AllowPtrace), or register memory of a memory file"
		}
		return fmt.Errorf("%w: process_vm to process %d of peer %s: %w: %s", xfer.ErrUnavailable, l.pid, l.p.id, err, cure)
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: process_vm: %w: only memory files can be reached", xfer.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: process_vm to process %d of peer %s: %w", xfer.ErrShort, l.pid, l.p.id, err)
}
