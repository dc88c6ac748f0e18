// Package frame carries framed messages and bytes over a stream: a TCP or TLS
// connection, or a unix socket. It is what the tcp and shm backends and the
// sessions of the store have in common, so that their messages pass between each
// other's data. docs/protocol.md describes, byte by byte, the header and the frames that
// sessions use; types 7 to 10, and what payloads of theirs mean, are the backends'.
//
// A frame is a header of 32 bytes and a payload whose length the header gives, so
// that a reader never loses its place: what it does not want it skips. Data frames
// carry bytes for memory of the receiver, which are read straight into it.
package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Sizes, in bytes.
const (
	HeaderBytes = 32
	// MaxData is the largest payload of a data frame: small, so that messages get
	// between, and so that what was read is still in the cache when it is hashed.
	MaxData = 256 << 10
	// MaxMessage is the largest payload of any other frame that is taken. Two users may
	// have agreed on less for their messages.
	MaxMessage = 1 << 20
	// MaxSkipped is the largest payload of a message that is skipped, so that one that is
	// too long can be refused and the connection goes on.
	MaxSkipped = 16 << 20
	// MaxHello is the largest payload of a hello: nobody is known yet who could be
	// trusted with more memory.
	MaxHello = 64 << 10
)

// Type says what a frame is.
type Type uint8

// The types of frames. Ping, Pong and Bye are the connection's own; the others are
// given to its user.
const (
	Hello   Type = 1  // the first frame of each side
	Data    Type = 2  // payload for Offset of the receiver's Token
	Message Type = 3  // a message of the user's, with a code in Flags
	Ping    Type = 4  // answered by Pong with the same ID
	Pong    Type = 5  //
	Bye     Type = 6  // the sender closes the connection; payload: why, text
	Flush   Type = 7  // asks for a Done with the same ID, once all data before it has landed
	Done    Type = 8  // Status, payload: text
	Read    Type = 9  // asks for data frames to a window of the sender's, and a Done
	Note    Type = 10 // a notification, answered by Done
)

// ErrFrame: what arrived is not a frame. The connection cannot go on.
var ErrFrame = errors.New("not a frame")

// Header begins each frame. All fields are little-endian, in this order.
type Header struct {
	Length uint32 // bytes of payload that follow
	Type   Type
	Flags  uint8
	Status uint16
	ID     uint64 // of the request that the frame belongs to
	Token  uint64 // of the window of the receiver's that data goes to
	Offset uint64 // in that window
}

// Append appends the header's 32 bytes to b.
func (h *Header) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, h.Length)
	b = append(b, byte(h.Type), h.Flags)
	b = binary.LittleEndian.AppendUint16(b, h.Status)
	b = binary.LittleEndian.AppendUint64(b, h.ID)
	b = binary.LittleEndian.AppendUint64(b, h.Token)
	return binary.LittleEndian.AppendUint64(b, h.Offset)
}

// ParseHeader reads a header from the first 32 bytes of b. It is an ErrFrame when
// the length is more than a frame of its type may have, or the type is 0; unknown
// types are the receiver's to skip.
func ParseHeader(b []byte) (h Header, err error) {
	if len(b) < HeaderBytes {
		return h, fmt.Errorf("%w: %d bytes, a header has %d", ErrFrame, len(b), HeaderBytes)
	}
	h = Header{
		Length: binary.LittleEndian.Uint32(b),
		Type:   Type(b[4]),
		Flags:  b[5],
		Status: binary.LittleEndian.Uint16(b[6:]),
		ID:     binary.LittleEndian.Uint64(b[8:]),
		Token:  binary.LittleEndian.Uint64(b[16:]),
		Offset: binary.LittleEndian.Uint64(b[24:]),
	}
	most := uint32(MaxMessage)
	switch h.Type {
	case Data:
		most = MaxData
	case Message:
		most = MaxSkipped
	}
	switch {
	case h.Type == 0:
		return h, fmt.Errorf("%w: type 0", ErrFrame)
	case h.Length > most:
		return h, fmt.Errorf("%w: type %d with %d bytes, at most %d", ErrFrame, h.Type, h.Length, most)
	}
	return h, nil
}
