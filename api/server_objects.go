package api

import (
	"context"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// objectsAccess fails unless the caller may do everything: objects are those of all
// namespaces.
func objectsAccess(ctx context.Context) error {
	return identityOf(ctx).CheckAll(access.Read|access.Write, "the objects")
}

// ListObjects pages through the objects that the catalog knows.
func (s *service) ListObjects(ctx context.Context, req *pb.ListObjectsRequest) (*pb.ListObjectsResponse, error) {
	if err := objectsAccess(ctx); err != nil {
		return nil, err
	}
	limit, err := listLimit(req.GetLimit())
	if err != nil {
		return nil, err
	}
	objects, cursor, err := s.store.ListObjects(ctx, req.GetCursor(), limit)
	if err != nil {
		return nil, err
	}
	out := &pb.ListObjectsResponse{Cursor: cursor}
	for _, o := range objects {
		out.Objects = append(out.Objects, objectToPB(o))
	}
	return out, nil
}

// ObjectUsage sums up the objects.
func (s *service) ObjectUsage(ctx context.Context, _ *pb.ObjectUsageRequest) (*pb.ObjectUsageResponse, error) {
	if err := objectsAccess(ctx); err != nil {
		return nil, err
	}
	usage, err := s.store.ObjectUsage(ctx)
	if err != nil {
		return nil, err
	}
	out := &pb.ObjectUsageResponse{}
	for _, u := range usage {
		out.Usage = append(out.Usage, objectUsageToPB(u))
	}
	return out, nil
}

// SweepObjects sweeps the buckets and streams progress.
func (s *service) SweepObjects(_ *pb.SweepObjectsRequest, stream grpc.ServerStreamingServer[pb.ObjectSweep]) error {
	if err := objectsAccess(stream.Context()); err != nil {
		return err
	}
	ctx, cancel := s.untilClosing(stream.Context())
	defer cancel(nil)
	return endCause(ctx, s.store.SweepObjects(ctx, func(p block.ObjectSweep) error { return stream.Send(sweepToPB(p)) }))
}

// ImportObjects imports the buckets and streams progress.
func (s *service) ImportObjects(_ *pb.ImportObjectsRequest, stream grpc.ServerStreamingServer[pb.ObjectImport]) error {
	if err := objectsAccess(stream.Context()); err != nil {
		return err
	}
	ctx, cancel := s.untilClosing(stream.Context())
	defer cancel(nil)
	return endCause(ctx, s.store.ImportObjects(ctx, func(p block.ObjectImport) error { return stream.Send(importToPB(p)) }))
}
