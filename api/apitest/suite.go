// Package apitest is the contract of api.Store as a test suite. It runs each
// case on the bare store and again through gRPC, over a connection in memory, and
// with sessions over TCP and over a unix socket, in shared memory where the store has
// it, so the store, the servers and the clients are held to one set of rules.
package apitest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// Harness is a fresh store to test, and what it has. When it is full it evicts
// blocks that nobody holds. The one who makes it closes it by t.Cleanup.
type Harness struct {
	Store   api.Store
	G2Bytes int64 // capacity of G2, at least 4 MiB; the suite reserves all of it
	Durable bool  // the store has G3
}

// RunStore tests the store that open makes, one for each case and way.
func RunStore(t *testing.T, open func(t *testing.T) Harness) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for _, way := range []string{"bare", "grpc", "tcp", "unix"} {
				t.Run(way, func(t *testing.T) {
					h := open(t)
					var s subject
					switch way {
					case "bare":
						s = bare{h.Store}
					case "grpc":
						s = overGRPC(t, h.Store)
					default:
						s = overSession(t, h.Store, way)
					}
					c.run(&env{T: t, s: s, h: h, ctx: t.Context()})
				})
			}
		})
	}
}

var cases = []struct {
	name string
	run  func(e *env)
}{
	{"RoundTrip", testRoundTrip},
	{"Batch", testBatch},
	{"HashLengths", testHashLengths},
	{"Prefix", testPrefix},
	{"LengthsDiffer", testLengthsDiffer},
	{"Pending", testPending},
	{"Plans", testPlans},
	{"ReportPrefill", testReportPrefill},
	{"Exists", testExists},
	{"Conflict", testConflict},
	{"Durable", testDurable},
	{"Ranges", testRanges},
	{"BadArguments", testBadArguments},
	{"Namespaces", testNamespaces},
	{"Mismatch", testMismatch},
	{"Reservations", testReservations},
	{"NoSpace", testNoSpace},
	{"SameKeyAtOnce", testSameKeyAtOnce},
	{"Leases", testLeases},
	{"Conversations", testConversations},
	{"LeaseExpires", testLeaseExpires},
	{"SessionEnds", testSessionEnds},
	{"TimeToLive", testTimeToLive},
	{"Delete", testDelete},
	{"Clear", testClear},
	{"List", testList},
	{"ListWhileChanging", testListWhileChanging},
	{"Prefetch", testPrefetch},
	{"CancelPrefetch", testCancelPrefetch},
	{"Watch", testWatch},
	{"WatchStart", testWatchStart},
	{"WatchResume", testWatchResume},
	{"WatchResumeNamespace", testWatchResumeNamespace},
	{"WatchCannotResume", testWatchCannotResume},
	{"WatchSnapshot", testWatchSnapshot},
	{"WatchSnapshotWhileChanging", testWatchSnapshotWhileChanging},
	{"WatchResumeOrSnapshot", testWatchResumeOrSnapshot},
	{"Pin", testPin},
	{"PinIsOfOneLife", testPinIsOfOneLife},
	{"PinUnderPressure", testPinUnderPressure},
	{"PinLimit", testPinLimit},
	{"Scrub", testScrub},
	{"Policies", testPolicies},
	{"WriteBudgets", testWriteBudgets},
	{"Stats", testStats},
	{"StatsOfEvents", testStatsOfEvents},
	{"StatsOfHealth", testStatsOfHealth},
	{"CallerGone", testCallerGone},
}

// subject is the store as the cases see it: api.Store, but for CompareExisting,
// which only the server calls, and with a put of whole blocks.
type subject interface {
	Caller
	OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error)
	Namespace(name string) (block.Namespace, error)
	NamespaceByID(id block.NamespaceID) (block.Namespace, error)
	Namespaces() []block.NamespaceInfo
	Locate(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error)
	Stats() block.Stats
	Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error
	Pin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error)
	Unpin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error)
	StartScrub(o block.ScrubOptions) error
	StopScrub()
	Policies() []block.TierPolicy
	SetPolicy(ctx context.Context, tier block.TierID, name string) error
	SetWriteBudget(b block.WriteBudget) error
	ReportPrefill(ns block.NamespaceID, reports []block.PrefillReport) error

	putBlocks(ctx context.Context, ns block.NamespaceID, hashLen int, items []api.PutItem, o api.PutOptions) ([]api.PutResult, error)
}

// bare puts blocks on a store by the steps that the server takes.
type bare struct{ api.Store }

func (b bare) putBlocks(ctx context.Context, ns block.NamespaceID, hashLen int, items []api.PutItem, o api.PutOptions) ([]api.PutResult, error) {
	out := make([]api.PutResult, len(items))
	var ids []uint64
	var at []int
	for i, it := range items {
		po := block.PutOptions{Parent: it.Parent, HasParent: it.HasParent, Durable: max(o.Durable, block.G2), TTL: o.TTL}
		r, _, err := b.Reserve(ctx, ns, hashLen, it.Hash, int64(len(it.Data)), po)
		switch {
		case err != nil:
			out[i].Err = err
		case r.Status == block.Exists:
			out[i].Status = block.Exists
			out[i].Err = b.CompareExisting(ctx, ns, it.Hash, int64(len(it.Data)), sumOf(it.Data), po)
		default:
			if out[i].Err = fillInPieces(ctx, b, r.ID, it.Data); out[i].Err != nil {
				b.Abort([]uint64{r.ID})
				continue
			}
			ids, at = append(ids, r.ID), append(at, i)
		}
	}
	for i, r := range b.Commit(ctx, ids) {
		out[at[i]] = api.PutResult{Status: r.Status, Err: r.Err}
	}
	return out, nil
}

