package block

import "time"

// This file holds the arguments and results of the store's calls, so that the
// store, the API's server and the Go client speak in the same values.

// State is what a lookup says of one key.
type State uint8

// The states of a key. Absent is the zero value.
const (
	Absent  State = iota
	Pending       // being put, or being brought up: wait or come again
	Resident
)

// Found is what Match says of one key.
type Found struct {
	State State
	Tier  TierID // the nearest tier that has it
	Len   uint32 // payload bytes
}

// MatchOptions is what a match may ask for beside the lookup itself.
type MatchOptions struct {
	All     bool          // look up every key; otherwise stop at the first that is not resident
	Lease   time.Duration // more than zero: lease the resident keys that are answered
	Session uint64        // owner of the lease
	Class   uint8         // the client's hint to the policy
	Quiet   bool          // do not tell the policy: a tool looks, no engine
}

// MatchResult answers a match.
type MatchResult struct {
	Prefix int     // how many keys from the first one on are resident without a gap
	Blocks []Found // per key; without All it ends after the first key that is not resident
	Lease  Lease   // with MatchOptions.Lease and at least one resident key
}

// Lease keeps blocks from being evicted or moved out of the tiers they are in
// until it ends. The zero ID is no lease.
type Lease struct {
	ID    uint64
	Left  time.Duration // until it ends, from when the store answered
	Count int           // blocks it holds
}

// Located is one place where a block lies.
type Located struct {
	Tier  TierID
	Place Place
	Len   uint32
}

// PutOptions go with a reservation.
type PutOptions struct {
	Parent    Hash
	HasParent bool
	Durable   TierID        // G2 (default): in memory is enough; G3: on NVMe when the commit is answered
	TTL       time.Duration // 0: the namespace's
	Session   uint64        // owner of the reservation, which is aborted when the session ends
}

// PutStatus is how a put of one key ended when it did not fail.
type PutStatus uint8

// The ways a put ends well.
const (
	Stored PutStatus = iota
	Exists           // the key was there with the same bytes
)

// ListEntry is one block of a listing.
type ListEntry struct {
	Hash    Hash
	Parent  Hash
	HasPar  bool
	Len     uint32
	Sum     Sum
	Tiers   []TierID
	Expires time.Time // zero: never
}

// EventKind says what happened to a block.
type EventKind uint8

// The kinds of events.
const (
	EventStored  EventKind = iota // it came into a tier
	EventRemoved                  // it left a tier, with a reason
	EventCleared                  // a namespace was emptied
	EventLost                     // events were dropped for this watcher: Count of them
)

var eventNames = [...]string{"stored", "removed", "cleared", "lost"}

// String gives the name that JSON uses.
func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return "unknown"
}

// Event tells a watcher of one change.
type Event struct {
	Seq    uint64 // increases by one with each event of this process
	Kind   EventKind
	NS     string
	Hash   Hash
	Hlen   uint8 // bytes of Hash that count
	Parent Hash
	HasPar bool
	Tier   TierID
	Reason Reason
	Len    uint32
	Last   bool  // removed from the last tier that had it
	Count  int64 // with EventLost and EventCleared
}

// Progress tells how far a prefetch is: one for each key, in the order of the
// request, root first.
type Progress struct {
	Index  int
	Reason MissReason // Hit: resident in the wanted tier now
	Tier   TierID
}

// NamespaceInfo is a namespace with what the store holds of it.
type NamespaceInfo struct {
	Namespace
	Blocks int64
	Bytes  int64
}

// TierStats is the state of one tier.
type TierStats struct {
	Tier       TierID
	Capacity   int64 // bytes that slots may take
	Used       int64 // bytes that slots take, with headers and rounding
	Reserve    int64 // bytes that are free without waiting
	Blocks     int64
	Payload    int64 // bytes of payload in Blocks
	High, Low  int64 // watermarks, bytes of Used
	Evictions  int64 // blocks that left by eviction, moved down or dropped
	Dropped    int64 // of those, the ones that were the last copy
	Reclaimed  int64 // bytes
	BytesIn    int64
	BytesOut   int64
	Refused    int64 // puts for which there was no room
	Hits       int64
	Devices    []DeviceStats
	QueueDrops int64 // hints to the policy that its queue had no room for
}

// DeviceStats is the state of one device of a tier.
type DeviceStats struct {
	Path      string
	ID        string // identity of the slab, hex
	Bytes     int64
	FreeOnFS  int64  // of the file system under it; 0 for block devices
	Engine    string // io_uring or goroutines
	State     string // healthy, or why not
	PageBytes int64  // DRAM: page size obtained
	Locked    int64  // DRAM: bytes locked
}

// Stats is a snapshot of the store.
type Stats struct {
	Uptime       time.Duration
	Namespaces   int64
	Blocks       int64
	Tiers        []TierStats
	Misses       map[string]int64 // by MissReason
	Removed      map[string]int64 // blocks that left the store for good, by Reason
	Conflicts    int64
	Corrupt      int64
	Leases       int64
	Reservations int64
	Prefetch     PrefetchStats
	Watchers     int64
	EventsLost   int64
	TableBytes   int64 // resident table
}

// PrefetchStats counts prefetch work.
type PrefetchStats struct {
	Queued, Done, Dropped, Cancelled int64
}

// Wanted names a block, or a range of its bytes, to get.
type Wanted struct {
	Hash   Hash
	Offset int64
	Length int64 // 0: to the end
}

// Payload is what a get answers for one key.
type Payload struct {
	Reason MissReason // Hit, or why there are no bytes
	Tier   TierID     // that served it
	Total  uint32     // length of the whole block
	Sum    Sum        // of the whole block
	Bytes  []byte     // the bytes wanted; valid only until the callback returns
}

// GetOptions go with a get.
type GetOptions struct {
	Class     uint8 // the client's hint to the policy
	NoPromote bool  // leave a block where it is: do not bring it up to G2
	Quiet     bool  // do not tell the policy: a tool reads, no engine
	Verify    bool  // compute the checksum of blocks in G2 too, not only of those that cross a tier
}

// Reserved is a place that a block may be written into. It must be filled and
// committed, or aborted, before it expires.
type Reserved struct {
	ID     uint64 // of the reservation; 0 when Status is Exists
	Status PutStatus
	Left   time.Duration
	Place  Place // in G2
}

// Existing is what is known of a block that a put met: with it a client need
// not send the bytes again.
type Existing struct {
	Len uint32
	Sum Sum
}

// CommitResult is how the commit of one reservation ended.
type CommitResult struct {
	Status PutStatus
	Err    error
}
