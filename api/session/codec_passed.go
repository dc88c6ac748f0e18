package session

import (
	"encoding/binary"
	"fmt"

	"github.com/kvtier/kvtier/xfer/frame"
)

// PassedMessage comes with the file of a chunk. It names those passed before of which
// the client needs to keep nothing.
type PassedMessage struct {
	Chunk  uint32
	Length uint64 // bytes of the file
	Gone   []uint32
}

// maxGone is how many chunks that are gone one message names; the others wait.
const maxGone = 252

// packetBytes is the most that a packet has: a frame with a PassedMessage.
const packetBytes = frame.HeaderBytes + 16 + 4*maxGone

// Append appends the message's bytes to b.
func (m *PassedMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.Chunk)
	b = binary.LittleEndian.AppendUint64(b, m.Length)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Gone)))
	for _, n := range m.Gone {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	return b
}

// Decode reads the message from p.
func (m *PassedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Chunk, m.Length = d.u32("chunk"), d.u64("length")
	m.Gone = sized(m.Gone, d.count("gone", 4, maxGone))
	for i := range m.Gone {
		m.Gone[i] = d.u32("gone")
	}
	return d.end()
}

// packet is the frame of a PassedMessage.
func packet(m *PassedMessage) []byte {
	p := m.Append(nil)
	h := frame.Header{Length: uint32(len(p)), Type: frame.Message, Flags: uint8(CodePassed)}
	return append(h.Append(nil), p...)
}

// parsePacket reads one.
func parsePacket(b []byte) (m PassedMessage, err error) {
	if len(b) < frame.HeaderBytes {
		return m, fmt.Errorf("%w: a packet of %d bytes", ErrMessage, len(b))
	}
	h, err := frame.ParseHeader(b[:frame.HeaderBytes])
	p := b[frame.HeaderBytes:]
	switch {
	case err != nil:
		return m, err
	case h.Type != frame.Message || Code(h.Flags) != CodePassed || int(h.Length) != len(p):
		return m, fmt.Errorf("%w: a packet of type %d, code %d, with %d of %d bytes", ErrMessage, h.Type, h.Flags, len(p), h.Length)
	}
	return m, m.Decode(p)
}
