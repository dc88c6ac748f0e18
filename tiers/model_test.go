package tiers_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

var (
	modelSeeds = flag.Int("model.seeds", 0, "how many seeds TestModel runs; 0: 100, or 1,500 when KVTIER_SOAK=1, and a tenth with -race or -short")
	modelSeed  = flag.Uint64("model.seed", 0, "run TestModel with this seed only")
)

// TestModel does random things to a store from several goroutines and compares
// it with a model of a store that may lose blocks, but not in silence:
//
//   - a hit has the bytes of the version that was put last, whole or a range of
//     them, and what was deleted, cleared or has expired never comes back, also not
//     after a restart, a loss of power, or a repair of a catalog that was lost;
//   - a block that is leased, pinned, or within its grace is a hit;
//   - the bytes that a get hands out stay what they are until it ends, whatever
//     happens to the block meanwhile;
//   - what is acknowledged was stored, and where a block is, is what the events
//     say: in each tier it came in as often as it left, or once more when it is there;
//   - what was in G3 when the store was closed at rest is there when it is opened
//     again, and nothing else is; what was acknowledged as durable is there after
//     the power was lost, and what is listed can be read;
//   - what gets said of keys is counted, and in the end all gauges are zero.
//
// The seed fixes the configuration, the operations of each goroutine, the faults
// and when they come, and how each phase ends; what goroutines do to each other is
// left to the scheduler. The length of a block says its version, so that events and
// reads can be told apart.
func TestModel(t *testing.T) {
	first, n := uint64(1), uint64(modelRuns())
	if *modelSeed != 0 {
		first, n = *modelSeed, 1
	}
	var all modelSum
	t.Cleanup(func() { // when every seed has run
		t.Attr("did", all.String())
		if all.struck < all.seeds*3/5 && all.seeds >= 100 {
			t.Errorf("faults struck in %d of %d seeds, want three in five at least", all.struck, all.seeds)
		}
	})
	for seed := first; seed < first+n; seed++ {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			m := newModel(t, seed, drawConf(seed))
			m.run()
			m.Log(m.summary())
			all.add(m)
		})
	}
}

// modelSum is what all runs did together.
type modelSum struct {
	mu                     sync.Mutex
	seeds, remote, ops     int64
	struck, crashed        int64 // seeds in which a fault struck, and that lost power
	restarts, faults       map[string]int
	misses, removed        map[string]int64
	sectorsKept, sectorsOf int
}

func (s *modelSum) add(m *model) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seeds++; s.seeds == 1 {
		s.restarts, s.faults, s.misses, s.removed = map[string]int{}, map[string]int{}, map[string]int64{}, map[string]int64{}
	}
	if m.conf.grpc {
		s.remote++
	}
	for kind := range m.counts {
		s.ops += m.counts[kind].Load()
	}
	if len(m.injected()) > 0 {
		s.struck++
	}
	if m.restarts[endPower] > 0 {
		s.crashed++
	}
	sumUp(s.restarts, m.restarts)
	sumUp(s.faults, m.injected())
	sumUp(s.misses, m.misses)
	sumUp(s.removed, m.removed)
	s.sectorsKept += m.sectors[0]
	s.sectorsOf += m.sectors[0] + m.sectors[1]
}

func sumUp[N int | int64](sum, with map[string]N) {
	for what, n := range with {
		sum[what] += n
	}
}

func (s *modelSum) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("%d seeds, %d of them through gRPC, %d struck by faults, %d that lost power, %d operations; ends %v; faults %v; %d of %d sectors kept when the power went; misses %v; removed %v",
		s.seeds, s.remote, s.struck, s.crashed, s.ops, s.restarts, s.faults, s.sectorsKept, s.sectorsOf, s.misses, s.removed)
}

func modelRuns() int {
	n := 100
	switch {
	case *modelSeeds > 0:
		return *modelSeeds
	case os.Getenv("KVTIER_SOAK") == "1":
		n = 1500 // of which a thousand have faults
	}
	if raceEnabled || testing.Short() {
		n /= 10
	}
	return n
}

