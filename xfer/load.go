package xfer

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/kvtier/kvtier/xfer/wire"
)

// LoadMetadata makes a peer known from what its Metadata or PartialMetadata gave.
//
// The same incarnation again brings its registrations up to date: a full blob replaces
// them, a partial one adds. What is gone is found no more; requests that refer to it
// keep it until they are released, but the peer refuses them. Another incarnation is
// another life: the old one ends as by Invalidate, and requests and prepared lists
// made for it are stale. The blob that is loaded last is believed.
//
// What belongs to backends that this agent lacks is skipped. On error nothing of the
// blob is kept; an old life has ended nevertheless once the backends were asked about
// the new one. Like Invalidate it must not be called from the function of an Each.
//
// A NIXL agent's blob has no incarnation: the connection info takes its place, and
// the blob adds.
//
// Errors: ErrInvalid (malformed, this agent's own name, memory that is described
// twice in different ways, connection info that changed within a life, and what the
// backends refuse), ErrNoBackend (none in common), ErrNotFound (no connection info in
// the blob, and none was loaded), ErrUnavailable (those in common can never reach that
// peer), ErrClosed.
func (a *Agent) LoadMetadata(blob []byte) (PeerID, error) {
	m, err := wire.Decode(blob)
	if err != nil {
		return PeerID{}, connectError("", fmt.Errorf("%w: %w", ErrInvalid, err))
	}
	if m.Agent == a.id.Name {
		return PeerID{}, connectError("", fmt.Errorf("%w: metadata is of agent %s, this one's name", ErrInvalid, m.Agent))
	}
	if err := a.enterPeering(); err != nil {
		return PeerID{}, connectError("", err)
	}
	defer a.leavePeering()
	old := a.mu.peers[m.Agent] // peering keeps it as it is
	l := &loading{a: a, m: m}
	if l.id, err = identity(m, old); err != nil {
		return PeerID{}, err
	}
	if l.offers, err = a.offers(m); err != nil {
		return PeerID{}, err
	}
	if old != nil && old.id == l.id {
		l.p = old
	}
	if err := l.check(); err != nil {
		return PeerID{}, err
	}
	if l.p == nil {
		if old != nil {
			// Backends know one life of a name at a time.
			a.removePeer(old, fmt.Errorf("%w: peer %s was replaced by %s", ErrDisconnected, old.id, l.id))
		}
		l.p = a.newPeer(l.id)
	}
	if err := l.load(); err != nil {
		l.undo()
		return PeerID{}, err
	}
	l.commit()
	return l.id, nil
}

// identity says which life of an agent the blob is of.
func identity(m *wire.Metadata, old *peer) (PeerID, error) {
	id := PeerID{m.Agent, m.Incarnation}
	if id.Incarnation != 0 {
		return id, nil
	}
	if len(m.Conns) == 0 {
		if old == nil {
			return PeerID{}, connectError("", fmt.Errorf("%w: connection info of peer %q, which was not loaded", ErrNotFound, m.Agent))
		}
		return old.id, nil
	}
	h := fnv.New64a()
	for _, c := range m.Conns {
		_, _ = fmt.Fprintf(h, "%q%q", c.Backend, c.Info) // a hash takes all
	}
	id.Incarnation = max(1, h.Sum64())
	return id, nil
}

// offer is what a blob has for one backend of this agent.
type offer struct {
	b       *adopted
	conn    []byte // nil when the blob has none
	regions []offered
}

type offered struct {
	t    MemType
	desc Desc
	info []byte
}

// offers sorts a blob by this agent's Remote backends, in configured order, and
// refuses what no backend need be asked about. It needs a.peering.
func (a *Agent) offers(m *wire.Metadata) ([]offer, error) {
	var all []offer
	for _, b := range a.mu.backends {
		if b.remote == nil {
			continue
		}
		o := offer{b: b}
		for _, c := range m.Conns {
			if c.Backend != b.name {
				continue
			}
			if o.conn != nil {
				return nil, connectError(b.name, fmt.Errorf("%w: peer %s has connection info twice", ErrInvalid, m.Agent))
			}
			o.conn = c.Info
		}
		for _, s := range m.Sections {
			if s.Backend != b.name || s.Type < 0 || s.Type >= memTypes || !b.exposes(MemType(s.Type)) {
				continue
			}
			if err := o.add(MemType(s.Type), s.Regions); err != nil {
				return nil, err
			}
		}
		if err := o.unique(); err != nil {
			return nil, err
		}
		all = append(all, o)
	}
	return all, nil
}

func (o *offer) add(t MemType, regions []wire.Region) error {
	l := DescList{Type: t, Descs: make([]Desc, len(regions))}
	for i, r := range regions {
		l.Descs[i] = Desc{Addr: r.Addr, Len: r.Len, Dev: r.Dev}
	}
	if err := checkRegistration(l); err != nil {
		var e *Error
		if errors.As(err, &e) {
			e.Layer, e.Backend = LayerConnect, o.b.name
		}
		return err
	}
	for i, d := range l.Descs {
		o.regions = append(o.regions, offered{t, d, regions[i].Info})
	}
	return nil
}

// unique sorts the regions and drops those that are there twice. It refuses one piece
// with two infos.
func (o *offer) unique() error {
	slices.SortStableFunc(o.regions, compareOffered)
	var twice error
	o.regions = slices.CompactFunc(o.regions, func(x, y offered) bool {
		same := compareOffered(x, y) == 0
		if same && twice == nil && !bytes.Equal(x.info, y.info) {
			twice = connectError(o.b.name, fmt.Errorf("%w: %s %s is described twice in different ways", ErrInvalid, x.t, x.desc))
		}
		return same
	})
	return twice
}

