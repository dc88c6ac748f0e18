package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// crowd is a daemon with clients that work all the time and compare every byte,
// beside others that come to harm. What it holds itself is nothing while its gate is
// closed.
type crowd struct {
	t     *testing.T
	data  string
	args  []string
	d     *daemon
	c     *api.Client // looks
	ns    block.Namespace
	bytes [][]byte // of each block

	gate  sync.RWMutex  // held for writing: no call is under way
	pause time.Duration // between calls
	stop  context.CancelFunc
	work  sync.WaitGroup
	did   struct{ read, put, deleted, refused atomic.Int64 }
}

// crowdWays are the clients of a crowd.
var crowdWays = map[string]*api.ClientOptions{
	api.WayShared: {NoGrants: true},
	api.WayUnix:   {NoGrants: true, NoShared: true},
	api.WayGRPC:   {Inline: true},
}

// newCrowd starts the checked daemon, which poisons what is freed, and the clients.
func newCrowd(t *testing.T, dram string, pause time.Duration) *crowd {
	t.Helper()
	dir := t.TempDir()
	x := &crowd{t: t, data: filepath.Join(dir, "data"), pause: pause}
	x.args = onLoopback("--data", x.data, "--dram", dram, "--nvme", filepath.Join(dir, "slab")+"=512MiB", "--shared-memory", "on", "--log-level", "debug", "--metrics", "127.0.0.1:0", "--socket", filepath.Join(dir, "s"))
	x.d = mustReady(startCommand(t, exec.Command(checked, x.args...)))
	x.c = dial(t, x.d)
	x.ns = open(t, x.c, "crowd", crowdLargest)
	for i := range crowdBlocks {
		x.bytes = append(x.bytes, payload(i, crowdBytes(i)))
	}
	ctx, cancel := context.WithCancel(t.Context())
	x.stop = cancel
	t.Cleanup(func() { cancel(); x.work.Wait() })
	for way, o := range crowdWays {
		c, err := api.Dial(timeout(t), x.d.addr, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() }) // its daemon may be gone
		r := rand.New(rand.NewPCG(rand.Uint64(), 0))
		x.work.Go(func() {
			if err := x.run(ctx, c, r); err != nil && ctx.Err() == nil {
				t.Errorf("by %s: %v", way, err)
			}
			if i := c.SessionInfo(); i.Way != way && ctx.Err() == nil {
				t.Errorf("blocks moved by %+v, want %s", i, way)
			}
		})
	}
	return x
}

// run works until ctx ends or something is wrong.
func (x *crowd) run(ctx context.Context, c *api.Client, r *rand.Rand) error {
	tick := time.NewTicker(max(x.pause, time.Millisecond))
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := x.step(ctx, c, r); err != nil {
			return err
		}
		if x.pause > 0 {
			<-tick.C
		}
	}
	return nil
}

func (x *crowd) step(ctx context.Context, c *api.Client, r *rand.Rand) error {
	x.gate.RLock()
	defer x.gate.RUnlock()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var blocks []int
	for range 1 + r.IntN(4) {
		blocks = append(blocks, r.IntN(crowdBlocks))
	}
	switch n := r.IntN(10); {
	case n < 6:
		return x.get(ctx, c, blocks)
	case n < 9:
		return x.put(ctx, c, blocks)
	}
	hashes := make([]block.Hash, len(blocks))
	for k, i := range blocks {
		hashes[k] = hashOf(i)
	}
	deleted, err := c.Delete(ctx, x.ns, hashes)
	x.did.deleted.Add(int64(deleted))
	return err
}

func (x *crowd) put(ctx context.Context, c *api.Client, blocks []int) error {
	items := make([]api.PutItem, len(blocks))
	for k, i := range blocks {
		items[k] = api.PutItem{Hash: hashOf(i), Data: x.bytes[i]}
	}
	res, err := c.Put(ctx, x.ns, items, api.PutOptions{})
	if err != nil {
		return err
	}
	for k, one := range res {
		switch {
		case one.Err == nil:
			x.did.put.Add(1)
		case errors.Is(one.Err, block.ErrNoSpace):
			x.did.refused.Add(1) // what others lease and hold does not leave
		default:
			return fmt.Errorf("put block %d: %w", blocks[k], one.Err)
		}
	}
	return nil
}

