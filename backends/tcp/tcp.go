package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// Kind is the backend's name.
const Kind = "tcp"

// Options says how a backend is made. The zero value is right for one host; who
// listens beyond loopback should have TLS.
type Options struct {
	Listen string // host:port for peers to come to, from Bind on; a free port of loopback when empty
	// Advertise are the addresses that peers are told, each host:port or a host, which
	// gets the port of Listen. When empty: Listen's, or those of this host's networks
	// when Listen names none.
	Advertise []string
	Conns     int // to each peer; 4 when 0, at most 64
	// TLS is for both directions: it has a certificate of this agent's, and the
	// authorities of the peers' in RootCAs and ClientCAs. A peer without a certificate
	// is refused. ServerName is the host in the peer's address when empty. Nil: no TLS.
	TLS *tls.Config

	DialTimeout  time.Duration // to make a connection, hellos included; 5 s when 0
	HelloTimeout time.Duration // in which who connects must have said who it is; 5 s when 0
	BackoffMin   time.Duration // after the first failure to connect; 50 ms when 0
	BackoffMax   time.Duration // after many; 5 s when 0
	Frame        frame.Options // keep-alive and stalls

	Calls         int // unanswered calls that a peer may have on a connection; 64 when 0, at most 1024
	Inbound       int // connections that peers may have here; 1024 when 0
	Notifications int // that wait to be taken; 256 when 0

	Logger *slog.Logger // connections refused and lost; nowhere when nil
}

// helloBacklog bounds the connections of which it is not known whose they are. A
// further one replaces the oldest.
const helloBacklog = 128

func (o *Options) withDefaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&o.DialTimeout, 5*time.Second)
	set(&o.HelloTimeout, 5*time.Second)
	set(&o.BackoffMin, 50*time.Millisecond)
	set(&o.BackoffMax, 5*time.Second)
	for _, n := range []struct {
		p *int
		v int
	}{{&o.Conns, 4}, {&o.Calls, 64}, {&o.Inbound, 1024}, {&o.Notifications, 256}} {
		if *n.p == 0 {
			*n.p = n.v
		}
	}
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

func (o *Options) validate() error {
	if _, _, err := net.SplitHostPort(o.Listen); err != nil {
		return fmt.Errorf("%w: Listen %q: %w", xfer.ErrInvalid, o.Listen, err)
	}
	if len(o.Advertise) > maxAddresses {
		return fmt.Errorf("%w: Advertise has %d addresses, at most %d", xfer.ErrInvalid, len(o.Advertise), maxAddresses)
	}
	for _, n := range []struct {
		name   string
		v, max int
	}{{"Conns", o.Conns, 64}, {"Calls", o.Calls, 1024}, {"Inbound", o.Inbound, 1 << 20}, {"Notifications", o.Notifications, 1 << 16}} {
		if n.v < 1 || n.v > n.max {
			return fmt.Errorf("%w: %s %d, want 1 to %d", xfer.ErrInvalid, n.name, n.v, n.max)
		}
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"DialTimeout", o.DialTimeout}, {"HelloTimeout", o.HelloTimeout}, {"BackoffMin", o.BackoffMin}, {"BackoffMax", o.BackoffMax}} {
		if d.v < 0 {
			return fmt.Errorf("%w: %s %v", xfer.ErrInvalid, d.name, d.v)
		}
	}
	if o.TLS == nil {
		return nil
	}
	switch {
	case len(o.TLS.Certificates) == 0 && o.TLS.GetCertificate == nil && o.TLS.GetConfigForClient == nil:
		return fmt.Errorf("%w: TLS has no certificate", xfer.ErrInvalid)
	case o.TLS.ClientCAs == nil && o.TLS.GetConfigForClient == nil:
		return fmt.Errorf("%w: TLS has no ClientCAs, so every peer would be refused", xfer.ErrInvalid)
	case o.TLS.InsecureSkipVerify && o.TLS.VerifyConnection == nil && o.TLS.VerifyPeerCertificate == nil:
		return fmt.Errorf("%w: TLS does not verify peers", xfer.ErrInvalid)
	}
	return nil
}

