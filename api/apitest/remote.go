package apitest

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/test/bufconn"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// patience bounds the end of a server.
const patience = 30 * time.Second

// Serve serves s over a listener in memory until the test ends, and returns a
// function that opens a connection to it.
func Serve(t testing.TB, s api.Store, o *api.ServerOptions) (dial func() *api.Client) {
	t.Helper()
	lis := bufconn.Listen(1 << 20)
	srv := api.NewServer(s, o)
	srv.SetReady(true)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(lis) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := srv.Drain(ctx); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	var token string
	if o != nil {
		token = o.Token
	}
	return func() *api.Client {
		t.Helper()
		c, err := api.Dial(context.Background(), "bufconn:1", &api.ClientOptions{
			Token:  token,
			Dialer: func(ctx context.Context) (net.Conn, error) { return lis.DialContext(ctx) },
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		return c
	}
}

// remote is a store behind a connection; each session has a connection of its
// own, which EndSession closes.
type remote struct {
	t    testing.TB
	dial func() *api.Client
	c    *api.Client

	mu struct {
		sync.Mutex
		sessions map[uint64]*api.Client
		owners   map[uint64]block.NamespaceID // of reservations
	}
}

func overGRPC(t testing.TB, s api.Store) *remote { return newRemote(t, Serve(t, s, nil)) }

func newRemote(t testing.TB, dial func() *api.Client) *remote {
	r := &remote{t: t, dial: dial}
	r.c = r.dial()
	r.mu.sessions = make(map[uint64]*api.Client)
	r.mu.owners = make(map[uint64]block.NamespaceID)
	return r
}

// of is the connection of a session.
func (r *remote) of(session uint64) *api.Client {
	if session == 0 {
		return r.c
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.mu.sessions[session]
	if !ok {
		c = r.dial()
		r.mu.sessions[session] = c
	}
	return c
}

func (r *remote) EndSession(session uint64) {
	r.mu.Lock()
	c := r.mu.sessions[session]
	delete(r.mu.sessions, session)
	r.mu.Unlock()
	if err := c.Close(); err != nil {
		r.t.Error(err)
	}
}

func handle(id block.NamespaceID, hashLen int) block.Namespace {
	return block.Namespace{ID: id, HashLen: hashLen}
}

// unpack cuts hashes; a length that is none is passed on for the client to refuse.
func unpack(hashLen int, packed []byte) []block.Hash {
	out := make([]block.Hash, len(packed)/hashLen)
	for i := range out {
		copy(out[i][:], packed[i*hashLen:(i+1)*hashLen])
	}
	return out
}

func (r *remote) OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error) {
	return r.c.OpenNamespace(ctx, d, ttl)
}

func (r *remote) Namespace(name string) (block.Namespace, error) {
	return r.c.Namespace(context.Background(), name)
}

func (r *remote) NamespaceByID(id block.NamespaceID) (block.Namespace, error) {
	return r.c.NamespaceByID(context.Background(), id)
}

func (r *remote) Namespaces() []block.NamespaceInfo {
	n, err := r.c.Namespaces(context.Background())
	if err != nil {
		r.t.Error(err)
	}
	return n
}

func (r *remote) Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	return r.of(o.Session).MatchPacked(ctx, handle(ns, hashLen), hashes, o, res)
}

func (r *remote) Locate(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error) {
	return r.c.Locate(ctx, handle(ns, hashLen), unpack(hashLen, hashes))
}

func (r *remote) Reserve(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error) {
	item := api.ReserveItem{Hash: h, Parent: o.Parent, HasParent: o.HasParent, Len: n}
	res, err := r.of(o.Session).Reserve(ctx, handle(ns, hashLen), []api.ReserveItem{item}, api.PutOptions{Durable: o.Durable, TTL: o.TTL})
	if err != nil {
		return block.Reserved{}, block.Existing{}, err
	}
	r.mu.Lock()
	r.mu.owners[res[0].Reserved.ID] = ns
	r.mu.Unlock()
	return res[0].Reserved, res[0].Existing, res[0].Err
}

func (r *remote) Fill(ctx context.Context, id uint64, off int64, p []byte) error {
	r.mu.Lock()
	ns := r.mu.owners[id]
	r.mu.Unlock()
	return r.c.Fill(ctx, handle(ns, hashLen), id, off, p)
}

func (r *remote) Commit(ctx context.Context, ids []uint64) []block.CommitResult {
	out := make([]block.CommitResult, len(ids))
	res, err := r.c.Commit(ctx, ids)
	for i := range out {
		if err != nil {
			out[i].Err = err
			continue
		}
		out[i] = block.CommitResult{Status: res[i].Status, Err: res[i].Err}
	}
	return out
}

func (r *remote) Abort(ids []uint64) {
	if err := r.c.Abort(context.Background(), ids); err != nil {
		r.t.Error(err)
	}
}

func (r *remote) Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	return r.c.Get(ctx, handle(ns, hashLen), want, o, use)
}

