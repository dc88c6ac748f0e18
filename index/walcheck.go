package index

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// Replay ends a log at the first chunk that is not whole, as it has to after a
// crash. A chunk also says how much of the log was synced when it was written, so
// one that stands behind the end can prove that the end is damage. Pebble looks for
// such a chunk, but not in the block of the damaged one: there one flipped bit costs,
// in silence, every commit behind it, which is up to 32 KiB of them. checkLog looks
// everywhere.

// Of the format of Pebble's logs.
const (
	logBlock = 32 << 10 // no chunk goes past the end of a block

	logSyncKinds  = 9 // the first kind of chunk that says what was synced
	logLastKind   = 12
	logSyncHeader = 19
)

// logHeaders are the lengths of headers by the kind of chunk: plain ones, ones with
// the number of the log, and ones with what was synced too.
var logHeaders = [logLastKind + 1]int{0, 7, 7, 7, 7, 11, 11, 11, 11, logSyncHeader, logSyncHeader, logSyncHeader, logSyncHeader}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// readLog returns a log for replay. It fails with block.ErrCorrupt when the log has lost
// something that was synced before its last sync. Damage of what came later cannot be
// told from a crash, so that a disk that gives other bytes once than at another time
// would cost the last commits: it is read twice. What is replayed are the very bytes
// that were checked.
func readLog(v vfs.FS, path string) ([]byte, error) {
	n, err := strconv.ParseUint(strings.TrimSuffix(v.PathBase(path), ".log"), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("number of log %s: %w", path, err)
	}
	var log []byte
	if err := readWhole(v, path, func(b []byte) error { log = append(log, b...); return nil }); err != nil {
		return nil, err
	}
	at := 0
	if err := readWhole(v, path, func(b []byte) error {
		if !bytes.HasPrefix(log[at:], b) {
			return fmt.Errorf("%w: log %s reads differently at %d the second time", block.ErrUnavailable, path, at)
		}
		at += len(b)
		return nil
	}); err != nil {
		return nil, err
	}
	if at != len(log) {
		return nil, fmt.Errorf("%w: log %s has %d bytes, and the second time %d", block.ErrUnavailable, path, len(log), at)
	}
	if end, synced := checkLog(log, uint32(n)); synced > end { // chunks have the number's low half
		return nil, fmt.Errorf("%w: log %s is damaged at %d, and %d bytes of it were synced: a repair can make the catalog anew", block.ErrCorrupt, path, end, synced)
	}
	return log, nil
}

// readWhole hands a file to use, a block at a time.
func readWhole(v vfs.FS, path string, use func([]byte) error) (err error) {
	f, err := v.Open(path, vfs.SequentialReadsOption)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	buf := make([]byte, logBlock)
	for {
		n, err := io.ReadFull(f, buf)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("read log: %w", err)
		}
		if err := use(buf[:n]); err != nil || n < logBlock {
			return err
		}
	}
}

// checkLog returns where replay of the log with the given number ends, and how much of it
// was synced by what chunks behind that say: more, when it is damaged.
func checkLog(log []byte, number uint32) (end, synced int64) {
	whole := true
	for base := 0; base < len(log); base += logBlock {
		b := log[base:min(base+logBlock, len(log))]
		from := 0
		if whole {
			var n int
			n, from = wholeChunks(b, number)
			end = int64(base + n)
			whole = n == len(b)
		}
		if !whole {
			synced = max(synced, syncedIn(b, from, number))
		}
	}
	return end, synced
}

// wholeChunks returns where the chunks of a block end that are whole, which is the
// block's length when all are, and where the next one may begin.
func wholeChunks(b []byte, number uint32) (end, next int) {
	at := 0
	for at < len(b) {
		n, ok := chunkAt(b[at:], number)
		if !ok {
			break
		}
		at += n
	}
	// What is too short for another chunk is filled with zeros.
	if rest := b[at:]; len(rest) < logSyncHeader && strings.Trim(string(rest), "\x00") == "" {
		return len(b), len(b)
	}
	return at, at + 1
}

// chunkAt returns the length of the chunk that b begins with, if it is whole and of
// the log with the given number.
func chunkAt(b []byte, number uint32) (n int, ok bool) {
	if len(b) < logHeaders[1] {
		return 0, false
	}
	kind := int(b[6])
	if kind == 0 || kind > logLastKind {
		return 0, false
	}
	header := logHeaders[kind]
	n = header + int(binary.LittleEndian.Uint16(b[4:]))
	if n > len(b) || header > logHeaders[1] && binary.LittleEndian.Uint32(b[7:]) != number {
		return 0, false
	}
	sum := crc32.Checksum(b[6:n], castagnoli)
	return n, binary.LittleEndian.Uint32(b) == (sum>>15|sum<<17)+0xa282ead8
}

// syncedIn is the most that any chunk of a block, from an offset in it on, says was
// synced of the log with the given number. Where chunks begin behind a damaged one
// is not known.
func syncedIn(b []byte, from int, number uint32) (synced int64) {
	for at := from; at+logSyncHeader <= len(b); at++ {
		if kind := b[at+6]; kind < logSyncKinds || kind > logLastKind {
			continue
		}
		if _, ok := chunkAt(b[at:], number); ok {
			synced = max(synced, int64(binary.LittleEndian.Uint64(b[at+11:])))
		}
	}
	return synced
}
