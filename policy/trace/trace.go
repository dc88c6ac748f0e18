// Package trace reads and records request traces: files of one JSON object a line, plain or
// gzipped, in the format of the Mooncake traces.
//
// Each line is a request: timestamp (milliseconds from the start of the file),
// input_length and output_length (tokens), hash_ids (the prompt's blocks, root
// first; an id stands for its whole prefix) and, optionally, session_id (a
// string or a number). Other fields are ignored.
package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// MaxLineBytes is the longest line that is read.
const MaxLineBytes = 16 << 20

const (
	maxTokens   = 1 << 40
	maxMilliSec = math.MaxInt64 / int64(time.Millisecond)
)

// Request is one line of a trace.
type Request struct {
	Time         time.Duration // from the start of the trace
	InputLength  int           // tokens
	OutputLength int           // tokens
	HashIDs      []uint64      // blocks of the prompt, root first
	Session      string        // empty when the trace names none
}

// Reader reads a trace from its beginning to its end. One goroutine uses it.
type Reader struct {
	name  string
	file  *os.File // nil when made by NewReader
	src   *bufio.Reader
	line  int // number of the line read last, from 1
	buf   []byte
	ended error // what Next returns from now on
}

// Open opens a trace file. Whether it is gzipped is seen from its first bytes.
func Open(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	r, err := NewReader(path, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	r.file = f
	return r, nil
}

// NewReader reads a trace from src, plain or gzipped. Errors call it name.
func NewReader(name string, src io.Reader) (*Reader, error) {
	b := bufio.NewReaderSize(src, 64<<10)
	head, err := b.Peek(2)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("read trace %s: %w", name, err)
	}
	if bytes.Equal(head, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("read trace %s: %w", name, err)
		}
		b = bufio.NewReaderSize(z, 64<<10)
	}
	return &Reader{name: name, src: b}, nil
}

// Next returns the next request, or io.EOF at the end. A line that is not a
// request fails with block.ErrInvalid, the number of the line and what is wrong
// with it; after an error, Next returns it again.
func (r *Reader) Next() (*Request, error) {
	if r.ended != nil {
		return nil, r.ended
	}
	text, err := r.readLine()
	if err == io.EOF {
		r.ended = err
		return nil, err
	}
	var req *Request
	if err == nil {
		req, err = parse(text)
	}
	if err != nil {
		r.ended = fmt.Errorf("read trace %s: line %d: %w", r.name, r.line, err)
		return nil, r.ended
	}
	return req, nil
}

// Close closes the file. It is safe to call twice.
func (r *Reader) Close() error {
	if r.ended == nil {
		r.ended = fmt.Errorf("read trace %s: %w", r.name, block.ErrClosed)
	}
	if r.file == nil {
		return nil
	}
	f := r.file
	r.file = nil
	return f.Close()
}

// readLine returns the next line without its end, valid until the next call.
// The last line needs no end.
func (r *Reader) readLine() ([]byte, error) {
	r.line++
	r.buf = r.buf[:0]
	for {
		part, err := r.src.ReadSlice('\n')
		if len(r.buf)+len(part) > MaxLineBytes {
			return nil, fmt.Errorf("%w: longer than %d bytes", block.ErrInvalid, MaxLineBytes)
		}
		r.buf = append(r.buf, part...)
		switch {
		case err == bufio.ErrBufferFull:
			continue
		case err == io.EOF && len(r.buf) == 0:
			return nil, io.EOF
		case err != nil && err != io.EOF:
			return nil, err
		}
		return bytes.TrimSuffix(bytes.TrimSuffix(r.buf, []byte("\n")), []byte("\r")), nil
	}
}

// record is a line as JSON has it. Absent and null fields stay nil.
type record struct {
	Timestamp    *milliseconds `json:"timestamp"`
	InputLength  *inputLength  `json:"input_length"`
	OutputLength *outputLength `json:"output_length"`
	HashIDs      *hashIDs      `json:"hash_ids"`
	SessionID    *session      `json:"session_id"`
}

