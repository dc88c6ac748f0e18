package index

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index/block"
)

// Batch collects changes of block records, which become visible and durable
// together. It belongs to one goroutine at a time, and is empty and ready for
// use again after a commit.
type Batch struct {
	b *pebble.Batch
	n int
}

// NewBatch makes an empty batch for the catalog.
func (c *Catalog) NewBatch() *Batch { return &Batch{b: new(pebble.Batch)} }

// Put adds or replaces a record. It panics when a length of hash is not one
// that namespaces have.
func (b *Batch) Put(r *Record) {
	checkHashLen(r.HashLen)
	op := b.b.SetDeferred(blockKeyPrefix+r.HashLen, r.valueLen())
	putBlockKey(op.Key, kindBlock, &r.Key, r.HashLen)
	r.putValue(op.Value, op.Key)
	b.finish(op)
}

// Drop removes a record, whether it is there or not.
func (b *Batch) Drop(k block.Key, hashLen int) {
	checkHashLen(hashLen)
	op := b.b.DeleteDeferred(blockKeyPrefix + hashLen)
	putBlockKey(op.Key, kindBlock, &k, hashLen)
	b.finish(op)
}

// set adds or replaces a record, and drop removes one, where encoding in place is not worth
// its lines.
func (b *Batch) set(key, value []byte) {
	op := b.b.SetDeferred(len(key), len(value))
	copy(op.Key, key)
	copy(op.Value, value)
	b.finish(op)
}

func (b *Batch) drop(key []byte) {
	op := b.b.DeleteDeferred(len(key))
	copy(op.Key, key)
	b.finish(op)
}

func (b *Batch) finish(op *pebble.DeferredBatchOp) {
	// Only an indexed batch, which this is not, has an error to give.
	if err := op.Finish(); err != nil {
		panic(fmt.Sprintf("index: batch: %v", err))
	}
	b.n++
}

// Len is the number of changes in the batch.
func (b *Batch) Len() int { return b.n }

// Reset empties the batch.
func (b *Batch) Reset() {
	b.b.Reset()
	b.n = 0
}

// Close gives the memory of a batch back that is no longer needed.
func (b *Batch) Close() error { return b.b.Close() }

func checkHashLen(n int) {
	if !block.ValidHashLen(n) {
		panic(fmt.Sprintf("index: hash length %d", n))
	}
}

// Commit makes the changes of a batch visible, all or none, and with sync also
// durable, together with those of other goroutines that commit at the same time.
// Without sync they become durable with the next commit that has it. The batch
// is empty afterwards. After an error the changes may or may not be there when
// the catalog is opened again, all of them or none.
func (c *Catalog) Commit(b *Batch, sync bool) error {
	if b.n == 0 {
		return nil
	}
	n := b.n
	if err := c.enterWrite(); err != nil {
		b.Reset()
		return fmt.Errorf("commit %d records: %w", n, err)
	}
	defer c.leave()
	if err := c.now().commit(b.b, sync); err != nil {
		b.b, b.n = new(pebble.Batch), 0 // Pebble may still hold on to the old one
		return fmt.Errorf("commit %d records: %w", n, err)
	}
	b.Reset()
	return nil
}

// Get reads the record of one block. Match does not come here: it reads the
// resident table.
func (c *Catalog) Get(k block.Key, hashLen int) (Record, bool, error) {
	var r Record
	checkHashLen(hashLen)
	if err := c.enter(); err != nil {
		return r, false, err
	}
	defer c.leave()
	var buf [blockKeyPrefix + block.HashBytes]byte
	key := appendBlockKey(buf[:0], &k, hashLen)
	value, closer, err := c.now().db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return r, false, nil
	}
	if err != nil {
		return r, false, pebbleErr(fmt.Sprintf("get block record %s", k), err)
	}
	err = r.decode(key, value)
	if e := closer.Close(); err == nil && e != nil {
		err = pebbleErr(fmt.Sprintf("get block record %s", k), e)
	}
	return r, err == nil, err
}

// Scan calls fn for each block record as of now, in the order of namespaces and
// then of hashes, until fn fails. The record is valid until fn returns. Records
// whose Epoch is not their namespace's are left over from before a clear.
//
// fn must not call the catalog: Close and Reopen wait for the scan, and later
// calls wait for them.
func (c *Catalog) Scan(fn func(*Record) error) error {
	return c.scan([]byte{kindBlock}, []byte{kindBlock + 1}, fn)
}

// ScanFrom is Scan for the blocks of one namespace whose hashes come after a
// given one, of as many bytes as count in the namespace, or all when it is empty.
func (c *Catalog) ScanFrom(ns block.NamespaceID, after []byte, fn func(*Record) error) error {
	from, to := spaceRange(kindBlock, ns)
	if len(after) > 0 {
		from = append(append(from, after...), 0)
	}
	return c.scan(from, to, fn)
}

func (c *Catalog) scan(from, to []byte, fn func(*Record) error) error {
	var r Record
	return c.walk("scan block records", from, to, func(key, value []byte) error {
		if err := r.decode(key, value); err != nil {
			return err
		}
		return fn(&r)
	})
}

// walk is each for the catalog.
func (c *Catalog) walk(what string, from, to []byte, fn func(key, value []byte) error) error {
	if err := c.enter(); err != nil {
		return err
	}
	defer c.leave()
	return c.now().each(what, from, to, fn)
}

// each calls fn for each key of a range.
func (e *engine) each(what string, from, to []byte, fn func(key, value []byte) error) error {
	it, err := e.db.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: to})
	if err != nil {
		return pebbleErr(what, err)
	}
	for it.First(); it.Valid(); it.Next() {
		value, err := it.ValueAndErr()
		if err == nil {
			err = fn(it.Key(), value)
		} else {
			err = pebbleErr(what, err)
		}
		if err != nil {
			_ = it.Close() // repeats the error of reading, or has none
			return err
		}
	}
	if err := it.Close(); err != nil {
		return pebbleErr(what, err)
	}
	return nil
}

// spaceRange is the range of keys of a namespace's blocks, by the kind of their records.
func spaceRange(kind byte, ns block.NamespaceID) (from, to []byte) {
	from = binary.BigEndian.AppendUint32([]byte{kind}, uint32(ns))
	if ns+1 == 0 {
		return from, []byte{kind + 1}
	}
	return from, binary.BigEndian.AppendUint32([]byte{kind}, uint32(ns+1))
}
