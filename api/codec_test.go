package api

import (
	"bytes"
	"reflect"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// split cuts an encoding into buffers of n bytes, as frames of a connection would.
func split(b []byte, n int) mem.BufferSlice {
	var out mem.BufferSlice
	for len(b) > n {
		out, b = append(out, mem.SliceBuffer(b[:n])), b[n:]
	}
	return append(out, mem.SliceBuffer(b))
}

func join(pieces [][]byte) []byte { return bytes.Join(pieces, nil) }

// Frames are protobuf: what one side writes the other reads, and the reverse,
// wherever the buffers are cut.
func TestPutFrameIsProtobuf(t *testing.T) {
	c := newCodec()
	for name, m := range map[string]*pb.PutRequest{
		"empty":  {},
		"open":   {Open: &pb.PutOpen{Namespace: 3, NamespaceTag: 1 << 60, Durable: pb.Tier_TIER_G3, TtlMs: 5}},
		"header": {Block: &pb.PutBlock{Hash: bytes.Repeat([]byte{7}, 32), Length: 4096, Parent: bytes.Repeat([]byte{8}, 32)}},
		"data":   {Data: bytes.Repeat([]byte("0123456789"), 30_000), End: true},
		"all": {
			Open: &pb.PutOpen{Namespace: 1}, Block: &pb.PutBlock{Reservation: 1 << 63, Offset: 1 << 22, Length: 1},
			Data: bytes.Repeat([]byte("x"), chunkBytes), End: true,
		},
	} {
		want, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		out, err := c.Marshal(&putFrame{open: m.Open, block: m.Block, data: m.Data, end: m.End})
		if err != nil {
			t.Fatal(err)
		}
		var read pb.PutRequest
		if err := c.Unmarshal(out, &read); err != nil || !proto.Equal(&read, m) {
			t.Errorf("%s: protobuf reads %v, %v", name, &read, err)
		}
		for _, cut := range []int{1, 3, 16384, 1 << 30} {
			var f putFrame
			if err := c.Unmarshal(split(want, cut), &f); err != nil {
				t.Fatal(err)
			}
			got := &pb.PutRequest{Open: f.open, Block: f.block, Data: join(f.pieces), End: f.end}
			if !proto.Equal(got, m) || f.bytes != len(m.Data) {
				t.Errorf("%s cut at %d: the frame reads %v", name, cut, got)
			}
			f.release()
		}
		out.Free()
	}
}

func TestGetFrameIsProtobuf(t *testing.T) {
	c := newCodec()
	for name, m := range map[string]*pb.GetResponse{
		"empty": {},
		"miss":  {Index: 9, Reason: pb.MissReason_MISS_REASON_CORRUPT},
		"first": {
			Index: 1, Tier: pb.Tier_TIER_G2, Total: 1 << 23, Sum: bytes.Repeat([]byte{9}, 16), Length: 100,
			Data: bytes.Repeat([]byte{1}, 100),
		},
		"more": {Index: 4095, Data: bytes.Repeat([]byte{1, 2, 3}, 80_000)},
	} {
		want, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		f := getFrame{
			index: m.Index, reason: m.Reason, tier: m.Tier, total: m.Total, length: m.Length, hasSum: len(m.Sum) > 0,
			sum: sumFromPB(m.Sum), data: m.Data,
		}
		out, err := c.Marshal(&f)
		if err != nil {
			t.Fatal(err)
		}
		if got := out.Materialize(); !bytes.Equal(got, want) {
			t.Errorf("%s: the frame is written as\n%x, protobuf as\n%x", name, got, want)
		}
		out.Free()
		for _, cut := range []int{1, 3, 16384, 1 << 30} {
			var f getFrame
			if err := c.Unmarshal(split(want, cut), &f); err != nil {
				t.Fatal(err)
			}
			got := &pb.GetResponse{Index: f.index, Reason: f.reason, Tier: f.tier, Total: f.total, Length: f.length, Data: join(f.pieces)}
			if f.hasSum {
				got.Sum = f.sum[:]
			}
			if !proto.Equal(got, m) {
				t.Errorf("%s cut at %d: the frame reads %v", name, cut, got)
			}
			f.release()
		}
	}
}

// A frame reads whatever protobuf reads, to the same message, and fails where it
// fails. It differs in two things: it knows no groups, and it does not look into
// what it skips.
func FuzzPutFrame(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		var want pb.PutRequest
		wantErr := proto.Unmarshal(b, &want)
		var fr putFrame
		err := fr.decode(split(b, max(cut, 1)))
		defer fr.release()
		got := &pb.PutRequest{Open: fr.open, Block: fr.block, Data: join(fr.pieces), End: fr.end}
		compareDecoded(t, b, got, err, &want, wantErr)
	})
}

