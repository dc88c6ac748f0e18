package memstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
)

// place is where bytes lie in the store's file, when they do.
type place struct {
	shared bool
	off    int64
}

// grant is memory that somebody fills for a block that has no key yet.
type grant struct {
	ns   *space
	data []byte
	at   place
}

// shared is the memory that others can map: a file that is handed out from its
// start. What grants gave back is used again, what blocks had is not: so bytes that
// a get was given stay right.
type shared struct {
	file *os.File // nil: there is none
	mem  []byte
	next int64
	free map[int64][]int64 // by length
}

// share makes the memory, n bytes.
func (s *Store) share(n int64) error {
	fd, err := unix.MemfdCreate("memstore", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("make a memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memstore")
	if err := f.Truncate(n); err != nil {
		return fmt.Errorf("make a memory file of %d bytes: %w", n, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("seal a memory file: %w", err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map a memory file: %w", err)
	}
	s.mu.shared = shared{file: f, mem: mem, free: map[int64][]int64{}}
	return nil
}

// take is memory of n bytes, of the file while that has any left.
func (m *shared) take(n int64) ([]byte, place) {
	if m.file == nil {
		return make([]byte, n), place{}
	}
	var off int64
	if free := m.free[n]; len(free) > 0 {
		off, m.free[n] = free[len(free)-1], free[:len(free)-1]
	} else {
		off = m.next
		if off+n > int64(len(m.mem)) {
			return make([]byte, n), place{}
		}
		m.next += (n + 63) &^ 63
	}
	return m.mem[off:][:n:n], place{shared: true, off: off}
}

// Memory lists the file behind the store's grants, nil when Options.Shared is 0.
func (s *Store) Memory() []block.MemoryFile {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.shared.file == nil {
		return nil
	}
	return []block.MemoryFile{{Fd: int(s.mu.shared.file.Fd()), Bytes: int64(len(s.mu.shared.mem))}}
}

// Grant takes up to count places of n bytes: at least one, or ErrNoSpace when ctx
// ends before there is room for it.
func (s *Store) Grant(ctx context.Context, ns block.NamespaceID, n int64, count int) ([]block.Grant, error) {
	for {
		out, wait, err := s.grant(ns, n, count)
		if wait == nil {
			return out, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, fmt.Errorf("grant %d bytes: %w: %w", n, block.ErrNoSpace, ctx.Err())
		}
	}
}

func (s *Store) grant(id block.NamespaceID, n int64, count int) (out []block.Grant, wait <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ns, err := s.space(id)
	if err != nil {
		return nil, nil, err
	}
	if err := ns.Desc.CheckLen(n); err != nil {
		return nil, nil, fmt.Errorf("grant: %w", err)
	}
	if count < 1 {
		return nil, nil, fmt.Errorf("%w: grant of %d places", block.ErrInvalid, count)
	}
	s.expire()
	for len(out) < count && s.room(n) {
		g := &grant{ns: ns}
		g.data, g.at = s.mu.shared.take(n)
		s.mu.used += n
		gid := rand.Uint64() | 1
		s.mu.grants[gid] = g
		one := block.Grant{ID: gid, Mem: g.data, Offset: g.at.off}
		if !g.at.shared {
			one.Chunk = -1
		}
		out = append(out, one)
	}
	if len(out) == 0 {
		return nil, s.mu.freed, nil
	}
	return out, nil, nil
}

// PutGranted makes blocks of filled grants, in order. It takes the caller's word
// for the checksums.
func (s *Store) PutGranted(_ context.Context, puts []block.GrantPut) []block.CommitResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]block.CommitResult, len(puts))
	for i := range puts {
		out[i].Status, out[i].Err = s.putGranted(&puts[i])
	}
	return out
}

func (s *Store) putGranted(p *block.GrantPut) (block.PutStatus, error) {
	g := s.mu.grants[p.Grant]
	if g == nil {
		return 0, fmt.Errorf("put by grant %d: %w", p.Grant, block.ErrLeaseExpired)
	}
	n := g.ns
	switch {
	case p.Key.NS != n.ID:
		s.abortGrant(p.Grant)
		return 0, fmt.Errorf("%w: key of namespace %d, the grant is one of %d", block.ErrInvalid, p.Key.NS, n.ID)
	case n.CheckHashLen(p.Hlen) != nil || n.Desc.CheckLen(p.Len) != nil || p.Len > int64(len(g.data)):
		s.abortGrant(p.Grant)
		return 0, fmt.Errorf("%w: put of %d bytes with a hash of %d", block.ErrInvalid, p.Len, p.Hlen)
	case p.Durable == block.G3 && !s.opts.Durable:
		s.abortGrant(p.Grant)
		return 0, fmt.Errorf("put to g3: %w: this store has no NVMe tier", block.ErrUnavailable)
	}
	if e, _ := s.find(n, p.Key.Hash); e != nil {
		s.abortGrant(p.Grant)
		return s.compare(n, e, p.Len, p.Sum, p.PutOptions)
	}
	delete(s.mu.grants, p.Grant)
	s.free(int64(len(g.data)) - p.Len)
	n.HashLen = p.Hlen
	s.mu.born++
	e := &entry{
		hash: p.Key.Hash, parent: p.Parent, hasPar: p.HasParent, data: g.data[:p.Len], at: g.at, sum: p.Sum,
		durable: p.Durable == block.G3, born: s.mu.born,
	}
	ttl := p.TTL
	if ttl == 0 {
		ttl = n.TTL
	}
	if ttl > 0 {
		e.expires = time.Now().Add(ttl)
	}
	n.blocks[e.hash] = e
	for _, t := range e.tiers() {
		s.tellStored(n, e, t)
	}
	return block.Stored, nil
}

// AbortGrants gives grants back; unknown ones are ignored.
func (s *Store) AbortGrants(ids []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		s.abortGrant(id)
	}
}

func (s *Store) abortGrant(id uint64) {
	g := s.mu.grants[id]
	if g == nil {
		return
	}
	delete(s.mu.grants, id)
	if n := int64(len(g.data)); g.at.shared {
		s.mu.shared.free[n] = append(s.mu.shared.free[n], g.at.off)
	}
	s.free(int64(len(g.data)))
}

// Lend leases the blocks that lie in the store's file. The others, and all where
// there is no file, are misses with MissNoRoom.
func (s *Store) Lend(_ context.Context, ns block.NamespaceID, hashLen int, hashes []byte, _ block.GetOptions, d time.Duration, session uint64) ([]block.Loan, block.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err != nil {
		return nil, block.Lease{}, err
	}
	out := make([]block.Loan, len(keys))
	var held []*entry
	for i, h := range keys {
		e, why := s.find(n, h)
		switch {
		case e == nil:
			out[i].Reason = why
			s.mu.misses[why.String()]++
		case !e.at.shared:
			out[i].Reason = block.MissNoRoom
		default:
			out[i] = block.Loan{Tier: block.G2, Len: uint32(len(e.data)), Sum: e.sum, Mem: e.data, Offset: e.at.off}
			held = append(held, e)
		}
	}
	if len(held) == 0 {
		return out, block.Lease{}, nil
	}
	return out, s.lease(held, d, session), nil
}

// lease holds blocks for a session.
func (s *Store) lease(hits []*entry, d time.Duration, session uint64) block.Lease {
	id := rand.Uint64() | 1
	for _, e := range hits {
		e.leases++
	}
	s.mu.leases[id] = &lease{until: time.Now().Add(d), blocks: hits, session: session}
	return block.Lease{ID: id, Left: d, Count: len(hits)}
}
