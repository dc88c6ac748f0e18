package session

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// hello reads the client's hello and answers it. With an error there is no session,
// that is counted, and the client has been told why if it could be.
func (s *Server) hello(c net.Conn) (*session, error) {
	deadline := time.Now().Add(s.o.HelloTimeout)
	if err := c.SetDeadline(deadline); err != nil {
		s.stats.refused.Add(1)
		return nil, fmt.Errorf("hello: %w", err)
	}
	p, files, err := frame.RecvHello(c)
	defer func() { closeFiles(files) }() // those that register has not taken
	if err != nil {
		if errors.Is(err, frame.ErrFrame) {
			s.refuse(c, invalid("hello: %v", err))
		} else {
			s.stats.refused.Add(1) // nobody is there who could be told
		}
		return nil, fmt.Errorf("hello: %w", err)
	}
	var m HelloMessage
	w := WelcomeMessage{
		Version: Version, Incarnation: s.incarnation, Calls: uint32(s.o.Calls), Bytes: uint64(s.o.Bytes),
		GrantBytes: uint64(s.o.GrantBytes), Name: s.o.Name,
	}
	if err := s.agree(&m, p, &w); err != nil {
		s.refuse(c, err)
		return nil, err
	}
	sess := &session{
		srv: s, name: strings.ToValidUTF8(m.Name, "\ufffd"), peer: c.RemoteAddr().String(), began: time.Now(),
		calls: int(w.Calls), bytes: int64(w.Bytes), keys: int(w.Keys), grants: int(w.Grants), message: int(w.Message),
	}
	sess.hinted = m.Features&FeatureHints != 0
	if sess.hinted {
		w.Features |= FeatureHints
	}
	if sess.cred, err = peerCred(c); err != nil {
		s.refuse(c, err)
		return nil, err
	}
	if sess.identity, err = s.identify(m.Token, sess.cred); err != nil {
		s.refuse(c, err)
		return nil, err
	}
	if m.Features&FeatureRegions != 0 {
		ctx, cancel := context.WithDeadline(s.ctx, deadline)
		err := sess.register(ctx, c, &m, files)
		cancel()
		files = nil
		if err != nil {
			err = fmt.Errorf("hello: %w", err)
			s.refuse(c, err)
			return nil, err
		}
		w.Features |= FeatureRegions
	}
	var fds []int
	if m.Features&FeatureShared != 0 {
		var sent func()
		fds, sent = s.share(sess, c, &w)
		defer sent()
	}
	if m.Features&FeatureChunks != 0 && fds == nil {
		var sent func()
		fds, sent = s.pass(sess, c, &w)
		defer sent()
	}
	if err := s.register(sess); err != nil {
		sess.unregister()
		sess.passing.close()
		s.refuse(c, err)
		return nil, err
	}
	// It is listed from here on: a client that has been welcomed finds itself there. The
	// frames of its connection begin behind the welcome.
	w.Session = sess.id
	if err := frame.SendHello(c, w.Append(nil), fds); err != nil {
		sess.cancel()
		sess.unregister()
		sess.passing.close()
		s.stats.refused.Add(1)
		s.retire(sess)
		return nil, fmt.Errorf("welcome: %w", err)
	}
	o := s.o.Frame
	o.MaxMessage = sess.message
	conn := frame.NewConn(c, &o)
	s.mu.Lock()
	defer s.mu.Unlock()
	sess.conn = conn
	return sess, nil
}

// share finds the files of the store's memory for a session whose client may read all
// that is in them, for reading only when it may not write all, and says so in its
// welcome. sent is to be called when they were sent.
func (s *Server) share(sess *session, c net.Conn, w *WelcomeMessage) (fds []int, sent func()) {
	sent = func() {}
	rights := sess.identity.All()
	if _, local := c.(*net.UnixConn); !local || len(s.memory) == 0 || rights&access.Read == 0 {
		return nil, sent
	}
	var err error
	if rights&access.Write != 0 {
		if sess.process, err = peerProcess(c); err == nil {
			for _, f := range s.memory {
				fds = append(fds, f.Fd)
			}
		}
	} else if fds, err = readOnly(s.memory); err == nil {
		sent = func() { closeFiles(fds) }
	}
	if err != nil {
		s.log.Warn("memory is not shared with a client", "peer", c.RemoteAddr().String(), "name", sess.name, "err", err)
		return nil, sent
	}
	sess.memory = rights
	w.Features |= FeatureShared
	for _, f := range s.memory {
		w.Chunks = append(w.Chunks, uint64(f.Bytes))
	}
	return fds, sent
}

