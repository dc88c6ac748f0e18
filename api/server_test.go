package api_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// raw serves s and returns a connection with gRPC's own protobuf codec, as a
// client in another language has, and the server.
func raw(t *testing.T, s api.Store, o *api.ServerOptions) (*grpc.ClientConn, *api.Server) {
	t.Helper()
	lis := bufconn.Listen(1 << 20)
	srv := api.NewServer(s, o)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := srv.Serve(lis); err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("passthrough:///bufconn",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		_ = srv.Drain(ctx) // tests that break calls off have checked it
		serving.Wait()
	})
	return conn, srv
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for !ok() {
		if ctx.Err() != nil {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// Limits of requests, each error naming field and value.
func TestRequestLimits(t *testing.T) {
	conn, _ := raw(t, memstore.New(nil), nil)
	c := pb.NewKvtierClient(conn)
	ctx := t.Context()
	ns, err := c.OpenNamespace(ctx, &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", BlockBytes: 3}})
	if err != nil {
		t.Fatal(err)
	}
	id := ns.Id
	match := func(m *pb.MatchRequest) error { _, err := c.Match(ctx, m); return err }
	get := func(m *pb.GetRequest) error {
		m.Namespace = id
		s, err := c.Get(ctx, m)
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	prefetch := func(m *pb.PrefetchRequest) error {
		m.Namespace = id
		s, err := c.Prefetch(ctx, m)
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	reserve := func(n int) error {
		m := &pb.ReserveRequest{Namespace: id}
		for i := range n {
			m.Items = append(m.Items, &pb.ReserveItem{Hash: key(i), Length: 3})
		}
		_, err := c.Reserve(ctx, m)
		return err
	}
	_, locateErr := c.Locate(ctx, &pb.LocateRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 8*(api.MaxKeys+1))})
	_, deleteErr := c.Delete(ctx, &pb.DeleteRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 8*(api.MaxKeys+1))})
	_, pinErr := c.Pin(ctx, &pb.PinRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 8*(api.MaxKeys+1))})
	_, unpinErr := c.Unpin(ctx, &pb.UnpinRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 8*(api.MaxKeys+1))})
	_, scrubErr := c.StartScrub(ctx, &pb.StartScrubRequest{BytesPerSecond: -1})
	_, commitErr := c.Commit(ctx, &pb.CommitRequest{})
	_, abortErr := c.Abort(ctx, &pb.AbortRequest{Ids: make([]uint64, api.MaxKeys+1)})
	_, listErr := c.List(ctx, &pb.ListRequest{Namespace: id, Limit: api.MaxKeys + 1})
	_, openErr := c.OpenNamespace(ctx, &pb.OpenNamespaceRequest{})
	_, ttlErr := c.OpenNamespace(ctx, &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "x", BlockBytes: 3}, TtlMs: -5})
	_, findErr := c.GetNamespace(ctx, &pb.GetNamespaceRequest{})
	_, renewErr := c.RenewLease(ctx, &pb.RenewLeaseRequest{Id: 1})
	_, cancelErr := c.CancelPrefetch(ctx, &pb.CancelPrefetchRequest{})
	for _, x := range []struct {
		err  error
		want string
	}{
		{match(&pb.MatchRequest{HashLen: 8, Hashes: key(1)}), "namespace: 0"},
		{match(&pb.MatchRequest{Namespace: id, Hashes: key(1)}), "hash_len: 0 bytes, want 8, 16, 20 or 32"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 1 << 31, Hashes: key(1)}), "hash_len: 2147483648 bytes"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 8}), "hashes: 0 bytes"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 12)}), "hashes: 12 bytes are not a multiple of hash_len 8"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 8*(api.MaxMatchKeys+1))}), "hashes: 65537 keys, at most 65536"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 8, Hashes: key(1), Class: 256}), "class: 256, want 0 to 255"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 8, Hashes: key(1), LeaseMs: -1}), "lease_ms: -1 milliseconds"},
		{match(&pb.MatchRequest{Namespace: id, HashLen: 8, Hashes: key(1), Conversation: strings.Repeat("x", 256)}), "conversation: 256 bytes, at most 255"},
		{get(&pb.GetRequest{HashLen: 8, Hashes: make([]byte, 8*(api.MaxKeys+1))}), "hashes: 4097 keys, at most 4096"},
		{get(&pb.GetRequest{HashLen: 8, Hashes: make([]byte, 16), Offsets: []int64{1}, Lengths: []int64{1}}), "1 and 1 of them for 2 keys"},
		{get(&pb.GetRequest{HashLen: 8, Hashes: make([]byte, 8), Offsets: []int64{-1}, Lengths: []int64{1}}), "offsets[0]: -1"},
		{get(&pb.GetRequest{HashLen: 8, Hashes: make([]byte, 8), Offsets: []int64{0}, Lengths: []int64{1 << 40}}), "lengths[0]: 1099511627776"},
		{prefetch(&pb.PrefetchRequest{HashLen: 8, Hashes: make([]byte, 9)}), "hashes: 9 bytes"},
		{prefetch(&pb.PrefetchRequest{HashLen: 8, Hashes: key(1), RequestId: strings.Repeat("x", 256)}), "request_id: 256 bytes, at most 255"},
		{prefetch(&pb.PrefetchRequest{HashLen: 8, Hashes: key(1), Priority: 10}), "priority: 10, want 0 to 9"},
		{prefetch(&pb.PrefetchRequest{HashLen: 8, Hashes: key(1), WithinMs: -1}), "within_ms: -1 milliseconds"},
		{reserve(0), "items: empty"},
		{reserve(api.MaxKeys + 1), "items: 4097 of them, at most 4096"},
		{locateErr, "hashes: 4097 keys"},
		{deleteErr, "hashes: 4097 keys"},
		{pinErr, "hashes: 4097 keys"},
		{unpinErr, "hashes: 4097 keys"},
		{scrubErr, "bytes_per_second: -1, want 0 or more"},
		{commitErr, "ids: empty"},
		{abortErr, "ids: 4097 of them"},
		{listErr, "limit: 4097"},
		{openErr, "descriptor: absent"},
		{ttlErr, "ttl_ms: -5"},
		{findErr, "name and id: both empty"},
		{renewErr, "lease_ms: 0"},
		{cancelErr, "request_id: empty"},
	} {
		if status.Code(x.err) != codes.InvalidArgument || !strings.Contains(x.err.Error(), x.want) {
			t.Errorf("error %v, want %q", x.err, x.want)
		}
	}
	if err := match(&pb.MatchRequest{Namespace: id, HashLen: 8, Hashes: make([]byte, 8*api.MaxMatchKeys), All: true}); err != nil {
		t.Errorf("as many keys as allowed: %v", err)
	}
}

