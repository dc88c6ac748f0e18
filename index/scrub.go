package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index/block"
)

// ScrubRecord is what the store knows of its scrub after a restart: see
// block.ScrubStatus. Slab and Offset say where it goes on.
type ScrubRecord struct {
	State    block.ScrubState
	Started  time.Time
	Ended    time.Time // zero while it runs
	Slab     [16]byte  // SlabRecord.ID
	Offset   int64     // on that slab
	Done     int64     // bytes
	Blocks   int64
	Damaged  int64
	Repaired int64
	Dropped  int64
	Stale    int64
	Error    string // at most MaxScrubError bytes; PutScrubState cuts it
}

// MaxScrubError is how long the text of a scrub's error may be.
const MaxScrubError = 1024

var scrubKey = []byte{kindScrub}

// scrubFixed is the length of what precedes the error: version, state, the two
// times, Slab, Offset and the six counters.
const scrubFixed = 1 + 1 + 2*timeBytes + 16 + 8 + 6*8

func (s *ScrubRecord) counters() [6]*int64 {
	return [...]*int64{&s.Done, &s.Blocks, &s.Damaged, &s.Repaired, &s.Dropped, &s.Stale}
}

func (s *ScrubRecord) encode() []byte {
	b := []byte{scrubVersion, byte(s.State)}
	b = appendTime(b, s.Started)
	b = appendTime(b, s.Ended)
	b = append(b, s.Slab[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Offset))
	for _, n := range s.counters() {
		b = binary.LittleEndian.AppendUint64(b, uint64(*n))
	}
	return seal(scrubKey, append(b, s.Error...))
}

func (s *ScrubRecord) decode(value []byte) error {
	body, err := open("scrub record", scrubKey, value, scrubVersion)
	if err != nil {
		return err
	}
	bad := fmt.Errorf("scrub record: %w: value of %d bytes", block.ErrCorrupt, len(value))
	if len(body) < scrubFixed || len(body) > scrubFixed+MaxScrubError || body[1] > byte(block.ScrubFailed) {
		return bad
	}
	r := ScrubRecord{State: block.ScrubState(body[1])}
	var ok [2]bool
	r.Started, ok[0] = readTime(body[2:])
	r.Ended, ok[1] = readTime(body[2+timeBytes:])
	if !ok[0] || !ok[1] {
		return bad
	}
	rest := body[2+2*timeBytes:]
	r.Slab = [16]byte(rest)
	r.Offset = int64(binary.LittleEndian.Uint64(rest[16:]))
	for i, n := range r.counters() {
		*n = int64(binary.LittleEndian.Uint64(rest[24+8*i:]))
	}
	r.Error = string(body[scrubFixed:])
	*s = r
	return nil
}

// timeBytes is the length of a time: Unix seconds and nanoseconds.
const timeBytes = 8 + 4

func appendTime(b []byte, t time.Time) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(t.Unix()))
	return binary.LittleEndian.AppendUint32(b, uint32(t.Nanosecond()))
}

func readTime(b []byte) (time.Time, bool) {
	sec, nanos := int64(binary.LittleEndian.Uint64(b)), binary.LittleEndian.Uint32(b[8:])
	return time.Unix(sec, int64(nanos)).UTC(), nanos < 1e9
}

// ScrubState reads what PutScrubState wrote, if it has.
func (c *Catalog) ScrubState() (ScrubRecord, bool, error) {
	var s ScrubRecord
	if err := c.enter(); err != nil {
		return s, false, err
	}
	defer c.leave()
	value, closer, err := c.now().db.Get(scrubKey)
	if errors.Is(err, pebble.ErrNotFound) {
		return s, false, nil
	}
	if err != nil {
		return s, false, pebbleErr("read scrub record", err)
	}
	err = s.decode(value)
	if e := closer.Close(); err == nil && e != nil {
		err = pebbleErr("read scrub record", e)
	}
	return s, err == nil, err
}

// PutScrubState replaces the scrub's record, synced.
func (c *Catalog) PutScrubState(s ScrubRecord) error {
	if s.State > block.ScrubFailed {
		return fmt.Errorf("put scrub record: %w: state %d", block.ErrInvalid, s.State)
	}
	if len(s.Error) > MaxScrubError {
		s.Error = strings.ToValidUTF8(s.Error[:MaxScrubError], "")
	}
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	if err := c.now().put(scrubKey, s.encode()); err != nil {
		return fmt.Errorf("put scrub record: %w", err)
	}
	return nil
}
