package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// server is a connection that a peer dialed: it calls, we serve. The goroutine that
// receives never sends, so that two agents that read from each other do not wait for
// each other; another goroutine sends, of a queue that is bounded.
type server struct {
	b    *Backend
	raw  net.Conn    // under TLS; closing it never waits
	conn *frame.Conn // since serve
	key  lineKey

	landing *region           // into which a frame is read now; the receiver's
	refused map[uint32]*spans // by call; the receiver's
	once    sync.Once
	gone    chan struct{} // closed when the connection is given up
	left    chan struct{} // closed when nothing lands any more
	wake    chan struct{} // tells the sender that there is something

	mu struct {
		sync.Mutex
		answers []frame.Frame
		reads   []*reading // the first is the next of which some is sent
	}
}

// reading is a read under way.
type reading struct {
	call     uint32
	list     entries
	next     int    // piece
	off      uint32 // in it
	refused  spans
	canceled bool // guarded by the server's mutex
}

// maxRefusing bounds the calls of which refusals are remembered.
const maxRefusing = 1024

func newServer(b *Backend, raw net.Conn, key lineKey) *server {
	return &server{
		b: b, raw: raw, key: key,
		refused: map[uint32]*spans{},
		gone:    make(chan struct{}), left: make(chan struct{}), wake: make(chan struct{}, 1),
	}
}

// serve serves c, which is raw or TLS over it, until the connection ends.
func (s *server) serve(c net.Conn) {
	s.conn = frame.NewConn(c, &s.b.opt.Frame)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		s.send()
	}()
	err := s.conn.Serve(s)
	s.end()
	<-sent
	_ = s.conn.Close() // why is known
	s.b.leave(s)
	if errors.Is(err, errProtocol) || errors.Is(err, frame.ErrFrame) {
		s.b.log.Warn("tcp: connection ended", "peer", s.key.from.String(), "err", err)
	}
}

// end gives the connection up.
func (s *server) end() {
	s.once.Do(func() {
		close(s.gone)
		_ = s.raw.Close() // nothing else is to be told
	})
}

// find enters the region of a piece, if a peer may touch it.
func (s *server) find(token, off, n uint64) *region {
	r := s.b.region(token)
	if r == nil || !r.covers(off, n) || !r.enter(s) {
		return nil
	}
	return r
}

// covering is find for an entry of a list, where held is the region of the entry before,
// entered still, or nil. It is nil when the entry is refused, and then none is held.
func (s *server) covering(held *region, e entry) *region {
	if held != nil && (held.token != e.token || !held.covers(e.off, uint64(e.n))) {
		held.exit(s)
		held = nil
	}
	if held == nil {
		held = s.find(e.token, e.off, uint64(e.n))
	}
	return held
}

// Land finds the memory that a write is for.
func (s *server) Land(h *frame.Header) []byte {
	if h.Length == 0 {
		return nil
	}
	r := s.find(h.Token, h.Offset, uint64(h.Length))
	if r == nil {
		s.refuse(splitID(h.ID))
		return nil
	}
	s.landing = r
	return r.at(h.Offset, uint64(h.Length))
}

// Landed lets go of the memory.
func (s *server) Landed(h *frame.Header, p []byte, err error) error {
	s.landing.exit(s)
	s.landing = nil
	if err == nil {
		s.b.count.bytesIn.Add(int64(len(p)))
	}
	return nil
}

// refuse remembers for the answer that a piece was refused.
func (s *server) refuse(call, piece uint32) {
	s.b.count.refuse.Add(1)
	r := s.refused[call]
	if r == nil {
		if len(s.refused) == maxRefusing {
			s.end() // it never asks what became of its writes
			return
		}
		r = &spans{}
		s.refused[call] = r
	}
	r.add(piece)
}

// Frame takes calls.
func (s *server) Frame(h *frame.Header, p []byte) error {
	call, piece := splitID(h.ID)
	switch h.Type {
	case typeScatter:
		return s.scatter(call, piece, p)
	case frame.Flush:
		a := frame.Frame{Header: frame.Header{Type: frame.Done, ID: h.ID}}
		if r := s.refused[call]; r != nil {
			delete(s.refused, call)
			a.Status, a.Payload = statusRefused, r.append(nil)
		}
		return s.answer(a)
	case frame.Read:
		return s.read(call, p)
	case typeCancel:
		s.mu.Lock()
		for _, r := range s.mu.reads {
			if r.call == call {
				r.canceled = true
			}
		}
		s.mu.Unlock()
	case frame.Note:
		if len(p) > xfer.MaxNotification {
			return fmt.Errorf("%w: notification of %d bytes, at most %d", errProtocol, len(p), xfer.MaxNotification)
		}
		a := frame.Frame{Header: frame.Header{Type: frame.Done, ID: h.ID}}
		if !s.b.deliver(s.key.from, p) {
			a.Status = statusBusy
		}
		return s.answer(a)
	case frame.Hello, frame.Done, frame.Message, typeGather:
		return fmt.Errorf("%w: type %d from who calls", errProtocol, h.Type)
	}
	return nil // of a later version
}

// scatter copies small pieces to their places.
func (s *server) scatter(call, first uint32, p []byte) error {
	list, p, err := parseScatter(p)
	if err != nil {
		return err
	}
	var r *region // entered
	for i := range list.len() {
		e := list.at(i)
		from := p[:e.n]
		p = p[e.n:]
		if r = s.covering(r, e); r == nil {
			s.refuse(call, first+uint32(i))
			continue
		}
		copy(r.at(e.off, uint64(e.n)), from)
		s.b.count.bytesIn.Add(int64(e.n))
	}
	if r != nil {
		r.exit(s)
	}
	return nil
}

