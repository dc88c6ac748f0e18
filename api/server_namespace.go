package api

import (
	"context"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// OpenNamespace opens or makes a namespace.
func (s *service) OpenNamespace(ctx context.Context, req *pb.OpenNamespaceRequest) (*pb.Namespace, error) {
	if req.GetDescriptor_() == nil {
		return nil, invalid("descriptor: absent")
	}
	d := descriptorFromPB(req.GetDescriptor_())
	if err := d.Validate(); err != nil {
		return nil, err
	}
	ttl, err := durationField("ttl_ms", req.GetTtlMs())
	if err != nil {
		return nil, err
	}
	n, err := s.store.OpenNamespace(ctx, d, ttl)
	if err != nil {
		return nil, err
	}
	return namespaceToPB(n), nil
}

// GetNamespace finds a namespace by name or handle.
func (s *service) GetNamespace(_ context.Context, req *pb.GetNamespaceRequest) (*pb.Namespace, error) {
	var n block.Namespace
	var err error
	switch {
	case req.GetName() != "":
		n, err = s.store.Namespace(req.GetName())
	case req.GetId() != 0:
		n, err = s.store.NamespaceByID(block.NamespaceID(req.GetId()))
	default:
		return nil, invalid("name and id: both empty, want one of them")
	}
	if err != nil {
		return nil, err
	}
	return namespaceToPB(n), nil
}

// ListNamespaces lists all namespaces.
func (s *service) ListNamespaces(context.Context, *pb.ListNamespacesRequest) (*pb.ListNamespacesResponse, error) {
	out := &pb.ListNamespacesResponse{}
	for _, n := range s.store.Namespaces() {
		out.Namespaces = append(out.Namespaces, &pb.NamespaceInfo{
			Namespace: namespaceToPB(n.Namespace), Blocks: n.Blocks, Bytes: n.Bytes,
		})
	}
	return out, nil
}
