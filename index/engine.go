package index

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// engine is one opening of Pebble and what has failed in it.
type engine struct {
	dir  string
	log  *slog.Logger
	db   *pebble.DB // nil: it could not be opened, and failed says why
	wal  *walFS
	disk *diskFS

	failed   atomic.Pointer[error] // stays
	flush    retry
	compact  retry
	stalling atomic.Bool // commits wait for flushes or compactions

	hurry sync.Once
	ends  chan struct{} // closed when nothing may rest any more
}

func newEngine(c *Catalog) *engine {
	e := &engine{dir: c.dir, log: c.log, ends: make(chan struct{})}
	e.disk = newDiskFS(c.opts.FS, e.fatal)
	e.wal = &walFS{FS: e.disk, fail: e.fail, pause: e.pause, syncs: &c.syncs}
	return e
}

// open opens Pebble. An existing one is not made anew.
func (e *engine) open(c *Catalog, existing bool) (err error) {
	p := PebbleOptions(&c.opts)
	p.FS = e.wal
	p.Lock = c.lock
	p.Logger = pebbleLogger{log: c.log, fatal: e.fatal}
	p.EventListener = e.listener()
	p.ErrorIfNotExists = existing
	if e.db, err = pebble.Open(e.dir, p); err != nil {
		switch {
		case errors.Is(err, pebble.ErrDBDoesNotExist):
			return fmt.Errorf("%w: %w", block.ErrNotFound, err)
		case errors.Is(err, block.ErrCorrupt):
			return err
		case pebble.IsCorruptionError(err):
			return fmt.Errorf("%w: %w", block.ErrCorrupt, err)
		}
		return diskErr(err)
	}
	return nil
}

// close ends Pebble. No call may be under way.
func (e *engine) close() error {
	if e.db == nil {
		return nil
	}
	e.hasten()
	db := e.db
	e.db = nil
	return db.Close()
}

func (e *engine) hasten() { e.hurry.Do(func() { close(e.ends) }) }

// abandon makes every commit fail, those under way too, and lets Pebble end all
// it does without the disk, so that nothing waits for it.
func (e *engine) abandon(why error) {
	e.failed.CompareAndSwap(nil, &why) // before anybody can be told of a success
	e.wal.failed.Store(true)
	e.disk.freeze(why)
	e.hasten()
}

// err says why there are no more commits, or nil.
func (e *engine) err() error {
	if p := e.failed.Load(); p != nil {
		return *p
	}
	if p := e.flush.failed.Load(); p != nil {
		return *p
	}
	// Compactions may fail for a while before anything has to wait for them.
	if p := e.compact.failed.Load(); p != nil && e.stalling.Load() {
		return *p
	}
	return nil
}

// put writes one key, synced.
func (e *engine) put(key, value []byte) error {
	b := e.db.NewBatch()
	if err := b.Set(key, value, nil); err != nil {
		return pebbleErr("pebble", err)
	}
	return e.commitOnce(b)
}

// commitOnce commits a batch, synced, and is done with it.
func (e *engine) commitOnce(b *pebble.Batch) error {
	if err := e.commit(b, true); err != nil {
		return err // Pebble may still hold on to the batch
	}
	if err := b.Close(); err != nil {
		return pebbleErr("pebble", err)
	}
	return nil
}

// commit is Pebble's, with failures that Pebble was not told of.
func (e *engine) commit(b *pebble.Batch, sync bool) error {
	o := pebble.NoSync
	if sync {
		o = pebble.Sync
	}
	if err := e.db.Apply(b, o); err != nil {
		return pebbleErr("pebble", err)
	}
	// After the commit, not before: the log may have failed under it.
	if p := e.failed.Load(); p != nil {
		return *p
	}
	return nil
}

// fail makes the engine refuse commits for good. The first reason stays.
func (e *engine) fail(err error) {
	err = fmt.Errorf("catalog %s has failed: %w", e.dir, diskErr(err))
	if e.failed.CompareAndSwap(nil, &err) {
		e.log.Error("catalog failed; it takes no more writes until it is opened again", "err", err)
	}
}

// fatal takes an error after which Pebble would end the process.
func (e *engine) fatal(err error) {
	e.fail(err)
	e.disk.refuse(err)
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
func (e *engine) pause() {
	if e.flush.failed.Load() == nil && e.compact.failed.Load() == nil {
		return
	}
	select {
	case <-time.After(retryPause):
	case <-e.ends:
	}
}

func (e *engine) listener() *pebble.EventListener {
	return &pebble.EventListener{
		FlushBegin:      func(pebble.FlushInfo) { invariants.CrashAt("catalog-flush") },
		CompactionBegin: func(pebble.CompactionInfo) { invariants.CrashAt("catalog-compaction") },
		WALCreated:      func(pebble.WALCreateInfo) { invariants.CrashAt("catalog-wal") },
		FlushEnd: func(i pebble.FlushInfo) {
			if e.flush.ended(i.Err) {
				e.log.Info("catalog flushes again")
			}
		},
		CompactionEnd: func(i pebble.CompactionInfo) {
			invariants.CrashAt("catalog-compaction")
			if e.compact.ended(i.Err) {
				e.log.Info("catalog compacts again")
			}
		},
		BackgroundError: func(err error) {
			flush := e.flush.background("catalog "+e.dir+" cannot flush", err)
			compact := e.compact.background("catalog "+e.dir+" cannot compact", err)
			// One line for each failure, not for each try.
			if flush || compact {
				e.log.Error("catalog: work in the background fails", "err", err)
			}
		},
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			e.log.Error("catalog: corrupt table", "path", i.Path, "err", i.Details)
		},
		WriteStallBegin: func(i pebble.WriteStallBeginInfo) {
			e.stalling.Store(true)
			e.log.Warn("catalog: writes wait", "reason", i.Reason)
		},
		WriteStallEnd: func() { e.stalling.Store(false) },
		DiskSlow: func(i pebble.DiskSlowInfo) {
			e.log.Warn("catalog: disk is slow", "path", i.Path, "op", i.OpType.String(), "seconds", i.Duration.Seconds())
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
