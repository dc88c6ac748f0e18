package tiers_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// How a phase ends.
const (
	endRest  = "at rest"             // in order, when nothing is under way any more
	endAmid  = "amid work"           // in order, while the store still moves blocks
	endPower = "by power loss"       // in the middle of calls
	endLost  = "without its catalog" // while the store still moves blocks; a repair follows
)

// modelConf is a store and what happens to it.
type modelConf struct {
	opts     tiers.Options
	slabs    []int64 // bytes of each
	sizes    []int   // of blocks
	grpc     bool    // calls go through a client
	inMemory bool    // the catalog lies on a file system that can crash
	kinds    []xfertest.Fault
	shaky    bool // the catalog's disk fails, too
	spoils   bool // some faults change bytes
	ends     [modelPhases]string
}

func drawConf(seed uint64) modelConf {
	r := rand.New(rand.NewPCG(seed, 1))
	c := modelConf{grpc: r.IntN(4) == 0, inMemory: r.IntN(2) == 0}
	c.opts.DRAM = []int64{16 << 20, 24 << 20, 40 << 20}[r.IntN(3)]
	c.opts.StallAfter = time.Minute // what stalls goes on soon; what takes longer is a machine that is busy
	if r.IntN(3) == 0 {
		c.opts.High, c.opts.Low = 0.8, 0.6
	}
	if r.IntN(3) == 0 {
		c.opts.Grace = 300 * time.Millisecond
	}
	if r.IntN(3) == 0 {
		c.opts.PrefetchBytes = 8 << 20
	}
	if r.IntN(6) > 0 {
		for range 1 + r.IntN(2) {
			c.slabs = append(c.slabs, []int64{32 << 20, 48 << 20, 96 << 20}[r.IntN(3)])
		}
	}
	c.sizes = [][]int{
		{600},
		{512, 5000},
		{700, 5000, 70_000, 300_000, 1 << 20},
		{60_000, 64<<10 + 100, 600_000},
		{800, 300_000, 400_000, 500_000},
		{1000, 2000, 4000, 9000, 17_000, 33_000, 66_000, 130_000, 260_000},
	}[r.IntN(6)]
	if len(c.slabs) > 0 && r.IntN(6) > 0 {
		all := []xfertest.Fault{xfertest.Fail, xfertest.Short, xfertest.Stall, xfertest.Corrupt, xfertest.Down}
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		c.kinds = all[:1+r.IntN(2)]
	}
	for _, k := range c.kinds {
		c.spoils = c.spoils || k == xfertest.Corrupt
	}
	for i := range c.ends {
		c.ends[i] = []string{endRest, endAmid}[r.IntN(2)]
		if c.inMemory && r.IntN(2) == 0 {
			c.ends[i] = endPower
		}
		if !c.inMemory && c.durable() && r.IntN(3) == 0 {
			c.ends[i] = endLost
		}
	}
	if c.durable() && r.IntN(3) == 0 {
		c.opts.WriteBudgets = budget(tiers.MinWriteBudget)
	}
	c.shaky = c.inMemory && c.durable() && r.IntN(2) == 0
	if r.IntN(3) == 0 {
		c.opts.SharedMemory = tiers.ShareOn
		c.opts.Share = func(namespace string) string { return namespace }
	}
	return c
}

// place gives the store its paths.
func (c *modelConf) place(t testing.TB) {
	dir := t.TempDir()
	c.opts.Dir = filepath.Join(dir, "data")
	c.opts.SweepAfter, c.opts.ProbeEvery = 100*time.Millisecond, 100*time.Millisecond
	for i, n := range c.slabs {
		c.opts.Slabs = append(c.opts.Slabs, tiers.SlabSpec{Path: filepath.Join(dir, fmt.Sprintf("slab%d", i)), Bytes: n})
	}
}

func (c modelConf) String() string {
	return fmt.Sprintf("g2 %d MiB, in shares %v, slabs %v, write budgets %v, watermarks %v %v, grace %v, sizes %v, grpc %v, catalog in memory %v, and shaky %v",
		c.opts.DRAM>>20, c.opts.Share != nil, c.slabs, c.opts.WriteBudgets, c.opts.High, c.opts.Low, c.opts.Grace, c.sizes, c.grpc, c.inMemory, c.shaky)
}

