package xfer

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// peer is one life of another agent, as this one knows it.
type peer struct {
	id         PeerID
	generation uint64
	ctx        context.Context // ends with the life; the cause says why
	end        context.CancelCauseFunc
	backends   []*peerBackend // those that both have, in configured order; guarded by the agent's mu

	// uses counts the Prepared and the calls that refer to the peer. It grows only
	// under the agent's mu and before the end, so that the end can wait for it.
	uses sync.WaitGroup
}

// peerBackend is what one backend was told of a peer.
type peerBackend struct {
	b        *adopted
	conn     []byte
	sections [memTypes]section // guarded by the agent's mu

	loaded struct {
		sync.Mutex // held while a region is unloaded, so that ForgetPeer comes behind it
		regs       map[*registration]struct{}
	}
}

// over gives why the life has ended, or nil.
func (p *peer) over() error { return context.Cause(p.ctx) }

// backend needs the agent's mu.
func (p *peer) backend(b *adopted) *peerBackend {
	for _, pb := range p.backends {
		if pb.b == b {
			return pb
		}
	}
	return nil
}

// load makes a region of the peer known to the backend.
func (pb *peerBackend) load(id PeerID, t MemType, d Desc, info []byte) (*registration, error) {
	region, err := pb.b.remote.LoadRegion(id, t, d, info)
	if err != nil {
		return nil, fmt.Errorf("load %s region %s of peer %s: %w", t, d, id, err)
	}
	reg := newRegistration(t, d, region)
	reg.of, reg.info = pb, info
	reg.refs.Store(1) // its section's
	pb.loaded.Lock()
	pb.loaded.regs[reg] = struct{}{}
	pb.loaded.Unlock()
	return reg, nil
}

// unload undoes load, once.
func (pb *peerBackend) unload(reg *registration) {
	pb.loaded.Lock()
	defer pb.loaded.Unlock()
	if _, ok := pb.loaded.regs[reg]; ok {
		delete(pb.loaded.regs, reg)
		pb.b.remote.UnloadRegion(reg.region)
	}
}

// forget undoes all that the backend was told of the peer.
func (pb *peerBackend) forget(id PeerID) {
	pb.loaded.Lock()
	for reg := range pb.loaded.regs {
		delete(pb.loaded.regs, reg)
		pb.b.remote.UnloadRegion(reg.region)
	}
	pb.loaded.Unlock()
	pb.b.remote.ForgetPeer(id)
}

// peer finds a peer whose life is not over. It needs a.mu.
func (a *Agent) peer(name string) (*peer, error) {
	p := a.mu.peers[name]
	if p == nil {
		return nil, fmt.Errorf("%w: agent %s knows no peer %q", ErrNotFound, a.id.Name, name)
	}
	return p, p.over()
}

// newPeer begins a life, for LoadMetadata to fill.
func (a *Agent) newPeer(id PeerID) *peer {
	p := &peer{id: id}
	p.ctx, p.end = context.WithCancelCause(a.ctx)
	return p
}

// endPeer ends a life, and returns when nothing refers to it any more and the
// backends have forgotten it: what is in flight is interrupted, and requests give up
// what they hold of it, though they stay their owners'. It needs a.peering, or Close.
func (a *Agent) endPeer(p *peer, why error) {
	a.mu.Lock()
	p.end(why)
	a.mu.Unlock()
	var requests []*Request
	a.live.Lock()
	for r := a.live.head; r != nil; r = r.next {
		if r.peer == p {
			requests = append(requests, r)
		}
	}
	a.live.Unlock()
	for _, r := range requests {
		r.expire(why) // all of them first, so that they end side by side
	}
	for _, r := range requests {
		r.retire()
	}
	p.uses.Wait()
	for _, pb := range slices.Backward(p.backends) {
		pb.forget(p.id)
	}
}

// expire makes the request end, and every later post of it fail.
func (r *Request) expire(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.stale = why
	if r.mu.status == Active {
		r.mu.cancel()
	}
}

// retire waits until an expired request is quiet and gives up what it holds.
func (r *Request) retire() {
	r.mu.Lock()
	for r.mu.status == Active || r.mu.users > 0 {
		idle := r.idle()
		r.mu.Unlock()
		<-idle
		r.mu.Lock()
	}
	if r.mu.status == Released { // then Release gives it up
		r.mu.Unlock()
		return
	}
	r.mu.retired = true
	r.mu.Unlock()
	r.b.Release(r.prepared)
	r.drop()
}

// visit is a call that asks backends something about a peer. Until leave it holds off
// the end of the peer's life, and Close.
type visit struct {
	ctx      context.Context // ends with the caller's, with the peer's life and when Close begins
	p        *peer
	backends []*adopted // that both have, in configured order; one or more
	leave    func()
}

// visit begins one.
func (a *Agent) visit(ctx context.Context, name string) (*visit, error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.mu.closed {
		return nil, a.errClosed()
	}
	p, err := a.peer(name)
	if err != nil {
		return nil, err
	}
	v := &visit{p: p}
	for _, pb := range p.backends {
		v.backends = append(v.backends, pb.b)
	}
	a.ops.Add(1)
	p.uses.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.ctx, func() { cancel(p.over()) })
	v.ctx = ctx
	v.leave = func() {
		stop()
		cancel(nil)
		p.uses.Done()
		a.ops.Done()
	}
	return v, nil
}

// failure says why a call of a backend failed: because the peer's life ended, if it
// did.
func (p *peer) failure(err error) error {
	if why := p.over(); why != nil {
		return why
	}
	return err
}
