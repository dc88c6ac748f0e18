package shm

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// Notify delivers a message. It lies behind all bytes of earlier transfers, because
// those were in the peer's memory before it is sent.
func (b *Backend) Notify(ctx context.Context, id xfer.PeerID, msg []byte) error {
	if len(msg) > xfer.MaxNotification {
		return fmt.Errorf("%w: notification of %d bytes, at most %d", xfer.ErrInvalid, len(msg), xfer.MaxNotification)
	}
	if ctx.Err() != nil {
		return canceled(ctx)
	}
	p := b.peer(id)
	if p == nil {
		return fmt.Errorf("%w: peer %s is not known", xfer.ErrDisconnected, id)
	}
	l, err := b.link(ctx, p, false)
	if err != nil {
		return err
	}
	defer l.release()
	if err := l.alive(); err != nil {
		return err
	}
	select {
	case l.noting <- struct{}{}:
	case <-l.out.over:
		return l.err()
	case <-ctx.Done():
		return canceled(ctx)
	}
	// A copy, because it may be sent after ctx has ended.
	note := frame.Frame{Header: frame.Header{Type: frame.Note}, Payload: append([]byte(nil), msg...)}
	a, err := l.call(ctx, note, l.noting)
	if err == nil && a.status != statusOK {
		err = fmt.Errorf("%w: peer %s: status %d", xfer.ErrDisconnected, id, a.status)
	}
	return err
}
