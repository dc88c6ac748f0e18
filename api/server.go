package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/tap"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// deadPeerAfter + deadPeerWait is how long a connection whose peer has
	// vanished keeps its leases.
	deadPeerAfter = 20 * time.Second
	deadPeerWait  = 10 * time.Second
	// pingInterval is the fastest that a client may send keepalive pings.
	pingInterval = 5 * time.Second
)

// ServerOptions are what a server may be told.
type ServerOptions struct {
	Logger  *slog.Logger // nil: silent
	Token   string       // bearer token that calls must carry; empty: none
	Access  *access.List // instead of Token: who may call, and what each may do; nil: all of them everything
	TLS     *tls.Config  // nil: plain text
	Version string       // answered to Ping
	// Timeout ends calls that come without a deadline; 0 is a minute. In a put it
	// bounds each wait for room or durability instead of the whole stream.
	// Prefetch, Watch, SweepObjects and ImportObjects run as long as their callers stay.
	Timeout time.Duration
	// Sessions says where sessions of the same store are served, for clients to be
	// told; nil: nowhere.
	Sessions *SessionPlaces
	// ListSessions lists those that are open; nil: there are none.
	ListSessions func() []session.Info
}

// SessionPlaces are where sessions are served. Either may be empty.
type SessionPlaces struct {
	Address string // HOST:PORT over TCP; a wildcard host stands for the server's
	Socket  string // absolute path of a unix socket
}

func (o *ServerOptions) withDefaults() ServerOptions {
	var v ServerOptions
	if o != nil {
		v = *o
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	if v.Access == nil && v.Token != "" {
		v.Access = access.Single(v.Token)
	}
	if v.Timeout <= 0 {
		v.Timeout = time.Minute
	}
	return v
}

// Server serves a Store over gRPC, with the standard health service (open to
// all, so that probes need no token) and reflection.
type Server struct {
	grpc    *grpc.Server
	health  *health.Server
	service *service
	log     *slog.Logger
	access  *access.List // nil: everybody may do everything
	timeout time.Duration
}

// NewServer makes a server of s, not ready and not listening yet. The store
// stays the caller's, to be closed after the server has drained.
func NewServer(s Store, opts *ServerOptions) *Server {
	o := opts.withDefaults()
	srv := &Server{
		health:  health.NewServer(),
		service: newService(s, &o),
		log:     o.Logger,
		access:  o.Access,
		timeout: o.Timeout,
	}
	gopts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec()),
		grpc.StatsHandler(&sessions{end: s.EndSession}),
		grpc.UnaryInterceptor(srv.unary),
		grpc.StreamInterceptor(srv.stream),
		grpc.InTapHandle(srv.tap),
		grpc.MaxRecvMsgSize(maxMessageBytes),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: deadPeerAfter, Timeout: deadPeerWait}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingInterval, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
	if o.TLS != nil {
		gopts = append(gopts, grpc.Creds(credentials.NewTLS(o.TLS)))
	}
	srv.grpc = grpc.NewServer(gopts...)
	pb.RegisterKvtierServer(srv.grpc, srv.service)
	healthpb.RegisterHealthServer(srv.grpc, srv.health)
	reflection.Register(srv.grpc)
	srv.SetReady(false)
	return srv
}

// SetReady sets what the health service and Ping say.
func (s *Server) SetReady(ready bool) {
	st := healthpb.HealthCheckResponse_NOT_SERVING
	if ready {
		st = healthpb.HealthCheckResponse_SERVING
	}
	s.service.ready.Store(ready)
	s.health.SetServingStatus("", st)
	s.health.SetServingStatus(pb.Kvtier_ServiceDesc.ServiceName, st)
}

// Serve answers connections of lis until Drain, and closes lis. It may run for
// several listeners at once. It returns nil after Drain.
func (s *Server) Serve(lis net.Listener) error {
	s.log.Info("api listens", "network", lis.Addr().Network(), "address", lis.Addr().String())
	if err := s.grpc.Serve(lis); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve api on %s: %w", lis.Addr(), err)
	}
	return nil
}

