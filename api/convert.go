package api

import (
	"math"
	"time"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// pendingByte is the byte of MatchResponse.tiers for a key that is pending.
const pendingByte = 128

func descriptorToPB(d block.Descriptor) *pb.Descriptor {
	return &pb.Descriptor{
		Name: d.Name, Model: d.Model, Revision: d.Revision, Dtype: d.DType, Layout: d.Layout,
		TokensPerBlock: d.TokensPerBlock, BlockBytes: d.BlockBytes, MaxBlockBytes: d.MaxBlockBytes,
		HashAlgorithm: d.HashAlgorithm, HashSeed: d.HashSeed, RankLayout: d.RankLayout,
		KvGroup: d.KVGroup, Tenant: d.Tenant,
	}
}

func descriptorFromPB(d *pb.Descriptor) block.Descriptor {
	return block.Descriptor{
		Name: d.GetName(), Model: d.GetModel(), Revision: d.GetRevision(), DType: d.GetDtype(), Layout: d.GetLayout(),
		TokensPerBlock: d.GetTokensPerBlock(), BlockBytes: d.GetBlockBytes(), MaxBlockBytes: d.GetMaxBlockBytes(),
		HashAlgorithm: d.GetHashAlgorithm(), HashSeed: d.GetHashSeed(), RankLayout: d.GetRankLayout(),
		KVGroup: d.GetKvGroup(), Tenant: d.GetTenant(),
	}
}

func namespaceToPB(n block.Namespace) *pb.Namespace {
	return &pb.Namespace{
		Id: uint32(n.ID), Tag: n.Desc.Tag(), Descriptor_: descriptorToPB(n.Desc), HashLen: uint32(n.HashLen),
		Epoch: n.Epoch, TtlMs: millis(n.TTL), CreatedUnixMs: unixMillis(n.Created),
	}
}

func namespaceFromPB(n *pb.Namespace) block.Namespace {
	return block.Namespace{
		ID: block.NamespaceID(n.GetId()), Desc: descriptorFromPB(n.GetDescriptor_()), HashLen: int(n.GetHashLen()),
		Epoch: n.GetEpoch(), TTL: fromMillis(n.GetTtlMs()), Created: fromUnixMillis(n.GetCreatedUnixMs()),
	}
}

// fromMillis reads a duration. One that is too long for this side is the longest.
func fromMillis(ms int64) time.Duration {
	const most = int64(math.MaxInt64 / time.Millisecond)
	return time.Duration(min(max(ms, -most), most)) * time.Millisecond
}

func unixMillis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromUnixMillis(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

func leaseToPB(l block.Lease) *pb.Lease {
	if l.ID == 0 {
		return nil
	}
	return &pb.Lease{Id: l.ID, LeftMs: l.Left.Milliseconds(), Count: uint32(l.Count)}
}

func leaseFromPB(l *pb.Lease) block.Lease {
	if l.GetId() == 0 {
		return block.Lease{} // no lease, whatever else it says
	}
	return block.Lease{ID: l.GetId(), Left: fromMillis(l.GetLeftMs()), Count: int(l.GetCount())}
}

// hashBytes is the part of a hash that counts, or nothing when it is absent.
func hashBytes(h block.Hash, n int, has bool) []byte {
	if !has {
		return nil
	}
	return append([]byte(nil), h[:n]...)
}

func sumFromPB(b []byte) block.Sum {
	var s block.Sum
	copy(s[:], b)
	return s
}

// matchToPB packs the answer of a match: one byte a key, and the lengths only
// once where they are all the same, as they mostly are.
func matchToPB(res *block.MatchResult) *pb.MatchResponse {
	out := &pb.MatchResponse{Prefix: uint32(res.Prefix), Lease: leaseToPB(res.Lease)}
	if p := res.Plan; p != nil {
		out.Plan = &pb.Plan{
			From: uint32(p.From), To: uint32(p.To), LoadNs: int64(p.Load), ComputeNs: int64(p.Compute), TotalNs: int64(p.Total), RecomputeNs: int64(p.Recompute),
		}
	}
	out.Tiers = make([]byte, len(res.Blocks))
	same := true
	for i, b := range res.Blocks {
		switch b.State {
		case block.Resident:
			out.Tiers[i] = byte(b.Tier)
			if out.Length == 0 {
				out.Length = b.Len
			}
			same = same && out.Length == b.Len
		case block.Pending:
			out.Tiers[i] = pendingByte
		}
	}
	if same {
		return out
	}
	out.Length = 0
	out.Lengths = make([]uint32, len(res.Blocks))
	for i, b := range res.Blocks {
		if b.State == block.Resident {
			out.Lengths[i] = b.Len
		}
	}
	return out
}

// matchFromPB is the inverse of matchToPB; it reuses the slice in res.
func matchFromPB(in *pb.MatchResponse, res *block.MatchResult) {
	res.Prefix = int(in.GetPrefix())
	res.Lease = leaseFromPB(in.GetLease())
	res.Plan = nil
	if p := in.GetPlan(); p != nil {
		res.Plan = &block.Plan{
			From: int(p.GetFrom()), To: int(p.GetTo()), Load: time.Duration(p.GetLoadNs()), Compute: time.Duration(p.GetComputeNs()),
			Total: time.Duration(p.GetTotalNs()), Recompute: time.Duration(p.GetRecomputeNs()),
		}
	}
	res.Blocks = res.Blocks[:0]
	lengths := in.GetLengths()
	for i, t := range in.GetTiers() {
		var f block.Found
		switch t {
		case 0:
		case pendingByte:
			f.State = block.Pending
		default:
			f = block.Found{State: block.Resident, Tier: block.TierID(t), Len: in.GetLength()}
			if i < len(lengths) {
				f.Len = lengths[i]
			}
		}
		res.Blocks = append(res.Blocks, f)
	}
}

func planToPB(o *block.PlanOptions) *pb.PlanRequest {
	if o == nil {
		return nil
	}
	return &pb.PlanRequest{
		Prefill: prefillToPB(o.Prefill), Overlap: o.Overlap, DeadlineNs: int64(o.Deadline),
	}
}

func planFromPB(p *pb.PlanRequest) *block.PlanOptions {
	if p == nil {
		return nil
	}
	return &block.PlanOptions{
		Prefill: prefillFromPB(p.GetPrefill()),
		Overlap: p.GetOverlap(), Deadline: time.Duration(p.GetDeadlineNs()),
	}
}

func prefillToPB(p block.Prefill) *pb.Prefill {
	return &pb.Prefill{TokenNs: int64(p.Token), PositionNs: p.Position}
}

func prefillFromPB(p *pb.Prefill) block.Prefill {
	return block.Prefill{Token: time.Duration(p.GetTokenNs()), Position: p.GetPositionNs()}
}

func prefillCostToPB(c *block.PrefillCost) *pb.PrefillCost {
	if c == nil {
		return nil
	}
	return &pb.PrefillCost{Prefill: prefillToPB(c.Prefill), Learned: c.Learned, Reports: c.Reports}
}

func prefillCostFromPB(c *pb.PrefillCost) *block.PrefillCost {
	if c == nil {
		return nil
	}
	return &block.PrefillCost{Prefill: prefillFromPB(c.GetPrefill()), Learned: c.GetLearned(), Reports: c.GetReports()}
}

func listEntryToPB(e block.ListEntry, hashLen int) *pb.ListEntry {
	out := &pb.ListEntry{
		Hash: hashBytes(e.Hash, hashLen, true), Parent: hashBytes(e.Parent, hashLen, e.HasPar),
		Length: e.Len, Sum: append([]byte(nil), e.Sum[:]...), ExpiresUnixMs: unixMillis(e.Expires), Pinned: e.Pinned,
	}
	for _, t := range e.Tiers {
		out.Tiers = append(out.Tiers, pb.Tier(t))
	}
	return out
}

func listEntryFromPB(e *pb.ListEntry) block.ListEntry {
	out := block.ListEntry{
		HasPar: len(e.GetParent()) > 0, Len: e.GetLength(), Sum: sumFromPB(e.GetSum()), Expires: fromUnixMillis(e.GetExpiresUnixMs()),
		Pinned: e.GetPinned(),
	}
	copy(out.Hash[:], e.GetHash())
	copy(out.Parent[:], e.GetParent())
	for _, t := range e.GetTiers() {
		out.Tiers = append(out.Tiers, block.TierID(t))
	}
	return out
}

func eventToPB(e block.Event) *pb.Event {
	n := int(e.Hlen)
	return &pb.Event{
		Seq: e.Seq, Kind: pb.EventKind(e.Kind), Namespace: e.NS, Hash: hashBytes(e.Hash, n, n > 0),
		Parent: hashBytes(e.Parent, n, e.HasPar), Tier: pb.Tier(e.Tier), Reason: pb.Reason(e.Reason),
		Length: e.Len, Last: e.Last, Count: e.Count,
	}
}

// eventFromPB is the inverse of eventToPB. A hash of a length that none has is no
// hash, and a parent of another length than the block's is no parent.
func eventFromPB(e *pb.Event) block.Event {
	n := len(e.GetHash())
	if !block.ValidHashLen(n) {
		n = 0
	}
	out := block.Event{
		Seq: e.GetSeq(), Kind: block.EventKind(e.GetKind()), NS: e.GetNamespace(), Hlen: uint8(n),
		HasPar: n > 0 && len(e.GetParent()) == n, Tier: block.TierID(e.GetTier()), Reason: block.Reason(e.GetReason()),
		Len: e.GetLength(), Last: e.GetLast(), Count: e.GetCount(),
	}
	copy(out.Hash[:n], e.GetHash())
	if out.HasPar {
		copy(out.Parent[:n], e.GetParent())
	}
	return out
}

func scrubToPB(s block.ScrubStatus) *pb.ScrubStatus {
	return &pb.ScrubStatus{
		State: pb.ScrubState(s.State), StartedUnixMs: unixMillis(s.Started), EndedUnixMs: unixMillis(s.Ended), Done: s.Done, Total: s.Total,
		Blocks: s.Blocks, Damaged: s.Damaged, Repaired: s.Repaired, Dropped: s.Dropped, Stale: s.Stale, Error: s.Error,
	}
}

func scrubFromPB(s *pb.ScrubStatus) block.ScrubStatus {
	return block.ScrubStatus{
		State: block.ScrubState(s.GetState()), Started: fromUnixMillis(s.GetStartedUnixMs()), Ended: fromUnixMillis(s.GetEndedUnixMs()),
		Done: s.GetDone(), Total: s.GetTotal(), Blocks: s.GetBlocks(), Damaged: s.GetDamaged(), Repaired: s.GetRepaired(),
		Dropped: s.GetDropped(), Stale: s.GetStale(), Error: s.GetError(),
	}
}

func policyToPB(t block.TierPolicy) *pb.TierPolicy {
	return &pb.TierPolicy{Tier: pb.Tier(t.Tier), Policy: t.Policy, Start: t.Start, Moving: t.Moving}
}

func policyFromPB(t *pb.TierPolicy) block.TierPolicy {
	return block.TierPolicy{Tier: block.TierID(t.GetTier()), Policy: t.GetPolicy(), Start: t.GetStart(), Moving: t.GetMoving()}
}

func statsToPB(s block.Stats) *pb.StatsResponse {
	out := &pb.StatsResponse{
		UptimeMs: s.Uptime.Milliseconds(), Namespaces: s.Namespaces, Blocks: s.Blocks, Misses: s.Misses, Removed: s.Removed,
		Conflicts: s.Conflicts, Corrupt: s.Corrupt, Leases: s.Leases, Reservations: s.Reservations, ChunksPassed: s.ChunksPassed, ChunksStuck: s.ChunksStuck,
		Prefetch: &pb.PrefetchStats{
			Queued: s.Prefetch.Queued, Done: s.Prefetch.Done, Dropped: s.Prefetch.Dropped, Cancelled: s.Prefetch.Cancelled,
			Useful: s.Prefetch.Useful, Wasted: s.Prefetch.Wasted, Displaced: s.Prefetch.Displaced, Stale: s.Prefetch.Stale,
		},
		Watchers: s.Watchers, EventsLost: s.EventsLost, TableBytes: s.TableBytes,
		Incarnation: s.Incarnation, EventSeq: s.EventSeq, Pinned: s.Pinned, PinnedBytes: s.PinnedBytes, Scrub: scrubToPB(s.Scrub),
		Catalog: &pb.CatalogStats{
			State: s.Catalog.State, Reason: s.Catalog.Reason, SinceUnixMs: unixMillis(s.Catalog.Since), Errors: s.Catalog.Errors,
		},
	}
	for _, n := range s.ByNamespace {
		out.ByNamespace = append(out.ByNamespace, &pb.NamespaceStats{Name: n.Name, Asked: n.Asked, Matched: n.Matched, Misses: n.Misses, Prefill: prefillCostToPB(n.Prefill)})
	}
	for _, w := range s.ObjectSweeps {
		out.ObjectSweeps = append(out.ObjectSweeps, sweepToPB(w))
	}
	for _, t := range s.Tiers {
		p := &pb.TierStats{
			Tier: pb.Tier(t.Tier), Capacity: t.Capacity, Used: t.Used, Reserve: t.Reserve, Blocks: t.Blocks, Payload: t.Payload,
			High: t.High, Low: t.Low, Evictions: t.Evictions, Dropped: t.Dropped, Reclaimed: t.Reclaimed,
			BytesIn: t.BytesIn, BytesOut: t.BytesOut, Refused: t.Refused, Hits: t.Hits, QueueDrops: t.QueueDrops,
			Policy: t.Policy, BehindMs: t.Behind.Milliseconds(), FellBehind: t.FellBehind,
		}
		if a := t.Admission; a != nil {
			p.Admission = &pb.AdmissionStats{Admitted: a.Admitted, Rejected: a.Rejected}
			for _, b := range a.Budgets {
				p.Admission.Budgets = append(p.Admission.Budgets, budgetToPB(b))
			}
		}
		if u := t.Uploads; u != nil {
			p.Uploads = &pb.UploadStats{Blocks: u.Blocks, Bytes: u.Bytes, HeldBack: u.HeldBack, Dropped: u.Dropped, Through: u.Through, Failed: u.Failed}
		}
		for _, k := range t.Curves {
			p.Curves = append(p.Curves, &pb.Curve{Policy: k.Policy, Size: k.Size, Asked: k.Asked, Hits: k.Hits})
		}
		for _, d := range t.Devices {
			dev := &pb.DeviceStats{
				Path: d.Path, Id: d.ID, Bytes: d.Bytes, FreeOnFs: d.FreeOnFS, Engine: d.Engine, State: d.State,
				PageBytes: d.PageBytes, Locked: d.Locked, Reason: d.Reason, SinceUnixMs: unixMillis(d.Since), Errors: d.Errors,
				Quarantined: d.Quarantined,
			}
			if w := d.Wear; w != nil {
				dev.Wear = &pb.DeviceWear{
					Device: w.Device, UsedPercent: w.UsedPercent, SparePercent: w.SparePercent, SpareThreshold: w.SpareThreshold,
					CriticalWarning: w.CriticalWarning, WrittenBytes: w.WrittenBytes,
				}
			}
			p.Devices = append(p.Devices, dev)
		}
		out.Tiers = append(out.Tiers, p)
	}
	return out
}

func statsFromPB(s *pb.StatsResponse) block.Stats {
	p, c := s.GetPrefetch(), s.GetCatalog()
	out := block.Stats{
		Uptime: fromMillis(s.GetUptimeMs()), Namespaces: s.GetNamespaces(), Blocks: s.GetBlocks(),
		Misses: s.GetMisses(), Removed: s.GetRemoved(), Conflicts: s.GetConflicts(), Corrupt: s.GetCorrupt(),
		Leases: s.GetLeases(), Reservations: s.GetReservations(), ChunksPassed: s.GetChunksPassed(), ChunksStuck: s.GetChunksStuck(),
		Prefetch: block.PrefetchStats{
			Queued: p.GetQueued(), Done: p.GetDone(), Dropped: p.GetDropped(), Cancelled: p.GetCancelled(),
			Useful: p.GetUseful(), Wasted: p.GetWasted(), Displaced: p.GetDisplaced(), Stale: p.GetStale(),
		},
		Watchers: s.GetWatchers(), EventsLost: s.GetEventsLost(), TableBytes: s.GetTableBytes(),
		Incarnation: s.GetIncarnation(), EventSeq: s.GetEventSeq(), Pinned: s.GetPinned(), PinnedBytes: s.GetPinnedBytes(),
		Scrub: scrubFromPB(s.GetScrub()),
		Catalog: block.CatalogStats{
			State: c.GetState(), Reason: c.GetReason(), Since: fromUnixMillis(c.GetSinceUnixMs()), Errors: c.GetErrors(),
		},
	}
	for _, n := range s.GetByNamespace() {
		out.ByNamespace = append(out.ByNamespace, block.NamespaceStats{Name: n.GetName(), Asked: n.GetAsked(), Matched: n.GetMatched(), Misses: n.GetMisses(), Prefill: prefillCostFromPB(n.GetPrefill())})
	}
	for _, w := range s.GetObjectSweeps() {
		out.ObjectSweeps = append(out.ObjectSweeps, sweepFromPB(w))
	}
	for _, t := range s.GetTiers() {
		b := block.TierStats{
			Tier: block.TierID(t.GetTier()), Capacity: t.GetCapacity(), Used: t.GetUsed(), Reserve: t.GetReserve(),
			Blocks: t.GetBlocks(), Payload: t.GetPayload(), High: t.GetHigh(), Low: t.GetLow(), Evictions: t.GetEvictions(),
			Dropped: t.GetDropped(), Reclaimed: t.GetReclaimed(), BytesIn: t.GetBytesIn(), BytesOut: t.GetBytesOut(),
			Refused: t.GetRefused(), Hits: t.GetHits(), QueueDrops: t.GetQueueDrops(),
			Policy: t.GetPolicy(), Behind: fromMillis(t.GetBehindMs()), FellBehind: t.GetFellBehind(),
		}
		if a := t.GetAdmission(); a != nil {
			b.Admission = &block.AdmissionStats{Admitted: a.GetAdmitted(), Rejected: a.GetRejected()}
			for _, p := range a.GetBudgets() {
				b.Admission.Budgets = append(b.Admission.Budgets, budgetFromPB(p))
			}
		}
		if u := t.GetUploads(); u != nil {
			b.Uploads = &block.UploadStats{
				Blocks: u.GetBlocks(), Bytes: u.GetBytes(), HeldBack: u.GetHeldBack(), Dropped: u.GetDropped(), Through: u.GetThrough(), Failed: u.GetFailed(),
			}
		}
		for _, k := range t.GetCurves() {
			b.Curves = append(b.Curves, block.Curve{Policy: k.GetPolicy(), Size: k.GetSize(), Asked: k.GetAsked(), Hits: k.GetHits()})
		}
		for _, d := range t.GetDevices() {
			dev := block.DeviceStats{
				Path: d.GetPath(), ID: d.GetId(), Bytes: d.GetBytes(), FreeOnFS: d.GetFreeOnFs(), Engine: d.GetEngine(),
				Quarantined: d.GetQuarantined(),
				State:       d.GetState(), PageBytes: d.GetPageBytes(), Locked: d.GetLocked(),
				Reason: d.GetReason(), Since: fromUnixMillis(d.GetSinceUnixMs()), Errors: d.GetErrors(),
			}
			if w := d.GetWear(); w != nil {
				dev.Wear = &block.DeviceWear{
					Device: w.GetDevice(), UsedPercent: w.GetUsedPercent(), SparePercent: w.GetSparePercent(), SpareThreshold: w.GetSpareThreshold(),
					CriticalWarning: w.GetCriticalWarning(), WrittenBytes: w.GetWrittenBytes(),
				}
			}
			b.Devices = append(b.Devices, dev)
		}
		out.Tiers = append(out.Tiers, b)
	}
	return out
}

func budgetToPB(b block.BudgetStats) *pb.WriteBudget {
	return &pb.WriteBudget{
		Tier: pb.Tier(b.Tier), Namespaces: b.Namespaces, Bytes: b.Bytes, Requests: b.Requests,
		AvailableBytes: b.AvailableBytes, AvailableRequests: b.AvailableRequests,
	}
}

func budgetFromPB(b *pb.WriteBudget) block.BudgetStats {
	return block.BudgetStats{
		WriteBudget:    block.WriteBudget{Tier: block.TierID(b.GetTier()), Namespaces: b.GetNamespaces(), Bytes: b.GetBytes(), Requests: b.GetRequests()},
		AvailableBytes: b.GetAvailableBytes(), AvailableRequests: b.GetAvailableRequests(),
	}
}
