package shm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// link is a connection that this process made to use a peer's memory.
type link struct {
	b        *Backend
	p        *peer
	line     *line
	sock     int // the line's descriptor
	pid      int // 0: process_vm cannot name the peer
	pidfd    int
	conn     *frame.Conn
	out      outbox
	shared   *arena.Shared
	gate     gate
	noting   chan struct{} // holds one for each notification that is not answered
	fetching chan struct{} // holds one, for who maps a file
	broken   atomic.Bool   // as mu.err, for a quick look
	mu       struct {
		sync.Mutex
		users  int // who may touch the gate, memory or descriptors, run included
		err    error
		calls  map[uint64]chan answer
		nextID uint64
		grants map[uint64]*grant // by token
		files  map[uint64]*mapped
	}
	quiet chan struct{} // closed when users is 0
}

type answer struct {
	status  uint16
	payload []byte
}

// grant is the right to use a region of the peer's.
type grant struct {
	grantInfo
	file *mapped // nil when the region is reached by process_vm
}

// mapped is a memory file of the peer's. It is mapped while a grant or a transfer
// refers to it.
type mapped struct {
	*arena.Shared
	refs int // under the link's mu
}

func newLink(b *Backend, p *peer, ln *line, m *arena.Shared) *link {
	l := &link{
		b: b, p: p, line: ln, shared: m, gate: gateOf(m.Bytes()),
		noting: make(chan struct{}, notesAhead), fetching: make(chan struct{}, 1), quiet: make(chan struct{}),
	}
	l.conn = frame.NewConn(ln, &b.frames)
	l.out = newOutbox(l.conn)
	l.mu.users = 2 // run, and who asked for it
	l.mu.calls = map[uint64]chan answer{}
	l.mu.grants = map[uint64]*grant{}
	l.mu.files = map[uint64]*mapped{}
	return l
}

// run receives until the connection ends, and clears up when nobody uses it any
// more.
func (l *link) run() {
	var wg sync.WaitGroup
	wg.Go(l.out.run)
	err := l.conn.Serve(l)
	l.end(fmt.Errorf("%w: peer %s: connection lost: %w", xfer.ErrDisconnected, l.p.id, err))
	close(l.out.over)
	wg.Wait()
	l.release()
	<-l.quiet
	l.clear()
}

// clear is where the peer learns that this process touches nothing any more.
func (l *link) clear() {
	l.p.drop(l)
	l.b.mu.Lock()
	delete(l.b.mu.links, l)
	l.b.mu.Unlock()
	errs := []error{l.shared.Close()}
	for _, m := range l.mu.files { // nobody else is left
		errs = append(errs, m.Close())
	}
	if l.pidfd >= 0 {
		errs = append(errs, unix.Close(l.pidfd))
	}
	if err := errors.Join(errs...); err != nil {
		l.b.log.Error("shm: clear up", "peer", l.p.id, "err", err)
	}
	l.line.finish()
}

// use is for who is going to touch anything of the link. It is false when the link
// has ended.
func (l *link) use() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.err != nil {
		return false
	}
	l.mu.users++
	return true
}

// release follows each use.
func (l *link) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.users--; l.mu.users == 0 {
		close(l.quiet)
	}
}

// end ends the link; err is what its users are told, if it is the first.
func (l *link) end(err error) {
	l.mu.Lock()
	if l.mu.err == nil {
		l.mu.err = err
	}
	l.broken.Store(true)
	calls := l.mu.calls
	l.mu.calls = nil
	l.mu.Unlock()
	for _, c := range calls {
		close(c)
	}
	_ = l.conn.Close() // always nil
}

// err is why the link has ended.
func (l *link) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.err
}

// alive says whether the peer still was there just now: what was copied before is
// in the memory of a process that lives.
func (l *link) alive() error {
	if l.broken.Load() {
		return l.err()
	}
	if l.gate.isShut(0) {
		return fmt.Errorf("%w: peer %s closed the connection", xfer.ErrDisconnected, l.p.id)
	}
	fds := [2]unix.PollFd{{Fd: int32(l.sock)}, {Fd: int32(l.pidfd), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds[:], 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("%w: poll: %w", xfer.ErrUnavailable, err)
		case fds[0].Revents != 0 || fds[1].Revents != 0: // a hang-up needs not be asked for
			return fmt.Errorf("%w: peer %s has gone", xfer.ErrDisconnected, l.p.id)
		}
		return nil
	}
}

// call sends a frame that the peer answers. What room holds is taken out once it
// was answered or never will be, however early the caller leaves.
func (l *link) call(ctx context.Context, f frame.Frame, room chan struct{}) (answer, error) {
	free := func() {
		if room != nil {
			<-room
		}
	}
	c := make(chan answer, 1)
	l.mu.Lock()
	if err := l.mu.err; err != nil {
		l.mu.Unlock()
		free()
		return answer{}, err
	}
	l.mu.nextID++
	f.ID = l.mu.nextID
	l.mu.calls[f.ID] = c
	l.mu.Unlock()
	select {
	case l.out.c <- f:
	case <-l.out.over:
		free()
		return answer{}, l.err()
	case <-ctx.Done():
		l.mu.Lock()
		delete(l.mu.calls, f.ID)
		l.mu.Unlock()
		free()
		return answer{}, canceled(ctx)
	}
	select {
	case a, ok := <-c:
		free()
		if !ok {
			return a, l.err()
		}
		return a, nil
	case <-ctx.Done():
		if room != nil {
			l.b.wg.Go(func() { <-c; free() })
		}
		return answer{}, canceled(ctx)
	}
}

// Land is for data frames, which this protocol has not.
func (l *link) Land(*frame.Header) []byte { return nil }

// Landed follows no Land.
func (l *link) Landed(*frame.Header, []byte, error) error { return nil }

// Frame takes what the owner says.
func (l *link) Frame(h *frame.Header, p []byte) error {
	switch {
	case h.Type == frame.Done:
		l.mu.Lock()
		c := l.mu.calls[h.ID]
		delete(l.mu.calls, h.ID)
		l.mu.Unlock()
		if c == nil {
			return fmt.Errorf("%w: answer to no question", errProtocol)
		}
		c <- answer{h.Status, append([]byte(nil), p...)}
		return nil
	case h.Type == frame.Message && h.Flags == codeRevoked:
		l.mu.Lock()
		defer l.mu.Unlock()
		if g := l.mu.grants[h.Token]; g != nil {
			delete(l.mu.grants, h.Token)
			l.unrefLocked(g)
		}
		return nil
	}
	return fmt.Errorf("%w: type %d with code %d", errProtocol, h.Type, h.Flags)
}
