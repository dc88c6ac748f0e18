package api

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// statusRow ties a sentinel to what stands for it on the wire.
type statusRow struct {
	sentinel error
	cause    pb.Cause
	code     codes.Code
}

// statusTable maps sentinels to causes and gRPC codes, and back. An error that
// is several of them takes the first row, so a context's end counts only where
// nothing more exact is known. A code without a cause (gRPC itself made the
// status) takes the first row of that code.
var statusTable = [...]statusRow{
	{block.ErrNotFound, pb.Cause_CAUSE_NOT_FOUND, codes.NotFound},
	{block.ErrNoSpace, pb.Cause_CAUSE_NO_SPACE, codes.ResourceExhausted},
	{block.ErrLeaseExpired, pb.Cause_CAUSE_LEASE_EXPIRED, codes.Aborted},
	{block.ErrCorrupt, pb.Cause_CAUSE_CORRUPT, codes.DataLoss},
	{block.ErrInvalid, pb.Cause_CAUSE_INVALID, codes.InvalidArgument},
	{block.ErrUnavailable, pb.Cause_CAUSE_UNAVAILABLE, codes.FailedPrecondition},
	{block.ErrDisconnected, pb.Cause_CAUSE_DISCONNECTED, codes.Unavailable},
	{block.ErrConflict, pb.Cause_CAUSE_CONFLICT, codes.AlreadyExists},
	{block.ErrMismatch, pb.Cause_CAUSE_MISMATCH, codes.FailedPrecondition},
	{block.ErrClosed, pb.Cause_CAUSE_CLOSED, codes.Unavailable},
	{block.ErrDenied, pb.Cause_CAUSE_DENIED, codes.PermissionDenied},
	{context.DeadlineExceeded, pb.Cause_CAUSE_DEADLINE, codes.DeadlineExceeded},
	{context.Canceled, pb.Cause_CAUSE_CANCELLED, codes.Canceled},
}

// stranger is an ErrDenied of a caller that gives no token, or nobody's: the code is
// Unauthenticated, and that of the table where the caller is known.
type stranger struct{ error }

func (e stranger) Unwrap() error { return e.error }

// rowOf finds the first row whose sentinel err is. Errors of no row are internal.
func rowOf(err error) statusRow {
	for _, r := range statusTable {
		if errors.Is(err, r.sentinel) {
			return r
		}
	}
	return statusRow{cause: pb.Cause_CAUSE_UNSPECIFIED, code: codes.Internal}
}

// failureOf describes err for the wire; nil is nil.
func failureOf(err error) *pb.Failure {
	if err == nil {
		return nil
	}
	f := &pb.Failure{Cause: rowOf(err).cause, Message: err.Error()}
	var m *block.Mismatch
	if errors.As(err, &m) {
		f.Namespace, f.Field, f.Have, f.Want = m.Name, m.Field, m.Have, m.Want
	}
	return f
}

// toStatus turns an error of the store into the gRPC status of a call. A status,
// such as a failed send returns, stays as it is.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	var st interface{ GRPCStatus() *status.Status }
	if errors.As(err, &st) {
		return st.GRPCStatus().Err()
	}
	row := rowOf(err)
	code := row.code
	if errors.As(err, new(stranger)) {
		code = codes.Unauthenticated
	}
	s := status.New(code, err.Error())
	if row.sentinel == nil {
		return s.Err()
	}
	if d, derr := s.WithDetails(failureOf(err)); derr == nil {
		s = d // it fails only for code OK
	}
	return s.Err()
}

// remoteError is a failure of a call: its text, and as what errors.Is and
// errors.As know it. told says that the text is the server's own, not gRPC's.
type remoteError struct {
	text string
	is   error
	told bool
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.is }

// fromFailure is the inverse of failureOf.
func fromFailure(f *pb.Failure) error {
	if f == nil {
		return nil
	}
	e := &remoteError{text: f.GetMessage(), told: true}
	if f.GetCause() == pb.Cause_CAUSE_MISMATCH && f.GetField() != "" {
		e.is = &block.Mismatch{Name: f.GetNamespace(), Field: f.GetField(), Have: f.GetHave(), Want: f.GetWant()}
		return e
	}
	for _, r := range statusTable {
		if r.cause == f.GetCause() {
			e.is = r.sentinel
			break
		}
	}
	return e
}

// fromStatus is the inverse of toStatus. Statuses that gRPC makes by itself
// (the server cannot be reached, the deadline has passed) take the sentinel of
// their code. Errors that are no status stay as they are.
func fromStatus(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, d := range st.Details() {
		if f, ok := d.(*pb.Failure); ok {
			return fromFailure(f)
		}
	}
	code := st.Code()
	if code == codes.Unauthenticated {
		code = codes.PermissionDenied // in the table
	}
	for _, r := range statusTable {
		if r.code == code {
			return &remoteError{text: st.Message(), is: r.sentinel}
		}
	}
	return &remoteError{text: st.Code().String() + ": " + st.Message()}
}