// readOnly opens memory files again, for reading only. They are the caller's to close.
func readOnly(files []block.MemoryFile) (fds []int, err error) {
	for _, f := range files {
		fd, err := openFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd), unix.O_RDONLY)
		if err != nil {
			closeFiles(fds)
			return nil, fmt.Errorf("memory for reading: %w", err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// agree decodes a hello and settles versions and limits.
func (s *Server) agree(m *HelloMessage, p []byte, w *WelcomeMessage) error {
	if err := m.Decode(p); err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	if m.MinVersion > Version || m.MaxVersion < 1 || m.MinVersion > m.MaxVersion {
		return fmt.Errorf("hello: %w: versions %d to %d: this server speaks 1 to %d", block.ErrUnavailable, m.MinVersion, m.MaxVersion, Version)
	}
	if err := checkMessage(m.Message); err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	w.Version = min(m.MaxVersion, Version)
	w.Message = min(m.Message, uint32(s.o.Message))
	keys := min(s.o.Keys, keysOf(int(w.Message)))
	w.Keys, w.Grants = uint32(keys), uint32(min(s.o.Grants, keys)) // of which one message can name all
	if m.Calls != 0 {
		w.Calls = min(w.Calls, m.Calls)
	}
	if m.Bytes != 0 {
		w.Bytes = min(w.Bytes, m.Bytes)
	}
	return nil
}

// identify says who a client is: by the token that it gives or, over a unix socket
// without one, by its user.
func (s *Server) identify(token string, cred *unix.Ucred) (*access.Identity, error) {
	l := s.o.Access
	var id *access.Identity
	switch {
	case l == nil:
		return nil, nil
	case token != "":
		id = l.ByToken(token)
	case cred != nil:
		id = l.ByUID(cred.Uid)
	}
	switch {
	case id != nil:
		return id, nil
	case token == "" && cred != nil && l.Users():
		return nil, fmt.Errorf("hello: %w: token absent, and user %d is nobody that is known here", block.ErrDenied, cred.Uid)
	}
	return nil, fmt.Errorf("hello: %w: token absent or wrong", block.ErrDenied)
}

// register gives a session its id and a place among the others.
func (s *Server) register(sess *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.closing:
		return fmt.Errorf("hello: %w: the server is closing", block.ErrClosed)
	case len(s.mu.sessions) >= s.o.MaxSessions:
		return fmt.Errorf("hello: %w: %d sessions are open", ErrBusy, len(s.mu.sessions))
	}
	if err := sess.identity.TakeSession(); err != nil {
		return fmt.Errorf("hello: %w: %w", ErrBusy, err)
	}
	for sess.id == 0 || s.mu.sessions[sess.id] != nil {
		var b [8]byte
		_, _ = rand.Read(b[:]) // it never fails
		sess.id = binary.LittleEndian.Uint64(b[:])
	}
	sess.ctx, sess.cancel = context.WithCancel(s.ctx)
	sess.init()
	s.mu.sessions[sess.id] = sess
	s.stats.accepted.Add(1)
	return nil
}

// refuse counts a client that gets no session, tells it why, and waits a moment for it to
// read that: closing at once, with bytes of its unread, could take the answer from it.
func (s *Server) refuse(c net.Conn, err error) {
	s.stats.refused.Add(1)
	_ = c.SetDeadline(time.Now().Add(time.Second)) // of a connection that ends in any case
	w := WelcomeMessage{Status: StatusOf(err), Text: err.Error(), Version: Version}
	if frame.SendHello(c, w.Append(nil), nil) != nil {
		return
	}
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
	}
}
