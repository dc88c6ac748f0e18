package session

import (
	"encoding/binary"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/kvtier/kvtier/index/block"
)

// Every message has an Append method, which appends its bytes, and a Decode method,
// which reads exactly those bytes again. Decode reuses the slices that the message
// has; packed hashes are not copied, they stay in the bytes that were decoded.
//
// Bytes behind a message's end are an error: what a message has is fixed by the
// version that both sides agreed on. Only the two hellos, which come before that,
// may be longer than is known here.

// decoder reads the fields of a message in order. After the first that is not there
// or cannot be, it reads zeros, and err says which field it was.
type decoder struct {
	p   []byte
	err error
}

func (d *decoder) fail(field, format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s: %s", ErrMessage, field, fmt.Sprintf(format, args...))
	}
	d.p = nil
}

// take reads n bytes; nil when they are not there.
func (d *decoder) take(n int, field string) []byte {
	if n > len(d.p) {
		d.fail(field, "cut off: %d bytes are left, want %d", len(d.p), n)
		return nil
	}
	b := d.p[:n:n]
	d.p = d.p[n:]
	return b
}

func (d *decoder) u8(field string) uint8 {
	if b := d.take(1, field); len(b) == 1 {
		return b[0]
	}
	return 0
}

func (d *decoder) u16(field string) uint16 {
	if b := d.take(2, field); len(b) == 2 {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) u32(field string) uint32 {
	if b := d.take(4, field); len(b) == 4 {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) u64(field string) uint64 {
	if b := d.take(8, field); len(b) == 8 {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (d *decoder) bool(field string) bool {
	v := d.u8(field)
	if v > 1 {
		d.fail(field, "%d, want 0 or 1", v)
	}
	return v == 1
}

func (d *decoder) sum(field string) (s block.Sum) {
	copy(s[:], d.take(len(s), field))
	return s
}

// text reads a text behind its length, of two bytes.
func (d *decoder) text(field string) string {
	n := int(d.u16(field))
	if n > MaxText {
		d.fail(field, "%d bytes, at most %d", n, MaxText)
		return ""
	}
	return string(d.take(n, field))
}

// count reads how many entries of at least size bytes follow. What they take is in
// the message, so that nobody is made to allocate more than was sent.
func (d *decoder) count(field string, size, most int) int {
	n := d.u32(field)
	switch {
	case n > uint32(most):
		d.fail(field, "%d of them, at most %d", n, most)
	case int(n)*size > len(d.p):
		d.fail(field, "cut off: %d bytes are left, want %d", len(d.p), int(n)*size)
	default:
		return int(n)
	}
	return 0
}

// end is the outcome: an error when bytes are left, too.
func (d *decoder) end() error {
	if d.err == nil && len(d.p) > 0 {
		d.fail("end", "%d bytes too many", len(d.p))
	}
	return d.err
}

// sized is a slice of n elements that reuses s.
func sized[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// cut is what of a text is sent, at most n bytes: no half of a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// appendText appends a text behind its length. One that is too long is cut.
func appendText(b []byte, s string) []byte {
	s = cut(s, MaxText)
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
}

// appendIDs appends a list of leases or grants.
func appendIDs(b []byte, ids []uint64) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(ids)))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint64(b, id)
	}
	return b
}

func (d *decoder) ids(field string, into []uint64) []uint64 {
	into = sized(into, d.count(field, 8, maxNamed))
	for i := range into {
		into[i] = d.u64(field)
	}
	return into
}

// appendStatuses appends one outcome each.
func appendStatuses(b []byte, all []Status) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(all)))
	for _, s := range all {
		b = binary.LittleEndian.AppendUint16(b, uint16(s))
	}
	return b
}

func (d *decoder) statuses(field string, into []Status) []Status {
	into = sized(into, d.count(field, 2, maxNamed))
	for i := range into {
		into[i] = Status(d.u16(field))
	}
	return into
}

// keysHead is the start of every request that names keys. Those that have no class
// or flags send zeros.
func (k *Keys) appendHead(b []byte, class uint8, flags uint16, deadline uint32) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(k.NS))
	b = binary.LittleEndian.AppendUint32(b, uint32(k.Len()))
	b = binary.LittleEndian.AppendUint64(b, k.Tag)
	b = append(b, k.HashLen, class)
	b = binary.LittleEndian.AppendUint16(b, flags)
	return binary.LittleEndian.AppendUint32(b, deadline)
}

// decodeHead reads it, and how many keys follow. The hashes are read by decodeHashes,
// behind what else the message has.
func (k *Keys) decodeHead(d *decoder) (count int, class uint8, flags uint16, deadline uint32) {
	k.NS = block.NamespaceID(d.u32("namespace"))
	count = d.count("keys", 1, maxNamed)
	k.Tag = d.u64("tag")
	k.HashLen = d.u8("hash_len")
	class, flags, deadline = d.u8("class"), d.u16("flags"), d.u32("deadline")
	if d.err == nil && !block.ValidHashLen(int(k.HashLen)) {
		d.fail("hash_len", "%d bytes, want 8, 16, 20 or 32", k.HashLen)
	}
	if d.err == nil && count == 0 {
		d.fail("keys", "0 of them, want at least one")
	}
	return count, class, flags, deadline
}

func (k *Keys) decodeHashes(d *decoder, count int) {
	k.Hashes = d.take(count*int(k.HashLen), "hashes")
}

// appendPlain writes a message of keys and a deadline only.
func (k *Keys) appendPlain(b []byte, deadline uint32) []byte {
	return append(k.appendHead(b, 0, 0, deadline), k.Hashes...)
}

// decodePlain reads it.
func (k *Keys) decodePlain(p []byte, deadline *uint32) error {
	d := decoder{p: p}
	n, class, flags, end := k.decodeHead(&d)
	*deadline = end
	d.plain(class, flags)
	k.decodeHashes(&d, n)
	return d.end()
}

// plain fails where a message has no class or flags.
func (d *decoder) plain(class uint8, flags uint16) {
	if class != 0 || flags != 0 {
		d.fail("class, flags", "%d and %#x, want 0", class, flags)
	}
}

// Append appends the message's bytes to b.
func (m *FailedMessage) Append(b []byte) []byte {
	return appendText(binary.LittleEndian.AppendUint16(b, uint16(m.Status)), m.Text)
}

// Decode reads the message from p. It fails with ErrMessage, as every Decode does.
func (m *FailedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Status, m.Text = Status(d.u16("status")), d.text("text")
	return d.end()
}