func parse(text []byte) (*Request, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, fmt.Errorf("%w: empty, want a JSON object", block.ErrInvalid)
	}
	var rec record
	if err := json.Unmarshal(text, &rec); err != nil {
		return nil, explain(err)
	}
	for _, f := range []struct {
		name  string
		found bool
	}{
		{"timestamp", rec.Timestamp != nil},
		{"input_length", rec.InputLength != nil},
		{"output_length", rec.OutputLength != nil},
		{"hash_ids", rec.HashIDs != nil},
	} {
		if !f.found {
			return nil, fmt.Errorf("%w: field %s is missing or null", block.ErrInvalid, f.name)
		}
	}
	req := &Request{
		Time:         time.Duration(*rec.Timestamp),
		InputLength:  int(*rec.InputLength),
		OutputLength: int(*rec.OutputLength),
		HashIDs:      *rec.HashIDs,
	}
	if rec.SessionID != nil {
		req.Session = string(*rec.SessionID)
	}
	return req, nil
}

// explain says what is wrong in the words of a trace's author.
func explain(err error) error {
	var (
		syntax *json.SyntaxError
		kind   *json.UnmarshalTypeError
	)
	switch {
	case errors.Is(err, block.ErrInvalid):
		return err
	case errors.As(err, &syntax):
		return fmt.Errorf("%w: not JSON: %v at byte %d", block.ErrInvalid, syntax, syntax.Offset)
	case errors.As(err, &kind):
		return fmt.Errorf("%w: a JSON %s, want an object", block.ErrInvalid, kind.Value)
	}
	return fmt.Errorf("%w: %v", block.ErrInvalid, err)
}

// The fields' types below are given valid JSON values.

type milliseconds time.Duration

func (m *milliseconds) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseFloat(string(b), 64)
	if err != nil || !(v >= 0 && v < float64(maxMilliSec)) {
		return fmt.Errorf("%w: timestamp %s: want milliseconds, a number of 0 or more", block.ErrInvalid, short(b))
	}
	// Whole and broken milliseconds apart, since a float64 does not hold every
	// nanosecond of a long trace.
	whole, part := math.Modf(v)
	*m = milliseconds(time.Duration(whole)*time.Millisecond + time.Duration(part*float64(time.Millisecond)))
	return nil
}

type inputLength int

func (n *inputLength) UnmarshalJSON(b []byte) error {
	v, err := parseTokens("input_length", b)
	*n = inputLength(v)
	return err
}

type outputLength int

func (n *outputLength) UnmarshalJSON(b []byte) error {
	v, err := parseTokens("output_length", b)
	*n = outputLength(v)
	return err
}

func parseTokens(field string, b []byte) (uint64, error) {
	v, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil || v > maxTokens {
		return 0, fmt.Errorf("%w: %s %s: want a whole number of tokens from 0 to %d", block.ErrInvalid, field, short(b), int64(maxTokens))
	}
	return v, nil
}

type hashIDs []uint64

func (ids *hashIDs) UnmarshalJSON(b []byte) error {
	if b[0] != '[' {
		return fmt.Errorf("%w: hash_ids %s: want an array", block.ErrInvalid, short(b))
	}
	b = b[1 : len(b)-1]
	*ids = make(hashIDs, 0, bytes.Count(b, []byte(","))+1)
	if len(bytes.TrimSpace(b)) == 0 {
		return nil
	}
	for item := range bytes.SplitSeq(b, []byte(",")) {
		item = bytes.TrimSpace(item)
		v, err := strconv.ParseUint(string(item), 10, 64)
		if err != nil {
			return fmt.Errorf("%w: hash_ids[%d] is %s: want a whole number from 0 to %d", block.ErrInvalid, len(*ids), short(item), uint64(math.MaxUint64))
		}
		*ids = append(*ids, v)
	}
	return nil
}

type session string

func (s *session) UnmarshalJSON(b []byte) error {
	switch c := b[0]; {
	case c == '"':
		return json.Unmarshal(b, (*string)(s))
	case c == '-' || c >= '0' && c <= '9':
		*s = session(b)
		return nil
	}
	return fmt.Errorf("%w: session_id %s: want a string or a number", block.ErrInvalid, short(b))
}

// short quotes a value of the trace, cut so that it fits a message.
func short(b []byte) string {
	const most = 40
	if len(b) > most {
		return strconv.Quote(string(b[:most])) + "..."
	}
	return string(b)
}
