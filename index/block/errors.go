package block

import (
	"errors"
	"fmt"
)

// The sentinels that classify every failure of the store. api/status.go maps
// them to gRPC codes and back. They are wrapped with the verb and the name of
// what failed; test them with errors.Is.
var (
	// ErrNotFound: no such block, namespace, lease, reservation or request.
	ErrNotFound = errors.New("not found")
	// ErrNoSpace: no room within the deadline; the call may be tried again.
	ErrNoSpace = errors.New("no space")
	// ErrLeaseExpired: the lease or reservation has run out or was released.
	ErrLeaseExpired = errors.New("lease expired")
	// ErrCorrupt: bytes failed their checksum; the block is dropped.
	ErrCorrupt = errors.New("corrupt")
	// ErrInvalid: the argument named in the text cannot be accepted.
	ErrInvalid = errors.New("invalid")
	// ErrUnavailable: what the call needs (tier, device, backend) is not there.
	ErrUnavailable = errors.New("unavailable")
	// ErrDisconnected: the server or peer cannot be reached.
	ErrDisconnected = errors.New("disconnected")
	// ErrConflict: the key is there with other bytes.
	ErrConflict = errors.New("conflict")
	// ErrMismatch: the namespace is known with another descriptor; see Mismatch.
	ErrMismatch = errors.New("namespace mismatch")
	// ErrClosed: the object was closed.
	ErrClosed = errors.New("closed")
	// ErrDenied: the caller's token is absent or wrong, or the caller may not do this.
	ErrDenied = errors.New("denied")
)

// Mismatch says which field of a namespace's descriptor differs from the one
// with which the name is known. It is an ErrMismatch.
type Mismatch struct {
	Name  string // of the namespace
	Field string // as in Descriptor's field names in the API, such as block_bytes
	Have  string // the value in the store
	Want  string // the value in the call
}

// Error names the namespace, the field and both values.
func (m *Mismatch) Error() string {
	return fmt.Sprintf("namespace %q: %s is %q, not %q: %v", m.Name, m.Field, m.Have, m.Want, ErrMismatch)
}

// Unwrap makes errors.Is(err, ErrMismatch) true.
func (m *Mismatch) Unwrap() error { return ErrMismatch }

// MissReason says why a key was not served. A miss is a result, not an error.
type MissReason uint8

// The reasons of a miss. Hit is the zero value.
const (
	Hit             MissReason = iota
	MissAbsent                 // the key is not in the store
	MissPending                // it is being put and not committed yet
	MissExpired                // its time to live has passed
	MissCorrupt                // its bytes failed their checksum; it has been dropped
	MissNoRoom                 // there was no memory to read it into
	MissDeadline               // the call's deadline came first
	MissUnavailable            // its device does not answer
	MissRecompute              // it is there, and to compute it is faster than to load it, or by the deadline
)

var missNames = [...]string{"hit", "absent", "pending", "expired", "corrupt", "no_room", "deadline", "unavailable", "recompute"}

// String gives the name that metrics and JSON use.
func (r MissReason) String() string {
	if int(r) < len(missNames) {
		return missNames[r]
	}
	return fmt.Sprintf("miss(%d)", uint8(r))
}

// Reason says why a block left a tier.
type Reason uint8

// The reasons of leaving. NoReason is the zero value.
const (
	NoReason   Reason = iota
	Evicted           // chosen by the policy, or its extent was needed for another size
	Expired           // its time to live has passed
	Deleted           // by Delete or Clear
	Moved             // another tier has it now
	Damaged           // its bytes failed their checksum
	Discarded         // its put failed, or a volatile tier was not drained at shutdown
	Unreadable        // its device is well, but cannot read it
	Rejected          // evicted, and not admitted to the tier below
)

var reasonNames = [...]string{"none", "evicted", "expired", "deleted", "moved", "damaged", "discarded", "unreadable", "rejected"}

// String gives the name that metrics and JSON use.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}
