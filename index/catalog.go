package index

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// CatalogOptions may be nil, which stands for a catalog on the host's file
// system with the defaults below.
type CatalogOptions struct {
	FS         vfs.FS       // where the catalog lies; nil: the host's file system
	CacheBytes int64        // Pebble's block cache; 0: 64 MiB
	ReadOnly   bool         // look only: nothing on disk changes and the boot counter stays
	Logger     *slog.Logger // nil: no logging
}

func (o *CatalogOptions) withDefaults() CatalogOptions {
	var v CatalogOptions
	if o != nil {
		v = *o
	}
	if v.FS == nil {
		v.FS = vfs.Default
	}
	if v.CacheBytes == 0 {
		v.CacheBytes = 64 << 20
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	return v
}

// PebbleOptions are the settings with which the catalog opens Pebble, for a
// benchmark that compares the two.
func PebbleOptions(o *CatalogOptions) *pebble.Options {
	v := o.withDefaults()
	p := &pebble.Options{
		FS:                         v.FS,
		CacheSize:                  v.CacheBytes,
		ReadOnly:                   v.ReadOnly,
		FormatMajorVersion:         pebble.FormatNewest,
		MemTableSize:               64 << 20,
		BytesPerSync:               1 << 20,
		WALBytesPerSync:            1 << 20,
		L0CompactionThreshold:      4,
		CompactionConcurrencyRange: func() (int, int) { return 1, 2 },
		Logger:                     pebbleLogger{log: v.Logger},
	}
	for i := range p.Levels {
		p.Levels[i].BlockSize = 16 << 10
		p.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	return p
}

// Catalog is the durable truth of the store: namespaces, slabs, and where each
// block of the durable media lies. It may be used by many goroutines at once.
//
// A commit is atomic, and one with sync survives everything that the disk
// survives. When the write-ahead log cannot be written, the catalog has failed:
// every commit from then on, and those under way, end with an error that says
// so, reads go on, and only opening the catalog again makes it whole, as Reopen
// does in place. While Pebble cannot flush its memory, new commits are refused.
type Catalog struct {
	dir   string
	opts  CatalogOptions
	log   *slog.Logger
	lock  *pebble.Lock
	boot  uint32
	store [16]byte
	clean bool
	syncs syncStats

	// engine changes under gate only. Every call holds the gate for reading while
	// it uses Pebble.
	engine atomic.Pointer[engine]
	gate   sync.RWMutex
	closed bool  // under gate
	err    error // of Close, under gate

	// admin orders the calls that read a record and write it back. They are rare,
	// and each must be on disk before the next one reads, so it is held across
	// their syncs.
	admin struct {
		sync.Mutex
		meta meta
	}
}

// OpenCatalog opens the catalog in a directory, and makes both if they are not
// there. It fails with block.ErrUnavailable when another process, or another
// Catalog of this one, has it open or the directory cannot be used; with
// block.ErrNoSpace when opening it needs more room than there is; with
// ErrVersion when it was written by a newer program; with block.ErrCorrupt when
// its files are damaged; and read-only with block.ErrNotFound when there is none.
func OpenCatalog(dir string, o *CatalogOptions) (*Catalog, error) {
	v := o.withDefaults()
	if v.FS == vfs.Default {
		// Pebble tells two openings of one directory in this process apart by name.
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, fmt.Errorf("open catalog %s: %w: %w", dir, block.ErrUnavailable, err)
		}
		if real, err := filepath.EvalSymlinks(abs); err == nil {
			abs = real
		}
		dir = abs
	}
	c := &Catalog{dir: dir, opts: v, log: v.Logger}
	if err := c.open(nil); err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", dir, err)
	}
	return c, nil
}

// Boot is how many times the catalog had been opened for writing when it was
// opened, that time included. It does not change with Reopen, although that
// counts as an opening in the catalog itself.
func (c *Catalog) Boot() uint32 { return c.boot }

// StoreID is the identity of the store, drawn when its catalog was made.
func (c *Catalog) StoreID() [16]byte { return c.store }

// Clean reports whether the opening before this one ended with MarkClean. It is
// true for a new catalog. It does not change with Reopen.
func (c *Catalog) Clean() bool { return c.clean }

