package shm

import (
	"encoding/binary"
	"fmt"

	"github.com/kvtier/kvtier/xfer"
)

// version is the protocol's. Both sides are of one host and as a rule of one
// release, so there is one.
const version = 1

// What a connection is for.
const (
	forLink uint8 = 1 // transfers and notifications
	forFile uint8 = 2 // the memory file of one region, then it ends
)

// hello is an initiator's first message.
type hello struct {
	purpose    uint8
	token      uint64 // of the region whose file is wanted
	self, want xfer.PeerID
}

// welcome is the answer, with one open file: the gate, or the file wanted.
type welcome struct {
	self   xfer.PeerID
	file   uint64 // the owner's number for the file, 0 for a gate
	bytes  uint64 // of the file
	reason string // why not, empty when welcome
}

// The largest of each, in bytes.
const (
	maxName   = 4 << 10
	maxReason = 1000
)

func (h *hello) encode() []byte {
	b := []byte{version, h.purpose}
	b = binary.LittleEndian.AppendUint64(b, h.token)
	return appendPeer(appendPeer(b, h.self), h.want)
}

func (h *hello) decode(b []byte) error {
	d := decoder{b: b}
	d.version("hello")
	h.purpose, h.token, h.self, h.want = d.uint8(), d.uint64(), d.peer(), d.peer()
	return d.end("hello")
}

func (w *welcome) encode() []byte {
	b := appendPeer([]byte{version}, w.self)
	b = binary.LittleEndian.AppendUint64(b, w.file)
	b = binary.LittleEndian.AppendUint64(b, w.bytes)
	return appendText(b, w.reason[:min(len(w.reason), maxReason)])
}

func (w *welcome) decode(b []byte) error {
	d := decoder{b: b}
	d.version("welcome")
	w.self, w.file, w.bytes, w.reason = d.peer(), d.uint64(), d.uint64(), d.text(maxReason)
	return d.end("welcome")
}

// grantInfo is what an initiator is told of a region that it may use.
type grantInfo struct {
	word  uint32 // of the gate
	file  uint64 // the memory file that it is in; 0: none
	bytes uint64 // of the file
	off   uint64 // of the region in the file
	addr  uint64
	len   uint64
}

func (g *grantInfo) encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, g.word)
	for _, v := range [...]uint64{g.file, g.bytes, g.off, g.addr, g.len} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func (g *grantInfo) decode(b []byte) error {
	d := decoder{b: b}
	g.word = d.uint32()
	for _, v := range [...]*uint64{&g.file, &g.bytes, &g.off, &g.addr, &g.len} {
		*v = d.uint64()
	}
	if err := d.end("grant"); err != nil {
		return err
	}
	switch {
	case g.word == 0 || g.word >= gateWords:
		return fmt.Errorf("%w: grant with word %d of %d", errProtocol, g.word, gateWords)
	case g.addr+g.len < g.addr:
		return fmt.Errorf("%w: grant of %d bytes at %#x", errProtocol, g.len, g.addr)
	case g.file != 0 && (g.len > g.bytes || g.off > g.bytes-g.len):
		return fmt.Errorf("%w: grant of %d bytes at %d in a file of %d", errProtocol, g.len, g.off, g.bytes)
	}
	return nil
}

func appendPeer(b []byte, p xfer.PeerID) []byte {
	return appendText(binary.LittleEndian.AppendUint64(b, p.Incarnation), p.Name)
}

func appendText(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
}

// decoder reads fields; after the first that is not there it gives zeros.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) take(n int) []byte {
	if d.err != nil || n > len(d.b) {
		if d.err == nil {
			d.err = fmt.Errorf("%w: cut short", errProtocol)
		}
		return make([]byte, min(n, 8))
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) uint8() uint8   { return d.take(1)[0] }
func (d *decoder) uint32() uint32 { return binary.LittleEndian.Uint32(d.take(4)) }
func (d *decoder) uint64() uint64 { return binary.LittleEndian.Uint64(d.take(8)) }

func (d *decoder) text(most int) string {
	n := int(binary.LittleEndian.Uint16(d.take(2)))
	if n > most && d.err == nil {
		d.err = fmt.Errorf("%w: text of %d bytes, at most %d", errProtocol, n, most)
	}
	if p := d.take(n); d.err == nil {
		return string(p)
	}
	return ""
}

func (d *decoder) peer() xfer.PeerID {
	id := xfer.PeerID{Incarnation: d.uint64()}
	id.Name = d.text(maxName)
	return id
}

func (d *decoder) version(what string) {
	if v := d.uint8(); d.err == nil && v != version {
		d.err = fmt.Errorf("%w: %s of version %d, want %d", errProtocol, what, v, version)
	}
}

func (d *decoder) end(what string) error {
	if d.err == nil && len(d.b) > 0 {
		d.err = fmt.Errorf("%w: %d bytes too many", errProtocol, len(d.b))
	}
	if d.err != nil {
		return fmt.Errorf("%s: %w", what, d.err)
	}
	return nil
}
