package index

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/kvtier/kvtier/index/block"
)

// open opens the catalog the first time. A new one begins with the meta record
// of fresh, or with one of its own when that is nil.
func (c *Catalog) open(fresh *meta) (err error) {
	v := &c.opts
	if v.ReadOnly {
		if _, err := v.FS.Stat(c.dir); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", block.ErrNotFound, err)
		}
	} else {
		if err := checkRemains(v.FS, c.dir, fresh != nil); err != nil {
			return err
		}
		if err := v.FS.MkdirAll(c.dir, 0o755); err != nil {
			return diskErr(err)
		}
	}
	if c.lock, err = pebble.LockDirectory(c.dir, v.FS); err != nil {
		// The lock file itself may be out of reach; what else fails is the lock.
		if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
			return diskErr(err)
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
	if err := c.ratchet(); err != nil {
		return err
	}
	e := newEngine(c)
	m, err := c.openEngine(e, fresh, false)
	if err != nil {
		return err
	}
	c.engine.Store(e)
	c.boot, c.store = m.Boot, m.Store
	return nil
}

// Reopen makes a catalog that has failed whole again, as if the process had been
// started anew: it closes Pebble and opens it on the same directory. It waits for
// calls under way, which may fail, and later ones wait for it. A catalog that has
// not failed stays as it is.
//
// Every commit that was answered without an error is there afterwards. One that
// failed may or may not be, all of it or nothing. Batches stay what they are.
//
// With an error the catalog has failed for that reason, reads fail with
// block.ErrUnavailable, and Reopen may be called again.
func (c *Catalog) Reopen() error {
	if c.opts.ReadOnly {
		return fmt.Errorf("reopen catalog %s: %w: opened read-only", c.dir, block.ErrInvalid)
	}
	old := c.now()
	if err := old.err(); err != nil {
		old.abandon(err)
	}
	c.gate.Lock()
	defer c.gate.Unlock()
	if c.closed {
		return fmt.Errorf("reopen catalog %s: %w", c.dir, block.ErrClosed)
	}
	if old.failed.Load() == nil || c.now() != old {
		return c.Err() // nothing to do, or another call has done it
	}
	if err := old.close(); err != nil {
		// It has failed, and what is on disk is what counts.
		c.log.Warn("catalog: close before it is opened again", "err", err)
	}
	e := newEngine(c)
	if _, err := c.openEngine(e, nil, true); err != nil {
		err = fmt.Errorf("reopen catalog %s: %w", c.dir, err)
		e.failed.Store(&err)
		c.engine.Store(e)
		return err
	}
	c.engine.Store(e)
	c.log.Info("catalog is whole again")
	return nil
}

// ratchet opens Pebble once and closes it, when its files are new or of an older
// format. The log of such an opening is written in the oldest format, in which
// nothing tells a damaged place from the log's end, and the log of the next
// opening in the newest, in which a synced chunk tells that all before it was whole.
func (c *Catalog) ratchet() error {
	if c.opts.ReadOnly {
		return nil
	}
	// What cannot be looked at, the opening itself reports.
	if d, err := pebble.Peek(c.dir, c.opts.FS); err != nil || d.Exists && d.FormatMajorVersion >= pebble.FormatNewest {
		return nil
	}
	e := newEngine(c)
	err := e.open(c, false)
	if err != nil {
		return err
	}
	if err = e.disk.opened(); err != nil {
		e.abandon(err)
	}
	if e := e.close(); err == nil {
		err = e
	}
	if err != nil {
		return diskErr(err)
	}
	return nil
}

// openEngine opens Pebble, reads and writes the meta record, and writes the
// manifest, unless the catalog is a new one that does not have it all yet.
func (c *Catalog) openEngine(e *engine, fresh *meta, existing bool) (m meta, err error) {
	if err := e.open(c, existing); err != nil {
		return m, err
	}
	defer func() {
		if err != nil {
			e.abandon(err)
			_ = e.close() // the error of opening is the one to tell
		}
	}()
	m, err = c.start(e, fresh, existing)
	if e := e.disk.opened(); e != nil {
		return m, diskErr(e) // Pebble was not told
	}
	c.admin.meta = m
	if err == nil && !c.opts.ReadOnly && fresh == nil {
		err = c.writeManifest(e)
	}
	return m, err
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
func (c *Catalog) start(e *engine, fresh *meta, existing bool) (meta, error) {
	var m meta
	value, closer, err := e.db.Get(metaKey)
	none := errors.Is(err, pebble.ErrNotFound)
	switch {
	case err == nil:
		err = m.decode(value)
		_ = closer.Close() // has no error to give after a read
		if err != nil {
			return m, err
		}
		if existing && m.Store != c.store {
			return m, fmt.Errorf("%w: it is another store's", block.ErrCorrupt)
		}
	case !none:
		return m, pebbleErr("read meta record", err)
	case c.opts.ReadOnly || existing:
		return m, fmt.Errorf("%w: no meta record", block.ErrNotFound)
	default:
		if err := checkEmpty(e.db); err != nil {
			return m, err
		}
		if m, err = firstMeta(fresh); err != nil {
			return m, err
		}
	}
	if fresh == nil {
		if err := c.checkLag(e, &m, none); err != nil {
			return m, err
		}
	}
	if !existing {
		c.clean = m.Clean
	}
	if !c.opts.ReadOnly {
		m.Catalog = catalogVersion
		m.Boot++
		m.Clean = false
		if err := e.put(metaKey, m.encode()); err != nil {
			return m, fmt.Errorf("write meta record: %w", err)
		}
	}
	return m, nil
}

// firstMeta is the meta record of a new catalog before it is opened.
func firstMeta(fresh *meta) (meta, error) {
	if fresh != nil {
		return *fresh, nil
	}
	m := meta{Catalog: catalogVersion, NextSpace: 1, Clean: true}
	if _, err := rand.Read(m.Store[:]); err != nil {
		return m, fmt.Errorf("draw store id: %w", err)
	}
	return m, nil
}

// checkEmpty refuses records without a meta record: a catalog that lost it must
// not give out identities again.
func checkEmpty(db *pebble.DB) error {
	it, err := db.NewIter(nil)
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
