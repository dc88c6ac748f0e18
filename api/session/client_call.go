package session

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/xfer/frame"
)

// quietWithin is how long a call that is over waits for the frame that is being read
// into its memory. Then the connection is given up. It leaves room in the 100 ms that
// a call may take beyond its deadline.
const quietWithin = 50 * time.Millisecond

// message is what every message of the protocol is.
type message interface {
	Append(b []byte) []byte
	Decode(p []byte) error
}

// pending is a call, a request and what comes back. The reader finds it by its id, and works on
// it only while held is set; its caller owns it else.
type pending struct {
	id    uint64
	reply message // decoded into when its code comes
	want  Code    // of that
	// stream takes replies that are not the last one of their call, and says whether
	// more follow. It runs on the reader's goroutine.
	stream func(p []byte) (more bool, err error)
	done   chan struct{} // one token when the call is over
	err    error
	bytes  int64 // that it counts as in flight

	held  bool          // by the reader; guarded by the client's lock
	quiet chan struct{} // closed when the reader lets go, if its caller waits

	gathering // of a get

	// Reused from call to call.
	out     []byte
	frames  []frame.Frame
	packed  []byte
	get     GetMessage
	got     GotMessage
	matched MatchedMessage
	granted GrantedMessage
	putting
	regionRecord
}

// finish ends a call. Whoever calls it has taken the call out of the table.
func (k *pending) finish(err error) {
	k.err = err
	k.done <- struct{}{}
}

// begin waits until the session allows one more call, and so many more bytes of gets and
// region puts in flight, and makes the call's record, to be given back by release.
func (c *Client) begin(ctx context.Context, bytes int64) (*pending, error) {
	select {
	case c.slots <- struct{}{}:
	default:
		select {
		case c.slots <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.ended:
			return nil, c.Err()
		}
	}
	if bytes > 0 { // none would wait behind others, too
		if err := c.flight.Acquire(ctx, bytes); err != nil {
			<-c.slots
			return nil, err
		}
	}
	k := c.records.Get().(*pending)
	k.err, k.stream, k.bytes = nil, nil, bytes
	return k, nil
}

// release gives back a call that is in no table.
func (c *Client) release(k *pending) {
	k.gathering.clear()
	clear(k.frames)
	if k.bytes > 0 {
		c.flight.Release(k.bytes)
	}
	c.records.Put(k)
	<-c.slots
}

// enter puts a call into the table, under a new id.
func (c *Client) enter(k *pending) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return c.mu.err
	}
	c.mu.id++
	k.id = c.mu.id
	c.mu.calls[k.id] = k
	return nil
}

// leave takes a call out of the table, so that nothing lands for it any more, and
// returns when its memory is quiet. The reply may have come meanwhile: then it is over
// as if it had been waited for.
func (c *Client) leave(k *pending) (over bool) {
	c.mu.Lock()
	_, open := c.mu.calls[k.id]
	delete(c.mu.calls, k.id)
	held := k.held
	var quiet chan struct{}
	if held {
		quiet = make(chan struct{})
		k.quiet = quiet
	}
	c.mu.Unlock()
	if held {
		c.waitQuiet(quiet)
	}
	if !open || held {
		select {
		case <-k.done:
			return true
		default:
		}
	}
	return false
}

func (c *Client) waitQuiet(quiet <-chan struct{}) {
	t := time.NewTimer(quietWithin)
	defer t.Stop()
	select {
	case <-quiet:
		return
	case <-t.C:
	}
	// What is read into the memory hangs: without the connection it ends.
	c.log.Warn("session given up: a frame for a call that is over did not end", "peer", c.peer)
	_ = c.conn.Close()
	<-quiet
}

// send sends a call's message, with what was kept for the next one before it.
func (c *Client) send(ctx context.Context, k *pending, code Code, m message) error {
	var t told
	k.frames, k.out, t = c.takeLater(k.frames[:0], k.out[:0])
	at := len(k.out)
	k.out = m.Append(k.out)
	k.frames = append(k.frames, messageFrame(code, k.id, k.out[at:]))
	err := c.conn.Send(ctx, k.frames...)
	if err != nil {
		c.later.back(t)
	}
	return err
}

func messageFrame(code Code, id uint64, p []byte) frame.Frame {
	return frame.Frame{Header: frame.Header{Type: frame.Message, Flags: uint8(code), ID: id}, Payload: p}
}

// trip is one call from begin to end: its message, and the wait for its reply.
func (c *Client) trip(ctx context.Context, k *pending, code Code, m message, want Code, reply message) error {
	k.want, k.reply = want, reply
	if err := c.enter(k); err != nil {
		return err
	}
	return c.wait(ctx, k, c.send(ctx, k, code, m))
}

