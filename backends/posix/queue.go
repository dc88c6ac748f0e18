package posix

import (
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/invariants"
)

// bounceBuffers is how many operations of a device may use an aligned copy at
// once. They are the exception, so a few suffice.
const bounceBuffers = 8

// device is the bounded queue of one disk. More than a few MiB in flight adds
// latency and even loses bandwidth, so what does not fit waits here, in order
// of arrival and in turns: a long transfer does not hold up a short one.
type device struct {
	maxOps   int
	maxBytes int64
	memory   *arena.Arena // of the bounce buffers
	mu       struct {
		sync.Mutex
		ops     int
		bytes   int64
		bounce  [][]byte // free ones
		waiting []*part  // each at most once
	}
}

func newDevice(maxOps int, maxBytes int64) (*device, error) {
	// Untouched, it costs addresses only.
	a, err := arena.New(bounceBuffers*maxPieceBytes, &arena.Options{NoPopulate: true})
	if err != nil {
		return nil, fmt.Errorf("bounce buffers: %w", err)
	}
	d := &device{maxOps: maxOps, maxBytes: maxBytes, memory: a}
	for i := range int64(bounceBuffers) {
		d.mu.bounce = append(d.mu.bounce, a.Slice(i*maxPieceBytes, maxPieceBytes))
	}
	return d, nil
}

// admit takes room for as many of the part's next pieces as there is, and says
// for how many. When that is not all, the part is queued, and its flight is
// woken when it is its turn. waited is whether it was queued just now, alone
// whether the device does nothing else.
func (d *device) admit(pt *part, ps []piece) (n int, waited, alone bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mu.waiting) == 0 || d.mu.waiting[0] == pt {
		for n < len(ps) && d.take(&ps[n]) {
			n++
		}
	}
	if n > 0 && pt.queued { // it was the first; next time it is the last
		d.mu.waiting = append(d.mu.waiting[:0], d.mu.waiting[1:]...)
		pt.queued = false
		d.wakeFirst(nil)
	}
	if n < len(ps) && !pt.queued {
		pt.queued = true
		d.mu.waiting = append(d.mu.waiting, pt)
		waited = true
	}
	return n, waited, d.mu.ops == n
}

// take reserves what p needs, if all of it is free.
func (d *device) take(p *piece) bool {
	if d.mu.ops >= d.maxOps || d.mu.ops > 0 && d.mu.bytes+int64(p.ioLen) > d.maxBytes {
		return false
	}
	// Buffered and direct writes of one file exclude each other. The kernel drops
	// cached pages around a direct write, but not those that a buffered write
	// makes dirty at that moment: what the direct write put on the disk would
	// then be hidden, and later overwritten, by old bytes in the cache.
	switch {
	case !p.write:
	case p.how == buffered:
		if p.file.directWrites > 0 {
			return false
		}
		p.file.bufferedWrites++
	default:
		if p.file.bufferedWrites > 0 {
			return false
		}
		p.file.directWrites++
	}
	if p.how == bounced {
		last := len(d.mu.bounce) - 1
		if last < 0 {
			if p.write {
				p.file.directWrites--
			}
			return false
		}
		p.bounce = d.mu.bounce[last]
		d.mu.bounce = d.mu.bounce[:last]
	}
	d.mu.ops++
	d.mu.bytes += int64(p.ioLen)
	return true
}

// release gives back what take reserved for p.
func (d *device) release(p *piece) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.ops--
	d.mu.bytes -= int64(p.ioLen)
	if p.bounce != nil {
		invariants.Poison(p.bounce)
		d.mu.bounce = append(d.mu.bounce, p.bounce)
		p.bounce = nil
	}
	switch {
	case !p.write:
	case p.how == buffered:
		p.file.bufferedWrites--
	default:
		p.file.directWrites--
	}
	d.wakeFirst(p.flight)
}

// leave takes a part out of the queue.
func (d *device) leave(pt *part) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !pt.queued {
		return
	}
	pt.queued = false
	keep := d.mu.waiting[:0]
	for _, q := range d.mu.waiting {
		if q != pt {
			keep = append(keep, q)
		}
	}
	clear(d.mu.waiting[len(keep):])
	d.mu.waiting = keep
	d.wakeFirst(pt.flight)
}

// wakeFirst lets the first in the queue try again. The caller's own flight is
// going to do so anyway.
func (d *device) wakeFirst(self *flight) {
	if len(d.mu.waiting) > 0 && d.mu.waiting[0].flight != self {
		d.mu.waiting[0].flight.wakeUp()
	}
}

func (d *device) load() (ops int, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.ops, d.mu.bytes
}

func (d *device) close() error { return d.memory.Close() }
