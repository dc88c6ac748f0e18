package session

import "encoding/binary"

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
	if m.Features&FeatureRegions == 0 {
		return b
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Regions)))
	for i := range m.Regions {
		r := &m.Regions[i]
		b = binary.LittleEndian.AppendUint64(b, r.Length)
		b = appendBool(b, r.ReadOnly)
		b = appendText(b, r.Path)
	}
	return b
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
	if m.Features&FeatureRegions == 0 || d.err != nil {
		return d.err
	}
	m.Regions = make([]HelloRegion, d.count("regions", helloRegionBytes, MaxRegions))
	for i := range m.Regions {
		m.Regions[i] = HelloRegion{Length: d.u64("length"), ReadOnly: d.bool("flags"), Path: d.text("path")}
	}
	return d.err
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
	return appendIDs(b, m.Chunks)
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
	return d.err
}
