package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/backends"
	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// closers closes in reverse what was opened.
type closers struct{ fns []func() error }

func (c *closers) add(fn func() error) { c.fns = append(c.fns, fn) }

func (c *closers) close() error {
	var errs []error
	for _, fn := range slices.Backward(c.fns) {
		errs = append(errs, fn())
	}
	c.fns = nil
	return errors.Join(errs...)
}

// Why the daemon does not serve.
var (
	errOpening  = errors.New("opening the store")
	errStopping = errors.New("stopping")
)

// status is what the monitor knows of the daemon. A snapshot of the store is
// taken under the lock, so that none is under way when the store closes.
type status struct {
	mu struct {
		sync.RWMutex
		store    *tiers.Store    // nil: not open
		sessions *session.Server // nil as well
		why      error           // why it does not serve, nil when it does
	}
}

func newStatus() *status {
	s := &status{}
	s.mu.why = errOpening
	return s
}

func (s *status) set(store *tiers.Store, sessions *session.Server, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.store, s.mu.sessions, s.mu.why = store, sessions, why
}

func (s *status) ready() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.why
}

// snapshot is what the store says of itself; false when there is none.
func (s *status) snapshot() (storeSnapshot, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.mu.store == nil {
		return storeSnapshot{}, false
	}
	return storeSnapshot{stats: s.mu.store.Stats(), catalog: s.mu.store.CatalogMetrics(), ready: s.mu.why == nil}, true
}

// sessionStats is what the server of sessions says of itself; false when there is none.
func (s *status) sessionStats() (session.Stats, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.mu.sessions == nil {
		return session.Stats{}, false
	}
	return s.mu.sessions.Stats(), true
}

// listenAll opens all addresses of the plan.
func listenAll(ctx context.Context, endpoints []endpoint, c *closers) ([]net.Listener, error) {
	var ls []net.Listener
	for _, e := range endpoints {
		l, err := listen(ctx, e)
		if err != nil {
			return nil, err
		}
		c.add(func() error { return closeListener(l) })
		ls = append(ls, l)
	}
	return ls, nil
}

