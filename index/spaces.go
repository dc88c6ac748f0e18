package index

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// putAdmin writes one key that the manifest mirrors.
func (c *Catalog) putAdmin(key, value []byte) error {
	if err := c.now().put(key, value); err != nil {
		return err
	}
	return c.mirror()
}

// commitAdmin is putAdmin for a batch.
func (c *Catalog) commitAdmin(b *pebble.Batch) error {
	if err := c.now().commitOnce(b); err != nil {
		return err
	}
	return c.mirror()
}

// mirror writes the manifest behind a change. Where it falls behind, the catalog
// has failed: a repair would take blocks that are recorded from then on for those
// of another epoch, and the cleared ones for theirs.
func (c *Catalog) mirror() error {
	invariants.CrashAt("catalog-manifest")
	e := c.now()
	err := c.writeManifest(e)
	if err != nil {
		e.fail(err)
	}
	return err
}

// Namespaces lists the namespaces in the order of their ids, without those that
// were dropped.
func (c *Catalog) Namespaces() ([]block.Namespace, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	var all []block.Namespace
	err := c.now().each("list namespaces", []byte{kindSpace}, []byte{kindSpace + 1}, func(key, value []byte) error {
		n, err := decodeSpace(key, value)
		all = append(all, n)
		return err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// NewNamespaceID draws an id that no namespace of this store has had or will
// have. It is synced before it is returned.
func (c *Catalog) NewNamespaceID() (block.NamespaceID, error) {
	if err := c.enterWrite(); err != nil {
		return 0, err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	m := c.admin.meta
	id := m.NextSpace
	m.NextSpace++
	if m.NextSpace == 0 {
		return 0, fmt.Errorf("draw namespace id: %w: all are used", block.ErrNoSpace)
	}
	if err := c.now().put(metaKey, m.encode()); err != nil {
		return 0, fmt.Errorf("draw namespace id: %w", err)
	}
	c.admin.meta = m // given out whatever comes of the manifest
	if err := c.mirror(); err != nil {
		return 0, fmt.Errorf("draw namespace id: %w", err)
	}
	return id, nil
}

// FirstEpoch is the lowest epoch that a new namespace with this descriptor may
// have: 0, or one above all that namespaces with the same descriptor had when
// they were dropped, since blocks of theirs may still lie on the media.
func (c *Catalog) FirstEpoch(d block.Descriptor) (uint32, error) {
	if err := c.enter(); err != nil {
		return 0, err
	}
	defer c.leave()
	return c.firstEpoch(d)
}

func (c *Catalog) firstEpoch(d block.Descriptor) (uint32, error) {
	n, ok, err := c.space(droppedKey(d.Digest()))
	if err != nil || !ok {
		return 0, err
	}
	return n.Epoch, nil
}

// PutNamespace adds or replaces a namespace, synced. It fails with
// block.ErrInvalid when the id is not one that NewNamespaceID gave, or the
// namespace is a new one with an epoch below FirstEpoch.
func (c *Catalog) PutNamespace(n block.Namespace) error {
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	if n.ID == 0 || n.ID >= c.admin.meta.NextSpace {
		return fmt.Errorf("put namespace %q: %w: id %d was not given out", n.Desc.Name, block.ErrInvalid, n.ID)
	}
	if err := checkSpace(&n); err != nil {
		return err
	}
	key := spaceKey(n.ID)
	_, known, err := c.space(key)
	if err != nil {
		return err
	}
	if !known {
		first, err := c.firstEpoch(n.Desc)
		if err != nil {
			return err
		}
		if n.Epoch < first {
			return fmt.Errorf("put namespace %q: %w: epoch %d is below %d, the first one after it was dropped", n.Desc.Name, block.ErrInvalid, n.Epoch, first)
		}
	}
	if err := c.putAdmin(key, encodeSpace(key, &n)); err != nil {
		return fmt.Errorf("put namespace %q: %w", n.Desc.Name, err)
	}
	return nil
}

func checkSpace(n *block.Namespace) error {
	if n.HashLen != 0 && !block.ValidHashLen(n.HashLen) {
		return fmt.Errorf("put namespace %q: %w: hash length %d", n.Desc.Name, block.ErrInvalid, n.HashLen)
	}
	return n.Desc.Validate()
}

// ClearNamespace writes a namespace whose epoch the caller has raised and drops
// the records of all its blocks, both in one synced commit. It fails with
// block.ErrNotFound when the namespace is not there, and with block.ErrInvalid
// when its epoch is not above the one it had. A record that is committed
// afterwards with the old epoch stays until it is dropped; see Scan.
func (c *Catalog) ClearNamespace(n block.Namespace) error {
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	key := spaceKey(n.ID)
	old, ok, err := c.space(key)
	switch {
	case err != nil:
		return err
	case !ok:
		return fmt.Errorf("clear namespace %q: %w", n.Desc.Name, block.ErrNotFound)
	case n.Epoch <= old.Epoch:
		return fmt.Errorf("clear namespace %q: %w: epoch %d is not above %d", n.Desc.Name, block.ErrInvalid, n.Epoch, old.Epoch)
	}
	if err := checkSpace(&n); err != nil {
		return err
	}
	b := c.now().db.NewBatch()
	err = errors.Join(dropBlocks(b, n.ID), b.Set(key, encodeSpace(key, &n), nil))
	if err == nil {
		err = c.commitAdmin(b)
	}
	if err != nil {
		return fmt.Errorf("clear namespace %q: %w", n.Desc.Name, err)
	}
	return nil
}

// DropNamespace removes a namespace and the records of all its blocks in one
// synced commit. It fails with block.ErrNotFound when it is not there. What
// remains is the epoch that a namespace with the same descriptor must begin
// with.
func (c *Catalog) DropNamespace(id block.NamespaceID) error {
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	key := spaceKey(id)
	n, ok, err := c.space(key)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("drop namespace %d: %w", id, block.ErrNotFound)
	}
	first, err := c.firstEpoch(n.Desc)
	if err != nil {
		return err
	}
	n.Epoch = max(n.Epoch+1, first)
	grave := droppedKey(n.Desc.Digest())
	b := c.now().db.NewBatch()
	err = errors.Join(dropBlocks(b, id), b.Delete(key, nil), b.Set(grave, encodeSpace(grave, &n), nil))
	if err == nil {
		err = c.commitAdmin(b)
	}
	if err != nil {
		return fmt.Errorf("drop namespace %q: %w", n.Desc.Name, err)
	}
	return nil
}

// dropBlocks drops the records of a namespace's blocks, on slabs and in objects. Those of
// the objects stay: the objects are still to be removed.
func dropBlocks(b *pebble.Batch, id block.NamespaceID) error {
	var errs []error
	for _, kind := range []byte{kindBlock, kindPacked} {
		from, to := spaceRange(kind, id)
		errs = append(errs, b.DeleteRange(from, to, nil))
	}
	return errors.Join(errs...)
}

func (c *Catalog) space(key []byte) (block.Namespace, bool, error) {
	value, closer, err := c.now().db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return block.Namespace{}, false, nil
	}
	if err != nil {
		return block.Namespace{}, false, pebbleErr("read namespace record", err)
	}
	n, err := decodeSpace(key, value)
	if e := closer.Close(); err == nil && e != nil {
		err = pebbleErr("read namespace record", e)
	}
	return n, err == nil, err
}

// Slabs lists the slabs in the order of their numbers, retired ones included.
func (c *Catalog) Slabs() ([]SlabRecord, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	var all []SlabRecord
	err := c.now().each("list slabs", []byte{kindSlab}, []byte{kindSlab + 1}, func(key, value []byte) error {
		var s SlabRecord
		err := s.decode(key, value)
		all = append(all, s)
		return err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// PutSlab adds or replaces a slab, synced.
func (c *Catalog) PutSlab(s SlabRecord) error {
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	key, value := s.encode()
	if err := c.putAdmin(key, value); err != nil {
		return fmt.Errorf("put slab %s: %w", s.Path, err)
	}
	return nil
}
