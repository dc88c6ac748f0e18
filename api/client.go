package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// dialTimeout is the longest that Dial takes.
	dialTimeout = 10 * time.Second
	// reconnectMax is the longest pause between attempts to connect again: a
	// daemon that restarts is back within seconds.
	reconnectMax = 2 * time.Second
)

// ClientOptions are what a client may be told.
type ClientOptions struct {
	Token string      // bearer token; empty: none
	TLS   *tls.Config // nil: plain text
	// Dialer opens the connection instead of net.Dialer, for tests and tunnels. There
	// are no sessions then: nobody knows where they would lead.
	Dialer func(ctx context.Context) (net.Conn, error)

	Inline   bool         // no sessions: blocks move over gRPC
	NoShared bool         // a session does not map the store's memory
	NoGrants bool         // a session keeps no places in the store for puts to come
	Name     string       // of the client, for the server's log of sessions
	Logger   *slog.Logger // nil: silent
}

// Client speaks to one server: over a gRPC connection, which is opened again after a
// failure, and for Get, Put and Match without a lease over a session, where the server
// serves any and it can be reached: a unix socket if the server is on this host, else
// TCP. The first such call opens it. Without one these calls go over gRPC as well, which
// is logged, and SessionInfo tells; from time to time they try again.
//
// Leases and reservations that the methods return belong to the gRPC connection.
// All methods may be called concurrently, and return errors that wrap block's
// sentinels or the context's errors. A call without a deadline is ended by the server's
// default.
type Client struct {
	addr            string
	network, target string // of addr, as net.Dial takes them
	opts            ClientOptions
	log             *slog.Logger
	conn            *grpc.ClientConn
	rpc             pb.KvtierClient
	ends            atomic.Pointer[ends] // of the gRPC connection
	link            link

	packed  sync.Pool // *[]byte: packed hashes
	blocks  sync.Pool // *[]byte: a block being assembled
	windows sync.Pool // *[]byte: blocks that a session brings
	tags    sync.Map  // block.NamespaceID -> taggedNamespace

	closeOnce sync.Once
	closeErr  error
}

// Dial connects to addr, "host:port" or "unix:PATH", and returns when the
// server has answered. An address that cannot be reached is an ErrDisconnected
// that names it and the cause; a token that the server does not accept is an
// ErrDenied. It gives up after ten seconds, or when ctx ends before that.
func Dial(ctx context.Context, addr string, opts *ClientOptions) (*Client, error) {
	var o ClientOptions
	if opts != nil {
		o = *opts
	}
	network, target, err := splitAddr(addr)
	if err != nil {
		return nil, err
	}
	c := &Client{addr: addr, network: network, target: target, opts: o, log: o.Logger}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.link.init(o.Inline || o.Dialer != nil)
	c.packed.New = func() any { return new([]byte) }
	c.blocks.New = func() any { return new([]byte) }
	c.windows.New = func() any { return new([]byte) }
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		if o.Dialer != nil {
			return o.Dialer(ctx)
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, target)
		if err == nil {
			c.noteEnds(conn)
		}
		return conn, err
	}
	creds := insecure.NewCredentials()
	if o.TLS != nil {
		creds = credentials.NewTLS(o.TLS)
	}
	authority := target
	if network == "unix" {
		authority = "localhost"
	}
	dopts := []grpc.DialOption{
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(newCodec()), grpc.MaxCallRecvMsgSize(maxReplyBytes)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: reconnectMax},
			MinConnectTimeout: dialTimeout,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: deadPeerAfter, Timeout: deadPeerWait, PermitWithoutStream: true}),
		grpc.WithIdleTimeout(0), // an idle connection still holds leases
		grpc.WithDisableServiceConfig(),
	}
	if o.Token != "" {
		dopts = append(dopts, grpc.WithPerRPCCredentials(bearer(o.Token)))
	}
	conn, err := grpc.NewClient("passthrough:///"+authority, dopts...)
	if err != nil {
		return nil, invalid("server address %q: %v", addr, err)
	}
	c.conn, c.rpc = conn, pb.NewKvtierClient(conn)

	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	r, err := c.rpc.Ping(ctx, &pb.PingRequest{})
	if err != nil {
		_ = conn.Close()
		err = fromStatus(err)
		if ctx.Err() != nil || errors.Is(err, block.ErrDisconnected) || errors.Is(err, context.DeadlineExceeded) {
			return nil, fmt.Errorf("connect to %s: %w", addr, &unreachable{err})
		}
		return nil, fmt.Errorf("connect to %s: %w", addr, err)
	}
	c.link.learn(r.GetSessions())
	return c, nil
}

// unreachable is ErrDisconnected with what stood in the way, such as the end of
// the context.
type unreachable struct{ cause error }

func (e *unreachable) Error() string   { return block.ErrDisconnected.Error() + ": " + e.cause.Error() }
func (e *unreachable) Unwrap() []error { return []error{block.ErrDisconnected, e.cause} }

// splitAddr reads an address into the form that net.Dial takes.
func splitAddr(addr string) (network, target string, err error) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		if path == "" {
			return "", "", invalid("server address %q: no path, want unix:PATH", addr)
		}
		return "unix", path, nil
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil || port == "" {
		return "", "", invalid("server address %q: want HOST:PORT or unix:PATH", addr)
	}
	if host == "" {
		host = "localhost"
	}
	return "tcp", net.JoinHostPort(host, port), nil
}

