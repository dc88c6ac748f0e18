package posix

import (
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/xfer"
)

const (
	// maxPieceBytes is the size of the largest operation. A disk is as fast with
	// 1 MiB as with more, and smaller ones share the queue better.
	maxPieceBytes = 1 << 20
	// maxJoinRead bounds what descriptors of a read are joined into. Below it an
	// operation costs more than its bytes; above, joining would only delay the
	// first done, and with it work on the bytes that overlaps the rest. There is
	// no such work after a write, and to a fast disk one operation of 1 MiB takes
	// three quarters of the time of four of 256 KiB.
	maxJoinRead  = 256 << 10
	maxJoinWrite = maxPieceBytes
	// maxBounceRead is up to which size an unaligned read is one operation with a
	// copy, rather than a direct one and its unaligned edges.
	maxBounceRead = 64 << 10
)

// mode is how a piece reaches its file.
//
//	direct    offset, length and address are aligned: O_DIRECT in place
//	bounced   by an aligned copy: O_DIRECT on whole blocks. A write is bounced
//	          only for its address; its offset and length are aligned, so that
//	          no byte beside it is written
//	buffered  through the page cache: the unaligned edges of a write, and all
//	          I/O where there is no O_DIRECT
//
// Reads are never buffered beside O_DIRECT: what direct writes put on the disk
// is then seen whatever the page cache holds, and the kernel writes dirty pages
// out before it reads the disk.
type mode uint8

const (
	direct mode = iota
	bounced
	buffered
)

// piece is one operation: at most maxPieceBytes, contiguous in the file and in
// memory.
type piece struct {
	flight *flight
	index  int // in prepared.pieces
	file   *file
	write  bool
	how    mode
	mem    uint64 // address of the described bytes
	off    int64  // where they are in the file
	n      int    // how many
	buf    int32  // registered buffer that has all of them, or -1
	ioOff  int64  // what is read or written: off and n, or the blocks around them
	ioLen  int

	at          int // where it begins in its run of pairs
	first, last int // the pairs that it has bytes of, last included

	bounce []byte // while in flight
	moved  int    // of ioLen, so far
	tries  int    // of operations that came to nothing
	res    int    // bytes moved by the last operation, or a negative errno
	next   *piece // in its flight's list
}

// pair is one descriptor pair of a transfer.
type pair struct {
	start  int // where it begins in its run
	n      int
	pieces int // how many have bytes of it

	left  int // pieces that are not complete
	moved int
	cause error
}

// part is the pieces of one device.
type part struct {
	flight    *flight
	dev       *device
	from, end int // in prepared.pieces
	next      int // first that was not started
	queued    bool
}

// prepared is a transfer, resolved.
type prepared struct {
	flight
	op     xfer.Op
	far    []xfer.Bound // the files, for error texts
	pieces []piece
	pairs  []pair
	parts  []part
}

// Prepare joins, cuts and sorts a transfer into operations.
func (b *Backend) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	p, _ := b.flights.Get().(*prepared)
	if p == nil {
		p = &prepared{}
		p.flight.wake = make(chan struct{}, 1)
	}
	p.op, p.far = op, remote
	for i := 0; i < len(local); {
		n, err := b.addRun(p, local[i:], remote[i:], i)
		if err != nil {
			b.Release(p)
			return nil, fmt.Errorf("posix prepare %s: %w", op, err)
		}
		i += n
	}
	p.split()
	return p, nil
}

// Release forgets a transfer.
func (b *Backend) Release(r xfer.Prepared) {
	p := r.(*prepared)
	p.far = nil
	clear(p.pieces)
	clear(p.parts)
	clear(p.pairs)
	p.pieces, p.pairs, p.parts = p.pieces[:0], p.pairs[:0], p.parts[:0]
	if cap(p.pieces) <= 4096 { // a huge one is not worth keeping
		b.flights.Put(p)
	}
}

