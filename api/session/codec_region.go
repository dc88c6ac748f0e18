package session

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/index/block"
)

// segmentBytes is what each Segment takes.
const segmentBytes = 14

// append writes the pieces of each key behind their number.
func (s *Segments) append(b []byte) []byte {
	all := s.All
	for _, n := range s.Counts {
		b = binary.LittleEndian.AppendUint16(b, n)
		for _, g := range all[:n] {
			b = binary.LittleEndian.AppendUint16(b, g.Region)
			b = binary.LittleEndian.AppendUint32(b, g.Length)
			b = binary.LittleEndian.AppendUint64(b, g.Offset)
		}
		all = all[n:]
	}
	return b
}

// decode reads those of keys keys.
func (s *Segments) decode(d *decoder, keys int) {
	s.Counts, s.All = s.Counts[:0], s.All[:0]
	for i := range keys {
		n := d.u16("segments")
		switch {
		case d.err != nil:
		case n == 0 || n > MaxSegments:
			d.fail("segments", "%d of them for key %d, want 1 to %d", n, i, MaxSegments)
		case int(n)*segmentBytes > len(d.p):
			d.fail("segments", "cut off: %d bytes are left, want %d", len(d.p), int(n)*segmentBytes)
		}
		if d.err != nil {
			return
		}
		s.Counts = append(s.Counts, n)
		for range n {
			s.All = append(s.All, Segment{Region: d.u16("region"), Length: d.u32("length"), Offset: d.u64("offset")})
		}
	}
}

// Append appends the message's bytes to b. There must be a count for each key.
func (m *RegionGetMessage) Append(b []byte) []byte {
	b = m.appendHead(b, m.Class, m.Flags, m.Deadline)
	b = m.Segments.append(b)
	return append(b, m.Hashes...)
}

// Decode reads the message from p.
func (m *RegionGetMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	n, m.Class, m.Flags, m.Deadline = m.decodeHead(&d)
	m.Segments.decode(&d, n)
	m.decodeHashes(&d, n)
	return d.end()
}

// Append appends the message's bytes to b. There must be a count and a word on its
// parent for each key.
func (m *RegionPutMessage) Append(b []byte) []byte {
	b = m.appendHead(b, m.Class, m.Flags, m.Deadline)
	b = append(b, byte(m.Durable))
	b = binary.LittleEndian.AppendUint64(b, m.TTLMS)
	for _, has := range m.HasParent {
		b = appendBool(b, has)
	}
	b = m.Segments.append(b)
	b = append(b, m.Hashes...)
	if m.Flags&FlagParents != 0 {
		b = append(b, m.Parents...)
	}
	return b
}

// Decode reads the message from p.
func (m *RegionPutMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	n, m.Class, m.Flags, m.Deadline = m.decodeHead(&d)
	m.Durable, m.TTLMS = block.TierID(d.u8("durable")), d.u64("ttl_ms")
	if d.err != nil {
		n = 0
	}
	m.HasParent = sized(m.HasParent, n)
	for i := range m.HasParent {
		m.HasParent[i] = d.bool("has_parent")
		if m.HasParent[i] && m.Flags&FlagParents == 0 {
			d.fail("has_parent", "set for key %d without parents", i)
		}
	}
	m.Segments.decode(&d, n)
	m.decodeHashes(&d, n)
	m.Parents = nil
	if m.Flags&FlagParents != 0 {
		m.Parents = d.take(n*int(m.HashLen), "parents")
	}
	return d.end()
}
