package index

import (
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// ObjectSweepRecord is what the store knows of a bucket after a restart, beside its
// objects: by which name it writes there, and how far its sweep is; see block.ObjectSweep.
type ObjectSweepRecord struct {
	Bucket uint16 // BucketRecord.Number
	// Writer is in the name of each object that this catalog's store has written. It is the
	// catalog's, not the store's: a catalog that was made anew does not know what was written
	// under the old one, and must not take it for orphans.
	Writer  [8]byte
	Started time.Time // zero: it has never run
	Ended   time.Time // zero: it goes on behind Cursor
	Cursor  string    // of the listing, as the service gave it; empty: at the beginning
	After   string    // the last key before it

	Listed      int64
	Orphans     int64
	OrphanBytes int64
	Missing     int64
	Lost        int64
	Expired     int64
	Rewritten   int64
	Moved       int64
	MovedBytes  int64

	Error string // why it does not go on; at most MaxScrubError bytes, PutObjectSweep cuts it
}

// maxSweepText is how long a cursor or a key may be.
const maxSweepText = 4096

// objectSweepFixed is the length of its value without texts: version, Writer, two times,
// the counters, the lengths of Cursor and After, checksum.
const objectSweepFixed = 1 + 8 + 2*timeBytes + 9*8 + 2 + 2 + checksumBytes

func (r *ObjectSweepRecord) counters() [9]*int64 {
	return [...]*int64{&r.Listed, &r.Orphans, &r.OrphanBytes, &r.Missing, &r.Lost, &r.Expired, &r.Rewritten, &r.Moved, &r.MovedBytes}
}

func objectSweepKey(number uint16) []byte {
	return binary.BigEndian.AppendUint16([]byte{kindObjectSweep}, number)
}

func (r *ObjectSweepRecord) encode() (key, value []byte) {
	key = objectSweepKey(r.Bucket)
	le := binary.LittleEndian
	b := append([]byte{objectSweepVersion}, r.Writer[:]...)
	b = appendTime(b, r.Started)
	b = appendTime(b, r.Ended)
	for _, n := range r.counters() {
		b = le.AppendUint64(b, uint64(*n))
	}
	b = le.AppendUint16(b, uint16(len(r.Cursor)))
	b = le.AppendUint16(b, uint16(len(r.After)))
	b = append(b, r.Cursor...)
	b = append(b, r.After...)
	return key, seal(key, append(b, r.Error...))
}

func (r *ObjectSweepRecord) decode(key, value []byte) error {
	body, err := open("object sweep record", key, value, objectSweepVersion)
	if err != nil {
		return err
	}
	bad := fmt.Errorf("object sweep record %x: %w: value of %d bytes", key, block.ErrCorrupt, len(value))
	const head = objectSweepFixed - checksumBytes
	if len(key) != 3 || key[0] != kindObjectSweep || len(body) < head {
		return bad
	}
	le := binary.LittleEndian
	s := ObjectSweepRecord{Bucket: binary.BigEndian.Uint16(key[1:]), Writer: [8]byte(body[1:])}
	var ok [2]bool
	s.Started, ok[0] = readTime(body[9:])
	s.Ended, ok[1] = readTime(body[9+timeBytes:])
	at := 9 + 2*timeBytes
	for _, n := range s.counters() {
		*n = int64(le.Uint64(body[at:]))
		at += 8
	}
	cursor, after := int(le.Uint16(body[at:])), int(le.Uint16(body[at+2:]))
	rest := string(body[head:])
	if !ok[0] || !ok[1] || cursor > maxSweepText || after > maxSweepText || len(rest) < cursor+after || len(rest)-cursor-after > MaxScrubError {
		return bad
	}
	s.Cursor, s.After, s.Error = rest[:cursor], rest[cursor:cursor+after], rest[cursor+after:]
	*r = s
	return nil
}

// ObjectSweep reads what PutObjectSweep wrote of a bucket, if it has.
func (c *Catalog) ObjectSweep(number uint16) (r ObjectSweepRecord, ok bool, err error) {
	ok, err = c.read("read object sweep record", objectSweepKey(number), r.decode)
	return r, ok, err
}

// PutObjectSweep adds or replaces the record of a bucket's sweep, synced. It fails with
// block.ErrInvalid when Cursor or After is longer than any that services give.
func (c *Catalog) PutObjectSweep(r ObjectSweepRecord) error {
	if len(r.Cursor) > maxSweepText || len(r.After) > maxSweepText {
		return fmt.Errorf("put object sweep record: %w: cursor of %d bytes, key of %d, at most %d", block.ErrInvalid, len(r.Cursor), len(r.After), maxSweepText)
	}
	if len(r.Error) > MaxScrubError {
		r.Error = strings.ToValidUTF8(r.Error[:MaxScrubError], "")
	}
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	key, value := r.encode()
	if err := c.now().put(key, value); err != nil {
		return fmt.Errorf("put object sweep record: %w", err)
	}
	return nil
}
