package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/internal/invariants"
)

// codec is the protobuf codec, but for the two messages that carry payload.
// The ordinary one copies a bytes field twice and allocates it anew for every
// message, which costs more than moving the bytes; putFrame and getFrame read
// and write the same encoding and leave the payload in the buffers of the
// transport. Any protobuf client or server understands the other side.
type codec struct {
	encoding.CodecV2 // protobuf
	small            *framePool
	large            *framePool
}

func newCodec() *codec {
	return &codec{
		CodecV2: encoding.GetCodecV2(protocodec.Name),
		small:   newFramePool(16 << 10),
		large:   newFramePool(chunkBytes),
	}
}

// frame is a message that codes itself.
type frame interface {
	size() int // of the encoding, at most
	append(b []byte) ([]byte, error)
	decode(data mem.BufferSlice) error
}

// Marshal encodes v.
func (c *codec) Marshal(v any) (mem.BufferSlice, error) {
	f, ok := v.(frame)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	n := f.size()
	pool := c.large
	if n <= c.small.room {
		pool = c.small
	}
	buf := pool.Get(n)
	b, err := f.append((*buf)[:0])
	if err != nil {
		pool.Put(buf)
		return nil, err
	}
	*buf = b
	return mem.BufferSlice{mem.NewBuffer(buf, pool)}, nil
}