// wait waits for the reply to a call that was sent, or failed to be.
func (c *Client) wait(ctx context.Context, k *pending, sent error) error {
	if sent == nil {
		select {
		case <-k.done:
			return k.err
		case <-ctx.Done():
		}
	}
	if c.leave(k) && sent == nil {
		return k.err
	}
	switch {
	case ctx.Err() != nil:
		if sent == nil {
			c.later.cancel(k.id)
		}
		return ctx.Err()
	case c.conn.Err() != nil:
		return &lost{c.conn.Err()}
	}
	return sent
}

// fail adds what was done to an error of a call.
func (c *Client) fail(verb string, err error) error {
	switch err.(type) {
	case *remoteError:
		return err // the server's words, which say what it did
	case *lost:
		return fmt.Errorf("%s at %s: %w", verb, c.peer, err)
	}
	return fmt.Errorf("%s: %w", verb, err)
}

// millisLeft is the deadline of a context as messages tell it: 0 for none.
func millisLeft(ctx context.Context) uint32 {
	d, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return roundMillis(time.Until(d))
}

// roundMillis rounds a duration up to milliseconds, to at least one.
func roundMillis(d time.Duration) uint32 {
	return uint32(min(max(ceilMillis(d), 1), 1<<32-1))
}

func ceilMillis(d time.Duration) int64 {
	n := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		n++
	}
	return n
}

// reader is the client as the connection's handler.
type reader Client

// hold finds a call and keeps it from being taken back until letGo; nil when it is
// over.
func (r *reader) hold(id uint64) *pending {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.mu.calls[id]
	if k != nil {
		k.held = true
	}
	return k
}

// letGo ends hold. With over set the call has ended with err, unless its caller has
// taken it back.
func (r *reader) letGo(k *pending, over bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k.held = false
	if over {
		if r.mu.calls[k.id] == k {
			delete(r.mu.calls, k.id)
		}
		k.finish(err)
	}
	if k.quiet != nil {
		close(k.quiet)
		k.quiet = nil
	}
}

// Land implements frame.Handler.
func (r *reader) Land(h *frame.Header) []byte {
	k := r.hold(h.ID)
	if k == nil {
		return nil
	}
	p := k.land(h)
	if p == nil {
		r.letGo(k, false, nil)
		return nil
	}
	r.landing = k
	return p
}

// Landed implements frame.Handler.
func (r *reader) Landed(h *frame.Header, p []byte, err error) error {
	k := r.landing
	r.landing = nil
	if err == nil {
		k.landed(h, p)
	}
	r.letGo(k, false, nil)
	return nil
}

// Frame implements frame.Handler. What is no message of a session's is skipped. A
// reply that makes no sense ends the session: what follows it would make none either.
func (r *reader) Frame(h *frame.Header, p []byte) error {
	if h.Type != frame.Message {
		return nil
	}
	code := Code(h.Flags)
	skipped := int(h.Length) > len(p) // which makes no difference to what follows it
	if code == CodeRevoke && !skipped {
		return r.revoked(p)
	}
	k := r.hold(h.ID)
	switch {
	case k == nil && skipped:
		return nil // what it brings runs out by itself
	case k == nil:
		return r.late(code, p)
	case skipped:
		r.letGo(k, true, fmt.Errorf("%w: reply of %d bytes, this session takes at most %d", ErrMessage, h.Length, r.welcome.Message))
	case code == CodeFailed:
		var m FailedMessage
		err := m.Decode(p)
		if err == nil && m.Status == StatusOK {
			err = fmt.Errorf("%w: a failure without a status", ErrMessage)
		}
		if err != nil {
			r.letGo(k, false, nil)
			return err
		}
		r.letGo(k, true, m.Status.Err(m.Text))
	case code != k.want:
		r.letGo(k, false, nil)
		return fmt.Errorf("%w: code %d in reply to a call that wants %d", ErrMessage, code, k.want)
	case k.stream != nil:
		more, err := k.stream(p)
		r.letGo(k, err == nil && !more, nil)
		return err
	default:
		if err := k.reply.Decode(p); err != nil {
			r.letGo(k, false, nil)
			return err
		}
		r.letGo(k, true, nil)
	}
	return nil
}

// late takes the reply to a call that is over: what it brings is given back.
func (r *reader) late(code Code, p []byte) error {
	c := (*Client)(r)
	switch code {
	case CodeGot:
		var m GotMessage
		if err := m.Decode(p); err != nil {
			return err
		}
		if m.Lease != 0 {
			c.later.lease(m.Lease)
		}
	case CodeMatched:
		var m MatchedMessage
		if err := m.Decode(p); err != nil {
			return err
		}
		if m.Lease != 0 {
			c.later.lease(m.Lease)
		}
	case CodeGranted:
		var m GrantedMessage
		if err := m.Decode(p); err != nil {
			return err
		}
		c.giveBack(m.Places)
	case CodePutDone:
		var m PutDoneMessage
		if err := m.Decode(p); err != nil {
			return err
		}
		c.giveBack(m.Grants.Places)
	}
	return nil
}
