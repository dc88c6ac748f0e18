package tiers

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// tier is a place with capacity: G2 or G3. It hands out slots and knows how
// full it is; what lies in the slots is the table's and the store's business.
type tier struct {
	id   block.TierID
	ix   int // in the table's arrays
	devs []*device

	capacity, high, low int64 // bytes

	mu struct {
		sync.Mutex
		used   int64
		wants  []want        // what is waited for: of each share the largest slot
		room   chan struct{} // closed, and made anew, whenever slots come free or a pass ends in vain
		futile uint64        // passes of the evictor that could free nothing
		stuck  bool          // no slot came free since the last of them
		ahead  int64         // bytes that the evictor makes room for below the watermarks; see makeRoom
		policy policyState
		// leaving counts the slots that uploads will free.
		leaving map[want]int64
	}
	kick   chan struct{}     // wakes the evictor
	change chan policyChange // for the evictor
	events policyQueue
	curves curves
	speed  speed // of reads

	blocks, payload                  atomic.Int64
	evictions, dropped, reclaimed    atomic.Int64
	bytesIn, bytesOut, refused, hits atomic.Int64
	behind, fellBehind               atomic.Int64 // see watchdog
	leaving                          atomic.Int64 // bytes of slots that uploads will free
}

// want is a slot that somebody waits for. The zero value is none.
type want struct {
	share uint64
	size  int64
}

// device is one medium of a tier: the arena of G2, or one slab of G3.
type device struct {
	number uint8
	slots  *Slots // guarded by tier.mu
	mem    *arena.Arena
	slab   *Slab
	kind   xfer.MemType
	base   uint64          // address of offset 0 on the device, for files
	health *health         // nil for memory
	wear   *wearWatch      // nil for memory
	bad    map[int64]int64 // sizes of slots in quarantine, by offset; guarded by tier.mu
	// unswept: room that no record claims may have headers of blocks that have left.
	unswept atomic.Bool
}

// rank is that of the device's health.
func (d *device) rank() uint32 {
	if d.health == nil {
		return rankHealthy
	}
	return d.health.rank()
}

// reserved owns slots that are filled but belong to no block yet.
const reserved block.Handle = math.MaxUint32

// errNothingLeaves: the evictor has looked, and nothing may leave the tier now.
var errNothingLeaves = fmt.Errorf("%w: nothing can be evicted now", block.ErrNoSpace)

// roomWait is the longest that a call waits for the evictor to make room, even
// when its deadline is later: what takes longer is told to the caller as no space.
const roomWait = time.Second

func newTier(id block.TierID, devs []*device, o Options) *tier {
	t := &tier{id: id, ix: index.TierIndex(id), devs: devs, kick: make(chan struct{}, 1), change: make(chan policyChange, 1)}
	for _, d := range devs {
		t.capacity += d.slots.Capacity()
		t.mu.used += d.slots.Used()
	}
	t.high = int64(o.High * float64(t.capacity))
	t.low = int64(o.Low * float64(t.capacity))
	t.mu.room, t.mu.leaving = make(chan struct{}), map[want]int64{}
	t.events.init()
	t.curves.feed = make(chan curveBatch, curveRoom)
	t.speed.first = firstMemory
	if t.ix == ixG3 {
		t.speed.first = firstDevice
	}
	return t
}

// wake makes the evictor look at the tier.
func (t *tier) wake() {
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

// tryAlloc takes a slot of size bytes for a share if there is one, from the device
// that is least full of the healthiest. None is taken from a device that is down.
func (t *tier) tryAlloc(share uint64, size int64, owner block.Handle) (block.Place, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.allocLocked(share, size, owner)
}

func (t *tier) allocLocked(share uint64, size int64, owner block.Handle) (block.Place, bool) {
	var tried uint64
	for range t.devs {
		best, rank, least := -1, uint32(rankDown), 2.0
		for i, d := range t.devs {
			r := d.rank()
			if tried&(1<<i) != 0 || r == rankDown {
				continue
			}
			if s := float64(d.slots.Used()) / float64(d.slots.Capacity()); r < rank || r == rank && s < least {
				best, rank, least = i, r, s
			}
		}
		if best < 0 {
			break
		}
		tried |= 1 << best
		d := t.devs[best]
		if off, ok := d.slots.Alloc(share, size, owner); ok {
			before := t.mu.used
			class := d.slots.Class(off)
			d.wantPoisoned(off, class)
			t.mu.used += class
			if t.mu.used > t.high && before <= t.high {
				t.wake()
			}
			return block.PlaceAt(d.number, off), true
		}
	}
	return 0, false
}

// lost says why there is no device that takes writes, nil when there is one.
func (t *tier) lost() (err error) {
	for _, d := range t.devs {
		if d.health == nil {
			return nil
		}
		if err = d.health.lost(); err == nil {
			return nil
		}
	}
	return err
}

// alloc takes a slot of size bytes for a share, waiting for the evictor to make room. It
// fails with ErrNoSpace when the evictor finds nothing to evict, when ctx ends,
// or after roomWait, and with ErrUnavailable when no device takes writes.
func (t *tier) alloc(ctx context.Context, share uint64, size int64, owner block.Handle) (block.Place, error) {
	if p, ok := t.tryAlloc(share, size, owner); ok {
		return p, nil
	}
	timer := time.NewTimer(roomWait)
	defer timer.Stop()
	t.mu.Lock()
	futile := t.mu.futile
	for {
		if p, ok := t.allocLocked(share, size, owner); ok {
			t.mu.Unlock()
			return p, nil
		}
		if err := t.lost(); err != nil {
			t.mu.Unlock()
			t.refused.Add(1)
			return 0, fmt.Errorf("reserve %d bytes in %s: %w", size, t.id, err)
		}
		// The pass that was under way when the wait began may have looked before
		// this call's blocks could leave, so only the second one in vain counts.
		if t.mu.futile >= futile+2 {
			t.mu.Unlock()
			break
		}
		t.wantLocked(share, size)
		room := t.mu.room
		t.mu.Unlock()
		t.wake()
		select {
		case <-room:
		case <-ctx.Done():
			t.refused.Add(1)
			t.stir()
			return 0, fmt.Errorf("reserve %d bytes in %s: %w: %w", size, t.id, block.ErrNoSpace, context.Cause(ctx))
		case <-timer.C:
			t.refused.Add(1)
			t.stir()
			return 0, fmt.Errorf("reserve %d bytes in %s: %w: no room within %v", size, t.id, block.ErrNoSpace, roomWait)
		}
		t.mu.Lock()
	}
	t.refused.Add(1)
	return 0, fmt.Errorf("reserve %d bytes in %s: %w", size, t.id, errNothingLeaves)
}

// free gives a slot back, wakes who waits for room, and returns the slot's size.
func (t *tier) free(p block.Place) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.devs[p.Device()]
	n := d.slots.Free(p.Offset())
	d.poisonSlot(p.Offset(), n)
	t.mu.used -= n
	t.mu.stuck = false
	t.roomLocked()
	return n
}

