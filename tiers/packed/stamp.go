package packed

import (
	"sync"
	"time"
)

// Clock gives the stamps by which an import knows what came before what: whether a
// block was deleted after an object with it was packed, or before it was put anew. A
// stamp is nanoseconds since 1970, except that it is always later than every stamp that
// this clock gave or has seen. So what one store did is in order whatever its wall clock
// does, and what several did as far as their wall clocks agree or they have seen each
// other's stamps. The zero value is ready for use.
type Clock struct {
	mu struct {
		sync.Mutex
		last uint64
	}
}

// Next is the stamp of what happens now.
func (c *Clock) Next(now time.Time) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.last = max(c.mu.last+1, uint64(max(now.UnixNano(), 0)))
	return c.mu.last
}

// See notes a stamp of another store, or one from before a restart.
func (c *Clock) See(stamp uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.last = max(c.mu.last, stamp)
}
