package tiers

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// catalogRoom watches the file system under the catalog. Slabs are preallocated,
// but the catalog grows, and a write-ahead log that cannot be written stops it
// until there is room to open it again. So a full file system counts as full a little
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
	free, reserve, err := c.ask()
	c.full.Store(err == nil && free < reserve)
	return c.full.Load()
}

// ask returns what the file system has free, and what of it is the reserve.
func (c *catalogRoom) ask() (free, reserve int64, err error) {
	size, free, err := statfs(c.dir)
	return free, min(catalogReserve, size/catalogShare), err
}

// check fails with ErrNoSpace when there is not even room to open the catalog,
// which writes what its log holds into tables first.
func (c *catalogRoom) check() error {
	free, reserve, err := c.ask()
	if need := reserve / 8; err == nil && free < need {
		return fmt.Errorf("catalog: %w: the file system of %s has %d bytes free, opening it needs %d", block.ErrNoSpace, c.dir, free, need)
	}
	return err
}
