package xfertest

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// party is one of two agents, with its backend and its memory. It follows orders
// from any goroutine.
type party struct {
	t     testing.TB
	h     RemoteHarness
	side  Side
	mem   Memory
	begun chan struct{} // filled when a run has gone round once, or ended
	mu    struct {
		sync.Mutex
		agent   *xfer.Agent
		backend xfer.Backend
	}
}

func newParty(t testing.TB, h RemoteHarness, side Side) *party {
	p := &party{t: t, h: h, side: side, begun: make(chan struct{}, 1)}
	t.Cleanup(p.close)
	return p
}

func (p *party) close() {
	if a := p.current(); a != nil {
		if err := a.Close(); err != nil {
			p.t.Errorf("close agent %s: %v", a.Name(), err)
		}
	}
}

func (p *party) current() *xfer.Agent {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.agent
}

func (p *party) remote() xfer.Remote {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.backend.(xfer.Remote)
}

// handle follows one order.
func (p *party) handle(c call) (a answer) {
	if c.Timeout == 0 {
		c.Timeout = patience
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	var err error
	switch c.Verb {
	case "open":
		a, err = p.open(c)
	case "close":
		err = p.current().Close()
	case "metadata":
		a.Data, err = p.current().Metadata()
	case "load":
		a.Peer, err = p.current().LoadMetadata(c.Data)
	case "register":
		err = p.current().Register(ctx, p.list(c.Off, c.N), nil)
	case "deregister":
		err = p.current().Deregister(ctx, p.list(c.Off, c.N))
	case "partial":
		a.Data, err = p.current().PartialMetadata(p.list(c.Off, c.N))
	case "read":
		a.Data = make([]byte, c.N)
		_, err = p.mem.ReadAt(a.Data, c.Off)
	case "write":
		_, err = p.mem.WriteAt(c.Data, c.Off)
	case "repeat":
		b := make([]byte, c.N)
		repeat(b, c.Data)
		_, err = p.mem.WriteAt(b, c.Off)
	case "sum":
		b := make([]byte, c.N)
		_, err = p.mem.ReadAt(b, c.Off)
		a.Count = int(crc32.Checksum(b, castagnoli))
	case "run":
		a.Count, err = p.run(ctx, c)
	case "begun":
		select {
		case <-p.begun:
		case <-ctx.Done():
			err = ctx.Err()
		}
	case "notify":
		for range max(c.Count, 1) {
			if err = p.current().Notify(ctx, c.Name, c.Data, nil); err != nil {
				break
			}
		}
	case "expect":
		a, err = p.expect(ctx, c)
	case "collect":
		a, err = p.collect(ctx, c)
	case "carried":
		a.Count = carriers(c.N)
	case "take":
		a, err = p.take(ctx, c)
	case "idle":
		select {
		case <-p.current().Notifications():
			a.Count = 1
		default:
		}
	case "disconnect":
		p.remote().Disconnect(xfer.PeerID{Name: c.Name, Incarnation: uint64(c.N)})
	case "cut":
		a.Count, err = cutSockets(c.Count)
	case "census":
		a.Count, a.Texts = runtime.NumGoroutine(), openFiles(p.t)
		for _, m := range mappedFiles(p.t) {
			a.Msgs = append(a.Msgs, []byte(m))
		}
	default:
		err = fmt.Errorf("no such order: %q", c.Verb)
	}
	a.fail(err)
	return a
}

// open makes the agent, or another incarnation of it over the same memory, with
// the registered part registered unless Flag says otherwise.
func (p *party) open(c call) (a answer, err error) {
	if old := p.current(); old != nil {
		if err := old.Close(); err != nil {
			return a, err
		}
	} else {
		p.mem = p.h.memory(p.t, p.side, c.N+2*guardBytes)
	}
	var b xfer.Backend
	if c.Data != nil {
		b = p.h.Again(p.t, p.side, c.Data)
	} else {
		b = p.h.New(p.t, p.side)
	}
	agent, err := xfer.NewAgent(c.Name, &xfer.AgentOptions{Telemetry: true})
	if err != nil {
		return a, errors.Join(err, b.Close())
	}
	if err := agent.AddBackend(b); err != nil {
		return a, errors.Join(err, b.Close())
	}
	p.mu.Lock()
	p.mu.agent, p.mu.backend = agent, b
	p.mu.Unlock()
	if !c.Flag {
		if err := agent.Register(context.Background(), p.list(0, c.N), nil); err != nil {
			return a, err
		}
	}
	a.Desc = p.mem.Desc
	if a.Info, err = b.(xfer.Remote).ConnInfo(); err != nil {
		return a, err
	}
	a.Data, err = agent.Metadata()
	return a, err
}

// list describes n bytes at offset off of the registered part.
func (p *party) list(off, n int64) xfer.DescList {
	d := p.mem.Desc
	d.Addr += guardBytes + uint64(off)
	d.Len = uint64(n)
	return xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{d}}
}

