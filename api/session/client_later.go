package session

import (
	"context"
	"sync"
	"time"

	"github.com/kvtier/kvtier/xfer/frame"
)

const (
	// laterWithin is how long what is given back waits for a call to go with.
	laterWithin = 2 * time.Millisecond
	// laterSend bounds the sending of what goes without a call.
	laterSend = 5 * time.Second
)

// later is what the session tells the server without waiting for an answer: leases
// and grants given back, which go before the next call's message or after a short
// time by themselves, and calls cancelled. There are no more of them than the session
// may have in flight.
type later struct {
	mu struct {
		sync.Mutex
		release ReleaseMessage
		cancels []uint64
		some    bool // housekeeping knows that there are some
	}
	wake chan struct{} // one token: there are some
}

func (l *later) lease(id uint64) {
	l.mu.Lock()
	l.mu.release.Leases = append(l.mu.release.Leases, id)
	l.told()
}

func (l *later) grant(id uint64) {
	l.mu.Lock()
	l.mu.release.Grants = append(l.mu.release.Grants, id)
	l.told()
}

func (l *later) cancel(id uint64) {
	l.mu.Lock()
	l.mu.cancels = append(l.mu.cancels, id)
	l.told()
}

// any reports whether something waits.
func (l *later) any() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.some
}

// unsent are the grants of which the server was not told.
func (l *later) unsent() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.release.Grants
}

// told wakes housekeeping where it does not know yet, and unlocks.
func (l *later) told() {
	first := !l.mu.some
	l.mu.some = true
	l.mu.Unlock()
	if first {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// told is what was taken to be sent.
type told struct {
	release ReleaseMessage
	cancels []uint64
}

// takeLater appends frames that say what waits. Their payloads are appended to b. When they
// could not be sent, back must follow.
func (c *Client) takeLater(frames []frame.Frame, b []byte) ([]frame.Frame, []byte, told) {
	l, most := &c.later, int(c.welcome.Keys)
	l.mu.Lock()
	t := told{l.mu.release, l.mu.cancels}
	l.mu.release, l.mu.cancels, l.mu.some = ReleaseMessage{}, nil, false
	l.mu.Unlock()
	for _, id := range t.cancels {
		frames = append(frames, messageFrame(CodeCancel, id, nil))
	}
	for r := t.release; len(r.Leases)+len(r.Grants) > 0; {
		part := ReleaseMessage{Leases: r.Leases[:min(len(r.Leases), most)], Grants: r.Grants[:min(len(r.Grants), most)]}
		at := len(b)
		b = part.Append(b)
		// Nobody waits for the reply: what is gone already needs no giving back.
		frames = append(frames, messageFrame(CodeRelease, c.newID(), b[at:]))
		r.Leases, r.Grants = r.Leases[len(part.Leases):], r.Grants[len(part.Grants):]
	}
	return frames, b, t
}

// back puts back what take took. Some of it may have been sent: to say it twice does
// no harm.
func (l *later) back(t told) {
	if len(t.release.Leases)+len(t.release.Grants)+len(t.cancels) == 0 {
		return
	}
	l.mu.Lock()
	l.mu.release.Leases = append(l.mu.release.Leases, t.release.Leases...)
	l.mu.release.Grants = append(l.mu.release.Grants, t.release.Grants...)
	l.mu.cancels = append(l.mu.cancels, t.cancels...)
	l.told()
}

// newID is an id that no call has.
func (c *Client) newID() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.id++
	return c.mu.id
}

// housekeeping sends what no call came for, and gives places back that nobody used
// for a while, until the session has ended.
func (c *Client) housekeeping() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-c.ended:
			return
		case <-c.later.wake:
			timer.Reset(laterWithin)
			continue
		case <-timer.C:
		}
		next := c.grants.expire(time.Now(), &c.later)
		if frames, _, t := c.takeLater(nil, nil); len(frames) > 0 {
			ctx, cancel := context.WithTimeout(context.Background(), laterSend)
			err := c.conn.Send(ctx, frames...)
			cancel()
			if err != nil {
				// A server that takes nothing for so long.
				c.later.back(t)
				c.log.Warn("session given up", "peer", c.peer, "err", err)
				_ = c.conn.Close()
			}
		}
		timer.Reset(next)
	}
}