// get reads blocks and compares them.
func (x *crowd) get(ctx context.Context, c *api.Client, blocks []int) error {
	want := make([]block.Wanted, len(blocks))
	for k, i := range blocks {
		want[k].Hash = hashOf(i)
	}
	return c.Get(ctx, x.ns, want, block.GetOptions{Verify: true}, func(k int, p block.Payload) error {
		i := blocks[k]
		switch {
		case slices.Contains([]block.MissReason{block.MissAbsent, block.MissPending, block.MissNoRoom}, p.Reason):
			return nil
		case p.Reason != block.Hit:
			return fmt.Errorf("get block %d: %v", i, p.Reason)
		case !bytes.Equal(p.Bytes, x.bytes[i]):
			return fmt.Errorf("get block %d: %d wrong bytes from %v", i, len(p.Bytes), p.Tier)
		}
		x.did.read.Add(1)
		return nil
	})
}

// held is what the daemon's clients hold.
func (x *crowd) held() (leases, places int64) {
	x.t.Helper()
	s, err := x.c.Stats(timeout(x.t))
	if err != nil {
		x.t.Fatalf("%v\n%s", err, x.d.stderr)
	}
	return s.Leases, s.Reservations
}

// backWithin is how soon what a client held is free after its end.
const backWithin = 2 * time.Second

// soon fails the test when what a client held was free too long after its end.
func (x *crowd) soon(what string, took time.Duration) {
	x.t.Helper()
	allowed := backWithin
	if raceEnabled {
		allowed *= 2 // its code is slower
	}
	if took > allowed {
		x.t.Errorf("%s %v after its end, want %v at most", what, took, allowed)
	}
}

// freed waits, with the gate closed, until nobody holds anything, and says how long
// that was after the end of a client, with which the watch began.
func (x *crowd) freed(w *stopwatch) time.Duration {
	x.t.Helper()
	x.gate.Lock()
	defer x.gate.Unlock()
	looks := 0
	until(x.t, "what the ended clients held is free", func() bool {
		looks++
		leases, places := x.held()
		return leases == 0 && places == 0
	})
	took := w.took()
	if looks > 1 { // else it was free before, when others' calls kept the gate open
		x.soon("what a client held is free", took)
	}
	return took
}

// end reads all blocks, also when they have been brought down, and by a new daemon,
// and compares them.
func (x *crowd) end() {
	x.t.Helper()
	x.stop()
	x.work.Wait()
	x.judge()
	if s, err := x.c.Stats(timeout(x.t)); err != nil || s.Corrupt != 0 || s.Conflicts != 0 {
		x.t.Errorf("%d blocks were damaged, %d conflicts: %v", s.Corrupt, s.Conflicts, err)
	}
	x.d.stop(0)
	verify(x.t, x.data)
	x.d = mustReady(startCommand(x.t, exec.Command(checked, x.args...)))
	x.c = dial(x.t, x.d)
	if n := x.judge(); n == 0 {
		x.t.Error("nothing is left")
	}
	x.d.stop(0)
	if x.did.read.Load() == 0 || x.did.put.Load() == 0 || x.did.deleted.Load() == 0 {
		x.t.Errorf("the others did nothing: %s", x.sum())
	}
}

// judge reads all blocks over gRPC and says how many there are.
func (x *crowd) judge() (n int64) {
	x.t.Helper()
	c, err := api.Dial(timeout(x.t), x.d.addr, crowdWays[api.WayGRPC])
	if err != nil {
		x.t.Fatal(err)
	}
	defer c.Close()
	before := x.did.read.Load()
	for i := range crowdBlocks {
		if err := x.get(timeout(x.t), c, []int{i}); err != nil {
			x.t.Error(err)
		}
	}
	return x.did.read.Load() - before
}

// sum is what the others did.
func (x *crowd) sum() string {
	return fmt.Sprintf("others read %d blocks, put %d, were refused %d and deleted %d", x.did.read.Load(), x.did.put.Load(), x.did.refused.Load(), x.did.deleted.Load())
}
