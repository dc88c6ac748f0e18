package session

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
)

// chunkTable are the chunks of a partitioned memory that the server has passed. Their
// files lie in a socket until a place in one of them is told.
type chunkTable struct {
	sock *os.File
	raw  interface{ Control(func(fd uintptr)) error }
	log  *slog.Logger
	mu   struct {
		sync.Mutex
		by   map[uint32]*passedChunk
		last uint32 // highest number that came
	}
}

// passedChunk is one of them.
type passedChunk struct {
	number uint32
	m      *arena.Shared // nil: it could not be mapped
	users  int
	gone   bool // it is unmapped with the last user
}

// newChunkTable takes the socket over that came with the welcome.
func newChunkTable(fd int, log *slog.Logger) (*chunkTable, error) {
	t := &chunkTable{sock: os.NewFile(uintptr(fd), "memory files"), log: log}
	t.mu.by = map[uint32]*passedChunk{}
	var err error
	if t.raw, err = t.sock.SyscallConn(); err != nil {
		return nil, errors.Join(err, t.sock.Close())
	}
	return t, nil
}

// use finds a chunk, and keeps it mapped until done. It is nil when the server has not
// passed it. One that is gone, since its caller was held up for longer than a lease
// lasts, is as one that could not be mapped.
func (t *chunkTable) use(number uint32) *passedChunk {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.mu.by[number]
	for c == nil && t.receive() {
		c = t.mu.by[number]
	}
	if c == nil && number <= t.mu.last {
		c = &passedChunk{number: number, gone: true}
	}
	if c != nil {
		c.users++
	}
	return c
}

// done ends a use; nil is allowed.
func (t *chunkTable) done(c *passedChunk) {
	if c == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.users--; c.gone && c.users == 0 {
		t.unmap(c)
	}
}

// receive takes the next file out of the socket, if there is one. It needs the lock.
func (t *chunkTable) receive() bool {
	b := make([]byte, packetBytes)
	oob := make([]byte, unix.CmsgSpace(4))
	var n, oobn int
	var err error
	cerr := t.raw.Control(func(fd uintptr) {
		for {
			if n, oobn, _, _, err = unix.Recvmsg(int(fd), b, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	if err = errors.Join(err, cerr); err != nil || n == 0 {
		return false // nothing is there, or will come
	}
	files, err := filesIn(oob[:oobn])
	defer closeFiles(files)
	if err == nil && len(files) != 1 {
		err = fmt.Errorf("%d files", len(files))
	}
	if err == nil {
		err = t.take(b[:n], files[0])
	}
	if err != nil {
		t.log.Warn("a chunk of the server's memory", "err", err)
	}
	return true
}

func filesIn(oob []byte) (files []int, err error) {
	all, err := unix.ParseSocketControlMessage(oob)
	for i := range all {
		fds, rerr := unix.ParseUnixRights(&all[i])
		files, err = append(files, fds...), errors.Join(err, rerr)
	}
	return files, err
}

// take maps a chunk, and forgets those that are gone. It needs the lock.
func (t *chunkTable) take(packet []byte, fd int) error {
	m, err := parsePacket(packet)
	if err != nil {
		return err
	}
	for _, n := range m.Gone {
		if c := t.mu.by[n]; c != nil {
			delete(t.mu.by, n)
			if c.gone = true; c.users == 0 {
				t.unmap(c)
			}
		}
	}
	if t.mu.by[m.Chunk] != nil {
		return fmt.Errorf("chunk %d was passed twice", m.Chunk)
	}
	c := &passedChunk{number: m.Chunk}
	if c.m, err = arena.MapFile(fd, c64(m.Length)); err != nil {
		t.log.Warn("a chunk of the server's memory is done without", "chunk", m.Chunk, "err", err)
	}
	t.mu.by[m.Chunk] = c
	t.mu.last = max(t.mu.last, m.Chunk)
	return nil
}

func (t *chunkTable) unmap(c *passedChunk) {
	if c.m == nil {
		return
	}
	if err := c.m.Close(); err != nil {
		t.log.Warn("a chunk of the server's memory", "chunk", c.number, "err", err)
	}
}

// close unmaps everything; nobody uses it. nil is allowed.
func (t *chunkTable) close() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for n, c := range t.mu.by {
		delete(t.mu.by, n)
		t.unmap(c)
	}
	return t.sock.Close()
}
