package frame

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/invariants"
)

// byeBytes bounds the reason that is told to the peer.
const byeBytes = 1000

// byeWait is how long the peer may take for it.
const byeWait = time.Second

// Serve receives frames until the connection ends, and says why: io.EOF when the
// peer closed it between two frames, net.ErrClosed after Close, ErrFrame, ErrBye,
// ErrSilent, ErrStalled, what the handler said, or what the network did. The memory
// of every Land is quiet when it returns.
func (c *Conn) Serve(h Handler) error {
	err := c.serve(h)
	gone := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, ErrBye)
	if c.Err() == nil && !gone {
		text := err.Error()
		ctx, cancel := context.WithTimeout(context.Background(), byeWait)
		// It may be gone already.
		_ = c.Send(ctx, Frame{Header{Type: Bye}, []byte(text[:min(len(text), byeBytes)])})
		cancel()
	}
	return c.fail(err)
}

func (c *Conn) serve(h Handler) error {
	// One for all frames: the handler gets a pointer, which would be an allocation
	// for each.
	hd := new(Header)
	for {
		b, err := c.in.peek(HeaderBytes)
		if err != nil {
			return err
		}
		if *hd, err = ParseHeader(b); err != nil {
			return err
		}
		c.in.skip(HeaderBytes)
		c.stats.framesIn.Add(1)
		c.stats.bytesIn.Add(int64(hd.Length))
		if hd.Type == Data {
			err = c.land(h, hd)
		} else {
			err = c.message(h, hd)
		}
		if err != nil {
			return err
		}
		if err = c.Err(); err != nil {
			return err // what was read ahead is not for a handler that has closed
		}
	}
}

// land receives the payload of a data frame.
func (c *Conn) land(h Handler, hd *Header) error {
	n := int(hd.Length)
	p := h.Land(hd)
	if p == nil {
		c.stats.skipped.Add(int64(n))
		return c.forget(n)
	}
	var err error
	if len(p) < n {
		err = fmt.Errorf("land %d bytes at token %d offset %d: the handler has memory of %d", n, hd.Token, hd.Offset, len(p))
	} else if p = p[:n]; n > 0 {
		err = c.in.full(p)
	}
	if err != nil {
		if ended := c.Err(); ended != nil {
			err = ended
		}
		_ = h.Landed(hd, p, err) // it is told, and the first error counts
		return err
	}
	return h.Landed(hd, p, nil)
}

// forget receives n bytes that nobody wants.
func (c *Conn) forget(n int) error {
	have := min(n, c.in.w-c.in.r)
	c.in.skip(have)
	if n -= have; n == 0 {
		return nil
	}
	scratch := smallMessages.Get().(*[smallMessage]byte)
	defer smallMessages.Put(scratch)
	for n > 0 {
		p := scratch[:min(n, len(scratch))]
		if err := c.in.full(p); err != nil {
			return err
		}
		n -= len(p)
	}
	return nil
}

// Memory for messages that are not read ahead as a whole. It is lent for as long as
// one message takes, so that a connection at rest holds none.
const smallMessage = 64 << 10

var (
	smallMessages = sync.Pool{New: func() any { return new([smallMessage]byte) }}
	largeMessages = sync.Pool{New: func() any { return new([MaxMessage]byte) }}
)

// message receives the payload of any other frame and gives it to whom it is for.
func (c *Conn) message(h Handler, hd *Header) error {
	n := int(hd.Length)
	if hd.Type == Message && n > c.o.MaxMessage {
		c.stats.skipped.Add(int64(n))
		if err := c.forget(n); err != nil {
			return err
		}
		return c.dispatch(h, hd, nil)
	}
	if n <= inBytes {
		p, err := c.in.peek(n)
		if err != nil {
			return torn(err)
		}
		err = c.dispatch(h, hd, p)
		invariants.Poison(p)
		c.in.skip(n)
		return err
	}
	small := smallMessages.Get().(*[smallMessage]byte)
	defer smallMessages.Put(small)
	p := small[:min(n, smallMessage)]
	if err := c.in.full(p); err != nil {
		return err
	}
	if n > smallMessage {
		// Only now: a peer that merely announces much is given little.
		large := largeMessages.Get().(*[MaxMessage]byte)
		defer largeMessages.Put(large)
		copy(large[:], p)
		if err := c.in.full(large[smallMessage:n]); err != nil {
			return err
		}
		p = large[:n]
	}
	err := c.dispatch(h, hd, p[:n:n])
	invariants.Poison(p)
	return err
}

// torn is what the end of a stream means behind a header.
func torn(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (c *Conn) dispatch(h Handler, hd *Header, p []byte) error {
	switch hd.Type {
	case Ping:
		c.pong(hd.ID)
		return nil
	case Pong:
		return nil
	case Bye:
		return fmt.Errorf("%w: %q", ErrBye, p[:min(len(p), byeBytes)])
	default:
		return h.Frame(hd, p)
	}
}
