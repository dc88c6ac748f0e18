package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// sickRig is a store whose device can be made sick, with block 1 in G3 only and
// block 2 in G2 only.
type sickRig struct {
	*tiers.Store
	o     tiers.Options
	ns    block.Namespace
	disk  xfertest.Injector
	flush atomic.Pointer[error] // what flushes fail with
}

const sickBytes = 300_000 // several pieces

// stallAfter is long enough that a device that is well is not taken for one that
// stalls, however busy the machine is.
const stallAfter = 2 * time.Second

func newSickRig(t *testing.T, slabs []tiers.SlabSpec, stallAfter time.Duration) *sickRig {
	r := &sickRig{}
	r.o = tiers.Options{
		Dir: t.TempDir(), Slabs: slabs, DRAM: 16 << 20,
		StallAfter: stallAfter, ProbeEvery: 20 * time.Millisecond,
		SweepAfter: 100 * time.Millisecond, // with it go slots in quarantine, which wantEmpty waits for
		Agent:      agentWith(t, r.disk.Wrap),
	}
	r.Store = openStore(t, r.o)
	r.ns = space(t, r.Store, "a", 8<<20)
	tiers.WrapFlush(r.Store, func(_ int, _ string, flush func() error) error {
		if err := r.flush.Load(); err != nil {
			return *err
		}
		return flush()
	})
	mustPut(t, r.Store, r.ns, 1, sickBytes, block.PutOptions{Durable: block.G3})
	r.cool(t, 1)
	mustPut(t, r.Store, r.ns, 2, sickBytes, block.PutOptions{})
	return r
}

// cool takes a block that is in G3 out of G2, when nothing uses it any more.
func (r *sickRig) cool(t *testing.T, i int) {
	t.Helper()
	eventually(t, "a block leaves g2", func() bool {
		tiers.Evict(r.Store, block.G2, tiers.HandleOf(r.Store, keyOf(r.ns, i)))
		return tiersOf(t, r.Store, r.ns, i) == "g3"
	})
}

func (r *sickRig) device(i int) block.DeviceStats { return r.Stats().Tiers[1].Devices[i] }

// ends wants a call without a deadline to end.
func ends(t *testing.T, what string, call func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatalf("%s hangs", what)
		return nil
	}
}

// putNow puts one block without a deadline, and does not try again.
func (r *sickRig) putNow(i int, tier block.TierID) error {
	ctx := context.Background()
	v, _, err := r.Reserve(ctx, r.ns.ID, hashLen, hashOf(i), sickBytes, block.PutOptions{Durable: tier})
	if err != nil {
		return err
	}
	if err := r.Fill(ctx, v.ID, 0, payload(i, sickBytes)); err != nil {
		return err
	}
	return r.Commit(ctx, []uint64{v.ID})[0].Err
}

// reads is what a get of block 1 says, as an error when it is no hit.
func (r *sickRig) reads(o block.GetOptions) error {
	return r.Get(context.Background(), r.ns.ID, hashLen, []block.Wanted{{Hash: hashOf(1)}}, o, func(_ int, p block.Payload) error {
		if p.Reason == block.Hit && string(p.Bytes) != string(payload(1, sickBytes)) {
			return errors.New("wrong bytes")
		}
		return missed(p.Reason)
	})
}

// missed is a miss as an error, with the sentinel that stands for it.
func missed(why block.MissReason) error {
	switch why {
	case block.Hit:
		return nil
	case block.MissUnavailable:
		return fmt.Errorf("miss: %w", block.ErrUnavailable)
	}
	return fmt.Errorf("miss: %v", why)
}