const (
	modelKeys    = 96 // in the first namespace
	modelCleared = 12 // in the second, which is cleared now and then
	modelWorkers = 3
	modelSteps   = 40
	modelPhases  = 3
)

type model struct {
	testing.TB
	conf modelConf
	rand *rand.Rand
	keys [modelKeys + modelCleared]modelKey

	faults   xfertest.Injector
	fs       *vfs.MemFS // of the catalog; nil: the host's
	storm    atomic.Pointer[catalogStorm]
	stormed  atomic.Int64 // how often it struck
	deaf     bool         // nobody tells the medium of flushes, so that a loss of power must show
	volatile *xfertest.Volatile

	life    *span
	s       *tiers.Store
	c       apitest.Caller // the store, or a client of it
	ns      [2]block.Namespace
	watched chan struct{} // closed when the store's watcher has ended

	// crashed: the power is gone, and what the store still answers is void.
	crashed  atomic.Bool
	done     atomic.Int64 // operations of this phase
	told     told
	counts   [modelOps]atomic.Int64
	restarts map[string]int
	misses   map[string]int64
	removed  map[string]int64                      // blocks that left for good, by reason
	gets     [block.MissRecompute + 1]atomic.Int64 // how they ended since the store was opened, by key
	sectors  [2]int                                // kept and lost with the power
}

// modelKey is one key; the worker that owns it puts and deletes it.
type modelKey struct {
	version atomic.Int64 // that is or may be there; lower ones are dead
	durable atomic.Int64 // version that was acknowledged as durable, plus 1
	tried   atomic.Int64 // version whose deletion was begun, plus 1
	until   atomic.Int64 // from this second on a hit is wrong; 0: not known
	acked   bool         // this version was put; the owner's
	pinned  bool         // likewise
	snap    struct {     // when the power went
		version, durable int64
	}
}

// mortal says whether a key is always put with a time to live.
func mortal(i int) bool { return i%8 == 7 }

// sure says whether nothing but the store's own eviction may take a block away.
func (k *modelKey) sure(version int64) bool {
	return k.version.Load() == version && k.tried.Load() != version+1
}

// span is a part of a test that ends before the test does.
type span struct {
	testing.TB
	mu   sync.Mutex
	ends []func()
}

func (s *span) Cleanup(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends = append(s.ends, f)
}

// end cleans up what was made for the span, the last first.
func (s *span) end() {
	for i := len(s.ends) - 1; i >= 0; i-- {
		s.ends[i]()
	}
	s.ends = nil
}

func newModel(t testing.TB, seed uint64, conf modelConf) *model {
	m := &model{TB: t, conf: conf, rand: rand.New(rand.NewPCG(seed, 2)), restarts: map[string]int{}, misses: map[string]int64{}, removed: map[string]int64{}}
	m.conf.place(t)
	if conf.inMemory {
		m.fs = crashableDir(t, m.conf.opts.Dir)
	}
	return m
}

// errorf reports what is wrong, unless the power is gone.
func (m *model) errorf(format string, args ...any) {
	m.Helper()
	if !m.crashed.Load() {
		m.Errorf(format, args...)
	}
}

func (m *model) run() {
	for phase := range modelPhases {
		m.open()
		end := m.conf.ends[phase]
		m.work(end)
		m.restarts[end]++
		switch end {
		case endPower:
			m.afterPowerLoss()
		case endAmid:
			m.amid()
		case endLost:
			m.loseCatalog()
		case endRest:
			if m.rand.IntN(2) == 0 {
				m.drain()
			}
			before := m.rest()
			m.close()
			m.open()
			m.survived(before)
			m.close()
		}
		if m.Failed() {
			break
		}
	}
	m.open()
	wantEmpty(m.TB, m.s)
	if st := m.s.Stats(); st.Pinned+st.PinnedBytes != 0 {
		m.Errorf("nothing is there, and %d blocks of %d bytes are pinned", st.Pinned, st.PinnedBytes)
	}
	m.close()
}

