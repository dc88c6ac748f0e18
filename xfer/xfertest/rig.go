package xfertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// guardBytes surround each registered piece and must never change.
const guardBytes = 8 << 10

// side is one side of the transfers of a rig, with a model of what its memory
// must hold.
type side struct {
	name  string
	typ   xfer.MemType
	mem   Memory
	model []byte // of all the memory, guards included
}

// desc describes n bytes at offset off of the registered part.
func (s *side) desc(off, n int64) xfer.Desc {
	return xfer.Desc{Addr: s.mem.Desc.Addr + guardBytes + uint64(off), Len: uint64(n), Dev: s.mem.Desc.Dev}
}

// registration describes the registered part.
func (s *side) registration() xfer.Desc {
	d := s.mem.Desc
	d.Addr += guardBytes
	d.Len -= 2 * guardBytes
	return d
}

// at is the model of a piece of the registered part.
func (s *side) at(off, n int64) []byte { return s.model[guardBytes+off:][:n] }

// piece is one descriptor pair of a transfer, in offsets of the registered
// parts.
type piece struct{ local, remote, n int64 }

// rig is memory for one pair of memory types with models of its contents, and
// the backend under test: adopted by an agent, or bare.
type rig struct {
	t       testing.TB
	size    int64
	backend xfer.Backend
	agent   *xfer.Agent // nil when bare
	options *xfer.RequestOptions
	regions [2]xfer.Region
	local   side
	remote  side
	random  *rand.ChaCha8
	rand    *rand.Rand
	scratch []byte   // as long as a model
	own     struct { // the registrations of objects that writes make
		sync.Mutex
		regions map[xfer.Desc]xfer.Region // values nil when they are with the agent
	}
}

