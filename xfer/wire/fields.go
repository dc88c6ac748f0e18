package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
)

// magic begins every stream of NIXL's serializer. Fields follow: a tag without a
// length, the payload's length in 8 bytes little-endian, the payload, a bar.
const magic = "nixlSerDes|"

const (
	lengthBytes = 8
	descBytes   = 24 // address, length, device
)

// writer is the stream so far.
type writer []byte

func (w *writer) bytes(tag string, payload []byte) {
	*w = append(*w, tag...)
	*w = binary.LittleEndian.AppendUint64(*w, uint64(len(payload)))
	*w = append(*w, payload...)
	*w = append(*w, '|')
}

func (w *writer) number(tag string, n uint64) {
	w.bytes(tag, binary.LittleEndian.AppendUint64(nil, n))
}

func (w *writer) section(s Section) {
	w.bytes("bknd", []byte(s.Backend))
	w.bytes("nixlDList", []byte("nixlSDList"))
	w.bytes("t", binary.LittleEndian.AppendUint32(nil, uint32(s.Type)))
	w.number("n", uint64(len(s.Regions)))
	var payload []byte
	for _, r := range s.Regions {
		payload = binary.LittleEndian.AppendUint64(payload[:0], r.Addr)
		payload = binary.LittleEndian.AppendUint64(payload, r.Len)
		payload = binary.LittleEndian.AppendUint64(payload, r.Dev)
		w.bytes("", append(payload, r.Info...))
	}
}

// reader is what is left of a stream.
type reader struct {
	rest []byte
	size int // of the whole stream
}

func newReader(b []byte) (*reader, error) {
	if !bytes.HasPrefix(b, []byte(magic)) {
		return nil, fmt.Errorf("%w: it does not begin with %s", ErrMalformed, magic)
	}
	return &reader{rest: b[len(magic):], size: len(b)}, nil
}

// at is the offset of what is read next.
func (r *reader) at() int { return r.size - len(r.rest) }

// field reads the next field, which must have this tag. The payload is part of the
// stream.
func (r *reader) field(tag string) ([]byte, error) {
	at := r.at()
	rest, ok := bytes.CutPrefix(r.rest, []byte(tag))
	if !ok || len(rest) < lengthBytes {
		return nil, fmt.Errorf("%w: no field %q at byte %d", ErrMalformed, tag, at)
	}
	n := binary.LittleEndian.Uint64(rest)
	rest = rest[lengthBytes:]
	if n >= uint64(len(rest)) || rest[n] != '|' {
		return nil, fmt.Errorf("%w: field %q at byte %d does not end at its length %d", ErrMalformed, tag, at, n)
	}
	r.rest = rest[n+1:]
	return rest[:n:n], nil
}

// filled reads a field that may not be empty.
func (r *reader) filled(tag string) ([]byte, error) {
	at := r.at()
	b, err := r.field(tag)
	if err == nil && len(b) == 0 {
		return nil, fmt.Errorf("%w: field %q at byte %d is empty", ErrMalformed, tag, at)
	}
	return b, err
}

// sized reads a field of a fixed size.
func (r *reader) sized(tag string, n int) ([]byte, error) {
	at := r.at()
	b, err := r.field(tag)
	if err == nil && len(b) != n {
		return nil, fmt.Errorf("%w: field %q at byte %d has %d bytes, not %d", ErrMalformed, tag, at, len(b), n)
	}
	return b, err
}

func (r *reader) number(tag string) (uint64, error) {
	b, err := r.sized(tag, 8)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b), nil
}

func (r *reader) literal(tag, want string) error {
	at := r.at()
	b, err := r.field(tag)
	if err == nil && string(b) != want {
		return fmt.Errorf("%w: field %q at byte %d is %.20q, not %q", ErrMalformed, tag, at, b, want)
	}
	return err
}

func (r *reader) conn() (Conn, error) {
	backend, err := r.filled("t")
	if err != nil {
		return Conn{}, err
	}
	info, err := r.filled("c")
	if err != nil {
		return Conn{}, err
	}
	return Conn{Backend: string(backend), Info: slices.Clone(info)}, nil
}

func (r *reader) section() (Section, error) {
	at := r.at()
	backend, err := r.filled("bknd")
	if err != nil {
		return Section{}, err
	}
	if string(backend) == Entry {
		return Section{}, fmt.Errorf("%w: section of backend %q at byte %d", ErrMalformed, backend, at)
	}
	if err := r.literal("nixlDList", "nixlSDList"); err != nil {
		return Section{}, err
	}
	t, err := r.sized("t", 4)
	if err != nil {
		return Section{}, err
	}
	n, err := r.number("n")
	if err != nil {
		return Section{}, err
	}
	if n == 0 {
		return Section{}, fmt.Errorf("%w: section at byte %d is empty", ErrMalformed, at)
	}
	s := Section{Backend: string(backend), Type: int32(binary.LittleEndian.Uint32(t))}
	for range n { // bounded by the bytes: each takes some
		at := r.at()
		b, err := r.field("")
		if err != nil {
			return Section{}, err
		}
		if len(b) < descBytes {
			return Section{}, fmt.Errorf("%w: descriptor at byte %d has %d bytes, not %d or more", ErrMalformed, at, len(b), descBytes)
		}
		s.Regions = append(s.Regions, Region{
			Addr: binary.LittleEndian.Uint64(b),
			Len:  binary.LittleEndian.Uint64(b[8:]),
			Dev:  binary.LittleEndian.Uint64(b[16:]),
			Info: bytes.Clone(b[descBytes:]),
		})
	}
	return s, nil
}