// work lets the workers do what was drawn for them, with the weather that was
// drawn, and takes the power away meanwhile when the phase is to end so.
func (m *model) work(end string) {
	lists := make([][]modelOp, modelWorkers)
	for w := range lists {
		lists[w] = drawOps(m.rand, w)
	}
	gusts := m.conf.drawGusts(m.rand)
	crashAt, crashRand := int64(-1), rand.New(rand.NewPCG(m.rand.Uint64(), 0))
	if end == endPower {
		crashAt = 10 + m.rand.Int64N(modelWorkers*modelSteps-20)
	}
	m.done.Store(0)
	calm, weather := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(weather)
		m.blow(gusts, calm)
	}()
	var wg sync.WaitGroup
	dark := make(chan struct{})
	for w, ops := range lists {
		wg.Go(func() {
			worker := &modelWorker{model: m, id: w}
			for _, op := range ops {
				if m.crashed.Load() {
					return
				}
				m.counts[op.kind].Add(1)
				modelDo[op.kind](worker, rand.New(rand.NewPCG(op.seed, 0)))
				if m.done.Add(1) == crashAt {
					close(dark)
				}
			}
		})
	}
	if end == endPower {
		<-dark
		m.losePower(crashRand)
	}
	wg.Wait()
	close(calm)
	<-weather
}

func (m *model) open() {
	m.life = &span{TB: m.TB}
	o := m.conf.opts
	o.Agent, m.volatile = m.agent()
	o.Catalog = m.catalog()
	m.s = openStore(m.life, o)
	m.c = m.s
	for r := range m.gets {
		m.gets[r].Store(0)
	}
	if m.volatile != nil && !m.deaf {
		tiers.WrapFlush(m.s, func(_ int, path string, flush func() error) error { return m.volatile.Flush(path, flush) })
	}
	if m.conf.grpc {
		m.c = apitest.Remote(m.life, m.s)
	}
	for i, name := range []string{"model", "cleared"} {
		m.ns[i] = space(m.TB, m.s, name, 4<<20)
	}
	m.watch()
}

// watch has a store's events counted, from what is there on: it came in without
// an event that anybody saw.
func (m *model) watch() {
	m.told.begin()
	for i := range m.keys {
		k := &m.keys[i]
		k.acked, k.pinned = false, k.pinned && m.conf.durable() // in memory a pin ends with the store
		for _, l := range placesOf(m.TB, m.s, m.space(i), i) {
			m.told.present(modelCopy{hashOf(i), l.Len, l.Tier})
		}
	}
	ready, watched := make(chan struct{}), make(chan struct{})
	m.watched = watched
	s := m.s
	go func() {
		defer close(watched)
		o := block.WatchOptions{Ready: func(at block.WatchStart) { m.told.from(at.Seq); close(ready) }}
		if err := s.Watch(context.Background(), o, func(ev block.Event) error { m.told.event(m, &ev); return nil }); !errors.Is(err, block.ErrClosed) {
			m.Errorf("watch: %v", err)
		}
	}()
	<-ready
}

func (m *model) close() {
	m.life.end()
	<-m.watched
	st := m.s.Stats()
	if st.Corrupt != 0 && !m.conf.spoils {
		m.Errorf("%d blocks were corrupt", st.Corrupt)
	}
	m.countGets(&st)
	for reason, n := range st.Misses {
		m.misses[reason] += n
	}
	for reason, n := range st.Removed {
		m.removed[reason] += n
	}
}

// summary says what a run did.
func (m *model) summary() string {
	ops := map[string]int64{}
	for kind := range m.counts {
		ops[modelNames[kind]] = m.counts[kind].Load()
	}
	return fmt.Sprintf("%s; ops %v; restarts %v; sectors kept and lost %v; faults %v; misses %v; removed %v",
		m.conf, ops, m.restarts, m.sectors, m.injected(), m.misses, m.removed)
}

// injected is how many faults struck, by kind.
func (m *model) injected() map[string]int {
	faults := map[string]int{}
	for f := xfertest.Fail; f <= xfertest.Down; f++ {
		if n := m.faults.Injected(f); n > 0 {
			faults[f.String()] = int(n)
		}
	}
	if n := m.stormed.Load(); n > 0 {
		faults["catalog"] = int(n)
	}
	return faults
}
