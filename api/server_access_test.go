package api_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// accessCalls is every call of the service, with what it needs: r or w of the namespace,
// R or W of all, e either of the namespace, - nothing.
var accessCalls = []struct {
	name, needs string
	call        func(ctx context.Context, c pb.KvtierClient, ns uint32) error
}{
	{"Ping", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.Ping(ctx, &pb.PingRequest{}))
	}},
	{"OpenNamespace", "w", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.OpenNamespace(ctx, &pb.OpenNamespaceRequest{Descriptor_: &pb.Descriptor{Name: "llama", BlockBytes: 5}}))
	}},
	{"GetNamespace", "e", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		err := second(c.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: "llama"}))
		if byID := second(c.GetNamespace(ctx, &pb.GetNamespaceRequest{Id: ns})); status.Code(byID) != status.Code(err) || byID != nil && strings.Contains(byID.Error(), "llama") {
			return fmt.Errorf("by name: %v, by handle: %v", err, byID)
		}
		return err
	}},
	{"ListNamespaces", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.ListNamespaces(ctx, &pb.ListNamespacesRequest{}))
	}},
	{"Match", "r", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Match(ctx, &pb.MatchRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)}))
	}},
	{"Locate", "r", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Locate(ctx, &pb.LocateRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)}))
	}},
	{"Put", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		s, err := c.Put(ctx)
		if err != nil {
			return err
		}
		err = s.Send(&pb.PutRequest{Open: &pb.PutOpen{Namespace: ns}, Block: &pb.PutBlock{Hash: make([]byte, 8), Length: 5}, Data: make([]byte, 5), End: true})
		if err != nil && !errors.Is(err, io.EOF) { // which says that the answer is there already
			return err
		}
		return second(s.Recv())
	}},
	{"Get", "r", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		s, err := c.Get(ctx, &pb.GetRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)})
		if err != nil {
			return err
		}
		return second(s.Recv())
	}},
	{"Reserve", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Reserve(ctx, &pb.ReserveRequest{Namespace: ns, Items: []*pb.ReserveItem{{Hash: make([]byte, 8), Length: 5}}}))
	}},
	// Who has the number of a reservation or a lease may use it: it cannot be guessed.
	{"Commit", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.Commit(ctx, &pb.CommitRequest{Ids: []uint64{1}}))
	}},
	{"Abort", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.Abort(ctx, &pb.AbortRequest{Ids: []uint64{1}}))
	}},
	{"RenewLease", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.Aborted, second(c.RenewLease(ctx, &pb.RenewLeaseRequest{Id: 1, LeaseMs: 1})))
	}},
	{"ReleaseLease", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.Aborted, second(c.ReleaseLease(ctx, &pb.ReleaseLeaseRequest{Id: 1})))
	}},
	{"Prefetch", "r", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		s, err := c.Prefetch(ctx, &pb.PrefetchRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)})
		if err != nil {
			return err
		}
		return second(s.Recv())
	}},
	{"CancelPrefetch", "-", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.NotFound, second(c.CancelPrefetch(ctx, &pb.CancelPrefetchRequest{RequestId: "x"})))
	}},
	{"Delete", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Delete(ctx, &pb.DeleteRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)}))
	}},
	{"Clear", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Clear(ctx, &pb.ClearRequest{Namespace: ns}))
	}},
	{"List", "r", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.List(ctx, &pb.ListRequest{Namespace: ns}))
	}},
	{"Stats", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.Stats(ctx, &pb.StatsRequest{}))
	}},
	{"ListSessions", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.ListSessions(ctx, &pb.ListSessionsRequest{}))
	}},
	{"Watch", "r", watchOf},
	{"Watch", "R", func(ctx context.Context, c pb.KvtierClient, _ uint32) error { return watchOf(ctx, c, 0) }},
	{"Pin", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Pin(ctx, &pb.PinRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)}))
	}},
	{"Unpin", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return second(c.Unpin(ctx, &pb.UnpinRequest{Namespace: ns, HashLen: 8, Hashes: make([]byte, 8)}))
	}},
	{"StartScrub", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.FailedPrecondition, second(c.StartScrub(ctx, &pb.StartScrubRequest{})))
	}},
	{"ListPolicies", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.ListPolicies(ctx, &pb.ListPoliciesRequest{}))
	}},
	{"SetPolicy", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.InvalidArgument, second(c.SetPolicy(ctx, &pb.SetPolicyRequest{Policy: "x"})))
	}},
	{"ListObjects", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.FailedPrecondition, second(c.ListObjects(ctx, &pb.ListObjectsRequest{})))
	}},
	{"ObjectUsage", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.FailedPrecondition, second(c.ObjectUsage(ctx, &pb.ObjectUsageRequest{})))
	}},
	{"SweepObjects", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		s, err := c.SweepObjects(ctx, &pb.SweepObjectsRequest{})
		if err != nil {
			return err
		}
		return not(codes.FailedPrecondition, second(s.Recv()))
	}},
	{"ImportObjects", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		s, err := c.ImportObjects(ctx, &pb.ImportObjectsRequest{})
		if err != nil {
			return err
		}
		return not(codes.FailedPrecondition, second(s.Recv()))
	}},
	{"ReportPrefill", "w", func(ctx context.Context, c pb.KvtierClient, ns uint32) error {
		return not(codes.FailedPrecondition, second(c.ReportPrefill(ctx, &pb.ReportPrefillRequest{Namespace: ns, Reports: []*pb.PrefillReport{{Tokens: 1, TookNs: 1}}})))
	}},
	{"SetWriteBudget", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return not(codes.InvalidArgument, second(c.SetWriteBudget(ctx, &pb.SetWriteBudgetRequest{})))
	}},
	{"StopScrub", "RW", func(ctx context.Context, c pb.KvtierClient, _ uint32) error {
		return second(c.StopScrub(ctx, &pb.StopScrubRequest{}))
	}},
}

