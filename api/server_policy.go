package api

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// ListPolicies answers the policies of the tiers.
func (s *service) ListPolicies(ctx context.Context, _ *pb.ListPoliciesRequest) (*pb.ListPoliciesResponse, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "the policies"); err != nil {
		return nil, err
	}
	out := &pb.ListPoliciesResponse{}
	for _, t := range s.store.Policies() {
		out.Tiers = append(out.Tiers, policyToPB(t))
	}
	return out, nil
}

// SetPolicy changes the policy of a tier, or of all.
func (s *service) SetPolicy(ctx context.Context, req *pb.SetPolicyRequest) (*pb.SetPolicyResponse, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "the policies"); err != nil {
		return nil, err
	}
	if err := s.store.SetPolicy(ctx, block.TierID(req.GetTier()), req.GetPolicy()); err != nil {
		return nil, err
	}
	return &pb.SetPolicyResponse{}, nil
}

// SetWriteBudget changes what may be written to a tier.
func (s *service) SetWriteBudget(ctx context.Context, req *pb.SetWriteBudgetRequest) (*pb.SetWriteBudgetResponse, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "the write budgets"); err != nil {
		return nil, err
	}
	if err := s.store.SetWriteBudget(budgetFromPB(req.GetBudget()).WriteBudget); err != nil {
		return nil, err
	}
	return &pb.SetWriteBudgetResponse{}, nil
}

// ReportPrefill hands on what an engine has measured.
func (s *service) ReportPrefill(ctx context.Context, req *pb.ReportPrefillRequest) (*pb.ReportPrefillResponse, error) {
	ns, err := s.namespace(ctx, req.GetNamespace(), req.GetNamespaceTag(), access.Write)
	if err != nil {
		return nil, err
	}
	if err := checkCount("reports", len(req.GetReports())); err != nil {
		return nil, err
	}
	reports := make([]block.PrefillReport, len(req.GetReports()))
	for i, r := range req.GetReports() {
		reports[i] = block.PrefillReport{Position: int64(r.GetPosition()), Tokens: int64(r.GetTokens()), Took: time.Duration(r.GetTookNs())}
	}
	if err := s.store.ReportPrefill(ns, reports); err != nil {
		return nil, err
	}
	return &pb.ReportPrefillResponse{}, nil
}
