package session

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/index/block"
)

// ErrBusy: more than the session may have in flight; the call may be tried again
// when others have ended. It is a block.ErrNoSpace.
var ErrBusy = fmt.Errorf("%w: session busy", block.ErrNoSpace)

// statusTable maps sentinels to statuses, and back. An error that is several of
// them takes the first row, so a context's end counts only where nothing more exact
// is known.
var statusTable = [...]struct {
	sentinel error
	status   Status
}{
	{ErrBusy, StatusBusy},
	{block.ErrNotFound, StatusNotFound},
	{block.ErrNoSpace, StatusNoSpace},
	{block.ErrLeaseExpired, StatusLeaseExpired},
	{block.ErrCorrupt, StatusCorrupt},
	{block.ErrInvalid, StatusInvalid},
	{block.ErrUnavailable, StatusUnavailable},
	{block.ErrDisconnected, StatusDisconnected},
	{block.ErrConflict, StatusConflict},
	{block.ErrMismatch, StatusMismatch},
	{block.ErrClosed, StatusClosed},
	{block.ErrDenied, StatusDenied},
	{context.DeadlineExceeded, StatusDeadline},
	{context.Canceled, StatusCanceled},
}

// StatusOf says which status stands for err: StatusOK for nil, StatusInternal for
// what is none of the sentinels.
func StatusOf(err error) Status {
	if err == nil {
		return StatusOK
	}
	for _, r := range statusTable {
		if errors.Is(err, r.sentinel) {
			return r.status
		}
	}
	return StatusInternal
}

// remoteError is a failure that the other side told of.
type remoteError struct {
	text string
	is   error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.is }

// Err is the inverse of StatusOf: nil for StatusOK, else an error with the given
// text, or the status's own where that is empty.
func (s Status) Err(text string) error {
	if s == StatusOK {
		return nil
	}
	if text == "" {
		text = s.String()
	}
	for _, r := range statusTable {
		if r.status == s {
			return &remoteError{text: text, is: r.sentinel}
		}
	}
	return &remoteError{text: text}
}

// String is the text of the sentinel that the status stands for.
func (s Status) String() string {
	switch s {
	case StatusOK:
		return "ok"
	case StatusInternal:
		return "internal error"
	}
	for _, r := range statusTable {
		if r.status == s {
			return r.sentinel.Error()
		}
	}
	return fmt.Sprintf("status(%d)", uint16(s))
}
