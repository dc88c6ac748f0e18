package tiers_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// A block may be put again while an earlier one of the same key is on its way
// out, or is used by others. These tests stop the clockwork at such a moment.

// TestPutWhileLeaving puts a block of another length and with a parent while the
// drop of the old one's record is under way: each is counted by itself.
func TestPutWhileLeaving(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), Slabs: slabIn(t, 64<<20)}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	s = reopen(t, s, o) // leaves it in G3 only
	release := tiers.HoldCommits(s)
	if !tiers.EvictG3(s, tiers.HandleOf(s, keyOf(ns, 1))) {
		t.Fatal("not evicted")
	}
	data := payload(7, 50_000)
	if err := put(s, ns, 1, data, block.PutOptions{Parent: hashOf(2), HasParent: true}); err != nil {
		t.Fatal(err)
	}
	release()
	eventually(t, "the old one is gone", func() bool { return used(s, block.G3) == 0 })
	got, p, err := get(s, ns, 1, block.GetOptions{})
	if err != nil || p.Reason != block.Hit || string(got) != string(data) {
		t.Fatalf("the new block: %v, %v", p.Reason, err)
	}
	if n := s.Namespaces()[0]; n.Blocks != 1 || n.Bytes != int64(len(data)) {
		t.Errorf("namespace counts %d blocks of %d bytes, want 1 of %d", n.Blocks, n.Bytes, len(data))
	}
	if e := tiers.EntryOf(s, keyOf(ns, 2)); e.Kids != [2]uint32{1, 0} {
		t.Errorf("parent counts children %v, want 1 in G2 and none in G3", e.Kids)
	}
	wantEmpty(t, s)
}

// TestPutWhileDamagedIsRead puts a block again while someone still reads the old
// copy, which is damaged.
func TestPutWhileDamagedIsRead(t *testing.T) {
	s := openStore(t, tiers.Options{})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	damageG2(t, s, ns, 1)
	l := lease(t, s, ns, 1)
	wantMiss(t, s, ns, 1, block.MissCorrupt)
	wantMiss(t, s, ns, 1, block.MissAbsent)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	wantHit(t, s, ns, 1, 3000)
	releaseLease(t, s, l)
	wantHit(t, s, ns, 1, 3000)
	wantEmpty(t, s)
}

// TestDamagedInMemoryIsReadFromG3: a copy in memory that was found damaged and is
// still leased is in nobody's way.
func TestDamagedInMemoryIsReadFromG3(t *testing.T) {
	s := openStore(t, tiers.Options{Slabs: slabIn(t, 64<<20)})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	damageG2(t, s, ns, 1)
	l := lease(t, s, ns, 1)
	wantMiss(t, s, ns, 1, block.MissCorrupt)
	// The slot of the damaged copy is still leased, so it is read past G2.
	wantHit(t, s, ns, 1, 3000)
	if got := s.Stats().Blocks; got != 1 {
		t.Errorf("%d blocks", got)
	}
	releaseLease(t, s, l)
	wantHit(t, s, ns, 1, 3000)
	wantEmpty(t, s)
}

// TestDamageIsOfOneCopy: a reader that found an old copy damaged says nothing
// about a new one.
func TestDamageIsOfOneCopy(t *testing.T) {
	s := openStore(t, tiers.Options{Slabs: slabIn(t, 64<<20)})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	k := keyOf(ns, 1)
	h, old := tiers.HandleOf(s, k), tiers.EntryOf(s, k)
	tiers.DamagedG3(s, h, &old)
	eventually(t, "the damaged copy is gone", func() bool { return tiersOf(t, s, ns, 1) == "g2" })
	mustPut(t, s, ns, 2, 3000, block.PutOptions{Durable: block.G3}) // takes the slot
	if err := s.CompareExisting(t.Context(), ns.ID, hashOf(1), 3000, old.Sum, block.PutOptions{Durable: block.G3}); err != nil {
		t.Fatal(err)
	}
	tiers.DamagedG3(s, h, &old)
	if got := tiersOf(t, s, ns, 1); got != "g2g3" {
		t.Errorf("the new copy is in %q", got)
	}
	if n := s.Stats().Corrupt; n != 1 {
		t.Errorf("%d blocks counted as corrupt, want 1", n)
	}
}

