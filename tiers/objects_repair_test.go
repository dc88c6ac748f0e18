package tiers_test

import (
	"bytes"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/tiers/bucket"
)

// TestScrubFromObjects damages blocks in G3 that G4 has, too: one is written anew from
// there, one whose bucket does not answer stays there, and one whose copy in G4 is damaged
// as well is dropped.
func TestScrubFromObjects(t *testing.T) {
	t.Parallel()
	const size = 70_000
	for _, c := range []struct {
		name              string
		repaired, dropped int64
		spoil             func(b *fakeBucket)
		where             string
	}{
		{"Whole", 1, 0, func(*fakeBucket) {}, "g2g3g4"},
		{"NoAnswer", 0, 0, func(b *fakeBucket) {
			b.fail(func(op, key string) error {
				if op == "get" && strings.HasPrefix(key, "blocks/") {
					return bucket.ErrNoAnswer
				}
				return nil
			})
		}, "g4"},
		{"Damaged", 0, 1, func(b *fakeBucket) { b.damage(func(o []byte) { clear(o) }) }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newFakeBucket()
			o := farOptions(t, b)
			s := openStore(t, o)
			ns := space(t, s, "n", 1<<20)
			mustPut(t, s, ns, 1, size, block.PutOptions{Durable: block.G3})
			sendDown(t, s, ns, 1)
			// A pin brings it back to G3.
			if each, err := s.Pin(t.Context(), ns.ID, hashLen, pack(hashOf(1))); errors.Join(append(each, err)...) != nil {
				t.Fatal(each, err)
			}
			if _, err := s.Unpin(t.Context(), ns.ID, hashLen, pack(hashOf(1))); err != nil {
				t.Fatal(err)
			}
			if got := tiersOf(t, s, ns, 1); got != "g2g3g4" {
				t.Fatalf("block 1 is in %s", got)
			}
			eventually(t, "the block leaves g2", func() bool {
				tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1)))
				return tiersOf(t, s, ns, 1) == "g3g4"
			})
			slot, header := tiers.SlotBytes(size)
			inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 1, block.G3).Offset(), int(slot), func(b []byte) { b[header] ^= 1 })
			c.spoil(b)
			if err := s.StartScrub(block.ScrubOptions{BytesPerSecond: fast}); err != nil {
				t.Fatal(err)
			}
			if st := scrubbed(t, s); st.State != block.ScrubDone || st.Damaged != 1 || st.Repaired != c.repaired || st.Dropped != c.dropped {
				t.Errorf("scrub: %+v", st)
			}
			if got := tiersOf(t, s, ns, 1); got != c.where {
				t.Errorf("block 1 is in %q, want %q", got, c.where)
			}
			b.fail(nil)
			if c.dropped > 0 {
				wantMiss(t, s, ns, 1, block.MissAbsent)
				return
			}
			eventually(t, "the block is read", func() bool {
				_, p, err := get(s, ns, 1, block.GetOptions{})
				return err == nil && p.Reason == block.Hit
			})
			wantHit(t, s, ns, 1, size)
		})
	}
}

// TestRepairBesideObjects loses the catalog of a store with a bucket. The new one has what
// is on the slabs and nothing of G4, and leaves alone what lies there: objects that it does
// not know are not removed, and new ones take none of their numbers and names.
func TestRepairBesideObjects(t *testing.T) {
	t.Parallel()
	const n, size = 6, 70_000
	b := newFakeBucket()
	o := farOptions(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, n, size)
	sendDown(t, s, ns, is...)
	mustPut(t, s, ns, 50, size, block.PutOptions{Durable: block.G3})
	last := uint64(0)
	objects := func(s *tiers.Store, fn func(r *index.ObjectRecord)) {
		t.Helper()
		if err := tiers.Catalog(s).ScanObjects(0, func(r *index.ObjectRecord) error { fn(r); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	objects(s, func(r *index.ObjectRecord) { last = max(last, r.Number) })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	before := maps.Clone(b.objects)
	b.mu.Unlock()
	loseCatalog(t, o.Dir, "lost")
	if rep := repair(t, o, nil); rep.Blocks != 1 || len(rep.Problems) != 0 {
		t.Errorf("repair: %+v", rep)
	}

	s = openStore(t, o)
	wantHit(t, s, ns, 50, size)
	for _, i := range is {
		wantMiss(t, s, ns, i, block.MissAbsent)
	}
	// Some of the same blocks come again, and others, and go down and away: the objects of
	// these are removed, and with them others would be that nobody seems to need.
	again := []int{0, 1, 50, 60, 61}
	for _, i := range again {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	sendDown(t, s, ns, again...)
	objects(s, func(r *index.ObjectRecord) {
		if r.Number <= last {
			t.Errorf("new object %d, and there was one of number %d", r.Number, last)
		}
	})
	for _, i := range again {
		wantHit(t, s, ns, i, size)
	}
	packed := b.count("blocks/")
	mustDelete(t, s, ns, len(again), again...)
	eventually(t, "objects that nothing lives in are removed", func() bool { return b.count("blocks/") < packed })
	s = reopen(t, s, o)
	wantMiss(t, s, ns, 2, block.MissAbsent)
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, was := range before {
		if strings.HasPrefix(k, "blocks/") && !bytes.Equal(b.objects[k], was) {
			t.Errorf("object %s was changed or removed", k)
		}
	}
}
