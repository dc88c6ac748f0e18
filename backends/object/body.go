package object

import (
	"errors"
	"fmt"
	"io"
	"sync"
)

// Body gives the bytes of a Vector to an HTTP client. It is an io.ReadSeekCloser, so that
// an SDK can take its length and checksum, and read it again.
//
// HTTP clients read a body in goroutines of their own, which may outlive the call: after
// Detach, which whoever made the Body calls before it gives the memory back, nothing
// reads the memory any more.
type Body struct {
	size int64
	mu   struct {
		sync.Mutex
		v        Vector
		off      int64
		piece    int   // the one that off is in
		start    int64 // where that piece begins
		detached bool
	}
}

var errDetached = errors.New("the memory of the body was given back")

// NewBody makes a body of v.
func NewBody(v Vector) *Body {
	b := &Body{size: v.Len()}
	b.mu.v = v
	return b
}

// Read copies out of the memory. There is no WriteTo: a write to a connection that is
// stuck would hold the memory.
func (b *Body) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.detached {
		return 0, errDetached
	}
	n := 0
	for n < len(p) && b.mu.piece < len(b.mu.v) {
		piece := b.mu.v[b.mu.piece]
		k := copy(p[n:], piece[b.mu.off-b.mu.start:])
		n += k
		b.mu.off += int64(k)
		if b.mu.off == b.mu.start+int64(len(piece)) {
			b.mu.start += int64(len(piece))
			b.mu.piece++
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Seek is io.Seeker's.
func (b *Body) Seek(off int64, whence int) (int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch whence {
	case io.SeekStart:
	case io.SeekCurrent:
		off += b.mu.off
	case io.SeekEnd:
		off += b.size
	}
	if off < 0 || off > b.size {
		return 0, fmt.Errorf("seek to %d of %d bytes", off, b.size)
	}
	b.mu.off, b.mu.start, b.mu.piece = off, 0, 0
	for b.mu.piece < len(b.mu.v) && off >= b.mu.start+int64(len(b.mu.v[b.mu.piece])) {
		b.mu.start += int64(len(b.mu.v[b.mu.piece]))
		b.mu.piece++
	}
	return off, nil
}

// Close does nothing: an SDK may close a body and read it again.
func (b *Body) Close() error { return nil }

// Detach takes the memory away; later reads fail.
func (b *Body) Detach() {
	b.mu.Lock()
	b.mu.detached = true
	b.mu.v = nil
	b.mu.Unlock()
}

// ReadInto fills dst from r, which is read by the calling goroutine only, and says how
// many bytes came. io.ErrUnexpectedEOF when r ends before.
func ReadInto(r io.Reader, dst Vector) (int64, error) {
	var total int64
	for _, b := range dst {
		n, err := io.ReadFull(r, b)
		total += int64(n)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return total, err
		}
	}
	return total, nil
}
