package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// The tests' own blocks: everything about block i follows from i, so a test
// keeps numbers and no bytes.

const hashBytes = 16

// hashOf is the hash of block i.
func hashOf(i int) (h block.Hash) {
	binary.BigEndian.PutUint64(h[:], uint64(i))
	binary.BigEndian.PutUint64(h[8:], 0x9e3779b97f4a7c15*uint64(i+1))
	return h
}

// noise is what payloads are cut from: to draw the bytes of each takes long, most of all
// with the race detector. Its length is no multiple of anything that a block is cut into.
var noise = sync.OnceValue(func() []byte {
	p := make([]byte, 2<<20+4099)
	_, _ = rand.NewChaCha8([32]byte{}).Read(p) // never fails
	return p
})

// payload is the n bytes of block i: other bytes than any other block, and others at each
// place of it.
func payload(i, n int) []byte {
	all, p := noise(), make([]byte, n)
	for done := copy(p, all[uint64(i)*0x9e3779b97f4a7c15>>44:]); done < n; { // from the first MiB on
		done += copy(p[done:], all)
	}
	for k := range min(8, n) {
		p[k] ^= byte(i >> (8 * k))
	}
	return p
}

// dial connects to a daemon.
func dial(t *testing.T, d *daemon) *api.Client {
	t.Helper()
	c, err := api.Dial(timeout(t), d.addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // its daemon may be gone
	return c
}

// open opens a namespace of blocks of 1 to most bytes.
func open(t *testing.T, c *api.Client, name string, most int64) block.Namespace {
	t.Helper()
	ns, err := c.OpenNamespace(timeout(t), block.Descriptor{Name: name, MaxBlockBytes: most}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns.HashLen = hashBytes
	return ns
}

// put puts blocks first to first+count-1, each of n bytes, which must all be
// stored.
func put(t *testing.T, c *api.Client, ns block.Namespace, first, count, n int, durable block.TierID) {
	t.Helper()
	for i := first; i < first+count; {
		var items []api.PutItem
		for bytes := 0; i < first+count && bytes < 8<<20; i, bytes = i+1, bytes+n {
			items = append(items, api.PutItem{Hash: hashOf(i), Data: payload(i, n)})
		}
		res, err := c.Put(timeout(t), ns, items, api.PutOptions{Durable: durable})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range res {
			if r.Err != nil || r.Status != block.Stored {
				t.Fatalf("put: status %v, error %v", r.Status, r.Err)
			}
		}
	}
}

// get reads blocks, whose lengths size gives, and returns why each was missed.
// Bytes that are not the block's fail the test.
func get(ctx context.Context, t *testing.T, c *api.Client, ns block.Namespace, blocks []int, size func(i int) int) map[int]block.MissReason {
	t.Helper()
	missed := map[int]block.MissReason{}
	for len(blocks) > 0 {
		part := blocks[:min(len(blocks), 64)]
		blocks = blocks[len(part):]
		want := make([]block.Wanted, len(part))
		for k, i := range part {
			want[k].Hash = hashOf(i)
		}
		err := c.Get(ctx, ns, want, block.GetOptions{Quiet: true}, func(k int, p block.Payload) error {
			i := part[k]
			switch {
			case p.Reason != block.Hit:
				missed[i] = p.Reason
			case !bytes.Equal(p.Bytes, payload(i, size(i))):
				t.Errorf("block %d: wrong bytes from %v", i, p.Tier)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return missed
}

// numbers are first to first+count-1.
func numbers(first, count int) []int {
	s := make([]int, count)
	for i := range s {
		s[i] = first + i
	}
	return s
}

// tierStats is what a daemon says of a tier.
func tierStats(t *testing.T, c *api.Client, id block.TierID) block.TierStats {
	t.Helper()
	s, err := c.Stats(timeout(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, ts := range s.Tiers {
		if ts.Tier == id {
			return ts
		}
	}
	t.Fatalf("no tier %v", id)
	return block.TierStats{}
}
