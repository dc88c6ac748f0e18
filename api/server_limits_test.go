package api_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// TestIdentityLeases shows that an identity holds so many leases over all of its
// connections, and that each way in which one ends makes room.
func TestIdentityLeases(t *testing.T) {
	list, err := access.Parse(fmt.Appendf(nil, `{"identities": [
		{"name": "greedy", "token_sha256": "%x", "read": ["*"], "max_leases": 2},
		{"name": "friend", "token_sha256": "%x", "read": ["*"], "max_leases": 1}]}`, sha256.Sum256([]byte("greedy")), sha256.Sum256([]byte("friend"))))
	if err != nil {
		t.Fatal(err)
	}
	store := memstore.New(nil)
	ns, err := store.OpenNamespace(t.Context(), block.Descriptor{Name: "llama", BlockBytes: 5}, 0)
	if err != nil {
		t.Fatal(err)
	}
	places, err := store.Grant(t.Context(), ns.ID, 5, 1)
	if err != nil {
		t.Fatal(err)
	}
	copy(places[0].Mem, "hello")
	put := block.GrantPut{Key: block.Key{NS: ns.ID, Hash: block.Hash{1}}, Hlen: 8, Len: 5, Grant: places[0].ID, Sum: xxh3.Hash128([]byte("hello")).Bytes(), PutOptions: block.PutOptions{Durable: block.G2}}
	if res := store.PutGranted(t.Context(), []block.GrantPut{put}); res[0].Err != nil {
		t.Fatal(res[0].Err)
	}
	conn, srv := raw(t, store, &api.ServerOptions{Access: list})
	c := pb.NewKvtierClient(conn)
	as := func(name string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+name)
	}
	match := func(name string, hash byte) (*pb.Lease, error) {
		m, err := c.Match(as(name), &pb.MatchRequest{Namespace: uint32(ns.ID), HashLen: 8, Hashes: []byte{hash, 0, 0, 0, 0, 0, 0, 0}, LeaseMs: 600_000})
		return m.GetLease(), err
	}
	take := func(name string) uint64 {
		t.Helper()
		l, err := match(name, 1)
		if err != nil || l.GetId() == 0 {
			t.Fatalf("lease %v, error %v", l, err)
		}
		return l.GetId()
	}
	refused := func(what string, err error) {
		t.Helper()
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "leases, at most") {
			t.Errorf("%s: error %v, want ResourceExhausted", what, err)
		}
	}
	for range 3 {
		if l, err := match("greedy", 99); err != nil || l.GetId() != 0 {
			t.Fatalf("a match of nothing: %v, error %v", l, err)
		}
		if _, err := c.Match(as("greedy"), &pb.MatchRequest{Namespace: uint32(ns.ID), HashLen: 16, Hashes: make([]byte, 16), LeaseMs: 1}); err == nil {
			t.Fatal("a match that should fail")
		}
	}
	first := take("greedy")
	other := take("greedy")
	_, err = match("greedy", 1)
	refused("a lease too many", err)

	// Who renews another's has it counted as his own.
	renew := func(name string, id uint64) error {
		return second(c.RenewLease(as(name), &pb.RenewLeaseRequest{Id: id, LeaseMs: 600_000}))
	}
	if err := renew("friend", 12345); status.Code(err) != codes.Aborted {
		t.Errorf("renewal of none: %v", err)
	}
	if err := renew("greedy", first); err != nil {
		t.Errorf("renewal of one's own: %v", err)
	}
	if err := renew("friend", first); err != nil {
		t.Errorf("renewal of another's: %v", err)
	}
	refused("renewal of a second one of another's", renew("friend", other))

	if _, err := c.ReleaseLease(as("greedy"), &pb.ReleaseLeaseRequest{Id: other}); err != nil {
		t.Fatal(err)
	}
	take("greedy")
	_, err = match("greedy", 1)
	refused("a lease too many", err)
	if u := list.Usage()[0]; u.Leases != 2 || u.LeasesLimit != 2 || u.LeasesRefused != 2 {
		t.Errorf("usage %+v", u)
	}
	if err := srv.Drain(t.Context()); err != nil { // which ends the connection
		t.Fatal(err)
	}
	end := time.Now().Add(20 * time.Second)
	for list.Usage()[0].Leases != 0 {
		if time.Now().After(end) {
			t.Fatalf("the connection is gone, and of its leases are counted: %+v", list.Usage())
		}
		time.Sleep(time.Millisecond)
	}
}
