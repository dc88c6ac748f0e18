package index

import (
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/index/block"
)

// checkLag refuses a catalog that has lost what it had on disk: Pebble takes a log
// that is gone, or damaged near its end, for one that ends there. The manifest is
// written after the catalog's commits and so never knows more than the catalog,
// unless that has lost something. none: the catalog has no meta record.
func (c *Catalog) checkLag(e *engine, have *meta, none bool) error {
	path := ManifestPath(c.dir)
	m, err := readManifest(c.opts.FS, path)
	switch {
	case errors.Is(err, block.ErrNotFound):
		return nil
	case errors.Is(err, ErrVersion):
		return err // not this program's to replace
	case err == nil && !none:
	case none:
		return fmt.Errorf("%w: there is %s and the catalog is empty: it has lost what it had, and a repair can make it anew", block.ErrCorrupt, path)
	default:
		c.log.Warn("catalog: its manifest cannot be read and is written anew", "err", err)
		return nil
	}
	lost := func(what string) error {
		return fmt.Errorf("%w: it lacks %s of %s: it has lost its last commits, and a repair can make it anew", block.ErrCorrupt, what, path)
	}
	switch {
	case m.Store != have.Store:
		return fmt.Errorf("%w: %s is another store's", block.ErrCorrupt, path)
	case m.Boot > have.Boot:
		return lost(fmt.Sprintf("opening %d", m.Boot))
	case m.NextSpace > have.NextSpace:
		return lost(fmt.Sprintf("namespace id %d", m.NextSpace-1))
	}
	var now Manifest
	if err := now.collect(e); err != nil {
		return err
	}
	epochs, slabs := map[string]uint32{}, map[uint16]bool{}
	for i := range now.Spaces {
		epochs[string(now.Spaces[i].key())] = now.Spaces[i].Epoch
	}
	for i := range now.Slabs {
		slabs[now.Slabs[i].Number] = true
	}
	for i := range m.Spaces {
		n := &m.Spaces[i]
		epoch, ok := epochs[string(n.key())]
		if !ok && !n.Dropped { // dropped since, by a commit that the manifest has missed
			epoch, ok = epochs[string(droppedKey(n.Desc.Digest()))]
		}
		if !ok || epoch < n.Epoch {
			return lost(fmt.Sprintf("epoch %d of namespace %q", n.Epoch, n.Desc.Name))
		}
	}
	for i := range m.Slabs {
		if !slabs[m.Slabs[i].Number] {
			return lost(fmt.Sprintf("slab %d", m.Slabs[i].Number))
		}
	}
	return nil
}
