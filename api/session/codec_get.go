package session

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Append appends the message's bytes to b.
func (m *MatchMessage) Append(b []byte) []byte {
	b = m.appendHead(b, m.Class, m.Flags, m.Deadline)
	b = binary.LittleEndian.AppendUint32(b, m.LeaseMS)
	b = append(b, m.Hashes...)
	if m.Flags&FlagPlan != 0 {
		b = binary.LittleEndian.AppendUint64(b, uint64(m.Plan.Prefill.Token))
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(m.Plan.Prefill.Position))
		b = binary.LittleEndian.AppendUint32(b, uint32(min(m.Plan.Deadline/time.Millisecond, math.MaxUint32)))
		b = appendBool(b, m.Plan.Overlap)
	}
	if m.Flags&FlagConversation != 0 {
		b = appendText(b, m.Conversation)
	}
	return b
}

// Decode reads the message from p.
func (m *MatchMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	n, m.Class, m.Flags, m.Deadline = m.decodeHead(&d)
	m.LeaseMS = d.u32("lease_ms")
	m.decodeHashes(&d, n)
	m.Plan = block.PlanOptions{}
	if m.Flags&FlagPlan != 0 {
		token := d.u64("token")
		if token > math.MaxInt64 {
			d.fail("token", "%d ns", token)
		}
		m.Plan.Prefill = block.Prefill{Token: time.Duration(token), Position: math.Float64frombits(d.u64("position"))}
		m.Plan.Deadline = time.Duration(d.u32("within_ms")) * time.Millisecond
		m.Plan.Overlap = d.bool("overlap")
	}
	m.Conversation = ""
	if m.Flags&FlagConversation != 0 {
		m.Conversation = d.text("conversation")
	}
	return d.end()
}

// Append appends the message's bytes to b.
func (m *MatchedMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.Prefix)
	b = binary.LittleEndian.AppendUint64(b, m.Lease)
	b = binary.LittleEndian.AppendUint32(b, m.LeaseMS)
	b = binary.LittleEndian.AppendUint32(b, m.Leased)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Blocks)))
	for i := range m.Blocks {
		f := &m.Blocks[i]
		b = append(b, byte(f.State), byte(f.Tier))
		b = binary.LittleEndian.AppendUint32(b, f.Len)
	}
	if p := m.Plan; p != nil {
		b = binary.LittleEndian.AppendUint32(b, uint32(p.From))
		b = binary.LittleEndian.AppendUint32(b, uint32(p.To))
		for _, t := range []time.Duration{p.Load, p.Compute, p.Total, p.Recompute} {
			b = binary.LittleEndian.AppendUint64(b, uint64(t))
		}
	}
	return b
}

// Decode reads the message from p.
func (m *MatchedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Prefix, m.Lease, m.LeaseMS, m.Leased = d.u32("prefix"), d.u64("lease"), d.u32("lease_ms"), d.u32("leased")
	m.Blocks = sized(m.Blocks, d.count("blocks", 6, maxNamed))
	for i := range m.Blocks {
		m.Blocks[i] = block.Found{State: block.State(d.u8("state")), Tier: block.TierID(d.u8("tier")), Len: d.u32("length")}
	}
	m.Plan = nil
	if d.err == nil && len(d.p) > 0 {
		p := &block.Plan{From: int(d.u32("from")), To: int(d.u32("to"))}
		for _, t := range []*time.Duration{&p.Load, &p.Compute, &p.Total, &p.Recompute} {
			ns := d.u64("plan")
			if *t = time.Duration(ns); *t < 0 {
				d.fail("plan", "%d ns", ns)
			}
		}
		if p.From > p.To || p.To > len(m.Blocks) {
			d.fail("plan", "blocks %d to %d of %d", p.From, p.To, len(m.Blocks))
		}
		m.Plan = p
	}
	return d.end()
}

// Append appends the message's bytes to b.
func (m *GetMessage) Append(b []byte) []byte {
	b = m.appendHead(b, m.Class, m.Flags, m.Deadline)
	b = append(b, m.Hashes...)
	if m.Flags&FlagRanges != 0 {
		for _, r := range m.Ranges {
			b = binary.LittleEndian.AppendUint32(b, r.Offset)
			b = binary.LittleEndian.AppendUint32(b, r.Length)
		}
	}
	return b
}

// Decode reads the message from p.
func (m *GetMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	n, m.Class, m.Flags, m.Deadline = m.decodeHead(&d)
	m.decodeHashes(&d, n)
	m.Ranges = m.Ranges[:0]
	if m.Flags&FlagRanges != 0 && d.err == nil {
		m.Ranges = sized(m.Ranges, n)
		for i := range m.Ranges {
			m.Ranges[i] = Range{Offset: d.u32("ranges"), Length: d.u32("ranges")}
		}
	}
	return d.end()
}

// gotBytes is what each key takes in a GotMessage.
const gotBytes = 40