// bearer is a token sent with each call. The caller who gives a token without
// TLS has decided that the network is trusted.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// Close ends the connections, and with them their leases and reservations. Closing
// twice is harmless.
func (c *Client) Close() error {
	c.closeOnce.Do(func() {
		if err := errors.Join(c.link.close(), c.conn.Close()); err != nil {
			c.closeErr = fmt.Errorf("close connection to %s: %w", c.addr, err)
		}
	})
	return c.closeErr
}

// Addr is the address that was dialled.
func (c *Client) Addr() string { return c.addr }

// fail turns an error of a call into one of ours, adding what was done.
func (c *Client) fail(verb string, err error) error {
	err = fromStatus(err)
	var told *remoteError
	switch {
	case errors.Is(err, block.ErrDisconnected):
		return fmt.Errorf("%s at %s: %w", verb, c.addr, err)
	case errors.As(err, &told) && told.told:
		return err // the server's words, which begin with a verb
	}
	return fmt.Errorf("%s: %w", verb, err)
}

// ServerInfo is what a server says of itself.
type ServerInfo struct {
	Version     string
	Ready       bool
	Incarnation uint64 // of its store: random, drawn when it is opened
	Sessions    SessionPlaces
}

// Ping asks who serves. It is the empty call with which latencies are compared.
func (c *Client) Ping(ctx context.Context) (ServerInfo, error) {
	r, err := c.rpc.Ping(ctx, &pb.PingRequest{})
	if err != nil {
		return ServerInfo{}, c.fail("ping", err)
	}
	return ServerInfo{
		Version: r.GetVersion(), Ready: r.GetReady(), Incarnation: r.GetIncarnation(),
		Sessions: SessionPlaces{Address: r.GetSessions().GetAddress(), Socket: r.GetSessions().GetSocket()},
	}, nil
}

// Health asks the standard health service whether the store serves.
func (c *Client) Health(ctx context.Context) (serving bool, err error) {
	r, err := healthpb.NewHealthClient(c.conn).Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return false, c.fail("health", err)
	}
	return r.GetStatus() == healthpb.HealthCheckResponse_SERVING, nil
}

// Stats asks for a snapshot of the store's state and counters.
func (c *Client) Stats(ctx context.Context) (block.Stats, error) {
	r, err := c.rpc.Stats(ctx, &pb.StatsRequest{})
	if err != nil {
		return block.Stats{}, c.fail("stats", err)
	}
	return statsFromPB(r), nil
}

// OpenNamespace opens or makes the namespace that d describes. A known name
// with another descriptor is a *block.Mismatch, which names the field. ttl is
// the default time to live of its blocks, 0 without end.
func (c *Client) OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error) {
	n, err := c.rpc.OpenNamespace(ctx, &pb.OpenNamespaceRequest{Descriptor_: descriptorToPB(d), TtlMs: millis(ttl)})
	if err != nil {
		return block.Namespace{}, c.fail("open namespace "+d.Name, err)
	}
	c.link.learn(n.GetSessions())
	return namespaceFromPB(n), nil
}

// Namespace finds a namespace by name, and makes none. ErrNotFound.
func (c *Client) Namespace(ctx context.Context, name string) (block.Namespace, error) {
	if name == "" {
		return block.Namespace{}, invalid("namespace name: empty")
	}
	n, err := c.rpc.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
	if err != nil {
		return block.Namespace{}, c.fail("find namespace "+name, err)
	}
	c.link.learn(n.GetSessions())
	return namespaceFromPB(n), nil
}

// NamespaceByID finds a namespace by handle. ErrNotFound.
func (c *Client) NamespaceByID(ctx context.Context, id block.NamespaceID) (block.Namespace, error) {
	n, err := c.rpc.GetNamespace(ctx, &pb.GetNamespaceRequest{Id: uint32(id)})
	if err != nil {
		return block.Namespace{}, c.fail(fmt.Sprintf("find namespace %d", id), err)
	}
	return namespaceFromPB(n), nil
}

// Namespaces lists all namespaces by name, with what the store holds of each.
func (c *Client) Namespaces(ctx context.Context) ([]block.NamespaceInfo, error) {
	r, err := c.rpc.ListNamespaces(ctx, &pb.ListNamespacesRequest{})
	if err != nil {
		return nil, c.fail("list namespaces", err)
	}
	out := make([]block.NamespaceInfo, 0, len(r.GetNamespaces()))
	for _, n := range r.GetNamespaces() {
		out = append(out, block.NamespaceInfo{Namespace: namespaceFromPB(n.GetNamespace()), Blocks: n.GetBlocks(), Bytes: n.GetBytes()})
	}
	return out, nil
}

// taggedNamespace remembers the tag of a descriptor, which is a SHA-256 away.
type taggedNamespace struct {
	desc block.Descriptor
	tag  uint64
}

// tag is the namespace's tag for the server to check its handle by; 0 where the
// caller knows only the handle.
func (c *Client) tag(ns block.Namespace) uint64 {
	if ns.Desc.Name == "" {
		return 0
	}
	if v, ok := c.tags.Load(ns.ID); ok {
		if t := v.(taggedNamespace); t.desc == ns.Desc {
			return t.tag
		}
	}
	t := taggedNamespace{ns.Desc, ns.Desc.Tag()}
	c.tags.Store(ns.ID, t)
	return t.tag
}
