package session

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/index/block"
)

// Append appends the message's bytes to b.
func (m *WatchMessage) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(m.NS))
	b = binary.LittleEndian.AppendUint64(b, m.Tag)
	b = binary.LittleEndian.AppendUint64(b, m.Incarnation)
	b = binary.LittleEndian.AppendUint64(b, m.After)
	return appendBool(b, m.Snapshot)
}

// Decode reads the message from p.
func (m *WatchMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.NS, m.Tag = block.NamespaceID(d.u32("namespace")), d.u64("tag")
	m.Incarnation, m.After, m.Snapshot = d.u64("incarnation"), d.u64("after"), d.bool("snapshot")
	return d.end()
}

// The bits of an event.
const (
	eventHasParent = 1 << iota
	eventLast
)

// eventBytes is what an event takes beside its hashes and its name.
const eventBytes = 26

// Append appends the message's bytes to b.
func (m *EventsMessage) Append(b []byte) []byte {
	b = appendBool(b, m.Start != nil)
	if m.Start != nil {
		b = binary.LittleEndian.AppendUint64(b, m.Start.Incarnation)
		b = binary.LittleEndian.AppendUint64(b, m.Start.Seq)
		b = appendBool(b, m.Start.Resumed)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Events)))
	for i := range m.Events {
		b = appendEvent(b, &m.Events[i])
	}
	return b
}

func appendEvent(b []byte, e *block.Event) []byte {
	var bits byte
	if e.HasPar {
		bits |= eventHasParent
	}
	if e.Last {
		bits |= eventLast
	}
	name := cut(e.NS, maxReason)
	b = binary.LittleEndian.AppendUint64(b, e.Seq)
	b = append(b, byte(e.Kind), byte(e.Tier), byte(e.Reason), bits)
	b = binary.LittleEndian.AppendUint32(b, e.Len)
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Count))
	b = append(b, e.Hlen, byte(len(name)))
	b = append(b, e.Hash[:e.Hlen]...)
	if e.HasPar {
		b = append(b, e.Parent[:e.Hlen]...)
	}
	return append(b, name...)
}

// Decode reads the message from p.
func (m *EventsMessage) Decode(p []byte) error {
	d := decoder{p: p}
	m.Start = nil
	if d.bool("start") {
		m.Start = &block.WatchStart{Incarnation: d.u64("incarnation"), Seq: d.u64("seq"), Resumed: d.bool("resumed")}
	}
	m.Events = sized(m.Events, d.count("events", eventBytes, MaxKeys))
	for i := range m.Events {
		m.Events[i] = d.event()
	}
	return d.end()
}

func (d *decoder) event() (e block.Event) {
	e.Seq = d.u64("seq")
	e.Kind, e.Tier, e.Reason = block.EventKind(d.u8("kind")), block.TierID(d.u8("tier")), block.Reason(d.u8("reason"))
	bits := d.u8("bits")
	if bits&^(eventHasParent|eventLast) != 0 {
		d.fail("bits", "%#x, want %#x at most", bits, eventHasParent|eventLast)
	}
	e.HasPar, e.Last = bits&eventHasParent != 0, bits&eventLast != 0
	e.Len, e.Count = d.u32("length"), int64(d.u64("count"))
	e.Hlen = d.u8("hash_len")
	if e.Hlen > block.HashBytes {
		d.fail("hash_len", "%d bytes, at most %d", e.Hlen, block.HashBytes)
		return e
	}
	name := int(d.u8("name"))
	copy(e.Hash[:], d.take(int(e.Hlen), "hash"))
	if e.HasPar {
		copy(e.Parent[:], d.take(int(e.Hlen), "parent"))
	}
	e.NS = string(d.take(name, "name"))
	return e
}
