package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// readyWithin is the longest that a daemon may take to be ready after a crash.
const readyWithin = 5 * time.Second

// crashTest kills one daemon after another on the same data directory, amid
// what its clients do, and judges each by what its clients were told.
type crashTest struct {
	t      *testing.T
	r      *rand.Rand
	h      *history
	admin  *adminHistory
	data   string
	args   []string
	deaths *deaths

	ways    map[string]int // rounds in which blocks moved that way
	slowest time.Duration  // to be ready
	evicted int64          // blocks that left G3 for want of room
	checks  int            // runs of verify
}

// TestCrashes is the promise that what was answered survives: daemons that die
// at random moments and at every point at which the order of writing matters,
// on media that hold everything and on media that do not.
func TestCrashes(t *testing.T) {
	rounds := 50
	switch {
	case soak:
		rounds = 500
	case raceEnabled, testing.Short():
		rounds = 8
	}
	var how deaths
	t.Run("group", func(t *testing.T) {
		for _, tt := range []struct {
			name       string
			dram, slab string
			evicts     bool
		}{
			{"room for all", "64MiB", "512MiB", false},
			{"little room", "32MiB", "36MiB", true},
		} {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				seed := uint64(time.Now().UnixNano())
				t.Logf("seed %d", seed)
				dir := t.TempDir()
				x := &crashTest{
					t: t, r: rand.New(rand.NewPCG(seed, 0)), h: newHistory(1500, tt.evicts), admin: &adminHistory{evicts: tt.evicts}, data: filepath.Join(dir, "data"), deaths: &how,
					ways: map[string]int{},
				}
				x.args = onLoopback("--data", x.data, "--dram", tt.dram, "--nvme", filepath.Join(dir, "slab")+"="+tt.slab, "--shared-memory", "on")
				n := rounds
				if soak && !tt.evicts {
					n *= 2 // what is missing there was lost
				}
				x.run(n)
			})
		}
	})
	t.Attr("ends", how.String())
	for _, p := range crashPoints {
		if everyPoint() && how.count(p.name) == 0 {
			t.Errorf("no daemon died at %s", p.name)
		}
	}
}

// everyPoint says whether there are enough rounds for each point.
func everyPoint() bool { return !testing.Short() && (soak || !raceEnabled) }

func (x *crashTest) run(rounds int) {
	for round := range rounds {
		if round%10 == 9 {
			verify(x.t, x.data)
			x.checks++
		}
		var armed point
		if round%4 != 0 {
			armed = crashPoints[(round-round/4)%len(crashPoints)]
		}
		x.round(round, armed, 1)
		if x.t.Failed() {
			x.t.Fatalf("round %d", round)
		}
	}
	// What chance has not brought, on a machine that is slow: with more time each time.
	for _, p := range crashPoints {
		for more := 1; more <= 8 && everyPoint() && x.deaths.count(p.name) == 0; more++ {
			if x.round(rounds, p, more); x.t.Failed() {
				x.t.Fatalf("further round %d at %s", more, p.name)
			}
		}
	}
	// The last one ends in order, and its files are what its clients know.
	d := x.serve(exec.Command(kvtier, x.args...))
	w, err := x.client(d, new(atomic.Bool), nil)
	if err == nil {
		err = x.judge(w)
	}
	if err != nil {
		x.t.Fatal(err)
	}
	for s := range x.admin.spaces {
		if sp := &x.admin.spaces[s]; sp.opened { // leaves what the clients count alone
			if _, err := w.c.Clear(timeout(x.t), sp.ns); err != nil {
				x.t.Fatal(err)
			}
		}
	}
	d.stop(0)
	c, there := x.h.totals()
	if n := verify(x.t, x.data); n != int64(there) && !x.h.evicts {
		x.t.Errorf("%d blocks are committed, the clients know %d", n, there)
	}
	// A few rounds may not bring everything.
	if a := x.admin; everyPoint() && (a.opened == 0 || a.cleared == 0 || a.pinned == 0 || a.unpinned == 0) {
		x.t.Errorf("the rounds did not do what they are for: %+v", a)
	}
	if everyPoint() && (c.durable == 0 || c.stored == 0 || c.deleted == 0 || c.abandoned == 0 || c.read == 0 || c.leased == 0 || (x.evicted > 0) != x.h.evicts) {
		x.t.Errorf("the rounds did not do what they are for: %+v, %d evicted", c, x.evicted)
	}
	for _, way := range []string{api.WayShared, api.WayUnix, api.WayTCP, api.WayGRPC} {
		if everyPoint() && x.ways[way] == 0 {
			x.t.Errorf("no blocks moved by %s: %v", way, x.ways)
		}
	}
	x.t.Attr("ways", fmt.Sprint(x.ways))
	x.t.Attr("did", fmt.Sprintf("%d rounds, puts acknowledged: %d durable and %d in DRAM; %d refused, %d abandoned, %d deletes acknowledged, "+
		"%d blocks read, %d misses, %d leased, %d prefetched, %d evicted, %d namespaces opened, %d cleared, %d blocks pinned, %d unpinned, "+
		"%d times verify, ready after %v at most",
		rounds, c.durable, c.stored, c.refused, c.abandoned, c.deleted, c.read, c.missed, c.leased, c.prefetched, x.evicted, x.admin.opened, x.admin.cleared, x.admin.pinned, x.admin.unpinned, x.checks,
		x.slowest.Round(time.Millisecond)))
}

