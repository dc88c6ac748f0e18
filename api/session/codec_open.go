package session

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/index/block"
)

// maxFields is how many fields a descriptor may come with: more than there are.
const maxFields = 64

// Append appends the message's bytes to b.
func (m *OpenMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.Deadline)
	b = binary.LittleEndian.AppendUint16(b, m.Flags)
	b = binary.LittleEndian.AppendUint64(b, m.TTLMS)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Fields)))
	for _, f := range m.Fields {
		b = appendText(appendText(b, f.Name), f.Value)
	}
	return b
}

// Decode reads the message from p.
func (m *OpenMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Deadline, m.Flags, m.TTLMS = d.u32("deadline"), d.u16("flags"), d.u64("ttl_ms")
	n := int(d.u16("fields"))
	if n > maxFields {
		d.fail("fields", "%d of them, at most %d", n, maxFields)
		n = 0
	}
	m.Fields = sized(m.Fields, n)
	for i := range m.Fields {
		m.Fields[i] = block.Field{Name: d.text("fields"), Value: d.text("fields")}
	}
	return d.end()
}

// Append appends the message's bytes to b.
func (m *OpenedMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(m.NS))
	b = binary.LittleEndian.AppendUint64(b, m.Tag)
	b = append(b, m.HashLen)
	b = binary.LittleEndian.AppendUint32(b, m.Epoch)
	b = binary.LittleEndian.AppendUint64(b, m.TTLMS)
	b = binary.LittleEndian.AppendUint64(b, m.BlockBytes)
	return binary.LittleEndian.AppendUint64(b, m.MaxBlockBytes)
}

// Decode reads the message from p.
func (m *OpenedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.NS, m.Tag, m.HashLen = block.NamespaceID(d.u32("id")), d.u64("tag"), d.u8("hash_len")
	m.Epoch, m.TTLMS = d.u32("epoch"), d.u64("ttl_ms")
	m.BlockBytes, m.MaxBlockBytes = d.u64("block_bytes"), d.u64("max_block_bytes")
	return d.end()
}

// Append appends the message's bytes to b.
func (m *PinMessage) Append(b []byte) []byte {
	return append(m.appendHead(b, 0, m.Flags, m.Deadline), m.Hashes...)
}

// Decode reads the message from p.
func (m *PinMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	var class uint8
	n, class, m.Flags, m.Deadline = m.decodeHead(&d)
	d.plain(class, m.Flags&^FlagUnpin)
	m.decodeHashes(&d, n)
	return d.end()
}

// Append appends the message's bytes to b.
func (m *PinnedMessage) Append(b []byte) []byte { return appendStatuses(b, m.Results) }

// Decode reads the message from p.
func (m *PinnedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Results = d.statuses("results", m.Results)
	return d.end()
}
