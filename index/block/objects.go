package block

import "time"

// ObjectSweep tells how far the sweep of a bucket is, or how the last one ended. It
// compares the bucket with the catalog, and counts what it did about the differences, also
// over restarts, until the next one begins; that one's counters begin with what one that
// was interrupted has done.
type ObjectSweep struct {
	Bucket  string    // URL without secrets
	Started time.Time // zero: never
	Ended   time.Time // zero while it runs, or waits to go on
	Listed  int64     // objects that were listed
	// Orphans are objects that this store wrote and its catalog does not know, or in which
	// nothing lives by the bucket's own word: they were removed.
	Orphans, OrphanBytes int64
	Missing              int64 // objects of the catalog that are not there: their blocks were dropped
	Lost                 int64 // those blocks
	Expired              int64 // blocks whose time has passed, dropped
	// Rewritten are objects of which less than half was alive: what was has gone into others.
	Rewritten, Moved, MovedBytes int64
	Error                        string // why it does not go on now; it will be tried again
}

// Running reports whether the sweep is not at its end.
func (s *ObjectSweep) Running() bool { return !s.Started.IsZero() && s.Ended.IsZero() }

// ObjectImport tells how far an import of a bucket is.
type ObjectImport struct {
	Bucket     string // URL without secrets
	Done       bool   // it is at its end, and what it has found is served
	Objects    int64  // that were read: those that the catalog did not know
	Namespaces int64  // that were made
	Blocks     int64  // that the catalog knows since
	Bytes      int64  // of their payload
	Known      int64  // blocks that it knew already
	Dead       int64  // blocks that were deleted or cleared since they were written, or whose time has passed
	Refused    int64  // blocks that disagree with what is here: with another descriptor of their namespace, or other bytes
	Failed     int64  // objects that cannot be used: damaged, or of a newer format
	Problems   []string
}

// ObjectInfo tells of an object that the catalog knows.
type ObjectInfo struct {
	Bucket    string // URL without secrets
	Key       string // below the bucket's prefix
	Namespace string // by name; empty when it was dropped
	Own       bool   // this store wrote it
	Bytes     int64  // its length
	Blocks    int64  // that were put into it
	Live      int64  // of those, the ones that it is read for
	LiveBytes int64  // of their payload
	Packed    time.Time
}

// ObjectUsage sums up the objects of a namespace in a bucket.
type ObjectUsage struct {
	Bucket    string // URL without secrets
	Namespace string // by name; empty for those that were dropped
	Objects   int64
	Bytes     int64
	Blocks    int64
	Live      int64
	LiveBytes int64
}