// MarkClean notes, synced, that the store ends in order: nothing is under way,
// and Close comes next. The next opening finds it; see Clean.
func (c *Catalog) MarkClean() error {
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	m := c.admin.meta
	m.Clean = true
	if err := c.now().put(metaKey, m.encode()); err != nil {
		return fmt.Errorf("mark catalog clean: %w", err)
	}
	return nil
}

// Err says why the catalog takes no more commits, or nil.
func (c *Catalog) Err() error { return c.now().err() }

// now is the engine, which stays what it is between enter and leave.
func (c *Catalog) now() *engine { return c.engine.Load() }

// Close waits for calls under way and closes the catalog. It is safe twice.
func (c *Catalog) Close() error {
	// Commits under way may wait for a disk that does not take them.
	if e := c.now(); e.err() != nil {
		e.abandon(e.err())
	}
	c.gate.Lock()
	defer c.gate.Unlock()
	if c.closed {
		return c.err
	}
	c.closed = true
	err := c.now().close()
	if e := c.lock.Close(); err == nil {
		err = e
	}
	if err != nil {
		c.err = fmt.Errorf("close catalog %s: %w", c.dir, err)
	}
	return c.err
}

// enter keeps the catalog open until leave. What runs in between must not enter
// again: while Close or Reopen wait, that would wait for them.
func (c *Catalog) enter() error {
	c.gate.RLock()
	var err error
	switch e := c.now(); {
	case c.closed:
		err = fmt.Errorf("catalog %s: %w", c.dir, block.ErrClosed)
	case e.db == nil:
		err = fmt.Errorf("catalog %s: %w: %v", c.dir, block.ErrUnavailable, e.err())
	default:
		return nil
	}
	c.gate.RUnlock()
	return err
}

func (c *Catalog) leave() { c.gate.RUnlock() }

// enterWrite is enter for a call that writes.
func (c *Catalog) enterWrite() error {
	if c.opts.ReadOnly {
		return fmt.Errorf("catalog %s: %w: opened read-only", c.dir, block.ErrInvalid)
	}
	c.gate.RLock()
	err := c.Err()
	if c.closed {
		err = fmt.Errorf("catalog %s: %w", c.dir, block.ErrClosed)
	}
	if err != nil {
		c.gate.RUnlock()
	}
	return err
}

// CatalogMetrics is a snapshot of what the catalog costs and does.
type CatalogMetrics struct {
	DiskBytes      int64
	WALBytes       int64
	MemTableBytes  int64
	CacheBytes     int64
	CacheHits      int64
	CacheMisses    int64
	Flushes        int64
	Compactions    int64
	CompactionDebt int64 // bytes that compactions still have to move
	L0Files        int64
	WALSyncs       int64
	WALSyncTime    time.Duration // all syncs together
	WALSyncMax     time.Duration
	Failed         bool // takes no commits; see Catalog.Err
}

// Metrics takes a snapshot and waits for nothing; a catalog that is closed, or that is being
// or could not be opened again, has none but the log's. What Pebble counts begins anew with Reopen.
func (c *Catalog) Metrics() CatalogMetrics {
	v := CatalogMetrics{
		WALSyncs:    c.syncs.count.Load(),
		WALSyncTime: time.Duration(c.syncs.nanos.Load()),
		WALSyncMax:  time.Duration(c.syncs.max.Load()),
		Failed:      c.Err() != nil,
	}
	// Closing and opening again wait for reads, which may wait for a disk.
	if !c.gate.TryRLock() {
		return v
	}
	defer c.leave()
	if c.closed || c.now().db == nil {
		return v
	}
	m := c.now().db.Metrics()
	v.DiskBytes = int64(m.DiskSpaceUsage())
	v.WALBytes = int64(m.WAL.PhysicalSize)
	v.MemTableBytes = int64(m.MemTable.Size)
	v.CacheBytes = m.BlockCache.Size
	v.CacheHits, v.CacheMisses = m.BlockCache.Hits, m.BlockCache.Misses
	v.Flushes = m.Flush.Count
	v.Compactions = m.Compact.Count
	v.CompactionDebt = int64(m.Compact.EstimatedDebt)
	v.L0Files = m.Levels[0].TablesCount
	return v
}