func FuzzGetFrame(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		var want pb.GetResponse
		wantErr := proto.Unmarshal(b, &want)
		var fr getFrame
		err := fr.decode(split(b, max(cut, 1)))
		defer fr.release()
		got := &pb.GetResponse{
			Index: fr.index, Reason: fr.reason, Tier: fr.tier, Total: fr.total, Length: fr.length, Data: join(fr.pieces),
		}
		if fr.hasSum { // of any length on the wire, always 16 bytes here
			got.Sum = fr.sum[:]
			want.Sum = append(want.Sum, make([]byte, 16)...)[:16]
		}
		compareDecoded(t, b, got, err, &want, wantErr)
	})
}

// What a client makes of any answer of a server comes back from the wire as it is.
func FuzzAnswer(f *testing.F) {
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		same := func(m proto.Message, there func() any, back func() any) {
			if proto.Unmarshal(b, m) != nil {
				return
			}
			if got, want := back(), there(); !reflect.DeepEqual(got, want) {
				t.Fatalf("%T %x is read as\n%+v\nand came back as\n%+v", m, b, want, got)
			}
		}
		switch kind % 7 {
		case 0:
			m := new(pb.StatsResponse)
			same(m, func() any { return statsFromPB(m) }, func() any { return statsFromPB(statsToPB(statsFromPB(m))) })
		case 1:
			m := new(pb.Event)
			same(m, func() any { return eventFromPB(m) }, func() any { return eventFromPB(eventToPB(eventFromPB(m))) })
		case 2:
			m := new(pb.Namespace)
			same(m, func() any { return namespaceFromPB(m) }, func() any { return namespaceFromPB(namespaceToPB(namespaceFromPB(m))) })
		case 3:
			m := new(pb.ListEntry)
			same(m, func() any { return listEntryFromPB(m) }, func() any {
				return listEntryFromPB(listEntryToPB(listEntryFromPB(m), block.HashBytes))
			})
		case 4:
			m := new(pb.ScrubStatus)
			same(m, func() any { return scrubFromPB(m) }, func() any { return scrubFromPB(scrubToPB(scrubFromPB(m))) })
		case 5:
			m := new(pb.MatchResponse)
			var res, again block.MatchResult
			same(m, func() any { return res }, func() any {
				matchFromPB(m, &res)
				matchFromPB(matchToPB(&res), &again)
				return again
			})
		case 6:
			m := new(pb.Failure)
			same(m, func() any { return failureOf(fromFailure(m)) }, func() any { return failureOf(fromFailure(failureOf(fromFailure(m)))) })
		}
	})
}

func compareDecoded(t *testing.T, b []byte, got proto.Message, err error, want proto.Message, wantErr error) {
	t.Helper()
	switch {
	case err != nil && wantErr == nil && !hasGroup(b):
		t.Fatalf("%x: %v, but protobuf reads %v", b, err, want)
	case err != nil || wantErr != nil:
		return
	}
	want.ProtoReflect().SetUnknown(nil)
	if !proto.Equal(got, want) {
		t.Fatalf("%x: the frame reads %v, protobuf %v", b, got, want)
	}
}

// hasGroup reports whether a field of an encoded message is a group.
func hasGroup(b []byte) bool {
	for len(b) > 0 {
		_, typ, n := protowire.ConsumeField(b)
		if n < 0 {
			return false
		}
		if typ == protowire.StartGroupType {
			return true
		}
		b = b[n:]
	}
	return false
}
