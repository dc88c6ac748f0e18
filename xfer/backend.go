package xfer

import (
	"context"
	"fmt"
	"time"
)

// Backend moves bytes between two kinds of memory. It is blocking and dumb:
// validation, choice, deadlines, asynchrony, per-descriptor status, telemetry
// and error wrapping are the Agent's. This file is the contract; package
// xfertest checks every sentence of it.
//
// What the Agent guarantees to a backend:
//
//   - Calls come only between a successful construction and Close, and none
//     overlaps Close.
//   - Register, Deregister, Prepare, Transfer and Release may be called from
//     many goroutines at once; Transfer of one Prepared never overlaps itself.
//   - Both lists of a Prepare have the same, non-zero number of descriptors of
//     pairwise equal, non-zero length, of a pair of memory types that Caps
//     lists, each inside the Region it comes with.
//   - A Region is deregistered only when no Prepared refers to it, and each
//     Prepared is released exactly once.
//   - Overlapping pieces inside one transfer are the caller's mistake: their
//     result is undefined, but nothing outside the described pieces may change.
//
// What a backend guarantees:
//
//   - Nothing outside the described pieces is read into or written to.
//   - Transfer does not return, and does not call done for a pair, while a
//     device, kernel or peer may still touch that pair's memory: cancelled,
//     failed or not.
//   - Lengths are verified. A short read or write is an ErrShort that says how
//     many bytes were moved, and the errno where there is one.
//   - It holds no reference to memory after the Region is deregistered.
//   - Every goroutine, descriptor and mapping is gone when Close returns.
type Backend interface {
	// Name is the kind of the backend, such as "posix": constant, and unique in
	// an agent.
	Name() string

	// Caps says what the backend can do. It is constant.
	Caps() Caps

	// Register makes one piece of memory usable and returns what the backend
	// needs to know of it, opaque to the agent. For memory types that are
	// Unbounded, d.Len may be 0: any offset. It may block; ctx bounds it. On
	// error nothing is registered. Errors: ErrInvalid (this piece can never be
	// registered), ErrUnavailable (the file, device or kernel refuses; with the
	// errno).
	Register(ctx context.Context, t MemType, d Desc) (Region, error)

	// Deregister undoes one Register. It does not block on I/O.
	Deregister(r Region) error

	// Prepare resolves a transfer, so that Transfer has little left to do. It
	// does no I/O. The slices stay unchanged and valid until Release. A backend
	// may join adjacent pairs into one operation, as long as each pair still gets
	// its own done.
	Prepare(op Op, local, remote []Bound) (Prepared, error)

	// Transfer performs a prepared transfer and blocks until all its memory is
	// quiet. It calls done(i, err) exactly once for each pair i, in any order
	// and from any goroutine, but not concurrently, before it returns; err is
	// nil when the pair's bytes all arrived. done must not block. A write that
	// is done is visible to reads of the same backend; it is durable only where
	// the backend's package says so.
	//
	// When ctx ends, pieces that were not started are done with ErrCanceled,
	// and Transfer returns as soon as those in flight are quiet. The same
	// Prepared may be transferred again after that.
	//
	// The returned error is for failures of the backend as a whole (it also
	// went to each pair's done); one pair's failure is not one.
	Transfer(ctx context.Context, p Prepared, done func(i int, err error)) error

	// Release forgets a prepared transfer.
	Release(p Prepared)

	// Close ends the backend. It waits for what is in flight and is safe to
	// call twice.
	Close() error
}

// Region is a backend's own knowledge of one registered piece.
type Region any

// Prepared is a backend's own knowledge of one prepared transfer.
type Prepared any

// Bound is a descriptor with the region that covers it.
type Bound struct {
	Desc
	Type   MemType
	Region Region
}

// Pair is a combination of local and remote memory that a backend serves.
type Pair struct{ Local, Remote MemType }

// Caps is what a backend can do.
type Caps struct {
	Pairs  []Pair // read and write both work for each
	Local  bool   // both sides may belong to this agent
	Remote bool   // the remote side may belong to a peer: it has the Remote role
	Notify bool   // it has the Notifier role
	Align  uint64 // address and length of this alignment avoid a copy; 1 when it does not matter
	Engine string // for humans: which mechanism was chosen, such as "io_uring" or "goroutines"
}

// Has reports whether the backend serves the pair.
func (c Caps) Has(p Pair) bool {
	for _, q := range c.Pairs {
		if p == q {
			return true
		}
	}
	return false
}

// The optional roles. The agent looks for each once, when it adopts a backend.

