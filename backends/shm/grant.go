package shm

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// grant gives the right to use a region, which the caller gives back by unref. It
// asks the owner the first time, and maps the file.
func (l *link) grant(ctx context.Context, r *remoteRegion) (*grant, error) {
	if g := l.ref(r.token); g != nil {
		return g, nil
	}
	// One at a time, so that a file is mapped once.
	select {
	case l.fetching <- struct{}{}:
		defer func() { <-l.fetching }()
	case <-ctx.Done():
		return nil, canceled(ctx)
	}
	if g := l.ref(r.token); g != nil {
		return g, nil
	}
	ask := frame.Frame{Header: frame.Header{Type: frame.Message, Flags: codeAcquire, Token: r.token}}
	a, err := l.call(ctx, ask, nil)
	if err != nil {
		return nil, err
	}
	switch a.status {
	case statusOK:
	case statusNone:
		return nil, l.unregistered(r)
	case statusNoRoom:
		err := fmt.Errorf("%w: peer %s: %d regions were used over this connection", xfer.ErrDisconnected, l.p.id, gateWords)
		l.end(err) // the next has a new gate
		return nil, err
	default:
		return nil, fmt.Errorf("%w: peer %s: status %d", xfer.ErrDisconnected, l.p.id, a.status)
	}
	g := &grant{}
	if err := g.decode(a.payload); err != nil {
		return nil, fmt.Errorf("%w: peer %s: %w", xfer.ErrDisconnected, l.p.id, err)
	}
	if g.addr != r.addr || g.len != r.len {
		return nil, fmt.Errorf("%w: peer %s: region [%#x,+%d) is [%#x,+%d) there", xfer.ErrInvalid, l.p.id, r.addr, r.len, g.addr, g.len)
	}
	if g.grantInfo.file != 0 {
		if g.file, err = l.mapFile(ctx, r, &g.grantInfo); err != nil {
			return nil, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gate.isShut(g.word) {
		// Its owner may have said so before this was here to be forgotten.
		l.unrefLocked(g)
		return nil, l.refused(r)
	}
	l.mu.grants[r.token] = g
	if g.file != nil {
		g.file.refs++ // the caller's
	}
	return g, nil
}

// ref gives a grant that there is.
func (l *link) ref(token uint64) *grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.mu.grants[token]
	if g != nil && g.file != nil {
		g.file.refs++
	}
	return g
}

// unref lets go of a grant's file.
func (l *link) unref(g *grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unrefLocked(g)
}

func (l *link) unrefLocked(g *grant) {
	if g.file == nil {
		return
	}
	if g.file.refs--; g.file.refs > 0 {
		return
	}
	delete(l.mu.files, g.grantInfo.file)
	if err := g.file.Close(); err != nil {
		l.b.log.Error("shm: memory file", "peer", l.p.id, "err", err)
	}
}

// mapFile gives a region's file with a reference. It needs l.fetching.
func (l *link) mapFile(ctx context.Context, r *remoteRegion, g *grantInfo) (*mapped, error) {
	l.mu.Lock()
	m := l.mu.files[g.file]
	if m != nil && uint64(len(m.Bytes())) == g.bytes {
		m.refs++
		l.mu.Unlock()
		return m, nil
	}
	l.mu.Unlock()
	if m != nil {
		return nil, fmt.Errorf("%w: peer %s: file of %d bytes has %d now", xfer.ErrDisconnected, l.p.id, len(m.Bytes()), g.bytes)
	}
	s, err := l.b.fetch(ctx, l.p, r.token, g.file, g.bytes)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil, canceled(ctx)
	case errors.Is(err, errNoFile):
		return nil, l.unregistered(r)
	case err != nil:
		return nil, fmt.Errorf("%w: peer %s: memory file: %w", xfer.ErrUnavailable, l.p.id, err)
	}
	m = &mapped{Shared: s, refs: 1}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.files[g.file] = m
	return m, nil
}

// refused says why a gate is shut: because of the whole connection, or of one
// region.
func (l *link) refused(r *remoteRegion) error {
	if l.gate.isShut(0) {
		return fmt.Errorf("%w: peer %s closed the connection", xfer.ErrDisconnected, l.p.id)
	}
	return l.unregistered(r)
}

func (l *link) unregistered(r *remoteRegion) error {
	return fmt.Errorf("%w: peer %s: memory [%#x,+%d) is not registered there now", xfer.ErrInvalid, l.p.id, r.addr, r.len)
}
