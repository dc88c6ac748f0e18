package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/kvtier/kvtier/xfer/frame"
)

// The types of frames that this protocol has beside those of package frame.
const (
	typeScatter frame.Type = 32 // pieces for several places of the receiver's
	typeGather  frame.Type = 33 // whole pieces of a read, one behind the other
	typeCancel  frame.Type = 34 // a read is no longer wanted
)

// What Done says.
const (
	statusOK       = 0
	statusRefused  = 1 // payload: spans of pieces that were refused
	statusBusy     = 2 // nothing was done; later it may be
	statusCanceled = 3
)

const (
	entryBytes = 20
	spanBytes  = 8

	// maxEntries bounds the pieces of one read, and so what a server keeps for it.
	maxEntries = 3072
	// smallBytes is the length of a piece up to which copying it into a frame with
	// others is cheaper than a frame of its own.
	smallBytes = 4 << 10
	// packBytes is the size of a frame that carries several small pieces.
	packBytes = 128 << 10
	// batchBytes is what is handed to a connection at once: large enough for the
	// kernel, small enough for others to get in between.
	batchBytes = 512 << 10
	// maxPieceBytes bounds one piece, whose length is written in 32 bits.
	maxPieceBytes = 1 << 30
	// maxSpans bounds what is remembered of the refusals of one call. Beyond it all
	// of the call counts as refused.
	maxSpans = 1024
)

// errProtocol: the peer sent what it must not. The connection cannot go on.
var errProtocol = errors.New("protocol error")

func callID(call, piece uint32) uint64 { return uint64(call)<<32 | uint64(piece) }

func splitID(id uint64) (call, piece uint32) { return uint32(id >> 32), uint32(id) }

// entry is a piece of the peer's registered memory.
type entry struct {
	token, off uint64
	n          uint32
}

func (e entry) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.token)
	b = binary.LittleEndian.AppendUint64(b, e.off)
	return binary.LittleEndian.AppendUint32(b, e.n)
}

// entries is a list of them as it was received.
type entries []byte

func (l entries) len() int { return len(l) / entryBytes }

func (l entries) at(i int) entry {
	b := l[i*entryBytes:]
	return entry{
		token: binary.LittleEndian.Uint64(b),
		off:   binary.LittleEndian.Uint64(b[8:]),
		n:     binary.LittleEndian.Uint32(b[16:]),
	}
}

// parseRead checks the payload of a Read.
func parseRead(p []byte) (entries, error) {
	if n := len(p) / entryBytes; n == 0 || n > maxEntries || len(p)%entryBytes != 0 {
		return nil, fmt.Errorf("%w: read of %d bytes, want 1 to %d pieces of %d", errProtocol, len(p), maxEntries, entryBytes)
	}
	l := entries(p)
	for i := range l.len() {
		if n := l.at(i).n; n == 0 || n > maxPieceBytes {
			return nil, fmt.Errorf("%w: piece %d of a read has %d bytes", errProtocol, i, n)
		}
	}
	return l, nil
}

// parseScatter splits the payload of a Scatter into the places and the bytes for them.
func parseScatter(p []byte) (entries, []byte, error) {
	if len(p) < 4 {
		return nil, nil, fmt.Errorf("%w: scatter of %d bytes", errProtocol, len(p))
	}
	n := uint64(binary.LittleEndian.Uint32(p))
	p = p[4:]
	if n == 0 || n*entryBytes > uint64(len(p)) {
		return nil, nil, fmt.Errorf("%w: scatter of %d pieces in %d bytes", errProtocol, n, len(p))
	}
	l, p := entries(p[:n*entryBytes]), p[n*entryBytes:]
	var sum uint64
	for i := range l.len() {
		sum += uint64(l.at(i).n)
	}
	if sum != uint64(len(p)) {
		return nil, nil, fmt.Errorf("%w: scatter of pieces of %d bytes with %d", errProtocol, sum, len(p))
	}
	return l, p, nil
}

// span is a run of pieces of a call.
type span struct{ first, count uint32 }

// spans are the pieces of one call that were refused.
type spans struct {
	list []span
	all  bool // too many to list
}

// add appends piece i. Pieces come in rising order.
func (s *spans) add(i uint32) {
	if n := len(s.list); n > 0 {
		switch last := &s.list[n-1]; {
		case i < last.first:
			s.all = true // who sends pieces out of order is not told more
			return
		case i-last.first < last.count:
			return
		case i-last.first == last.count:
			last.count++
			return
		}
	}
	if s.all || len(s.list) == maxSpans {
		s.all = true
		return
	}
	s.list = append(s.list, span{i, 1})
}

func (s *spans) append(b []byte) []byte {
	list := s.list
	if s.all {
		list = []span{{0, math.MaxUint32}}
	}
	for _, sp := range list {
		b = binary.LittleEndian.AppendUint32(b, sp.first)
		b = binary.LittleEndian.AppendUint32(b, sp.count)
	}
	return b
}

// parseSpans reads what spans.append wrote.
func parseSpans(p []byte) ([]span, error) {
	if len(p) == 0 || len(p)%spanBytes != 0 || len(p) > maxSpans*spanBytes {
		return nil, fmt.Errorf("%w: refusals in %d bytes", errProtocol, len(p))
	}
	list := make([]span, len(p)/spanBytes)
	for i := range list {
		b := p[i*spanBytes:]
		list[i] = span{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])}
		if list[i].count == 0 {
			return nil, fmt.Errorf("%w: refusal %d of 0 pieces", errProtocol, i)
		}
		if i > 0 && uint64(list[i].first) < uint64(list[i-1].first)+uint64(list[i-1].count) {
			return nil, fmt.Errorf("%w: refusal %d is not behind the one before", errProtocol, i)
		}
	}
	return list, nil
}
