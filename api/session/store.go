package session

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Store is what the server serves. tiers.Store implements it. Where a method is
// api.Store's too it is the same; hashes come packed, hashLen bytes each. Every call
// ends by the deadline of its context.
type Store interface {
	OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error)
	Namespace(name string) (block.Namespace, error)
	NamespaceByID(id block.NamespaceID) (block.Namespace, error)
	Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error
	Locate(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error)
	Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error
	Prefetch(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error
	ReportPrefill(ns block.NamespaceID, reports []block.PrefillReport) error
	Pin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error)
	Unpin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error)
	RenewLease(id uint64, d time.Duration) (block.Lease, error)
	ReleaseLease(id uint64) error
	EndSession(session uint64)
	Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error
	Stats() block.Stats

	// Grant takes up to count places of n payload bytes each in G2, for blocks of the
	// namespace whose keys are not known yet: at least one, or ErrNoSpace. They do not
	// expire: the caller puts or aborts each. With a context that has ended it takes
	// what is free, and does not wait.
	Grant(ctx context.Context, ns block.NamespaceID, n int64, count int) ([]block.Grant, error)
	// PutGranted makes blocks of grants that are filled, in the order given, as durable
	// as each put asks for; only then does it return. One result each. The grants are
	// used up, whatever the result: Stored, or Exists when the key is there with the
	// same bytes. Errors: ErrLeaseExpired (no such grant), ErrInvalid, ErrConflict,
	// ErrNoSpace.
	PutGranted(ctx context.Context, puts []block.GrantPut) []block.CommitResult
	// AbortGrants gives grants back. Unknown ones are ignored.
	AbortGrants(ids []uint64)
	// Lend brings blocks to G2 where they are not, and leases those that are there to
	// the session for d. One loan for each key; what has no room in G2 is a miss with
	// MissNoRoom, to be got by Get. The lease is zero when nothing is lent.
	Lend(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.GetOptions, d time.Duration, session uint64) ([]block.Loan, block.Lease, error)
	// Memory lists the files behind G2, nil when its memory cannot be shared as a whole.
	Memory() []block.MemoryFile
	// Partitioned reports whether G2 is in chunks that each have blocks of namespaces
	// with the same readers and writers only, and are shared one by one. Then Chunk of
	// grants and loans is a number for OpenChunk.
	Partitioned() bool
	// OpenChunk opens the file of a chunk, which is the caller's to close, for reading
	// only without write. ErrNotFound when it is gone: nothing that was granted or lent is
	// in it any more, and its number is never given again. ErrUnavailable.
	OpenChunk(number uint32, write bool) (block.MemoryFile, error)
	// ChunkGone reports whether that is so.
	ChunkGone(number uint32) bool
}
