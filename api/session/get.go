package session

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// getFlags are those that a get may have.
const getFlags = FlagQuiet | FlagNoPromote | FlagVerify | FlagRanges | FlagInPlace

// get answers CodeGet.
func (s *session) get(id uint64, p []byte) error {
	m := &s.in.get
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	ns, beyond, err := s.keyed(&m.Keys, m.Flags, getFlags, access.Read)
	if err != nil {
		return s.fail(id, err)
	}
	if m.Flags&FlagInPlace != 0 {
		return s.lend(id, m, min(beyond, s.keys))
	}
	w := gets.Get().(*getWork)
	if err := w.prepare(s, id, m, ns, beyond); err != nil {
		gets.Put(w)
		return s.fail(id, err)
	}
	if w.atOnce(m) {
		defer gets.Put(w)
		if err := w.serve(s.ctx); err != nil {
			return s.fail(id, err)
		}
		return nil
	}
	c, err := w.open(m.Deadline)
	if errors.Is(err, ErrBusy) {
		err = s.reply(id, CodeGot, &w.got) // in which every key is busy
		gets.Put(w)
		return err
	}
	return s.spawn(id, c, err, w.run)
}

func (m *GetMessage) options() block.GetOptions {
	return block.GetOptions{
		Class: m.Class, NoPromote: m.Flags&FlagNoPromote != 0, Quiet: m.Flags&FlagQuiet != 0, Verify: m.Flags&FlagVerify != 0, Pieces: true,
	}
}

// atOnceBytes is how much a get may ask for that the reading goroutine answers
// itself, which is cheaper than another one, but holds up what comes behind it while
// the client does not take the bytes.
const atOnceBytes = 128 << 10

// getWork is what one get needs, to be used again.
type getWork struct {
	gotWork
	ns      block.NamespaceID
	hashLen int
	opts    block.GetOptions
	want    []block.Wanted
	looked  bool          // s.found is of this get
	sent    bool          // the answer
	frames  []frame.Frame // to be sent
	bytes   int           // of their payloads
	use     func(i int, p block.Payload) error
}

var gets = sync.Pool{New: func() any {
	w := new(getWork)
	w.use = w.take
	return w
}}

// prepare reads a request. So many of its keys are beyond those to serve.
func (w *getWork) prepare(s *session, id uint64, m *GetMessage, ns *namespace, beyond int) error {
	if err := w.expect(s, id, &m.Keys, ns, beyond); err != nil {
		return err
	}
	w.ns, w.hashLen, w.opts, w.looked, w.sent = m.NS, int(m.HashLen), m.options(), ns.blockBytes == 0, false
	w.forget()
	w.want = sized(w.want, m.Len())
	for i := range w.want {
		w.want[i] = block.Wanted{}
		copy(w.want[i].Hash[:], m.Hashes[i*w.hashLen:][:w.hashLen])
		if len(m.Ranges) > 0 {
			w.want[i].Offset, w.want[i].Length = int64(m.Ranges[i].Offset), int64(m.Ranges[i].Length)
			w.lens[i] = max(0, w.lens[i]-w.want[i].Offset)
			if l := w.want[i].Length; l > 0 {
				w.lens[i] = min(w.lens[i], l)
			}
		}
	}
	return nil
}

// atOnce says whether a get is small, has nothing to wait for behind other calls,
// and asks for nothing that a device has.
func (w *getWork) atOnce(m *GetMessage) bool {
	s := w.s
	var bytes int64
	for _, n := range w.lens {
		bytes += n
	}
	if bytes > min(atOnceBytes, s.bytes) || !s.flight.none() {
		return false
	}
	if !w.looked && s.look(&m.Keys) != nil {
		return false // the get itself will say why
	}
	for i := range s.found.Blocks {
		if f := &s.found.Blocks[i]; f.State != block.Absent && (f.State != block.Resident || f.Tier != block.G2) {
			return false
		}
	}
	w.admit(len(w.want))
	return true
}

// run is serve on a goroutine of its own.
func (w *getWork) run(c *call) error {
	defer gets.Put(w)
	return w.serve(c.ctx)
}

// end readies the call for its answer.
func (w *getWork) end() {
	if w.c != nil {
		w.c.end()
	}
}

// serve sends the bytes and the answer. An error is the answer when none was sent.
func (w *getWork) serve(ctx context.Context) error {
	if w.admitted > 0 {
		if err := w.s.srv.store.Get(ctx, w.ns, w.hashLen, w.want[:w.admitted], w.opts, w.use); err != nil && !w.sent {
			return err
		}
	}
	if w.sent {
		return nil
	}
	w.end()
	return w.s.send(w.s.ctx, w.id, CodeGot, w.answer())
}

const (
	// sendBytes is how much a get collects before it sends: blocks that are smaller go
	// out together, at the cost of one write.
	sendBytes = frame.MaxData
	// endBytes is how much may go out with the answer. The call can be ended until
	// then. It is what a connection writes at once.
	endBytes = 2 * frame.MaxData
)

