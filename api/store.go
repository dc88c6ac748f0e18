package api

import (
	"context"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Store is what the server serves. tiers.Store implements it. Hashes come
// packed, hashLen bytes each, so that a lookup of many costs no allocation.
//
// Every call ends by the deadline of its context. Failures of a whole call are
// errors that wrap block's sentinels; what concerns one key is in its result.
type Store interface {
	// OpenNamespace opens or creates the namespace that d describes. A known
	// name with another descriptor is a *block.Mismatch. ttl is the default time
	// to live of its blocks, 0 without end; it takes effect when the namespace is made.
	OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error)
	// Namespace finds an open namespace by name. ErrNotFound.
	Namespace(name string) (block.Namespace, error)
	// NamespaceByID finds an open namespace by handle. ErrNotFound.
	NamespaceByID(id block.NamespaceID) (block.Namespace, error)
	// Namespaces lists them by name.
	Namespaces() []block.NamespaceInfo

	// Match looks keys up, root first, and touches no device. It fills res,
	// reusing its slice.
	Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error
	// Locate lists for each key every place where it lies, nearest first.
	Locate(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error)

	// Reserve takes room for a block of n bytes. If the key is there already,
	// the result says so with Exists, and Existing says what is there; nothing
	// is reserved. ErrNoSpace when there is no room and none can be made by the
	// deadline, or soon.
	Reserve(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error)
	// Fill writes p at off of a reservation, in order and without gaps, so that
	// the checksum is computed while the bytes are copied. ErrLeaseExpired.
	Fill(ctx context.Context, id uint64, off int64, p []byte) error
	// Commit makes full reservations visible, and as durable as each asked for;
	// only then does it return. One result per id: Stored, or Exists when another
	// put of the same bytes was first. Errors per id: ErrLeaseExpired, ErrInvalid
	// (not full), ErrConflict, ErrNoSpace, ErrNotFound (durable, and deleted by
	// another call on its way down).
	Commit(ctx context.Context, ids []uint64) []block.CommitResult
	// Abort gives reservations back. Unknown ones are ignored.
	Abort(ids []uint64)
	// CompareExisting settles a put of a key that is there, for a client that
	// sent the bytes although it exists: nil when sum and length are the block's,
	// ErrConflict (counted) when not, ErrNoSpace when the block has left meanwhile.
	// With o.Durable G3 it returns once the block is durable.
	CompareExisting(ctx context.Context, ns block.NamespaceID, h block.Hash, n int64, sum block.Sum, o block.PutOptions) error

	// Get reads blocks and calls use for each key in order, hit or miss, on the
	// caller's goroutine. The bytes are leased while use runs, and longer when they
	// are Held. An error of use ends the call.
	Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error

	// Prefetch brings blocks up to G2, root first, calling progress for each key in
	// order. It returns when all are settled, when ctx ends or when CancelPrefetch names
	// its id (ErrNotFound for an unknown one). ErrInvalid for an id in use.
	Prefetch(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error
	CancelPrefetch(id string) error

	// RenewLease lets a lease run for d from now; ReleaseLease ends it.
	// ErrLeaseExpired.
	RenewLease(id uint64, d time.Duration) (block.Lease, error)
	ReleaseLease(id uint64) error
	// EndSession releases every lease and reservation of a session.
	EndSession(session uint64)

	// Delete removes blocks from all tiers and returns how many there were; a
	// restart does not bring them back. Leased blocks are unlinked now, and their
	// bytes are freed when the lease ends.
	Delete(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error)
	// Clear removes all blocks of a namespace.
	Clear(ctx context.Context, ns block.NamespaceID) (int64, error)
	// List lists blocks of a namespace in an order that stays as the store
	// changes, from behind the cursor ("" for the start), limit at most. next is
	// "" at the end.
	List(ctx context.Context, ns block.NamespaceID, cursor string, limit int) (entries []block.ListEntry, next string, err error)

	// Stats is a snapshot of state and counters.
	Stats() block.Stats
	// Watch calls fn for each event, as o says, until ctx ends, fn fails or the
	// store closes (ErrClosed). A watcher that is too slow loses events and is told
	// so with EventLost.
	Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error

	// Pin keeps blocks in the store, and Unpin lets them go again. A pinned block
	// moves between tiers but is not evicted; it may still be deleted, cleared,
	// expire, or be dropped as damaged. Where there is G3, Pin brings the block there
	// and the pin survives restarts; it answers when that is durable. One error for
	// each key: nil, ErrNotFound, ErrNoSpace (too much is pinned, or no room in G3),
	// ErrUnavailable. Unpin returns how many of the keys were pinned.
	Pin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error)
	Unpin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error)

	// StartScrub starts reading and comparing everything on the durable media, in
	// the background, and goes on where an earlier scrub was stopped. What is damaged
	// is written anew from another tier, or dropped with an event. ErrUnavailable
	// when one is running or there is no G3. Stats tells how far it is.
	StartScrub(o block.ScrubOptions) error
	// StopScrub ends a running scrub and returns when it has ended; without one it
	// does nothing.
	StopScrub()

	// Policies tells for each tier, nearest first, which policy decides what leaves it.
	Policies() []block.TierPolicy
	// SetPolicy changes the policy of a tier, NoTier for all, by name. It returns when
	// the new one has all blocks of the tier, in the order in which the old one would
	// have evicted them; when ctx ends before, it goes on. ErrInvalid lists the names
	// there are; ErrUnavailable when there is no such tier.
	SetPolicy(ctx context.Context, tier block.TierID, name string) error

	// ReportPrefill tells what computing parts of prompts of a namespace took an engine. From
	// the last reports the store learns what prefill costs there, for plans without a cost,
	// and where none is configured. ErrNotFound; ErrInvalid, and then none of them counts;
	// ErrUnavailable when this store makes no plans.
	ReportPrefill(ns block.NamespaceID, reports []block.PrefillReport) error

	// ListObjects lists objects that the catalog knows in the buckets of G4, in an order
	// that stays, from where cursor says ("" for the start), limit at most. next is "" at
	// the end. ErrUnavailable without G4, as with the three calls below; ErrInvalid for a
	// cursor that is none.
	ListObjects(ctx context.Context, cursor string, limit int) (objects []block.ObjectInfo, next string, err error)
	// ObjectUsage sums up the objects of each namespace in each bucket.
	ObjectUsage(ctx context.Context) ([]block.ObjectUsage, error)
	// SweepObjects sweeps each bucket of G4 now, and returns at the end of a sweep that has
	// begun since: it waits for one that runs, does not go on with one that was interrupted,
	// and shares its own with those who wait. progress, which may be nil, is told how far it
	// is; its error ends the call. A call that ends before the sweep does leaves the rest to
	// the sweep in the background.
	SweepObjects(ctx context.Context, progress func(block.ObjectSweep) error) error
	// ImportObjects has the catalog know what is in each bucket of G4 and was not written
	// by way of this catalog, and never what was deleted or cleared, or is past its time.
	// When it returns without an error, what it has found is served. ErrUnavailable also
	// when one is running.
	ImportObjects(ctx context.Context, progress func(block.ObjectImport) error) error
	// SetWriteBudget changes what may be written to a tier for blocks that leave the tier
	// above, of namespaces or all; without a bound it takes it away. What is left of a
	// budget stays, as far as the new one has room for it. ErrInvalid;
	// ErrUnavailable when there is no such tier. Stats tells what is left.
	SetWriteBudget(b block.WriteBudget) error
}
