package xfer

import "fmt"

// Choose says which backend a transfer within this agent would use: the
// first, in the order of AddBackend, that serves the pair of memory types and
// has every descriptor of both sides registered. Errors: ErrInvalid,
// ErrNoBackend with each backend's reason (also ErrNotFound where a descriptor
// is not covered), ErrClosed.
func (a *Agent) Choose(local, remote DescList) (string, error) {
	if err := checkTransfer(Read, local, remote); err != nil {
		return "", err
	}
	bounds := make([]Bound, 2*len(local.Descs))
	var p pins
	a.mu.RLock()
	defer a.mu.RUnlock()
	b, err := a.choose("", nil, local, remote, bounds, &p)
	if err != nil {
		return "", err
	}
	p.drop()
	return b.name, nil
}

// choose finds the backend and fills bounds with the local and then the remote
// descriptors and their regions, pinned. The remote side belongs to the peer if there
// is one. It needs a.mu.
func (a *Agent) choose(hint string, peer *peer, local, remote DescList, bounds []Bound, p *pins) (*adopted, error) {
	if a.mu.closed {
		return nil, prepareError("", a.errClosed())
	}
	if hint != "" && a.find(hint) == nil {
		return nil, prepareError("", fmt.Errorf("%w: agent %s has no backend %q", ErrNotFound, a.id.Name, hint))
	}
	pair := Pair{local.Type, remote.Type}
	n := len(local.Descs)
	var reasons []error
	for _, b := range a.mu.backends {
		if (hint != "" && b.name != hint) || !b.caps.Has(pair) || !b.reaches(peer) {
			continue
		}
		there, err := b.sectionsOf(peer)
		if err == nil {
			err = b.resolve("local", &b.sections[local.Type], local, bounds[:n], p)
		}
		if err == nil {
			err = b.resolve("remote", &there[remote.Type], remote, bounds[n:], p)
		}
		if err == nil {
			return b, nil
		}
		p.drop()
		reasons = append(reasons, err)
	}
	return nil, noBackend(hint, peer, pair, reasons)
}

// reaches says whether the backend can have its remote side there: at a peer, or in
// this agent when there is none.
func (b *adopted) reaches(peer *peer) bool {
	if peer == nil {
		return b.caps.Local
	}
	return b.caps.Remote
}

// sectionsOf gives what the peer, or this agent when there is none, has registered
// with the backend. It needs the agent's mu.
func (b *adopted) sectionsOf(peer *peer) (*[memTypes]section, error) {
	if peer == nil {
		return &b.sections, nil
	}
	if pb := peer.backend(b); pb != nil {
		return &pb.sections, nil
	}
	return nil, prepareError(b.name, fmt.Errorf("%w: peer %s has no such backend", ErrNotFound, peer.id))
}

// resolve finds the registrations of a list in a section and pins them. Its error
// names the first descriptor that is not covered.
func (b *adopted) resolve(side string, s *section, l DescList, bounds []Bound, p *pins) error {
	var reg *registration
	for i, d := range l.Descs {
		if reg == nil || !reg.covers(d) { // lists mostly stay in one registration
			reg = s.find(d)
		}
		if reg == nil {
			return &Error{
				Layer: LayerPrepare, Backend: b.name, Index: i, Desc: d,
				Err: fmt.Errorf("%w: no registration covers the %s %s", ErrNotFound, side, l.Type),
			}
		}
		p.add(reg)
		bounds[i] = Bound{Desc: d, Type: l.Type, Region: reg.region}
	}
	return nil
}

// noBackend makes the error for a choice that failed.
func noBackend(hint string, peer *peer, pair Pair, reasons []error) error {
	if len(reasons) > 0 {
		return prepareError("", fmt.Errorf("%w: %w", ErrNoBackend, joined(reasons)))
	}
	where := ""
	if peer != nil {
		where = " of a peer"
	}
	if hint != "" {
		return prepareError(hint, fmt.Errorf("%w: it does not serve %s to %s%s", ErrNoBackend, pair.Local, pair.Remote, where))
	}
	return prepareError("", fmt.Errorf("%w: none serves %s to %s%s", ErrNoBackend, pair.Local, pair.Remote, where))
}

// checkTransfer refuses what is no transfer whatever is registered.
func checkTransfer(op Op, local, remote DescList) error {
	switch {
	case op != Read && op != Write:
		return prepareError("", fmt.Errorf("%w: operation %s", ErrInvalid, op))
	case local.Type >= memTypes:
		return prepareError("", fmt.Errorf("%w: local memory type %s", ErrInvalid, local.Type))
	case remote.Type >= memTypes:
		return prepareError("", fmt.Errorf("%w: remote memory type %s", ErrInvalid, remote.Type))
	case len(local.Descs) == 0:
		return prepareError("", fmt.Errorf("%w: no descriptors", ErrInvalid))
	case len(local.Descs) != len(remote.Descs):
		return prepareError("", fmt.Errorf("%w: %d local and %d remote descriptors", ErrInvalid, len(local.Descs), len(remote.Descs)))
	}
	for i, d := range local.Descs {
		if err := checkDesc(d); err != nil {
			return &Error{Layer: LayerPrepare, Index: i, Desc: d, Err: fmt.Errorf("local %w", err)}
		}
		if err := checkDesc(remote.Descs[i]); err != nil {
			return &Error{Layer: LayerPrepare, Index: i, Desc: remote.Descs[i], Err: fmt.Errorf("remote %w", err)}
		}
		if d.Len != remote.Descs[i].Len {
			return &Error{
				Layer: LayerPrepare, Index: i, Desc: remote.Descs[i],
				Err: fmt.Errorf("%w: local length %d, remote length %d", ErrInvalid, d.Len, remote.Descs[i].Len),
			}
		}
	}
	return nil
}

func checkDesc(d Desc) error {
	switch {
	case d.Len == 0:
		return fmt.Errorf("%w: length is 0", ErrInvalid)
	case d.Addr+d.Len < d.Addr:
		return fmt.Errorf("%w: address and length wrap around", ErrInvalid)
	case d.Meta != "":
		return fmt.Errorf("%w: meta %q, which only a registration has", ErrInvalid, d.Meta)
	}
	return nil
}

func prepareError(backend string, err error) error {
	return &Error{Layer: LayerPrepare, Backend: backend, Index: -1, Err: err}
}