// A handle that another store gave is refused, not taken for one of ours.
func TestForeignHandle(t *testing.T) {
	here, there := memstore.New(nil), memstore.New(nil)
	a, err := apitest.Serve(t, here, nil)().OpenNamespace(t.Context(), block.Descriptor{Name: "a", BlockBytes: 3}, 0)
	if err != nil {
		t.Fatal(err)
	}
	c := apitest.Serve(t, there, nil)()
	if _, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: "b", BlockBytes: 3}, 0); err != nil {
		t.Fatal(err)
	}
	a.HashLen = 8
	if _, err := c.Match(t.Context(), a, []block.Hash{{1}}, block.MatchOptions{}); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("match with a foreign handle: %v", err)
	}
}

func TestToken(t *testing.T) {
	conn, _ := raw(t, memstore.New(nil), &api.ServerOptions{Token: "secret"})
	_, err := pb.NewKvtierClient(conn).Stats(t.Context(), &pb.StatsRequest{})
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("a call without a token: %v", err)
	}
	stream, err := pb.NewKvtierClient(conn).Watch(t.Context(), &pb.WatchRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("a stream without a token: %v", err)
	}
	if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("a probe without a token: %v", err)
	}
	c := apitest.Serve(t, memstore.New(nil), &api.ServerOptions{Token: "secret", Version: "v9"})()
	if info, err := c.Ping(t.Context()); err != nil || info.Version != "v9" || !info.Ready || info.Incarnation == 0 {
		t.Errorf("ping with the token: %+v, %v", info, err)
	}
}

