package index

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index/block"
)

// restoreBatch is how many records a commit of RestoreCatalog has.
const restoreBatch = 1000

// RestoreCatalog makes a new catalog in a directory, which must not exist, of
// what a manifest says and of the records that fill hands to put. It is the
// catalog of the manifest's store, has been opened at least boot times, and gives
// out no namespace id that was given out before. Its last opening did not end in
// order: see Catalog.Clean.
//
// All is synced when RestoreCatalog returns, a manifest at ManifestPath(dir) too,
// which is written last. The caller may move the directory to its place and leave
// the manifest behind, since the next opening writes it anew. After an error the
// directory is gone, and a manifest that was there before is as it was, or is the
// new one.
//
// It fails with block.ErrInvalid when the directory exists or the manifest
// contradicts itself.
func RestoreCatalog(dir string, m *Manifest, boot uint32, fill func(put func(*Record) error) error, o *CatalogOptions) (err error) {
	v := o.withDefaults()
	defer func() {
		if err != nil {
			err = fmt.Errorf("restore catalog %s: %w", dir, err)
		}
	}()
	if v.ReadOnly {
		return fmt.Errorf("%w: opened read-only", block.ErrInvalid)
	}
	if err := m.validate(); err != nil {
		return err
	}
	if _, err := v.FS.Stat(dir); err == nil {
		return fmt.Errorf("%w: it exists", block.ErrInvalid)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	defer func() {
		if err != nil {
			_ = v.FS.RemoveAll(dir) // half a catalog is of no use to anybody
		}
	}()
	c := &Catalog{dir: dir, opts: v, log: v.Logger}
	// The opening itself counts one.
	fresh := meta{Catalog: catalogVersion, Boot: max(boot, m.Boot), NextSpace: max(m.NextSpace, 1), Store: m.Store}
	if err := c.open(&fresh); err != nil {
		return err
	}
	err = c.restore(m, fill)
	if e := c.Close(); err == nil {
		err = e
	}
	return err
}

// validate refuses what the catalog's own calls would not have written.
func (m *Manifest) validate() error {
	seen := make(map[string]bool)
	for i := range m.Spaces {
		n := &m.Spaces[i]
		if n.ID == 0 || n.ID >= m.NextSpace {
			return fmt.Errorf("%w: manifest: namespace %q has id %d, next is %d", block.ErrInvalid, n.Desc.Name, n.ID, m.NextSpace)
		}
		if err := checkSpace(&n.Namespace); err != nil {
			return fmt.Errorf("manifest: %w", err)
		}
		key := string(n.key())
		if seen[key] {
			return fmt.Errorf("%w: manifest: namespace %q, id %d, is there twice", block.ErrInvalid, n.Desc.Name, n.ID)
		}
		seen[key] = true
	}
	return nil
}

// restore fills a new catalog, which nobody else knows.
func (c *Catalog) restore(m *Manifest, fill func(put func(*Record) error) error) error {
	b := c.NewBatch()
	err := fill(func(r *Record) error {
		if !block.ValidHashLen(r.HashLen) {
			return fmt.Errorf("%w: record of block %s: hash length %d", block.ErrInvalid, r.Key, r.HashLen)
		}
		b.Put(r)
		if b.Len() < restoreBatch {
			return nil
		}
		return c.Commit(b, false)
	})
	if err == nil {
		err = c.Commit(b, false)
	}
	if err != nil {
		return err
	}
	admin := c.now().db.NewBatch()
	if err := m.set(admin); err != nil {
		return pebbleErr("pebble", err)
	}
	// This sync covers the records before it.
	return c.commitAdmin(admin)
}

// set writes the manifest's records to a batch.
func (m *Manifest) set(b *pebble.Batch) error {
	for i := range m.Spaces {
		key := m.Spaces[i].key()
		if err := b.Set(key, encodeSpace(key, &m.Spaces[i].Namespace), nil); err != nil {
			return err
		}
	}
	for i := range m.Slabs {
		key, value := m.Slabs[i].encode()
		if err := b.Set(key, value, nil); err != nil {
			return err
		}
	}
	if m.Tombstones {
		return b.Set(tombsKey, encodeTombsRecord(), nil)
	}
	return nil
}
