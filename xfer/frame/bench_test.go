package frame_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer/frame"
)

// blocks gives pieces of off-heap memory in turn, more of them than a cache holds.
type blocks struct {
	a    *arena.Arena
	size int64
	next int64
}

func newBlocks(tb testing.TB, size int64) *blocks {
	a, err := arena.New(64<<20, nil)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = a.Close() })
	return &blocks{a: a, size: size}
}

func (b *blocks) take() []byte {
	p := b.a.Slice(b.next, b.size)
	b.next = (b.next + b.size) % b.a.Size()
	return p
}

// bare is the limit: requests of 24 bytes, answered by a header and a payload in one
// writev.
type bare struct {
	c    net.Conn
	req  [24]byte
	head [frame.HeaderBytes]byte
	to   *blocks
}

func serveBare(c net.Conn, from *blocks) {
	var req [24]byte
	head := make([]byte, frame.HeaderBytes)
	for {
		if _, err := io.ReadFull(c, req[:]); err != nil {
			return
		}
		v := net.Buffers{head, from.take()}
		if _, err := v.WriteTo(c); err != nil {
			return
		}
	}
}

func (b *bare) get() error {
	if _, err := b.c.Write(b.req[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(b.c, b.head[:]); err != nil {
		return err
	}
	_, err := io.ReadFull(b.c, b.to.take())
	return err
}

// framed does the same by frames: a message of 24 bytes, answered by data frames and
// a message, which wakes the caller.
type framed struct {
	conn *frame.Conn
	req  [24]byte
	to   *blocks
	at   []byte
	got  chan struct{}
}

func (f *framed) Land(h *frame.Header) []byte                       { return f.at[h.Offset:][:h.Length] }
func (f *framed) Landed(_ *frame.Header, _ []byte, err error) error { return err }
func (f *framed) Frame(*frame.Header, []byte) error                 { f.got <- struct{}{}; return nil }

func (f *framed) get(ctx context.Context) error {
	f.at = f.to.take()
	if err := f.conn.Send(ctx, frame.Frame{Header: frame.Header{Type: frame.Message}, Payload: f.req[:]}); err != nil {
		return err
	}
	<-f.got
	return nil
}

type server struct {
	framed
	ctx   context.Context
	from  *blocks
	reply [2]frame.Frame
}

func (s *server) Frame(*frame.Header, []byte) error {
	s.reply[0] = frame.Frame{Header: frame.Header{Type: frame.Data}, Payload: s.from.take()}
	s.reply[1] = frame.Frame{Header: frame.Header{Type: frame.Message}, Payload: s.req[:]}
	return s.conn.Send(s.ctx, s.reply[:]...)
}

// BenchmarkGet compares the bytes per second of frames with the bare loop's, in
// rounds that take turns. Ratio is the median over rounds; cpu is what frames use of the
// processors, at both ends, for one that the bare loop uses.
func BenchmarkGet(b *testing.B) {
	for _, network := range []string{"tcp", "unix", "tls"} {
		for _, size := range []int64{64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", network, size>>10), func(b *testing.B) { benchmarkGet(b, network, size) })
		}
	}
}

func benchmarkGet(b *testing.B, network string, size int64) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	from, to := newBlocks(b, size), newBlocks(b, size)

	near, far := pair(b, network)
	go serveBare(far, from)
	limit := &bare{c: near, to: to}

	near, far = pair(b, network)
	s := &server{ctx: ctx, from: from}
	s.conn = frame.NewConn(far, nil)
	f := &framed{conn: frame.NewConn(near, nil), to: to, got: make(chan struct{}, 1)}
	go s.conn.Serve(s)
	go f.conn.Serve(f)
	defer func() { _ = s.conn.Close(); _ = f.conn.Close() }()

	const round = 32 << 20
	n := int(round / size)
	b.ReportAllocs()
	b.SetBytes(round)
	var ratios []float64
	var cpu [2]time.Duration // of the bare loop, and of frames
	timed := func(get func() error, cpu *time.Duration) time.Duration {
		used := cpuTime(b)
		defer func() { *cpu += cpuTime(b) - used }()
		begin := time.Now()
		for range n {
			if err := get(); err != nil {
				b.Fatal(err)
			}
		}
		return time.Since(begin)
	}
	frames := func() error { return f.get(ctx) }
	timed(limit.get, &cpu[0])
	timed(frames, &cpu[1])
	for b.Loop() {
		b.StopTimer()
		t := timed(limit.get, &cpu[0])
		b.StartTimer()
		ratios = append(ratios, t.Seconds()/timed(frames, &cpu[1]).Seconds())
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "ratio")
	b.ReportMetric(cpu[1].Seconds()/cpu[0].Seconds(), "cpu")
	b.ReportMetric(0, "ns/op") // of a round, which means nothing
}

// cpuTime is what the process has used of the processors.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