// Backend moves bytes between DRAM of agents. It is an xfer.Backend, an xfer.Remote
// and an xfer.Notifier.
type Backend struct {
	opt   Options
	log   *slog.Logger
	tls   *tls.Config // of accepted connections; nil without TLS
	self  xfer.PeerID // since Bind
	notes chan xfer.Notification
	count counters

	buffers sync.Pool // of *[]byte, for small pieces

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	running sync.WaitGroup // goroutines of the backend's

	mu struct {
		sync.RWMutex
		closed   bool
		listener net.Listener // nil before Bind
		info     []byte       // ConnInfo
		regions  map[uint64]*region
		peers    map[xfer.PeerID]*peer
		strangers
		served map[lineKey]*server // by whom they are from
	}
}

var (
	_ xfer.Backend  = (*Backend)(nil)
	_ xfer.Remote   = (*Backend)(nil)
	_ xfer.Notifier = (*Backend)(nil)
)

// New makes the backend. It listens from Bind on. Errors: ErrInvalid for an option.
func New(o *Options) (*Backend, error) {
	b := &Backend{}
	if o != nil {
		b.opt = *o
	}
	b.opt.withDefaults()
	if err := b.opt.validate(); err != nil {
		return nil, fmt.Errorf("tcp options: %w", err)
	}
	b.log = b.opt.Logger
	if b.opt.TLS != nil {
		b.tls = b.opt.TLS.Clone()
		b.tls.ClientAuth = tls.RequireAndVerifyClientCert
	}
	b.notes = make(chan xfer.Notification, b.opt.Notifications)
	b.mu.regions = map[uint64]*region{}
	b.mu.peers = map[xfer.PeerID]*peer{}
	b.mu.served = map[lineKey]*server{}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b, nil
}

// Name is "tcp".
func (b *Backend) Name() string { return Kind }

// Caps says that it moves DRAM to and from a peer's DRAM.
func (b *Backend) Caps() xfer.Caps {
	engine := "sockets"
	if b.tls != nil {
		engine = "sockets, TLS"
	}
	return xfer.Caps{
		Pairs:  []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}},
		Remote: true,
		Notify: true,
		Align:  1,
		Engine: engine,
	}
}

// Bind begins to listen for peers. Errors: ErrInvalid (the identity, or it was bound
// before), ErrUnavailable (the address cannot be had).
func (b *Backend) Bind(self xfer.PeerID) error {
	if self.Name == "" || len(self.Name) > maxNameBytes || self.Incarnation == 0 {
		return fmt.Errorf("tcp bind: %w: agent %s, want a name of 1 to %d bytes and an incarnation", xfer.ErrInvalid, self, maxNameBytes)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.closed:
		return errClosed()
	case b.mu.listener != nil:
		return fmt.Errorf("tcp bind %s: %w: it is bound to %s", self, xfer.ErrInvalid, b.self)
	}
	l, err := net.Listen("tcp", b.opt.Listen)
	if err != nil {
		return fmt.Errorf("tcp bind %s: %w: %w", self, xfer.ErrUnavailable, err)
	}
	addrs, err := b.advertised(l.Addr().(*net.TCPAddr))
	if err != nil {
		_ = l.Close() // nothing came
		return fmt.Errorf("tcp bind %s: %w", self, err)
	}
	b.self, b.mu.listener, b.mu.info = self, l, appendConnInfo(nil, addrs)
	b.running.Go(func() { b.accept(l) })
	return nil
}

