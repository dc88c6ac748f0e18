package api

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Match looks keys up. It costs no allocation per key: the hashes are handed on
// as they came, and the result is packed from a pooled one.
func (s *service) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Read)
	if err != nil {
		return nil, err
	}
	if _, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxMatchKeys); err != nil {
		return nil, err
	}
	o := block.MatchOptions{All: req.GetAll(), Quiet: req.GetQuiet(), Plan: planFromPB(req.GetPlan()), Conversation: req.GetConversation()}
	if o.Class, err = classField(req.GetClass()); err != nil {
		return nil, err
	}
	if o.Lease, err = durationField("lease_ms", req.GetLeaseMs()); err != nil {
		return nil, err
	}
	if err := block.CheckConversation(o.Conversation); err != nil {
		return nil, err
	}
	if o.Lease > 0 {
		sess, err := enter(ctx)
		if err != nil {
			return nil, err
		}
		defer sess.leave()
		o.Session = sess.id
		if err := sess.takeLease(identityOf(ctx)); err != nil {
			return nil, err
		}
	}
	res := s.matches.Get().(*block.MatchResult)
	defer s.matches.Put(res)
	*res = block.MatchResult{Blocks: res.Blocks[:0]}
	if err := s.store.Match(ctx, ns, int(req.GetHashLen()), req.GetHashes(), o, res); err != nil {
		if o.Lease > 0 {
			identityOf(ctx).Leases().Cancel()
		}
		return nil, err
	}
	if o.Lease > 0 {
		identityOf(ctx).Leases().Add(res.Lease, o.Session)
	}
	return matchToPB(res), nil
}

// Locate lists every place of each key.
func (s *service) Locate(ctx context.Context, req *pb.LocateRequest) (*pb.LocateResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Read)
	if err != nil {
		return nil, err
	}
	if _, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxKeys); err != nil {
		return nil, err
	}
	found, err := s.store.Locate(ctx, ns, int(req.GetHashLen()), req.GetHashes())
	if err != nil {
		return nil, err
	}
	out := &pb.LocateResponse{Keys: make([]*pb.Locations, len(found))}
	for i, places := range found {
		l := &pb.Locations{}
		for _, p := range places {
			l.Places = append(l.Places, &pb.Located{Tier: pb.Tier(p.Tier), Place: uint64(p.Place), Length: p.Len})
		}
		out.Keys[i] = l
	}
	return out, nil
}

// RenewLease lets a lease run on. It counts for who renews it, too: else one identity
// could hold what counts for nobody.
func (s *service) RenewLease(ctx context.Context, req *pb.RenewLeaseRequest) (*pb.Lease, error) {
	d, err := durationField("lease_ms", req.GetLeaseMs())
	if err != nil {
		return nil, err
	}
	if d == 0 {
		return nil, invalid("lease_ms: 0, want more")
	}
	who := identityOf(ctx)
	counted := who.Leases()
	another := counted != nil && !counted.Has(req.GetId())
	if another {
		if err := who.TakeLease(); err != nil {
			return nil, fmt.Errorf("%w: %w", block.ErrNoSpace, err)
		}
	}
	l, err := s.store.RenewLease(req.GetId(), d)
	switch {
	case another:
		counted.Add(l, 0) // that of a failure is none
	case err == nil:
		counted.Renew(l)
	}
	if err != nil {
		return nil, err
	}
	return leaseToPB(l), nil
}

// ReleaseLease ends a lease.
func (s *service) ReleaseLease(ctx context.Context, req *pb.ReleaseLeaseRequest) (*pb.ReleaseLeaseResponse, error) {
	if err := s.store.ReleaseLease(req.GetId()); err != nil {
		return nil, err
	}
	identityOf(ctx).Leases().Drop(req.GetId())
	return &pb.ReleaseLeaseResponse{}, nil
}
