package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// echoServer speaks as much of the sessions' protocol as it takes to answer each match
// with the same bytes, which it does not make for it: what a call costs by itself. A
// Locate has it do that, and is answered with the nanoseconds that it took: so it is done
// between calls, as a daemon does it.
type echoServer struct {
	l       net.Listener
	log     func(format string, args ...any)
	matched []byte
	match   func() (time.Duration, error)
	wg      sync.WaitGroup

	mu struct {
		sync.Mutex
		conns []*frame.Conn
	}
}

// startEcho serves on a unix socket, and answers with n blocks. match is a match of as
// many.
func startEcho(ctx context.Context, socket string, n int, match func() (time.Duration, error), log func(format string, args ...any)) (*echoServer, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	m := session.MatchedMessage{Prefix: uint32(n), Lease: 1, LeaseMS: 10_000, Leased: uint32(n)}
	for range n {
		m.Blocks = append(m.Blocks, block.Found{State: block.Resident, Tier: block.G2, Len: 64})
	}
	s := &echoServer{l: l, log: log, matched: m.Append(nil), match: match}
	s.wg.Go(s.accept)
	return s, nil
}

func (s *echoServer) accept() {
	for {
		c, err := s.l.Accept()
		if err != nil {
			return // it was closed
		}
		s.wg.Go(func() {
			if err := s.serve(c); err != nil && !errors.Is(err, frame.ErrBye) {
				s.log("bare server of sessions: %v", err)
			}
		})
	}
}

// serve answers one connection.
func (s *echoServer) serve(c net.Conn) error {
	_, _, err := frame.RecvHello(c)
	if err == nil {
		w := session.WelcomeMessage{Version: 1, Session: 1, Calls: 64, Bytes: 1 << 30, Keys: 8192, Grants: 64, GrantBytes: 1 << 30, Message: frame.MaxMessage, Name: "bare"}
		err = frame.SendHello(c, w.Append(nil), nil)
	}
	if err != nil {
		return errors.Join(err, c.Close())
	}
	e := &echo{s, frame.NewConn(c, nil)}
	s.mu.Lock()
	s.mu.conns = append(s.mu.conns, e.c)
	s.mu.Unlock()
	err = e.c.Serve(e)
	if errors.Is(err, io.EOF) {
		err = nil // the worker has ended
	}
	return errors.Join(err, e.c.Close())
}

// close ends the server and its connections.
func (s *echoServer) close() error {
	err := s.l.Close()
	s.mu.Lock()
	conns := s.mu.conns
	s.mu.Unlock()
	for _, c := range conns {
		err = errors.Join(err, c.Close())
	}
	s.wg.Wait()
	return err
}

// echo is one connection.
type echo struct {
	s *echoServer
	c *frame.Conn
}

func (e *echo) Land(*frame.Header) []byte                       { return nil }
func (e *echo) Landed(_ *frame.Header, _ []byte, _ error) error { return nil }

func (e *echo) Frame(h *frame.Header, _ []byte) error {
	if h.Type != frame.Message {
		return nil
	}
	switch session.Code(h.Flags) {
	case session.CodeMatch:
		return e.reply(h.ID, session.CodeMatched, e.s.matched)
	case session.CodeLocate:
		took, err := e.s.match()
		if err != nil {
			return err
		}
		return e.reply(h.ID, session.CodeLocated, binary.LittleEndian.AppendUint64(nil, uint64(took)))
	}
	return fmt.Errorf("code %d, want a match or a locate", h.Flags)
}

func (e *echo) reply(id uint64, code session.Code, p []byte) error {
	return e.c.Send(context.Background(), frame.Frame{
		Header: frame.Header{Type: frame.Message, Flags: uint8(code), ID: id}, Payload: p,
	})
}
