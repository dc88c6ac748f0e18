package block

import (
	"fmt"
	"time"
)

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
	// Conversation is the client's name for what the request belongs to and goes on with: a
	// chat, or the run of an agent. Its lease lasts until its next request nearly always has
	// come, as far as that is known, from its own pauses or those of others of its class in
	// the namespace; Lease is the longest then. "": none.
	Conversation string
	Class        uint8        // the client's hint to the policy
	Quiet        bool         // do not tell the policy: a tool looks, no engine
	Plan         *PlanOptions // not nil: say what of the prefix is worth loading
}

// MaxConversation is how many bytes the name of a conversation has at most.
const MaxConversation = 255

// CheckConversation fails with ErrInvalid on a name that is too long.
func CheckConversation(name string) error {
	if len(name) > MaxConversation {
		return fmt.Errorf("%w: conversation: %d bytes, at most %d", ErrInvalid, len(name), MaxConversation)
	}
	return nil
}

// MatchResult answers a match.
type MatchResult struct {
	Prefix int     // how many keys from the first one on are resident without a gap
	Blocks []Found // per key; without All it ends after the first key that is not resident
	Lease  Lease   // with MatchOptions.Lease and at least one resident key
	Plan   *Plan   // with MatchOptions.Plan
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
	Len   uint32 // payload bytes
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
	Len     uint32 // payload bytes
	Sum     Sum
	Tiers   []TierID  // that have it, nearest first
	Expires time.Time // zero: never
	Pinned  bool
}

// EventKind says what happened to a block.
type EventKind uint8

// The kinds of events.
const (
	EventStored   EventKind = iota // it came into a tier
	EventRemoved                   // it left a tier, with a reason
	EventCleared                   // a namespace was emptied
	EventLost                      // events were dropped for this watcher: Count of them, 0 when nobody can say how many
	EventPresent                   // of a snapshot: the block is in a tier
	EventSnapshot                  // the snapshot is complete: Count blocks in tiers were told
)

var eventNames = [...]string{"stored", "removed", "cleared", "lost", "present", "snapshot"}

// String gives the name that JSON uses.
func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return "unknown"
}

// Event tells a watcher of one change.
type Event struct {
	// Seq increases by one with each event of this process. With EventLost and
	// EventSnapshot it is that of the last event before those that follow, with
	// EventPresent 0.
	Seq    uint64
	Kind   EventKind
	NS     string // name of the namespace
	Hash   Hash
	Hlen   uint8 // bytes of Hash that count
	Parent Hash  // with EventStored and EventPresent only
	HasPar bool  // Parent is given
	Tier   TierID
	Reason Reason // with EventRemoved
	Len    uint32 // payload bytes
	Last   bool   // with EventRemoved: no tier has it now
	Count  int64  // with EventCleared, EventLost and EventSnapshot
}

// WatchOptions say what a watcher wants to be told.
type WatchOptions struct {
	NS NamespaceID // 0: all
	// Incarnation and After, when Incarnation is not 0, ask to go on behind event
	// After of that incarnation of the store. When that cannot be, because the
	// store was opened anew or holds those events no more, the watch begins with a
	// snapshot if one is wanted, else with an EventLost.
	Incarnation uint64
	After       uint64
	// Snapshot asks for what is there: an EventPresent for each block in each tier,
	// then EventSnapshot, then the events since the watch began. A block may be told
	// of twice, as present and by an event; whoever applies all in order ends with
	// what is there. A watch that goes on where it was has no snapshot.
	Snapshot bool
	// Ready, if not nil, is called once, before the first event: nothing that
	// happens from now on is missed.
	Ready func(WatchStart)
}

// WatchStart says where a watch begins.
type WatchStart struct {
	Incarnation uint64 // of the store: random, drawn when it is opened
	Seq         uint64 // of the last event before those that will be told
	Resumed     bool   // it goes on where WatchOptions asked it to
}

// ScrubOptions go with StartScrub.
type ScrubOptions struct {
	BytesPerSecond int64 // read from the devices; 0: 64 MiB
	Restart        bool  // from the beginning, also when an earlier scrub was not finished
}

// ScrubState says what the scrub does.
type ScrubState uint8

// The states of the scrub.
const (
	ScrubNever ScrubState = iota // since the data directory was made
	ScrubRunning
	ScrubStopped // before its end: the next start goes on from there
	ScrubDone
	ScrubFailed // see Error; the next start goes on from there
)

var scrubNames = [...]string{"never", "running", "stopped", "done", "failed"}

