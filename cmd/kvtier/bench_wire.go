package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/backends/shm"
	"github.com/kvtier/kvtier/backends/tcp"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// benchAgent is an agent with one backend and memory that is registered with it.
type benchAgent struct {
	*xfer.Agent
	closers
	mem *arena.Arena
}

// newBenchAgent makes an agent whose backend is tcp, with so many connections to its
// peer, or shm.
func newBenchAgent(ctx context.Context, name, kind string, conns int, bytes int64, huge bool) (_ *benchAgent, err error) {
	a := &benchAgent{}
	defer func() {
		if err != nil {
			_ = a.close() // the first failure is the one to tell
		}
	}()
	if a.mem, err = arena.New(bytes, &arena.Options{Memfd: kind == shm.Kind, NoHugePages: !huge}); err != nil {
		return nil, err
	}
	a.add(a.mem.Close)
	for i, c := range a.mem.Chunks() {
		fillPattern(c, benchHash(uint64(i)))
	}
	if a.Agent, err = xfer.NewAgent(name, nil); err != nil {
		return nil, err
	}
	a.add(a.Agent.Close)
	var b xfer.Backend
	if kind == shm.Kind {
		b, err = shm.New(&shm.Options{FileOf: a.mem.FileOf})
	} else {
		b, err = tcp.New(&tcp.Options{Conns: conns})
	}
	if err != nil {
		return nil, err
	}
	if err := a.AddBackend(b); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	l := xfer.DescList{Type: xfer.DRAM}
	for _, c := range a.mem.Chunks() {
		l.Descs = append(l.Descs, xfer.Desc{Addr: arena.Addr(c), Len: uint64(len(c))})
	}
	return a, a.Register(ctx, l, nil)
}

// describe is what the other process must know: where the memory's first byte is,
// and the agent's metadata.
func (a *benchAgent) describe() (string, error) {
	blob, err := a.Metadata()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d %s", arena.Addr(a.mem.Chunks()[0]), hex.EncodeToString(blob)), nil
}

// meet makes a peer known by its description.
func (a *benchAgent) meet(description string) (peer string, addr uint64, err error) {
	at, blob, _ := strings.Cut(description, " ")
	if addr, err = strconv.ParseUint(at, 10, 64); err != nil {
		return "", 0, err
	}
	data, err := hex.DecodeString(blob)
	if err != nil {
		return "", 0, err
	}
	id, err := a.LoadMetadata(data)
	return id.Name, addr, err
}

// runAgentPeer is the process that serves its memory to the other one's agent.
func runAgentPeer(ctx context.Context, kind string, bytes int64, huge bool, stdin io.Reader, stdout io.Writer) (err error) {
	a, err := newBenchAgent(ctx, "bench-peer", kind, 0, bytes, huge)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.close()) }()
	says, err := a.describe()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(stdout, "ready %s\n", says); err != nil {
		return err
	}
	in := bufio.NewReader(stdin)
	line, err := in.ReadString('\n')
	if err != nil {
		return err
	}
	if _, _, err := a.meet(strings.TrimSuffix(line, "\n")); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(stdout, "met you"); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, in) // until the other side ends
	return nil
}

// wireBench is an agent, and its peer in another process.
type wireBench struct {
	*bench
	*benchAgent
	peer  *benchPeer
	name  string
	reads []*xfer.Request // of each block
	write []*xfer.Request
}