// round is the life of one daemon. One that is armed may live longer.
func (x *crashTest) round(round int, armed point, longer int) {
	cmd := exec.Command(kvtier, x.args...)
	if armed.name != "" {
		cmd = exec.Command(checked, x.args...)
		cmd.Env = []string{fmt.Sprintf("KVTIER_CRASH=%s:%d", armed.name, 1+x.r.IntN(armed.often))}
	}
	d := x.serve(cmd)
	if d == nil {
		x.died(armed.name)
		return
	}
	var ending atomic.Bool
	all, err := x.clients(d, &ending, round)
	if err == nil {
		err = x.judge(all[0])
	}
	switch {
	case err == nil:
	case armed.name != "" && errors.Is(err, errEnded) && d.wait() == -1:
		x.died(armed.name)
		return
	default:
		x.t.Fatalf("round %d, armed %q: judged at the start: %v\n%s", round, armed.name, err, d.stderr)
	}

	ctx, cancel := context.WithCancel(x.t.Context())
	defer cancel()
	var clients sync.WaitGroup
	for i := range 4 {
		one := *all[i%len(all)]
		one.r = rand.New(rand.NewPCG(x.r.Uint64(), 0))
		clients.Go(func() { one.run(ctx) })
	}
	spaces := x.adminOf(all[0])
	clients.Go(func() {
		if err := spaces.run(ctx); err != nil {
			x.t.Error(err)
		}
	})
	stats := x.watch(all)
	life := time.Duration(30+x.r.IntN(250)) * time.Millisecond
	if armed.name != "" {
		life *= time.Duration(2 * longer) // time to get there
	}
	if raceEnabled {
		life *= 4 // all is slower
	}
	how := "at random"
	select {
	case <-d.exited:
		how = armed.name
	case <-time.After(life):
		if armed.name == drainPoint || x.r.IntN(10) == 0 {
			how = x.stop(d, &ending, armed.name)
		}
	}
	d.kill()
	cancel()
	clients.Wait()
	x.evicted += stats()
	if how == "" {
		x.t.Errorf("the daemon ended by itself: %v:\n%s", d.cmd.ProcessState, d.stderr)
	}
	x.died(how)
}

// stop tells the daemon to stop, waits for a while, and says how it ended.
func (x *crashTest) stop(d *daemon, ending *atomic.Bool, armed string) string {
	ending.Store(true)
	switch err := d.cmd.Process.Signal(syscall.SIGTERM); {
	case errors.Is(err, os.ErrProcessDone):
		<-d.exited
		return armed // it came to where it is killed just now; "" says that it ended by itself
	case err != nil:
		x.t.Error(err)
	}
	select {
	case <-d.exited:
	case <-time.After(time.Duration(x.r.IntN(300)) * time.Millisecond):
		if armed != "" {
			select {
			case <-d.exited:
			case <-time.After(time.Second):
			}
		}
	}
	select {
	case <-d.exited:
	default:
		return "amid a stop"
	}
	switch {
	case d.cmd.ProcessState.ExitCode() == -1:
		return armed
	case d.cmd.ProcessState.ExitCode() == 0, x.h.evicts && d.cmd.ProcessState.ExitCode() == 3:
		return "in order"
	}
	x.t.Errorf("a stop ended with %v:\n%s", d.cmd.ProcessState, d.stderr)
	return "in order"
}

// died notes how a daemon ended.
func (x *crashTest) died(how string) {
	x.deaths.add(how)
	if how != "in order" || x.h.evicts {
		x.h.crashed()
	}
}

