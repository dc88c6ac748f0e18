package api

import (
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

func sweepToPB(s block.ObjectSweep) *pb.ObjectSweep {
	return &pb.ObjectSweep{
		Bucket: s.Bucket, StartedUnixMs: unixMillis(s.Started), EndedUnixMs: unixMillis(s.Ended), Listed: s.Listed, Orphans: s.Orphans,
		OrphanBytes: s.OrphanBytes, Missing: s.Missing, Lost: s.Lost, Expired: s.Expired, Rewritten: s.Rewritten, Moved: s.Moved,
		MovedBytes: s.MovedBytes, Error: s.Error,
	}
}

func sweepFromPB(s *pb.ObjectSweep) block.ObjectSweep {
	return block.ObjectSweep{
		Bucket: s.GetBucket(), Started: fromUnixMillis(s.GetStartedUnixMs()), Ended: fromUnixMillis(s.GetEndedUnixMs()), Listed: s.GetListed(),
		Orphans: s.GetOrphans(), OrphanBytes: s.GetOrphanBytes(), Missing: s.GetMissing(), Lost: s.GetLost(), Expired: s.GetExpired(),
		Rewritten: s.GetRewritten(), Moved: s.GetMoved(), MovedBytes: s.GetMovedBytes(), Error: s.GetError(),
	}
}

func importToPB(i block.ObjectImport) *pb.ObjectImport {
	return &pb.ObjectImport{
		Bucket: i.Bucket, Done: i.Done, Objects: i.Objects, Namespaces: i.Namespaces, Blocks: i.Blocks, Bytes: i.Bytes, Known: i.Known,
		Dead: i.Dead, Refused: i.Refused, Failed: i.Failed, Problems: i.Problems,
	}
}

func importFromPB(i *pb.ObjectImport) block.ObjectImport {
	return block.ObjectImport{
		Bucket: i.GetBucket(), Done: i.GetDone(), Objects: i.GetObjects(), Namespaces: i.GetNamespaces(), Blocks: i.GetBlocks(),
		Bytes: i.GetBytes(), Known: i.GetKnown(), Dead: i.GetDead(), Refused: i.GetRefused(), Failed: i.GetFailed(), Problems: i.GetProblems(),
	}
}

func objectToPB(o block.ObjectInfo) *pb.ObjectInfo {
	return &pb.ObjectInfo{
		Bucket: o.Bucket, Key: o.Key, Namespace: o.Namespace, Own: o.Own, Bytes: o.Bytes, Blocks: o.Blocks, Live: o.Live,
		LiveBytes: o.LiveBytes, PackedUnixMs: unixMillis(o.Packed),
	}
}

func objectFromPB(o *pb.ObjectInfo) block.ObjectInfo {
	return block.ObjectInfo{
		Bucket: o.GetBucket(), Key: o.GetKey(), Namespace: o.GetNamespace(), Own: o.GetOwn(), Bytes: o.GetBytes(), Blocks: o.GetBlocks(),
		Live: o.GetLive(), LiveBytes: o.GetLiveBytes(), Packed: fromUnixMillis(o.GetPackedUnixMs()),
	}
}

func objectUsageToPB(u block.ObjectUsage) *pb.ObjectUsage {
	return &pb.ObjectUsage{
		Bucket: u.Bucket, Namespace: u.Namespace, Objects: u.Objects, Bytes: u.Bytes, Blocks: u.Blocks, Live: u.Live, LiveBytes: u.LiveBytes,
	}
}

func objectUsageFromPB(u *pb.ObjectUsage) block.ObjectUsage {
	return block.ObjectUsage{
		Bucket: u.GetBucket(), Namespace: u.GetNamespace(), Objects: u.GetObjects(), Bytes: u.GetBytes(), Blocks: u.GetBlocks(),
		Live: u.GetLive(), LiveBytes: u.GetLiveBytes(),
	}
}