// wantLocked notes that somebody waits for a slot.
func (t *tier) wantLocked(share uint64, size int64) {
	for i := range t.mu.wants {
		if w := &t.mu.wants[i]; w.share == share {
			w.size = max(w.size, size)
			return
		}
	}
	t.mu.wants = append(t.mu.wants, want{share, size})
}

// stir makes all who wait for room look again and say what they want: one of
// them has given up, and nothing more should be evicted for it.
func (t *tier) stir() {
	t.mu.Lock()
	t.mu.wants = t.mu.wants[:0]
	t.roomLocked()
	t.mu.Unlock()
}

func (t *tier) roomLocked() {
	close(t.mu.room)
	t.mu.room = make(chan struct{})
}

// own makes h the owner of a slot that was reserved.
func (t *tier) own(p block.Place, h block.Handle) {
	t.mu.Lock()
	t.devs[p.Device()].slots.SetOwner(p.Offset(), h)
	t.mu.Unlock()
}

// class is the size of a slot.
func (t *tier) class(p block.Place) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.devs[p.Device()].slots.Class(p.Offset())
}

// inVain ends a pass of the evictor that freed nothing.
func (t *tier) inVain() {
	t.mu.Lock()
	t.mu.futile++
	t.mu.stuck = true
	t.mu.wants = t.mu.wants[:0]
	t.roomLocked()
	t.mu.Unlock()
}

// pressure says how many bytes have to go now, beside those that are about to (0: none), and
// the slot that somebody waits for although there would be bytes enough.
func (t *tier) pressure(evicting bool) (need int64, starving want) {
	t.mu.Lock()
	defer t.mu.Unlock()
	leaving := t.leaving.Load()
	limit, used := t.high, t.mu.used+t.mu.ahead-leaving
	if evicting {
		limit = t.low
	}
	if used > limit {
		need = used - t.low
	}
	t.mu.wants = slices.DeleteFunc(t.mu.wants, t.hasLocked)
	for _, w := range t.mu.wants {
		if t.mu.leaving[w] == 0 { // else what is on its way up leaves such a slot
			return need, w
		}
	}
	return need, want{}
}

// leaves counts n slots that uploads will free, or, below 0, do so no more.
func (t *tier) leaves(slot want, n int64) {
	t.leaving.Add(n * slot.size)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.leaving[slot] += n; t.mu.leaving[slot] == 0 {
		delete(t.mu.leaving, slot)
	}
}

// hasLocked reports whether there is a slot that is wanted.
func (t *tier) hasLocked(w want) bool {
	return slices.ContainsFunc(t.devs, func(d *device) bool { return d.rank() != rankDown && d.slots.CanAlloc(w.share, w.size) })
}

// makeRoom has the evictor free room for n more bytes below the high watermark,
// so that what then comes in is not evicted for being too much. It returns how
// many of them fit when the room is there, nothing more can leave, or ctx ends.
func (t *tier) makeRoom(ctx context.Context, n int64) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer func() { t.mu.ahead = 0 }()
	for futile := t.mu.futile; t.mu.used+n > t.high && t.mu.futile < futile+2 && ctx.Err() == nil; {
		t.mu.ahead = n
		room := t.mu.room
		t.mu.Unlock()
		t.wake()
		select {
		case <-room:
		case <-ctx.Done():
		}
		t.mu.Lock()
	}
	return min(n, t.high-t.mu.used)
}

// slot is the memory of a slot of G2, header block included.
func (t *tier) slot(p block.Place, n int64) []byte {
	return t.devs[p.Device()].mem.Slice(p.Offset(), n)
}