// TestSickDevice makes each call while the device is sick in each way, at once and
// when it is known to be down, without a deadline: each ends with the right answer,
// and all goes well again when the device does.
func TestSickDevice(t *testing.T) {
	t.Parallel()
	unavailable := func(err error) bool { return errors.Is(err, block.ErrUnavailable) }
	well := func(err error) bool { return err == nil }
	either := func(err error) bool { return well(err) || unavailable(err) }
	calls := []struct {
		name  string
		call  func(r *sickRig, i int) error
		sick  func(err error) bool
		flush func(err error) bool // before it is down, when only flushes fail
	}{
		{"PutG2", func(r *sickRig, i int) error { return r.putNow(i, block.G2) }, well, well},
		{"PutG3", func(r *sickRig, i int) error { return r.putNow(i, block.G3) }, unavailable, unavailable},
		{"GetFromG3", func(r *sickRig, _ int) error { return r.reads(block.GetOptions{NoPromote: true}) }, unavailable, well},
		{"GetPromote", func(r *sickRig, _ int) error { return r.reads(block.GetOptions{}) }, unavailable, well},
		{"Prefetch", func(r *sickRig, _ int) error {
			var miss error
			err := r.Prefetch(context.Background(), r.ns.ID, hashLen, pack(hashOf(1)), block.PrefetchOptions{}, func(p block.Progress) error {
				miss = missed(p.Reason)
				return nil
			})
			return errors.Join(err, miss)
		}, unavailable, well},
		{"Delete", func(r *sickRig, _ int) error {
			_, err := r.Store.Delete(context.Background(), r.ns.ID, hashLen, pack(hashOf(2)))
			return err
		}, either, either},
		{"Drain", func(r *sickRig, _ int) error { _, err := r.Store.Drain(context.Background(), nil); return err }, unavailable, unavailable},
	}
	for _, sickness := range []string{"Fail", "Short", "Stall", "Hang", "Down", "Flush"} {
		for _, c := range calls {
			t.Run(sickness+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				stalls := sickness == "Stall" || sickness == "Hang"
				after := time.Minute
				if stalls {
					after = stallAfter
				}
				r := newSickRig(t, slabIn(t, 64<<20), after)
				resume := make(chan struct{})
				answer := sync.OnceFunc(func() { close(resume) })
				defer answer()
				first := c.sick
				switch sickness {
				case "Fail":
					r.disk.Set(xfertest.Rule{Fault: xfertest.Fail})
				case "Short":
					r.disk.Set(xfertest.Rule{Fault: xfertest.Short})
				case "Stall":
					r.disk.Set(xfertest.Rule{Fault: xfertest.Stall, Resume: resume})
				case "Hang":
					r.disk.Set(xfertest.Rule{Fault: xfertest.Hang, Resume: resume})
				case "Down":
					r.disk.Set(xfertest.Rule{Fault: xfertest.Down})
				case "Flush":
					first = c.flush
					err := errors.New("injected flush error")
					r.flush.Store(&err)
				}
				if err := ends(t, c.name, func() error { return c.call(r, 10) }); !first(err) {
					t.Errorf("at once: %v", err)
				}
				// What the calls left in G2 only; a sickness that nothing has met yet shows now.
				if err := ends(t, "put", func() error { return r.putNow(11, block.G3) }); !unavailable(err) {
					t.Errorf("durable put: %v", err)
				}
				eventually(t, "the device is down", func() bool { return r.device(0).State == block.Down })
				if d := r.device(0); d.Reason == "" || d.Errors == 0 && !stalls {
					t.Errorf("%+v", d)
				}
				r.cool(t, 1) // a call may have brought it up
				if c.name != "Delete" {
					if err := ends(t, c.name, func() error { return c.call(r, 12) }); !c.sick(err) {
						t.Errorf("when it is down: %v", err)
					}
				}
				if err := ends(t, "put", func() error { return r.putNow(13, block.G2) }); err != nil {
					t.Errorf("put to g2: %v", err)
				}
				r.disk.Clear()
				r.flush.Store(nil)
				answer()
				eventually(t, "the device is healthy", func() bool { return r.device(0).State == block.Healthy })
				for what, call := range map[string]func() error{
					"put":   func() error { return r.putNow(14, block.G3) },
					"get":   func() error { return r.reads(block.GetOptions{NoPromote: true}) },
					"drain": func() error { _, err := r.Store.Drain(context.Background(), nil); return err },
				} {
					if err := ends(t, what, call); err != nil {
						t.Errorf("%s, when it is healthy: %v", what, err)
					}
				}
				wantHit(t, r.Store, r.ns, 1, sickBytes)
				wantHit(t, r.Store, r.ns, 13, sickBytes)
				wantEmpty(t, r.Store)
			})
		}
	}
}

// TestStalledWrites puts several times what G2 holds while no write to G3 ends:
// each put is stored or refused, what is stored and has gone was counted, and when
// the device answers again everything goes on.
func TestStalledWrites(t *testing.T) {
	t.Parallel()
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprintf("closed=%v", closed), func(t *testing.T) {
			t.Parallel()
			r := newSickRig(t, slabIn(t, 64<<20), stallAfter)
			resume := make(chan struct{})
			r.disk.Set(xfertest.Rule{Fault: xfertest.Stall, Ops: []xfer.Op{xfer.Write}, Resume: resume})
			const first, n = 100, 200
			stored := 0
			for i := first; i < first+n; i++ {
				switch err := ends(t, "put", func() error { return r.putNow(i, block.G2) }); {
				case err == nil:
					stored++
				case !errors.Is(err, block.ErrNoSpace):
					t.Fatalf("put %d: %v", i, err)
				}
			}
			if r.device(0).State != block.Down {
				t.Errorf("%+v", r.device(0))
			}
			var there []int
			eventually(t, "every block that is gone is counted", func() bool {
				there = there[:0]
				for i := first; i < first+n; i++ {
					if tiersOf(t, r.Store, r.ns, i) != "" {
						there = append(there, i)
					}
				}
				gone := int64(stored - len(there))
				lost := r.Stats().Removed["evicted"]
				return lost == gone || lost == gone+1 && tiersOf(t, r.Store, r.ns, 2) == ""
			})
			if stored < n/2 || len(there) < 20 {
				t.Errorf("of %d puts %d are stored and %d are there", n, stored, len(there))
			}
			for _, i := range there { // some may leave still
				data, p, err := get(r.Store, r.ns, i, block.GetOptions{})
				if err != nil || p.Reason != block.MissAbsent && (p.Reason != block.Hit || string(data) != string(payload(i, sickBytes))) {
					t.Errorf("get %d: %v, %v", i, p.Reason, err)
				}
			}
			if closed {
				if err := ends(t, "close", r.Close); err != nil {
					t.Error(err)
				}
				return
			}
			r.disk.Clear()
			close(resume)
			eventually(t, "the device is healthy", func() bool { return r.device(0).State == block.Healthy })
			const more = 80 // all fit into G3
			for i := first + n; i < first+n+more; i++ {
				mustPut(t, r.Store, r.ns, i, sickBytes, block.PutOptions{Durable: block.TierID(2 + i%2)})
			}
			for i := first + n; i < first+n+more; i++ {
				if i%2 == 1 {
					wantHit(t, r.Store, r.ns, i, sickBytes)
				}
			}
			wantEmpty(t, r.Store)
		})
	}
}