func fillInPieces(ctx context.Context, s interface {
	Fill(ctx context.Context, id uint64, off int64, p []byte) error
}, id uint64, data []byte,
) error {
	const piece = 16384 // as gRPC's frames come
	for off := 0; off < len(data); off += piece {
		if err := s.Fill(ctx, id, int64(off), data[off:min(off+piece, len(data))]); err != nil {
			return err
		}
	}
	return nil
}

func sumOf(p []byte) block.Sum { return xxh3.Hash128(p).Bytes() }

// env is what a case works with.
type env struct {
	*testing.T
	s   subject
	h   Harness
	ctx context.Context
}

// open makes a namespace of blocks of up to 1 MiB.
func (e *env) open(name string) block.Namespace {
	e.Helper()
	n, err := e.s.OpenNamespace(e.ctx, block.Descriptor{Name: name, Model: "m", MaxBlockBytes: 1 << 20}, 0)
	e.ok(err)
	return n
}

func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// is fails unless err is want.
func (e *env) is(err, want error) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Fatalf("error is %v, want one that is %q", err, want)
	}
}

// eventually waits until ok is true.
func (e *env) eventually(what string, ok func() bool) {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.ctx, 30*time.Second)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			e.Fatalf("waited in vain until %s", what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

const hashLen = 16

// hash is the i-th hash of a test, of which the first n bytes count.
func hash(i, n int) block.Hash {
	var h block.Hash
	binary.BigEndian.PutUint64(h[:], uint64(i)*0x9e3779b97f4a7c15) // spread, so that no order is assumed
	for j := 8; j < n; j++ {
		h[j] = byte(i)
	}
	return h
}

func pack(n int, hashes ...block.Hash) []byte {
	var b []byte
	for _, h := range hashes {
		b = append(b, h[:n]...)
	}
	return b
}

func hashes(from, to int) []block.Hash {
	var out []block.Hash
	for i := from; i < to; i++ {
		out = append(out, hash(i, hashLen))
	}
	return out
}

// data is n bytes that depend on i and on their offset.
func data(i, n int) []byte {
	b := make([]byte, n)
	for j := range b {
		b[j] = byte(i*31 + j + j>>8*7)
	}
	return b
}

// put stores one block and wants the status.
func (e *env) put(ns block.Namespace, i, n int, o api.PutOptions, want block.PutStatus) {
	e.Helper()
	res, err := e.s.putBlocks(e.ctx, ns.ID, hashLen, []api.PutItem{{Hash: hash(i, hashLen), Data: data(i, n)}}, o)
	e.ok(err)
	e.ok(res[0].Err)
	if res[0].Status != want {
		e.Fatalf("put of block %d: status %v, want %v", i, res[0].Status, want)
	}
}

// get reads one block, or a range of it.
func (e *env) get(ns block.Namespace, w block.Wanted) (block.Payload, error) {
	e.Helper()
	var out block.Payload
	calls := 0
	err := e.s.Get(e.ctx, ns.ID, hashLen, []block.Wanted{w}, block.GetOptions{}, func(_ int, p block.Payload) error {
		calls++
		out = p
		out.Bytes = bytes.Clone(p.Bytes)
		return nil
	})
	if err == nil && calls != 1 {
		e.Fatalf("get called back %d times for one key", calls)
	}
	return out, err
}

// has wants block i with n bytes and the right content.
func (e *env) has(ns block.Namespace, i, n int) {
	e.Helper()
	p, err := e.get(ns, block.Wanted{Hash: hash(i, hashLen)})
	e.ok(err)
	switch {
	case p.Reason != block.Hit:
		e.Fatalf("get of block %d: %v", i, p.Reason)
	case !bytes.Equal(p.Bytes, data(i, n)):
		e.Fatalf("get of block %d: %d bytes, not the %d that were put", i, len(p.Bytes), n)
	case int(p.Total) != n || p.Sum != sumOf(data(i, n)):
		e.Fatalf("get of block %d: total %d, sum %s", i, p.Total, p.Sum)
	}
}

func (e *env) misses(ns block.Namespace, i int, want block.MissReason) {
	e.Helper()
	p, err := e.get(ns, block.Wanted{Hash: hash(i, hashLen)})
	e.ok(err)
	if p.Reason != want || len(p.Bytes) != 0 {
		e.Fatalf("get of block %d: reason %v with %d bytes, want %v", i, p.Reason, len(p.Bytes), want)
	}
}

func (e *env) match(ns block.Namespace, o block.MatchOptions, hs ...block.Hash) block.MatchResult {
	e.Helper()
	var res block.MatchResult
	e.ok(e.s.Match(e.ctx, ns.ID, hashLen, pack(hashLen, hs...), o, &res))
	return res
}

// states writes a match as one letter a key.
func states(res block.MatchResult) string {
	s := fmt.Sprintf("%d:", res.Prefix)
	for _, b := range res.Blocks {
		s += string("-pR"[b.State])
	}
	return s
}
