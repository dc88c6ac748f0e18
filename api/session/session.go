package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// session is a connection after its hello. One goroutine reads it: it lands data
// and answers what needs no waiting. The other calls have a goroutine each.
type session struct {
	srv      *Server
	id       uint64
	name     string
	peer     string // address of the client
	began    time.Time
	identity *access.Identity
	cred     *unix.Ucred  // of the client, over a unix socket; else nil
	memory   access.Right // what the client may do with the store's memory; 0: it has none
	process  *process     // of the client, when it may write there
	passing  *passing     // of chunks of that memory to the client; nil: it is passed none, or all with the hello
	calls    int          // limits
	bytes    int64
	keys     int // and grants, at most: of one message
	grants   int
	message  int  // bytes
	hinted   bool // FeatureHints

	regions regions // of the client, mapped until the session ends
	held    *socket // keeps the connection from ending while they are touched; nil without them

	conn   *frame.Conn     // nil until the welcome has been sent; set under the server's lock
	ctx    context.Context // ends with the session
	cancel context.CancelFunc

	flight flight
	leases leases
	places places

	// Of the reading goroutine, used again for each message.
	in struct {
		match   MatchMessage
		get     GetMessage
		put     PutMessage
		release ReleaseMessage
		renew   RenewMessage
	}
	rights   map[*namespace]access.Right // that were asked for already
	found    block.MatchResult
	puts     putWork
	matched  MatchedMessage
	statuses []Status
	out      []byte
}

// init makes ready a session that has its id, before others see it.
func (s *session) init() {
	s.rights = make(map[*namespace]access.Right)
	s.flight.init()
	s.leases.init(s.id, s.identity, s.srv.o.Leases)
	s.places.init(s)
}

// run serves the session until its connection ends, and gives back what it held.
func (s *session) run() {
	log := s.srv.log.With("session", fmt.Sprintf("%016x", s.id), "client", s.name, "identity", s.identity.Name(), "peer", s.peer)
	log.Debug("session begins", "shared", s.shares(), "regions", len(s.regions.all))
	stop := context.AfterFunc(s.ctx, func() { _ = s.conn.Close() }) // which never fails
	if !s.flight.begin() {
		s.cancel() // the server began to drain before this session did
	}
	err := s.conn.Serve(s)
	stop()
	s.flight.end()
	s.cancel()
	_ = s.conn.Close() // as above; its goroutines have ended then
	s.flight.work.Wait()
	s.places.end()
	if uerr := s.srv.dropRegions(&s.regions); uerr != nil {
		log.Warn("regions of a session", "err", uerr)
	}
	s.srv.store.EndSession(s.id)
	s.leases.end()
	s.srv.retire(s)
	s.held.close()
	s.passing.close()
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		log.Debug("session ends")
	} else {
		log.Info("session is broken off", "err", err)
	}
}

// shares reports whether the client maps the store's memory, or parts of it.
func (s *session) shares() bool { return s.memory != 0 || s.passing != nil }

// drain lets calls end that are under way, but not begin, and then the session.
func (s *session) drain() {
	if !s.flight.drain() {
		return
	}
	go func() {
		defer s.flight.work.Done()
		select {
		case <-s.flight.idle:
			ctx, cancel := context.WithTimeout(s.ctx, time.Second)
			defer cancel()
			_ = s.conn.Send(ctx, frame.Frame{Header: frame.Header{Type: frame.Bye}, Payload: []byte("the server is closing")}) // a courtesy
			s.cancel()
		case <-s.ctx.Done():
		}
	}()
}

// Frame implements frame.Handler.
func (s *session) Frame(h *frame.Header, p []byte) error {
	switch h.Type {
	case frame.Message:
	case frame.Hello:
		return invalid("a second hello")
	default:
		return nil // of another protocol, or a later version: skipped
	}
	code := Code(h.Flags)
	if n := int(h.Length); n > len(p) { // it was skipped
		switch code {
		case CodeCancel, CodeFailed:
			return nil // of which there is nothing to say
		}
		return s.fail(h.ID, invalid("message: %d bytes, at most %d", n, s.message))
	}
	if int(code) < len(s.srv.stats.calls) {
		s.srv.stats.calls[code].Add(1)
	}
	switch code {
	case CodeMatch:
		return s.match(h.ID, p)
	case CodeGet:
		return s.get(h.ID, p)
	case CodeGrant:
		return s.grant(h.ID, p)
	case CodePut:
		return s.put(h.ID, p)
	case CodeRelease:
		return s.release(h.ID, p)
	case CodeRenew:
		return s.renew(h.ID, p)
	case CodePrefetch:
		return s.prefetch(h.ID, p)
	case CodeLocate:
		return s.locate(h.ID, p)
	case CodeWatch:
		return s.watch(h.ID, p)
	case CodeOpen:
		return s.openNamespace(h.ID, p)
	case CodePin:
		return s.pin(h.ID, p)
	case CodeRegionGet:
		return s.regionGet(h.ID, p)
	case CodeRegionPut:
		return s.regionPut(h.ID, p)
	case CodeReportPrefill:
		if s.hinted {
			return s.reportPrefill(h.ID, p)
		}
	case CodeCancel:
		s.flight.stop(h.ID)
		return nil
	case CodeFailed:
		return nil // an answer to nothing that was asked
	}
	return s.fail(h.ID, invalid("code: %d, want that of a request", code))
}

// Land implements frame.Handler: data is for a place of this session, or skipped.
func (s *session) Land(h *frame.Header) []byte { return s.places.land(h.Token, h.Offset, h.Length) }

// Landed implements frame.Handler.
func (s *session) Landed(_ *frame.Header, p []byte, err error) error {
	s.places.landed(p, err)
	return nil
}

// appender is a message that can be sent.
type appender interface{ Append(b []byte) []byte }

// reply sends a message on the reading goroutine. A client that does not take it
// holds up only itself, and loses the session in the end.
func (s *session) reply(id uint64, c Code, m appender) error {
	s.out = m.Append(s.out[:0])
	return s.send(s.ctx, id, c, s.out)
}

func (s *session) send(ctx context.Context, id uint64, c Code, p []byte) error {
	return s.conn.Send(ctx, frame.Frame{Header: frame.Header{Type: frame.Message, Flags: uint8(c), ID: id}, Payload: p})
}

// fail answers a call that failed as a whole. It fails only with the connection.
func (s *session) fail(id uint64, err error) error {
	m := FailedMessage{Status: StatusOf(err), Text: err.Error()}
	if m.Status == StatusBusy {
		s.srv.stats.busy.Add(1)
	}
	return s.send(s.ctx, id, CodeFailed, m.Append(nil))
}
