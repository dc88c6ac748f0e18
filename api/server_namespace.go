package api

import (
	"context"

	"github.com/kvtier/kvtier/api/access"
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
	if err := identityOf(ctx).Check(access.Write, d.Name); err != nil {
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
	return s.opened(n), nil
}

// opened is a namespace in the reply to a client that is going to work with it.
func (s *service) opened(n block.Namespace) *pb.Namespace {
	p := namespaceToPB(n)
	p.Sessions = s.sessions()
	return p
}

// GetNamespace finds a namespace by name or handle.
func (s *service) GetNamespace(ctx context.Context, req *pb.GetNamespaceRequest) (*pb.Namespace, error) {
	var n block.Namespace
	var err error
	switch {
	case req.GetName() != "":
		// Whoever has no right there is not told whether it is there.
		if err := identityOf(ctx).Check(access.Read|access.Write, req.GetName()); err != nil {
			return nil, err
		}
		n, err = s.store.Namespace(req.GetName())
	case req.GetId() != 0:
		n, err = s.store.NamespaceByID(block.NamespaceID(req.GetId()))
	default:
		return nil, invalid("name and id: both empty, want one of them")
	}
	if err == nil {
		err = identityOf(ctx).CheckHandle(access.Read|access.Write, n.ID, n.Desc.Name)
	}
	if err != nil {
		return nil, err
	}
	return s.opened(n), nil
}

// ListNamespaces lists the namespaces in which the caller has a right.
func (s *service) ListNamespaces(ctx context.Context, _ *pb.ListNamespacesRequest) (*pb.ListNamespacesResponse, error) {
	out := &pb.ListNamespacesResponse{}
	for _, n := range s.store.Namespaces() {
		if identityOf(ctx).Rights(n.Desc.Name) == 0 {
			continue
		}
		out.Namespaces = append(out.Namespaces, &pb.NamespaceInfo{
			Namespace: namespaceToPB(n.Namespace), Blocks: n.Blocks, Bytes: n.Bytes,
		})
	}
	return out, nil
}
