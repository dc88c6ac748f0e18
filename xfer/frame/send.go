package frame

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Send sends frames in order. Frames of other sends may come between them, in fair
// order, but none between a message and the data frame before it. When ctx ends
// before anything of a frame is sent the call fails with the context's cause and the
// connection goes on; one that ends in the middle of a frame gives the connection up
// when the peer does not take the rest of the frame within 50 ms. It is given up as
// well when the peer takes no byte for StallAfter. Too long a message is an ErrFrame,
// and nothing is sent. The payloads are quiet when Send returns.
func (c *Conn) Send(ctx context.Context, frames ...Frame) error {
	for i := range frames {
		f := &frames[i]
		most := MaxMessage
		switch f.Type {
		case Data:
			continue
		case Message:
			most = c.o.MaxMessage
		}
		if f.Type == 0 || len(f.Payload) > most {
			return fmt.Errorf("send: %w: type %d with %d bytes, at most %d", ErrFrame, f.Type, len(f.Payload), most)
		}
	}
	if err := c.ended(ctx); err != nil {
		return err
	}
	if !c.turn.take(ctx, c.done) {
		return c.ended(ctx)
	}
	for left := (rest{frames: frames}); ; {
		if err := c.ended(ctx); err != nil {
			c.turn.give()
			return err
		}
		most := aloneBytes
		if c.turn.wanted() {
			most = MaxData
		}
		left.group(&c.out, most)
		err := c.out.write(ctx)
		n := c.out.frames()
		c.stats.framesOut.Add(int64(n))
		c.stats.bytesOut.Add(int64(max(0, c.out.at-n*HeaderBytes)))
		c.out.reset()
		switch {
		case errors.Is(err, errEnded):
			err = context.Cause(ctx)
		case err != nil:
			torn := errors.Is(err, os.ErrDeadlineExceeded)
			if torn {
				err = ErrTorn
			}
			if err = c.fail(err); torn {
				err = fmt.Errorf("%w: %w", err, context.Cause(ctx))
			}
		}
		if err != nil || len(left.frames) == 0 {
			c.turn.give()
			return err
		}
		if !c.turn.pass(ctx, c.done) {
			return c.ended(ctx)
		}
	}
}

// ended is why nothing can be sent: the connection's end, or that of ctx.
func (c *Conn) ended(ctx context.Context) error {
	if err := c.Err(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// rest is what is still to be sent. It leaves the caller's frames as they are.
type rest struct {
	frames []Frame
	sent   int // of the first one's payload
}

// aloneBytes is how much payload is written at once while nobody else wants to send,
// else it is MaxData. Twice that costs a tenth less of the processors, as the peer is
// woken less often, and more gains nothing.
const aloneBytes = 2 * MaxData

// group moves the next frames into o: at most so many bytes of payload, so that
// others need not wait longer, and with the last data frame the message behind it.
func (r *rest) group(o *out, most int) {
	var bytes, from int
	var after bool // a data frame that is complete
	for n := 0; len(r.frames) > 0; n++ {
		f := &r.frames[0]
		h, p := f.Header, f.Payload[r.sent:]
		joined := after && f.Type != Data // whatever its size
		if !joined && n > 0 && (n >= groupFrames || bytes+min(len(p), MaxData) > most) {
			break
		}
		if f.Type == Data {
			h.Offset += uint64(r.sent)
			p = p[:min(len(p), MaxData)]
		}
		from = o.add(&h, p, from)
		bytes += len(p)
		r.sent += len(p)
		after = false
		if r.sent == len(f.Payload) {
			r.frames, r.sent, after = r.frames[1:], 0, f.Type == Data
		}
		if joined {
			break
		}
	}
	if from < len(o.head) {
		o.places = append(o.places, o.head[from:])
	}
}
