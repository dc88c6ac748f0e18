package shm_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/backends/shm"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// room is the memory of each side of a benchmark: more than the caches hold.
const room = 64 << 20

// benchAgent makes an agent with room registered, in a memfd on huge pages where
// there are some.
func benchAgent(b *testing.B, name string, m memory) (*xfer.Agent, *arena.Arena) {
	b.Helper()
	a, err := arena.New(room, &arena.Options{Memfd: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = a.Close() })
	o := &shm.Options{}
	if m == memfd {
		o.FileOf = a.FileOf
	}
	back, err := shm.New(o)
	if err != nil {
		b.Fatal(err)
	}
	agent, err := xfer.NewAgent(name, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = agent.Close() })
	if err := agent.AddBackend(back); err != nil {
		b.Fatal(err)
	}
	d := xfer.Desc{Addr: arena.Addr(a.Slice(0, room)), Len: room}
	if err := agent.Register(b.Context(), xfer.DescList{Descs: []xfer.Desc{d}}, nil); err != nil {
		b.Fatal(err)
	}
	return agent, a
}

// BenchmarkRequest compares requests of 1 MiB, 1 and 16 at once, with bare copies
// between the same two arenas by as many goroutines, taking turns so that both
// meet the same machine. "ratio" is the speed of the requests by that of the
// copies, by the median of each, "cpu" the same of the time on a core, which other
// programs disturb less; "huge" is the part of the memory on huge pages.
func BenchmarkRequest(b *testing.B) {
	const size = 1 << 20
	for _, m := range []memory{memfd, anonymous} {
		for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
			for _, depth := range []int{1, 16} {
				b.Run(fmt.Sprintf("%s/%s/d%d", m, op, depth), func(b *testing.B) {
					near, here := benchAgent(b, "near", m)
					far, there := benchAgent(b, "far", m)
					meta, err := far.Metadata()
					if err != nil {
						b.Fatal(err)
					}
					if _, err := near.LoadMetadata(meta); err != nil {
						b.Fatal(err)
					}
					list := func(a *arena.Arena, block int) xfer.DescList {
						return xfer.DescList{Descs: []xfer.Desc{{Addr: arena.Addr(a.Slice(int64(block)*size, size)), Len: size}}}
					}
					request := func(block int) {
						r, err := near.NewRequest(op, list(here, block), list(there, block), &xfer.RequestOptions{Peer: "far"})
						if err == nil {
							err = r.Run(b.Context())
						}
						if err == nil {
							err = r.Release()
						}
						if err != nil {
							b.Error(err)
						}
					}
					bare := func(block int) {
						to, from := here.Slice(int64(block)*size, size), there.Slice(int64(block)*size, size)
						if op == xfer.Write {
							to, from = from, to
						}
						copy(to, from)
					}
					round := func(move func(block int)) [2]time.Duration {
						begun, core := time.Now(), coreTime(b)
						var wg sync.WaitGroup
						for w := range depth {
							wg.Go(func() {
								for block := w; block < room/size; block += depth {
									move(block)
								}
							})
						}
						wg.Wait()
						return [2]time.Duration{time.Since(begun), coreTime(b) - core}
					}
					round(request) // the first touches the pages
					b.SetBytes(2 * room)
					var times [2][2][]time.Duration
					for b.Loop() {
						for i, move := range []func(int){request, bare} {
							for k, t := range round(move) {
								times[i][k] = append(times[i][k], t)
							}
						}
					}
					for k, unit := range []string{"ratio", "cpu"} {
						slices.Sort(times[0][k])
						slices.Sort(times[1][k])
						b.ReportMetric(float64(times[1][k][b.N/2])/float64(times[0][k][b.N/2]), unit)
					}
					b.ReportMetric(float64(here.Obtained().HugeBytes)/room, "huge")
				})
			}
		}
	}
}

// coreTime is how long this process has been on a core.
func coreTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