func compareOffered(x, y offered) int {
	return cmp.Or(
		cmp.Compare(x.t, y.t),
		cmp.Compare(x.desc.Dev, y.desc.Dev),
		cmp.Compare(x.desc.Addr, y.desc.Addr),
		cmp.Compare(x.desc.Len, y.desc.Len),
	)
}

// loading is a LoadMetadata under way. What it reads of the agent is kept as it is by
// a.peering; only commit, which others see, takes a.mu.
type loading struct {
	a      *Agent
	m      *wire.Metadata
	id     PeerID
	offers []offer
	p      *peer // known, or new

	fresh []*peerBackend // that were told of the peer
	added []addition
	gone  []addition
}

// addition is a registration that comes to, or goes from, a section.
type addition struct {
	pb  *peerBackend
	t   MemType
	reg *registration
}

// check compares the blob with what is known of that life of the peer.
func (l *loading) check() error {
	common := l.p != nil
	for _, o := range l.offers {
		var known *peerBackend
		if l.p != nil {
			known = l.p.backend(o.b)
		}
		switch {
		case o.conn != nil && known != nil && !bytes.Equal(o.conn, known.conn):
			return connectError(o.b.name, fmt.Errorf("%w: connection info of peer %s has changed", ErrInvalid, l.id))
		case o.conn != nil:
			common = true
		case len(o.regions) > 0 && known == nil:
			return connectError(o.b.name, fmt.Errorf("%w: connection info of peer %s, which was not loaded", ErrNotFound, l.id))
		}
	}
	switch {
	case common:
		return nil
	case len(l.m.Conns) == 0:
		return connectError("", fmt.Errorf("%w: connection info of peer %s, which was not loaded", ErrNotFound, l.id))
	}
	names := make([]string, len(l.m.Conns))
	for i, c := range l.m.Conns {
		names[i] = c.Backend
	}
	return connectError("", fmt.Errorf("%w: peer %s has %q, agent %s has none of them with the Remote role", ErrNoBackend, l.id, names, l.a.id.Name))
}

// load tells the backends of the peer. What it did until an error, undo undoes.
func (l *loading) load() error {
	var away error
	for _, o := range l.offers {
		pb := l.p.backend(o.b)
		if pb == nil {
			if o.conn == nil {
				continue
			}
			if err := o.b.remote.LoadConnInfo(l.id, o.conn); err != nil {
				err = connectError(o.b.name, fmt.Errorf("load connection info of peer %s: %w", l.id, err))
				if errors.Is(err, ErrUnavailable) {
					away = joined([]error{away, err})
					continue // others may reach the peer
				}
				return err
			}
			pb = &peerBackend{b: o.b, conn: o.conn}
			pb.loaded.regs = make(map[*registration]struct{})
			l.fresh = append(l.fresh, pb)
		}
		if err := l.loadRegions(pb, o); err != nil {
			return connectError(o.b.name, err)
		}
	}
	if len(l.p.backends)+len(l.fresh) == 0 {
		return away
	}
	return nil
}

func (l *loading) loadRegions(pb *peerBackend, o offer) error {
	kept := make(map[*registration]bool)
	for _, r := range o.regions {
		known := pb.sections[r.t].exact(r.t, r.desc)
		if len(known) > 0 && bytes.Equal(known[0].info, r.info) {
			kept[known[0]] = true
			continue
		}
		reg, err := pb.load(l.id, r.t, r.desc, r.info)
		if err != nil {
			return err
		}
		l.added = append(l.added, addition{pb, r.t, reg})
		if len(known) > 0 { // registered anew since
			kept[known[0]] = true
			l.gone = append(l.gone, addition{pb, r.t, known[0]})
		}
	}
	if l.m.Partial || l.m.Incarnation == 0 {
		return nil
	}
	for t := range pb.sections {
		for _, reg := range pb.sections[t].regs {
			if !kept[reg] {
				l.gone = append(l.gone, addition{pb, MemType(t), reg})
			}
		}
	}
	return nil
}

func (l *loading) undo() {
	for _, n := range slices.Backward(l.added) {
		n.reg.unpin()
	}
	for _, pb := range slices.Backward(l.fresh) {
		pb.forget(l.id)
	}
	if l.a.mu.peers[l.id.Name] != l.p {
		l.p.end(nil) // it never began
	}
}

// commit shows all of it to others at once.
func (l *loading) commit() {
	a := l.a
	type place struct {
		pb *peerBackend
		t  MemType
	}
	gone, added := make(map[place]map[*registration]bool), make(map[place][]*registration)
	for _, n := range l.gone {
		at := place{n.pb, n.t}
		if gone[at] == nil {
			gone[at] = make(map[*registration]bool)
		}
		gone[at][n.reg] = true
	}
	for _, n := range l.added {
		at := place{n.pb, n.t}
		added[at] = append(added[at], n.reg)
	}
	a.mu.Lock()
	if a.mu.peers[l.id.Name] != l.p {
		a.mu.generations++
		l.p.generation = a.mu.generations
		a.mu.peers[l.id.Name] = l.p
	}
	l.p.backends = append(l.p.backends, l.fresh...)
	slices.SortFunc(l.p.backends, func(x, y *peerBackend) int {
		return cmp.Compare(slices.Index(a.mu.backends, x.b), slices.Index(a.mu.backends, y.b))
	})
	for at, regs := range gone {
		at.pb.sections[at.t].remove(regs)
	}
	for at, regs := range added {
		at.pb.sections[at.t].insert(regs)
	}
	a.mu.Unlock()
	for _, n := range l.gone {
		n.reg.unpin()
	}
}