// Drain stops accepting connections and calls, tells watchers to go, waits for
// the other calls until ctx ends, and then breaks those that are left. It
// returns when no handler runs, with the context's error if some were broken
// off. It may be called twice.
func (s *Server) Drain(ctx context.Context) error {
	s.SetReady(false)
	s.service.close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
		s.service.stops.wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	s.grpc.Stop()
	<-done
	return fmt.Errorf("drain api: calls were broken off: %w", ctx.Err())
}

// unary checks the token, gives the call a deadline where it has none, and
// turns its error into a status.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	ctx, err := s.authorize(ctx, info.FullMethod)
	if err != nil {
		return nil, toStatus(err)
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.timeout)
		defer cancel()
	}
	resp, err := next(ctx, req)
	return resp, toStatus(err)
}

// stream is unary for streams: tap bounds a get, and the other handlers bound
// their waits themselves.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, err := s.authorize(ss.Context(), info.FullMethod)
	if err != nil {
		return toStatus(err)
	}
	if ctx != ss.Context() {
		ss = &identified{ServerStream: ss, ctx: ctx}
	}
	return toStatus(next(srv, ss))
}

// tap gives a get that comes without a deadline one. It does so before the stream
// begins: a handler that waits for a client to take bytes is woken by the end of
// the stream's own context only.
func (s *Server) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	if _, ok := ctx.Deadline(); ok || info.FullMethodName != pb.Kvtier_Get_FullMethodName {
		return ctx, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	context.AfterFunc(ctx, cancel) // it ends with the stream at the latest
	return ctx, nil
}

// service answers the calls. Its methods validate, translate and call the store.
type service struct {
	pb.UnimplementedKvtierServer
	store   Store
	version string
	timeout time.Duration
	ready   atomic.Bool

	names   sync.Map  // block.NamespaceID -> *known: an id is never given again
	matches sync.Pool // *block.MatchResult
	stops   scrubStops

	incarnation func() uint64 // of the store, which is asked once
	places      *SessionPlaces
	open        func() []session.Info // sessions; nil: none

	closeOnce sync.Once
	closing   chan struct{} // closed by Drain
}

func newService(s Store, o *ServerOptions) *service {
	return &service{
		store: s, version: o.Version, timeout: o.Timeout,
		matches:     sync.Pool{New: func() any { return new(block.MatchResult) }},
		incarnation: sync.OnceValue(func() uint64 { return s.Stats().Incarnation }),
		places:      o.Sessions,
		open:        o.ListSessions,
		closing:     make(chan struct{}),
	}
}

// sessions says where sessions are served, nil: nowhere.
func (s *service) sessions() *pb.Sessions {
	if s.places == nil {
		return nil
	}
	return &pb.Sessions{Address: s.places.Address, Socket: s.places.Socket, Incarnation: s.incarnation()}
}

func (s *service) close() { s.closeOnce.Do(func() { close(s.closing) }) }

// bounded gives a wait of a stream without deadline one.
func (s *service) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, s.timeout)
}

// Ping answers who serves.
func (s *service) Ping(context.Context, *pb.PingRequest) (*pb.PingResponse, error) {
	return &pb.PingResponse{Version: s.version, Ready: s.ready.Load(), Incarnation: s.incarnation(), Sessions: s.sessions()}, nil
}

// known is what is kept of a namespace that calls name.
type known struct {
	name string
	tag  uint64
}

// namespace checks that a handle is of this store, and that the caller has a right
// there. A handle that was kept while another store took the server's place could name
// another tenant's blocks.
func (s *service) namespace(ctx context.Context, id uint32, tag uint64, right access.Right) (block.NamespaceID, error) {
	ns := block.NamespaceID(id)
	if id == 0 {
		return 0, invalid("namespace: 0, want the handle that OpenNamespace answered")
	}
	have, ok := s.names.Load(ns)
	if !ok {
		n, err := s.store.NamespaceByID(ns)
		if err != nil {
			return 0, err
		}
		have, _ = s.names.LoadOrStore(ns, &known{name: n.Desc.Name, tag: n.Desc.Tag()})
	}
	n := have.(*known)
	if tag != 0 && n.tag != tag {
		return 0, fmt.Errorf("%w: namespace handle %d was given by another store: open the namespace again", block.ErrNotFound, id)
	}
	return ns, identityOf(ctx).CheckHandle(right, ns, n.name)
}