// openWire starts both.
func (b *bench) openWire(ctx context.Context, kind string, conns int, huge bool) (_ *wireBench, err error) {
	bytes := int64(b.blocks * b.payload)
	w := &wireBench{bench: b}
	if w.benchAgent, err = newBenchAgent(ctx, "bench", kind, conns, bytes, huge); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = w.benchAgent.close() // the first failure is the one to tell
		}
	}()
	w.peer, err = startPeer(ctx, kind, "--bytes", strconv.FormatInt(bytes, 10), "--huge="+strconv.FormatBool(huge))
	if err != nil {
		return nil, err
	}
	w.add(w.peer.close)
	says, err := w.describe()
	if err != nil {
		return nil, err
	}
	name, addr, err := w.meet(w.peer.ready)
	if err != nil {
		return nil, err
	}
	if err := w.peer.say(says); err != nil {
		return nil, err
	}
	if _, err := w.peer.line("met"); err != nil {
		return nil, err
	}
	w.name = name
	for i := range b.blocks {
		off := uint64(i * b.payload)
		local := xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{{Addr: arena.Addr(w.mem.Slice(int64(off), int64(b.payload))), Len: uint64(b.payload)}}}
		remote := xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{{Addr: addr + off, Len: uint64(b.payload)}}}
		for _, op := range []struct {
			op xfer.Op
			to *[]*xfer.Request
		}{{xfer.Read, &w.reads}, {xfer.Write, &w.write}} {
			r, err := w.NewRequest(op.op, local, remote, &xfer.RequestOptions{Peer: name})
			if err != nil {
				return nil, err
			}
			w.add(r.Release)
			*op.to = append(*op.to, r)
		}
	}
	return w, nil
}

// run runs a request for each block, so many at a time.
func (w *wireBench) run(requests []*xfer.Request, depth int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := side(ctx, len(requests), depth, func(ctx context.Context, i int) error { return requests[i].Run(ctx) })
		return rate(len(requests)*w.payload, took), err
	}
}

// benchTCP measures transfers over loopback against the bare loop.
func benchTCP(ctx context.Context, b *bench) (err error) {
	s := &sessionBench{bench: b, huge: true}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.makeMemory(int64(b.blocks * b.payload)); err != nil {
		return err
	}
	if err := s.startLoop(ctx, ""); err != nil {
		return err
	}
	for _, conns := range []int{1, manyConns} {
		w, err := b.openWire(ctx, tcp.Kind, conns, true)
		if err != nil {
			return err
		}
		name := func(op string) string { return fmt.Sprintf("tcp.%s.1MiB.c%d", op, conns) }
		err = b.compare(ctx, name("read"), "GB/s", often*b.pairs, w.run(w.reads, conns), s.rawGet(b.blocks, b.payload, conns))
		if err == nil {
			err = b.compare(ctx, name("write"), "GB/s", often*b.pairs, w.run(w.write, conns), s.rawPut(b.blocks, b.payload, conns))
		}
		if err = errors.Join(err, w.close()); err != nil {
			return err
		}
	}
	return nil
}

// shmDepth is how many transfers are under way at a time in the rows of that depth.
const shmDepth = 16

// benchSHM measures transfers through shared memory against memcpy on the same pages.
func benchSHM(ctx context.Context, b *bench) (err error) {
	bytes := int64(b.blocks * b.payload)
	huge, giveBack := b.reservePages(3*bytes + 64<<20)
	defer func() { err = errors.Join(err, giveBack()) }()
	w, err := b.openWire(ctx, shm.Kind, 0, huge)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	other, err := arena.New(bytes, &arena.Options{Memfd: true, NoHugePages: !huge})
	if err != nil {
		return err
	}
	w.add(other.Close)
	limit := func(depth int) pass {
		return func(ctx context.Context) (float64, error) {
			took, err := side(ctx, b.blocks, depth, func(_ context.Context, i int) error {
				off, n := int64(i)*int64(b.payload), int64(b.payload)
				copy(w.mem.Slice(off, n), other.Slice(off, n))
				return nil
			})
			return rate(b.blocks*b.payload, took), err
		}
	}
	for _, depth := range []int{1, shmDepth} {
		if err := b.compare(ctx, fmt.Sprintf("shm.read.1MiB.d%d", depth), "GB/s", often*b.pairs, w.run(w.reads, depth), limit(depth)); err != nil {
			return err
		}
		if err := b.compare(ctx, fmt.Sprintf("shm.write.1MiB.d%d", depth), "GB/s", often*b.pairs, w.run(w.write, depth), limit(depth)); err != nil {
			return err
		}
	}
	return nil
}
