package tcp

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/xfer"
)

// bareLoop is the limit: the same bytes over as many plain connections by requests of 24
// bytes, writev and io.ReadFull. The memory is the nodes' own.
type bareLoop struct {
	conns, far []net.Conn
}

func newBareLoop(b *testing.B, n int) *bareLoop {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	loop := &bareLoop{}
	for range n {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		d, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		loop.conns, loop.far = append(loop.conns, c), append(loop.far, d)
	}
	b.Cleanup(func() {
		for i := range loop.conns {
			loop.conns[i].Close()
			loop.far[i].Close()
		}
	})
	return loop
}

// run moves rounds times size bytes over each connection.
func (l *bareLoop) run(b *testing.B, op xfer.Op, near, far []byte, size, rounds int) {
	var wg sync.WaitGroup
	for k := range l.conns {
		c, d := l.conns[k], l.far[k]
		at := func(mem []byte, i int) []byte { return mem[((i*len(l.conns)+k)*size)%len(mem):][:size] }
		wg.Go(func() { // who serves
			var req [24]byte
			for i := range rounds {
				if _, err := io.ReadFull(d, req[:]); err != nil {
					b.Error(err)
					return
				}
				var err error
				if op == xfer.Read {
					v := net.Buffers{req[:], at(far, i)}
					_, err = v.WriteTo(d)
				} else if _, err = io.ReadFull(d, at(far, i)); err == nil {
					_, err = d.Write(req[:])
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
		wg.Go(func() {
			var req [24]byte
			for i := range rounds {
				var err error
				if op == xfer.Read {
					if _, err = c.Write(req[:]); err == nil {
						if _, err = io.ReadFull(c, req[:]); err == nil {
							_, err = io.ReadFull(c, at(near, i))
						}
					}
				} else {
					v := net.Buffers{req[:], at(near, i)}
					if _, err = v.WriteTo(c); err == nil {
						_, err = io.ReadFull(c, req[:])
					}
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkTransfer compares transfers of one size, as many at a time as there are
// connections, with the bare loop, in rounds that take turns. "ratio" is the speed of
// the transfers by that of the loop, by the median of each; "cpu" the processor time of
// both ends by the loop's, which other work on the machine disturbs less.
func BenchmarkTransfer(b *testing.B) {
	for _, conns := range []int{1, 4} {
		for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
			for _, size := range []int{64 << 10, 1 << 20} {
				b.Run(fmt.Sprintf("%s/%dKiB/c%d", op, size>>10, conns), func(b *testing.B) { benchTransfer(b, op, size, conns) })
			}
		}
	}
}

func benchTransfer(b *testing.B, op xfer.Op, size, conns int) {
	const room = 64 << 20 // more than the caches of a core hold
	near, far := newNode(b, "near", room, Options{Conns: conns}), newNode(b, "far", room, Options{})
	remote := near.meets(b, far)
	if err := near.Connect(b.Context(), far.id); err != nil {
		b.Fatal(err)
	}
	bare := newBareLoop(b, conns)
	fill(near.bytes(), 1)
	fill(far.bytes(), 2)
	rounds := (64 << 20) / size / conns
	var prepared []xfer.Prepared
	for off := 0; off < room; off += size {
		prepared = append(prepared, near.prepare(b, op, remote, far, list{{uint64(off), uint64(off), uint64(size)}}))
	}
	ours := func() {
		var wg sync.WaitGroup
		for k := range conns {
			wg.Go(func() {
				for i := range rounds {
					p := prepared[(i*conns+k)%len(prepared)]
					_ = near.Transfer(context.Background(), p, func(_ int, err error) { // it is also given here
						if err != nil {
							b.Error(err)
						}
					})
				}
			})
		}
		wg.Wait()
	}
	limit := func() { bare.run(b, op, near.bytes(), far.bytes(), size, rounds) }
	ours()
	limit()
	var mine, theirs []time.Duration
	var mineCPU, theirsCPU time.Duration
	b.SetBytes(64 << 20)
	for b.Loop() {
		start, cpu := time.Now(), cpuTime(b)
		ours()
		mine = append(mine, time.Since(start))
		mineCPU += cpuTime(b) - cpu
		b.StopTimer()
		start, cpu = time.Now(), cpuTime(b)
		limit()
		theirs = append(theirs, time.Since(start))
		theirsCPU += cpuTime(b) - cpu
		b.StartTimer()
	}
	b.ReportMetric(float64(mineCPU)/float64(theirsCPU), "cpu")
	slices.Sort(mine)
	slices.Sort(theirs)
	b.ReportMetric(float64(theirs[len(theirs)/2])/float64(mine[len(mine)/2]), "ratio")
}

// cpuTime is what this process has used so far.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkMany moves a list of small pieces; the limit is the memory they are in.
func BenchmarkMany(b *testing.B) {
	const pieces = 100_000
	near, far := newNode(b, "near", 64<<20, Options{}), newNode(b, "far", 64<<20, Options{})
	remote := near.meets(b, far)
	var l list
	for i := range uint64(pieces) {
		l = append(l, [3]uint64{i * 128, i * 128, 64})
	}
	for _, op := range []xfer.Op{xfer.Read, xfer.Write} {
		b.Run(op.String(), func(b *testing.B) {
			p := near.prepare(b, op, remote, far, l)
			b.ReportAllocs()
			b.SetBytes(64 * pieces)
			for b.Loop() {
				_ = near.Transfer(b.Context(), p, func(_ int, err error) { // it is also given here
					if err != nil {
						b.Error(err)
					}
				})
			}
		})
	}
}
