package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// batchRecords is how many records go into one commit of the catalog's row.
const batchRecords = 1000

// benchCatalog puts the same records into the catalog and, as bare keys and
// values, into Pebble with the same options.
func benchCatalog(ctx context.Context, b *bench) (err error) {
	c, err := index.OpenCatalog(filepath.Join(b.dir, "catalog"), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	db, err := pebble.Open(filepath.Join(b.dir, "pebble"), index.PebbleOptions(nil))
	if err != nil {
		return fmt.Errorf("open pebble: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	m := &catalogBench{bench: b, catalog: c, db: db}
	return b.compare(ctx, "catalog.insert", "k/s", often*b.pairs, m.insert, m.bare)
}

type catalogBench struct {
	*bench
	catalog *index.Catalog
	db      *pebble.DB
	ours    uint64 // id of the next record
	theirs  uint64
}

// record is what the store would note of block i.
func (m *catalogBench) record(i uint64) *index.Record {
	r := &index.Record{
		Key: block.Key{NS: 1, Hash: sha256Like(i)}, HashLen: block.HashBytes, Parent: sha256Like(i + 1), HasParent: true,
		Len: 1 << 20, Slot: 1<<20 + 4096, Offset: int64(i) * (1<<20 + 4096), Gen: i,
	}
	copy(r.Sum[:], r.Key.Hash[8:])
	return r
}

// sha256Like is a hash of 32 bytes.
func sha256Like(i uint64) (h block.Hash) {
	a, b := benchHash(2*i), benchHash(2*i+1)
	copy(h[:16], a[:16])
	copy(h[16:], b[:16])
	return h
}

func (m *catalogBench) insert(context.Context) (float64, error) {
	batch := m.catalog.NewBatch()
	defer batch.Close() // gives memory back, has nothing else to say
	recs := make([]*index.Record, m.records)
	for i := range recs {
		recs[i] = m.record(m.ours)
		m.ours++
	}
	begin := time.Now()
	for i, r := range recs {
		batch.Put(r)
		if (i+1)%batchRecords == 0 || i+1 == len(recs) {
			if err := m.catalog.Commit(batch, false); err != nil {
				return 0, err
			}
		}
	}
	return perMilli(len(recs), time.Since(begin)), nil
}

func (m *catalogBench) bare(context.Context) (float64, error) {
	batch := m.db.NewBatch()
	defer batch.Close() // likewise
	keys, values := make([][]byte, m.records), make([][]byte, m.records)
	for i := range keys {
		keys[i], values[i] = m.record(m.theirs).Encode()
		m.theirs++
	}
	begin := time.Now()
	for i := range keys {
		if err := batch.Set(keys[i], values[i], nil); err != nil {
			return 0, err
		}
		if (i+1)%batchRecords == 0 || i+1 == len(keys) {
			if err := batch.Commit(pebble.NoSync); err != nil {
				return 0, err
			}
			batch.Reset()
		}
	}
	return perMilli(len(keys), time.Since(begin)), nil
}

// perMilli is k/s.
func perMilli(n int, d time.Duration) float64 { return float64(n) / 1e3 / d.Seconds() }