// take sends what the store hands out, which it collects while it is held. The answer
// goes with the last bytes.
func (w *getWork) take(i int, p block.Payload) error {
	g := &w.got.Blocks[i]
	last := !p.More && i == w.admitted-1
	if len(p.Bytes) > 0 {
		g.Len = uint32(p.At) + uint32(len(p.Bytes))
	}
	if n := int64(len(p.Bytes)); last && n > endBytes && w.c != nil {
		n = (n - 1) / endBytes * endBytes
		w.add(i, p.At, p.Bytes[:n])
		if err := w.flush(); err != nil {
			return err
		}
		p.At, p.Bytes = p.At+n, p.Bytes[n:]
	}
	w.add(i, p.At, p.Bytes)
	if !p.More {
		g.Reason, g.Tier = p.Reason, p.Tier
		if p.Reason == block.Hit {
			g.Total, g.Sum = p.Total, p.Sum
		} else {
			g.Len = 0
		}
		if last {
			w.end()
			w.sent = true
			w.frames = append(w.frames, frame.Frame{
				Header:  frame.Header{Type: frame.Message, Flags: uint8(CodeGot), ID: w.id},
				Payload: w.answer(),
			})
		}
	}
	if len(w.frames) == 0 || p.Held && w.bytes < sendBytes {
		return nil
	}
	return w.flush()
}

// add collects bytes of key i, at an offset in what is wanted of it.
func (w *getWork) add(i int, at int64, b []byte) {
	if len(b) == 0 {
		return
	}
	w.frames = append(w.frames, frame.Frame{
		Header:  frame.Header{Type: frame.Data, ID: w.id, Token: uint64(i), Offset: uint64(at)},
		Payload: b,
	})
	w.bytes += len(b)
}

// flush sends what was collected. Until the answer is among it the call's end ends
// that, too.
func (w *getWork) flush() error {
	ctx := w.s.ctx
	if !w.sent && w.c != nil {
		ctx = w.s.patient(w.c)
	}
	err := w.s.conn.Send(ctx, w.frames...)
	w.forget()
	return err
}

// forget lets go of the store's memory.
func (w *getWork) forget() {
	clear(w.frames)
	w.frames, w.bytes = w.frames[:0], 0
}

// lend answers a get with FlagInPlace, of whose keys so many are beyond those to serve.
// What lies in memory is lent at once.
func (s *session) lend(id uint64, m *GetMessage, beyond int) error {
	switch {
	case !s.shares():
		return s.fail(id, invalid("flags: %#x: this session does not share memory", m.Flags))
	case m.Flags&FlagRanges != 0:
		return s.fail(id, invalid("flags: %#x: blocks are lent whole", m.Flags))
	}
	if err := s.leases.take(); err != nil {
		return s.fail(id, err)
	}
	o := m.options()
	hl := int(m.HashLen)
	if !o.Verify { // which takes as long as reading
		near := o
		near.NoPromote = true
		loans, lease, err := s.srv.store.Lend(s.ctx, m.NS, hl, m.Hashes, near, s.srv.o.LendFor, s.id)
		if err != nil {
			s.leases.cancel()
			return s.fail(id, err)
		}
		if o.NoPromote || !slices.ContainsFunc(loans, func(l block.Loan) bool { return l.Reason == block.MissNoRoom }) {
			s.leases.add(lease)
			return s.reply(id, CodeGot, s.lent(m.NS, loans, lease, beyond))
		}
		if lease.ID != 0 {
			_ = s.srv.store.ReleaseLease(lease.ID) // it may have run out
		}
	}
	hashes := slices.Clone(m.Hashes) // the next message is read over them
	ns := m.NS
	c, err := s.open(id, m.Deadline)
	if err != nil {
		s.leases.cancel()
	}
	return s.spawn(id, c, err, func(c *call) error {
		loans, lease, err := s.srv.store.Lend(c.ctx, ns, hl, hashes, o, s.srv.o.LendFor, s.id)
		if err != nil {
			s.leases.cancel()
			return err
		}
		s.leases.add(lease)
		c.end()
		return s.send(s.ctx, id, CodeGot, s.lent(ns, loans, lease, beyond).Append(nil))
	})
}

// lent says where loans lie. What is in memory that the client is not passed it gets
// otherwise.
func (s *session) lent(ns block.NamespaceID, loans []block.Loan, lease block.Lease, beyond int) *GotMessage {
	m := &GotMessage{Lease: lease.ID, LeaseMS: millis(lease.Left), Blocks: make([]GotBlock, len(loans)+beyond)}
	for i, l := range loans {
		m.Blocks[i] = GotBlock{Reason: l.Reason, Tier: l.Tier, Chunk: NoChunk}
		switch {
		case l.Reason != block.Hit:
		case !s.mapsChunk(l.Chunk, ns, access.Read):
			m.Blocks[i].Reason = block.MissNoRoom
		default:
			m.Blocks[i] = GotBlock{Tier: l.Tier, Len: l.Len, Total: l.Len, Chunk: uint32(l.Chunk), Offset: uint64(l.Offset), Sum: l.Sum}
		}
	}
	for i := range beyond {
		m.Blocks[len(loans)+i] = GotBlock{Status: StatusBusy, Chunk: NoChunk}
	}
	return m
}