// addRun adds the pieces of the first pairs that are contiguous on both sides,
// and says how many pairs these are. index is the first pair's.
func (b *Backend) addRun(p *prepared, local, remote []xfer.Bound, index int) (int, error) {
	m, okM := local[0].Region.(*memory)
	f, okF := remote[0].Region.(*file)
	if !okM || !okF || f.dev == nil {
		return 0, fmt.Errorf("%w: pair %d has regions of type %T and %T", xfer.ErrInvalid, index, local[0].Region, remote[0].Region)
	}
	maxBytes := uint64(maxJoinRead)
	if p.op == xfer.Write {
		maxBytes = maxJoinWrite
	}
	total := uint64(0)
	n := 0
	for ; n < len(local); n++ {
		l, r := &local[n], &remote[n]
		if n > 0 && (total+l.Len > maxBytes || l.Region != local[0].Region || r.Region != remote[0].Region ||
			l.Addr != local[0].Addr+total || r.Addr != remote[0].Addr+total) {
			break
		}
		if r.End() > 1<<63-1 {
			return 0, fmt.Errorf("%w: descriptor %d %v: no file is that long", xfer.ErrInvalid, index+n, r.Desc)
		}
		p.pairs = append(p.pairs, pair{start: int(total), n: int(l.Len)})
		total += l.Len
	}
	b.count.joined.Add(uint64(n - 1))

	c := cutter{p: p, mem: m, file: f, addr: local[0].Addr, off: int64(remote[0].Addr), index: index}
	c.cut(int(total), p.op == xfer.Write)
	return n, nil
}

// cutter cuts one run into pieces.
type cutter struct {
	p     *prepared
	mem   *memory
	file  *file
	addr  uint64
	off   int64
	index int // of the pair that has the next byte
	at    int
}

func (c *cutter) cut(n int, write bool) {
	if c.file.direct < 0 {
		for n > 0 {
			k := min(n, maxPieceBytes)
			c.add(buffered, write, k)
			n -= k
		}
		return
	}
	align := c.file.align
	down := func(x int64) int64 { return x / align * align }
	start, end := c.off, c.off+int64(n)
	first, last := down(start+align-1), down(end) // the whole blocks inside
	edge := buffered
	if !write {
		edge = bounced
		if (start != first || end != last) && down(end+align-1)-down(start) <= max(maxBounceRead, 2*align) {
			first = last
		}
	}
	if first >= last { // no whole block, or not worth an operation
		c.add(edge, write, n)
		return
	}
	if first > start {
		c.add(edge, write, int(first-start))
	}
	middle := direct
	if (c.addr+uint64(c.at))%c.file.memAlign != 0 {
		middle = bounced
	}
	for left := last - first; left > 0; {
		k := min(left, down(maxPieceBytes))
		c.add(middle, write, int(k))
		left -= k
	}
	if end > last {
		c.add(edge, write, int(end-last))
	}
}

// add adds the next n bytes as one piece.
func (c *cutter) add(how mode, write bool, n int) {
	p := piece{
		flight: &c.p.flight, file: c.file, write: write, how: how,
		mem: c.addr + uint64(c.at), off: c.off + int64(c.at), n: n, buf: -1, at: c.at,
	}
	p.ioOff, p.ioLen = p.off, n
	if how == bounced {
		align := c.file.align
		p.ioOff = p.off / align * align
		p.ioLen = int((p.off+int64(n)+align-1)/align*align - p.ioOff)
	} else if reg := c.mem.reg.Load(); reg != nil {
		p.buf = reg.index(p.mem-c.mem.addr, n)
	}
	c.at += n
	// Find the pairs that it has bytes of.
	pairs := c.p.pairs
	p.first = c.index
	for {
		pr := &pairs[c.index]
		pr.pieces++
		p.last = c.index
		if pr.start+pr.n > c.at {
			break
		}
		if c.index++; pr.start+pr.n == c.at {
			break
		}
	}
	c.p.pieces = append(c.p.pieces, p)
}

// split groups the pieces by device, each device's in their order.
func (p *prepared) split() {
	add := func(i int) {
		d := p.pieces[i].file.dev
		p.parts = append(p.parts, part{flight: &p.flight, dev: d, from: i, end: i + 1})
	}
	mixed := slices.ContainsFunc(p.pieces, func(q piece) bool { return q.file.dev != p.pieces[0].file.dev })
	if mixed {
		order := map[*device]int{}
		for i := range p.pieces {
			if d := p.pieces[i].file.dev; order[d] == 0 {
				order[d] = len(order) + 1
			}
		}
		slices.SortStableFunc(p.pieces, func(x, y piece) int { return order[x.file.dev] - order[y.file.dev] })
	}
	for i := range p.pieces {
		p.pieces[i].index = i
		if i == 0 || p.pieces[i].file.dev != p.pieces[i-1].file.dev {
			add(i)
			continue
		}
		p.parts[len(p.parts)-1].end = i + 1
	}
}
