package tiers

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/xfer"
)

// Sharing says whether G2 lies in memory that other processes can map.
type Sharing uint8

// The ways of sharing G2. Anonymous memory is where the kernel gives huge pages
// without being set up for it; with small ones a device is half as fast.
const (
	ShareOff  Sharing = iota // anonymous memory
	ShareAuto                // shared where all of it gets huge pages, else anonymous
	ShareOn                  // shared, whatever the pages
)

// openG2 maps the arena of G2.
func (s *Store) openG2(ctx context.Context) (err error) {
	if s.arena, err = s.mapG2(); err != nil {
		return fmt.Errorf("map %d bytes for g2: %w", s.opts.DRAM, err)
	}
	extent := extentFor(s.opts.DRAM)
	if s.opts.Share != nil && s.arena.Fd(0) >= 0 {
		extent = chunkFor(s.opts.DRAM)
		s.chunks = newChunks(len(s.arena.Chunks()))
		s.names.partition(s.opts.Share)
	}
	if err := s.register(ctx, xfer.DRAM, arenaDescs(s.arena)); err != nil {
		return err
	}
	dev := &device{mem: s.arena, kind: xfer.DRAM, slots: NewSlots(s.opts.DRAM, extent)}
	for _, chunk := range s.arena.Chunks() {
		invariants.Poison(chunk) // as every free slot is
	}
	s.g2 = newTier(block.G2, []*device{dev}, s.opts)
	s.grants.init(s.opts.MaxReservations, s.g2.capacity/grantShare)
	return nil
}

// mapG2 maps memory that can be shared if the options and the host want it.
func (s *Store) mapG2() (*arena.Arena, error) {
	o := arena.Options{Name: "kvtier-g2", Lock: true, Background: true, ChunkBytes: arenaChunk, Logger: s.log}
	if s.opts.SharedMemory == ShareOff {
		return arena.New(s.opts.DRAM, &o)
	}
	shared := o
	shared.Memfd = true
	if s.opts.Share != nil {
		shared.ChunkBytes = chunkFor(s.opts.DRAM)
	}
	shared.Reserved = arena.ReservedOnly
	a, reserved := arena.New(s.opts.DRAM, &shared)
	if reserved == nil {
		s.log.Info("g2 can be shared", "bytes", s.opts.DRAM, "pages", "reserved huge pages")
		return a, nil
	}
	// Before anybody registers it: pages that a device holds stay as small as they are.
	shared.Background, shared.Reserved = false, arena.ReservedFirst
	if s.opts.SharedMemory == ShareOn {
		a, err := arena.New(s.opts.DRAM, &shared)
		if err == nil {
			got := a.Obtained()
			s.log.Info("g2 can be shared", "bytes", got.Bytes, "on huge pages", got.HugeBytes, "not all reserved", reserved)
		}
		return a, err
	}
	a, err := s.mapHuge(shared)
	if err != nil {
		s.log.Info("g2 cannot be shared: shared memory gets no huge pages here", "bytes", s.opts.DRAM, "reserved", reserved, "err", err)
		return arena.New(s.opts.DRAM, &o)
	}
	s.log.Info("g2 can be shared", "bytes", s.opts.DRAM, "pages", "huge pages")
	return a, nil
}

// mapHuge maps memory that can be shared, and fails unless all of it is on huge
// pages. A small piece tells whether it is worth trying.
func (s *Store) mapHuge(o arena.Options) (*arena.Arena, error) {
	trial := arena.Options{Name: o.Name, Memfd: true, Reserved: arena.ReservedNever}
	o.Logger = nil // what was not given is the reason to do without, and told as that
	for _, size := range []int64{arena.HugeBytes, s.opts.DRAM} {
		if size == s.opts.DRAM {
			trial = o
		}
		a, err := arena.New(size, &trial)
		if err != nil {
			return nil, err
		}
		switch got := a.Obtained(); {
		case got.HugeBytes < got.Bytes:
			err = fmt.Errorf("%d of %d bytes are on huge pages: %s", got.HugeBytes, got.Bytes, strings.Join(got.Warnings, "; "))
			return nil, errors.Join(err, a.Close())
		case size == s.opts.DRAM:
			return a, nil
		}
		if err := a.Close(); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// Memory lists the files behind G2, in the order that Chunk of grants and loans
// counts; nil when other processes cannot map it, or each only chunks of it: see
// OpenChunk. They are sealed against any change of size, and the store's.
func (s *Store) Memory() (files []block.MemoryFile) {
	if s.chunks != nil {
		return nil
	}
	for i, c := range s.arena.Chunks() {
		if fd := s.arena.Fd(i); fd >= 0 {
			files = append(files, block.MemoryFile{Fd: fd, Bytes: int64(len(c))})
		}
	}
	return files
}

// exposed reports whether other processes may have written to a place in G2 since the
// checksum of what is there was computed.
func (s *Store) exposed(p block.Place) bool {
	if s.chunks != nil {
		return s.chunks.all[p.Offset()/s.g2.devs[0].slots.ExtentBytes()].opened.Load()
	}
	return s.arena.Fd(0) >= 0
}

// intact reports whether the payload at a place in G2 has the checksum of the block, on
// which the caller holds a reference.
func (s *Store) intact(p block.Place, e *index.Entry) bool {
	size, header := SlotBytes(int64(e.Len))
	return block.Sum(xxh3.Hash128(s.g2.slot(p, size)[header:][:e.Len]).Bytes()) == e.Sum
}

// inMemory says where off bytes behind the begin of a slot of G2 are: the file of
// Memory or, of a partitioned G2, the number of the chunk, and the offset in it.
func (s *Store) inMemory(p block.Place, off int64) (chunk int, at int64) {
	at = p.Offset() + off
	if s.chunks != nil {
		n := s.g2.devs[0].slots.ExtentBytes()
		return int(s.chunks.all[at/n].number.Load()), at % n
	}
	return int(at / arenaChunk), at % arenaChunk
}
