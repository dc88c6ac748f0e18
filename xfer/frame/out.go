package frame

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// groupFrames bounds the frames that are written at once, beside a message that
	// is behind the last.
	groupFrames = 32
	// headBytes holds the headers of a group and its small payloads, which are copied
	// to them: cheaper than a place of their own in the system call.
	headBytes  = 4 << 10
	smallBytes = 512
	// recordBytes is what is written to streams that are not sockets: a TLS record.
	recordBytes = 16 << 10
	// grace is how much longer than its context a send may take to finish the frame
	// that it is in the middle of. It spares connections that are only busy.
	grace = 50 * time.Millisecond
)

// out is the sending half of a connection. It belongs to whoever has the turn.
type out struct {
	l      *link
	head   []byte
	places [][]byte // of what is to be written
	left   [][]byte // of places, what is left
	ends   []int    // of each frame, in bytes from the group's beginning
	at     int      // bytes written
	record []byte

	writes  atomic.Int64 // that took something
	waiting atomic.Bool  // for the peer

	// Of the system call under way.
	err  error
	once bool // it does not wait
	try  func(fd uintptr) bool
	// Of the write of a piece.
	piece []byte
	n     int
	// What may wait for the peer: each is made once, since a closure is an allocation.
	writePlaces, look, writePiece func() error

	cancel interrupt
}

func (o *out) init(l *link) {
	o.l = l
	o.head = make([]byte, 0, headBytes)
	o.try = o.writev
	o.writePlaces = func() error { return l.socket.Write(o.try) }
	o.look = func() error { return l.socket.Write(writable) }
	o.writePiece = func() (err error) { o.n, err = l.c.Write(o.piece); return err }
	o.cancel.l = l
	o.cancel.ran = make(chan struct{}, 1)
}

// reset makes room for the next group. The places of the last one are forgotten,
// since they are others' memory.
func (o *out) reset() {
	clear(o.places)
	o.head, o.places, o.ends, o.at = o.head[:0], o.places[:0], o.ends[:0], 0
}

// add adds a frame with the payload p to the group. Its head has room for at least
// all headers.
func (o *out) add(h *Header, p []byte, from int) (next int) {
	end := HeaderBytes + len(p)
	if n := len(o.ends); n > 0 {
		end += o.ends[n-1]
	}
	o.ends = append(o.ends, end)
	h.Length = uint32(len(p))
	o.head = h.Append(o.head)
	if len(p) <= smallBytes && len(o.head)+len(p)+(groupFrames+1)*HeaderBytes <= headBytes {
		o.head = append(o.head, p...)
		return from
	}
	o.places = append(o.places, o.head[from:], p)
	return len(o.head)
}

// frames is how many frames of the group were written as a whole.
func (o *out) frames() int {
	n := 0
	for n < len(o.ends) && o.ends[n] <= o.at {
		n++
	}
	return n
}

// whole reports whether what was written ends with a frame.
func (o *out) whole() bool {
	n := o.frames()
	return o.at == 0 || n > 0 && o.ends[n-1] == o.at
}

// cut leaves only the frame that was begun.
func (o *out) cut() {
	n := o.ends[o.frames()] - o.at
	for i := range o.left {
		if n <= len(o.left[i]) {
			o.left[i] = o.left[i][:n]
			o.left = o.left[:i+1]
			return
		}
		n -= len(o.left[i])
	}
}

// took notes n bytes as written.
func (o *out) took(n int) {
	o.at += n
	o.writes.Add(1)
	for len(o.left) > 0 && n >= len(o.left[0]) {
		n -= len(o.left[0])
		o.left = o.left[1:]
	}
	if n > 0 {
		o.left[0] = o.left[0][n:]
	}
}

// writev writes without blocking and reports whether it had a result.
func (o *out) writev(fd uintptr) bool {
	for len(o.left) > 0 {
		n, err := unix.Writev(int(fd), o.left)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return o.once
		case err != nil:
			o.err = os.NewSyscallError("writev", err)
			return true
		default:
			o.took(n)
		}
	}
	return true
}

