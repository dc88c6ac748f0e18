package posix

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
)

// pool is the engine that reads and writes by pread and pwrite, each in a
// goroutine that the piece's owner waits for, the last one in the owner's own.
// Devices bound how many there are.
type pool struct{ wg sync.WaitGroup }

func newPool() *pool { return &pool{} }

func (*pool) name() string { return EngineGoroutines }

func (e *pool) start(f *flight, ps []piece) {
	for i := range ps {
		p := &ps[i]
		if f.own == nil && i == len(ps)-1 {
			f.own = p
			return
		}
		e.wg.Go(p.perform)
	}
}

func (*pool) await(f *flight, cancel <-chan struct{}) {
	f.doOwn()
	select {
	case <-f.wake:
	case <-cancel:
	}
}

func (*pool) register(uint64, uint64) (*registered, error) { return nil, nil }
func (*pool) deregister(*registered) error                 { return nil }

// close waits for goroutines that have delivered their last piece and are about
// to end.
func (e *pool) close() error {
	e.wg.Wait()
	return nil
}

// doOwn performs the piece that was left for the owner, if there is one.
func (f *flight) doOwn() {
	if p := f.own; p != nil {
		f.own = nil
		p.perform()
	}
}

// fd is the descriptor that p goes to.
func (p *piece) fd() int {
	if p.how == buffered {
		return p.file.buffered
	}
	return p.file.direct
}

// perform does one operation for what is left of p.
func (p *piece) perform() {
	b := p.bounce
	if p.how == bounced {
		b = b[p.moved:p.ioLen]
	} else {
		b = arena.View(p.mem, p.n)[p.moved:]
	}
	at := p.ioOff + int64(p.moved)
	for {
		var n int
		var err error
		if p.write {
			n, err = unix.Pwrite(p.fd(), b, at)
		} else {
			n, err = unix.Pread(p.fd(), b, at)
		}
		var errno unix.Errno
		switch {
		case err == nil:
			p.flight.deliver(p, n)
			return
		case errors.As(err, &errno) && errno == unix.EINTR:
			continue
		}
		p.flight.deliver(p, -int(errno))
		return
	}
}