func second[T any](_ T, err error) error { return err }

// not is nil for an error that a call which may be made ends with here.
func not(code codes.Code, err error) error {
	if status.Code(err) == code {
		return nil
	}
	return err
}

func watchOf(ctx context.Context, c pb.KvtierClient, ns uint32) error {
	s, err := c.Watch(ctx, &pb.WatchRequest{Namespace: ns})
	if err != nil {
		return err
	}
	return second(s.Recv())
}

// TestAccess makes every call of the service as identities with all kinds of rights.
func TestAccess(t *testing.T) {
	text := `{"identities": [`
	who := []struct{ name, has string }{ // as needs above
		{"nobody", ""}, {"reader", "r"}, {"writer", "w"}, {"both", "rw"}, {"auditor", "rR"}, {"loader", "wW"}, {"operator", "rwRW"},
	}
	for i, w := range who {
		read, write := "qwen", "qwen"
		for _, c := range w.has {
			switch c {
			case 'r':
				read = "llama"
			case 'w':
				write = "llama"
			case 'R':
				read = "*"
			case 'W':
				write = "*"
			}
		}
		if i > 0 {
			text += ","
		}
		text += fmt.Sprintf(`{"name": %q, "token_sha256": "%x", "read": [%q], "write": [%q]}`, w.name, sha256.Sum256([]byte("token of "+w.name)), read, write)
	}
	list, err := access.Parse([]byte(text + "]}"))
	if err != nil {
		t.Fatal(err)
	}
	store := memstore.New(nil)
	ns, err := store.OpenNamespace(t.Context(), block.Descriptor{Name: "llama", BlockBytes: 5}, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, _ := raw(t, store, &api.ServerOptions{Access: list})
	client := pb.NewKvtierClient(conn)
	tested := map[string]bool{}
	as := func(token string) context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	for _, tt := range accessCalls {
		tested[tt.name] = true
		for _, w := range who {
			err := tt.call(as("token of "+w.name), client, uint32(ns.ID))
			may := true
			switch tt.needs {
			case "-":
			case "e":
				may = w.has != ""
			default:
				for _, c := range tt.needs {
					may = may && strings.ContainsRune(w.has, c)
				}
			}
			switch {
			case may && err != nil:
				t.Errorf("%s as %s: %v", tt.name, w.name, err)
			case may:
			case status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), w.name):
				t.Errorf("%s as %s: error %v, want a denial that names it", tt.name, w.name, err)
			case strings.ToLower(tt.needs) != tt.needs:
			case w.has == "" && !strings.HasSuffix(tt.name, "Namespace"):
				// What it names by number only it is not told the name of.
				if text := err.Error(); !strings.Contains(text, fmt.Sprintf("namespace %d", ns.ID)) || strings.Contains(text, "llama") {
					t.Errorf("%s as %s: the denial is %v", tt.name, w.name, err)
				}
			case !strings.Contains(err.Error(), `namespace "llama"`):
				t.Errorf("%s as %s: the denial names no namespace: %v", tt.name, w.name, err)
			}
		}
		for _, token := range []string{"", "token of nobody else"} {
			if err := tt.call(as(token), client, uint32(ns.ID)); status.Code(err) != codes.Unauthenticated {
				t.Errorf("%s with token %q: error %v", tt.name, token, err)
			}
		}
	}
	for _, m := range pb.Kvtier_ServiceDesc.Methods {
		if !tested[m.MethodName] {
			t.Errorf("%s: is it for everybody?", m.MethodName)
		}
	}
	for _, m := range pb.Kvtier_ServiceDesc.Streams {
		if !tested[m.StreamName] {
			t.Errorf("%s: is it for everybody?", m.StreamName)
		}
	}
	for _, w := range who {
		l, err := client.ListNamespaces(as("token of "+w.name), &pb.ListNamespacesRequest{})
		if err != nil || (len(l.GetNamespaces()) == 1) != (w.has != "") {
			t.Errorf("%s is told of %v, error %v", w.name, l.GetNamespaces(), err)
		}
	}
}

