package session

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/index/block"
)

// Append appends the message's bytes to b.
func (m *ReportPrefillMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(m.NS))
	b = binary.LittleEndian.AppendUint64(b, m.Tag)
	b = binary.LittleEndian.AppendUint32(b, m.Position)
	b = binary.LittleEndian.AppendUint32(b, m.Tokens)
	return binary.LittleEndian.AppendUint64(b, m.Micros)
}

// Decode reads the message from p.
func (m *ReportPrefillMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.NS, m.Tag = block.NamespaceID(d.u32("namespace")), d.u64("tag")
	m.Position, m.Tokens, m.Micros = d.u32("position"), d.u32("tokens"), d.u64("micros")
	return d.end()
}

// Append appends the message's bytes to b: none.
func (*ReportedMessage) Append(b []byte) []byte { return b }

// Decode reads the message from p.
func (*ReportedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	return d.end()
}
