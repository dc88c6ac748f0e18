package tcp

import (
	"encoding/binary"
	"fmt"
	"net"
	"strconv"

	"github.com/kvtier/kvtier/xfer"
)

const (
	magic = "KVTA" // of the hello between agents

	// minVersion and maxVersion are the versions of the protocol spoken here.
	minVersion, maxVersion = 1, 1

	infoVersion = 1 // of ConnInfo and RegionInfo

	maxNameBytes = 1024 // of agents and addresses
	maxAddresses = 16
)

// hello is what the dialer says first.
type hello struct {
	min, max uint16      // versions
	from, to xfer.PeerID // who I am, and whom I want
	line     uint64      // which of my connections to you: a new one replaces the old
}

func (h *hello) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint16(b, h.min)
	b = binary.LittleEndian.AppendUint16(b, h.max)
	b = appendPeer(b, h.from)
	b = appendPeer(b, h.to)
	return binary.LittleEndian.AppendUint64(b, h.line)
}

func parseHello(b []byte) (h hello, err error) {
	d := decoder{b: b}
	d.magic()
	h.min, h.max = d.u16(), d.u16()
	h.from, h.to = d.peer(), d.peer()
	h.line = d.u64()
	// Later versions may say more.
	return h, d.err("hello")
}

// What an answer to a hello says.
const (
	helloOK       = 0
	helloStranger = 1 // I am not whom you want
	helloVersion  = 2 // no version that both speak
)

// answer is what the acceptor says to a hello.
type answer struct {
	status   uint16
	version  uint16 // the one to speak; the highest I know where there is none
	calls    uint32 // unanswered calls that a connection may have
	identity xfer.PeerID
}

func (a *answer) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint16(b, a.status)
	b = binary.LittleEndian.AppendUint16(b, a.version)
	b = binary.LittleEndian.AppendUint32(b, a.calls)
	return appendPeer(b, a.identity)
}

func parseAnswer(b []byte) (a answer, err error) {
	d := decoder{b: b}
	d.magic()
	a.status, a.version = d.u16(), d.u16()
	a.calls = d.u32()
	a.identity = d.peer()
	return a, d.err("answer to a hello")
}

// appendConnInfo writes addresses, each host:port.
func appendConnInfo(b []byte, addrs []string) []byte {
	b = append(b, infoVersion, byte(len(addrs)))
	for _, a := range addrs {
		b = appendString(b, a)
	}
	return b
}

func parseConnInfo(b []byte) ([]string, error) {
	d := decoder{b: b}
	if v := d.u8(); v != infoVersion && !d.bad {
		return nil, fmt.Errorf("%w: connection info of version %d, want %d", xfer.ErrInvalid, v, infoVersion)
	}
	n := int(d.u8())
	if n == 0 || n > maxAddresses {
		d.bad = true
	}
	var addrs []string
	for range n {
		a := d.string()
		if d.bad {
			break
		}
		if err := checkAddress(a); err != nil {
			return nil, err
		}
		addrs = append(addrs, a)
	}
	if err := d.end("connection info"); err != nil {
		return nil, fmt.Errorf("%w: %w", xfer.ErrInvalid, err)
	}
	return addrs, nil
}

// checkAddress wants a host (IPv4, IPv6 in brackets, or a name) and a port.
func checkAddress(a string) error {
	host, port, err := net.SplitHostPort(a)
	if err != nil {
		return fmt.Errorf("%w: address %q: %w", xfer.ErrInvalid, a, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); host == "" || err != nil || n == 0 {
		return fmt.Errorf("%w: address %q: want host:port with a port of 1 to 65535", xfer.ErrInvalid, a)
	}
	return nil
}

// regionInfo is how a peer addresses a region.
type regionInfo struct{ token, base, n uint64 }

func (r regionInfo) append(b []byte) []byte {
	b = append(b, infoVersion)
	b = binary.LittleEndian.AppendUint64(b, r.token)
	b = binary.LittleEndian.AppendUint64(b, r.base)
	return binary.LittleEndian.AppendUint64(b, r.n)
}

func parseRegionInfo(b []byte) (r regionInfo, err error) {
	d := decoder{b: b}
	if v := d.u8(); v != infoVersion && !d.bad {
		return r, fmt.Errorf("%w: region info of version %d, want %d", xfer.ErrInvalid, v, infoVersion)
	}
	r = regionInfo{d.u64(), d.u64(), d.u64()}
	if err := d.end("region info"); err != nil {
		return r, fmt.Errorf("%w: %w", xfer.ErrInvalid, err)
	}
	return r, nil
}

func appendPeer(b []byte, p xfer.PeerID) []byte {
	b = appendString(b, p.Name)
	return binary.LittleEndian.AppendUint64(b, p.Incarnation)
}

func appendString(b []byte, s string) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// decoder reads fields one by one; once one is missing all that follow are zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if d.bad || n > len(d.b) {
		d.bad = true
		return make([]byte, n)
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) u8() uint8   { return d.take(1)[0] }
func (d *decoder) u16() uint16 { return binary.LittleEndian.Uint16(d.take(2)) }
func (d *decoder) u32() uint32 { return binary.LittleEndian.Uint32(d.take(4)) }
func (d *decoder) u64() uint64 { return binary.LittleEndian.Uint64(d.take(8)) }

func (d *decoder) magic() {
	if string(d.take(len(magic))) != magic {
		d.bad = true
	}
}

func (d *decoder) string() string {
	n := int(d.u16())
	if n > maxNameBytes {
		d.bad = true
		return ""
	}
	return string(d.take(n))
}

func (d *decoder) peer() xfer.PeerID {
	return xfer.PeerID{Name: d.string(), Incarnation: d.u64()}
}

// err tells whether all fields were there.
func (d *decoder) err(what string) error {
	if d.bad {
		return fmt.Errorf("%w: %s cannot be read", errProtocol, what)
	}
	return nil
}

// end is err, and nothing may follow.
func (d *decoder) end(what string) error {
	if err := d.err(what); err != nil {
		return err
	}
	if len(d.b) > 0 {
		return fmt.Errorf("%w: %s has %d bytes too many", errProtocol, what, len(d.b))
	}
	return nil
}
