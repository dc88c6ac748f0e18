package tcp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// evictAfter is how long Deregister lets connections finish the frame that touches
// the memory before it ends them.
const evictAfter = 50 * time.Millisecond

// region is memory of ours that peers reach by its token.
type region struct {
	token, base, n uint64
	mu             struct {
		sync.Mutex
		users map[*server]int // connections that touch the memory now
		gone  bool
		quiet chan struct{} // closed when the last of them is done, once gone
	}
}

// enter lets a connection touch the memory until exit, unless it is no longer
// registered.
func (r *region) enter(s *server) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.gone {
		return false
	}
	r.mu.users[s]++
	return true
}

func (r *region) exit(s *server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.users[s]--; r.mu.users[s] == 0 {
		delete(r.mu.users, s)
	}
	if r.mu.gone && len(r.mu.users) == 0 {
		close(r.mu.quiet)
	}
}

func (r *region) covers(off, n uint64) bool { return off <= r.n && n <= r.n-off }

// at is a piece that covers says is there.
func (r *region) at(off, n uint64) []byte { return arena.View(r.base+off, int(n)) }

// Register draws a token for a piece of mapped memory; it cannot see whether it is
// mapped.
func (b *Backend) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	if err := xfer.CheckDRAM(t, d); err != nil {
		return nil, err
	}
	if d.Len == 0 || d.Addr+d.Len < d.Addr {
		return nil, fmt.Errorf("%w: %d bytes from address %#x", xfer.ErrInvalid, d.Len, d.Addr)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r := &region{base: d.Addr, n: d.Len}
	r.mu.users = map[*server]int{}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		return nil, errClosed()
	}
	for r.token == 0 || b.mu.regions[r.token] != nil {
		r.token = random()
	}
	b.mu.regions[r.token] = r
	return r, nil
}

// random is a number that nobody can guess.
func random() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// Deregister returns when no peer's bytes arrive in the memory any more, and none
// are read from it.
func (b *Backend) Deregister(reg xfer.Region) error {
	r, ok := reg.(*region)
	if !ok {
		return fmt.Errorf("tcp deregister: %w: a region of type %T is not ours", xfer.ErrInvalid, reg)
	}
	b.mu.Lock()
	known := b.mu.regions[r.token] == r
	delete(b.mu.regions, r.token)
	b.mu.Unlock()
	if !known {
		return fmt.Errorf("tcp deregister: %w: the region is not registered", xfer.ErrInvalid)
	}
	r.mu.Lock()
	r.mu.gone = true
	if len(r.mu.users) == 0 {
		r.mu.Unlock()
		return nil
	}
	r.mu.quiet = make(chan struct{})
	r.mu.Unlock()

	timer := time.NewTimer(evictAfter)
	defer timer.Stop()
	select {
	case <-r.mu.quiet:
		return nil
	case <-timer.C:
	}
	r.mu.Lock()
	for s := range r.mu.users {
		s.end()
	}
	r.mu.Unlock()
	<-r.mu.quiet
	return nil
}

// region finds a registration by its token.
func (b *Backend) region(token uint64) *region {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.mu.regions[token]
}

// RegionInfo gives the token, and which memory it is for.
func (b *Backend) RegionInfo(reg xfer.Region) ([]byte, error) {
	r, ok := reg.(*region)
	if !ok {
		return nil, fmt.Errorf("tcp region info: %w: a region of type %T is not ours", xfer.ErrInvalid, reg)
	}
	return regionInfo{r.token, r.base, r.n}.append(nil), nil
}

// remoteRegion is memory of a peer's.
type remoteRegion struct {
	peer        *peer
	token, base uint64
}

// LoadRegion makes a peer's memory known.
func (b *Backend) LoadRegion(id xfer.PeerID, t xfer.MemType, d xfer.Desc, info []byte) (xfer.Region, error) {
	if t != xfer.DRAM {
		return nil, fmt.Errorf("tcp load region: %w: memory type %s, want DRAM", xfer.ErrInvalid, t)
	}
	i, err := parseRegionInfo(info)
	if err != nil {
		return nil, fmt.Errorf("tcp load region of %s: %w", id, err)
	}
	if d.Dev != 0 || d.Addr < i.base || d.Len > i.n || d.Addr-i.base > i.n-d.Len {
		return nil, fmt.Errorf("tcp load region of %s: %w: %s is not within %d bytes from %#x", id, xfer.ErrInvalid, d, i.n, i.base)
	}
	p, err := b.peer(id)
	if err != nil {
		return nil, fmt.Errorf("tcp load region: %w", err)
	}
	return &remoteRegion{peer: p, token: i.token, base: i.base}, nil
}

// UnloadRegion has nothing to undo.
func (b *Backend) UnloadRegion(xfer.Region) {}