// Querier says whether what a descriptor names exists. One QueryResult per
// descriptor; a missing object is a result, not an error.
type Querier interface {
	Query(ctx context.Context, t MemType, descs []Desc) ([]QueryResult, error)
}

// QueryResult is what is known of a file, device or object.
type QueryResult struct {
	Exists bool
	Bytes  uint64
}

// Estimator predicts how long a prepared transfer takes. It does no I/O.
type Estimator interface {
	Estimate(p Prepared) (Cost, error)
}

// Cost is a prediction. Margin is how far off it may be, either way.
type Cost struct {
	Time   time.Duration
	Margin time.Duration
}

// PeerID names an agent and which life of it: a process that was started again is
// another peer. Incarnations are random and never 0.
type PeerID struct {
	Name        string
	Incarnation uint64
}

// String writes the name and the incarnation.
func (p PeerID) String() string { return fmt.Sprintf("%s#%016x", p.Name, p.Incarnation) }

// Remote is the role of a backend whose remote side may belong to a peer: another
// agent, as a rule in another process. Its methods exchange opaque bytes, which the
// agents put into their metadata.
//
// What the Agent guarantees: Bind comes first, and once. At most one incarnation of
// a name is known at a time. A peer's regions are unloaded, once each, when no
// Prepared refers to them, and before ForgetPeer.
//
// What a backend guarantees beside Backend's promises:
//
//   - Transfer connects by itself where there is no connection, or none any more. When
//     that fails it says so at once with ErrDisconnected, and until a back-off has
//     passed later transfers fail likewise without trying. Back-offs grow and are
//     bounded.
//   - A connection that is lost ends the transfers that use it with ErrDisconnected. No
//     other thing follows from it: the peer stays known, its regions loaded, and the next
//     transfer connects anew.
//   - Whoever answers at the peer's address is believed only when it says that it is
//     the PeerID that was loaded; else ErrDisconnected, which names both.
//   - A peer reaches only memory that is registered here now, by the token or key that
//     RegionInfo gave, and within its bounds; refusals are ErrInvalid at the initiator.
//     When Deregister has returned no peer's bytes arrive in the memory any more, and
//     none are read from it.
//   - When a peer's process dies, transfers with it end with ErrDisconnected, and their
//     memory is quiet.
//   - When ctx ends Transfer comes back within 100 ms, whatever the peer does. To be
//     quiet by then it may give up the connection.
type Remote interface {
	// Bind tells the backend which agent it belongs to.
	Bind(self PeerID) error
	// ConnInfo says how a peer reaches this backend. It is constant after Bind.
	ConnInfo() ([]byte, error)
	// LoadConnInfo makes a peer known. ErrInvalid when info cannot be read.
	// ErrUnavailable when this backend can never reach that peer, such as one on another
	// host: the agent does without it for the peer, where another backend can.
	LoadConnInfo(peer PeerID, info []byte) error
	// ForgetPeer undoes LoadConnInfo and ends the connections with the peer.
	ForgetPeer(peer PeerID)
	// RegionInfo says how a peer addresses a region.
	RegionInfo(r Region) ([]byte, error)
	// LoadRegion makes a peer's region known; the Region serves as a remote side. It
	// does no I/O. ErrInvalid when info cannot be read or does not fit d.
	LoadRegion(peer PeerID, t MemType, d Desc, info []byte) (Region, error)
	// UnloadRegion undoes LoadRegion.
	UnloadRegion(r Region)
	// Connect makes the connections to a peer ahead of the first transfer, without
	// regard to a back-off. ErrDisconnected.
	Connect(ctx context.Context, peer PeerID) error
	// Disconnect ends them; transfers under way fail. The next one connects anew.
	Disconnect(peer PeerID)
}

// Notifier is the role of a backend that carries notifications.
//
//   - A notification is delivered at most once, and has been delivered when Notify
//     returns nil: it is in the peer's queue. After an error it may have been or not.
//   - Notify that begins after a Transfer to the same peer has returned is delivered
//     behind all of that transfer's bytes, on whichever connections they went.
//   - Notifications of one sender that do not overlap arrive in order.
//   - The queue is bounded. While it is full Notify waits, until ctx ends.
type Notifier interface {
	// Notify delivers a message of at most MaxNotification bytes. ErrDisconnected,
	// ErrCanceled, ErrInvalid (too long).
	Notify(ctx context.Context, peer PeerID, msg []byte) error
	// Notifications gives what peers send. It is closed by Close.
	Notifications() <-chan Notification
}

// MaxNotification is the longest notification, in bytes.
const MaxNotification = 64 << 10

// Notification is a message from a peer.
type Notification struct {
	Peer PeerID // as it was when it sent the message
	Msg  []byte // the receiver's own
}
