package object

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// Class says what kind of failure a request had, and so what can be done about it.
type Class uint8

// The classes.
const (
	ClassOther       Class = iota // the service refused for a reason of its own: no use to retry
	ClassNotFound                 // no such object, or no such upload
	ClassNoBucket                 // no such bucket or container
	ClassExists                   // there is an object, and the request was for none
	ClassRange                    // the object ends before the range that was asked for
	ClassDenied                   // credentials are missing, wrong or not enough
	ClassThrottled                // the service asks for less: 429, 503 SlowDown, ServerBusy
	ClassUnavailable              // the service failed for now: other 5xx
	ClassNetwork                  // no answer, half an answer, or one that makes no sense
	ClassCorrupt                  // bytes arrived that do not have their checksum
	ClassFull                     // the bucket or account has no room
	ClassTimeout                  // a try took too long
	ClassCanceled                 // the caller's context ended
)

var classNames = [...]string{
	"refused", "not found", "no bucket", "exists", "out of range", "denied", "throttled",
	"unavailable", "network", "corrupt", "full", "timeout", "canceled",
}

// String names the class.
func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("Class(%d)", uint8(c))
}

// Retryable reports whether the same request may succeed when it is made again.
func (c Class) Retryable() bool {
	switch c {
	case ClassThrottled, ClassUnavailable, ClassNetwork, ClassCorrupt, ClassTimeout:
		return true
	}
	return false
}

// sentinel is the failure of package xfer that the class is.
func (c Class) sentinel() error {
	switch c {
	case ClassNotFound, ClassNoBucket:
		return xfer.ErrNotFound
	case ClassRange:
		return xfer.ErrShort
	case ClassCanceled:
		return xfer.ErrCanceled
	case ClassExists:
		return ErrExists
	case ClassCorrupt:
		return ErrCorrupt
	}
	return xfer.ErrUnavailable
}

// Failures that package xfer has no sentinel for.
var (
	// ErrExists: there is an object of this key, and the call was to make a new one.
	ErrExists = errors.New("object exists")
	// ErrCorrupt: bytes did not have their checksum, however often they were moved.
	ErrCorrupt = errors.New("checksum mismatch")
)

// Error is a request of a service that failed. errors.Is finds the sentinel of its class
// and its cause.
type Error struct {
	Op      string // such as "get"
	Where   string // the bucket, as Client.String writes it
	Key     string // empty when it is about no object
	Class   Class
	Status  int           // of HTTP; 0 when there was no answer
	Code    string        // the service's own, such as "SlowDown"
	Request string        // the service's id of the request, for its operators
	After   time.Duration // how long the service asks to wait; 0 when it does not
	Hint    string        // which setting to change, where that is known
	Err     error         // the cause; may be nil
}

// Error writes operation, place, class, code, request id, hint and cause.
func (e *Error) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %s", e.Op, e.Where)
	if e.Key != "" {
		fmt.Fprintf(&s, " %q", e.Key)
	}
	fmt.Fprintf(&s, ": %s", e.Class)
	sep := " ("
	for _, part := range []struct{ name, value string }{{"status", statusText(e.Status)}, {"code", e.Code}, {"request", e.Request}} {
		if part.value != "" {
			fmt.Fprintf(&s, "%s%s %s", sep, part.name, part.value)
			sep = ", "
		}
	}
	if sep == ", " {
		s.WriteString(")")
	}
	if e.Hint != "" {
		fmt.Fprintf(&s, ": %s", e.Hint)
	}
	if e.Err != nil {
		fmt.Fprintf(&s, ": %v", e.Err)
	}
	return s.String()
}

func statusText(status int) string {
	if status == 0 {
		return ""
	}
	return fmt.Sprint(status)
}

// Unwrap gives the sentinel and the cause.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Class.sentinel()}
	}
	return []error{e.Class.sentinel(), e.Err}
}

// ClassOf is the class of an error; ClassOther when it is none of a request.
func ClassOf(err error) Class {
	var e *Error
	if errors.As(err, &e) {
		return e.Class
	}
	return ClassOther
}
