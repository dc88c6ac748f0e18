package api

import (
	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// chunkBytes is the payload of one message of a get, and of the client's puts.
const chunkBytes = 256 << 10

// wanted reads the keys and ranges of a get.
func wanted(req *pb.GetRequest) ([]block.Wanted, error) {
	n, err := checkHashes(req.GetHashLen(), req.GetHashes(), MaxKeys)
	if err != nil {
		return nil, err
	}
	off, length := req.GetOffsets(), req.GetLengths()
	if len(off) != len(length) || len(off) != 0 && len(off) != n {
		return nil, invalid("offsets, lengths: %d and %d of them for %d keys, want none or one for each key", len(off), len(length), n)
	}
	hl := int(req.GetHashLen())
	want := make([]block.Wanted, n)
	for i := range want {
		copy(want[i].Hash[:], req.GetHashes()[i*hl:(i+1)*hl])
		if len(off) == 0 {
			continue
		}
		if off[i] < 0 || off[i] > block.MaxBlockBytes {
			return nil, invalid("offsets[%d]: %d, want 0 to %d", i, off[i], block.MaxBlockBytes)
		}
		if length[i] < 0 || length[i] > block.MaxBlockBytes {
			return nil, invalid("lengths[%d]: %d, want 0 (to the end) to %d", i, length[i], block.MaxBlockBytes)
		}
		want[i].Offset, want[i].Length = off[i], length[i]
	}
	return want, nil
}

// Get streams blocks. Bytes go from where the block lies into the buffer of the
// message; a slow client holds back the stream, and with it the blocks that the
// store holds for it, until the call's deadline.
func (s *service) Get(req *pb.GetRequest, stream grpc.ServerStreamingServer[pb.GetResponse]) error {
	ns, err := s.namespace(stream.Context(), req.GetNamespace(), req.GetNamespaceTag(), access.Read)
	if err != nil {
		return err
	}
	want, err := wanted(req)
	if err != nil {
		return err
	}
	o := block.GetOptions{NoPromote: req.GetNoPromote(), Quiet: req.GetQuiet(), Verify: req.GetVerify(), Plan: planFromPB(req.GetPlan())}
	if o.Class, err = classField(req.GetClass()); err != nil {
		return err
	}
	ctx := stream.Context() // which has a deadline: see Server.tap
	var f getFrame
	err = s.store.Get(ctx, ns, int(req.GetHashLen()), want, o, func(i int, p block.Payload) error {
		f.index, f.reason, f.tier = uint32(i), pb.MissReason(p.Reason), pb.Tier(p.Tier)
		f.total, f.length = p.Total, uint32(len(p.Bytes))
		f.hasSum, f.sum = p.Reason == block.Hit, p.Sum
		rest := p.Bytes
		for {
			n := min(len(rest), chunkBytes)
			f.data, rest = rest[:n], rest[n:]
			// SendMsg has copied the bytes when it returns: the codec does.
			if err := stream.SendMsg(&f); err != nil {
				return err
			}
			if len(rest) == 0 {
				return nil
			}
			f.reason, f.tier, f.total, f.length, f.hasSum = 0, 0, 0, 0, false
		}
	})
	return endCause(ctx, err)
}
