package shm_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"path/filepath"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/backends/shm"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// side is a bound backend with some memory that is registered.
type side struct {
	*shm.Backend
	id     xfer.PeerID
	mem    []byte
	arena  *arena.Arena
	region xfer.Region
}

var incarnations atomic.Uint64

// memory says what an arena is made of.
type memory int

const (
	anonymous memory = iota // reached by process_vm
	memfd                   // reached as a memory file
)

func (m memory) String() string { return [...]string{"process_vm", "memory file"}[m] }

// newSide binds a backend with n bytes of memory, which end with the test.
func newSide(t testing.TB, name string, m memory, n int64) *side {
	t.Helper()
	a, err := arena.New(n, &arena.Options{Memfd: m == memfd, NoHugePages: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	s := &side{arena: a, mem: a.Slice(0, n), id: xfer.PeerID{Name: name, Incarnation: incarnations.Add(1)}}
	s.Backend = bindWith(t, s.id, a.FileOf)
	if s.region, err = s.Register(t.Context(), xfer.DRAM, s.desc(0, len(s.mem))); err != nil {
		t.Fatal(err)
	}
	return s
}

// bindWith binds a backend that is closed with the test.
func bindWith(t testing.TB, id xfer.PeerID, fileOf func(addr, n uint64) (int, int64, bool)) *shm.Backend {
	t.Helper()
	b, err := shm.New(&shm.Options{Socket: filepath.Join(t.TempDir(), "s"), FileOf: fileOf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := b.Bind(id); err != nil {
		t.Fatal(err)
	}
	return b
}

func (s *side) desc(off, n int) xfer.Desc {
	return xfer.Desc{Addr: arena.Addr(s.mem) + uint64(off), Len: uint64(n)}
}

// fill gives all memory random contents.
func (s *side) fill() {
	var seed [32]byte
	seed[0] = byte(s.id.Incarnation)
	r := rand.NewChaCha8(seed)
	_, _ = r.Read(s.mem)
}

// meet makes a peer known.
func (s *side) meet(t testing.TB, p *side) {
	t.Helper()
	info, err := p.ConnInfo()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.LoadConnInfo(p.id, info); err != nil {
		t.Fatal(err)
	}
}

// load makes a peer's registered memory known.
func (s *side) load(t testing.TB, p *side) xfer.Region {
	t.Helper()
	info, err := p.RegionInfo(p.region)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.LoadRegion(p.id, xfer.DRAM, p.desc(0, len(p.mem)), info)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// pairs makes the lists of a transfer of the same pieces, offset and length, on
// both sides.
func pairs(s *side, p *side, r xfer.Region, pieces ...[2]int) (local, remote []xfer.Bound) {
	for _, c := range pieces {
		local = append(local, xfer.Bound{Desc: s.desc(c[0], c[1]), Region: s.region})
		remote = append(remote, xfer.Bound{Desc: p.desc(c[0], c[1]), Region: r})
	}
	return local, remote
}

// move transfers and gives each pair's error, and the transfer's.
func (s *side) move(t testing.TB, ctx context.Context, op xfer.Op, p *side, r xfer.Region, pieces ...[2]int) ([]error, error) {
	t.Helper()
	local, remote := pairs(s, p, r, pieces...)
	q, err := s.Prepare(op, local, remote)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(q)
	return s.transfer(t, ctx, q, len(pieces))
}

func (s *side) transfer(t testing.TB, ctx context.Context, q xfer.Prepared, n int) ([]error, error) {
	errs, done := make([]error, n), make([]int, n)
	whole := s.Transfer(ctx, q, func(i int, err error) { errs[i] = err; done[i]++ })
	for i, d := range done {
		if d != 1 {
			t.Errorf("pair %d is done %d times", i, d)
		}
	}
	return errs, whole
}

// mustMove is move for what cannot fail.
func (s *side) mustMove(t testing.TB, op xfer.Op, p *side, r xfer.Region, pieces ...[2]int) {
	t.Helper()
	errs, err := s.move(t, t.Context(), op, p, r, pieces...)
	for _, e := range append(errs, err) {
		if e != nil {
			t.Fatalf("%s: %v", op, e)
		}
	}
}

// same fails the test when pieces differ.
func same(t testing.TB, s, p *side, pieces ...[2]int) {
	t.Helper()
	for _, c := range pieces {
		if !bytes.Equal(s.mem[c[0]:][:c[1]], p.mem[c[0]:][:c[1]]) {
			t.Errorf("%d bytes at %d differ", c[1], c[0])
		}
	}
}
