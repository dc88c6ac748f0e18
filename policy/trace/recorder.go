package trace

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// MinRecordBytes is the least that a recording may take on disk.
const MinRecordBytes = 1 << 20

const (
	// queueRequests and queueBytes bound what waits to be written: what comes while
	// it is full is not recorded.
	queueRequests = 1 << 12
	queueBytes    = 64 << 20
	// writeBytes is how much is written at a time, and less when nothing waits.
	writeBytes = 256 << 10
)

// Recorder writes requests to a file as lines that Reader reads. Keys are hashed with
// a random salt that is never written, so that ids say which blocks are the same in
// one recording, and nothing else. It is safe for concurrent use.
//
// The file holds at most half of the bytes that the recording may take. When it is
// full it is renamed to have ".1" behind its name, in the place of the one that had
// that name, and a new one begins; likewise at the start. Within one recording the
// two behind each other are one trace.
type Recorder struct {
	path  string
	most  int64 // bytes of a file
	log   *slog.Logger
	start time.Time
	salt  [32]byte
	file  *os.File
	size  int64 // of whole lines in file
	buf   []byte
	sick  bool // the last write failed

	queue  chan recorded
	queued atomic.Int64 // bytes of hashes in queue
	done   chan struct{}
	closed struct {
		sync.RWMutex
		yes bool
	}
	err error // of the end

	requests, dropped, bytes atomic.Int64
}

// recorded is a request in the queue.
type recorded struct {
	at      time.Duration
	ns      block.NamespaceID
	tokens  uint32 // in a block
	hashLen int
	hashes  []byte
}

// RecorderStats are counters since the start of a recording.
type RecorderStats struct {
	Requests int64 // written
	Dropped  int64 // not written, because the queue was full or the disk refused them
	Bytes    int64 // written
}

// NewRecorder begins a recording that takes at most so many bytes on disk. It fails
// with block.ErrInvalid for less than MinRecordBytes, and when the file cannot be
// made.
func NewRecorder(path string, bytes int64, log *slog.Logger) (*Recorder, error) {
	if bytes < MinRecordBytes {
		return nil, fmt.Errorf("record %s: %w: %d bytes, at least %d", path, block.ErrInvalid, bytes, int64(MinRecordBytes))
	}
	r := &Recorder{path: path, most: bytes / 2, log: log, start: time.Now(), queue: make(chan recorded, queueRequests), done: make(chan struct{})}
	rand.Read(r.salt[:]) // never fails
	if err := r.rotate(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	go r.run()
	return r, nil
}

// Request records a request: the keys of its blocks in the namespace, root first,
// hashLen bytes each. It does not wait, and keeps nothing of hashes.
func (r *Recorder) Request(ns block.Namespace, hashLen int, hashes []byte) {
	r.closed.RLock()
	defer r.closed.RUnlock()
	if r.closed.yes {
		return
	}
	n := int64(len(hashes))
	if r.queued.Add(n) > queueBytes {
		r.queued.Add(-n)
		r.dropped.Add(1)
		return
	}
	q := recorded{at: time.Since(r.start), ns: ns.ID, tokens: ns.Desc.TokensPerBlock, hashLen: hashLen, hashes: append([]byte(nil), hashes...)}
	select {
	case r.queue <- q:
	default:
		r.queued.Add(-n)
		r.dropped.Add(1)
	}
}

// Stats is a snapshot of the counters.
func (r *Recorder) Stats() RecorderStats {
	return RecorderStats{Requests: r.requests.Load(), Dropped: r.dropped.Load(), Bytes: r.bytes.Load()}
}

// Close writes what is queued and closes the file. Requests after it are ignored. It
// is safe to call twice.
func (r *Recorder) Close() error {
	r.closed.Lock()
	if !r.closed.yes {
		r.closed.yes = true
		close(r.queue)
	}
	r.closed.Unlock()
	<-r.done
	return r.err
}

func (r *Recorder) run() {
	defer close(r.done)
	lines := int64(0)
	for q := range r.queue {
		r.queued.Add(-int64(len(q.hashes)))
		r.append(&q)
		if lines++; len(r.buf) >= writeBytes || len(r.queue) == 0 {
			r.flush(lines)
			lines = 0
		}
	}
	if r.file != nil {
		// A write that failed may have left a part of a line.
		r.err = errors.Join(r.file.Truncate(r.size), r.file.Close())
	}
	s := r.Stats()
	r.log.Info("recorded", "file", r.path, "requests", s.Requests, "dropped", s.Dropped, "bytes", s.Bytes)
}

// append encodes a request.
func (r *Recorder) append(q *recorded) {
	n := len(q.hashes) / q.hashLen
	b := append(r.buf, `{"timestamp": `...)
	b = strconv.AppendInt(b, q.at.Milliseconds(), 10)
	b = append(b, `, "input_length": `...)
	b = strconv.AppendInt(b, int64(n)*int64(q.tokens), 10)
	b = append(b, `, "output_length": 0, "hash_ids": [`...)
	key := append([]byte(nil), r.salt[:]...)
	key = binary.LittleEndian.AppendUint32(key, uint32(q.ns))
	for i := range n {
		if i > 0 {
			b = append(b, ", "...)
		}
		sum := sha256.Sum256(append(key, q.hashes[i*q.hashLen:(i+1)*q.hashLen]...))
		b = strconv.AppendUint(b, binary.LittleEndian.Uint64(sum[:]), 10)
	}
	r.buf = append(b, "]}\n"...)
}

// flush writes the buffer behind the last whole line.
func (r *Recorder) flush(lines int64) {
	n := int64(len(r.buf))
	defer func() { r.buf = r.buf[:0] }()
	err := r.makeRoom(n)
	if err == nil {
		_, err = r.file.WriteAt(r.buf, r.size)
	}
	if err != nil {
		r.dropped.Add(lines)
		if !r.sick {
			r.log.Warn("requests cannot be recorded", "file", r.path, "err", err)
		}
		r.sick = true
		return
	}
	if r.sick {
		r.log.Info("requests are recorded again", "file", r.path, "dropped", r.dropped.Load())
	}
	r.sick = false
	r.size += n
	r.requests.Add(lines)
	r.bytes.Add(n)
}

// makeRoom makes the file able to take n more bytes.
func (r *Recorder) makeRoom(n int64) error {
	if r.file != nil && (r.size == 0 || r.size+n <= r.most) {
		return nil
	}
	if r.file != nil {
		err := errors.Join(r.file.Truncate(r.size), r.file.Close())
		r.file = nil
		if err != nil {
			return err
		}
	}
	return r.rotate()
}

// rotate renames what has the file's name and makes a new file.
func (r *Recorder) rotate() error {
	st, err := os.Lstat(r.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%w: %s is there and is no file", block.ErrInvalid, r.path)
	default:
		if err := os.Rename(r.path, r.path+".1"); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(r.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	r.file, r.size = f, 0
	return nil
}
