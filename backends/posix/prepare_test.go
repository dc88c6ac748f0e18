package posix

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// TestPrepare shows how transfers are joined and cut. A pair is written as
// memory offset, file offset and length; an operation as mode, file offset and
// length of what is read or written, and the pairs that it serves.
func TestPrepare(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	type p struct {
		file     int
		mem, off uint64
		n        uint64
	}
	for _, tt := range []struct {
		name  string
		op    xfer.Op
		pairs []p
		want  string
	}{
		{"one", xfer.Read, []p{{0, 0, 0, mib}}, "direct 0 1048576 0-0"},
		{"quarters stay", xfer.Read, []p{{0, 0, 0, 256 * kib}, {0, 256 * kib, 256 * kib, 256 * kib}}, "direct 0 262144 0-0, direct 262144 262144 1-1"},
		{"small are joined", xfer.Read, []p{{0, 0, 8192, 4096}, {0, 4096, 12288, 8192}, {0, 12288, 20480, 4096}}, "direct 8192 16384 0-2"},
		{"joined up to the bound", xfer.Read, []p{{0, 0, 0, 128 * kib}, {0, 128 * kib, 128 * kib, 128 * kib}, {0, 256 * kib, 256 * kib, 4 * kib}}, "direct 0 262144 0-1, direct 262144 4096 2-2"},
		{"writes are joined further", xfer.Write, []p{{0, 0, 0, 512 * kib}, {0, 512 * kib, 512 * kib, 512 * kib}, {0, mib, mib, 4096}}, "direct 0 1048576 0-1, direct 1048576 4096 2-2"},
		{"a gap in memory", xfer.Read, []p{{0, 0, 0, 4096}, {0, 8192, 4096, 4096}}, "direct 0 4096 0-0, direct 4096 4096 1-1"},
		{"a gap in the file", xfer.Read, []p{{0, 0, 0, 4096}, {0, 4096, 8192, 4096}}, "direct 0 4096 0-0, direct 8192 4096 1-1"},
		{"another file", xfer.Read, []p{{0, 0, 0, 4096}, {1, 4096, 4096, 4096}}, "direct 0 4096 0-0, direct 4096 4096 1-1"},
		{"another device", xfer.Read, []p{{0, 0, 0, 4096}, {2, 0, 0, 4096}, {1, 0, 0, 4096}}, "direct 0 4096 0-0, direct 0 4096 2-2, direct 0 4096 1-1"},
		{"large is cut", xfer.Write, []p{{0, 0, 0, 2*mib + 8192}}, "direct 0 1048576 0-0, direct 1048576 1048576 0-0, direct 2097152 8192 0-0"},
		{"odd joined write", xfer.Write, []p{{0, 0, 0, 3000}, {0, 3000, 3000, 3000}, {0, 6000, 6000, 3000}}, "direct 0 8192 0-2, buffered 8192 808 2-2"},
		{"odd joined read", xfer.Read, []p{{0, 0, 1, 3000}, {0, 3000, 3001, 3000}}, "bounced 0 8192 0-1"},
		{"inside a block", xfer.Write, []p{{0, 7, 5, 9}}, "buffered 5 9 0-0"},
		{"over a border", xfer.Write, []p{{0, 0, 4095, 2}}, "buffered 4095 2 0-0"},
		{"edges of a read", xfer.Read, []p{{0, 1, 4095, mib + 2}}, "bounced 0 4096 0-0, bounced 4096 1048576 0-0, bounced 1052672 4096 0-0"},
		{"memory 512", xfer.Write, []p{{0, 512, 0, 4096}}, "direct 0 4096 0-0"},
		{"memory 8", xfer.Write, []p{{0, 8, 0, 4096}}, "bounced 0 4096 0-0"},
		{"no O_DIRECT", xfer.Write, []p{{3, 8, 5, mib + 1}}, "buffered 5 1048576 0-0, buffered 1048581 1 0-0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := &Backend{}
			d, e := &device{}, &device{}
			files := []*file{
				{dev: d, direct: 9, align: 4096, memAlign: 512},
				{dev: d, direct: 9, align: 4096, memAlign: 512},
				{dev: e, direct: 9, align: 4096, memAlign: 512},
				{dev: d, direct: -1},
			}
			const base = 1 << 30
			mem := &memory{addr: base, n: 4 * mib}
			var local, remote []xfer.Bound
			for _, p := range tt.pairs {
				local = append(local, xfer.Bound{Region: mem, Desc: xfer.Desc{Addr: base + p.mem, Len: p.n}})
				remote = append(remote, xfer.Bound{Region: files[p.file], Desc: xfer.Desc{Addr: p.off, Len: p.n}})
			}
			r, err := b.Prepare(tt.op, local, remote)
			if err != nil {
				t.Fatal(err)
			}
			q := r.(*prepared)
			var got []string
			left := make([]int, len(tt.pairs))
			for i, x := range q.pieces {
				got = append(got, fmt.Sprintf("%s %d %d %d-%d", [...]string{"direct", "bounced", "buffered"}[x.how], x.ioOff, x.ioLen, x.first, x.last))
				if x.index != i {
					t.Errorf("piece %d believes to be %d", i, x.index)
				}
				for j := x.first; j <= x.last; j++ {
					left[j]++
				}
			}
			if s := strings.Join(got, ", "); s != tt.want {
				t.Errorf("got  %s\nwant %s", s, tt.want)
			}
			for i, n := range left {
				if q.pairs[i].pieces != n {
					t.Errorf("pair %d counts %d pieces, %d name it", i, q.pairs[i].pieces, n)
				}
			}
			for _, pt := range q.parts {
				for _, x := range q.pieces[pt.from:pt.end] {
					if x.file.dev != pt.dev {
						t.Error("a piece is queued at another device")
					}
				}
			}
			b.Release(r)
		})
	}
}

