package index

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

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
// so, reads go on, and only opening the catalog again makes it whole. While
// Pebble cannot flush its memory, new commits are refused.
type Catalog struct {
	dir   string
	log   *slog.Logger
	db    *pebble.DB
	lock  *pebble.Lock
	wal   *walFS
	ro    bool
	boot  uint32
	store [16]byte

	failed   atomic.Pointer[error] // stays
	flush    retry
	compact  retry
	stalling atomic.Bool // commits wait for flushes or compactions

	// admin orders the calls that read a record and write it back. They are rare,
	// and each must be on disk before the next one reads, so it is held across
	// their syncs.
	admin struct {
		sync.Mutex
		meta meta
	}

	mu struct {
		sync.Mutex
		closed bool
		err    error // of Close
		users  sync.WaitGroup
	}
	closing chan struct{} // closed when Close begins
	done    chan struct{} // closed when Close has ended
}

// OpenCatalog opens the catalog in a directory, and makes both if they are not
// there. It fails with block.ErrUnavailable when another process, or another
// Catalog of this one, has it open or the directory cannot be used; with
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
	c := &Catalog{dir: dir, log: v.Logger, ro: v.ReadOnly, closing: make(chan struct{}), done: make(chan struct{})}
	if err := c.open(v); err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", dir, err)
	}
	return c, nil
}

func (c *Catalog) open(v CatalogOptions) (err error) {
	if v.ReadOnly {
		if _, err := v.FS.Stat(c.dir); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", block.ErrNotFound, err)
		}
	} else if err := v.FS.MkdirAll(c.dir, 0o755); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if c.lock, err = pebble.LockDirectory(c.dir, v.FS); err != nil {
		// The lock file itself may be out of reach; what else fails is the lock.
		if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
			return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
		}
		return fmt.Errorf("%w: in use by another process: %w", block.ErrUnavailable, err)
	}
	defer func() {
		if err != nil {
			_ = c.lock.Close() // the error of opening is the one to tell
		}
	}()
	if err := checkPebbleFormat(v.FS, c.dir); err != nil {
		return err
	}
	c.wal = &walFS{FS: v.FS, fail: c.fail, pause: c.pause}
	p := PebbleOptions(&v)
	p.FS = c.wal
	p.Lock = c.lock
	p.Logger = pebbleLogger{log: v.Logger, fatal: c.fail}
	p.EventListener = c.listener()
	if c.db, err = pebble.Open(c.dir, p); err != nil {
		switch {
		case errors.Is(err, pebble.ErrDBDoesNotExist):
			return fmt.Errorf("%w: %w", block.ErrNotFound, err)
		case pebble.IsCorruptionError(err):
			return fmt.Errorf("%w: %w", block.ErrCorrupt, err)
		}
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if err = c.start(); err != nil {
		_ = c.db.Close() // likewise
	}
	return err
}

// checkPebbleFormat tells a catalog of a newer Pebble from a damaged one.
func checkPebbleFormat(v vfs.FS, dir string) error {
	m, text, err := atomicfs.LocateMarker(v, dir, "format-version")
	if err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if err := m.Close(); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && n > uint64(pebble.FormatNewest) {
		return fmt.Errorf("pebble: %w: %d, this program knows up to %d", ErrVersion, n, pebble.FormatNewest)
	}
	return nil
}

// start reads the meta record, or writes the first one, and counts the opening.
func (c *Catalog) start() error {
	m := &c.admin.meta
	value, closer, err := c.db.Get(metaKey)
	switch {
	case err == nil:
		err = m.decode(value)
		_ = closer.Close() // has no error to give after a read
		if err != nil {
			return err
		}
	case !errors.Is(err, pebble.ErrNotFound):
		return pebbleErr("read meta record", err)
	case c.ro:
		return fmt.Errorf("%w: no meta record", block.ErrNotFound)
	default:
		if err := c.checkEmpty(); err != nil {
			return err
		}
		*m = meta{Catalog: catalogVersion, NextSpace: 1}
		if _, err := rand.Read(m.Store[:]); err != nil {
			return fmt.Errorf("draw store id: %w", err)
		}
	}
	if !c.ro {
		m.Boot++
		if err := c.put(metaKey, m.encode()); err != nil {
			return fmt.Errorf("write meta record: %w", err)
		}
	}
	c.boot, c.store = m.Boot, m.Store
	return nil
}

// checkEmpty refuses records without a meta record: a catalog that lost it must
// not give out identities again.
func (c *Catalog) checkEmpty() error {
	it, err := c.db.NewIter(nil)
	if err != nil {
		return pebbleErr("look for records", err)
	}
	any := it.First()
	if err := it.Close(); err != nil {
		return pebbleErr("look for records", err)
	}
	if any {
		return fmt.Errorf("%w: records without a meta record", block.ErrCorrupt)
	}
	return nil
}

// Boot is how many times the catalog has been opened for writing, this one
// included.
func (c *Catalog) Boot() uint32 { return c.boot }

// StoreID is the identity of the store, drawn when its catalog was made.
func (c *Catalog) StoreID() [16]byte { return c.store }

// Err says why the catalog takes no more commits, or nil.
func (c *Catalog) Err() error {
	if p := c.failed.Load(); p != nil {
		return *p
	}
	if p := c.flush.failed.Load(); p != nil {
		return *p
	}
	// Compactions may fail for a while before anything has to wait for them.
	if p := c.compact.failed.Load(); p != nil && c.stalling.Load() {
		return *p
	}
	return nil
}

