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
	open  chan struct{}
}

func newGate(b *fakeBucket) *gate {
	g := &gate{open: make(chan struct{})}
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "blocks/") {
			g.begun.Add(1)
			<-g.open
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
	g := newGate(b)
	n := 0
	uploads := func() *block.UploadStats { return g4(s).Uploads }
	// What is evicted waits in vain, so that in the end nothing more fits.
	for refused := false; !refused; {
		err := put(s, ns, n, payload(n, size), block.PutOptions{Durable: block.G3})
		if refused = errors.Is(err, block.ErrNoSpace); !refused && err != nil {
			t.Fatal(err)
		}
		if !refused {
			n++
		}
	}
	if used := used(s, block.G3); used < 48<<20 {
		t.Errorf("refused when g3 has %d bytes", used)
	}
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
	close(g.open)
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
	o.UploadAge = time.Millisecond
	s := openStore(t, o)
	g := newGate(b)
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
	eventually(t, "some are on their way, the others wait", func() bool { return g.begun.Load() == atOnce && g4(s).Uploads.Blocks == all })
	time.Sleep(2 * o.UploadAge)
	close(g.open)
	evictions.Wait()
	if u := g4(s).Uploads; u.Dropped != all-atOnce || left.Load() != atOnce || u.Blocks != 0 {
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
	g := newGate(b)
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
	close(g.open)
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
