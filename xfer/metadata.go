package xfer

import (
	"fmt"

	"github.com/kvtier/kvtier/xfer/wire"
)

// Metadata says how peers reach this agent: its name and incarnation, and for each
// backend with the Remote role the connection info and every registration of a bounded
// length that peers can address. A peer loads it with LoadMetadata. It is a snapshot:
// of memory registered later send PartialMetadata, of changes the whole again. Package
// wire has the format, which NIXL agents read too, though they know no removals and
// refuse a piece that was registered anew until they are told to forget this agent.
// Errors: ErrNoBackend (none has the Remote role), ErrClosed.
func (a *Agent) Metadata() ([]byte, error) {
	return a.metadata(false, func(b *adopted) []wire.Section {
		var sections []wire.Section
		for t := range MemType(memTypes) {
			if b.exposes(t) {
				sections = appendSection(sections, b.name, t, b.sections[t].regs)
			}
		}
		return sections
	})
}

// PartialMetadata is Metadata with only these registrations, for each backend that has
// them; with the connection info alone when there is no list. Errors: also ErrNotFound
// (a descriptor is not, exactly, a registration that a peer can address).
func (a *Agent) PartialMetadata(lists ...DescList) ([]byte, error) {
	for _, l := range lists {
		if err := checkRegistration(l); err != nil {
			return nil, err
		}
	}
	known := make([][]bool, len(lists))
	for i, l := range lists {
		known[i] = make([]bool, len(l.Descs))
	}
	blob, err := a.metadata(true, func(b *adopted) []wire.Section {
		var sections []wire.Section
		for i, l := range lists {
			if !b.exposes(l.Type) {
				continue
			}
			var regs []*registration
			for j, d := range l.Descs {
				if exact := b.sections[l.Type].exact(l.Type, d); len(exact) > 0 && d.Len > 0 {
					known[i][j] = true
					regs = append(regs, exact[0])
				}
			}
			sections = appendSection(sections, b.name, l.Type, regs)
		}
		return sections
	})
	if err != nil {
		return nil, err
	}
	for i, l := range lists {
		for j, d := range l.Descs {
			if !known[i][j] {
				return nil, &Error{
					Layer: LayerRegister, Index: j, Desc: d,
					Err: fmt.Errorf("partial metadata: %w: no such registration in %s that a peer can address", ErrNotFound, l.Type),
				}
			}
		}
	}
	return blob, nil
}

// metadata makes the blob of what choose picks of each backend, which is called with
// a.mu held.
func (a *Agent) metadata(partial bool, choose func(b *adopted) []wire.Section) ([]byte, error) {
	m := &wire.Metadata{Agent: a.id.Name, Incarnation: a.id.Incarnation, Partial: partial}
	a.mu.RLock()
	if a.mu.closed {
		a.mu.RUnlock()
		return nil, connectError("", a.errClosed())
	}
	for _, b := range a.mu.backends {
		if b.remote != nil {
			m.Conns = append(m.Conns, wire.Conn{Backend: b.name, Info: b.conn})
			m.Sections = append(m.Sections, choose(b)...)
		}
	}
	a.mu.RUnlock()
	if len(m.Conns) == 0 {
		return nil, connectError("", fmt.Errorf("%w: agent %s has none with the Remote role", ErrNoBackend, a.id.Name))
	}
	blob, err := wire.Encode(m)
	if err != nil {
		return nil, connectError("", fmt.Errorf("%w: %w", ErrInvalid, err))
	}
	return blob, nil
}

// appendSection adds the registrations that have a length. A piece that was registered
// more than once, which is then neighbours, is sent once: NIXL agents refuse more.
func appendSection(sections []wire.Section, backend string, t MemType, regs []*registration) []wire.Section {
	s := wire.Section{Backend: backend, Type: int32(t)}
	var last Desc
	for _, r := range regs {
		d := Desc{Addr: r.desc.Addr, Len: r.desc.Len, Dev: r.desc.Dev} // its Meta stays here
		if d.Len == 0 || d == last {
			continue
		}
		last = d
		s.Regions = append(s.Regions, wire.Region{Addr: d.Addr, Len: d.Len, Dev: d.Dev, Info: r.info})
	}
	if len(s.Regions) == 0 {
		return sections
	}
	return append(sections, s)
}
