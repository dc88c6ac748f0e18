package tiers

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// catalogRoom watches the file system under the catalog. Slabs are preallocated,
// but the catalog grows, and a write-ahead log that cannot be written stops it
// until it is opened again. So a full file system counts as full a little
// earlier: nothing more goes down to G3, while drops, which make room, go on.
type catalogRoom struct {
	dir    string
	looked atomic.Int64 // on the clock of start, ns
	full   atomic.Bool
	start  time.Time
}

const (
	// catalogReserve is what the catalog keeps free for drops and compactions, or
	// catalogShare of the file system where that is less.
	catalogReserve = 128 << 20
	catalogShare   = 4
	catalogLook    = 200 * time.Millisecond // how old an answer may be
)

func (c *catalogRoom) init(dir string) { c.dir, c.start = dir, time.Now() }

// isFull reports whether the reserve is touched. It asks the file system at most
// once in catalogLook. One that cannot be asked is not full: the commit will tell.
func (c *catalogRoom) isFull() bool {
	now := int64(time.Since(c.start)) + 1
	last := c.looked.Load()
	if last != 0 && now-last < int64(catalogLook) || !c.looked.CompareAndSwap(last, now) {
		return c.full.Load()
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.dir, &st); err != nil {
		c.full.Store(false)
		return false
	}
	reserve := min(uint64(catalogReserve), st.Blocks*uint64(st.Bsize)/catalogShare)
	c.full.Store(st.Bavail*uint64(st.Bsize) < reserve)
	return c.full.Load()
}
