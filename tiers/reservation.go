package tiers

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index/block"
)

// reservation is a slot of G2 that is being filled. It is not a block yet: it
// is in no table, and only its count shows, as Pending in a match.
type reservation struct {
	id     uint64
	ns     *namespace
	key    block.Key
	hlen   int
	n      int64 // payload bytes
	opts   block.PutOptions
	place  block.Place
	slot   []byte // header block, payload, padding
	header int64
	up     *fetch // of a block that comes up from G4

	mu      sync.Mutex // held while bytes are copied, so that the slot is quiet when it is given back
	filled  int64
	hash    xxh3.Hasher
	gone    bool
	expires atomic.Int64 // on the clock of reservations
}

// CopyStep is how much is copied before it is hashed: small enough that the hash
// finds it in the cache.
const CopyStep = 32 << 10

// fill writes p at off and hashes it while it is in the cache.
func (r *reservation) fill(off int64, p []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		return fmt.Errorf("fill reservation %d: %w", r.id, block.ErrLeaseExpired)
	}
	if off != r.filled {
		return fmt.Errorf("fill reservation %d: %w: offset %d, want %d: bytes come in order", r.id, block.ErrInvalid, off, r.filled)
	}
	if int64(len(p)) > r.n-off {
		return fmt.Errorf("fill reservation %d: %w: %d bytes at %d go past the end at %d", r.id, block.ErrInvalid, len(p), off, r.n)
	}
	dst := r.slot[r.header+off:]
	for len(p) > 0 {
		step := min(CopyStep, len(p))
		copy(dst, p[:step])
		r.hash.Write(dst[:step])
		dst, p = dst[step:], p[step:]
		r.filled += int64(step)
	}
	return nil
}

// seal ends the filling and returns the checksum. The padding is cleared, since
// it goes to the device with the payload and held other bytes before.
func (r *reservation) seal() (block.Sum, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		return block.Sum{}, fmt.Errorf("commit reservation %d: %w", r.id, block.ErrLeaseExpired)
	}
	if r.filled != r.n {
		return block.Sum{}, fmt.Errorf("commit reservation %d: %w: %d of %d bytes filled", r.id, block.ErrInvalid, r.filled, r.n)
	}
	clear(r.slot[r.header+r.n:])
	return r.hash.Sum128().Bytes(), nil
}

// reservations are the open ones, by id.
type reservations struct {
	max   int
	ttl   time.Duration
	start time.Time
	open  atomic.Int64
	mu    struct {
		sync.Mutex
		byID    map[uint64]*reservation
		pending map[block.Key]int // how many reservations a key has
	}
}

func (r *reservations) init(o Options) {
	r.max, r.ttl, r.start = o.MaxReservations, o.ReserveTTL, time.Now()
	r.mu.byID = map[uint64]*reservation{}
	r.mu.pending = map[block.Key]int{}
}

// now is a monotonic clock.
func (r *reservations) now() int64 { return int64(time.Since(r.start)) }

// renew lets a reservation run from now.
func (r *reservations) renew(v *reservation) { v.expires.Store(r.now() + int64(r.ttl)) }

// add opens a reservation under a new id.
func (r *reservations) add(v *reservation) error {
	r.renew(v)
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.byID) >= r.max {
		return fmt.Errorf("reserve: %w: %d reservations are open", block.ErrNoSpace, r.max)
	}
	for v.id == 0 || r.mu.byID[v.id] != nil {
		v.id = randomID() // which is all that it takes to fill and commit it
	}
	r.mu.byID[v.id] = v
	r.mu.pending[v.key]++
	r.open.Add(1)
	return nil
}

func (r *reservations) get(id uint64) *reservation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.byID[id]
}

// take closes a reservation and returns it, or nil when there is none.
func (r *reservations) take(id uint64) *reservation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.takeLocked(id)
}

func (r *reservations) takeLocked(id uint64) *reservation {
	v := r.mu.byID[id]
	if v == nil {
		return nil
	}
	delete(r.mu.byID, id)
	r.open.Add(-1)
	if r.mu.pending[v.key]--; r.mu.pending[v.key] == 0 {
		delete(r.mu.pending, v.key)
	}
	return v
}

// takeIf closes all reservations that match and returns them.
func (r *reservations) takeIf(match func(*reservation) bool) (out []*reservation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, v := range r.mu.byID {
		if match(v) {
			out = append(out, r.takeLocked(id))
		}
	}
	return out
}

// isPending reports whether a key is being put.
func (r *reservations) isPending(k block.Key) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.pending[k] > 0
}

// giveBack frees the slot of a reservation that was taken, once no fill is
// copying into it.
func (s *Store) giveBack(r *reservation) {
	r.mu.Lock()
	r.gone = true
	r.mu.Unlock()
	s.g2.free(r.place)
}

// Abort gives reservations back; unknown ones are ignored.
func (s *Store) Abort(ids []uint64) {
	for _, id := range ids {
		if r := s.reservations.take(id); r != nil {
			s.giveBack(r)
		}
	}
}
