package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// region is memory of this process that is registered.
type region struct {
	token     uint64 // what peers name it by
	addr, len uint64
	file      *file // nil when peers reach it by process_vm
	off       int64 // in the file
	holders   map[*served]uint32
}

// file is a memory file with registered memory in it.
type file struct {
	id      uint64
	fd      int // the backend's own
	bytes   int64
	regions int
	key     fileKey
}

type fileKey struct{ dev, ino uint64 }

// Register makes memory usable, by peers as well once they have its RegionInfo. It
// cannot see whether it is mapped.
func (b *Backend) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	if err := xfer.CheckDRAM(t, d); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	r := &region{addr: d.Addr, len: d.Len, holders: map[*served]uint32{}}
	fd, off, inFile := -1, int64(0), false
	if b.o.FileOf != nil {
		fd, off, inFile = b.o.FileOf(d.Addr, d.Len)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		return nil, fmt.Errorf("%w: backend shm", xfer.ErrClosed)
	}
	if inFile {
		if err := b.inFile(r, fd, off); err != nil {
			return nil, err
		}
	}
	for r.token == 0 || b.mu.regions[r.token] != nil {
		r.token = rand.Uint64()
	}
	b.mu.regions[r.token] = r
	return r, nil
}

// inFile finds the file of a region. It needs b.mu.
func (b *Backend) inFile(r *region, fd int, off int64) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil // no peer would map it
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("%w: size of the memory file: %w", xfer.ErrUnavailable, err)
	}
	if off < 0 || off > st.Size || r.len > uint64(st.Size-off) {
		return fmt.Errorf("%w: %d bytes at %d of a memory file of %d", xfer.ErrInvalid, r.len, off, st.Size)
	}
	key := fileKey{st.Dev, st.Ino}
	f := b.mu.files[key]
	if f == nil {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%w: keep the memory file: %w", xfer.ErrUnavailable, err)
		}
		b.mu.fileIDs++
		f = &file{id: b.mu.fileIDs, fd: own, bytes: st.Size, key: key}
		b.mu.files[key] = f
	}
	f.regions++
	r.file, r.off = f, off
	return nil
}

// Deregister waits until no peer touches the memory: at most for one piece of
// a transfer, unless a peer is stopped in the middle of one.
func (b *Backend) Deregister(r xfer.Region) error {
	g, ok := r.(*region)
	if !ok {
		return fmt.Errorf("%w: deregister a %T", xfer.ErrInvalid, r)
	}
	b.mu.Lock()
	if b.mu.regions[g.token] != g {
		b.mu.Unlock()
		return fmt.Errorf("%w: region", xfer.ErrNotFound)
	}
	delete(b.mu.regions, g.token) // no peer is let in any more
	holders := g.holders
	g.holders = nil
	b.mu.Unlock()

	for s, w := range holders {
		s.shutWord(w)
	}
	for s, w := range holders {
		s.outOf(w)
		revoked := frame.Frame{Header: frame.Header{Type: frame.Message, Flags: codeRevoked, Token: g.token}}
		if err := s.out.tryPut(revoked); err != nil {
			s.cut() // it would never learn that it may forget the region
		}
	}

	if g.file == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.unrefFile(g.file)
}

// unrefFile forgets one region of a file. It needs b.mu.
func (b *Backend) unrefFile(f *file) error {
	if f.regions--; f.regions > 0 {
		return nil
	}
	delete(b.mu.files, f.key)
	if err := unix.Close(f.fd); err != nil {
		return fmt.Errorf("close memory file: %w", err)
	}
	return nil
}

// forget removes a peer that has gone from what it held.
func (b *Backend) forget(s *served) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.mu.regions {
		delete(r.holders, s)
	}
	delete(b.mu.served, s)
}

// regionInfoBytes is the size of what RegionInfo gives: a version, the token, the
// address and the length.
const regionInfoBytes = 1 + 3*8

// RegionInfo says how a peer addresses a region.
func (b *Backend) RegionInfo(r xfer.Region) ([]byte, error) {
	g, ok := r.(*region)
	if !ok {
		return nil, fmt.Errorf("%w: region info of a %T", xfer.ErrInvalid, r)
	}
	info := append(make([]byte, 0, regionInfoBytes), version)
	for _, v := range [...]uint64{g.token, g.addr, g.len} {
		info = binary.LittleEndian.AppendUint64(info, v)
	}
	return info, nil
}

// LoadRegion makes a peer's region known.
func (b *Backend) LoadRegion(id xfer.PeerID, t xfer.MemType, d xfer.Desc, info []byte) (xfer.Region, error) {
	dec := decoder{b: info}
	dec.version("region")
	r := &remoteRegion{token: dec.uint64(), addr: dec.uint64(), len: dec.uint64()}
	if err := dec.end("region"); err != nil {
		return nil, errors.Join(xfer.ErrInvalid, err)
	}
	switch {
	case t != xfer.DRAM:
		return nil, fmt.Errorf("%w: memory type %s, want DRAM", xfer.ErrInvalid, t)
	case d.Addr != r.addr || d.Len != r.len:
		return nil, fmt.Errorf("%w: region [%#x,+%d), but its info is of [%#x,+%d)", xfer.ErrInvalid, d.Addr, d.Len, r.addr, r.len)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.peer = b.mu.peers[id]; r.peer == nil {
		return nil, fmt.Errorf("%w: peer %s", xfer.ErrNotFound, id)
	}
	return r, nil
}

// UnloadRegion undoes LoadRegion. The owner learns nothing: it will say when the
// region is gone, or the connection ends.
func (b *Backend) UnloadRegion(xfer.Region) {}