// read puts a read into the queue, or refuses it when that is full.
func (s *server) read(call uint32, p []byte) error {
	list, err := parseRead(p)
	if err != nil {
		return err
	}
	s.mu.Lock()
	full := len(s.mu.reads) >= s.b.opt.Calls
	if !full {
		s.mu.reads = append(s.mu.reads, &reading{call: call, list: append(entries(nil), list...)})
	}
	s.mu.Unlock()
	if full {
		return s.answer(frame.Frame{Header: frame.Header{Type: frame.Done, ID: callID(call, 0), Status: statusBusy}})
	}
	s.rouse()
	return nil
}

// answer puts an answer into the queue. The peer has a bounded number of calls; one
// that makes more and does not take the answers loses its connection.
func (s *server) answer(a frame.Frame) error {
	s.mu.Lock()
	full := len(s.mu.answers) >= 4*s.b.opt.Calls
	if !full {
		s.mu.answers = append(s.mu.answers, a)
	}
	s.mu.Unlock()
	if full {
		return fmt.Errorf("%w: %d answers wait to be taken", errProtocol, 4*s.b.opt.Calls)
	}
	s.rouse()
	return nil
}

func (s *server) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// send sends answers, and parts of the reads in turn.
func (s *server) send() {
	defer s.end()
	var o outgoing
	defer func() { s.b.putBuffer(o.buf) }()
	for {
		s.mu.Lock()
		o.frames = append(o.frames[:0], s.mu.answers...)
		s.mu.answers = s.mu.answers[:0]
		var r *reading
		canceled := false
		if len(s.mu.reads) > 0 {
			r = s.mu.reads[0]
			canceled = r.canceled
		}
		s.mu.Unlock()
		if len(o.frames) == 0 && r == nil {
			s.b.putBuffer(o.buf) // for others, while there is nothing to do here
			o.buf = nil
			select {
			case <-s.wake:
				continue
			case <-s.gone:
				return
			}
		}
		if r != nil {
			over := s.fill(&o, r, canceled)
			s.advance(over) // before the answer is sent, upon which the peer may call again
		}
		err := s.conn.Send(context.Background(), o.frames...)
		for _, e := range o.entered {
			e.exit(s)
		}
		o.entered = o.entered[:0]
		if err != nil {
			return
		}
		if r != nil {
			s.b.count.bytesOut.Add(o.bytes)
		}
	}
}

// advance takes the first read from the queue, or puts it behind the others.
func (s *server) advance(over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.mu.reads[0]
	s.mu.reads = append(s.mu.reads[:0], s.mu.reads[1:]...)
	if !over {
		s.mu.reads = append(s.mu.reads, r)
	}
}

// outgoing is what is sent at once.
type outgoing struct {
	frames  []frame.Frame
	entered []*region
	bytes   int64   // of memory
	buf     *[]byte // small pieces are copied here
}

// fill makes the next frames of a read, with the answer when that is all.
func (s *server) fill(o *outgoing, r *reading, canceled bool) (over bool) {
	o.bytes = 0
	if o.buf != nil {
		*o.buf = (*o.buf)[:0]
	}
	for n := 0; r.next < r.list.len() && !canceled && o.bytes < batchBytes && n < batchFrames; n++ {
		e := r.list.at(r.next)
		if r.off == 0 && e.n <= smallBytes && r.next+1 < r.list.len() && r.list.at(r.next+1).n <= smallBytes {
			s.gather(o, r)
			continue
		}
		at := e.off + uint64(r.off)
		k := min(e.n-r.off, uint32(batchBytes-o.bytes))
		g := s.find(e.token, e.off, uint64(e.n)) // all of it, so that no part of a refused piece is sent
		if g == nil {
			s.refuseRead(r)
			continue
		}
		o.entered = append(o.entered, g)
		o.frames = append(o.frames, frame.Frame{
			Header:  frame.Header{Type: frame.Data, ID: callID(r.call, uint32(r.next)), Offset: uint64(r.off)},
			Payload: g.at(at, uint64(k)),
		})
		o.bytes += int64(k)
		if r.off += k; r.off == e.n {
			r.next, r.off = r.next+1, 0
		}
	}
	if r.next < r.list.len() && !canceled {
		return false
	}
	done := frame.Frame{Header: frame.Header{Type: frame.Done, ID: callID(r.call, 0)}}
	switch {
	case canceled:
		done.Status = statusCanceled
	case len(r.refused.list) > 0:
		done.Status, done.Payload = statusRefused, r.refused.append(nil)
	}
	o.frames = append(o.frames, done)
	return true
}

func (s *server) refuseRead(r *reading) {
	s.b.count.refuse.Add(1)
	r.refused.add(uint32(r.next))
	r.next, r.off = r.next+1, 0
}

// gather copies whole small pieces into one frame, up to one that is refused.
func (s *server) gather(o *outgoing, r *reading) {
	if o.buf == nil {
		o.buf = s.b.buffer()
	}
	buf := *o.buf
	start, first := len(buf), r.next
	var g *region // entered
	for ; r.next < r.list.len(); r.next++ {
		e := r.list.at(r.next)
		if e.n > smallBytes || len(buf)-start+int(e.n) > packBytes {
			break
		}
		if g = s.covering(g, e); g == nil {
			break
		}
		buf = append(buf, arena.View(g.base+e.off, int(e.n))...)
	}
	if g != nil {
		g.exit(s)
	}
	*o.buf = buf
	if r.next == first {
		s.refuseRead(r)
		return
	}
	o.bytes += int64(len(buf) - start)
	o.frames = append(o.frames, frame.Frame{
		Header:  frame.Header{Type: typeGather, ID: callID(r.call, uint32(first))},
		Payload: buf[start:],
	})
}
