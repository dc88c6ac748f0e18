package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/xfer"
)

// A partitioned G2 is memory that others map, of which each may see a part only: each
// extent is a chunk of the arena with a memory file of its own, and has blocks of one
// share. When a chunk passes to another share it gets a new file, so that whoever holds
// on to the old one finds nothing there.

// chunks are the memory files of a partitioned G2.
type chunks struct {
	all []chunk // by extent
	mu  struct {
		sync.Mutex
		byNumber map[uint32]int // of the files that may be opened
		last     uint32
	}
	passed, stuck atomic.Int64 // extents that went to another share, and that could not
}

// chunk is the file of an extent.
type chunk struct {
	number atomic.Uint32 // never given again
	opened atomic.Bool   // somebody was passed the file
}

func newChunks(n int) *chunks {
	c := &chunks{all: make([]chunk, n)}
	c.mu.byNumber = map[uint32]int{}
	for i := range c.all {
		c.renew(i)
	}
	return c
}

// renew gives the file of an extent a number.
func (c *chunks) renew(extent int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.last++
	c.mu.byNumber[c.mu.last] = extent
	c.all[extent].number.Store(c.mu.last)
}

// retire lets nobody open the file of an extent any more.
func (c *chunks) retire(extent int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.byNumber, c.all[extent].number.Load())
}

// Partitioned reports whether G2 is in chunks that are each one share's: see
// Options.Share. Then Chunk of a grant or a loan is a number for OpenChunk, and there is
// no Memory.
func (s *Store) Partitioned() bool { return s.chunks != nil }

// OpenChunk opens the memory file of a chunk that a grant or a loan has named, which
// the caller closes; for reading only without write. It is sealed against any change of
// size. Whoever it is passed to may see, and write, what other blocks of its share there
// are in it, and never another share's. ErrNotFound when the chunk is gone, with all
// that was granted and lent in it; ErrUnavailable when the host has no descriptors.
func (s *Store) OpenChunk(number uint32, write bool) (block.MemoryFile, error) {
	if s.chunks == nil {
		return block.MemoryFile{}, fmt.Errorf("open chunk %d: %w: memory is not partitioned", number, block.ErrInvalid)
	}
	s.chunks.mu.Lock()
	defer s.chunks.mu.Unlock()
	extent, ok := s.chunks.mu.byNumber[number]
	if !ok {
		return block.MemoryFile{}, fmt.Errorf("open chunk %d: %w", number, block.ErrNotFound)
	}
	var fd int
	var err error
	if write {
		fd, err = unix.FcntlInt(uintptr(s.arena.Fd(extent)), unix.F_DUPFD_CLOEXEC, 0)
	} else {
		fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", s.arena.Fd(extent)), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return block.MemoryFile{}, fmt.Errorf("open chunk %d: %w: %w", number, block.ErrUnavailable, err)
	}
	// Before anybody has it. Who is passed it for reading may be able to open it again.
	s.chunks.all[extent].opened.Store(true)
	return block.MemoryFile{Fd: fd, Bytes: int64(len(s.arena.Chunks()[extent]))}, nil
}

// ChunkGone reports whether a chunk has passed to another share, or never was.
func (s *Store) ChunkGone(number uint32) bool {
	s.chunks.mu.Lock()
	defer s.chunks.mu.Unlock()
	_, ok := s.chunks.mu.byNumber[number]
	return !ok
}

// shareIn is the share of a tier in which the blocks of a namespace lie.
func (s *Store) shareIn(t *tier, id block.NamespaceID) uint64 {
	if s.chunks == nil || t != s.g2 {
		return 0
	}
	ns, err := s.names.byID(id)
	if err != nil {
		return 0 // there are no blocks of it, so none are looked for
	}
	return ns.share
}

// withdraw finds an empty extent of another share.
func (v *evictor) withdraw(w want) (at extentAt, ok bool) {
	v.t.mu.Lock()
	defer v.t.mu.Unlock()
	for _, d := range v.t.devs {
		if e, ok := d.slots.Withdraw(w.share, w.size); ok {
			return extentAt{d, e}, true
		}
	}
	return at, false
}

// passOn gives an extent that is withdrawn to a share, with memory that nobody has
// seen. It returns its bytes, or 0 when that cannot be: then it stays whose it was.
func (v *evictor) passOn(at extentAt, share uint64) (freed int64) {
	err := v.s.replaceChunk(at.extent)
	t := v.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		v.s.chunks.stuck.Add(1)
		v.s.log.Warn("memory cannot pass to another share", "extent", at.extent, "err", err)
		share = at.dev.slots.Share(at.extent)
	} else {
		v.s.chunks.passed.Add(1)
		freed = at.dev.slots.ExtentBytes()
	}
	at.dev.slots.Return(at.extent, share)
	t.mu.stuck = false
	t.roomLocked()
	return freed
}

// replaceWait is how long a transfer may take to let go of memory that it is done with.
const replaceWait = 100 * time.Millisecond

// replaceChunk gives an extent in which nobody has a slot new memory. On error it keeps
// the old.
func (s *Store) replaceChunk(extent int) error {
	mem := s.arena.Chunks()[extent]
	l := xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{{Addr: arena.Addr(mem), Len: uint64(len(mem))}}}
	// A transfer whose blocks have all come and gone may not have ended yet. While the
	// memory is registered the kernel may hold its pages, and would go on using these.
	if err := s.deregisterSoon(l); err != nil {
		return err
	}
	s.chunks.retire(extent)
	err := s.arena.Replace(extent)
	if err == nil {
		s.chunks.all[extent].opened.Store(false)
	}
	invariants.Poison(mem) // as every free slot is
	s.chunks.renew(extent)
	if rerr := s.agent.Register(context.Background(), l, nil); rerr != nil {
		// It works with what can be read and written without.
		return errors.Join(err, fmt.Errorf("register %d bytes: %w", len(mem), rerr))
	}
	return err
}

func (s *Store) deregisterSoon(l xfer.DescList) error {
	end := time.NewTimer(replaceWait)
	defer end.Stop()
	again := time.NewTicker(replaceWait / 50)
	defer again.Stop()
	for {
		err := s.agent.Deregister(context.Background(), l)
		if !errors.Is(err, xfer.ErrActive) {
			if err != nil { // the agent has forgotten it all the same
				s.log.Warn("deregister memory", "bytes", l.Descs[0].Len, "err", err)
			}
			return nil
		}
		select {
		case <-again.C:
		case <-end.C:
			return fmt.Errorf("deregister memory: %w", err)
		case <-s.life.Done():
			return fmt.Errorf("deregister memory: %w", block.ErrClosed)
		}
	}
}
