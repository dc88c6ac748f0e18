package api

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Prefetch brings blocks up and streams progress.
func (s *service) Prefetch(req *pb.PrefetchRequest, stream grpc.ServerStreamingServer[pb.PrefetchResponse]) error {
	ns, err := s.namespace(stream.Context(), req.GetNamespace(), req.GetNamespaceTag(), access.Read)
	if err != nil {
		return err
	}
	if _, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxMatchKeys); err != nil {
		return err
	}
	if n := len(req.GetRequestId()); n > maxRequestID {
		return invalid("request_id: %d bytes, at most %d", n, maxRequestID)
	}
	if n := req.GetPriority(); n > block.MaxPriority {
		return invalid("priority: %d, want 0 to %d", n, block.MaxPriority)
	}
	within, err := durationField("within_ms", req.GetWithinMs())
	if err != nil {
		return err
	}
	ctx, cancel := s.untilClosing(stream.Context())
	defer cancel(nil)
	o := block.PrefetchOptions{ID: requestID(ctx, req.GetRequestId()), Priority: uint8(req.GetPriority()), Within: within}
	err = s.store.Prefetch(ctx, ns, int(req.GetHashLen()), req.GetHashes(), o, func(p block.Progress) error {
		return stream.Send(&pb.PrefetchResponse{Index: uint32(p.Index), Reason: pb.MissReason(p.Reason), Tier: pb.Tier(p.Tier)})
	})
	return endCause(ctx, err)
}

// CancelPrefetch ends a prefetch.
func (s *service) CancelPrefetch(ctx context.Context, req *pb.CancelPrefetchRequest) (*pb.CancelPrefetchResponse, error) {
	if req.GetRequestId() == "" {
		return nil, invalid("request_id: empty")
	}
	if err := s.store.CancelPrefetch(requestID(ctx, req.GetRequestId())); err != nil {
		return nil, err
	}
	return &pb.CancelPrefetchResponse{}, nil
}

// Delete removes keys.
func (s *service) Delete(ctx context.Context, req *pb.DeleteRequest) (*pb.DeleteResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Write)
	if err != nil {
		return nil, err
	}
	if _, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxKeys); err != nil {
		return nil, err
	}
	n, err := s.store.Delete(ctx, ns, int(req.GetHashLen()), req.GetHashes())
	if err != nil {
		return nil, err
	}
	return &pb.DeleteResponse{Deleted: uint32(n)}, nil
}

// Clear removes all blocks of a namespace.
func (s *service) Clear(ctx context.Context, req *pb.ClearRequest) (*pb.ClearResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Write)
	if err != nil {
		return nil, err
	}
	n, err := s.store.Clear(ctx, ns)
	if err != nil {
		return nil, err
	}
	return &pb.ClearResponse{Cleared: n}, nil
}

// listLimit is how much a listing may have in one answer, given what was asked for.
func listLimit(n uint32) (int, error) {
	switch {
	case n == 0:
		return defaultListLimit, nil
	case n > MaxKeys:
		return 0, invalid("limit: %d, want 1 to %d", n, MaxKeys)
	}
	return int(n), nil
}

// List pages through the blocks of a namespace.
func (s *service) List(ctx context.Context, req *pb.ListRequest) (*pb.ListResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Read)
	if err != nil {
		return nil, err
	}
	limit, err := listLimit(req.GetLimit())
	if err != nil {
		return nil, err
	}
	n, err := s.store.NamespaceByID(ns)
	if err != nil {
		return nil, err
	}
	entries, next, err := s.store.List(ctx, ns, req.GetCursor(), limit)
	if err != nil {
		return nil, err
	}
	if len(entries) > 0 && n.HashLen == 0 { // the first put came in between
		if n, err = s.store.NamespaceByID(ns); err != nil {
			return nil, err
		}
	}
	out := &pb.ListResponse{Next: next, Entries: make([]*pb.ListEntry, len(entries))}
	for i, e := range entries {
		out.Entries[i] = listEntryToPB(e, n.HashLen)
	}
	return out, nil
}

// Stats answers a snapshot.
func (s *service) Stats(ctx context.Context, _ *pb.StatsRequest) (*pb.StatsResponse, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "the state of the store"); err != nil {
		return nil, err
	}
	return statsToPB(s.store.Stats()), nil
}

// Pin keeps blocks from being evicted.
func (s *service) Pin(ctx context.Context, req *pb.PinRequest) (*pb.PinResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Write)
	if err != nil {
		return nil, err
	}
	if _, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxKeys); err != nil {
		return nil, err
	}
	errs, err := s.store.Pin(ctx, ns, int(req.GetHashLen()), req.GetHashes())
	if err != nil {
		return nil, err
	}
	out := &pb.PinResponse{Results: make([]*pb.PinResult, len(errs))}
	for i, err := range errs {
		out.Results[i] = &pb.PinResult{Failure: failureOf(err)}
	}
	return out, nil
}

// Unpin lets blocks go again.
func (s *service) Unpin(ctx context.Context, req *pb.UnpinRequest) (*pb.UnpinResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Write)
	if err != nil {
		return nil, err
	}
	if _, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxKeys); err != nil {
		return nil, err
	}
	n, err := s.store.Unpin(ctx, ns, int(req.GetHashLen()), req.GetHashes())
	if err != nil {
		return nil, err
	}
	return &pb.UnpinResponse{Unpinned: uint32(n)}, nil
}

// Watch streams events. The store does not wait for a client that takes them
// slowly: only this handler does, in Send, until the store's ring overtakes it.
func (s *service) Watch(req *pb.WatchRequest, stream grpc.ServerStreamingServer[pb.WatchResponse]) error {
	var ns block.NamespaceID
	if req.GetNamespace() == 0 {
		if err := identityOf(stream.Context()).CheckAll(access.Read, "a watch of all"); err != nil {
			return err
		}
	} else {
		var err error
		if ns, err = s.namespace(stream.Context(), req.GetNamespace(), req.GetNamespaceTag(), access.Read); err != nil {
			return err
		}
	}
	ctx, cancel := s.untilClosing(stream.Context())
	defer cancel(nil)
	o := block.WatchOptions{NS: ns, Incarnation: req.GetIncarnation(), After: req.GetAfter(), Snapshot: req.GetSnapshot()}
	o.Ready = func(at block.WatchStart) {
		first := &pb.WatchResponse{Ready: true, Incarnation: at.Incarnation, Seq: at.Seq, Resumed: at.Resumed}
		if err := stream.Send(first); err != nil {
			cancel(err)
		}
	}
	err := s.store.Watch(ctx, o, func(e block.Event) error {
		return stream.Send(&pb.WatchResponse{Event: eventToPB(e)})
	})
	if err == nil {
		err = ctx.Err() // a watch does not end well
	}
	return endCause(ctx, err)
}

// untilClosing is a context that ends when the server drains, with ErrClosed as
// its cause: streams that last as long as their callers must not hold it up.
func (s *service) untilClosing(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-s.closing:
			cancel(fmt.Errorf("%w: the server is shutting down", block.ErrClosed))
		case <-ctx.Done():
		}
	}()
	return ctx, func(cause error) {
		cancel(cause)
		<-stopped
	}
}

// endCause prefers why the context ended over what the store, or a message that
// could not be sent, says of it.
func endCause(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	return context.Cause(ctx)
}
