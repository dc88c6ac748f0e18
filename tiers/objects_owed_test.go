package tiers_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestObjectOwedTombstones: a delete that could not write its tombstone writes it after a
// crash, and neither an import here nor one elsewhere raises what was deleted. A block that was
// put anew meanwhile is another one.
func TestObjectOwedTombstones(t *testing.T) {
	t.Parallel()
	const size = 5000
	b := newFakeBucket()
	o := farOptions(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	var hs []block.Handle
	for _, i := range chain(t, s, ns, 8, size) {
		sendDownG2(t, s, ns, i)
		hs = append(hs, tiers.HandleOf(s, keyOf(ns, i)))
	}
	tiers.TakeOut(s, hs) // into one object, of which most lives
	refused := errors.New("forbidden")
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "tombstones/") {
			return refused
		}
		return nil
	})
	for _, i := range []int{1, 2} {
		if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, pack(hashOf(i))); !errors.Is(err, block.ErrUnavailable) {
			t.Fatalf("delete: %v", err)
		}
	}
	mustPut(t, s, ns, 2, size, block.PutOptions{Durable: block.G3})
	sendDown(t, s, ns, 2)
	if n := imported(t, b); n != 9 {
		t.Fatalf("an import finds %d blocks before the tombstones are there, want 9", n)
	}
	tiers.CloseUnclean(t, s)
	b.fail(nil)
	s = openStore(t, o)
	eventually(t, "the tombstones are written", func() bool { return imported(t, b) == 7 })
	if err := s.ImportObjects(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	wantMiss(t, s, ns, 1, block.MissAbsent)
	for _, i := range []int{0, 2, 3, 7} {
		wantHit(t, s, ns, i, size)
	}
	eventually(t, "they are owed no more", func() bool { return tiers.Owed(t, s) == 0 })
	wantEmpty(t, s)
}

// TestObjectOwedImport: while a bucket takes no tombstones an import does not raise what they are
// about, also after a crash, from an object of another node that the catalog does not know any
// more.
func TestObjectOwedImport(t *testing.T) {
	t.Parallel()
	const size = 5000
	b := newFakeBucket()
	other := openStore(t, farOptions(t, b))
	ns := space(t, other, "n", 1<<20)
	is := chain(t, other, ns, 3, size)
	sendDown(t, other, ns, is...)
	o := farOptions(t, b)
	o.ObjectGrace = time.Nanosecond
	s := openStore(t, o)
	imports := func() {
		t.Helper()
		if err := s.ImportObjects(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	imports()
	ns = space(t, s, "n", 1<<20)
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "tombstones/") {
			return errors.New("forbidden")
		}
		return nil
	})
	for _, i := range is {
		wantHit(t, s, ns, i, size)
		if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, pack(hashOf(i))); !errors.Is(err, block.ErrUnavailable) {
			t.Fatalf("delete: %v", err)
		}
	}
	tiers.CloseUnclean(t, s)
	s = openStore(t, o)
	if err := s.SweepObjects(within(t, time.Minute), nil); err != nil {
		t.Fatal(err)
	}
	imports()
	for _, i := range is {
		wantMiss(t, s, ns, i, block.MissAbsent)
	}
}
