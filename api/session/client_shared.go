package session

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
)

// step is how many bytes are copied before they are hashed: they are in the cache
// then.
const step = 256 << 10

// mapChunks maps the files of a store's memory, all or none, for reading only where the
// server passed them so.
func mapChunks(files []int, lengths []uint64) (chunks []*arena.Shared, err error) {
	if len(files) != len(lengths) || len(files) == 0 {
		return nil, fmt.Errorf("server passed %d files and told the lengths of %d", len(files), len(lengths))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unmapChunks(chunks))
			chunks = nil
		}
	}()
	for i, fd := range files {
		s, err := arena.MapFile(fd, c64(lengths[i]))
		if err != nil {
			return chunks, fmt.Errorf("chunk %d of the store's memory: %w", i, err)
		}
		chunks = append(chunks, s)
	}
	return chunks, nil
}

func unmapChunks(chunks []*arena.Shared) error {
	var errs []error
	for _, s := range chunks {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

func closeFiles(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd) // a descriptor of a memory file: nothing is lost
	}
}

// shared is a piece of the store's memory.
type shared struct {
	mem []byte       // nil: this side could not map it
	in  *passedChunk // keeps it mapped until letGo; nil: it stays as long as the client
}

// at is a place in the store's memory. It is not ok when there is no such place, or when
// it is to be written to and may not be.
func (c *Client) at(chunk uint32, offset uint64, n int, write bool) (p shared, ok bool) {
	var m *arena.Shared
	switch {
	case c.chunks != nil:
		p.in = c.chunks.use(chunk)
		if p.in == nil {
			return p, false
		}
		m = p.in.m
	case c.memory != nil && int64(chunk) < int64(len(c.memory)):
		m = c.memory[chunk]
	case c.passed() && c.memory == nil: // none could be mapped
	default:
		return p, false
	}
	if m == nil {
		return p, true
	}
	b := m.Bytes()
	if offset > uint64(len(b)) || uint64(n) > uint64(len(b))-offset || write && !m.Writable() {
		c.letGo(p)
		return p, false
	}
	p.mem = b[offset : offset+uint64(n) : offset+uint64(n)]
	return p, true
}

// letGo ends the use of a place.
func (c *Client) letGo(p shared) {
	if p.in != nil {
		c.chunks.done(p.in)
	}
}