// idStore remembers by which ids prefetches are begun and cancelled.
type idStore struct {
	*memstore.Store
	ids chan string
}

func (s *idStore) Prefetch(_ context.Context, _ block.NamespaceID, _ int, _ []byte, o block.PrefetchOptions, _ func(block.Progress) error) error {
	s.ids <- o.ID
	return nil
}

func (s *idStore) CancelPrefetch(id string) error {
	s.ids <- id
	return nil
}

// TestAccessRequestIDs shows that nobody cancels the prefetch of another identity.
func TestAccessRequestIDs(t *testing.T) {
	list, err := access.Parse(fmt.Appendf(nil, `{"identities": [
		{"name": "a", "token_sha256": "%x", "read": ["*"]}, {"name": "b", "token_sha256": "%x", "read": ["*"]}]}`, sha256.Sum256([]byte("1")), sha256.Sum256([]byte("2"))))
	if err != nil {
		t.Fatal(err)
	}
	store := &idStore{Store: memstore.New(nil), ids: make(chan string, 1)}
	ns, err := store.OpenNamespace(t.Context(), block.Descriptor{Name: "llama", BlockBytes: 5}, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, _ := raw(t, store, &api.ServerOptions{Access: list})
	client := pb.NewKvtierClient(conn)
	for _, tt := range []struct{ token, id, want string }{{"1", "x", "a/x"}, {"2", "x", "b/x"}, {"1", "", ""}} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+tt.token)
		s, err := client.Prefetch(ctx, &pb.PrefetchRequest{Namespace: uint32(ns.ID), HashLen: 8, Hashes: make([]byte, 8), RequestId: tt.id})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		if got := <-store.ids; got != tt.want {
			t.Errorf("prefetch %q is %q, want %q", tt.id, got, tt.want)
		}
		if tt.id == "" {
			continue
		}
		if _, err := client.CancelPrefetch(ctx, &pb.CancelPrefetchRequest{RequestId: tt.id}); err != nil {
			t.Error(err)
		}
		if got := <-store.ids; got != tt.want {
			t.Errorf("%q is cancelled as %q, want %q", tt.id, got, tt.want)
		}
	}
}