// closeListener closes a listener that the server that served it may have closed
// already.
func closeListener(l net.Listener) error {
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// newAgent makes the agent that moves the bytes, with every backend of the table that
// moves them within this process. files is the one for files and block devices.
func newAgent(engine string, log *slog.Logger) (agent *xfer.Agent, files *posix.Backend, err error) {
	if agent, err = xfer.NewAgent("kvtier", nil); err != nil {
		return nil, nil, err
	}
	o := &backends.Options{Posix: posix.Options{Engine: engine}, Logger: log}
	for _, kind := range backends.Kinds() {
		b, err := backends.Open(kind, o)
		if err != nil {
			return nil, nil, errors.Join(err, agent.Close())
		}
		if !b.Caps().Local { // the store has no peers, so nobody need reach it
			if err := b.Close(); err != nil {
				return nil, nil, errors.Join(err, agent.Close())
			}
			continue
		}
		if err := agent.AddBackend(b); err != nil {
			return nil, nil, errors.Join(err, b.Close(), agent.Close())
		}
		if p, ok := b.(*posix.Backend); ok {
			files = p
		}
	}
	return agent, files, nil
}

// options are what the plan tells the store.
func (p *servePlan) options(f *serveFlags, agent *xfer.Agent, log *slog.Logger) tiers.Options {
	o := tiers.Options{
		Dir:           p.data,
		Agent:         agent,
		DRAM:          p.dram,
		NoSlabs:       p.noSlabs,
		High:          f.high,
		Low:           f.low,
		Policy:        func(t block.TierID) (policy.Policy, error) { return policy.New(p.policy[t]) },
		WriteBudgets:  p.budgets,
		Prefill:       p.prefill.of,
		Grace:         f.grace,
		ObjectGrace:   f.objectGrace,
		PrefetchBytes: f.prefetch,
		UploadBytes:   f.uploadBytes,
		UploadAge:     f.uploadAge,
		Logger:        log,
	}
	if len(p.objectRules) > 0 {
		o.ObjectRule = p.objectRules.of
	}
	switch f.sharedMemory {
	case "on":
		o.SharedMemory = tiers.ShareOn
	case "auto":
		o.SharedMemory = tiers.ShareAuto
	}
	if l := p.security.access; l != nil && l.Divides() {
		o.Share = l.Share
	}
	for _, s := range p.slabs {
		o.Slabs = append(o.Slabs, tiers.SlabSpec{Path: s.path, Bytes: s.bytes})
	}
	if p.defaultSlab != nil {
		o.DefaultSlab = &tiers.SlabSpec{Path: p.defaultSlab.path, Bytes: p.defaultSlab.bytes}
	}
	return o
}

// logOpened tells what the store was opened with.
func (p *servePlan) logOpened(log *slog.Logger, s block.Stats, took time.Duration) {
	log.Info("store is open", "data", p.data, "blocks", s.Blocks, "namespaces", s.Namespaces, "took", took.Round(time.Millisecond))
	for _, t := range s.Tiers {
		attrs := []any{"tier", t.Tier.String(), "capacity", formatSizeShort(t.Capacity), "blocks", t.Blocks}
		if t.Tier == block.G2 && p.dramFrom != "" {
			attrs = append(attrs, "why", p.dramFrom)
		}
		log.Info("tier", attrs...)
	}
	if hasTier(s, block.G3) || hasTier(s, block.G4) {
		return
	}
	if p.noSlabs {
		log.Info("serving from DRAM only: no block survives a restart")
	} else {
		log.Warn("no NVMe tier: no block survives a restart; give --nvme PATH=SIZE", "why", p.slabNote)
	}
}

func hasTier(s block.Stats, id block.TierID) bool {
	return slices.ContainsFunc(s.Tiers, func(t block.TierStats) bool { return t.Tier == id })
}

// listenSocket opens the socket for sessions; nil when there is none. It is this
// user's only, unless clients are told apart: then the list says who may connect.
func (p *servePlan) listenSocket(ctx context.Context, c *closers, log *slog.Logger) (net.Listener, error) {
	if p.socket == "" {
		log.Warn("no socket for sessions", "why", p.socketNote)
		return nil, nil
	}
	if err := removeStaleSocket(ctx, p.socket); err != nil {
		return nil, fmt.Errorf("--socket: listen on unix:%s: %w", p.socket, err)
	}
	l, err := listenWith(ctx, endpoint{"unix", p.socket}, net.ListenConfig{Control: ownerOnly})
	if err != nil {
		return nil, fmt.Errorf("--socket: %w", err)
	}
	c.add(func() error { return closeListener(l) })
	if p.security.access != nil {
		if err := os.Chmod(p.socket, 0o666); err != nil {
			return nil, fmt.Errorf("--socket: %w", err)
		}
	}
	return l, nil
}

// servers answer the listeners: with TLS those that have a port, if there is a
// certificate, and without it sockets of this machine, where it adds nothing.
type servers struct {
	tcp, unix    *api.Server
	sessions     *session.Server
	port, socket net.Listener // of sessions; nil: none
	served       sync.WaitGroup
}

// A session may hold places for puts of so many bytes, and of no more than this part of
// the DRAM tier: an eighth of what all together may hold, so that a few clients that are
// stopped, and keep their places, do not end the puts of others.
const (
	maxSessionGrants  = 64 << 20
	sessionGrantShare = 32
)

func newServers(store *tiers.Store, p *servePlan, port, socket net.Listener, log *slog.Logger) *servers {
	o := api.ServerOptions{Logger: log, Token: p.security.token, Access: p.security.access, Version: buildVersion().Version}
	o.Sessions = &api.SessionPlaces{}
	if port != nil {
		o.Sessions.Address = port.Addr().String()
	}
	if socket != nil {
		o.Sessions.Socket = p.socket
	}
	s := &servers{port: port, socket: socket}
	s.sessions = session.NewServer(store, &session.ServerOptions{
		Logger: log, Token: p.security.token, Access: p.security.access, Name: "kvtier " + o.Version, GrantBytes: min(maxSessionGrants, p.dram/sessionGrantShare),
	})
	o.ListSessions = s.sessions.Sessions
	s.unix = api.NewServer(store, &o)
	s.tcp = s.unix
	if p.security.tls != nil {
		o.TLS = p.security.tls
		s.tcp = api.NewServer(store, &o)
		if port != nil {
			s.port = tls.NewListener(port, p.security.tls)
		}
	}
	return s
}

// start serves the listeners until drain. What it returns tells of one that
// failed.
func (s *servers) start(ls []net.Listener) <-chan error {
	s.tcp.SetReady(true)
	s.unix.SetReady(true)
	failed := make(chan error, len(ls)+2)
	serve := func(by interface{ Serve(net.Listener) error }, l net.Listener) {
		s.served.Go(func() {
			if err := by.Serve(l); err != nil {
				failed <- err
			}
		})
	}
	for _, l := range ls {
		if l.Addr().Network() == "unix" {
			serve(s.unix, l)
		} else {
			serve(s.tcp, l)
		}
	}
	for _, l := range []net.Listener{s.port, s.socket} {
		if l != nil {
			serve(s.sessions, l)
		}
	}
	return failed
}

// drain ends the calls under way, and breaks off those that are left when ctx
// ends.
func (s *servers) drain(ctx context.Context) error {
	errs := make([]error, 3)
	var wg sync.WaitGroup
	wg.Go(func() { errs[0] = s.tcp.Drain(ctx) })
	if s.unix != s.tcp {
		wg.Go(func() { errs[1] = s.unix.Drain(ctx) })
	}
	wg.Go(func() { errs[2] = s.sessions.Drain(ctx) })
	wg.Wait()
	return errors.Join(errs...)
}

// close breaks off what drain has left, and waits for the listeners' goroutines.
func (s *servers) close() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := s.drain(ctx)
	s.served.Wait()
	if errors.Is(err, context.Canceled) {
		return nil // broken off, as was meant
	}
	return err
}