// Memory is registered in buffers of 1 GiB; what straddles two has none.
func TestBufferIndex(t *testing.T) {
	r := &registered{index0: []uint32{7, 3}}
	for _, tt := range []struct {
		off  uint64
		n    int
		want int32
	}{{0, 1, 7}, {maxBufferLen - 4096, 4096, 7}, {maxBufferLen - 4096, 4097, -1}, {maxBufferLen, 1 << 20, 3}} {
		if got := r.index(tt.off, tt.n); got != tt.want {
			t.Errorf("[%d,+%d) is in buffer %d, want %d", tt.off, tt.n, got, tt.want)
		}
	}
}

// The queue lets transfers of one device take turns.
func TestDeviceTurns(t *testing.T) {
	d, err := newDevice(2, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	f := &file{dev: d}
	newPart := func(n int, p piece) (*part, []piece) {
		pt := &part{flight: &flight{wake: make(chan struct{}, 1)}, dev: d}
		p.flight, p.file = pt.flight, f
		ps := make([]piece, n)
		for i := range ps {
			ps[i] = p
		}
		return pt, ps
	}
	admit := func(pt *part, ps []piece, want int) {
		t.Helper()
		if n, _, _ := d.admit(pt, ps); n != want {
			t.Fatalf("room for %d pieces, want %d", n, want)
		}
	}
	woken := func(pt *part) bool { return len(pt.flight.wake) > 0 }

	long, ls := newPart(4, piece{ioLen: 4096})
	short, ss := newPart(1, piece{ioLen: 4096})
	admit(long, ls, 2)
	admit(long, ls[2:], 0)
	admit(short, ss, 0)
	d.release(&ls[0])
	admit(long, ls[2:], 1) // its turn; then it queues behind the short one
	if !woken(short) {
		t.Error("the next in the queue was not woken")
	}
	admit(long, ls[3:], 0)
	d.release(&ls[1])
	admit(long, ls[3:], 0)
	admit(short, ss, 1)
	d.leave(long)
	d.release(&ls[2])
	d.release(&ss[0])
	if ops, bytes := d.load(); ops != 0 || bytes != 0 || len(d.mu.waiting) != 0 {
		t.Errorf("%d operations of %d bytes, %d waiting", ops, bytes, len(d.mu.waiting))
	}

	big, bs := newPart(2, piece{ioLen: 2 << 20}) // more than there is ever room for goes alone
	admit(big, bs, 1)
	d.release(&bs[0])
	admit(big, bs[1:], 1)
	d.release(&bs[1])

	// Writes of one file in the page cache and beside it exclude each other.
	dw, dws := newPart(1, piece{ioLen: 4096, write: true, how: direct})
	bw, bws := newPart(1, piece{ioLen: 10, write: true, how: buffered})
	admit(dw, dws, 1)
	admit(bw, bws, 0)
	d.release(&dws[0])
	if !woken(bw) {
		t.Error("a buffered write was not woken when the direct one ended")
	}
	admit(bw, bws, 1)
	admit(dw, dws, 0)
	d.release(&bws[0])
	admit(dw, dws, 1)
	d.release(&dws[0])
}
