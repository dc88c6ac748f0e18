// Package wire writes and reads NIXL's metadata blob: what one agent hands to
// another so that it can address its memory. It is pure: no I/O, no state, and no
// knowledge of package xfer.
//
// A blob of backends that NIXL has too (their names have no lower-case letter, such
// as "UCX") is byte for byte NIXL's. Ours rides along where a NIXL agent skips it:
//
//   - A connection entry of a backend that no NIXL agent has, [Entry], holds the
//     agent's incarnation. Entries of backends that only we have stand beside it. NIXL
//     skips both, but refuses a blob with nothing else in it, as having no common
//     backend.
//   - Sections of backends that only we have follow behind NIXL's end of the blob,
//     where no NIXL agent reads. Among the sections they would end the process of an
//     older one, which takes each for its own.
//
// A blob of a NIXL agent has no incarnation and does not say whether it is partial.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Entry is the name of the connection entry that only we have. Its bytes are the
// version (1), the kind (0 full, 1 partial), the incarnation (8) and the number of
// sections behind NIXL's end (8), integers little-endian.
const Entry = "kvtier"

const (
	entryVersion = 1
	entryBytes   = 1 + 1 + 8 + 8
)

// ErrMalformed: the bytes are not a metadata blob; the text says where they stop being one.
var ErrMalformed = errors.New("malformed metadata")

// Metadata is the contents of a blob.
type Metadata struct {
	Agent       string
	Incarnation uint64 // 0 in a blob of a NIXL agent
	Partial     bool   // only some of the registrations; false when Incarnation is 0
	Conns       []Conn
	Sections    []Section
}

// Conn says how to reach one backend.
type Conn struct {
	Backend string
	Info    []byte
}

// Section is what is registered of one memory type with one backend.
type Section struct {
	Backend string
	Type    int32 // the values are those of xfer.MemType
	Regions []Region
}

// Region is one registration.
type Region struct {
	Addr, Len, Dev uint64
	Info           []byte // what the backend says of it; may be empty
}

// shared says whether NIXL agents may have a backend of this name.
func shared(backend string) bool { return strings.ToUpper(backend) == backend }

// check refuses what a NIXL agent could not read back.
func (m *Metadata) check() error {
	if m.Agent == "" {
		return errors.New("agent name is empty")
	}
	for _, c := range m.Conns {
		switch {
		case c.Backend == "" || c.Backend == Entry:
			return fmt.Errorf("connection of backend %q", c.Backend)
		case len(c.Info) == 0:
			return fmt.Errorf("connection info of backend %s is empty", c.Backend)
		}
	}
	for _, s := range m.Sections {
		switch {
		case s.Backend == "" || s.Backend == Entry:
			return fmt.Errorf("section of backend %q", s.Backend)
		case len(s.Regions) == 0:
			return fmt.Errorf("section of backend %s is empty", s.Backend)
		}
	}
	return nil
}

// Encode writes a blob. The order of connections and of the sections of each kind
// stays. An error says what cannot be written: an empty name, connection info or
// section.
func Encode(m *Metadata) ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("encode metadata: %w", err)
	}
	var common, own []Section
	for _, s := range m.Sections {
		if m.Incarnation == 0 || shared(s.Backend) {
			common = append(common, s)
		} else {
			own = append(own, s)
		}
	}
	w := writer(magic)
	w.bytes("Agent", []byte(m.Agent))
	conns := uint64(len(m.Conns))
	if m.Incarnation != 0 {
		conns++
	}
	w.number("Conns", conns)
	for _, c := range m.Conns {
		w.bytes("t", []byte(c.Backend))
		w.bytes("c", c.Info)
	}
	if m.Incarnation != 0 {
		w.bytes("t", []byte(Entry))
		w.bytes("c", m.entry(len(own)))
	}
	w.bytes("", []byte("MemSection"))
	w.number("nixlSecElms", uint64(len(common)))
	for _, s := range common {
		w.section(s)
	}
	for _, s := range own {
		w.section(s)
	}
	return w, nil
}

// entry makes the bytes of the connection entry that only we have.
func (m *Metadata) entry(sections int) []byte {
	e := make([]byte, 2, entryBytes)
	e[0] = entryVersion
	if m.Partial {
		e[1] = 1
	}
	e = binary.LittleEndian.AppendUint64(e, m.Incarnation)
	return binary.LittleEndian.AppendUint64(e, uint64(sections))
}

// readEntry undoes entry and gives the number of sections.
func (m *Metadata) readEntry(e []byte) (uint64, error) {
	switch {
	case m.Incarnation != 0:
		return 0, fmt.Errorf("%w: two connection entries %s", ErrMalformed, Entry)
	case len(e) == 0 || e[0] != entryVersion:
		return 0, fmt.Errorf("%w: entry %s has version %x, this program reads %d", ErrMalformed, Entry, e[:min(1, len(e))], entryVersion)
	case len(e) != entryBytes:
		return 0, fmt.Errorf("%w: entry %s has %d bytes, not %d", ErrMalformed, Entry, len(e), entryBytes)
	case e[1] > 1:
		return 0, fmt.Errorf("%w: entry %s has kind %d", ErrMalformed, Entry, e[1])
	}
	m.Partial = e[1] == 1
	m.Incarnation = binary.LittleEndian.Uint64(e[2:])
	if m.Incarnation == 0 {
		return 0, fmt.Errorf("%w: incarnation is 0", ErrMalformed)
	}
	return binary.LittleEndian.Uint64(e[10:]), nil
}

// Decode reads a blob. The result does not refer to b. As in NIXL, what follows the
// end of the blob is ignored. Errors: ErrMalformed.
func Decode(b []byte) (*Metadata, error) {
	r, err := newReader(b)
	if err != nil {
		return nil, err
	}
	m := &Metadata{}
	agent, err := r.filled("Agent")
	if err != nil {
		return nil, err
	}
	m.Agent = string(agent)
	conns, err := r.number("Conns")
	if err != nil {
		return nil, err
	}
	var own uint64
	for range conns { // bounded by the bytes: each takes some
		c, err := r.conn()
		if err != nil {
			return nil, err
		}
		if c.Backend != Entry {
			m.Conns = append(m.Conns, c)
			continue
		}
		if own, err = m.readEntry(c.Info); err != nil {
			return nil, err
		}
	}
	if err := r.literal("", "MemSection"); err != nil {
		return nil, err
	}
	common, err := r.number("nixlSecElms")
	if err != nil {
		return nil, err
	}
	for _, n := range []uint64{common, own} {
		for range n {
			s, err := r.section()
			if err != nil {
				return nil, err
			}
			m.Sections = append(m.Sections, s)
		}
	}
	return m, nil
}
