package tcp

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// fullWait is the first and the longest time between two attempts to put a notification
// into a queue that is full.
const (
	fullWait    = time.Millisecond
	maxFullWait = 20 * time.Millisecond
)

// Notify delivers a message. While the peer's queue is full it tries again and again:
// the peer keeps nothing for who waits.
func (b *Backend) Notify(ctx context.Context, id xfer.PeerID, msg []byte) error {
	if len(msg) > xfer.MaxNotification {
		return fmt.Errorf("tcp notify %s: %w: %d bytes, at most %d", id, xfer.ErrInvalid, len(msg), xfer.MaxNotification)
	}
	p, err := b.peer(id)
	if err != nil {
		return fmt.Errorf("tcp notify: %w", err)
	}
	for wait := fullWait; ; wait = min(2*wait, maxFullWait) {
		if ctx.Err() != nil {
			return fmt.Errorf("tcp notify %s: %w", id, xfer.ErrCanceled)
		}
		lines, err := p.connect(ctx, false)
		if err != nil {
			return fmt.Errorf("tcp notify: %w", err)
		}
		// Always on the same, so that one that was given up does not come after the next.
		status, err := lines[0].notify(ctx, msg)
		switch {
		case err != nil:
			return fmt.Errorf("tcp notify %s: %w", id, whyEnded(ctx, err))
		case status == statusOK:
			return nil
		case status != statusBusy:
			return fmt.Errorf("tcp notify %s: %w: answer %d", id, xfer.ErrDisconnected, status)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// notify sends a notification and waits for the answer.
func (l *line) notify(ctx context.Context, msg []byte) (status uint16, err error) {
	c, err := l.begin(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer l.watch(ctx)()
	f := frame.Frame{Header: frame.Header{Type: frame.Note, ID: callID(c.id, 0)}, Payload: msg}
	if err := l.send(ctx, []frame.Frame{f}); err != nil {
		l.drop(c)
		return 0, err
	}
	if err := l.wait(ctx, c); err != nil {
		return 0, err // the answer, if it comes, finds the call and nobody waits
	}
	return c.status, nil
}

// deliver puts a notification into the queue, unless that is full.
func (b *Backend) deliver(from xfer.PeerID, msg []byte) bool {
	b.count.notes.Add(1) // first: whoever takes it finds it counted
	select {
	case b.notes <- xfer.Notification{Peer: from, Msg: append([]byte(nil), msg...)}:
		return true
	default:
		b.count.notes.Add(-1)
		b.count.notesBusy.Add(1)
		return false
	}
}

// Notifications gives what peers send.
func (b *Backend) Notifications() <-chan xfer.Notification { return b.notes }
