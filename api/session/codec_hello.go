package session

import (
	"encoding/binary"

	"github.com/kvtier/kvtier/xfer/frame"
)

func (d *decoder) magic() {
	if m := d.take(len(Magic), "magic"); d.err == nil && string(m) != Magic {
		d.fail("magic", "%q, want %q", m, Magic)
	}
}

// Append appends the message's bytes to b.
func (m *HelloMessage) Append(b []byte) []byte {
	b = append(b, Magic...)
	b = binary.LittleEndian.AppendUint16(b, m.MinVersion)
	b = binary.LittleEndian.AppendUint16(b, m.MaxVersion)
	b = binary.LittleEndian.AppendUint64(b, m.Features)
	b = binary.LittleEndian.AppendUint32(b, m.Calls)
	b = binary.LittleEndian.AppendUint64(b, m.Bytes)
	b = appendText(b, m.Token)
	b = appendText(b, m.Name)
	if m.Features&FeatureRegions != 0 {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Regions)))
		for i := range m.Regions {
			r := &m.Regions[i]
			b = binary.LittleEndian.AppendUint64(b, r.Length)
			b = appendBool(b, r.ReadOnly)
			b = appendText(b, r.Path)
		}
	}
	return binary.LittleEndian.AppendUint32(b, m.Message)
}

// Decode reads the message from p. Bytes behind it are those of a newer version.
func (m *HelloMessage) Decode(p []byte) error {
	d := decoder{p: p}
	d.magic()
	m.MinVersion, m.MaxVersion = d.u16("min_version"), d.u16("max_version")
	m.Features = d.u64("features")
	m.Calls, m.Bytes = d.u32("calls"), d.u64("bytes")
	m.Token, m.Name = d.text("token"), d.text("name")
	m.Regions = nil
	if m.Features&FeatureRegions != 0 {
		m.Regions = make([]HelloRegion, d.count("regions", helloRegionBytes, MaxRegions))
	}
	for i := range m.Regions {
		m.Regions[i] = HelloRegion{Length: d.u64("length"), ReadOnly: d.bool("flags"), Path: d.text("path")}
	}
	m.Message = d.messageSize()
	return d.err
}

// messageSize reads the last field of a hello. An end that ends before it is older than
// the field, and has messages of what was the size for all then.
func (d *decoder) messageSize() uint32 {
	if d.err == nil && len(d.p) == 0 {
		return frame.MaxMessage
	}
	return d.u32("message")
}

// checkMessage refuses a size of messages that no end can have.
func checkMessage(n uint32) error {
	if n < MinMessage || n > MaxTold {
		return invalid("message: %d bytes, want %d to %d", n, MinMessage, MaxTold)
	}
	return nil
}

// keysOf is how many keys a message of so many bytes can have served, at most MaxKeys:
// what an answer to Locate has for each, behind the reasons that PutDone tells, is the
// most that any message has.
func keysOf(message int) int {
	return min(MaxKeys, (message-maxTexts*maxReason-MaxText)/(1+maxLocated*locatedBytes))
}

// helloRegionBytes is what each region of a hello takes at least.
const helloRegionBytes = 11

// Append appends the message's bytes to b.
func (m *WelcomeMessage) Append(b []byte) []byte {
	b = append(b, Magic...)
	b = binary.LittleEndian.AppendUint16(b, uint16(m.Status))
	b = binary.LittleEndian.AppendUint16(b, m.Version)
	b = binary.LittleEndian.AppendUint64(b, m.Features)
	b = binary.LittleEndian.AppendUint64(b, m.Session)
	b = binary.LittleEndian.AppendUint64(b, m.Incarnation)
	b = binary.LittleEndian.AppendUint32(b, m.Calls)
	b = binary.LittleEndian.AppendUint64(b, m.Bytes)
	b = binary.LittleEndian.AppendUint32(b, m.Keys)
	b = binary.LittleEndian.AppendUint32(b, m.Grants)
	b = binary.LittleEndian.AppendUint64(b, m.GrantBytes)
	b = appendText(b, m.Text)
	b = appendText(b, m.Name)
	b = appendIDs(b, m.Chunks)
	return binary.LittleEndian.AppendUint32(b, m.Message)
}

// Decode reads the message from p. Bytes behind it are those of a newer server.
func (m *WelcomeMessage) Decode(p []byte) error {
	d := decoder{p: p}
	d.magic()
	m.Status, m.Version = Status(d.u16("status")), d.u16("version")
	m.Features, m.Session, m.Incarnation = d.u64("features"), d.u64("session"), d.u64("incarnation")
	m.Calls, m.Bytes, m.Keys = d.u32("calls"), d.u64("bytes"), d.u32("keys")
	m.Grants, m.GrantBytes = d.u32("grants"), d.u64("grant_bytes")
	m.Text, m.Name = d.text("text"), d.text("name")
	m.Chunks = sized(m.Chunks, d.count("chunks", 8, maxChunks))
	for i := range m.Chunks {
		m.Chunks[i] = d.u64("chunks")
	}
	m.Message = d.messageSize()
	return d.err
}
