package tiers_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// gate has uploads of blocks wait until it is opened.
type gate struct {
	begun atomic.Int64
	shut  chan struct{}
	open  func()
}

func newGate(t testing.TB, b *fakeBucket) *gate {
	g := &gate{shut: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.shut) })
	t.Cleanup(g.open) // before the store is closed
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "blocks/") {
			g.begun.Add(1)
			<-g.shut
		}
		return nil
	})
	return g
}

// TestUploads: eviction goes on while objects are on their way, the blocks stay where they are
// until then, and a queue that is full holds it back.
func TestUploads(t *testing.T) {
	t.Parallel()
	const size = 256 << 10
	b := newFakeBucket()
	o := farOptions(t, b)
	o.Slabs, o.High, o.Low, o.UploadBytes = slabIn(t, 64<<20), 0.5, 0.45, 12<<20
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	g := newGate(t, b)
	n := 0
	uploads := func() *block.UploadStats { return g4(s).Uploads }
	// What is evicted waits in vain, so that in the end nothing more fits.
	eventually(t, "g3 is full and takes nothing more", func() bool {
		err := put(s, ns, n, payload(n, size), block.PutOptions{Durable: block.G3})
		switch {
		case err == nil:
			n++
		case !errors.Is(err, block.ErrNoSpace):
			t.Fatal(err)
		}
		return err != nil && used(s, block.G3) >= 48<<20
	})
	if g.begun.Load() < 2 {
		t.Errorf("%d objects are on their way, want several", g.begun.Load())
	}
	if u := uploads(); u.HeldBack == 0 || u.Bytes > 12<<20 || u.Bytes < 8<<20 || u.Blocks == 0 {
		t.Errorf("uploads %+v", u)
	}
	for i := range n {
		if got := tiersOf(t, s, ns, i); !strings.Contains(got, "g3") {
			t.Errorf("block %d is in %q", i, got)
		}
	}
	wantHit(t, s, ns, 0, size)
	g.open()
	for range 40 {
		mustPutDown(t, s, ns, n, size, block.PutOptions{Durable: block.G3})
		n++
	}
	eventually(t, "the queue is empty", func() bool { return uploads().Blocks == 0 && uploads().Bytes == 0 })
	for i := range n {
		wantHit(t, s, ns, i, size)
	}
	if u := uploads(); u.Failed != 0 || u.Dropped != 0 {
		t.Errorf("uploads %+v", u)
	}
	wantEmpty(t, s)
}

// TestUploadAge: a block that waits too long is given back to its tier.
func TestUploadAge(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.UploadAge = 50 * time.Millisecond
	s := openStore(t, o)
	g := newGate(t, b)
	const all, atOnce = 12, 8
	var spaces []block.Namespace // an object has blocks of one
	for i := range all {
		ns := space(t, s, fmt.Sprint("n", i), 1<<20)
		mustPut(t, s, ns, 1, 5000, block.PutOptions{Durable: block.G3})
		sendDownG2(t, s, ns, 1)
		spaces = append(spaces, ns)
	}
	var left atomic.Int64
	var evictions sync.WaitGroup
	for _, ns := range spaces {
		evictions.Go(func() {
			if tiers.Evict(s, block.G3, tiers.HandleOf(s, keyOf(ns, 1))) > 0 {
				left.Add(1)
			}
		})
	}
	eventually(t, "all turns are taken", func() bool {
		u := g4(s).Uploads
		return u.Blocks+u.Dropped == all && (g.begun.Load() == atOnce || u.Dropped > 0)
	})
	time.Sleep(2 * o.UploadAge)
	g.open()
	evictions.Wait()
	if u := g4(s).Uploads; u.Dropped < 1 || u.Dropped+left.Load() != all || u.Blocks != 0 {
		t.Errorf("%d have left, uploads %+v", left.Load(), u)
	}
	for _, ns := range spaces {
		wantHit(t, s, ns, 1, 5000)
	}
}

// TestUploadsEndWithTheStore: a store is closed while blocks wait, and has them when it is
// opened again.
func TestUploadsEndWithTheStore(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.High, o.Low = 0.5, 0.4
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	g := newGate(t, b)
	for i := range 20 {
		mustPut(t, s, ns, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	eventually(t, "an upload is under way", func() bool { return g.begun.Load() > 0 })
	h := tiers.HandleOf(s, keyOf(ns, 0))
	done := make(chan struct{})
	go func() {
		defer close(done)
		tiers.Evict(s, block.G3, h) // waits
	}()
	mustDelete(t, s, ns, 1, 19)
	g.open()
	<-done
	s = reopen(t, s, o)
	for i := range 19 {
		wantHit(t, s, ns, i, 1<<20)
	}
	wantMiss(t, s, ns, 19, block.MissAbsent)
}

// TestUploadsOfOtherSizes: who needs a slot of one size does not wait for ever since blocks of
// another size are on their way.
func TestUploadsOfOtherSizes(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.High, o.Low = 0.9, 0.8
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	const small = 900
	for i := range small {
		mustPutDown(t, s, ns, i, 60_000, block.PutOptions{Durable: block.G3})
	}
	for i := range 60 {
		mustPutDown(t, s, ns, small+i, 1<<20, block.PutOptions{Durable: block.G3})
		mustPutDown(t, s, ns, 10_000+i, 60_000, block.PutOptions{Durable: block.G3})
	}
	for i := range small {
		wantHit(t, s, ns, i, 60_000)
	}
	for i := range 60 {
		wantHit(t, s, ns, small+i, 1<<20)
	}
}