// advertised lists the addresses that peers are told.
func (b *Backend) advertised(at *net.TCPAddr) ([]string, error) {
	port := strconv.Itoa(at.Port)
	var addrs []string
	for _, a := range b.opt.Advertise {
		if _, _, err := net.SplitHostPort(a); err != nil {
			a = net.JoinHostPort(a, port)
		}
		if err := checkAddress(a); err != nil {
			return nil, fmt.Errorf("advertise: %w", err)
		}
		addrs = append(addrs, a)
	}
	if len(addrs) > 0 {
		return addrs, nil
	}
	if !at.IP.IsUnspecified() {
		return []string{at.String()}, nil
	}
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("%w: addresses of this host: %w", xfer.ErrUnavailable, err)
	}
	var loopback []string
	for _, n := range nets {
		ip, ok := n.(*net.IPNet)
		if !ok || len(addrs) == maxAddresses || at.IP.To4() != nil && ip.IP.To4() == nil {
			continue
		}
		switch a := net.JoinHostPort(ip.IP.String(), port); {
		case ip.IP.IsGlobalUnicast():
			addrs = append(addrs, a)
		case ip.IP.IsLoopback():
			loopback = append(loopback, a)
		}
	}
	if len(addrs) == 0 {
		addrs = loopback
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("%w: this host has no address", xfer.ErrUnavailable)
	}
	return addrs, nil
}

// ConnInfo lists the addresses of the listener.
func (b *Backend) ConnInfo() ([]byte, error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.mu.info == nil {
		return nil, fmt.Errorf("tcp connection info: %w: the backend is not bound", xfer.ErrUnavailable)
	}
	return append([]byte(nil), b.mu.info...), nil
}

// Close ends the backend: the listener, all connections and their goroutines.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.mu.closed {
		b.mu.Unlock()
		b.running.Wait()
		return nil
	}
	b.mu.closed = true
	b.cancel()
	var err error
	if b.mu.listener != nil {
		err = b.mu.listener.Close()
	}
	peers := make([]*peer, 0, len(b.mu.peers))
	for _, p := range b.mu.peers {
		peers = append(peers, p)
	}
	for _, s := range b.mu.served {
		s.end()
	}
	b.mu.strangers.endAll()
	b.mu.Unlock()
	for _, p := range peers {
		p.forget()
	}
	b.running.Wait()
	close(b.notes) // those who sent to it have ended
	if err != nil {
		return fmt.Errorf("tcp close: %w", err)
	}
	return nil
}

// start runs f as a goroutine of the backend's, unless it is closed.
func (b *Backend) start(f func()) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.mu.closed {
		return false
	}
	b.running.Go(f)
	return true
}

func errClosed() error { return fmt.Errorf("%w: backend tcp", xfer.ErrClosed) }

// disconnected says who is gone and why.
func disconnected(id xfer.PeerID, why error) error {
	if errors.Is(why, xfer.ErrDisconnected) || errors.Is(why, xfer.ErrClosed) {
		return why
	}
	return fmt.Errorf("%w: peer %s: %w", xfer.ErrDisconnected, id, why)
}

type counters struct {
	dialed, accepted                   atomic.Int64 // that are open
	connects, reconnects, failures     atomic.Int64
	strangers                          atomic.Int64
	bytesIn, bytesOut, skipped, refuse atomic.Int64
	notes, notesBusy                   atomic.Int64
}

// Stats is what a backend has done so far.
type Stats struct {
	Dialed, Accepted     int64 // connections that are open now
	Connects, Reconnects int64 // connections made, and of these in the place of lost ones
	ConnectFailures      int64
	Strangers            int64 // connections that were closed because of their hello, or for want of one
	BytesIn, BytesOut    int64 // of memory, on all connections
	Skipped              int64 // bytes that came and nobody wanted, as their call was over
	Refused              int64 // pieces that peers asked for, and which they may not reach
	Notifications        int64 // put into the queue
	NotificationsRefused int64 // turned away as it was full
}

// Stats is a snapshot of the counters.
func (b *Backend) Stats() Stats {
	c := &b.count
	return Stats{
		Dialed: c.dialed.Load(), Accepted: c.accepted.Load(),
		Connects: c.connects.Load(), Reconnects: c.reconnects.Load(), ConnectFailures: c.failures.Load(),
		Strangers: c.strangers.Load(),
		BytesIn:   c.bytesIn.Load(), BytesOut: c.bytesOut.Load(), Skipped: c.skipped.Load(),
		Refused:       c.refuse.Load(),
		Notifications: c.notes.Load(), NotificationsRefused: c.notesBusy.Load(),
	}
}