func TestHealthAndReflection(t *testing.T) {
	conn, srv := raw(t, memstore.New(nil), nil)
	check := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for _, name := range []string{"", "kvtier.v1.Kvtier"} {
			r, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
			if err != nil || r.Status != want {
				t.Errorf("health of %q: %v, %v, want %v", name, r.GetStatus(), err, want)
			}
		}
	}
	check(healthpb.HealthCheckResponse_NOT_SERVING)
	srv.SetReady(true)
	check(healthpb.HealthCheckResponse_SERVING)
	srv.SetReady(false)
	check(healthpb.HealthCheckResponse_NOT_SERVING)

	stream, err := reflectpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	req := &reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "kvtier.v1.Kvtier"}}
	if err := stream.Send(req); err != nil {
		t.Fatal(err)
	}
	r, err := stream.Recv()
	if err != nil || len(r.GetFileDescriptorResponse().GetFileDescriptorProto()) == 0 {
		t.Errorf("reflection: %v, %v", r, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err == nil {
		t.Error("reflection goes on after its end")
	}
}

// hanging never answers a get before the caller's context ends.
type hanging struct {
	api.Store
	entered chan struct{}
	left    atomic.Bool
}

func (h *hanging) Get(ctx context.Context, _ block.NamespaceID, _ int, _ []block.Wanted, _ block.GetOptions, _ func(int, block.Payload) error) error {
	close(h.entered)
	<-ctx.Done()
	h.left.Store(true)
	return ctx.Err()
}

// Drain lets calls finish, and breaks off what does not by the end of its
// context; then no handler runs, so the store can be closed.
func TestDrain(t *testing.T) {
	h := &hanging{Store: memstore.New(nil), entered: make(chan struct{})}
	conn, srv := raw(t, h, nil)
	c := pb.NewKvtierClient(conn)
	ns, err := c.OpenNamespace(t.Context(), &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", BlockBytes: 3}})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := c.Get(t.Context(), &pb.GetRequest{Namespace: ns.Id, HashLen: 8, Hashes: key(1)})
	if err != nil {
		t.Fatal(err)
	}
	<-h.entered
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := srv.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("drain with a call that hangs: %v", err)
	}
	if !h.left.Load() {
		t.Error("drain returned while a handler runs")
	}
	if _, err := stream.Recv(); err == nil {
		t.Error("a call that was broken off says that it went well")
	}
	if err := srv.Drain(t.Context()); err != nil {
		t.Errorf("drain again: %v", err)
	}
}

// Watchers do not hold a drain up, and learn why they end.
func TestDrainEndsWatches(t *testing.T) {
	lis := bufconn.Listen(1 << 20)
	srv := api.NewServer(memstore.New(nil), nil)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(lis) }()
	c, err := api.Dial(t.Context(), "bufconn:1", &api.ClientOptions{Dialer: func(ctx context.Context) (net.Conn, error) { return lis.DialContext(ctx) }})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- c.Watch(t.Context(), nil, block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}, func(block.Event) error { return nil })
	}()
	<-ready
	if err := srv.Drain(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, block.ErrClosed) {
		t.Errorf("the watch ended with %v", err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := c.Ping(t.Context()); !errors.Is(err, block.ErrDisconnected) {
		t.Errorf("a call after the drain: %v", err)
	}
}

// countedGets tells how each get ended.
type countedGets struct {
	api.Store
	ended chan error
}

func (s *countedGets) Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(int, block.Payload) error) error {
	err := s.Store.Get(ctx, ns, hashLen, want, o, use)
	s.ended <- err
	return err
}

// A client that asks for blocks and takes none of their bytes does not hold them
// for ever.
func TestStalledGetEnds(t *testing.T) {
	s := &countedGets{Store: memstore.New(nil), ended: make(chan error, 1)}
	conn, _ := raw(t, s, &api.ServerOptions{Timeout: 100 * time.Millisecond})
	c := pb.NewKvtierClient(conn)
	const size = 1 << 20
	patient, cancel := context.WithTimeout(t.Context(), 30*time.Second) // for what is to go well
	defer cancel()
	ns, err := c.OpenNamespace(patient, &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", BlockBytes: size}})
	if err != nil {
		t.Fatal(err)
	}
	put, err := c.Put(patient)
	if err != nil {
		t.Fatal(err)
	}
	var hashes []byte
	for i := range 8 {
		send(t, put, &pb.PutRequest{Block: header(i, size), Data: make([]byte, size), End: true, Open: openOnce(i, ns.Id)})
		hashes = append(hashes, key(i)...)
	}
	if err := put.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if r, err := results(t, put); err != nil || len(r) != 8 {
		t.Fatalf("put: %v, %v", r, err)
	}
	stream, err := c.Get(t.Context(), &pb.GetRequest{Namespace: ns.Id, HashLen: 8, Hashes: hashes})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-s.ended; err == nil {
		t.Error("the get of a client that takes nothing ended well")
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("the get ended with %v", err)
	}
}

func openOnce(i int, ns uint32) *pb.PutOpen {
	if i > 0 {
		return nil
	}
	return &pb.PutOpen{Namespace: ns}
}

// Calls without a deadline get the server's.
func TestDefaultDeadline(t *testing.T) {
	s := memstore.New(&memstore.Options{Capacity: 1000})
	conn, _ := raw(t, s, &api.ServerOptions{Timeout: 20 * time.Millisecond})
	c := pb.NewKvtierClient(conn)
	patient, cancel := context.WithTimeout(t.Context(), 30*time.Second) // for what is to go well
	defer cancel()
	ns, err := c.OpenNamespace(patient, &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "ns", MaxBlockBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.Reserve(t.Context(), &pb.ReserveRequest{Namespace: ns.Id, Items: []*pb.ReserveItem{{Hash: key(1), Length: 1001}}})
	if err != nil || res.Items[0].GetFailure().GetCause() != pb.Cause_CAUSE_NO_SPACE {
		t.Errorf("reserve where there is no room: %v, %v", res, err)
	}
	stream, err := c.Put(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	send(t, stream, &pb.PutRequest{Open: &pb.PutOpen{Namespace: ns.Id}, Block: header(1, 1001), Data: make([]byte, 1001), End: true})
	r, err := stream.Recv()
	if err != nil || r.Results[0].GetFailure().GetCause() != pb.Cause_CAUSE_NO_SPACE {
		t.Errorf("put where there is no room: %v, %v", r, err)
	}
	send(t, stream, &pb.PutRequest{Block: header(2, 1000), Data: bytes.Repeat([]byte{1}, 1000), End: true})
	if r, err := stream.Recv(); err != nil || r.Results[0].Status != pb.PutStatus_PUT_STATUS_STORED {
		t.Errorf("the next put of the stream: %v, %v", r, err)
	}
}
