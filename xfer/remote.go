package xfer

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// PeerInfo describes a peer.
type PeerInfo struct {
	PeerID
	Generation uint64   // counts the lives of all peers in the order they were loaded
	Backends   []string // that both agents have, in configured order
	Regions    int      // known registrations, summed over the backends
}

// String writes it on a line, for humans.
func (p PeerInfo) String() string {
	return fmt.Sprintf("%s, generation %d, %d regions by %s", p.PeerID, p.Generation, p.Regions, strings.Join(p.Backends, ", "))
}

// Peers lists the peers that are known, by name.
func (a *Agent) Peers() []PeerInfo {
	a.mu.RLock()
	defer a.mu.RUnlock()
	infos := make([]PeerInfo, 0, len(a.mu.peers))
	for _, p := range a.mu.peers {
		if p.over() != nil {
			continue
		}
		info := PeerInfo{PeerID: p.id, Generation: p.generation}
		for _, pb := range p.backends {
			info.Backends = append(info.Backends, pb.b.name)
			info.Regions += pb.regions()
		}
		infos = append(infos, info)
	}
	slices.SortFunc(infos, func(a, b PeerInfo) int { return strings.Compare(a.Name, b.Name) })
	return infos
}

// regions needs the agent's mu.
func (pb *peerBackend) regions() int {
	n := 0
	for t := range pb.sections {
		n += len(pb.sections[t].regs)
	}
	return n
}

// Invalidate forgets a peer: its requests in flight are interrupted, and every later
// use of requests and prepared lists made for it fails with ErrDisconnected, though
// they are still to be released. It returns when no backend knows the peer any more,
// within 100 ms or so as the Remote contract bounds it; so it must not be called from
// the function of an Each. Errors: ErrNotFound, ErrClosed.
func (a *Agent) Invalidate(peer string) error {
	if err := a.enterPeering(); err != nil {
		return connectError("", fmt.Errorf("invalidate: %w", err))
	}
	defer a.leavePeering()
	a.mu.RLock()
	p, err := a.peer(peer)
	a.mu.RUnlock()
	if err != nil {
		return connectError("", fmt.Errorf("invalidate: %w", err))
	}
	a.removePeer(p, fmt.Errorf("%w: peer %s was invalidated", ErrDisconnected, p.id))
	return nil
}

// removePeer ends a life and takes it from the list. It needs a.peering.
func (a *Agent) removePeer(p *peer, why error) {
	a.endPeer(p, why)
	a.mu.Lock()
	delete(a.mu.peers, p.id.Name) // not before: until it is forgotten it is stale, not unknown
	a.mu.Unlock()
}

// enterPeering takes a.peering and holds Close off.
func (a *Agent) enterPeering() error {
	a.mu.RLock()
	if a.mu.closed {
		a.mu.RUnlock()
		return a.errClosed()
	}
	a.ops.Add(1)
	a.mu.RUnlock()
	a.peering.Lock()
	return nil
}

func (a *Agent) leavePeering() {
	a.peering.Unlock()
	a.ops.Done()
}

// Connect makes the connections to a peer ahead of the first transfer, with every
// backend that both have, and without regard to a back-off. The error joins those of
// the backends that failed; the others are connected. Errors: ErrNotFound,
// ErrDisconnected, ErrCanceled, ErrClosed.
func (a *Agent) Connect(ctx context.Context, peer string) error {
	v, err := a.visit(ctx, peer)
	if err != nil {
		return connectError("", err)
	}
	defer v.leave()
	var failures []error
	for _, b := range v.backends {
		if err := b.remote.Connect(v.ctx, v.p.id); err != nil {
			failures = append(failures, connectError(b.name, v.p.failure(err)))
		}
	}
	return joined(failures)
}

// Disconnect ends the connections with a peer, which stays known: transfers under way
// fail with ErrDisconnected, and the next one connects anew. Errors: ErrNotFound,
// ErrClosed.
func (a *Agent) Disconnect(peer string) error {
	v, err := a.visit(a.ctx, peer)
	if err != nil {
		return connectError("", err)
	}
	defer v.leave()
	for _, b := range v.backends {
		b.remote.Disconnect(v.p.id)
	}
	return nil
}

func connectError(backend string, err error) error {
	return &Error{Layer: LayerConnect, Backend: backend, Index: -1, Err: err}
}
