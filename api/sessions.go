package api

import (
	"context"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/api/session"
)

// ListSessions lists the sessions that are open.
func (s *service) ListSessions(ctx context.Context, _ *pb.ListSessionsRequest) (*pb.ListSessionsResponse, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "the list of sessions"); err != nil {
		return nil, err
	}
	out := &pb.ListSessionsResponse{}
	if s.open == nil {
		return out, nil
	}
	for _, i := range s.open() {
		out.Sessions = append(out.Sessions, sessionToPB(&i))
	}
	return out, nil
}

// Sessions lists the sessions that are open at the server, oldest first.
func (c *Client) Sessions(ctx context.Context) ([]session.Info, error) {
	r, err := c.rpc.ListSessions(ctx, &pb.ListSessionsRequest{})
	if err != nil {
		return nil, c.fail("list sessions", err)
	}
	out := make([]session.Info, 0, len(r.GetSessions()))
	for _, i := range r.GetSessions() {
		out = append(out, sessionFromPB(i))
	}
	return out, nil
}

func sessionToPB(i *session.Info) *pb.SessionInfo {
	return &pb.SessionInfo{
		Id: i.ID, Name: i.Name, Identity: i.Identity, Peer: i.Peer, Pid: i.PID, Uid: i.UID, Shared: i.Shared, AgeMs: i.Age.Milliseconds(),
		Regions: uint32(i.Regions), RegionBytes: i.RegionBytes,
		Leases: uint32(i.Leases), LeasesLimit: uint32(i.LeasesLimit), LeasedBlocks: uint32(i.LeasedBlocks),
		Places: uint32(i.Places), PlaceBytes: i.PlaceBytes, Calls: uint32(i.Calls), CallBytes: i.CallBytes,
		IdentityUsage: usageToPB(&i.IdentityUsage),
	}
}

func sessionFromPB(i *pb.SessionInfo) session.Info {
	return session.Info{
		ID: i.GetId(), Name: i.GetName(), Identity: i.GetIdentity(), Peer: i.GetPeer(), PID: i.GetPid(), UID: i.GetUid(), Shared: i.GetShared(), Age: fromMillis(i.GetAgeMs()),
		Regions: int(i.GetRegions()), RegionBytes: i.GetRegionBytes(),
		Leases: int(i.GetLeases()), LeasesLimit: int(i.GetLeasesLimit()), LeasedBlocks: int(i.GetLeasedBlocks()),
		Places: int(i.GetPlaces()), PlaceBytes: i.GetPlaceBytes(), Calls: int(i.GetCalls()), CallBytes: i.GetCallBytes(),
		IdentityUsage: usageFromPB(i.GetIdentityUsage()),
	}
}

func usageToPB(u *access.Usage) *pb.IdentityUsage {
	return &pb.IdentityUsage{
		Name: u.Name, Sessions: uint32(u.Sessions), SessionsLimit: uint32(u.SessionsLimit), SessionsRefused: u.SessionsRefused,
		Leases: uint32(u.Leases), LeasesLimit: uint32(u.LeasesLimit), LeasesRefused: u.LeasesRefused,
	}
}

func usageFromPB(u *pb.IdentityUsage) access.Usage {
	return access.Usage{
		Name: u.GetName(), Sessions: int(u.GetSessions()), SessionsLimit: int(u.GetSessionsLimit()), SessionsRefused: u.GetSessionsRefused(),
		Leases: int(u.GetLeases()), LeasesLimit: int(u.GetLeasesLimit()), LeasesRefused: u.GetLeasesRefused(),
	}
}
