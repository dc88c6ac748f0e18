package posix_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

const (
	benchFile  = 512 << 20
	benchBlock = 1 << 20
)

// BenchmarkRead and BenchmarkWrite compare blocks of 1 MiB at random places of
// one file: bare O_DIRECT system calls against the engines, on the same huge-page
// buffers. descs is into how many descriptors a block is cut. The metric
// cpu-ms/GB is the process's.
func BenchmarkRead(b *testing.B)  { benchAll(b, xfer.Read) }
func BenchmarkWrite(b *testing.B) { benchAll(b, xfer.Write) }

// BenchmarkAgent is the suite's, through an agent.
func BenchmarkAgent(b *testing.B) {
	for _, engine := range engines {
		b.Run(engine, func(b *testing.B) {
			xfertest.Bench(b, harness(posix.Options{Engine: engine}, xfer.FILE, xfertest.File))
		})
	}
}

func benchAll(b *testing.B, op xfer.Op) {
	dir := os.Getenv("KVTIER_BENCH_DIR") // a real disk, when the temporary folder is none
	if dir == "" {
		dir = b.TempDir()
	}
	path := filepath.Join(dir, "posix-bench")
	b.Cleanup(func() { os.Remove(path) })
	mem, err := arena.New(16*benchBlock, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { mem.Close() })
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_DIRECT, 0o600)
	if err != nil {
		b.Skip("no O_DIRECT: ", err)
	}
	b.Cleanup(func() { unix.Close(fd) })
	for off := int64(0); off < benchFile; off += benchBlock {
		if _, err := unix.Pwrite(fd, mem.Slice(0, benchBlock), off); err != nil {
			b.Fatal(err)
		}
	}
	if err := unix.Fdatasync(fd); err != nil {
		b.Fatal(err)
	}
	place := func(i int64) int64 { return i * 7919 % (benchFile / benchBlock) * benchBlock }

	for _, depth := range []int{1, 8} {
		b.Run(fmt.Sprintf("raw/depth=%d", depth), func(b *testing.B) {
			measure(b, depth, func(w int, i int64) error {
				call := unix.Pread
				if op == xfer.Write {
					call = unix.Pwrite
				}
				if n, err := call(fd, mem.Slice(int64(w)*benchBlock, benchBlock), place(i)); err != nil || n != benchBlock {
					return fmt.Errorf("%s: %d bytes: %w", op, n, err)
				}
				return nil
			})
		})
		for _, engine := range []string{posix.EngineURing, posix.EngineGoroutines} {
			for _, descs := range []int{1, 4} {
				b.Run(fmt.Sprintf("%s/depth=%d/descs=%d", engine, depth, descs), func(b *testing.B) {
					be, err := posix.New(&posix.Options{Engine: engine})
					if err != nil {
						b.Skip(err)
					}
					defer be.Close()
					ctx := context.Background()
					m := xfer.Desc{Addr: arena.Addr(mem.Chunks()[0]), Len: uint64(mem.Size())}
					rm, err := be.Register(ctx, xfer.DRAM, m)
					if err != nil {
						b.Fatal(err)
					}
					rf, err := be.Register(ctx, xfer.FILE, xfer.Desc{Meta: path})
					if err != nil {
						b.Fatal(err)
					}
					measure(b, depth, func(w int, i int64) error {
						var local, remote [4]xfer.Bound
						n := uint64(benchBlock / descs)
						for j := range uint64(descs) {
							local[j] = xfer.Bound{Desc: xfer.Desc{Addr: m.Addr + uint64(w)*benchBlock + j*n, Len: n}, Type: xfer.DRAM, Region: rm}
							remote[j] = xfer.Bound{Desc: xfer.Desc{Addr: uint64(place(i)) + j*n, Len: n}, Type: xfer.FILE, Region: rf}
						}
						p, err := be.Prepare(op, local[:descs], remote[:descs])
						if err != nil {
							return err
						}
						defer be.Release(p)
						var failed error
						err = be.Transfer(ctx, p, func(_ int, err error) {
							if err != nil {
								failed = err
							}
						})
						if err != nil {
							return err
						}
						return failed
					})
					if err := be.Deregister(rm); err != nil {
						b.Error(err)
					}
					if err := be.Deregister(rf); err != nil {
						b.Error(err)
					}
				})
			}
		}
	}
}

// measure runs b.N operations from depth goroutines.
func measure(b *testing.B, depth int, do func(worker int, i int64) error) {
	b.SetBytes(benchBlock)
	b.ReportAllocs()
	var next atomic.Int64
	var wg sync.WaitGroup
	cpu := cpuMillis(b)
	b.ResetTimer()
	for w := range depth {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(b.N) {
					return
				}
				if err := do(w, i); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric((cpuMillis(b)-cpu)/(float64(b.N)*benchBlock/1e9), "cpu-ms/GB")
}

func cpuMillis(b *testing.B) float64 {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return float64(r.Utime.Sec+r.Stime.Sec)*1e3 + float64(r.Utime.Usec+r.Stime.Usec)/1e3
}
