package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Every sentinel comes back as itself, and as no other, through a status and
// through the failure of one key.
func TestStatusTableBothWays(t *testing.T) {
	for _, row := range statusTable {
		t.Run(row.cause.String(), func(t *testing.T) {
			err := fmt.Errorf("reserve 4096 bytes: %w", row.sentinel)
			st, ok := status.FromError(toStatus(err))
			if !ok || st.Code() != row.code || st.Message() != err.Error() {
				t.Fatalf("status %v, want %v with the text of %q", st, row.code, err)
			}
			for way, back := range map[string]error{"status": fromStatus(st.Err()), "failure": fromFailure(failureOf(err))} {
				if back.Error() != err.Error() {
					t.Errorf("%s: text is %q, was %q", way, back, err)
				}
				for _, other := range statusTable {
					if got, want := errors.Is(back, other.sentinel), other.sentinel == row.sentinel; got != want {
						t.Errorf("%s: errors.Is(%v) = %v", way, other.sentinel, got)
					}
				}
			}
		})
	}
}

// The table covers every sentinel and every cause, each once.
func TestStatusTableIsComplete(t *testing.T) {
	sentinels := []error{
		block.ErrNotFound, block.ErrNoSpace, block.ErrLeaseExpired, block.ErrCorrupt, block.ErrInvalid, block.ErrUnavailable,
		block.ErrDisconnected, block.ErrConflict, block.ErrMismatch, block.ErrClosed, block.ErrDenied,
		context.DeadlineExceeded, context.Canceled,
	}
	if len(statusTable) != len(sentinels) || len(statusTable) != len(pb.Cause_name)-1 {
		t.Fatalf("%d rows for %d sentinels and %d causes", len(statusTable), len(sentinels), len(pb.Cause_name)-1)
	}
	seen := map[pb.Cause]bool{pb.Cause_CAUSE_UNSPECIFIED: true}
	for i, row := range statusTable {
		if row.sentinel != sentinels[i] || seen[row.cause] {
			t.Errorf("row %d: %v, %v", i, row.sentinel, row.cause)
		}
		seen[row.cause] = true
	}
}

// A status that gRPC made, without details, takes the sentinel of its code.
func TestStatusWithoutDetails(t *testing.T) {
	for code, want := range map[codes.Code]error{
		codes.NotFound:           block.ErrNotFound,
		codes.ResourceExhausted:  block.ErrNoSpace,
		codes.Aborted:            block.ErrLeaseExpired,
		codes.DataLoss:           block.ErrCorrupt,
		codes.InvalidArgument:    block.ErrInvalid,
		codes.FailedPrecondition: block.ErrUnavailable,
		codes.Unavailable:        block.ErrDisconnected,
		codes.AlreadyExists:      block.ErrConflict,
		codes.PermissionDenied:   block.ErrDenied,
		codes.Unauthenticated:    block.ErrDenied,
		codes.DeadlineExceeded:   context.DeadlineExceeded,
		codes.Canceled:           context.Canceled,
	} {
		if err := fromStatus(status.Error(code, "text")); !errors.Is(err, want) || err.Error() != "text" {
			t.Errorf("%v came back as %v, want %v", code, err, want)
		}
	}
	if err := fromStatus(status.Error(codes.Unimplemented, "unknown service")); errors.Unwrap(err) != nil {
		t.Errorf("Unimplemented came back as %v", errors.Unwrap(err))
	}
}

// A stranger has a code of its own, and is an ErrDenied to the client as well.
func TestStatusStranger(t *testing.T) {
	err := fmt.Errorf("call: %w", stranger{fmt.Errorf("%w: no token", block.ErrDenied)})
	st := toStatus(err)
	if status.Code(st) != codes.Unauthenticated {
		t.Errorf("status %v, want Unauthenticated", st)
	}
	if back := fromStatus(st); !errors.Is(back, block.ErrDenied) || back.Error() != err.Error() {
		t.Errorf("it came back as %v", back)
	}
}

func TestStatusMismatch(t *testing.T) {
	m := &block.Mismatch{Name: "ns", Field: "dtype", Have: "bf16", Want: "fp8"}
	for way, back := range map[string]error{
		"status":  fromStatus(toStatus(fmt.Errorf("open: %w", m))),
		"failure": fromFailure(failureOf(m)),
	} {
		var got *block.Mismatch
		if !errors.As(back, &got) || *got != *m {
			t.Errorf("%s: %+v came back as %+v", way, m, got)
		}
		if !errors.Is(back, block.ErrMismatch) {
			t.Errorf("%s: %v is no ErrMismatch", way, back)
		}
	}
}

func TestStatusOther(t *testing.T) {
	if toStatus(nil) != nil || fromStatus(nil) != nil || failureOf(nil) != nil || fromFailure(nil) != nil {
		t.Error("nil does not stay nil")
	}
	if c := status.Code(toStatus(errors.New("disk on fire"))); c != codes.Internal {
		t.Errorf("an unknown error is %v", c)
	}
	// What is both is told by the more exact of them.
	if c := status.Code(toStatus(fmt.Errorf("%w: %w", context.DeadlineExceeded, block.ErrNoSpace))); c != codes.ResourceExhausted {
		t.Errorf("no room by the deadline is %v", c)
	}
	sent := status.Error(codes.Unavailable, "transport is closing")
	if got := toStatus(fmt.Errorf("send: %w", sent)); status.Code(got) != codes.Unavailable {
		t.Errorf("a status became %v", got)
	}
	if err := fromStatus(io.ErrUnexpectedEOF); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("an error that is no status became %v", err)
	}
	if err := fromFailure(&pb.Failure{Cause: 99, Message: "from the future"}); err.Error() != "from the future" {
		t.Errorf("an unknown cause became %v", err)
	}
}
