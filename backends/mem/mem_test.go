package mem_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/backends/mem"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

var harness = xfertest.Harness{
	New: func(testing.TB) xfer.Backend { return mem.New() },
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) { xfertest.Run(t, harness) }

func TestRegisterRefuses(t *testing.T) {
	b := mem.New()
	for name, c := range map[string]struct {
		typ xfer.MemType
		d   xfer.Desc
	}{
		"memory type": {xfer.FILE, xfer.Desc{Addr: 4096, Len: 1}},
		"address":     {xfer.DRAM, xfer.Desc{Len: 1}},
		"device":      {xfer.DRAM, xfer.Desc{Addr: 4096, Len: 1, Dev: 1}},
	} {
		if _, err := b.Register(t.Context(), c.typ, c.d); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Register(t.Context(), xfer.DRAM, xfer.Desc{Addr: 4096, Len: 1}); !errors.Is(err, xfer.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestCores runs the suite where one core copies all, and where more cores
// than there are share it.
func TestCores(t *testing.T) {
	for _, n := range []int{1, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			before := runtime.GOMAXPROCS(n)
			t.Cleanup(func() { runtime.GOMAXPROCS(before) })
			h := harness
			h.MaxBytes = 17 << 20 // just above what several cores share
			xfertest.Run(t, h)
		})
	}
}

func BenchmarkBackend(b *testing.B) { xfertest.Bench(b, harness) }

// BenchmarkCopy compares a request with a bare copy of the same memory, taking
// turns so that both meet the same machine. "ratio" is the speed of the request
// by that of the copy, by the median of each.
func BenchmarkCopy(b *testing.B) {
	for _, size := range []int64{4 << 10, 64 << 10, 1 << 20, 8 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			const room = 64 << 20 // more than the caches hold
			arenas := [2]*arena.Arena{}
			agent, err := xfer.NewAgent("bench", nil)
			if err != nil {
				b.Fatal(err)
			}
			if err := agent.AddBackend(mem.New()); err != nil {
				b.Fatal(err)
			}
			for i := range arenas {
				if arenas[i], err = arena.New(room, nil); err != nil {
					b.Fatal(err)
				}
				d := xfer.Desc{Addr: arena.Addr(arenas[i].Slice(0, room)), Len: room}
				if err := agent.Register(b.Context(), xfer.DescList{Descs: []xfer.Desc{d}}, nil); err != nil {
					b.Fatal(err)
				}
			}
			at := func(i int, off int64) []byte { return arenas[i].Slice(off, size) }
			list := func(i int, off int64) xfer.DescList {
				return xfer.DescList{Descs: []xfer.Desc{{Addr: arena.Addr(at(i, off)), Len: uint64(size)}}}
			}
			var request, bare []time.Duration
			n := 0
			b.SetBytes(2 * size)
			for b.Loop() {
				off := int64(n) * size % room
				n++
				if n%2 == 0 { // whoever is second finds a warmer machine
					bare = append(bare, timeCopy(at(0, off), at(1, off)))
				}
				other := (off + room/2) % room
				start := time.Now()
				r, err := agent.NewRequest(xfer.Read, list(0, other), list(1, other), nil)
				if err != nil {
					b.Fatal(err)
				}
				if err := r.Run(b.Context()); err != nil {
					b.Fatal(err)
				}
				if err := r.Release(); err != nil {
					b.Fatal(err)
				}
				request = append(request, time.Since(start))
				if n%2 == 1 {
					bare = append(bare, timeCopy(at(0, off), at(1, off)))
				}
			}
			slices.Sort(request)
			slices.Sort(bare)
			b.ReportMetric(float64(bare[n/2])/float64(request[n/2]), "ratio")
			if err := agent.Close(); err != nil {
				b.Fatal(err)
			}
			for _, a := range arenas {
				if err := a.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func timeCopy(to, from []byte) time.Duration {
	start := time.Now()
	copy(to, from)
	return time.Since(start)
}
