package apitest

import (
	"context"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// Caller is what a client can do with the blocks of a store. api.Store has it,
// and so has a store behind a connection.
type Caller interface {
	Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error
	Reserve(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error)
	Fill(ctx context.Context, id uint64, off int64, p []byte) error
	Commit(ctx context.Context, ids []uint64) []block.CommitResult
	Abort(ids []uint64)
	Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error
	Prefetch(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error
	CancelPrefetch(id string) error
	RenewLease(id uint64, d time.Duration) (block.Lease, error)
	ReleaseLease(id uint64) error
	EndSession(session uint64)
	Delete(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error)
	Clear(ctx context.Context, ns block.NamespaceID) (int64, error)
	List(ctx context.Context, ns block.NamespaceID, cursor string, limit int) ([]block.ListEntry, string, error)
	OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error)
	Locate(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error)
	Pin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error)
	Unpin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error)
	Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error
	Stats() block.Stats
}

// Putter is a Caller whose puts are one call each.
type Putter interface {
	Caller
	PutOne(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, data []byte, durable block.TierID) error
}

// Remote serves a store over a listener in memory until the test ends, and
// returns it as a client sees it: each session has a connection of its own, which
// EndSession closes. Hashes have 16 bytes.
func Remote(t testing.TB, s api.Store) Caller { return overGRPC(t, s) }

// RemoteBySession is as Remote, of a client that gets and puts blocks over a session
// on TCP. The store serves sessions, or the test is skipped.
func RemoteBySession(t testing.TB, s api.Store) Putter { return overSession(t, s, "tcp") }
