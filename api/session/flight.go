package session

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// errTwice: a call has the id of one that is under way. Their replies could not be
// told apart, so the session ends.
var errTwice = errors.New("id of a call under way")

// endSlack is how many calls beyond the limit may be at sending their last bytes: a
// client that has read an answer may ask again before the call's goroutine has
// noticed that it is done.
const endSlack = 16

// flight is the calls of a session that have a goroutine each.
type flight struct {
	work sync.WaitGroup // goroutines that the session's end waits for
	idle chan struct{}  // closed when it drains and no call is under way
	mu   struct {
		sync.Mutex
		calls       map[uint64]*call
		watches     int   // calls that are, under way or ending
		bytes       int64 // of gets and regions among them, which have a limit
		putBytes    int64 // of durable puts, which have not: places bound them
		ending      int   // calls whose answer is being sent: they have left calls, as the client may use their ids again
		endingBytes int64
		begun       bool
		draining    bool
		ended       bool
	}
}

// call is one of them.
type call struct {
	f      *flight
	id     uint64
	ctx    context.Context
	cancel context.CancelFunc
	watch  bool
	bytes  int64
	puts   int64 // bytes
	last   bool  // its answer is being sent
}

func (f *flight) init() {
	f.idle = make(chan struct{})
	f.mu.calls = make(map[uint64]*call)
}

// begin is false when the session was to drain before it began.
func (f *flight) begin() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.begun = true
	return !f.mu.draining
}

// none says whether no call but watches is under way.
func (f *flight) none() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.mu.calls)+f.mu.ending == f.mu.watches && !f.mu.draining
}

// count is how many calls are under way, and the bytes of the blocks that they move.
func (f *flight) count() (calls int, bytes int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.mu.calls), f.mu.bytes + f.mu.putBytes
}

func (f *flight) drains() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.draining
}

// enter counts a goroutine that the end of the session waits for; work.Done must be
// called then. It is false when the session has ended.
func (f *flight) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.mu.ended {
		f.work.Add(1)
	}
	return !f.mu.ended
}

// open begins a call that ends after d, a watch only when it is told to.
func (f *flight) open(parent context.Context, id uint64, d time.Duration, watch bool, most int) (*call, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch n := len(f.mu.calls); {
	case f.mu.calls[id] != nil:
		return nil, fmt.Errorf("call %d: %w", id, errTwice)
	case f.mu.draining || f.mu.ended:
		return nil, fmt.Errorf("%w: the server is closing", block.ErrClosed)
	case n >= most || n+f.mu.ending >= 2*most+endSlack:
		return nil, fmt.Errorf("%w: %d calls are in flight, at most %d", ErrBusy, n, most)
	}
	c := &call{f: f, id: id, watch: watch}
	if watch {
		f.mu.watches++
		c.ctx, c.cancel = context.WithCancel(parent)
	} else {
		c.ctx, c.cancel = context.WithTimeout(parent, d)
	}
	f.mu.calls[id] = c
	f.work.Add(1)
	return c, nil
}

// admit says how many of the first keys of a get may be served beside what is in
// flight, given the bytes of each.
func (c *call) admit(lens []int64, most int64) int {
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, n := range lens {
		all := f.mu.bytes + f.mu.endingBytes
		if all > 0 && (f.mu.bytes+n > most || all+n > 2*most) {
			return i
		}
		f.mu.bytes += n
		c.bytes += n
	}
	return len(lens)
}

// stores counts the bytes of a put.
func (c *call) stores(bytes int64) {
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	c.puts += bytes
	f.mu.putBytes += bytes
}

// end makes room for the client's next call, since it may have read the answer of
// this one before Send returns. The call is not to be cancelled any more.
func (c *call) end() {
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.last {
		return
	}
	c.last = true
	delete(f.mu.calls, c.id)
	f.mu.bytes -= c.bytes
	f.mu.putBytes -= c.puts
	f.mu.ending++
	f.mu.endingBytes += c.bytes
}

// done ends a call whose answer is sent.
func (c *call) done() {
	c.end()
	c.cancel()
	f := c.f
	f.mu.Lock()
	if c.watch {
		f.mu.watches--
	}
	f.mu.ending--
	f.mu.endingBytes -= c.bytes
	f.tellIdle()
	f.mu.Unlock()
	f.work.Done()
}

// tellIdle needs the lock.
func (f *flight) tellIdle() {
	if !f.mu.draining || len(f.mu.calls)+f.mu.ending > 0 {
		return
	}
	select {
	case <-f.idle:
	default:
		close(f.idle)
	}
}

// stop cancels a call, if there is one.
func (f *flight) stop(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.mu.calls[id]; c != nil {
		c.cancel()
	}
}

// drain lets no more calls begin, and ends watches. It is true once, and then the
// caller has entered, to wait for idle.
func (f *flight) drain() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	first := !f.mu.draining && f.mu.begun && !f.mu.ended
	f.mu.draining = true
	for _, c := range f.mu.calls {
		if c.watch {
			c.cancel()
		}
	}
	f.tellIdle()
	if first {
		f.work.Add(1)
	}
	return first
}

// end lets nothing enter any more.
func (f *flight) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.ended = true
}

// timeout is how long a call may take that asks for ms milliseconds, 0 for none.
func (s *session) timeout(ms uint32) time.Duration {
	if ms == 0 {
		return s.srv.o.Timeout
	}
	return time.Duration(ms) * time.Millisecond
}

// open begins a call with a goroutine of its own.
func (s *session) open(id uint64, ms uint32) (*call, error) {
	return s.flight.open(s.ctx, id, s.timeout(ms), false, s.calls)
}

// spawn runs a call that open began, or answers why it did not. fn sends the answer,
// behind a call of end; when it returns an error, that is the answer.
func (s *session) spawn(id uint64, c *call, err error, fn func(c *call) error) error {
	switch {
	case errors.Is(err, errTwice):
		return err
	case err != nil:
		return s.fail(id, err)
	}
	go func() {
		defer c.done()
		if err := fn(c); err != nil {
			c.end()
			_ = s.fail(c.id, err) // it fails with the connection, whose reader hears of it
		}
	}()
	return nil
}

// patient is a call's context for sending. A send looks whether the call has ended
// before each frame, but the call's end does not cut a frame short, which would end
// the session: there the connection's own patience counts.
type patient struct {
	context.Context
	session context.Context
}

func (p patient) Done() <-chan struct{}       { return p.session.Done() }
func (p patient) Deadline() (time.Time, bool) { return time.Time{}, false }

func (s *session) patient(c *call) context.Context { return patient{c.ctx, s.ctx} }
