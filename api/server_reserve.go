package api

import (
	"context"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Reserve takes room for blocks. What concerns one item is in its result.
func (s *service) Reserve(ctx context.Context, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Write)
	if err != nil {
		return nil, err
	}
	if err := checkCount("items", len(req.GetItems())); err != nil {
		return nil, err
	}
	durable, err := durableField(req.GetDurable())
	if err != nil {
		return nil, err
	}
	ttl, err := durationField("ttl_ms", req.GetTtlMs())
	if err != nil {
		return nil, err
	}
	sess, err := enter(ctx)
	if err != nil {
		return nil, err
	}
	defer sess.leave()
	o := block.PutOptions{Durable: durable, TTL: ttl, Session: sess.id}
	out := &pb.ReserveResponse{Items: make([]*pb.Reservation, len(req.GetItems()))}
	for i, it := range req.GetItems() {
		out.Items[i] = s.reserve(ctx, ns, it, o)
	}
	return out, nil
}

func (s *service) reserve(ctx context.Context, ns block.NamespaceID, it *pb.ReserveItem, o block.PutOptions) *pb.Reservation {
	h, err := hashField("hash", it.GetHash())
	if err == nil {
		err = checkLength(it.GetLength())
	}
	if err == nil {
		o.Parent, o.HasParent, err = parentField(it.GetParent(), len(it.GetHash()))
	}
	var r block.Reserved
	var there block.Existing
	if err == nil {
		r, there, err = s.store.Reserve(ctx, ns, len(it.GetHash()), h, int64(it.GetLength()), o)
	}
	switch {
	case err != nil:
		return &pb.Reservation{Status: pb.PutStatus_PUT_STATUS_FAILED, Failure: failureOf(err)}
	case r.Status == block.Exists:
		return &pb.Reservation{Status: pb.PutStatus_PUT_STATUS_EXISTS, Length: there.Len, Sum: there.Sum[:]}
	}
	return &pb.Reservation{
		Status: pb.PutStatus_PUT_STATUS_RESERVED, Id: r.ID, LeftMs: r.Left.Milliseconds(), Place: uint64(r.Place),
	}
}

// Commit makes reservations visible.
func (s *service) Commit(ctx context.Context, req *pb.CommitRequest) (*pb.CommitResponse, error) {
	if err := checkCount("ids", len(req.GetIds())); err != nil {
		return nil, err
	}
	out := &pb.CommitResponse{Results: make([]*pb.PutResult, 0, len(req.GetIds()))}
	for _, r := range s.store.Commit(ctx, req.GetIds()) {
		out.Results = append(out.Results, putResult(r))
	}
	return out, nil
}

// Abort gives reservations back.
func (s *service) Abort(_ context.Context, req *pb.AbortRequest) (*pb.AbortResponse, error) {
	if err := checkCount("ids", len(req.GetIds())); err != nil {
		return nil, err
	}
	s.store.Abort(req.GetIds())
	return &pb.AbortResponse{}, nil
}

func putResult(r block.CommitResult) *pb.PutResult {
	switch {
	case r.Err != nil:
		return &pb.PutResult{Status: pb.PutStatus_PUT_STATUS_FAILED, Failure: failureOf(r.Err)}
	case r.Status == block.Exists:
		return &pb.PutResult{Status: pb.PutStatus_PUT_STATUS_EXISTS}
	}
	return &pb.PutResult{Status: pb.PutStatus_PUT_STATUS_STORED}
}
