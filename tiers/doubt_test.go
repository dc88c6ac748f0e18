package tiers_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/xfer"
)

// TestObjectDoubt: what cannot be read since the way to the bucket spoils all, or since a
// read does not find what a list has, is a miss, and is there again when that is over.
func TestObjectDoubt(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	s := openStore(t, farOptions(t, b))
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 4, 5000)
	sendDown(t, s, ns, is...)
	well := func() bool { return g4(s).Devices[0].State == block.Healthy }
	for name, c := range map[string]struct {
		begin, end func()
		why        block.MissReason
	}{
		"wrong bytes": {func() { b.spoil(-1) }, func() { b.spoil(0) }, block.MissCorrupt},
		"not found": {func() {
			b.fail(func(op, key string) error {
				if op == "get" && strings.HasPrefix(key, "blocks/") {
					return xfer.ErrNotFound
				}
				return nil
			})
		}, func() { b.fail(nil) }, block.MissAbsent},
	} {
		t.Run(name, func(t *testing.T) {
			c.begin()
			for _, i := range is {
				if _, p, err := get(s, ns, i, block.GetOptions{}); err != nil || p.Reason != c.why && p.Reason != block.MissUnavailable {
					t.Errorf("block %d: %v, %v, want %v", i, p.Reason, err, c.why)
				}
			}
			eventually(t, "the bucket is known to be sick", func() bool { return !well() })
			c.end()
			eventually(t, "the bucket is healthy", well)
			for _, i := range is {
				wantHit(t, s, ns, i, 5000)
			}
			sendDown(t, s, ns, is...)
		})
	}
}

// TestObjectFull: a bucket that takes no objects is read, blocks leave as if there were none,
// and it is written to again when it takes some.
func TestObjectFull(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	s := openStore(t, farOptions(t, b))
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 4, 5000)
	sendDown(t, s, ns, is...)
	b.fail(func(op, _ string) error {
		if op == "put" {
			return fmt.Errorf("%w: it is full", bucket.ErrNoWrites)
		}
		return nil
	})
	for i := 100; i < 160; i++ {
		mustPutDown(t, s, ns, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	wantHit(t, s, ns, 159, 1<<20)
	if d := g4(s).Devices[0]; d.State != block.Degraded || !strings.Contains(d.Reason, "full") {
		t.Errorf("bucket is %+v", d)
	}
	objects := b.count("blocks/")
	for _, i := range is {
		if _, p, err := get(s, ns, i, block.GetOptions{NoPromote: true}); err != nil || p.Reason != block.Hit || p.Tier != block.G4 {
			t.Errorf("block %d: %v from %v, %v", i, p.Reason, p.Tier, err)
		}
	}
	b.fail(nil)
	eventually(t, "the bucket is healthy", func() bool { return g4(s).Devices[0].State == block.Healthy })
	sendDown(t, s, ns, 159)
	if b.count("blocks/") != objects+1 {
		t.Errorf("%d objects, before %d", b.count("blocks/"), objects)
	}
	wantHit(t, s, ns, 159, 1<<20)
}