// TestSickNeighbour: a device that stalls costs the blocks of the other nothing,
// and new ones go there.
func TestSickNeighbour(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newSickRig(t, []tiers.SlabSpec{{Path: filepath.Join(dir, "0"), Bytes: 64 << 20}, {Path: filepath.Join(dir, "1"), Bytes: 64 << 20}}, stallAfter)
	on := map[uint8][]int{}
	for i := 100; i < 120; i++ {
		mustPut(t, r.Store, r.ns, i, sickBytes, block.PutOptions{Durable: block.G3})
		dev := placeIn(t, r.Store, r.ns, i, block.G3).Device()
		on[dev] = append(on[dev], i)
		r.cool(t, i)
	}
	if len(on[0]) == 0 || len(on[1]) == 0 {
		t.Fatalf("blocks are on %v", on)
	}
	resume := make(chan struct{})
	r.disk.Set(xfertest.Rule{Fault: xfertest.Stall, Devs: []uint64{1}, Resume: resume})
	// One call for both: the stalled device holds up its own blocks only.
	want := []block.Wanted{{Hash: hashOf(on[1][0])}, {Hash: hashOf(on[0][0])}}
	var got []block.MissReason
	err := ends(t, "get", func() error {
		return r.Get(context.Background(), r.ns.ID, hashLen, want, block.GetOptions{}, func(_ int, p block.Payload) error {
			got = append(got, p.Reason)
			return nil
		})
	})
	if err != nil || fmt.Sprint(got) != "[unavailable hit]" {
		t.Errorf("get: %v, %v", got, err)
	}
	if a, b := r.device(0), r.device(1); a.State != block.Healthy || b.State != block.Down {
		t.Errorf("devices: %+v, %+v", a, b)
	}
	for i := 120; i < 140; i++ {
		mustPut(t, r.Store, r.ns, i, sickBytes, block.PutOptions{Durable: block.G3})
		if dev := placeIn(t, r.Store, r.ns, i, block.G3).Device(); dev != 0 {
			t.Errorf("block %d is on device %d", i, dev)
		}
	}
	for _, i := range on[0] {
		wantHit(t, r.Store, r.ns, i, sickBytes)
	}
	for _, i := range on[1] {
		wantMiss(t, r.Store, r.ns, i, block.MissUnavailable)
	}
	r.disk.Clear()
	close(resume)
	eventually(t, "the device is healthy", func() bool { return r.device(1).State == block.Healthy })
	for _, i := range on[1] {
		wantHit(t, r.Store, r.ns, i, sickBytes)
	}
	wantEmpty(t, r.Store)
}

// TestProbeWantsTheSlab: a device that is down stays down while something else is
// where the slab was, and one bad superblock of the two is none of that.
func TestProbeWantsTheSlab(t *testing.T) {
	t.Parallel()
	r := newSickRig(t, slabIn(t, 64<<20), time.Minute)
	path := r.o.Slabs[0].Path
	page := func(off int64, change func(b []byte)) { inFile(t, path, off-slabDataAt, 4096, change) }
	var super []byte
	page(0, func(b []byte) { super = append(super, b...) })
	wreck := func(b []byte) { b[20] ^= 1 }
	page(0, wreck)
	page(64<<10, wreck)
	r.disk.Set(xfertest.Rule{Fault: xfertest.Fail})
	if err := r.putNow(10, block.G3); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("put: %v", err)
	}
	eventually(t, "the device is down", func() bool { return r.device(0).State == block.Down })
	r.disk.Clear()
	was := r.device(0).Errors
	eventually(t, "another probe has failed", func() bool { return r.device(0).Errors > was+1 })
	if d := r.device(0); d.State != block.Down {
		t.Errorf("with two bad superblocks: %+v", d)
	}
	page(64<<10, func(b []byte) { copy(b, super) })
	eventually(t, "the device is healthy", func() bool { return r.device(0).State == block.Healthy })
	f, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if probe := f[96<<10:][:4096]; strings.Trim(string(probe), "\x00") == "" {
		t.Error("the probe has written nothing")
	}
	wantHit(t, r.Store, r.ns, 1, sickBytes)
}