// String gives the name that JSON uses.
func (s ScrubState) String() string {
	if int(s) < len(scrubNames) {
		return scrubNames[s]
	}
	return "unknown"
}

// ScrubStatus tells how far a scrub is, or how the last one ended. Its counters
// go on when a scrub is continued after a restart.
type ScrubStatus struct {
	State    ScrubState
	Started  time.Time
	Ended    time.Time // zero while it runs
	Done     int64     // bytes of the slabs that it is through with
	Total    int64     // bytes of the slabs
	Blocks   int64     // read and compared
	Damaged  int64     // of those, whose header or payload was wrong or could not be read
	Repaired int64     // of the damaged, written anew from another tier
	Dropped  int64     // of the damaged, those that no other tier had
	Stale    int64     // headers of blocks that are not there any more, invalidated
	Error    string    // with ScrubFailed
}

// The states of a medium, for DeviceStats.State and CatalogStats.State.
const (
	Healthy  = "healthy"
	Degraded = "degraded" // it fails now and then: used, but new blocks go elsewhere while they can
	Down     = "down"     // not used; probes find out when it is well again
)

// CatalogStats is the state of the catalog.
type CatalogStats struct {
	State  string // Healthy; Degraded: nothing new is recorded, what is there is served
	Reason string // why it is not healthy
	Since  time.Time
	Errors int64 // times that it left Healthy
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
	QueueDrops int64  // hints to the policy, and requests to the curves, that their queues had no room for
	Policy     string // that decides what leaves
	// Behind is how long Used has been above High although it should not, 0 when
	// eviction keeps up; FellBehind how often that began.
	Behind     time.Duration
	FellBehind int64
	Admission  *AdmissionStats // nil: all that leaves the tier above is written
	Curves     []Curve
	Uploads    *UploadStats // of G4; nil: it is another tier
}

// UploadStats says how the blocks do that are to go from the local tiers into objects.
type UploadStats struct {
	Blocks, Bytes int64 // that wait, or are on their way; bytes of slots
	HeldBack      int64 // blocks that did not leave since the queue was full
	Dropped       int64 // blocks that stayed since they had waited too long
	Through       int64 // blocks that were to go up as soon as they were put, for which the queue had no room
	Failed        int64 // blocks that could not be written
}

// Curve is what a tier would have had of the requests since the start if it were
// another, by itself: the blocks of matches that are not quiet.
type Curve struct {
	Policy string  // "" where there is room for all: no policy matters
	Size   float64 // in capacities of the real tier; 0: room for all that ever was asked for
	Asked  int64   // blocks; since the tier's policy was changed, for Size 0.5 and 2
	Hits   int64   // of those; estimated from a sample
}

// WriteBudget is how much may be written to a tier in a day for blocks that leave the tier
// above. What is written in any case (puts that must be durable, pins, what a stop
// leaves, blocks that others need) is paid from it, too.
type WriteBudget struct {
	Tier       TierID // G3 or G4
	Namespaces string // a glob over their names; "": all, and beside those of globs
	Bytes      int64  // 0: any number
	Requests   int64  // that write objects, of G4; 0: any number
}

// String names the budget: TIER, or TIER/GLOB for one of namespaces.
func (b WriteBudget) String() string {
	if b.Namespaces == "" {
		return b.Tier.String()
	}
	return b.Tier.String() + "/" + b.Namespaces
}

// BudgetStats is a budget and what is left of it.
type BudgetStats struct {
	WriteBudget
	// What may be written now; below 0 when others have overdrawn. Without a bound 0.
	AvailableBytes, AvailableRequests int64
}

// AdmissionStats says what an admission to a tier has decided about blocks that left
// the tier above and were in no other.
type AdmissionStats struct {
	Budgets  []BudgetStats
	Admitted int64 // blocks
	// Rejected counts blocks that were turned away, by reason: "no_room" in the tier,
	// "tail" of a prompt and not full, "used_once" while little is left of a budget,
	// "over_budget", "not_worth" loading.
	Rejected map[string]int64
}

// TierPolicy is what decides which blocks leave a tier first.
type TierPolicy struct {
	Tier   TierID
	Policy string // its name
	Start  string // of the one that the store was opened with
	Moving int64  // blocks that the policy before it still has, while it is being changed
}

