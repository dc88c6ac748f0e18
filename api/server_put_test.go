package api_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// rawPut opens a namespace and a put.
func rawPut(t *testing.T, s api.Store) (pb.KvtierClient, *pb.Namespace, grpc.BidiStreamingClient[pb.PutRequest, pb.PutResponse]) {
	t.Helper()
	conn, _ := raw(t, s, nil)
	c := pb.NewKvtierClient(conn)
	ns, err := c.OpenNamespace(t.Context(), &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", MaxBlockBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := c.Put(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	send(t, stream, &pb.PutRequest{Open: &pb.PutOpen{Namespace: ns.Id, NamespaceTag: ns.Tag}})
	return c, ns, stream
}

func send(t *testing.T, s grpc.BidiStreamingClient[pb.PutRequest, pb.PutResponse], m *pb.PutRequest) {
	t.Helper()
	if err := s.Send(m); err != nil {
		t.Fatal(err)
	}
}

func key(i int) []byte { return []byte(fmt.Sprintf("%08d", i)) }

func header(i, length int) *pb.PutBlock { return &pb.PutBlock{Hash: key(i), Length: uint32(length)} }

// results reads results until the server ends the stream.
func results(t *testing.T, s grpc.BidiStreamingClient[pb.PutRequest, pb.PutResponse]) ([]*pb.PutResult, error) {
	t.Helper()
	var out []*pb.PutResult
	for {
		r, err := s.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return out, err
		}
		if int(r.First) != len(out) {
			t.Fatalf("results from %d on, after %d", r.First, len(out))
		}
		out = append(out, r.Results...)
	}
}