// Unmarshal decodes data into v.
func (c *codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(frame); ok {
		return f.decode(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// framePool keeps buffers for encoded frames. gRPC's own pools clear a buffer
// each time it is taken.
type framePool struct {
	room int
	pool sync.Pool
}

// frameSlack is room for the fields beside the payload: two hashes and numbers.
const frameSlack = 256

func newFramePool(payload int) *framePool {
	room := payload + frameSlack
	return &framePool{room: room, pool: sync.Pool{New: func() any {
		b := make([]byte, room)
		return &b
	}}}
}

// Get implements mem.BufferPool.
func (p *framePool) Get(n int) *[]byte {
	if n > p.room {
		b := make([]byte, n)
		return &b
	}
	return p.pool.Get().(*[]byte)
}

// Put implements mem.BufferPool.
func (p *framePool) Put(b *[]byte) {
	if cap(*b) != p.room {
		return
	}
	*b = (*b)[:p.room]
	invariants.Poison(*b)
	p.pool.Put(b)
}

// payload is the bytes of a received frame, in the transport's buffers.
type payload struct {
	pieces [][]byte
	bytes  int
	held   mem.BufferSlice
}

// hold keeps the buffers beyond the codec's call, until release.
func (p *payload) hold(data mem.BufferSlice) {
	data.Ref()
	p.held = append(p.held, data...)
}

// release gives the buffers back; the pieces are gone then.
func (p *payload) release() {
	p.held.Free()
	clear(p.held)
	p.held = p.held[:0]
	p.pieces, p.bytes = p.pieces[:0], 0
}

var errFrame = errors.New("malformed protobuf message")

// fields calls fn for each field of an encoded message, with the reader at its
// value: a number, or a length that the bytes follow. fn reads those it wants
// with take or skips them with false.
func fields(r *mem.Reader, fn func(num protowire.Number, n uint64, isBytes bool) (read bool, err error)) error {
	for r.Remaining() > 0 {
		tag, err := binary.ReadUvarint(r)
		if err != nil {
			return errFrame
		}
		num, typ := protowire.DecodeTag(tag)
		if num < protowire.MinValidNumber {
			return errFrame
		}
		var skip int
		switch typ {
		case protowire.VarintType:
			n, err := binary.ReadUvarint(r)
			if err != nil {
				return errFrame
			}
			if _, err := fn(num, n, false); err != nil {
				return err
			}
		case protowire.BytesType:
			n, err := binary.ReadUvarint(r)
			if err != nil || n > uint64(r.Remaining()) {
				return errFrame
			}
			read, err := fn(num, n, true)
			if err != nil {
				return err
			}
			if !read {
				skip = int(n)
			}
		case protowire.Fixed32Type:
			skip = 4
		case protowire.Fixed64Type:
			skip = 8
		default:
			return errFrame // groups: this interface has none
		}
		if _, err := r.Discard(skip); err != nil {
			return errFrame
		}
	}
	return nil
}

// take reads n bytes into scratch.
func take(r *mem.Reader, scratch []byte, n uint64) ([]byte, error) {
	if uint64(cap(scratch)) < n {
		scratch = make([]byte, n)
	}
	scratch = scratch[:n]
	if _, err := io.ReadFull(r, scratch); err != nil && n > 0 {
		return nil, errFrame
	}
	return scratch, nil
}

// views lists the next n bytes in place.
func (p *payload) views(r *mem.Reader, n uint64) error {
	var err error
	p.pieces, err = r.Peek(int(n), p.pieces[:0])
	if err != nil {
		return errFrame
	}
	p.bytes = int(n)
	if _, err := r.Discard(int(n)); err != nil {
		return errFrame
	}
	return nil
}

// putFrame is a PutRequest. To send, set data; after receiving, the payload is
// valid until release.
type putFrame struct {
	open  *pb.PutOpen
	block *pb.PutBlock
	end   bool
	data  []byte
	payload

	scratch []byte
}

func (f *putFrame) size() int {
	n := frameSlack + len(f.data)
	if f.open != nil {
		n += proto.Size(f.open)
	}
	return n
}

func (f *putFrame) append(b []byte) ([]byte, error) {
	var err error
	if f.open != nil {
		if b, err = appendMessage(b, 1, f.open); err != nil {
			return nil, err
		}
	}
	if f.block != nil {
		if b, err = appendMessage(b, 2, f.block); err != nil {
			return nil, err
		}
	}
	if f.end {
		b = protowire.AppendTag(b, 4, protowire.VarintType)
		b = protowire.AppendVarint(b, 1)
	}
	if len(f.data) > 0 {
		b = protowire.AppendTag(b, 3, protowire.BytesType)
		b = protowire.AppendBytes(b, f.data)
	}
	return b, nil
}

func appendMessage(b []byte, num protowire.Number, m proto.Message) ([]byte, error) {
	b = protowire.AppendTag(b, num, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(proto.Size(m)))
	return proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, m)
}

func (f *putFrame) decode(data mem.BufferSlice) error {
	f.release()
	f.open, f.block, f.end, f.data = nil, nil, false, nil
	var r mem.Reader
	r.Reset(data)
	defer r.Close()
	merge := func(m proto.Message, n uint64) error {
		var err error
		if f.scratch, err = take(&r, f.scratch, n); err != nil {
			return err
		}
		return proto.UnmarshalOptions{Merge: true}.Unmarshal(f.scratch, m)
	}
	err := fields(&r, func(num protowire.Number, n uint64, isBytes bool) (bool, error) {
		switch {
		case num == 1 && isBytes:
			if f.open == nil {
				f.open = new(pb.PutOpen)
			}
			return true, merge(f.open, n)
		case num == 2 && isBytes:
			if f.block == nil {
				f.block = new(pb.PutBlock)
			}
			return true, merge(f.block, n)
		case num == 3 && isBytes:
			return true, f.views(&r, n)
		case num == 4 && !isBytes:
			f.end = n != 0
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("decode PutRequest: %w", err)
	}
	f.hold(data)
	return nil
}

// getFrame is a GetResponse. To send, set data; after receiving, the payload is
// valid until release.
type getFrame struct {
	index  uint32
	reason pb.MissReason
	tier   pb.Tier
	total  uint32
	length uint32
	hasSum bool
	sum    [16]byte
	data   []byte
	payload

	scratch []byte
}

func (f *getFrame) size() int { return frameSlack + len(f.data) }

func (f *getFrame) append(b []byte) ([]byte, error) {
	num := func(n protowire.Number, v uint64) {
		if v != 0 {
			b = protowire.AppendTag(b, n, protowire.VarintType)
			b = protowire.AppendVarint(b, v)
		}
	}
	num(1, uint64(f.index))
	num(2, uint64(f.reason))
	num(3, uint64(f.tier))
	num(4, uint64(f.total))
	if f.hasSum {
		b = protowire.AppendTag(b, 5, protowire.BytesType)
		b = protowire.AppendBytes(b, f.sum[:])
	}
	num(6, uint64(f.length))
	if len(f.data) > 0 {
		b = protowire.AppendTag(b, 7, protowire.BytesType)
		b = protowire.AppendBytes(b, f.data)
	}
	return b, nil
}

func (f *getFrame) decode(data mem.BufferSlice) error {
	f.release()
	*f = getFrame{payload: f.payload, scratch: f.scratch}
	var r mem.Reader
	r.Reset(data)
	defer r.Close()
	err := fields(&r, func(num protowire.Number, n uint64, isBytes bool) (bool, error) {
		switch {
		case num == 1 && !isBytes:
			f.index = uint32(n)
		case num == 2 && !isBytes:
			f.reason = pb.MissReason(n)
		case num == 3 && !isBytes:
			f.tier = pb.Tier(n)
		case num == 4 && !isBytes:
			f.total = uint32(n)
		case num == 5 && isBytes:
			var err error
			if f.scratch, err = take(&r, f.scratch, n); err != nil {
				return true, err
			}
			f.hasSum = len(f.scratch) > 0
			f.sum = sumFromPB(f.scratch)
			return true, nil
		case num == 6 && !isBytes:
			f.length = uint32(n)
		case num == 7 && isBytes:
			return true, f.views(&r, n)
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("decode GetResponse: %w", err)
	}
	f.hold(data)
	return nil
}