// run moves pieces between the party's memory and that of its peer, which begins
// at Data, Count times or, when that is 0, until an error; when Flag is set with a
// notification each time.
func (p *party) run(ctx context.Context, c call) (n int, err error) {
	var far xfer.Desc
	if _, err := fmt.Sscan(string(c.Data), &far.Addr, &far.Dev); err != nil {
		return 0, err
	}
	local, remote := xfer.DescList{Type: xfer.DRAM}, xfer.DescList{Type: xfer.DRAM}
	for _, q := range c.Pieces {
		d := p.list(q[0], q[2]).Descs[0]
		d.Meta = ""
		local.Descs = append(local.Descs, d)
		remote.Descs = append(remote.Descs, xfer.Desc{Addr: far.Addr + guardBytes + uint64(q[1]), Len: uint64(q[2]), Dev: far.Dev})
	}
	o := xfer.RequestOptions{Peer: c.Name}
	if c.Flag {
		o.Notify = []byte("done")
	}
	r, err := p.current().NewRequest(c.Op, local, remote, &o)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	select {
	case <-p.begun:
	default:
	}
	for c.Count == 0 || n < c.Count {
		if err = r.Run(ctx); err == nil {
			n++
		}
		if c.Count == 0 {
			select {
			case p.begun <- struct{}{}:
			default:
			}
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// expect waits for a notification and says what the pieces hold at that moment,
// one behind the other.
func (p *party) expect(ctx context.Context, c call) (a answer, err error) {
	select {
	case n, ok := <-p.current().Notifications():
		if !ok {
			return a, fmt.Errorf("%w: notifications", xfer.ErrClosed)
		}
		a.Peer, a.Info = n.Peer, n.Msg
	case <-ctx.Done():
		return a, fmt.Errorf("%w: no notification: %w", xfer.ErrCanceled, ctx.Err())
	}
	var total int64
	for _, q := range c.Pieces {
		total += q[2]
	}
	a.Data = make([]byte, total)
	at := a.Data
	for _, q := range c.Pieces {
		if _, err := p.mem.ReadAt(at[:q[2]], guardBytes+q[0]); err != nil {
			return a, err
		}
		at = at[q[2]:]
	}
	return a, nil
}

// take receives notifications: Count of them or, when that is 0, until the one
// that is Data.
func (p *party) take(ctx context.Context, c call) (a answer, err error) {
	for c.Count == 0 || len(a.Msgs) < c.Count {
		select {
		case n, ok := <-p.current().Notifications():
			if !ok {
				return a, fmt.Errorf("%w: notifications, after %d", xfer.ErrClosed, len(a.Msgs))
			}
			a.Peer = n.Peer
			if c.Count == 0 && string(n.Msg) == string(c.Data) {
				return a, nil
			}
			a.Msgs = append(a.Msgs, n.Msg)
		case <-ctx.Done():
			return a, fmt.Errorf("%w: only %d notifications: %w", xfer.ErrCanceled, len(a.Msgs), ctx.Err())
		}
	}
	return a, nil
}

// cutSockets shuts down every connected stream socket of the process, as a
// network that loses a connection does: nobody is told. how is that of shutdown(2).
func cutSockets(how int) (n int, err error) {
	for fd := range 1024 {
		typ, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_TYPE)
		if err != nil || typ != syscall.SOCK_STREAM {
			continue
		}
		if listens, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN); err != nil || listens != 0 {
			continue
		}
		if syscall.Shutdown(fd, how) == nil {
			n++
		}
	}
	return n, nil
}
