package shm

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// Codes in the Flags of messages.
const (
	codeAcquire uint8 = 1 // initiator: may I use the region of Token? Answered by a Done with a grant.
	codeRevoked uint8 = 2 // owner: the region of Token is gone; the initiator forgets it
)

// Status of an answer.
const (
	statusOK     uint16 = 0
	statusNone   uint16 = 1 // there is no such region
	statusNoRoom uint16 = 2 // the gate is full; a new connection has a new one
)

// notesAhead bounds the notifications that a peer may send before the first is
// taken, per connection.
const notesAhead = 16

// served is a connection that a peer made to use memory of this process.
type served struct {
	b     *Backend
	peer  xfer.PeerID
	line  *line
	conn  *frame.Conn
	out   outbox
	notes chan noted
	words uint32        // of the gate in use; the reader's
	quiet chan struct{} // closed when the peer touches nothing of ours any more
	mu    struct {
		sync.Mutex // held while the gate is looked at
		arena      *arena.Arena
		gate       gate // nil when it is unmapped
		used       uint32
	}
}

type noted struct {
	id  uint64
	msg []byte
}

func newServed(b *Backend, l *line, peer xfer.PeerID, a *arena.Arena) *served {
	s := &served{b: b, peer: peer, line: l, words: 1, notes: make(chan noted, notesAhead), quiet: make(chan struct{})}
	s.conn = frame.NewConn(l, &b.frames)
	s.out = newOutbox(s.conn)
	s.mu.arena, s.mu.gate, s.mu.used = a, gateOf(a.Chunks()[0]), 1
	return s
}

// run serves until the peer touches nothing any more.
func (s *served) run() {
	var wg sync.WaitGroup
	wg.Go(s.out.run)
	wg.Go(s.deliver)
	err := s.conn.Serve(s)
	close(s.out.over)
	s.b.log.Debug("shm: peer left", "peer", s.peer, "reason", err)
	s.shutAll()
	wg.Wait()
	s.settle()
}

// cut ends the connection. Nobody enters its gate any more.
func (s *served) cut() {
	s.shutAll()
	_ = s.conn.Close() // always nil
}

// shutAll shuts the whole gate.
func (s *served) shutAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.gate == nil {
		return
	}
	for w := range s.mu.used {
		s.mu.gate.shut(w)
	}
}

// settle waits until the peer is out of the gate, or has closed its end: it does
// that when it is quiet, and the kernel when it is dead.
func (s *served) settle() {
	wait, buf := time.Millisecond, make([]byte, 4<<10)
	for !s.empty() {
		if err := s.line.UnixConn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			break
		}
		if _, err := s.line.Read(buf); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		wait = min(2*wait, 100*time.Millisecond)
	}
	s.mu.Lock()
	s.mu.gate = nil
	err := s.mu.arena.Close()
	s.mu.Unlock()
	if err != nil {
		s.b.log.Error("shm: gate", "peer", s.peer, "err", err)
	}
	close(s.quiet)
	s.line.finish()
}

// empty says whether nobody is inside any gate.
func (s *served) empty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := uint32(1); w < s.mu.used; w++ {
		if !s.mu.gate.quiet(w) {
			return false
		}
	}
	return true
}

// shutWord lets nobody into one region any more.
func (s *served) shutWord(w uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.gate != nil {
		s.mu.gate.shut(w)
	}
}

// outOf waits until the peer is out of a region.
func (s *served) outOf(w uint32) {
	// A piece takes a millisecond at most, as a rule a tenth, so looking again is
	// cheaper than being told.
	wait := 20 * time.Microsecond
	for !s.isOut(w) {
		select {
		case <-s.quiet:
			return
		case <-time.After(wait):
		}
		wait = min(2*wait, 10*time.Millisecond)
	}
}

func (s *served) isOut(w uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.gate == nil || s.mu.gate.quiet(w)
}

// Land is for data frames, which this protocol has not.
func (s *served) Land(*frame.Header) []byte { return nil }

// Landed follows no Land.
func (s *served) Landed(*frame.Header, []byte, error) error { return nil }

// Frame answers the peer's messages.
func (s *served) Frame(h *frame.Header, p []byte) error {
	switch {
	case h.Type == frame.Message && h.Flags == codeAcquire:
		return s.out.tryPut(s.grant(h))
	case h.Type == frame.Note:
		if len(p) > xfer.MaxNotification {
			return fmt.Errorf("%w: notification of %d bytes, at most %d", errProtocol, len(p), xfer.MaxNotification)
		}
		select {
		case s.notes <- noted{h.ID, append([]byte(nil), p...)}:
			return nil
		default:
			return fmt.Errorf("%w: more than %d notifications ahead", errProtocol, notesAhead)
		}
	}
	return fmt.Errorf("%w: type %d with code %d", errProtocol, h.Type, h.Flags)
}

// grant lets the peer use a region.
func (s *served) grant(h *frame.Header) frame.Frame {
	answer := frame.Frame{Header: frame.Header{Type: frame.Done, ID: h.ID}}
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.mu.regions[h.Token]
	if r == nil {
		answer.Status = statusNone
		return answer
	}
	w, ok := r.holders[s]
	if !ok {
		if s.words == gateWords {
			answer.Status = statusNoRoom
			return answer
		}
		w = s.words
		s.words++
		s.mu.Lock()
		s.mu.used = s.words
		cut := s.mu.gate.isShut(0)
		if cut {
			s.mu.gate.shut(w)
		}
		s.mu.Unlock()
		r.holders[s] = w
	}
	info := grantInfo{word: w, addr: r.addr, len: r.len}
	if r.file != nil {
		info.file, info.bytes, info.off = r.file.id, uint64(r.file.bytes), uint64(r.off)
	}
	answer.Payload = info.encode()
	return answer
}

// deliver puts notifications into the queue and says so.
func (s *served) deliver() {
	for {
		select {
		case n := <-s.notes:
			select {
			case s.b.notes <- xfer.Notification{Peer: s.peer, Msg: n.msg}:
			case <-s.out.over:
				return
			}
			done := frame.Frame{Header: frame.Header{Type: frame.Done, ID: n.id}}
			if err := s.out.tryPut(done); err != nil {
				s.cut()
				return
			}
		case <-s.out.over:
			return
		}
	}
}