// rough says whether there are faults.
func (c *modelConf) rough() bool { return len(c.kinds) > 0 || c.shaky }

// durable says whether there is a tier that keeps blocks.
func (c *modelConf) durable() bool { return len(c.slabs) > 0 }

// agent is one whose file backend goes wrong as the weather says, and forgets
// what was not flushed when the power goes.
func (m *model) agent() (a *xfer.Agent, v *xfertest.Volatile) {
	a = agentWith(m.life, func(b xfer.Backend) xfer.Backend {
		if m.conf.inMemory {
			v = xfertest.NewVolatile(b)
			b = v
		}
		return m.faults.Wrap(b)
	})
	return a, v
}

// catalog says where the catalog lies.
func (m *model) catalog() *index.CatalogOptions {
	if m.fs == nil {
		return nil
	}
	return &index.CatalogOptions{FS: errorfs.Wrap(m.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if f := m.storm.Load(); f != nil && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpRemove && f.files(op) {
			m.stormed.Add(1)
			return f.err
		}
		return nil
	}))}
}

// catalogStorm is what the disk of the catalog does for a while.
type catalogStorm struct {
	files func(op errorfs.Op) bool // writes of which fail
	err   error
}

// catalogFiles are what the catalog may not write for a while.
var catalogFiles = []func(op errorfs.Op) bool{
	func(errorfs.Op) bool { return true },
	func(op errorfs.Op) bool { return strings.HasSuffix(op.Path, ".log") },
	// A log that cannot be made longer goes on as long as what is written fits.
	func(op errorfs.Op) bool { return op.Kind == errorfs.OpFileWriteAt },
	func(op errorfs.Op) bool { return strings.HasSuffix(op.Path, ".sst") },
	func(op errorfs.Op) bool { return strings.Contains(strings.ToLower(op.Path), "manifest") },
}

// gust is a fault that blows for a while.
type gust struct {
	after, during time.Duration
	rule          xfertest.Rule
	catalog       *catalogStorm // nil: it works
}

func (c *modelConf) drawGusts(r *rand.Rand) (out []gust) {
	if !c.rough() {
		return nil
	}
	for range 20 {
		ms := func() time.Duration { return time.Duration(1+r.IntN(30)) * time.Millisecond }
		g := gust{after: ms(), during: ms()}
		errno := []error{syscall.EIO, syscall.ENOSPC}[r.IntN(2)]
		if c.shaky && (len(c.kinds) == 0 || r.IntN(3) == 0) {
			g.catalog = &catalogStorm{catalogFiles[r.IntN(len(catalogFiles))], errno}
			out = append(out, g)
			continue
		}
		g.rule = xfertest.Rule{Fault: c.kinds[r.IntN(len(c.kinds))], Chance: []float64{0.02, 0.2, 0.9}[r.IntN(3)], Seed: r.Uint64()}
		g.rule.Err = fmt.Errorf("%w: injected: %w", xfer.ErrUnavailable, errno)
		g.rule.Ops = [][]xfer.Op{nil, {xfer.Read}, {xfer.Write}}[r.IntN(3)]
		out = append(out, g)
	}
	return out
}

// blow lets the faults come and go until the work is done.
func (m *model) blow(gusts []gust, calm <-chan struct{}) {
	wait := func(d time.Duration) (more bool) {
		select {
		case <-calm:
			return false
		case <-time.After(d):
			return true
		}
	}
	for _, g := range gusts {
		if !wait(g.after) {
			return
		}
		resume := make(chan struct{})
		if m.storm.Store(g.catalog); g.catalog == nil {
			g.rule.Resume = resume
			m.faults.Set(g.rule)
		}
		more := wait(g.during)
		m.faults.Clear()
		m.storm.Store(nil)
		close(resume)
		if !more {
			return
		}
	}
}
