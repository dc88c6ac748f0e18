package xfer

import (
	"fmt"
	"sync/atomic"
)

// PreparedList is a list that was resolved once, so that many requests can be
// made from parts of it by index. It keeps its registrations from being
// deregistered until it and the requests made from it are released. A peer's memory
// is not this agent's to keep: when that life of the peer ends, its lists are stale.
type PreparedList struct {
	a        *Agent
	peer     *peer // whose memory it is; nil for this agent's
	typ      MemType
	n        int
	bound    []boundList  // one per backend that covers the whole list, in configured order
	refs     atomic.Int64 // the owner's until Release, and one per request
	released atomic.Bool
}

type boundList struct {
	b      *adopted
	bounds []Bound
	pins   *pins
}

// Prepare resolves a list for every backend that serves its memory type and
// covers all of it; it can then be either side of a transfer. Errors:
// ErrInvalid, ErrNoBackend with each backend's reason, ErrClosed.
func (a *Agent) Prepare(l DescList) (*PreparedList, error) {
	return a.prepareList(l, "")
}

// PrepareRemote resolves a list of a peer's memory, for the remote side of transfers.
// When that life of the peer is over, Select fails with ErrDisconnected. Errors: as
// Prepare, and ErrNotFound (unknown peer).
func (a *Agent) PrepareRemote(peer string, l DescList) (*PreparedList, error) {
	if peer == "" {
		return nil, prepareError("", fmt.Errorf("%w: peer name is empty", ErrInvalid))
	}
	return a.prepareList(l, peer)
}

func (a *Agent) prepareList(l DescList, peer string) (*PreparedList, error) {
	if err := checkPrepared(l); err != nil {
		return nil, err
	}
	p := &PreparedList{a: a, typ: l.Type, n: len(l.Descs)}
	p.refs.Store(1)
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.mu.closed {
		return nil, prepareError("", a.errClosed())
	}
	if peer != "" {
		var err error
		if p.peer, err = a.peer(peer); err != nil {
			return nil, prepareError("", err)
		}
	}
	var reasons []error
	for _, b := range a.mu.backends {
		if !b.serves(l.Type) || (p.peer != nil && !b.exposes(l.Type)) {
			continue
		}
		bl := boundList{b: b, bounds: make([]Bound, len(l.Descs)), pins: &pins{}}
		there, err := b.sectionsOf(p.peer)
		if err == nil {
			err = b.resolve("listed", &there[l.Type], l, bl.bounds, bl.pins)
		}
		if err != nil {
			bl.pins.drop()
			reasons = append(reasons, err)
			continue
		}
		p.bound = append(p.bound, bl)
	}
	switch {
	case len(p.bound) > 0:
		return p, nil
	case len(reasons) > 0:
		return nil, prepareError("", fmt.Errorf("%w: %w", ErrNoBackend, joined(reasons)))
	}
	return nil, prepareError("", fmt.Errorf("%w: none serves %s", ErrNoBackend, l.Type))
}

// Len is the number of descriptors.
func (p *PreparedList) Len() int { return p.n }

// Release gives the list up; requests made from it live on. It is safe to call
// twice.
func (p *PreparedList) Release() {
	if p.released.CompareAndSwap(false, true) {
		p.unref()
	}
}

