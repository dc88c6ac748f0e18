package tcp

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer/frame"
)

// batchFrames bounds the frames that are handed to a connection at once.
const batchFrames = 128

// cursor is a place in a list of pieces.
type cursor struct {
	piece int
	off   uint32
}

// batch makes the frames of a write, some at a time.
type batch struct {
	call   uint32
	pieces []piece
	next   cursor
	frames []frame.Frame
	bytes  int64   // of memory, in frames
	size   int     // of the frames
	buf    *[]byte // small pieces are copied here
}

func (b *batch) more() bool { return b.next.piece < len(b.pieces) }

func (b *batch) free(be *Backend) { be.putBuffer(b.buf) }

// fill makes the next frames.
func (b *batch) fill(be *Backend) {
	b.frames, b.bytes, b.size = b.frames[:0], 0, 0
	if b.buf != nil {
		*b.buf = (*b.buf)[:0]
	}
	for b.more() && b.size < batchBytes && len(b.frames) < batchFrames {
		i := b.next.piece
		p := b.pieces[i]
		if b.next.off == 0 && p.n <= smallBytes && i+1 < len(b.pieces) && b.pieces[i+1].n <= smallBytes {
			if b.buf == nil {
				b.buf = be.buffer()
			}
			b.pack()
			continue
		}
		p = p.sub(b.next.off, min(p.n-b.next.off, uint32(batchBytes-b.size)))
		b.frames = append(b.frames, frame.Frame{
			Header:  frame.Header{Type: frame.Data, ID: callID(b.call, uint32(i)), Token: p.token, Offset: p.off},
			Payload: arena.View(p.local, int(p.n)),
		})
		b.bytes += int64(p.n)
		b.size += int(p.n)
		if b.next.off += p.n; b.next.off == b.pieces[i].n {
			b.next = cursor{piece: i + 1}
		}
	}
}

// pack copies small pieces into one frame.
func (b *batch) pack() {
	first, size := b.next.piece, 4
	end := first
	for ; end < len(b.pieces) && b.pieces[end].n <= smallBytes; end++ {
		if size+entryBytes+int(b.pieces[end].n) > packBytes {
			break
		}
		size += entryBytes + int(b.pieces[end].n)
	}
	buf := *b.buf
	start := len(buf)
	buf = binary.LittleEndian.AppendUint32(buf, uint32(end-first))
	for _, p := range b.pieces[first:end] {
		buf = entry{p.token, p.off, p.n}.append(buf)
	}
	for _, p := range b.pieces[first:end] {
		buf = append(buf, arena.View(p.local, int(p.n))...)
		b.bytes += int64(p.n)
	}
	*b.buf = buf
	b.size += size
	b.frames = append(b.frames, frame.Frame{
		Header:  frame.Header{Type: typeScatter, ID: callID(b.call, uint32(first))},
		Payload: buf[start:],
	})
	b.next = cursor{piece: end}
}

// bufferBytes is what small pieces of one batch need, which is full with the frame that
// makes it so.
const bufferBytes = batchBytes + packBytes

// buffer lends memory for small pieces.
func (b *Backend) buffer() *[]byte {
	if p, ok := b.buffers.Get().(*[]byte); ok {
		return p
	}
	p := new([]byte)
	*p = make([]byte, 0, bufferBytes)
	return p
}

func (b *Backend) putBuffer(p *[]byte) {
	if p != nil {
		*p = (*p)[:0]
		b.buffers.Put(p)
	}
}
