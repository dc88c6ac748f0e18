package frame

import (
	"errors"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// inBytes is what is read ahead: the next header, with the small messages behind it
// and at worst that many bytes of payload, which are copied.
const inBytes = 4 << 10

// in is the receiving half of a connection, used by one goroutine.
type in struct {
	l       *link
	buf     []byte // what is read ahead is buf[r:w]
	r, w    int
	waiting atomic.Bool  // for the peer
	reads   atomic.Int64 // that brought something

	hover *hover

	// Of the system call under way.
	places [2][]byte
	n      int
	err    error
	try    func(fd uintptr) bool
}

func (i *in) init(l *link) {
	i.l = l
	i.buf = make([]byte, inBytes)
	i.hover = newHover()
	i.try = i.readv // once, since each closure would be an allocation
}

// readv reads without parking and reports whether it had a result.
func (i *in) readv(fd uintptr) bool {
	if i.tryReadv(fd) || i.hover.wait(func() bool { return i.tryReadv(fd) }) {
		return true
	}
	i.waiting.Store(true)
	return false
}

func (i *in) tryReadv(fd uintptr) bool {
	places := i.places[:]
	if len(places[1]) == 0 {
		places = places[:1]
	}
	for {
		i.n, i.err = unix.Readv(int(fd), places)
		switch {
		case i.err == unix.EINTR:
			continue
		case i.err == unix.EAGAIN:
			return false
		case i.err == nil && i.n == 0:
			i.err = io.EOF
		case i.err != nil:
			i.err = os.NewSyscallError("readv", i.err)
		}
		return true
	}
}

// read reads at least one byte into p and, where p is full by that, on into q.
func (i *in) read(p, q []byte) (n int, err error) {
	if i.l.direct {
		i.places = [2][]byte{p, q}
		err = i.l.socket.Read(i.try)
		i.places = [2][]byte{}
		if err == nil {
			n, err = i.n, i.err
		}
	} else {
		i.waiting.Store(true)
		n, err = i.l.c.Read(p)
	}
	i.waiting.Store(false)
	if n > 0 {
		i.reads.Add(1)
		return n, nil
	}
	return 0, err
}

// peek is the next n bytes, at most inBytes. They are valid until the next call.
// io.EOF when there is none.
func (i *in) peek(n int) ([]byte, error) {
	if len(i.buf)-i.r < n {
		i.w = copy(i.buf, i.buf[i.r:i.w])
		i.r = 0
	}
	for i.w-i.r < n {
		got, err := i.read(i.buf[i.w:], nil)
		if err != nil {
			if errors.Is(err, io.EOF) && i.w > i.r {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		i.w += got
	}
	return i.buf[i.r : i.r+n : i.r+n], nil
}

// skip forgets n bytes that were peeked at.
func (i *in) skip(n int) {
	i.r += n
	if i.r == i.w {
		i.r, i.w = 0, 0
	}
}

// full fills p.
func (i *in) full(p []byte) error {
	n := copy(p, i.buf[i.r:i.w])
	i.skip(n)
	for p = p[n:]; len(p) > 0; {
		n, err := i.read(p, i.buf)
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		i.w = max(0, n-len(p)) // it was empty
		p = p[min(n, len(p)):]
	}
	return nil
}
