package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Server serves a Store over sessions: connections of TCP, TLS (of a listener that
// makes them) and unix sockets.
type Server struct {
	store  Store
	o      ServerOptions
	log    *slog.Logger
	memory []block.MemoryFile

	incarnation uint64
	names       sync.Map // block.NamespaceID -> *namespace: an id is never given again

	ctx     context.Context // ends when nothing may go on
	cancel  context.CancelFunc
	noWait  context.Context // has ended: for what must not wait
	conns   sync.WaitGroup  // goroutines of connections, each until its session has ended
	orphans orphans

	openings openings

	mu struct {
		sync.Mutex
		closing   bool
		listeners map[net.Listener]struct{}
		pending   map[net.Conn]struct{}
		sessions  map[uint64]*session

		regions     int // of all sessions
		regionBytes int64
	}
	stats counters
}

// NewServer makes a server of s that does not listen yet. The store stays the
// caller's, to be closed after the server.
func NewServer(s Store, opts *ServerOptions) *Server {
	o := opts.withDefaults()
	srv := &Server{store: s, o: o, log: o.Logger, incarnation: s.Stats().Incarnation}
	if srv.memory = s.Memory(); len(srv.memory) > maxChunks {
		srv.log.Warn("memory is in more files than can be passed, and not shared", "files", len(srv.memory), "most", maxChunks)
		srv.memory = nil
	}
	srv.ctx, srv.cancel = context.WithCancel(context.Background())
	var stop context.CancelFunc
	srv.noWait, stop = context.WithCancel(context.Background())
	stop()
	srv.openings.init(o.Openings)
	srv.orphans = orphans{store: s, log: srv.log, ctx: srv.ctx}
	srv.orphans.mu.of = make(map[uint64]*orphaned)
	srv.mu.listeners = make(map[net.Listener]struct{})
	srv.mu.pending = make(map[net.Conn]struct{})
	srv.mu.sessions = make(map[uint64]*session)
	return srv
}

// acceptPause is how long accepting rests when the host has no descriptors left.
const acceptPause = 100 * time.Millisecond

// Serve answers connections of lis until Drain or Close, and closes lis. It may run
// for several listeners at once. It returns nil after Drain or Close.
func (s *Server) Serve(lis net.Listener) error {
	s.mu.Lock()
	if s.mu.closing {
		s.mu.Unlock()
		_ = lis.Close() // nobody waits for what it would say
		return nil
	}
	s.mu.listeners[lis] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.mu.listeners, lis)
		s.mu.Unlock()
		_ = lis.Close() // by closeListeners already, or of no use any more
	}()
	s.log.Info("sessions listen", "network", lis.Addr().Network(), "address", lis.Addr().String())
	for {
		c, err := lis.Accept()
		switch {
		case err == nil:
			s.accept(c)
		case s.closing():
			return nil
		case errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOBUFS) ||
			errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.ECONNABORTED):
			s.log.Warn("a connection cannot be accepted", "address", lis.Addr().String(), "err", err)
			pause := time.NewTimer(acceptPause)
			select {
			case <-pause.C:
			case <-s.ctx.Done():
			}
			pause.Stop()
		default:
			return fmt.Errorf("serve sessions on %s: %w", lis.Addr(), err)
		}
	}
}

func (s *Server) closing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.closing
}

// accept starts a connection's goroutine, or closes it when there are too many that
// have not said hello.
func (s *Server) accept(c net.Conn) {
	s.mu.Lock()
	ok := !s.mu.closing && len(s.mu.pending) < s.o.MaxPending
	if ok {
		s.mu.pending[c] = struct{}{}
		s.conns.Add(1)
	}
	s.mu.Unlock()
	if !ok {
		s.stats.refused.Add(1)
		_ = c.Close() // nothing was said on it
		return
	}
	go func() {
		defer s.conns.Done()
		s.serveConn(c)
	}()
}

// serveConn runs a connection from its hello to the end of its session.
func (s *Server) serveConn(c net.Conn) {
	sess, err := s.hello(c)
	s.mu.Lock()
	delete(s.mu.pending, c)
	s.mu.Unlock()
	if err != nil {
		s.log.Debug("session refused", "peer", c.RemoteAddr().String(), "err", err)
		_ = c.Close() // the refusal is what there is to tell
		return
	}
	sess.run()
}

// openingsEnd is how long the end of a server waits for files that are being opened.
const openingsEnd = time.Second

// Drain stops accepting connections and calls, lets the calls that are under way
// end until ctx does, and then ends all sessions. It returns when nothing of the
// server runs, with the context's error if calls were broken off. The places of
// clients that share the store's memory, and live on, are left as they are. Only files
// of clients that are being opened on a file system that does not answer are not waited
// for to the end: what comes of that is given back when it answers.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.mu.closing = true
	for lis := range s.mu.listeners {
		_ = lis.Close() // Serve returns
	}
	for c := range s.mu.pending {
		_ = c.Close() // its hello fails
	}
	for _, sess := range s.mu.sessions {
		sess.drain()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.conns.Wait()
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = fmt.Errorf("drain sessions: calls were broken off: %w", ctx.Err())
	}
	s.cancel()
	<-done
	s.orphans.work.Wait()
	if n := s.openings.wait(openingsEnd); n > 0 {
		s.log.Warn("files of clients are being opened still, on file systems that do not answer", "hellos", n)
	}
	return err
}

// Close is Drain without waiting for calls. It may be called after Drain, and twice.
func (s *Server) Close() error {
	_ = s.Drain(s.noWait) // that calls were broken off is what was asked for
	return nil
}

// namespace is what is known of one that clients name.
type namespace struct {
	name       string
	tag        uint64 // start of its descriptor's digest
	blockBytes int64  // 0: of different lengths
}

// namespace checks that a handle is of this store. A handle that was kept while
// another store took the server's place could name another tenant's blocks.
func (s *Server) namespace(id block.NamespaceID, tag uint64) (*namespace, error) {
	if id == 0 {
		return nil, invalid("namespace: 0, want the handle that OpenNamespace answered")
	}
	have, ok := s.names.Load(id)
	if !ok {
		n, err := s.store.NamespaceByID(id)
		if err != nil {
			return nil, err
		}
		have, _ = s.names.LoadOrStore(id, &namespace{name: n.Desc.Name, tag: n.Desc.Tag(), blockBytes: n.Desc.BlockBytes})
	}
	ns := have.(*namespace)
	if tag != 0 && ns.tag != tag {
		return nil, fmt.Errorf("%w: namespace handle %d was given by another store: open the namespace again", block.ErrNotFound, id)
	}
	return ns, nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", block.ErrInvalid, fmt.Sprintf(format, args...))
}