func (r *remote) Prefetch(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error {
	return r.c.Prefetch(ctx, handle(ns, hashLen), unpack(hashLen, hashes), o, progress)
}

func (r *remote) CancelPrefetch(id string) error {
	return r.c.CancelPrefetch(context.Background(), id)
}

func (r *remote) RenewLease(id uint64, d time.Duration) (block.Lease, error) {
	return r.c.RenewLease(context.Background(), id, d)
}

func (r *remote) ReleaseLease(id uint64) error { return r.c.ReleaseLease(context.Background(), id) }

func (r *remote) Delete(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	return r.c.Delete(ctx, handle(ns, hashLen), unpack(hashLen, hashes))
}

func (r *remote) Clear(ctx context.Context, ns block.NamespaceID) (int64, error) {
	return r.c.Clear(ctx, handle(ns, 0))
}

func (r *remote) List(ctx context.Context, ns block.NamespaceID, cursor string, limit int) ([]block.ListEntry, string, error) {
	return r.c.List(ctx, handle(ns, 0), cursor, limit)
}

func (r *remote) Stats() block.Stats {
	st, err := r.c.Stats(context.Background())
	if err != nil {
		r.t.Error(err)
	}
	return st
}

func (r *remote) Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error {
	if o.NS == 0 {
		return r.c.Watch(ctx, nil, o, fn)
	}
	n := handle(o.NS, 0)
	return r.c.Watch(ctx, &n, o, fn)
}

func (r *remote) Pin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error) {
	return r.c.Pin(ctx, handle(ns, hashLen), unpack(hashLen, hashes))
}

func (r *remote) Unpin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	return r.c.Unpin(ctx, handle(ns, hashLen), unpack(hashLen, hashes))
}

func (r *remote) StartScrub(o block.ScrubOptions) error {
	_, err := r.c.StartScrub(context.Background(), o)
	return err
}

func (r *remote) StopScrub() {
	if _, err := r.c.StopScrub(context.Background()); err != nil {
		r.t.Error(err)
	}
}

func (r *remote) Policies() []block.TierPolicy {
	p, err := r.c.Policies(context.Background())
	if err != nil {
		r.t.Error(err)
	}
	return p
}

func (r *remote) SetPolicy(ctx context.Context, tier block.TierID, name string) error {
	return r.c.SetPolicy(ctx, tier, name)
}

func (r *remote) ReportPrefill(ns block.NamespaceID, reports []block.PrefillReport) error {
	return r.c.ReportPrefill(context.Background(), handle(ns, 0), reports)
}

func (r *remote) SetWriteBudget(b block.WriteBudget) error {
	return r.c.SetWriteBudget(context.Background(), b)
}

func (r *remote) putBlocks(ctx context.Context, ns block.NamespaceID, hashLen int, items []api.PutItem, o api.PutOptions) ([]api.PutResult, error) {
	return r.c.Put(ctx, handle(ns, hashLen), items, o)
}

// PutOne puts one block in one call.
func (r *remote) PutOne(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, data []byte, durable block.TierID) error {
	res, err := r.putBlocks(ctx, ns, hashLen, []api.PutItem{{Hash: h, Data: data}}, api.PutOptions{Durable: durable})
	if err != nil {
		return err
	}
	return res[0].Err
}
