package tiers_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestObjectRules: a namespace's blocks go into G4 when its rule says so, and are found there
// as long as it says.
func TestObjectRules(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	rules := map[string]tiers.ObjectRule{
		"through": {Mode: tiers.WriteThrough},
		"never":   {Mode: tiers.NoObjects},
		"brief":   {Keep: time.Second},
		"long":    {Keep: time.Hour},
	}
	o.ObjectRule = func(namespace string) tiers.ObjectRule { return rules[namespace] }
	s := openStore(t, o)
	const size = 5000
	through, never := space(t, s, "through", 1<<20), space(t, s, "never", 1<<20)
	is := chain(t, s, through, 8, size)
	eventually(t, "all are in objects", func() bool {
		for _, i := range is {
			if tiersOf(t, s, through, i) != "g2g3g4" {
				return false
			}
		}
		return true
	})
	if n := b.count("blocks/"); n > 3 {
		t.Errorf("%d objects for 8 blocks of a sequence", n)
	}
	puts := b.asked("put")
	sendDown(t, s, through, is...)
	for _, i := range is {
		wantHit(t, s, through, i, size)
	}
	if again := b.asked("put") - puts; again > 0 {
		t.Errorf("%d objects were written again", again)
	}
	// Deleted, they are in no import either.
	mustDelete(t, s, through, len(is), is...)
	if n := imported(t, b); n != 0 {
		t.Errorf("an import finds %d blocks", n)
	}

	mustPut(t, s, never, 1, size, block.PutOptions{Durable: block.G3})
	sendDown(t, s, never, 1)
	wantMiss(t, s, never, 1, block.MissAbsent)
	if n := s.Stats().Removed["evicted"]; n != 1 {
		t.Errorf("%d blocks were dropped, want 1", n)
	}

	brief, long := space(t, s, "brief", 1<<20), space(t, s, "long", 1<<20)
	for _, ns := range []block.Namespace{brief, long} {
		mustPut(t, s, ns, 1, size, block.PutOptions{Durable: block.G3})
		sendDown(t, s, ns, 1)
	}
	eventually(t, "its time is over", func() bool {
		_, p, err := get(s, brief, 1, block.GetOptions{NoPromote: true})
		return err == nil && p.Reason == block.MissExpired
	})
	// One whose end G4 has set is not written again for that.
	wantHit(t, s, long, 1, size)
	puts = b.asked("put")
	sendDown(t, s, long, 1)
	wantHit(t, s, long, 1, size)
	if again := b.asked("put") - puts; again > 0 {
		t.Errorf("%d objects were written again", again)
	}
	wantEmpty(t, s)
}

// TestWriteThroughFull: what the queue has no room for goes up when it leaves.
func TestWriteThroughFull(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.ObjectRule = func(string) tiers.ObjectRule { return tiers.ObjectRule{Mode: tiers.WriteThrough} }
	o.UploadBytes = 3 << 20
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	g := newGate(t, b)
	const n = 6
	for i := range n {
		mustPut(t, s, ns, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	if u := g4(s).Uploads; u.Through != n-2 || u.Bytes > o.UploadBytes {
		t.Errorf("uploads %+v", u)
	}
	g.open()
	eventually(t, "the first are in the bucket", func() bool { return strings.Contains(tiersOf(t, s, ns, 0), "g4") && g4(s).Uploads.Blocks == 0 })
	if got := tiersOf(t, s, ns, n-1); got != "g2g3" {
		t.Errorf("the last block is in %s", got)
	}
	for i := range n {
		sendDown(t, s, ns, i)
		wantHit(t, s, ns, i, 1<<20)
	}
}
