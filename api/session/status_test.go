package session_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

func TestStatus(t *testing.T) {
	sentinels := map[session.Status]error{
		session.StatusNotFound: block.ErrNotFound, session.StatusNoSpace: block.ErrNoSpace, session.StatusLeaseExpired: block.ErrLeaseExpired,
		session.StatusCorrupt: block.ErrCorrupt, session.StatusInvalid: block.ErrInvalid, session.StatusUnavailable: block.ErrUnavailable,
		session.StatusDisconnected: block.ErrDisconnected, session.StatusConflict: block.ErrConflict, session.StatusMismatch: block.ErrMismatch,
		session.StatusClosed: block.ErrClosed, session.StatusDenied: block.ErrDenied, session.StatusDeadline: context.DeadlineExceeded,
		session.StatusCanceled: context.Canceled, session.StatusBusy: session.ErrBusy,
	}
	for s := session.StatusOK + 1; s <= session.StatusBusy; s++ {
		if s == session.StatusInternal {
			continue
		}
		want, ok := sentinels[s]
		if !ok {
			t.Errorf("status %d stands for nothing", s)
			continue
		}
		if got := session.StatusOf(fmt.Errorf("put x: %w", want)); got != s {
			t.Errorf("StatusOf(%v) = %v, want %v", want, got, s)
		}
		err := s.Err("put x: it failed")
		if !errors.Is(err, want) || err.Error() != "put x: it failed" {
			t.Errorf("Err of %v is %q, want one that is %v", s, err, want)
		}
		if err := s.Err(""); err.Error() != want.Error() {
			t.Errorf("Err of %v without text is %q, want %q", s, err, want)
		}
	}
	if session.StatusOf(nil) != session.StatusOK || session.StatusOK.Err("x") != nil {
		t.Error("no error is not StatusOK")
	}
	if session.StatusOf(io.EOF) != session.StatusInternal || session.StatusInternal.Err("x") == nil || session.Status(999).Err("x") == nil {
		t.Error("an unknown error is not an internal one")
	}
	if got := session.StatusOf(fmt.Errorf("%w: %w", block.ErrNoSpace, context.DeadlineExceeded)); got != session.StatusNoSpace {
		t.Errorf("no space by the deadline is %v", got)
	}
	if !errors.Is(session.StatusBusy.Err(""), block.ErrNoSpace) {
		t.Error("busy is no ErrNoSpace")
	}
}