// serve starts a daemon, which must be ready soon. It is nil when an armed one
// has died before that.
func (x *crashTest) serve(cmd *exec.Cmd) *daemon {
	begun := time.Now()
	p := startCommand(x.t, cmd)
	d, ok := p.ready()
	if !ok {
		if s, _ := p.cmd.ProcessState.Sys().(syscall.WaitStatus); len(cmd.Env) > 0 && s.Signaled() && s.Signal() == syscall.SIGKILL {
			return nil
		}
		x.t.Fatalf("%s: %v before it was ready:\n%s", p, p.cmd.ProcessState, p.stderr)
	}
	took, within := time.Since(begun), readyWithin
	if raceEnabled {
		within *= 4 // its code is as much slower
	}
	if x.slowest = max(x.slowest, took); took > within {
		x.t.Errorf("ready after %v, want %v at most", took, within)
	}
	return d
}

// adminOf is the client of the namespaces, over the connection of another.
func (x *crashTest) adminOf(w *traffic) *admin {
	return &admin{c: w.c, h: x.admin, r: rand.New(rand.NewPCG(x.r.Uint64(), 0)), ending: w.ending}
}

// clients connects to a daemon in all ways: by shared memory or, in every third
// round, by TCP, over the socket, and by gRPC.
func (x *crashTest) clients(d *daemon, ending *atomic.Bool, round int) ([]*traffic, error) {
	if round%3 == 2 {
		if err := os.Remove(filepath.Join(x.data, "session.sock")); err != nil {
			x.t.Error(err)
		}
	}
	var all []*traffic
	for _, o := range []*api.ClientOptions{nil, {NoShared: true}, {Inline: true}} {
		w, err := x.client(d, ending, o)
		if err != nil {
			return nil, err
		}
		all = append(all, w)
	}
	return all, nil
}

// client connects to a daemon.
func (x *crashTest) client(d *daemon, ending *atomic.Bool, o *api.ClientOptions) (*traffic, error) {
	ctx := timeout(x.t)
	w := &traffic{t: x.t, h: x.h, r: x.r, ending: ending, exited: d.exited, inline: o != nil && o.Inline}
	var err error
	if w.c, err = api.Dial(ctx, d.addr, o); err != nil {
		return nil, w.failed("dial", err)
	}
	x.t.Cleanup(func() { _ = w.c.Close() }) // its daemon is gone
	w.ns, err = w.c.OpenNamespace(ctx, block.Descriptor{Name: "crash", MaxBlockBytes: largestBlock}, 0)
	w.ns.HashLen = hashBytes
	return w, w.failed("open namespace", err)
}

// judge reads everything that there may be. What is listed is readable, what was
// answered is there, and what was deleted is not.
func (x *crashTest) judge(w *traffic) error {
	ctx := timeout(x.t)
	total := 0
	for blocks := range x.h.all(100) {
		there, err := w.listed(ctx, blocks, true)
		if err != nil {
			return err
		}
		for k, i := range blocks {
			if x.h.settle(i, there[k]); there[k] {
				total++
			}
		}
	}
	listed := 0
	for cursor, more := "", true; more; more = cursor != "" {
		entries, next, err := w.c.List(ctx, w.ns, cursor, 1000)
		if err != nil {
			return w.failed("list", err)
		}
		cursor = next
		listed += len(entries)
	}
	if listed != total && !x.h.evicts {
		return fmt.Errorf("%d blocks are listed, %d were read", listed, total)
	}
	if err := x.adminOf(w).judge(ctx); err != nil {
		return w.failed("judge the namespaces", err)
	}
	return nil
}

// watch asks a daemon for its counters until it is gone, and notes which ways its
// clients' blocks go. The function that it returns waits for that and says how many
// blocks left G3 for want of room.
func (x *crashTest) watch(all []*traffic) (evicted func() int64) {
	var n int64
	var asked sync.WaitGroup
	asked.Go(func() {
		ways := map[string]bool{}
		defer func() {
			for way := range ways {
				x.ways[way]++
			}
		}()
		for {
			s, err := all[0].c.Stats(x.t.Context())
			if err != nil {
				return // it is gone
			}
			for _, w := range all {
				if way := w.c.SessionInfo().Way; way != api.WayGRPC || w.inline {
					ways[way] = true
				}
			}
			n = s.Removed[block.Evicted.String()]
			time.Sleep(10 * time.Millisecond)
		}
	})
	return func() int64 { asked.Wait(); return n }
}