// ref fails once the list was released.
func (p *PreparedList) ref() bool {
	for {
		n := p.refs.Load()
		if n == 0 || p.released.Load() {
			return false
		}
		if p.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (p *PreparedList) unref() {
	if p.refs.Add(-1) == 0 {
		for _, bl := range p.bound {
			bl.pins.drop()
		}
	}
}

// Select makes a request of the descriptors li of one prepared list and ri of
// another, pairwise; nil means all of a list. The remote list says whether the remote
// side is a peer's; RequestOptions.Peer may stay empty. The backend is the first, in
// configured order, that both lists are bound to and that serves the pair of
// memory types, or the one in the options. Errors: ErrInvalid, ErrNoBackend,
// ErrNotFound (no backend of that name), ErrDisconnected (the life of the peer that
// the list was made for is over), ErrClosed (a list or the agent).
func (a *Agent) Select(op Op, local *PreparedList, li []int, remote *PreparedList, ri []int, o *RequestOptions) (*Request, error) {
	switch {
	case op != Read && op != Write:
		return nil, prepareError("", fmt.Errorf("%w: operation %s", ErrInvalid, op))
	case local == nil || remote == nil:
		return nil, prepareError("", fmt.Errorf("%w: prepared list is nil", ErrInvalid))
	case local.a != a || remote.a != a:
		return nil, prepareError("", fmt.Errorf("%w: prepared list of another agent", ErrInvalid))
	case local.peer != nil:
		return nil, prepareError("", fmt.Errorf("%w: local prepared list is of peer %s", ErrInvalid, local.peer.id))
	case o != nil && o.Peer != "" && (remote.peer == nil || remote.peer.id.Name != o.Peer):
		return nil, prepareError("", fmt.Errorf("%w: remote prepared list is not of peer %q", ErrInvalid, o.Peer))
	}
	if err := checkNotify(o, remote.peer != nil); err != nil {
		return nil, err
	}
	if !local.ref() {
		return nil, prepareError("", fmt.Errorf("%w: local prepared list", ErrClosed))
	}
	if !remote.ref() {
		local.unref()
		return nil, prepareError("", fmt.Errorf("%w: remote prepared list", ErrClosed))
	}
	r := &Request{a: a, op: op, lists: [2]*PreparedList{local, remote}}
	b, err := r.bindSelected(local, li, remote, ri, o)
	if err != nil {
		r.drop()
		return nil, err
	}
	defer a.ops.Done()
	return r.prepare(b, o)
}

// bindSelected chooses the backend and fills the request's two sides. On
// success it has entered a.ops.
func (r *Request) bindSelected(local *PreparedList, li []int, remote *PreparedList, ri []int, o *RequestOptions) (*adopted, error) {
	a, hint := r.a, ""
	if o != nil {
		hint = o.Backend
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.mu.closed {
		return nil, prepareError("", a.errClosed())
	}
	if hint != "" && a.find(hint) == nil {
		return nil, prepareError("", fmt.Errorf("%w: agent %s has no backend %q", ErrNotFound, a.id.Name, hint))
	}
	if remote.peer != nil {
		if err := remote.peer.over(); err != nil {
			return nil, prepareError("", err)
		}
	}
	pair := Pair{local.typ, remote.typ}
	for _, l := range local.bound {
		if (hint != "" && l.b.name != hint) || !l.b.caps.Has(pair) || !l.b.reaches(remote.peer) {
			continue
		}
		for _, m := range remote.bound {
			if l.b != m.b {
				continue
			}
			if err := r.selectBounds(l.bounds, li, m.bounds, ri); err != nil {
				return nil, err
			}
			a.ops.Add(1)
			r.use(remote.peer)
			return l.b, nil
		}
	}
	return nil, noBackend(hint, remote.peer, pair, nil)
}

func (r *Request) selectBounds(local []Bound, li []int, remote []Bound, ri []int) error {
	var err error
	if r.local, err = pick("local", local, li); err != nil {
		return err
	}
	if r.remote, err = pick("remote", remote, ri); err != nil {
		return err
	}
	if len(r.local) != len(r.remote) {
		return prepareError("", fmt.Errorf("%w: %d local and %d remote descriptors", ErrInvalid, len(r.local), len(r.remote)))
	}
	for i := range r.local {
		if r.local[i].Len != r.remote[i].Len {
			return &Error{
				Layer: LayerPrepare, Index: i, Desc: r.remote[i].Desc,
				Err: fmt.Errorf("%w: local length %d, remote length %d", ErrInvalid, r.local[i].Len, r.remote[i].Len),
			}
		}
	}
	return nil
}

func pick(side string, from []Bound, indices []int) ([]Bound, error) {
	if indices == nil {
		return from, nil
	}
	if len(indices) == 0 {
		return nil, prepareError("", fmt.Errorf("%w: no %s indices", ErrInvalid, side))
	}
	picked := make([]Bound, len(indices))
	for i, j := range indices {
		if j < 0 || j >= len(from) {
			return nil, prepareError("", fmt.Errorf("%w: %s index %d of a list of %d", ErrInvalid, side, j, len(from)))
		}
		picked[i] = from[j]
	}
	return picked, nil
}

// checkPrepared refuses what can be in no transfer.
func checkPrepared(l DescList) error {
	if l.Type >= memTypes {
		return prepareError("", fmt.Errorf("%w: memory type %s", ErrInvalid, l.Type))
	}
	if len(l.Descs) == 0 {
		return prepareError("", fmt.Errorf("%w: no descriptors", ErrInvalid))
	}
	for i, d := range l.Descs {
		if err := checkDesc(d); err != nil {
			return &Error{Layer: LayerPrepare, Index: i, Desc: d, Err: err}
		}
	}
	return nil
}