// DeviceStats is the state of one device of a tier.
type DeviceStats struct {
	Path     string
	ID       string // identity of the slab, hex
	Bytes    int64
	FreeOnFS int64     // of the file system under it; 0 for block devices
	Engine   string    // io_uring or goroutines
	State    string    // Healthy, Degraded or Down
	Reason   string    // why it is not healthy
	Since    time.Time // of State
	Errors   int64     // of its I/O
	// Quarantined is what slots take that cannot be read or written, and are left out
	// until they can.
	Quarantined int64
	PageBytes   int64       // DRAM: page size obtained
	Locked      int64       // DRAM: bytes locked
	Wear        *DeviceWear // nil: what is under it does not tell, or kvtier may not ask
}

// Stats is a snapshot of the store.
type Stats struct {
	Uptime       time.Duration
	Namespaces   int64
	Blocks       int64
	Tiers        []TierStats
	Misses       map[string]int64 // by MissReason
	Removed      map[string]int64 // blocks that left the store for good, by Reason
	Conflicts    int64            // puts of a block that is there with other bytes
	Corrupt      int64            // copies of blocks that failed their checksum
	Leases       int64            // now
	Reservations int64            // now
	// Chunks of a partitioned G2 that have passed to another share, and how often one could
	// not.
	ChunksPassed, ChunksStuck int64
	Prefetch                  PrefetchStats
	Watchers                  int64  // now
	EventsLost                int64  // that slow watchers missed
	TableBytes                int64  // memory of the resident table
	Incarnation               uint64 // of the store: random, drawn when it is opened
	EventSeq                  uint64 // of the last event
	Pinned                    int64  // blocks that are pinned
	PinnedBytes               int64  // of their payload
	Scrub                     ScrubStatus
	Catalog                   CatalogStats
	ObjectSweeps              []ObjectSweep    // of each bucket of G4
	ByNamespace               []NamespaceStats // by name
}

// NamespaceStats counts what matches, but for quiet ones, and gets asked a namespace for.
// Counters are since the start.
type NamespaceStats struct {
	Name    string
	Asked   int64 // blocks in matches
	Matched int64 // of those, blocks in unbroken prefixes
	// Misses counts keys that a match or get did not find, or a get did not serve, by
	// reason: that of a MissReason, or instead of "absent" why it is not there:
	// "never_stored", or that of a Reason. What left long ago counts as never stored.
	Misses  map[string]int64
	Prefill *PrefillCost // nil: nothing is known
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
	Bytes  []byte     // the bytes wanted; valid only until the callback returns, or Held
	// Held says that the next call comes without a wait and that Bytes stay valid until
	// the first call without Held has returned, so that several blocks can be used at
	// once. When the get fails before that call, they are not valid any more.
	Held bool
	// With GetOptions.Pieces: At is where Bytes lie in what is wanted, and More says
	// that another call for the same key follows. The last one has the outcome: when
	// it is no hit, what came before is worth nothing.
	At   int64
	More bool
}

// GetOptions go with a get.
type GetOptions struct {
	Class     uint8 // the client's hint to the policy
	NoPromote bool  // leave a block where it is: do not bring it up to G2
	Quiet     bool  // do not tell the policy: a tool reads, no engine
	// Plan, when not nil, hands out only what of the prefix is worth loading. What is there
	// else is a miss with MissRecompute.
	Plan *PlanOptions
	// Verify computes the checksum of blocks in G2 too, not only of those that cross a
	// tier. Where others can map G2 it is done in any case, but for whole blocks with
	// Pieces.
	Verify bool
	// Pieces allows a block to be handed out in pieces, as they come from the
	// device, before its checksum is known: see Payload.More. Whoever takes them compares
	// the checksum.
	Pieces bool
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

// Grant is a place in G2 for a put whose key is not known yet. It is its taker's
// until it is put or aborted.
type Grant struct {
	ID     uint64 // cannot be guessed
	Mem    []byte // as many bytes as were asked for
	Chunk  int    // the file of the store's memory that it is in; see MemoryFile
	Offset int64  // of Mem in that file
}

// GrantPut makes a block of a filled grant.
type GrantPut struct {
	Grant uint64
	Key   Key
	Hlen  int   // bytes of Key.Hash that count
	Len   int64 // payload bytes, at most the grant's
	Sum   Sum   // of those bytes; the caller vouches for it
	PutOptions
}

// Loan is a block to be read in place, under a lease.
type Loan struct {
	Reason MissReason // Hit, or why there is nothing to read
	Tier   TierID     // that had it
	Len    uint32     // payload bytes
	Sum    Sum
	Mem    []byte // the payload
	Chunk  int    // as in Grant
	Offset int64
}

// MemoryFile is a piece of a store's memory that other processes can map: sealed
// against any change of size. The store keeps owning the descriptor.
type MemoryFile struct {
	Fd    int
	Bytes int64
}
