// Package session serves the store to workers over one connection: a call is one
// round trip, and the bytes of blocks go straight from the store's memory into the
// client's and back. docs/protocol.md describes the messages byte by byte.
package session

import (
	"fmt"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// Code says what a message is. A request and its reply have the same frame ID, which
// the client chooses; it must not be that of a call under way.
type Code uint8

// The messages. Each reply follows its request's code.
const (
	CodeMatch      Code = 1
	CodeMatched    Code = 2
	CodeGet        Code = 3 // data frames, then the reply. Their Token is the key's index in the call, their Offset that in the wanted range
	CodeGot        Code = 4
	CodeGrant      Code = 5 // places for puts to come
	CodeGranted    Code = 6
	CodePut        Code = 7 // behind the data frames, whose Token is the grant's
	CodePutDone    Code = 8
	CodeRelease    Code = 9 // of leases and grants
	CodeReleased   Code = 10
	CodeRenew      Code = 11 // of leases
	CodeRenewed    Code = 12
	CodePrefetch   Code = 13
	CodePrefetched Code = 14 // several: progress, as many keys as are done; the last has all
	CodeLocate     Code = 15
	CodeLocated    Code = 16
	CodeWatch      Code = 17
	CodeEvents     Code = 18 // several, until the call is cancelled
	CodeCancel     Code = 19 // of the call with this ID, which then ends as cancelled; no reply of its own
	CodeRevoke     Code = 20 // by the server: grants that cannot be committed any more; answered by Release where memory is shared
	CodeFailed     Code = 21 // the reply to a call that failed as a whole: Status, and the reason as text
	CodeOpen       Code = 22 // a namespace, or the finding of it by name
	CodeOpened     Code = 23
	CodePin        Code = 24 // of blocks, or their unpinning
	CodePinned     Code = 25
	CodeRegionGet  Code = 26 // into regions of the client's; answered by CodeGot, without data
	CodeRegionPut  Code = 27 // out of them; answered by CodePutDone, without places
	CodePassed     Code = 28 // a chunk of the store's memory, on the socket of its own that FeatureChunks brings

	CodeReportPrefill Code = 29 // what computing a part of a prompt took an engine, with FeatureHints
	CodeReported      Code = 30 // without a payload

	lastCode = CodeReportPrefill
)

// Status is how a call, or one key of it, ended.
type Status uint16

// The statuses. They stand for block's sentinels, and those of context.
const (
	StatusOK Status = iota
	StatusNotFound
	StatusNoSpace
	StatusLeaseExpired
	StatusCorrupt
	StatusInvalid
	StatusUnavailable
	StatusDisconnected
	StatusConflict
	StatusMismatch
	StatusClosed
	StatusDenied
	StatusDeadline
	StatusCanceled
	StatusInternal
	StatusBusy // beyond what the session may have in flight; try again later
)

// Magic begins the hello of either side, Version is the newest version spoken here.
const (
	Magic   = "KVTS"
	Version = 1
)

// Features of a session, those of the client that the server has too.
const (
	// FeatureShared: the store's memory is passed as files with the server's hello,
	// over a unix socket: the client copies in and out of it.
	FeatureShared uint64 = 1 << iota
	// FeatureRegions: the client's hello lists regions, files of its own that the server
	// moves bytes to and from, over a unix socket.
	FeatureRegions
	// FeatureChunks: the store's memory is in chunks of which each client may have some.
	// Their files are passed over a socket that comes with the server's hello, each before
	// a place in it is told, over a unix socket.
	FeatureChunks
	// FeatureHints: the client tells of what it asks for and does: FlagConversation,
	// FlagUrgency and CodeReportPrefill.
	FeatureHints
)

// Limits of the messages, which keep each within frame.MaxMessage.
const (
	// MaxKeys is how many keys, leases, grants or places of one message are served; a
	// server may serve fewer.
	MaxKeys = 8192
	// maxNamed is how many one message can name. Those that are not served are busy, each
	// by itself.
	maxNamed = frame.MaxMessage / 8
	// MinMessage is the least size of messages that an end may have: the largest one of
	// a single key fits, that of a key in regions. MaxTold is the most that it may tell.
	MinMessage = 64 << 10
	MaxTold    = frame.MaxSkipped
	// BusyKey is the state (of Matched) or reason (of Prefetched) of a key that was not
	// served, being beyond the keys of the session.
	BusyKey = 255
	// MaxText is how many bytes of a text are sent.
	MaxText = 4096
	// maxReason is how many bytes of text the failure of one key has.
	maxReason = 255
	// maxChunks is how many files of memory a welcome may list: what one message of a
	// unix socket can carry.
	maxChunks = 253
	// MaxRegions is how many regions a hello may list; a server may want fewer.
	MaxRegions = 64
	// MaxSegments is in how many pieces one block may lie in regions.
	MaxSegments = 4096
)

// ErrMessage: a message cannot be decoded. It is a block.ErrInvalid.
var ErrMessage = fmt.Errorf("%w: malformed message", block.ErrInvalid)

// HelloMessage is the client's hello.
type HelloMessage struct {
	MinVersion, MaxVersion uint16
	Features               uint64
	Calls                  uint32        // wanted limit of calls in flight; 0: the server's
	Bytes                  uint64        // wanted limit of bytes in flight
	Token                  string        // that the server wants to see
	Name                   string        // of the client, for logs
	Regions                []HelloRegion // with FeatureRegions
	Message                uint32        // most bytes of a message that it sends or takes
}

// HelloRegion is a file of the client's that the server may move bytes to and from.
type HelloRegion struct {
	Length   uint64 // from its start
	ReadOnly bool   // the server may only read it
	Path     string // empty: the next of the files that come with the hello
}

// WelcomeMessage is the server's hello.
type WelcomeMessage struct {
	Status      Status // other than StatusOK: the session is refused, and the connection ends
	Text        string // why
	Version     uint16 // agreed; the newest that the server speaks when it refuses
	Features    uint64
	Session     uint64
	Incarnation uint64   // of the store
	Calls       uint32   // most calls in flight
	Bytes       uint64   // most payload bytes of gets in flight
	Keys        uint32   // most keys of one message
	Grants      uint32   // most places granted at once
	GrantBytes  uint64   // and their bytes
	Name        string   // program and version
	Chunks      []uint64 // FeatureShared: length of each file, in order
	Message     uint32   // most bytes of a message, either way
}

// Keys names blocks of a namespace.
type Keys struct {
	NS      block.NamespaceID
	Tag     uint64 // of the namespace's descriptor, 0 when unknown
	HashLen uint8
	Hashes  []byte // packed, HashLen bytes each
}

// Len is the number of keys.
func (k *Keys) Len() int {
	if k.HashLen == 0 {
		return 0
	}
	return len(k.Hashes) / int(k.HashLen)
}

// Flags of requests.
const (
	FlagAll       uint16 = 1 << iota // match: every key, not only the prefix
	FlagQuiet                        // do not tell the policy
	FlagNoPromote                    // get: leave a block where it is
	FlagVerify                       // get: compute the checksum of blocks in memory, too
	FlagRanges                       // get: ranges follow
	FlagInPlace                      // get: lend places in shared memory instead of sending bytes
	FlagRegrant                      // put: grant a place of the same size for each that is used
	FlagParents                      // put: parents follow

	FlagUnpin  uint16 = 1 << 9 // pin: let the blocks go again
	FlagPlan   uint16 = 1 << 8 // match: say what is worth loading; what it depends on follows
	FlagCreate uint16 = 1 << 0 // open, which has no other: make the namespace when it is not there

	FlagConversation uint16 = 1 << 10 // match, with FeatureHints: the name of a conversation follows
	FlagUrgency      uint16 = 1 << 11 // prefetch, with FeatureHints: a priority follows, and for how long it is of use
)

// MatchMessage asks which keys are there.
type MatchMessage struct {
	Keys
	Class    uint8
	Flags    uint16
	LeaseMS  uint32
	Deadline uint32 // milliseconds; 0: the server's default. So in every request
	// Plan, with FlagPlan, is what a plan depends on, its deadline in whole milliseconds.
	Plan block.PlanOptions
	// Conversation, with FlagConversation, is what the request belongs to, of
	// block.MaxConversation bytes at most.
	Conversation string
}

// MatchedMessage answers it.
type MatchedMessage struct {
	Prefix  uint32
	Lease   uint64
	LeaseMS uint32
	Leased  uint32
	Blocks  []block.Found
	Plan    *block.Plan // with FlagPlan
}

// GetMessage asks for blocks, or ranges of them.
type GetMessage struct {
	Keys
	Class    uint8
	Flags    uint16
	Deadline uint32
	Ranges   []Range // with FlagRanges, one per key
}

// Range is a part of a block. Length 0: to the end.
type Range struct{ Offset, Length uint32 }

// GotMessage answers a get, behind the data.
type GotMessage struct {
	Lease   uint64 // with FlagInPlace: on what is lent
	LeaseMS uint32
	Blocks  []GotBlock
}

// NoChunk is the Chunk of what is not in shared memory.
const NoChunk = 1<<32 - 1

// GotBlock is the answer for one key.
type GotBlock struct {
	Status Status // StatusOK: see Reason
	Reason block.MissReason
	Tier   block.TierID
	Len    uint32 // bytes sent, or lent
	Total  uint32 // bytes of the whole block
	Chunk  uint32 // where it lies, or NoChunk
	Offset uint64
	Sum    block.Sum // of the whole block
}

// Segment is a piece of a region.
type Segment struct {
	Region uint16 // its index in the hello
	Length uint32
	Offset uint64
}

// Segments are where the blocks of a call lie in regions. The pieces of a key, one
// behind the other, are its block.
type Segments struct {
	Counts []uint16  // how many each key has, 1 to MaxSegments
	All    []Segment // those of all keys
}

// RegionGetMessage asks for blocks to be written into regions.
type RegionGetMessage struct {
	Keys
	Class    uint8
	Flags    uint16
	Deadline uint32
	Segments
}

// RegionPutMessage makes blocks of what lies in regions.
type RegionPutMessage struct {
	Keys
	Class     uint8
	Flags     uint16
	Durable   block.TierID
	TTLMS     uint64
	Deadline  uint32
	HasParent []bool // of each key
	Segments
	Parents []byte // with FlagParents: packed as hashes, that of key i counts when HasParent[i]
}

// GrantMessage asks for places.
type GrantMessage struct {
	NS       block.NamespaceID
	Tag      uint64
	Size     uint32 // payload bytes of each
	Count    uint32
	Deadline uint32
}

// GrantedMessage answers it; there may be fewer than wanted.
type GrantedMessage struct {
	TTLMS  uint32 // from now on, unused
	Places []GrantedPlace
}

// GrantedPlace is memory for one put.
type GrantedPlace struct {
	Grant  uint64
	Size   uint32
	Chunk  uint32 // of shared memory, or NoChunk
	Offset uint64
}

// PutMessage commits what was written into granted places.
type PutMessage struct {
	Keys
	Class    uint8
	Flags    uint16
	Durable  block.TierID
	TTLMS    uint64
	Deadline uint32
	Items    []PutItem
	Parents  []byte // with FlagParents: packed as hashes, that of item i counts when its HasParent is set
}

// PutItem is one block.
type PutItem struct {
	Grant     uint64
	Len       uint32
	HasParent bool
	Sum       block.Sum // computed by the client
}

// PutDoneMessage answers it.
type PutDoneMessage struct {
	Results []PutResult
	Grants  GrantedMessage
}

// PutResult is how the put of one key ended.
type PutResult struct {
	Status Status
	Put    block.PutStatus
	Text   string // of a failure
}

// ReleaseMessage gives leases and grants back.
type ReleaseMessage struct{ Leases, Grants []uint64 }

// ReleasedMessage answers it, one status each, the leases' first.
type ReleasedMessage struct{ Results []Status }

// RenewMessage lets leases run for longer.
type RenewMessage struct {
	LeaseMS uint32
	Leases  []uint64
}

// RenewedMessage answers it.
type RenewedMessage struct{ Results []Status }

// PrefetchMessage asks for blocks to be brought up.
type PrefetchMessage struct {
	Keys
	Flags    uint16
	Deadline uint32
	Priority uint8  // with FlagUrgency, as WithinMS: block.MaxPriority at most
	WithinMS uint32 // 0: the blocks are always of use
}

// PrefetchedMessage tells of keys that are done, in order, from First on.
type PrefetchedMessage struct {
	First   uint32
	Results []PrefetchResult
}

// PrefetchResult is one key of it.
type PrefetchResult struct {
	Reason block.MissReason
	Tier   block.TierID
}

// LocateMessage asks where blocks are.
type LocateMessage struct {
	Keys
	Deadline uint32
}

// LocatedMessage answers it, a list for each key.
type LocatedMessage struct {
	Places [][]block.Located
	Busy   int // how many keys behind those were not served, being beyond the keys of the session
}

// WatchMessage asks for events.
type WatchMessage struct {
	NS          block.NamespaceID
	Tag         uint64
	Incarnation uint64
	After       uint64
	Snapshot    bool
}

// EventsMessage tells of events. The first one has none and says where the watch
// begins.
type EventsMessage struct {
	Start  *block.WatchStart
	Events []block.Event
}

// RevokeMessage takes grants back.
type RevokeMessage struct{ Grants []uint64 }

// FailedMessage says that a call failed as a whole.
type FailedMessage struct {
	Status Status
	Text   string
}

// OpenMessage opens a namespace, or finds it by its name.
type OpenMessage struct {
	Deadline uint32
	Flags    uint16
	TTLMS    uint64        // default time to live of its blocks, 0 without end; counts when it is made
	Fields   []block.Field // of the descriptor; those that are absent are empty, or 0
}

// OpenedMessage answers it.
type OpenedMessage struct {
	NS            block.NamespaceID
	Tag           uint64
	HashLen       uint8 // 0: not fixed yet
	Epoch         uint32
	TTLMS         uint64
	BlockBytes    uint64
	MaxBlockBytes uint64
}

// PinMessage keeps blocks in the store, or lets them go again.
type PinMessage struct {
	Keys
	Flags    uint16
	Deadline uint32
}

// PinnedMessage answers it, a status for each key.
type PinnedMessage struct{ Results []Status }

// ReportPrefillMessage tells of tokens of a prompt that an engine has computed in one go.
type ReportPrefillMessage struct {
	NS       block.NamespaceID
	Tag      uint64
	Position uint32 // tokens of the prompt before them
	Tokens   uint32
	Micros   uint64 // that it took
}

// ReportedMessage answers it.
type ReportedMessage struct{}