// TestExpiryIsOfOneBlock: a sweep that found a block past its time must not take
// the one that was put in its place since.
func TestExpiryIsOfOneBlock(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{TTL: time.Second})
	h := tiers.HandleOf(s, keyOf(ns, 1))
	eventually(t, "the block has expired", func() bool { return tiersOf(t, s, ns, 1) == "" })
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	tiers.Expire(s, h)
	tiers.Expire(s, tiers.HandleOf(s, keyOf(ns, 1)))
	wantHit(t, s, ns, 1, 3000)
}

// TestDeleteWaitsForTheDrop: a delete of a block that the evictor has just taken
// out is answered when that is durable, not before.
func TestDeleteWaitsForTheDrop(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), Slabs: slabIn(t, 64<<20)}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	s = reopen(t, s, o) // leaves it in G3 only
	release := tiers.HoldCommits(s)
	if !tiers.EvictG3(s, tiers.HandleOf(s, keyOf(ns, 1))) {
		t.Fatal("not evicted")
	}
	for range 2 { // the second finds nothing at all, and has to wait as well
		_, err := s.Delete(within(t, 50*time.Millisecond), ns.ID, hashLen, pack(hashOf(1)))
		if err == nil {
			_, there, err := tiers.Catalog(s).Get(keyOf(ns, 1), hashLen)
			t.Fatalf("delete was answered; record is in the catalog: %v, %v", there, err)
		}
	}
	release()
	mustDelete(t, s, ns, 0, 1)
	if _, there, err := tiers.Catalog(s).Get(keyOf(ns, 1), hashLen); there || err != nil {
		t.Errorf("record is in the catalog: %v, %v", there, err)
	}
}

// TestTimesToLive: the longest that can be asked for is no end at all.
func TestTimesToLive(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	for i, ttl := range []time.Duration{time.Hour, 100 * 365 * 24 * time.Hour, math.MaxInt64} {
		mustPut(t, s, ns, i, 3000, block.PutOptions{TTL: ttl})
		wantHit(t, s, ns, i, 3000)
	}
}

// TestRanges reads parts of blocks, and parts that are not there.
func TestRanges(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	for _, c := range []struct {
		off, n int64
		want   int // bytes, or -1: refused
	}{
		{0, 0, 3000},
		{0, 3000, 3000},
		{1, 0, 2999},
		{2999, 1, 1},
		{3000, 0, 0},
		{100, 50, 50},
		{3001, 0, -1},
		{0, 3001, -1},
		{2999, 2, -1},
		{1, math.MaxInt64, -1},
		{math.MaxInt64, 1, -1},
		{-1, 1, -1},
		{0, -1, -1},
	} {
		var got []byte
		err := s.Get(t.Context(), ns.ID, hashLen, []block.Wanted{{Hash: hashOf(1), Offset: c.off, Length: c.n}}, block.GetOptions{}, func(_ int, p block.Payload) error {
			got = append(got, p.Bytes...)
			return nil
		})
		if c.want < 0 {
			if !errors.Is(err, block.ErrInvalid) {
				t.Errorf("range %d:%d: %v, want ErrInvalid", c.off, c.n, err)
			}
			continue
		}
		if want := payload(1, 3000)[c.off:][:c.want]; err != nil || string(got) != string(want) {
			t.Errorf("range %d:%d: %d bytes, %v", c.off, c.n, len(got), err)
		}
	}
}

// TestCompareExistingWithoutG3 asks a store without a durable tier for
// durability of a block that it has.
func TestCompareExistingWithoutG3(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	sum := tiers.EntryOf(s, keyOf(ns, 1)).Sum
	err := s.CompareExisting(t.Context(), ns.ID, hashOf(1), 3000, sum, block.PutOptions{Durable: block.G3})
	if !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("%v, want ErrUnavailable", err)
	}
}

// TestParentsInACircle puts two blocks that name each other as parents, which
// must neither be accepted for both nor let a later put search for ever.
func TestParentsInACircle(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	ids := make([]uint64, 2)
	for i := range ids {
		r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(i), 100, block.PutOptions{Parent: hashOf(1 - i), HasParent: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Fill(t.Context(), r.ID, 0, payload(i, 100)); err != nil {
			t.Fatal(err)
		}
		ids[i] = r.ID
	}
	var failed int
	for _, r := range s.Commit(t.Context(), ids) {
		if errors.Is(r.Err, block.ErrInvalid) {
			failed++
		}
	}
	if failed != 1 {
		t.Errorf("%d of two puts that name each other as parents failed, want 1", failed)
	}
	wantEmpty(t, s)
}