// One stream of blocks, of which some are refused for all sorts of reasons: the
// others are stored, and each failure says what was wrong.
func TestPutRefusesBlocksOneByOne(t *testing.T) {
	c, ns, stream := rawPut(t, memstore.New(nil))
	steps := []struct {
		send []*pb.PutRequest
		want string // part of the failure; empty: stored
	}{
		{[]*pb.PutRequest{{Block: header(0, 3), Data: []byte("abc"), End: true}}, ""},
		{[]*pb.PutRequest{{Block: header(1, 3), Data: []byte("abcd"), End: true}}, "announced 3 bytes, received at least 4"},
		{[]*pb.PutRequest{{Block: header(2, 3), Data: []byte("ab"), End: true}}, "announced 3 bytes, received 2"},
		{[]*pb.PutRequest{{Block: header(3, 3)}, {Data: []byte("ab")}, {Data: []byte("c")}}, ""}, // ended by the next header
		{[]*pb.PutRequest{{Block: header(4, 3)}, {Data: []byte("abc")}, {Data: []byte("d")}}, "announced 3 bytes, received at least 4"},
		{[]*pb.PutRequest{{Block: header(5, 0)}}, "payload of 0 bytes"},
		{[]*pb.PutRequest{{Block: header(6, block.MaxBlockBytes+1)}, {Data: []byte("abc")}}, "payload of 8388609 bytes"},
		{[]*pb.PutRequest{{Block: header(7, 1<<20+1)}, {Data: []byte("abc"), End: true}}, "1048577"},
		{[]*pb.PutRequest{{Block: &pb.PutBlock{Hash: []byte("1234567"), Length: 3}, Data: []byte("abc")}}, "hash: length 7 bytes"},
		{[]*pb.PutRequest{{Block: &pb.PutBlock{Hash: []byte("1234567890123456"), Length: 3}, Data: []byte("abc")}}, "length 16 bytes"},
		{[]*pb.PutRequest{{Block: &pb.PutBlock{Hash: key(10), Length: 3, Parent: []byte("123")}, Data: []byte("abc")}}, "parent: length 3 bytes, want 8"},
		{[]*pb.PutRequest{{Block: &pb.PutBlock{Hash: key(11), Length: 3, Offset: 5}, Data: []byte("abc")}}, "offset: 5 without a reservation"},
		{[]*pb.PutRequest{{Block: &pb.PutBlock{Reservation: 77, Length: 3}, Data: []byte("abc")}}, "reservation 77"},
		{[]*pb.PutRequest{{Block: header(0, 3), Data: []byte("abX")}}, "conflict"},
		{[]*pb.PutRequest{{Block: header(14, 3), Data: []byte("abc")}}, ""}, // ended by the end of the stream
	}
	for _, s := range steps {
		for _, m := range s.send {
			send(t, stream, m)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	res, err := results(t, stream)
	if err != nil || len(res) != len(steps) {
		t.Fatalf("%d results of %d, %v", len(res), len(steps), err)
	}
	for i, s := range steps {
		got := res[i].GetFailure().GetMessage()
		if s.want == "" && res[i].Status != pb.PutStatus_PUT_STATUS_STORED || !strings.Contains(got, s.want) {
			t.Errorf("block %d: %v %q, want %q", i, res[i].Status, got, s.want)
		}
	}
	var packed []byte
	for i := range steps {
		packed = append(packed, key(i)...)
	}
	m, err := c.Match(t.Context(), &pb.MatchRequest{Namespace: ns.Id, HashLen: 8, Hashes: packed, All: true})
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range steps {
		if want := s.want == "" || i == 0; (m.Tiers[i] != 0) != want {
			t.Errorf("block %d is there: %v, want %v", i, m.Tiers[i] != 0, want)
		}
	}
	st, err := c.Stats(t.Context(), &pb.StatsRequest{})
	if err != nil || st.Reservations != 0 {
		t.Errorf("%d reservations are held, %v", st.GetReservations(), err)
	}
}

// A block is committed and answered while its stream stays open and silent.
func TestPutOfOneBlockIsNotDelayed(t *testing.T) {
	_, _, stream := rawPut(t, memstore.New(nil))
	for i := range 3 {
		send(t, stream, &pb.PutRequest{Block: header(i, 3), Data: []byte("abc"), End: true})
		r, err := stream.Recv()
		if err != nil || len(r.Results) != 1 || r.Results[0].Status != pb.PutStatus_PUT_STATUS_STORED {
			t.Fatalf("result %v, %v", r, err)
		}
	}
}

// What breaks the rules of the stream itself ends it, and what came whole before
// is stored.
func TestPutBadStream(t *testing.T) {
	whole := &pb.PutRequest{Block: header(0, 3), Data: []byte("abc"), End: true}
	for name, c := range map[string]struct {
		send []*pb.PutRequest
		want string
	}{
		"data after the end":  {[]*pb.PutRequest{whole, {Data: []byte("more")}}, "data: 4 bytes that belong to no block"},
		"opened twice":        {[]*pb.PutRequest{whole, {Open: &pb.PutOpen{Namespace: 1}}}, "open: only the first message"},
		"message is too long": {[]*pb.PutRequest{whole, {Block: header(1, 1<<20), Data: make([]byte, api.MaxDataBytes+1)}}, "data: 1048577 bytes, at most 1048576"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, stream := rawPut(t, memstore.New(nil))
			for _, m := range c.send {
				send(t, stream, m)
			}
			res, err := results(t, stream)
			if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if len(res) != 1 || res[0].Status != pb.PutStatus_PUT_STATUS_STORED {
				t.Errorf("results %v", res)
			}
		})
	}
}

func TestPutBadOpen(t *testing.T) {
	conn, _ := raw(t, memstore.New(nil), nil)
	c := pb.NewKvtierClient(conn)
	ns, err := c.OpenNamespace(t.Context(), &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", BlockBytes: 3}})
	if err != nil {
		t.Fatal(err)
	}
	for want, m := range map[string]*pb.PutRequest{
		"open: absent":                {Block: header(0, 3)},
		"namespace: 0":                {Open: &pb.PutOpen{}},
		"namespace handle 99":         {Open: &pb.PutOpen{Namespace: 99}},
		"given by another store":      {Open: &pb.PutOpen{Namespace: ns.Id, NamespaceTag: ns.Tag + 1}},
		"durable: TIER_G1":            {Open: &pb.PutOpen{Namespace: ns.Id, Durable: pb.Tier_TIER_G1}},
		"ttl_ms: -1 milliseconds":     {Open: &pb.PutOpen{Namespace: ns.Id, TtlMs: -1}},
		"ttl_ms: 9223372036854775807": {Open: &pb.PutOpen{Namespace: ns.Id, TtlMs: 1<<63 - 1}},
	} {
		stream, err := c.Put(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		send(t, stream, m)
		if _, err := results(t, stream); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// commitGate lets the first commit of a store wait, and counts.
type commitGate struct {
	api.Store
	open    chan struct{}
	filled  atomic.Int64
	commits atomic.Int64
}

func (g *commitGate) Fill(ctx context.Context, id uint64, off int64, p []byte) error {
	g.filled.Add(int64(len(p)))
	return g.Store.Fill(ctx, id, off, p)
}

func (g *commitGate) Commit(ctx context.Context, ids []uint64) []block.CommitResult {
	g.commits.Add(1)
	<-g.open
	return g.Store.Commit(ctx, ids)
}

// While one commit runs, further blocks are received, and then share one.
func TestPutBlocksShareCommits(t *testing.T) {
	const n = 100
	g := &commitGate{Store: memstore.New(nil), open: make(chan struct{})}
	_, _, stream := rawPut(t, g)
	for i := range n {
		send(t, stream, &pb.PutRequest{Block: header(i, 1000), Data: make([]byte, 1000), End: true})
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for g.filled.Load() < n*1000 {
		if t.Context().Err() != nil {
			t.Fatal("blocks are not received while a commit runs")
		}
		time.Sleep(time.Millisecond)
	}
	close(g.open)
	if res, err := results(t, stream); err != nil || len(res) != n {
		t.Fatalf("%d results, %v", len(res), err)
	}
	// The first, those that came meanwhile, and perhaps the last one alone.
	if c := g.commits.Load(); c > 3 {
		t.Errorf("%d blocks took %d commits", n, c)
	}
}

// A stream that breaks leaves no reservation behind, and no half block.
func TestPutBrokenOff(t *testing.T) {
	s := memstore.New(nil)
	conn, _ := raw(t, s, nil)
	c := pb.NewKvtierClient(conn)
	ns, err := c.OpenNamespace(t.Context(), &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", MaxBlockBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.Put(ctx)
	if err != nil {
		t.Fatal(err)
	}
	send(t, stream, &pb.PutRequest{Open: &pb.PutOpen{Namespace: ns.Id}, Block: header(0, 3), Data: []byte("abc")})
	waitFor(t, "the reservation", func() bool { return s.Stats().Reservations == 1 })
	cancel()
	waitFor(t, "its end", func() bool { return s.Stats().Reservations == 0 })
	if st := s.Stats(); st.Blocks != 0 {
		t.Errorf("%d blocks are there", st.Blocks)
	}
}
