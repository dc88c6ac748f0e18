package xfer

import (
	"context"
	"fmt"
	"slices"
)

// NotifyOptions narrows a notification.
type NotifyOptions struct {
	Backend string // only this one; the first that both agents have when empty
}

// Notify delivers a notification of at most MaxNotification bytes to a peer, without a
// transfer: it has no order against transfers that are under way. It waits while the
// peer's queue is full. After an error the peer may have it or not. Errors:
// ErrInvalid (too long), ErrNotFound (no such peer, or it does not share the backend),
// ErrDisconnected, ErrCanceled, ErrClosed.
func (a *Agent) Notify(ctx context.Context, peer string, msg []byte, o *NotifyOptions) error {
	if err := checkMessage(msg); err != nil {
		return notifyError("", err)
	}
	v, err := a.visit(ctx, peer)
	if err != nil {
		return notifyError("", err)
	}
	defer v.leave()
	b := v.backends[0] // whoever has the Remote role is a Notifier
	if o != nil && o.Backend != "" {
		i := slices.IndexFunc(v.backends, func(b *adopted) bool { return b.name == o.Backend })
		if i < 0 {
			return notifyError(o.Backend, fmt.Errorf("%w: peer %s has no such backend", ErrNotFound, v.p.id))
		}
		b = v.backends[i]
	}
	if err := b.notify(v.ctx, v.p, msg); err != nil {
		return notifyError(b.name, err)
	}
	return nil
}

func (b *adopted) notify(ctx context.Context, p *peer, msg []byte) error {
	if err := b.notifier.Notify(ctx, p.id, msg); err != nil {
		return fmt.Errorf("notify peer %s: %w", p.id, p.failure(err))
	}
	b.counts.notified.Add(1)
	return nil
}

// Notifications gives what peers send, through whichever backend; those of one sender
// through one backend in order. When nobody takes them, senders wait in the end
// (AgentOptions.MaxNotifications). It is closed by Close.
func (a *Agent) Notifications() <-chan Notification { return a.notes }

// pump moves a backend's notifications into the agent's queue.
func (a *Agent) pump(b *adopted) {
	defer a.pumps.Done()
	from := b.notifier.Notifications()
	for {
		select {
		case n, ok := <-from:
			if !ok {
				return
			}
			b.counts.notes.Add(1)
			select {
			case a.notes <- n:
			case <-a.ctx.Done():
			}
		case <-b.gone:
			return
		}
	}
}

// checkNotify refuses a notification that no request can have.
func checkNotify(o *RequestOptions, peer bool) error {
	if o == nil || o.Notify == nil {
		return nil
	}
	if !peer {
		return prepareError("", fmt.Errorf("%w: Notify without a Peer", ErrInvalid))
	}
	if err := checkMessage(o.Notify); err != nil {
		return prepareError("", err)
	}
	return nil
}

func checkMessage(msg []byte) error {
	if len(msg) > MaxNotification {
		return fmt.Errorf("%w: notification of %d bytes, at most %d", ErrInvalid, len(msg), MaxNotification)
	}
	return nil
}

func notifyError(backend string, err error) error {
	return &Error{Layer: LayerPost, Backend: backend, Index: -1, Err: err}
}
