package index

import (
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// BenchmarkCatalogInsert puts the same keys and values into the catalog and
// into Pebble alone, by turns, and reports the median ratio of their rates: what
// encoding, checksums and the gate of each commit cost.
func BenchmarkCatalogInsert(b *testing.B) {
	const batchRecords, turn = 1000, 50 * 1000
	c := openCatalog(b, b.TempDir(), nil)
	db, err := pebble.Open(b.TempDir(), PebbleOptions(nil))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := db.Close(); err != nil {
			b.Error(err)
		}
	})
	ours, bare := c.NewBatch(), db.NewBatch()
	r := recordOf(1, 0)
	r.HasParent = true
	key, value := recordBytes(r)
	catalog := func(from uint64) time.Duration {
		start := time.Now()
		for i := from; i < from+turn; i++ {
			r.Key = numbered(1, i)
			ours.Put(r)
			if ours.Len() == batchRecords {
				if err := c.Commit(ours, false); err != nil {
					b.Fatal(err)
				}
			}
		}
		return time.Since(start)
	}
	alone := func(from uint64) time.Duration {
		start := time.Now()
		for i := from; i < from+turn; i++ {
			k := numbered(1, i)
			copy(key[blockKeyPrefix:], k.Hash[:])
			if err := bare.Set(key, value, nil); err != nil {
				b.Fatal(err)
			}
			if bare.Count() == batchRecords {
				if err := bare.Commit(pebble.NoSync); err != nil {
					b.Fatal(err)
				}
				bare.Reset()
			}
		}
		return time.Since(start)
	}
	var ratios, rates []float64
	var from uint64
	for b.Loop() {
		var t, limit time.Duration
		if len(ratios)%2 == 0 {
			t, limit = catalog(from), alone(from)
		} else {
			limit, t = alone(from), catalog(from)
		}
		from += turn
		ratios = append(ratios, limit.Seconds()/t.Seconds())
		rates = append(rates, turn/t.Seconds())
	}
	slices.Sort(ratios)
	slices.Sort(rates)
	b.ReportMetric(ratios[len(ratios)/2], "of-pebble")
	b.ReportMetric(rates[len(rates)/2], "records/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkRecordPut is the encoding alone.
func BenchmarkRecordPut(b *testing.B) {
	c := openCatalog(b, b.TempDir(), nil)
	batch := c.NewBatch()
	r := recordOf(1, 1)
	b.ReportAllocs()
	for b.Loop() {
		batch.Put(r)
		if batch.Len() == 1000 {
			batch.Reset()
		}
	}
}
