package session

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/index/block"
)

// Append appends the message's bytes to b.
func (m *GrantMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(m.NS))
	b = binary.LittleEndian.AppendUint64(b, m.Tag)
	b = binary.LittleEndian.AppendUint32(b, m.Size)
	b = binary.LittleEndian.AppendUint32(b, m.Count)
	return binary.LittleEndian.AppendUint32(b, m.Deadline)
}

// Decode reads the message from p.
func (m *GrantMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.NS, m.Tag = block.NamespaceID(d.u32("namespace")), d.u64("tag")
	m.Size, m.Count, m.Deadline = d.u32("size"), d.u32("count"), d.u32("deadline")
	return d.end()
}

// Append appends the message's bytes to b.
func (m *GrantedMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.TTLMS)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Places)))
	for i := range m.Places {
		g := &m.Places[i]
		b = binary.LittleEndian.AppendUint64(b, g.Grant)
		b = binary.LittleEndian.AppendUint32(b, g.Size)
		b = binary.LittleEndian.AppendUint32(b, g.Chunk)
		b = binary.LittleEndian.AppendUint64(b, g.Offset)
	}
	return b
}

func (m *GrantedMessage) decode(d *decoder) {
	m.TTLMS = d.u32("ttl_ms")
	m.Places = sized(m.Places, d.count("places", 24, MaxKeys))
	for i := range m.Places {
		m.Places[i] = GrantedPlace{Grant: d.u64("grant"), Size: d.u32("size"), Chunk: d.u32("chunk"), Offset: d.u64("offset")}
	}
}

// Decode reads the message from p.
func (m *GrantedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.decode(&d)
	return d.end()
}

// itemBytes is what each PutItem takes.
const itemBytes = 29

// Append appends the message's bytes to b. There must be an item for each key.
func (m *PutMessage) Append(b []byte) []byte {
	b = m.appendHead(b, m.Class, m.Flags, m.Deadline)
	b = append(b, byte(m.Durable))
	b = binary.LittleEndian.AppendUint64(b, m.TTLMS)
	for i := range m.Items {
		it := &m.Items[i]
		b = binary.LittleEndian.AppendUint64(b, it.Grant)
		b = binary.LittleEndian.AppendUint32(b, it.Len)
		b = appendBool(b, it.HasParent)
		b = append(b, it.Sum[:]...)
	}
	b = append(b, m.Hashes...)
	if m.Flags&FlagParents != 0 {
		b = append(b, m.Parents...)
	}
	return b
}

// Decode reads the message from p.
func (m *PutMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	n, m.Class, m.Flags, m.Deadline = m.decodeHead(&d)
	m.Durable, m.TTLMS = block.TierID(d.u8("durable")), d.u64("ttl_ms")
	if d.err == nil && n*itemBytes > len(d.p) {
		d.fail("items", "cut off: %d bytes are left, want %d", len(d.p), n*itemBytes)
	}
	if d.err != nil {
		n = 0
	}
	m.Items = sized(m.Items, n)
	for i := range m.Items {
		it := PutItem{Grant: d.u64("grant"), Len: d.u32("length"), HasParent: d.bool("has_parent"), Sum: d.sum("sum")}
		if it.HasParent && m.Flags&FlagParents == 0 {
			d.fail("has_parent", "set for item %d without parents", i)
		}
		m.Items[i] = it
	}
	m.decodeHashes(&d, n)
	m.Parents = nil
	if m.Flags&FlagParents != 0 {
		m.Parents = d.take(n*int(m.HashLen), "parents")
	}
	return d.end()
}

// Append appends the message's bytes to b. The texts are cut to 255 bytes.
func (m *PutDoneMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Results)))
	for i := range m.Results {
		r := &m.Results[i]
		text := cut(r.Text, maxReason)
		b = binary.LittleEndian.AppendUint16(b, uint16(r.Status))
		b = append(b, byte(r.Put), byte(len(text)))
		b = append(b, text...)
	}
	return m.Grants.Append(b)
}

// Decode reads the message from p.
func (m *PutDoneMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Results = sized(m.Results, d.count("results", 4, maxNamed))
	for i := range m.Results {
		m.Results[i] = PutResult{
			Status: Status(d.u16("status")), Put: block.PutStatus(d.u8("put")), Text: string(d.take(int(d.u8("text")), "text")),
		}
	}
	m.Grants.decode(&d)
	return d.end()
}

// Append appends the message's bytes to b.
func (m *ReleaseMessage) Append(b []byte) []byte { return appendIDs(appendIDs(b, m.Leases), m.Grants) }

// Decode reads the message from p.
func (m *ReleaseMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Leases, m.Grants = d.ids("leases", m.Leases), d.ids("grants", m.Grants)
	return d.end()
}

// Append appends the message's bytes to b.
func (m *ReleasedMessage) Append(b []byte) []byte { return appendStatuses(b, m.Results) }

// Decode reads the message from p.
func (m *ReleasedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Results = d.statuses("results", m.Results)
	return d.end()
}

// Append appends the message's bytes to b.
func (m *RenewMessage) Append(b []byte) []byte {
	return appendIDs(binary.LittleEndian.AppendUint32(b, m.LeaseMS), m.Leases)
}

// Decode reads the message from p.
func (m *RenewMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.LeaseMS, m.Leases = d.u32("lease_ms"), d.ids("leases", m.Leases)
	return d.end()
}

// Append appends the message's bytes to b.
func (m *RenewedMessage) Append(b []byte) []byte { return appendStatuses(b, m.Results) }

// Decode reads the message from p.
func (m *RenewedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Results = d.statuses("results", m.Results)
	return d.end()
}

// Append appends the message's bytes to b.
func (m *RevokeMessage) Append(b []byte) []byte { return appendIDs(b, m.Grants) }

// Decode reads the message from p.
func (m *RevokeMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Grants = d.ids("grants", m.Grants)
	return d.end()
}