// write writes the group. When ctx ends before it has begun, or between two frames,
// it returns errEnded, and nothing is lost; any other error is the connection's end.
func (o *out) write(ctx context.Context) error {
	o.left, o.err = o.places, nil
	if o.l.direct {
		o.once = true
		err := o.writePlaces()
		if err == nil {
			err = o.err
		}
		if err != nil || len(o.left) == 0 {
			return err
		}
	}
	// The peer must take something first. Only now is it worth looking after ctx.
	o.waiting.Store(true)
	defer o.waiting.Store(false)
	stop := o.cancel.arm(ctx)
	err := o.rest(time.Time{})
	o.cancel.disarm(stop)
	if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil && len(o.left) > 0 {
		if o.whole() && (o.l.secure == nil || o.l.looks()) {
			return errEnded
		}
		o.cut()
		if err = o.rest(time.Now().Add(grace)); err == nil && o.frames() < len(o.ends) {
			return errEnded
		}
	}
	return err
}

// rest writes what is left, waiting for the peer until the interrupt or, when it is
// not 0, until the given time: os.ErrDeadlineExceeded.
func (o *out) rest(until time.Time) error {
	if o.l.direct {
		o.once = false
		err := o.cancel.during(until, o.writePlaces)
		if o.err != nil {
			return o.err
		}
		return err
	}
	for len(o.left) > 0 {
		o.piece, o.n = o.gather(), 0
		var err error
		if !o.l.looks() {
			err = o.cancel.during(until, o.writePiece)
		} else if err = o.cancel.during(until, o.look); err == nil {
			err = o.writePiece()
		}
		o.piece = nil
		if o.n > 0 {
			o.took(o.n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// gather is the next bytes to write as one piece, at most recordBytes.
func (o *out) gather() []byte {
	if p := o.left[0]; len(p) >= recordBytes || len(o.left) == 1 {
		return p[:min(len(p), recordBytes)]
	}
	if o.record == nil {
		o.record = make([]byte, 0, recordBytes)
	}
	o.record = o.record[:0]
	for _, p := range o.left {
		o.record = append(o.record, p[:min(len(p), recordBytes-len(o.record))]...)
	}
	return o.record
}

// errEnded: a context ended while nothing of a frame was written.
var errEnded = errors.New("the context ended")

// interrupt breaks off waits for the peer when a context ends, and nothing else: a
// deadline that is left over would hit somebody else's write.
type interrupt struct {
	l   *link
	ran chan struct{} // of one
	mu  struct {
		sync.Mutex
		over    bool
		waiting bool
	}
}

// arm makes the end of ctx break off waits until disarm.
func (i *interrupt) arm(ctx context.Context) (stop func() bool) {
	if ctx.Done() == nil {
		return nil
	}
	return context.AfterFunc(ctx, i.fire)
}

func (i *interrupt) disarm(stop func() bool) {
	if stop == nil || stop() {
		return
	}
	<-i.ran
	i.mu.Lock()
	i.mu.over = false
	i.mu.Unlock()
}

// past is a deadline that is over.
func past() time.Time { return time.Unix(1, 0) }

func (i *interrupt) fire() {
	i.mu.Lock()
	i.mu.over = true
	if i.mu.waiting {
		_ = i.l.c.SetWriteDeadline(past()) // else it is closed, and nobody waits
	}
	i.mu.Unlock()
	i.ran <- struct{}{}
}

// during runs wait so that it can be broken off, at the given time too when it is
// not 0.
func (i *interrupt) during(until time.Time, wait func() error) error {
	i.mu.Lock()
	if i.mu.over {
		i.mu.Unlock()
		return os.ErrDeadlineExceeded
	}
	i.mu.waiting = true
	if !until.IsZero() {
		_ = i.l.c.SetWriteDeadline(until) // else it is closed, and nobody waits
	}
	i.mu.Unlock()
	err := wait()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.mu.waiting = false
	if i.mu.over || !until.IsZero() {
		_ = i.l.c.SetWriteDeadline(time.Time{})
	}
	return err
}
