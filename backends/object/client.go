package object

import (
	"context"
	"time"
)

// Client is one bucket of a service, or the part of it below a prefix: what an SDK is
// wrapped in. It is blocking and dumb. A call is one request of the service, tried once:
// retries, budgets, concurrency, parts and counters are the Backend's.
//
// What every implementation guarantees:
//
//   - It may be used by many goroutines at once.
//   - Keys are relative to the prefix, and come back so.
//   - Memory in a Vector is used in place and is quiet when the call returns, whatever
//     the service or the connection does: nothing reads it or writes it any more.
//   - When ctx ends the call returns within 100 ms.
//   - A failure is an *Error with its Class; code and request id where the service gave
//     them. Lengths are verified: a short answer is ClassNetwork.
//   - A connection that a failed call leaves in doubt is closed, not reused.
type Client interface {
	// Name is the kind of the service, such as "s3": the Backend's name too.
	Name() string

	// String writes the bucket and the prefix as a URL without secrets, for error texts.
	String() string

	// Limits says what the service accepts. It is constant and does no I/O.
	Limits() Limits

	// Check looks whether the bucket exists and may be used, by a request that changes
	// nothing. The error says which setting to change. ClassNoBucket, ClassDenied.
	Check(ctx context.Context) error

	// Head says what the service knows of an object. ClassNotFound.
	Head(ctx context.Context, key string) (Info, error)

	// Get reads dst.Len() bytes at off into dst. With whole, which needs off 0, the caller
	// believes that this is all of the object, and a service that knows the checksum of
	// whole objects only can tell it. ClassNotFound; ClassRange when off+dst.Len() is
	// behind the end, with Got.Bytes what was read before the end. The bytes are compared
	// with what checksum the service gave for them: ClassCorrupt.
	Get(ctx context.Context, key string, off int64, dst Vector, whole bool) (Got, error)

	// Put makes or replaces an object, whole. The service verifies sum, which Sum(src)
	// gives: ClassCorrupt when the bytes that arrive do not have it. With ifAbsent it
	// makes the object only where there is none: ClassExists.
	Put(ctx context.Context, key string, src Vector, sum Sum, ifAbsent bool) (Info, error)

	// Begin begins an object of many parts. It may be no request.
	Begin(ctx context.Context, key string) (Upload, error)

	// PutPart stores one part; number counts from 1. Parts may be stored in any order, at
	// the same time, and again. ClassCorrupt as in Put.
	PutPart(ctx context.Context, u Upload, number int, src Vector, sum Sum) (Part, error)

	// Complete makes the object of all parts, in their order. The object appears at once
	// and whole. ClassExists with ifAbsent.
	Complete(ctx context.Context, u Upload, parts []Part, ifAbsent bool) (Info, error)

	// Abort gives up an upload and its parts. One that does not exist is no error.
	Abort(ctx context.Context, u Upload) error

	// Delete removes up to Limits.DeleteKeys objects. errs has one entry for each key, nil
	// where the object is gone, which one that never was is too; err is for the call as a
	// whole, and errs is nil then.
	Delete(ctx context.Context, keys []string) (errs []error, err error)

	// List gives up to limit objects (Limits.ListKeys when 0 or more than that) whose keys
	// begin with prefix, in the order of keys, from where cursor says: empty at the
	// beginning, then Page.Next.
	List(ctx context.Context, prefix, cursor string, limit int) (Page, error)

	// Sum is the checksum of these bytes by the algorithm that the service verifies.
	Sum(src Vector) Sum

	// Join is the checksum of an object of these parts, the zero Sum when the service
	// knows none for such objects. It does no I/O.
	Join(parts []Part) Sum

	// Close closes idle connections. It is called once, when no call is under way.
	Close() error
}

// Limits is what a service accepts.
type Limits struct {
	PutBytes   int64 // longest object of one Put
	PartBytes  int64 // longest part
	MinPart    int64 // shortest part but for the last
	Parts      int   // most parts of an object
	KeyBytes   int   // longest key, without the prefix
	DeleteKeys int   // most keys of one Delete
	ListKeys   int   // most objects of one List
}

// Sum is a checksum. The zero value is none.
type Sum struct {
	Algorithm Algorithm
	Value     uint64
}

// Algorithm says how a Sum was computed.
type Algorithm uint8

// The algorithms that services verify.
const (
	NoSum  Algorithm = iota
	CRC32C           // Castagnoli; S3
	CRC64            // the one of Azure Storage
)

// String names the algorithm.
func (a Algorithm) String() string {
	switch a {
	case CRC32C:
		return "CRC32C"
	case CRC64:
		return "CRC64"
	}
	return "no checksum"
}

// Info is what a service knows of an object.
type Info struct {
	Key      string
	Bytes    int64
	ETag     string    // changes with the contents
	Modified time.Time // by the service's clock; zero where it did not say
	Sum      Sum       // of the whole object, where the service knows it
}

// Got is what a Get did.
type Got struct {
	Info           // of the object, as far as the answer says it
	N        int64 // bytes that were read into dst; all of it without an error
	Verified bool  // the service gave a checksum of these bytes, and they have it
}

// Upload names an object of many parts that is not complete.
type Upload struct {
	Key string
	ID  string
}

// Part is a part that is stored.
type Part struct {
	Number int
	Bytes  int64
	ETag   string
	Sum    Sum
}

// Page is a piece of a list.
type Page struct {
	Objects []Info
	Next    string // cursor of the next piece; empty at the end
}

// Vector is memory in pieces, one behind the other: what a request gathers its bytes
// from or scatters them to. It is a view of the registered memory, not a copy.
type Vector [][]byte

// Len is the sum of the lengths.
func (v Vector) Len() int64 {
	var n int64
	for _, b := range v {
		n += int64(len(b))
	}
	return n
}

// Slice is the part of v from off on that is n bytes long.
func (v Vector) Slice(off, n int64) Vector {
	var s Vector
	for _, b := range v {
		switch k := int64(len(b)); {
		case off >= k:
			off -= k
			continue
		default:
			b = b[off:min(k, off+n)]
			off = 0
		}
		if n -= int64(len(b)); len(b) > 0 {
			s = append(s, b)
		}
		if n == 0 {
			break
		}
	}
	return s
}