// Append appends the message's bytes to b.
func (m *GotMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, m.Lease)
	b = binary.LittleEndian.AppendUint32(b, m.LeaseMS)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Blocks)))
	for i := range m.Blocks {
		g := &m.Blocks[i]
		b = binary.LittleEndian.AppendUint16(b, uint16(g.Status))
		b = append(b, byte(g.Reason), byte(g.Tier))
		b = binary.LittleEndian.AppendUint32(b, g.Len)
		b = binary.LittleEndian.AppendUint32(b, g.Total)
		b = binary.LittleEndian.AppendUint32(b, g.Chunk)
		b = binary.LittleEndian.AppendUint64(b, g.Offset)
		b = append(b, g.Sum[:]...)
	}
	return b
}

// Decode reads the message from p.
func (m *GotMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Lease, m.LeaseMS = d.u64("lease"), d.u32("lease_ms")
	m.Blocks = sized(m.Blocks, d.count("blocks", gotBytes, maxNamed))
	for i := range m.Blocks {
		m.Blocks[i] = GotBlock{
			Status: Status(d.u16("status")), Reason: block.MissReason(d.u8("reason")), Tier: block.TierID(d.u8("tier")),
			Len: d.u32("length"), Total: d.u32("total"), Chunk: d.u32("chunk"), Offset: d.u64("offset"), Sum: d.sum("sum"),
		}
	}
	return d.end()
}

// Append appends the message's bytes to b.
func (m *PrefetchMessage) Append(b []byte) []byte {
	b = append(m.appendHead(b, 0, m.Flags, m.Deadline), m.Hashes...)
	if m.Flags&FlagUrgency != 0 {
		b = append(b, m.Priority)
		b = binary.LittleEndian.AppendUint32(b, m.WithinMS)
	}
	return b
}

// Decode reads the message from p.
func (m *PrefetchMessage) Decode(p []byte) error {
	d := decoder{p: p}
	var n int
	var class uint8
	n, class, m.Flags, m.Deadline = m.decodeHead(&d)
	d.plain(class, m.Flags&^FlagUrgency)
	m.decodeHashes(&d, n)
	m.Priority, m.WithinMS = 0, 0
	if m.Flags&FlagUrgency != 0 {
		m.Priority, m.WithinMS = d.u8("priority"), d.u32("within_ms")
	}
	return d.end()
}

// Append appends the message's bytes to b.
func (m *PrefetchedMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.First)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Results)))
	for _, r := range m.Results {
		b = append(b, byte(r.Reason), byte(r.Tier))
	}
	return b
}

// Decode reads the message from p.
func (m *PrefetchedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.First = d.u32("first")
	m.Results = sized(m.Results, d.count("results", 2, maxNamed))
	for i := range m.Results {
		m.Results[i] = PrefetchResult{Reason: block.MissReason(d.u8("reason")), Tier: block.TierID(d.u8("tier"))}
	}
	return d.end()
}

// Append appends the message's bytes to b.
func (m *LocateMessage) Append(b []byte) []byte { return m.appendPlain(b, m.Deadline) }

// Decode reads the message from p.
func (m *LocateMessage) Decode(p []byte) error { return m.decodePlain(p, &m.Deadline) }

// maxLocated is how many places of one key a message tells of, the nearest.
const maxLocated = 8

// locatedBytes is what each place takes in a LocatedMessage.
const locatedBytes = 13

// Append appends the message's bytes to b. Of each key it tells the nearest 8 places.
func (m *LocatedMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Places)+m.Busy))
	for _, places := range m.Places {
		places = places[:min(len(places), maxLocated)]
		b = append(b, byte(len(places)))
		for _, l := range places {
			b = append(b, byte(l.Tier))
			b = binary.LittleEndian.AppendUint64(b, uint64(l.Place))
			b = binary.LittleEndian.AppendUint32(b, l.Len)
		}
	}
	for range m.Busy {
		b = append(b, BusyKey)
	}
	return b
}

// Decode reads the message from p.
func (m *LocatedMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Places, m.Busy = sized(m.Places, d.count("keys", 1, maxNamed)), 0
	for i := range m.Places {
		n := int(d.u8("places"))
		if n == BusyKey {
			m.Busy++
			continue
		}
		if n > maxLocated || m.Busy > 0 {
			d.fail("places", "%d of them, at most %d", n, maxLocated)
		}
		if n*locatedBytes > len(d.p) {
			d.fail("places", "cut off: %d bytes are left, want %d", len(d.p), n*locatedBytes)
		}
		if d.err != nil {
			m.Places = nil
			break
		}
		m.Places[i] = sized(m.Places[i], n)
		for j := range m.Places[i] {
			m.Places[i][j] = block.Located{Tier: block.TierID(d.u8("tier")), Place: block.Place(d.u64("place")), Len: d.u32("length")}
		}
	}
	m.Places = m.Places[:len(m.Places)-min(m.Busy, len(m.Places))]
	return d.end()
}