// newRig makes an agent with the backend and size bytes registered on both
// sides.
func newRig(t testing.TB, h Harness, pair xfer.Pair, size int64) *rig {
	t.Helper()
	g := newMemory(t, h, pair, size)
	g.backend = h.New(t)
	agent, err := xfer.NewAgent("test", &xfer.AgentOptions{Telemetry: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.AddBackend(g.backend); err != nil {
		t.Fatal(err)
	}
	g.agent = agent
	t.Cleanup(func() {
		if err := agent.Close(); err != nil {
			t.Errorf("close agent: %v", err)
		}
	})
	for _, s := range g.sides() {
		l := xfer.DescList{Type: s.typ, Descs: []xfer.Desc{s.registration()}}
		if err := agent.Register(t.Context(), l, nil); err != nil {
			t.Fatalf("%s side: %v", s.name, err)
		}
	}
	return g
}

// newBareRig registers with the backend itself.
func newBareRig(t testing.TB, h Harness, pair xfer.Pair, size int64) *rig {
	t.Helper()
	g := newMemory(t, h, pair, size)
	g.backend = h.New(t)
	t.Cleanup(func() {
		for d, r := range g.own.regions {
			if err := g.backend.Deregister(r); err != nil {
				t.Errorf("deregister %v: %v", d, err)
			}
		}
		for i, r := range g.regions {
			if err := g.backend.Deregister(r); err != nil {
				t.Errorf("deregister %s side: %v", g.sides()[i].name, err)
			}
		}
		if err := g.backend.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	for i, s := range g.sides() {
		r, err := g.backend.Register(t.Context(), s.typ, s.registration())
		if err != nil {
			t.Fatalf("register %s side: %v", s.name, err)
		}
		g.regions[i] = r
	}
	return g
}

func newMemory(t testing.TB, h Harness, pair xfer.Pair, size int64) *rig {
	t.Helper()
	seed := [32]byte{byte(pair.Local), byte(pair.Remote)}
	binary.LittleEndian.PutUint64(seed[8:], uint64(size))
	g := &rig{t: t, size: size, random: rand.NewChaCha8(seed)}
	g.rand = rand.New(g.random)
	g.scratch = make([]byte, size+2*guardBytes)
	g.local = side{name: "local", typ: pair.Local, mem: h.memory(t, pair.Local, size+2*guardBytes)}
	g.remote = side{name: "remote", typ: pair.Remote, mem: h.memory(t, pair.Remote, size+2*guardBytes)}
	for _, s := range g.sides() {
		s.model = make([]byte, size+2*guardBytes)
		g.fill(s)
	}
	return g
}

func (g *rig) sides() [2]*side { return [2]*side{&g.local, &g.remote} }

// source is where the bytes of an operation come from, sink where they go.
func (g *rig) source(op xfer.Op) *side {
	if op == xfer.Write {
		return &g.local
	}
	return &g.remote
}

func (g *rig) sink(op xfer.Op) *side {
	if op == xfer.Write {
		return &g.remote
	}
	return &g.local
}

// patternBytes is the period of random contents. It is a prime, so that bytes
// that arrive a whole number of blocks off are seen.
const patternBytes = 65_521

// fill gives all of a side new random contents.
func (g *rig) fill(s *side) {
	g.t.Helper()
	period := make([]byte, min(patternBytes, len(s.model)))
	g.random.Read(period)
	g.repeat(s, 0, int64(len(s.model)), period)
}

// repeat gives n bytes at off of all of a side, guards included, periodic contents.
func (g *rig) repeat(s *side, off, n int64, period []byte) {
	g.t.Helper()
	b := s.model[off:][:n]
	repeat(b, period)
	var err error
	if far, ok := s.mem.WriterAt.(farBytes); ok {
		err = far.repeat(off, n, period)
	} else {
		_, err = s.mem.WriteAt(b, off)
	}
	if err != nil {
		g.t.Fatalf("fill %s memory: %v", s.name, err)
	}
}

// repeat fills b, by copying, which the race detector does not slow down.
func repeat(b, period []byte) {
	n := copy(b, period)
	for n < len(b) {
		n += copy(b[n:], b[:n-n%len(period)])
	}
}

// refill gives one piece of the registered part new random contents.
func (g *rig) refill(s *side, off, n int64) {
	g.t.Helper()
	b := s.at(off, n)
	g.random.Read(b)
	if _, err := s.mem.WriteAt(b, guardBytes+off); err != nil {
		g.t.Fatalf("fill %s memory: %v", s.name, err)
	}
}

// lists describes pieces of an operation for an agent.
func (g *rig) lists(op xfer.Op, pieces []piece) (local, remote xfer.DescList) {
	g.t.Helper()
	local = xfer.DescList{Type: g.local.typ, Descs: make([]xfer.Desc, len(pieces))}
	remote = xfer.DescList{Type: g.remote.typ, Descs: make([]xfer.Desc, len(pieces))}
	for i, p := range pieces {
		local.Descs[i] = g.local.desc(p.local, p.n)
		remote.Descs[i], _ = g.place(op, p)
	}
	return local, remote
}

// place is the remote side of a piece: where an object is written whole, one of its own,
// which is registered here.
func (g *rig) place(op xfer.Op, p piece) (xfer.Desc, xfer.Region) {
	g.t.Helper()
	o := g.remote.mem.pieces
	if o == nil || op != xfer.Write {
		return g.remote.desc(p.remote, p.n), g.regions[1]
	}
	d := o.desc(guardBytes+p.remote, p.n)
	g.own.Lock()
	defer g.own.Unlock()
	r, known := g.own.regions[d]
	if !known {
		var err error
		if g.agent != nil {
			err = g.agent.Register(g.t.Context(), xfer.DescList{Type: g.remote.typ, Descs: []xfer.Desc{d}}, nil)
		} else {
			r, err = g.backend.Register(g.t.Context(), g.remote.typ, d)
		}
		if err != nil {
			g.t.Errorf("register %v: %v", d, err)
		}
		if g.own.regions == nil {
			g.own.regions = map[xfer.Desc]xfer.Region{}
		}
		g.own.regions[d] = r
	}
	d.Meta = ""
	return d, r
}

// bounds describes pieces of an operation for the bare backend.
func (g *rig) bounds(op xfer.Op, pieces []piece) (local, remote []xfer.Bound) {
	g.t.Helper()
	for _, p := range pieces {
		d, r := g.place(op, p)
		local = append(local, xfer.Bound{Desc: g.local.desc(p.local, p.n), Type: g.local.typ, Region: g.regions[0]})
		remote = append(remote, xfer.Bound{Desc: d, Type: g.remote.typ, Region: r})
	}
	return local, remote
}

// prepare prepares pieces with the bare backend for the length of the test.
func (g *rig) prepare(op xfer.Op, pieces []piece) xfer.Prepared {
	g.t.Helper()
	local, remote := g.bounds(op, pieces)
	p, err := g.backend.Prepare(op, local, remote)
	if err != nil {
		g.t.Fatalf("prepare: %v", err)
	}
	g.t.Cleanup(func() { g.backend.Release(p) })
	return p
}

// request makes a request for the length of the test.
func (g *rig) request(op xfer.Op, pieces []piece) *xfer.Request {
	g.t.Helper()
	local, remote := g.lists(op, pieces)
	r, err := g.agent.NewRequest(op, local, remote, g.options)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		r.Cancel()
		if err := r.Release(); err != nil {
			g.t.Errorf("release: %v", err)
		}
	})
	return r
}

// move runs one request for the pieces and tells the models.
func (g *rig) move(ctx context.Context, op xfer.Op, pieces ...piece) {
	g.t.Helper()
	local, remote := g.lists(op, pieces)
	r, err := g.agent.NewRequest(op, local, remote, g.options)
	if err != nil {
		g.t.Fatal(err)
	}
	if err := r.Run(ctx); err != nil {
		g.t.Errorf("%s: %v", op, err)
	}
	if err := r.Release(); err != nil {
		g.t.Error(err)
	}
	g.moved(op, pieces...)
}

// moved tells the models that the pieces were transferred.
func (g *rig) moved(op xfer.Op, pieces ...piece) {
	for _, p := range pieces {
		l, r := g.local.at(p.local, p.n), g.remote.at(p.remote, p.n)
		if op == xfer.Write {
			copy(r, l)
			if o := g.remote.mem.pieces; o != nil {
				o.moved(guardBytes+p.remote, p.n)
			}
		} else {
			copy(l, r)
		}
	}
}

// unknown takes over into the model whatever a sink's piece holds now.
func (g *rig) unknown(op xfer.Op, p piece) {
	g.t.Helper()
	s, off := g.sink(op), p.local
	if op == xfer.Write {
		off = p.remote
		if s.mem.pieces != nil {
			return // it may still change: it is not looked at
		}
	}
	if _, err := s.mem.ReadAt(s.at(off, p.n), guardBytes+off); err != nil {
		g.t.Fatalf("read %s memory: %v", s.name, err)
	}
}

// holds says whether a sink's piece is as its model.
func (g *rig) holds(op xfer.Op, p piece) bool {
	s, off := g.sink(op), p.local
	if op == xfer.Write {
		off = p.remote
	}
	got := make([]byte, p.n)
	if _, err := s.mem.ReadAt(got, guardBytes+off); err != nil {
		g.t.Errorf("read %s memory: %v", s.name, err)
	}
	return bytes.Equal(got, s.at(off, p.n))
}

// check compares all memory, guards included, with the models.
func (g *rig) check() {
	g.t.Helper()
	got := g.scratch
	for _, s := range g.sides() {
		if far, ok := s.mem.ReaderAt.(farBytes); ok && far.holds(s.model) {
			continue // else look closer
		}
		if _, err := s.mem.ReadAt(got, 0); err != nil {
			g.t.Fatalf("read %s memory: %v", s.name, err)
		}
		if bytes.Equal(got, s.model) {
			continue
		}
		first, wrong := -1, 0
		for i := range got {
			if got[i] != s.model[i] {
				if first < 0 {
					first = i
				}
				wrong++
			}
		}
		where := "the registered part"
		if int64(first) < guardBytes || int64(first) >= guardBytes+g.size {
			where = "a guard"
		}
		g.t.Fatalf("%s %s memory: %d bytes wrong, the first at offset %d of %d (in %s): %#x, want %#x",
			s.name, s.typ, wrong, int64(first)-guardBytes, g.size, where, got[first], s.model[first])
	}
}

// scatter makes up to n pieces of 1 to max bytes that do not overlap and are in
// another order on each side; about half of them are adjacent to the next.
func (g *rig) scatter(n int, maxBytes int64) []piece {
	pieces := make([]piece, 0, n)
	lengths := make([]int64, 0, n)
	var total int64
	for range n {
		l := 1 + g.rand.Int64N(maxBytes)
		gap := g.gap()
		if total+l+gap > g.size {
			break
		}
		lengths = append(lengths, l)
		total += l + gap
	}
	// Place the same lengths on both sides, with gaps of their own from what
	// room is left.
	place := func() []int64 {
		order := g.rand.Perm(len(lengths))
		room := g.size
		for _, l := range lengths {
			room -= l
		}
		offs := make([]int64, len(lengths))
		var at int64
		for _, i := range order {
			if gap := g.gap(); gap <= room {
				at += gap
				room -= gap
			}
			offs[i] = at
			at += lengths[i]
		}
		return offs
	}
	local, remote := place(), place()
	for i, l := range lengths {
		pieces = append(pieces, piece{local[i], remote[i], l})
	}
	return pieces
}

func (g *rig) gap() int64 { return []int64{0, 0, 0, 1, 511, 513}[g.rand.IntN(6)] }

// stripes makes n adjacent pieces of the same length, in order on both sides.
func stripes(n int, length int64) []piece {
	pieces := make([]piece, n)
	for i := range pieces {
		pieces[i] = piece{int64(i) * length, int64(i) * length, length}
	}
	return pieces
}

// reversed gives the pieces in the opposite order.
func reversed(pieces []piece) []piece {
	r := slices.Clone(pieces)
	slices.Reverse(r)
	return r
}
