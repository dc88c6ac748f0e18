package xfer

import (
	"errors"
	"fmt"
)

// The sentinels that classify every failure of a transfer. They are wrapped
// with the layer that failed (create, register, connect, prepare, post) and what it was
// doing; test them with errors.Is.
var (
	// ErrInvalid: the argument named in the text cannot be accepted.
	ErrInvalid = errors.New("invalid")
	// ErrNotFound: unknown peer or backend, or no registration covers a descriptor.
	ErrNotFound = errors.New("not found")
	// ErrNoBackend: no backend serves this pair of memory types with both sides registered.
	ErrNoBackend = errors.New("no backend")
	// ErrUnavailable: a library, device or kernel feature is missing; the text says which.
	ErrUnavailable = errors.New("unavailable")
	// ErrActive: the request is in flight, so it cannot be posted or released.
	ErrActive = errors.New("request active")
	// ErrNotPosted: the request was never posted.
	ErrNotPosted = errors.New("request not posted")
	// ErrCanceled: the transfer was cancelled before this descriptor was done.
	ErrCanceled = errors.New("canceled")
	// ErrShort: fewer bytes were moved than the descriptor says.
	ErrShort = errors.New("short transfer")
	// ErrDisconnected: the peer cannot be reached, or this life of it is over.
	ErrDisconnected = errors.New("disconnected")
	// ErrNotSupported: the backend has no such role.
	ErrNotSupported = errors.New("not supported")
	// ErrClosed: the agent, request or backend was closed or released.
	ErrClosed = errors.New("closed")
)

// Layer says which step of a transfer's life failed: memory that cannot be
// registered and a device that refuses a write need different cures.
type Layer string

// The layers.
const (
	LayerCreate   Layer = "create"
	LayerRegister Layer = "register"
	LayerConnect  Layer = "connect" // making a peer known, or connecting to it
	LayerPrepare  Layer = "prepare"
	LayerPost     Layer = "post"
)

// Error is a failure with the place where it happened. Every error that an
// Agent or a Request returns on behalf of a backend is one; errors.Is sees the
// sentinel in Err.
type Error struct {
	Layer   Layer
	Backend string // empty when no backend was involved yet
	Index   int    // the descriptor that failed, or -1
	Desc    Desc   // that descriptor; the remote one where the two sides differ
	Err     error
}

// Error writes the failure as layer, backend, descriptor, cause.
func (e *Error) Error() string {
	s := string(e.Layer)
	if e.Backend != "" {
		s += " " + e.Backend
	}
	if e.Index >= 0 {
		s += fmt.Sprintf(": descriptor %d %s", e.Index, e.Desc)
	}
	return s + ": " + e.Err.Error()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// joined makes one error, on one line, of those that are not nil.
func joined(errs []error) error {
	var all error
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}
