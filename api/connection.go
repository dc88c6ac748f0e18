package api

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"google.golang.org/grpc/stats"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// connection is one of gRPC, the owner of the leases and reservations made
// over it.
type connection struct {
	id  uint64
	end func(id uint64) // releases what the session owns

	mu struct {
		sync.Mutex
		calls   int              // calls in progress that may take a lease or a reservation
		ended   bool             // the connection is gone
		counted []*access.Leases // in which its leases count: one for each identity that has taken some
	}
}

// sessionKey finds the session in the context of a call.
type sessionKey struct{}

// enter begins a call that may take something for the session. The transport
// tells of a connection's end while handlers still run, so what is owned is
// released only when the last of them has left: nothing taken late is forgotten.
func enter(ctx context.Context) (*connection, error) {
	s, ok := ctx.Value(sessionKey{}).(*connection)
	if !ok {
		return nil, fmt.Errorf("%w: call without a connection", block.ErrUnavailable)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended {
		return nil, fmt.Errorf("connection ended: %w", context.Canceled)
	}
	s.mu.calls++
	return s, nil
}

func (s *connection) leave() {
	s.mu.Lock()
	s.mu.calls--
	last := s.mu.ended && s.mu.calls == 0
	s.mu.Unlock()
	if last {
		s.release()
	}
}

// release ends what the session owns. Nothing enters any more, nor is in.
func (s *connection) release() {
	s.end(s.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.mu.counted {
		l.EndSession(s.id)
	}
}

// takeLease takes room for a lease of the identity, which ends with the connection. It
// is for a call that has entered.
func (s *connection) takeLease(who *access.Identity) error {
	if who == nil {
		return nil
	}
	if err := who.TakeLease(); err != nil {
		return fmt.Errorf("%w: %w", block.ErrNoSpace, err)
	}
	l := who.Leases()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.mu.counted, l) {
		s.mu.counted = append(s.mu.counted, l)
	}
	return nil
}

func (s *connection) disconnected() {
	s.mu.Lock()
	first := !s.mu.ended
	s.mu.ended = true
	idle := s.mu.calls == 0
	s.mu.Unlock()
	if first && idle {
		s.release()
	}
}

// sessions makes a session of each connection. It is a stats.Handler because
// that is where gRPC tells of connections.
type sessions struct {
	end func(id uint64)
}

// TagConn gives a new connection its session. Ids are random: other fronts of
// the same store draw theirs from the same 64 bits.
func (h *sessions) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	id := rand.Uint64()
	for id == 0 {
		id = rand.Uint64()
	}
	return context.WithValue(ctx, sessionKey{}, &connection{id: id, end: h.end})
}

// HandleConn ends the session with its connection.
func (h *sessions) HandleConn(ctx context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnEnd); !ok {
		return
	}
	if sess, ok := ctx.Value(sessionKey{}).(*connection); ok {
		sess.disconnected()
	}
}

// TagRPC and HandleRPC are the part of stats.Handler that is not needed here.
func (h *sessions) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC does nothing.
func (h *sessions) HandleRPC(context.Context, stats.RPCStats) {}