// Close waits for calls under way and closes the catalog. It is safe twice.
func (c *Catalog) Close() error {
	c.mu.Lock()
	first := !c.mu.closed
	c.mu.closed = true
	c.mu.Unlock()
	if !first {
		<-c.done
		return c.mu.err
	}
	close(c.closing)
	c.mu.users.Wait()
	err := c.db.Close()
	if e := c.lock.Close(); err == nil {
		err = e
	}
	if err != nil {
		c.mu.err = fmt.Errorf("close catalog %s: %w", c.dir, err)
	}
	close(c.done)
	return c.mu.err
}

// enter keeps the catalog open until leave.
func (c *Catalog) enter() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return fmt.Errorf("catalog %s: %w", c.dir, block.ErrClosed)
	}
	c.mu.users.Add(1)
	return nil
}

func (c *Catalog) leave() { c.mu.users.Done() }

// enterWrite is enter for a call that writes.
func (c *Catalog) enterWrite() error {
	if c.ro {
		return fmt.Errorf("catalog %s: %w: opened read-only", c.dir, block.ErrInvalid)
	}
	if err := c.Err(); err != nil {
		return err
	}
	return c.enter()
}

// fail makes the catalog refuse commits for good. The first reason stays.
func (c *Catalog) fail(err error) {
	err = fmt.Errorf("catalog %s has failed: %w", c.dir, diskErr(err))
	if c.failed.CompareAndSwap(nil, &err) {
		c.log.Error("catalog failed; it takes no more writes until it is opened again", "err", err)
	}
}

// retryPause is how long work in the background rests after a failure.
const retryPause = 100 * time.Millisecond

// retry is the state of work in the background that Pebble tries again, at once
// and without end, when it failed.
type retry struct {
	last   atomic.Pointer[error] // how the last try ended, if with an error
	failed atomic.Pointer[error] // the same once Pebble has called it a failure
}

// ended takes the end of a try. What Pebble does not report as a background
// error after it, such as a flush of which nothing remained, is none.
func (r *retry) ended(err error) (again bool) {
	if err != nil {
		r.last.Store(&err)
		return false
	}
	r.last.Store(nil)
	return r.failed.Swap(nil) != nil
}

func (r *retry) background(what string, err error) (first bool) {
	last := r.last.Load()
	if last == nil || !errors.Is(err, *last) {
		return false
	}
	err = fmt.Errorf("%s: %w", what, diskErr(err))
	return r.failed.Swap(&err) == nil
}

// pause keeps work that failed from being tried again at once, which would take
// a core.
func (c *Catalog) pause() {
	if c.flush.failed.Load() == nil && c.compact.failed.Load() == nil {
		return
	}
	select {
	case <-time.After(retryPause):
	case <-c.closing:
	}
}

func (c *Catalog) listener() *pebble.EventListener {
	return &pebble.EventListener{
		FlushEnd: func(i pebble.FlushInfo) {
			if c.flush.ended(i.Err) {
				c.log.Info("catalog flushes again")
			}
		},
		CompactionEnd: func(i pebble.CompactionInfo) {
			if c.compact.ended(i.Err) {
				c.log.Info("catalog compacts again")
			}
		},
		BackgroundError: func(err error) {
			flush := c.flush.background("catalog "+c.dir+" cannot flush", err)
			compact := c.compact.background("catalog "+c.dir+" cannot compact", err)
			// One line for each failure, not for each try.
			if flush || compact {
				c.log.Error("catalog: work in the background fails", "err", err)
			}
		},
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			c.log.Error("catalog: corrupt table", "path", i.Path, "err", i.Details)
		},
		WriteStallBegin: func(i pebble.WriteStallBeginInfo) {
			c.stalling.Store(true)
			c.log.Warn("catalog: writes wait", "reason", i.Reason)
		},
		WriteStallEnd: func() { c.stalling.Store(false) },
		DiskSlow: func(i pebble.DiskSlowInfo) {
			c.log.Warn("catalog: disk is slow", "path", i.Path, "op", i.OpType.String(), "seconds", i.Duration.Seconds())
		},
	}
}

// diskErr says whether more room would help.
func diskErr(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: %w", block.ErrNoSpace, err)
	}
	return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
}

func pebbleErr(what string, err error) error {
	if pebble.IsCorruptionError(err) {
		return fmt.Errorf("%s: %w: %w", what, block.ErrCorrupt, err)
	}
	return fmt.Errorf("%s: %w: %w", what, block.ErrUnavailable, err)
}

// pebbleLogger hands Pebble's lines on. Fatalf returns: what Pebble calls fatal
// makes the catalog refuse writes, not the process end.
type pebbleLogger struct {
	log   *slog.Logger
	fatal func(error)
}

func (l pebbleLogger) Infof(format string, args ...any) {
	if l.log.Enabled(context.Background(), slog.LevelDebug) {
		l.log.Debug("pebble: " + fmt.Sprintf(format, args...))
	}
}

func (l pebbleLogger) Errorf(format string, args ...any) {
	l.log.Warn("pebble: " + fmt.Sprintf(format, args...))
}

func (l pebbleLogger) Fatalf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	l.log.Error("pebble: " + text)
	if l.fatal == nil {
		return
	}
	for _, a := range args {
		if err, ok := a.(error); ok {
			l.fatal(err)
			return
		}
	}
	l.fatal(errors.New(text))
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

// Metrics takes a snapshot; a closed catalog has none but the log's.
func (c *Catalog) Metrics() CatalogMetrics {
	v := CatalogMetrics{
		WALSyncs:    c.wal.syncs.count.Load(),
		WALSyncTime: time.Duration(c.wal.syncs.nanos.Load()),
		WALSyncMax:  time.Duration(c.wal.syncs.max.Load()),
		Failed:      c.Err() != nil,
	}
	if c.enter() != nil {
		return v
	}
	defer c.leave()
	m := c.db.Metrics()
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
