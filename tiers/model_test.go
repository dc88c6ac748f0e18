package tiers_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

var (
	modelSeeds = flag.Int("model.seeds", 14, "how many seeds TestModel runs")
	modelSeed  = flag.Uint64("model.seed", 0, "run TestModel with this seed only")
)

// TestModel does random things to a store from several goroutines and compares
// it with a model of a store that may lose blocks, but not in silence:
//
//   - a hit has the bytes of the version that was put last, and a version that
//     was deleted never comes back, also not after a restart;
//   - a leased block is a hit;
//   - where a block is, is what the events say: in each tier it came in as often
//     as it left, or once more when it is there;
//   - what was in G3 when the store was closed at rest is there when it is opened
//     again, and nothing else is;
//   - in the end all counters are zero.
//
// The length of a block says its version, so that events and reads can be told
// apart. Some seeds have a device that fails now and then.
func TestModel(t *testing.T) {
	first, n := uint64(1), uint64(*modelSeeds)
	if *modelSeed != 0 {
		first, n = *modelSeed, 1
	}
	for seed := first; seed < first+n; seed++ {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			newModel(t, seed).run()
		})
	}
}

const (
	modelKeys    = 240
	modelWorkers = 4
	modelSteps   = 120
	modelPhases  = 3
)

type model struct {
	*testing.T
	rand  *rand.Rand
	fault xfertest.Fault // of the device; 0: none
	opts  tiers.Options
	s     *tiers.Store
	ns    block.Namespace
	keys  [modelKeys]modelKey

	watched chan struct{} // closed when the store's watcher has ended

	mu struct {
		sync.Mutex
		there map[modelCopy]int // by what the events say
		seq   uint64
		lost  bool
	}
}

// modelKey is one key; the worker that owns it puts and deletes it.
type modelKey struct {
	version atomic.Int64 // that is or may be there; lower ones are dead
	put     bool         // this version was put at least once
}

// modelCopy is one version of a key in one tier.
type modelCopy struct {
	hash block.Hash
	len  uint32
	tier block.TierID
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{T: t, rand: rand.New(rand.NewPCG(seed, 1))}
	m.mu.there = map[modelCopy]int{}
	dir := t.TempDir()
	m.opts = tiers.Options{
		Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t),
		Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "s0"), Bytes: 32 << 20}, {Path: filepath.Join(dir, "s1"), Bytes: 32 << 20}},
	}
	if seed%2 == 0 {
		m.opts.DRAM = 32 << 20
		m.opts.Slabs = m.opts.Slabs[:1]
	}
	rules := map[uint64]xfertest.Rule{
		3: {Fault: xfertest.Fail, Chance: 0.05, Seed: seed},
		4: {Fault: xfertest.Short, Chance: 0.05, Seed: seed},
		5: {Fault: xfertest.Corrupt, Chance: 0.02, Seed: seed, Ops: []xfer.Op{xfer.Read}},
		6: {Fault: xfertest.Corrupt, Chance: 0.02, Seed: seed, Ops: []xfer.Op{xfer.Write}},
	}
	if r, ok := rules[seed%7]; ok {
		m.fault = r.Fault
		m.opts.Agent = failing(t, r)
	}
	return m
}

func (m *model) len(i int, version int64) int {
	return []int{700, 5000, 70_000, 300_000, 1 << 20}[i%5] + int(version)
}

func (m *model) data(i int, version int64) []byte {
	return payload(i<<8|int(version), m.len(i, version))
}

func (m *model) run() {
	for phase := range modelPhases {
		m.open(phase == 0)
		var wg sync.WaitGroup
		for w := range modelWorkers {
			r := rand.New(rand.NewPCG(m.rand.Uint64(), uint64(w)))
			wg.Go(func() {
				for range modelSteps {
					m.step(w, r)
				}
			})
		}
		wg.Wait()
		switch {
		case phase == modelPhases-1:
			m.rest()
			wantEmpty(m.T, m.s)
			m.close()
		case m.rand.IntN(3) == 0: // in the middle of its own work
			m.close()
			m.open(false)
			m.look()
			m.close()
		default:
			if m.rand.IntN(2) == 0 {
				m.drain()
			}
			before := m.rest()
			m.close()
			m.open(false)
			m.survived(before)
			m.close()
		}
	}
	if st := m.s.Stats(); st.Corrupt != 0 && m.fault != xfertest.Corrupt {
		m.Errorf("%d blocks were corrupt", st.Corrupt)
	}
}

func (m *model) open(first bool) {
	m.s = openStore(m.T, m.opts)
	if first {
		m.ns = space(m.T, m.s, "model", 2<<20)
	}
	// What is there from before came in without an event that anybody saw.
	m.mu.there, m.mu.seq = map[modelCopy]int{}, 0
	for i := range m.keys {
		for _, l := range placesOf(m.T, m.s, m.ns, i) {
			m.mu.there[modelCopy{hashOf(i), l.Len, l.Tier}]++
		}
	}
	ready, watched := make(chan struct{}), make(chan struct{})
	m.watched = watched
	s := m.s
	watch := func(ev block.Event) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.mu.seq = ev.Seq
		k := modelCopy{ev.Hash, ev.Len, ev.Tier}
		switch ev.Kind {
		case block.EventStored:
			m.mu.there[k]++
		case block.EventRemoved:
			m.mu.there[k]--
		case block.EventLost:
			m.mu.lost = true
		}
		return nil
	}
	go func() {
		defer close(watched)
		if err := s.Watch(context.Background(), m.ns.ID, func() { close(ready) }, watch); !errors.Is(err, block.ErrClosed) {
			m.Errorf("watch: %v", err)
		}
	}()
	<-ready
}

func (m *model) close() {
	if err := m.s.Close(); err != nil {
		m.Fatal(err)
	}
	<-m.watched
}

// step does one thing. Worker w owns the keys that are w modulo the workers.
func (m *model) step(w int, r *rand.Rand) {
	mine := r.IntN(modelKeys/modelWorkers)*modelWorkers + w
	switch p := r.IntN(100); {
	case p < 40:
		m.put(mine, r)
	case p < 48:
		m.delete(mine)
	case p < 75:
		m.get(r)
	case p < 85:
		m.lease(mine, r)
	case p < 90:
		m.prefetch(r)
	case p < 95:
		m.conflict(mine)
	default:
		id, _, err := m.s.Reserve(m.Context(), m.ns.ID, hashLen, hashOf(modelKeys+mine), 40_000, block.PutOptions{Session: uint64(w + 1)})
		if err == nil && r.IntN(2) == 0 {
			m.s.Abort([]uint64{id.ID})
		}
		m.s.EndSession(uint64(w + 1))
	}
}

func (m *model) put(i int, r *rand.Rand) {
	o := block.PutOptions{Durable: block.TierID(2 + r.IntN(2))}
	if r.IntN(3) > 0 && i > 0 {
		o.Parent, o.HasParent = hashOf(r.IntN(i)), true
	}
	k := &m.keys[i]
	k.put = true
	err := put(m.s, m.ns, i, m.data(i, k.version.Load()), o)
	switch {
	case err == nil, errors.Is(err, block.ErrNoSpace):
	case m.fault != 0 && (errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrNotFound)):
	default:
		m.Errorf("put %d: %v", i, err)
	}
}

func (m *model) delete(i int) {
	if _, err := m.s.Delete(m.Context(), m.ns.ID, hashLen, pack(hashOf(i))); err != nil {
		m.Errorf("delete %d: %v", i, err)
	}
	m.keys[i].version.Add(1)
	m.keys[i].put = false
}

// get reads some keys of anybody's.
func (m *model) get(r *rand.Rand) {
	var is []int
	var oldest []int64
	var want []block.Wanted
	for range 1 + r.IntN(4) {
		i := r.IntN(modelKeys)
		is, oldest = append(is, i), append(oldest, m.keys[i].version.Load())
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	o := block.GetOptions{NoPromote: r.IntN(3) == 0, Verify: r.IntN(2) == 0}
	err := m.s.Get(m.Context(), m.ns.ID, hashLen, want, o, func(j int, p block.Payload) error {
		m.check(is[j], oldest[j], p)
		return nil
	})
	if err != nil {
		m.Errorf("get: %v", err)
	}
}

// check compares what was read of key i with its version, which was oldest or
// later when the read began.
func (m *model) check(i int, oldest int64, p block.Payload) {
	switch {
	case p.Reason == block.Hit:
		version := int64(len(p.Bytes) - m.len(i, 0))
		if newest := m.keys[i].version.Load(); version < oldest || version > newest {
			m.Errorf("key %d: version %d, want %d to %d: what was deleted has come back", i, version, oldest, newest)
		} else if !bytes.Equal(p.Bytes, m.data(i, version)) {
			m.Errorf("key %d: wrong bytes of version %d from %v", i, version, p.Tier)
		}
	case p.Reason == block.MissAbsent, p.Reason == block.MissPending, p.Reason == block.MissNoRoom:
	case p.Reason == block.MissUnavailable && m.fault != 0:
	case p.Reason == block.MissCorrupt && m.fault == xfertest.Corrupt:
	default:
		m.Errorf("key %d: %v", i, p.Reason)
	}
}

// lease leases a key and reads it, which nobody else deletes meanwhile.
func (m *model) lease(i int, r *rand.Rand) {
	var res block.MatchResult
	err := m.s.Match(m.Context(), m.ns.ID, hashLen, pack(hashOf(i)), block.MatchOptions{Lease: time.Minute, Session: 100}, &res)
	if err != nil {
		m.Errorf("match %d: %v", i, err)
	}
	if res.Lease.ID == 0 {
		return
	}
	for range 3 {
		m.get(r)
		_, p, err := get(m.s, m.ns, i, block.GetOptions{})
		if m.fault == 0 && (err != nil || p.Reason != block.Hit) {
			m.Errorf("get of leased key %d: %v, %v", i, p.Reason, err)
		}
	}
	if r.IntN(4) == 0 {
		m.delete(i)
	}
	if err := m.s.ReleaseLease(res.Lease.ID); err != nil {
		m.Errorf("release of key %d: %v", i, err)
	}
}

func (m *model) prefetch(r *rand.Rand) {
	var hs []byte
	for range 5 {
		hs = append(hs, pack(hashOf(r.IntN(modelKeys)))...)
	}
	n := 0
	err := m.s.Prefetch(m.Context(), m.ns.ID, hashLen, hs, "", func(p block.Progress) error {
		if p.Index != n {
			return fmt.Errorf("progress of %d, want %d", p.Index, n)
		}
		n++
		return nil
	})
	if err != nil || n != 5 {
		m.Errorf("prefetch: %d of 5, %v", n, err)
	}
}

func (m *model) conflict(i int) {
	err := m.s.CompareExisting(m.Context(), m.ns.ID, hashOf(i), 1234, block.Sum{}, block.PutOptions{})
	if !errors.Is(err, block.ErrConflict) && !errors.Is(err, block.ErrNoSpace) {
		m.Errorf("put of other bytes as %d: %v", i, err)
	}
}

func (m *model) drain() {
	res, err := m.s.Drain(m.Context(), nil)
	if err != nil && m.fault == 0 {
		m.Errorf("drain: %v", err)
	}
	if err == nil && res.Left == 0 {
		for i := range m.keys {
			if where := tiersOf(m.T, m.s, m.ns, i); where == "g2" {
				m.Errorf("key %d is only in G2 after a drain that left nothing", i)
			}
		}
	}
}

// rest waits until the store does nothing more, and holds what the events said
// against where the blocks are, which it returns.
func (m *model) rest() (there map[modelCopy]bool) {
	last, since := int64(-1), time.Now()
	eventually(m.T, "the store is at rest", func() bool {
		work, seq := tiers.Activity(m.s)
		m.mu.Lock()
		told := m.mu.seq == seq
		m.mu.Unlock()
		if work != last || !told {
			last, since = work, time.Now()
		}
		return time.Since(since) > 250*time.Millisecond // the evictor looks by itself more often
	})
	there = map[modelCopy]bool{}
	for i := range m.keys {
		for _, l := range placesOf(m.T, m.s, m.ns, i) {
			there[modelCopy{hashOf(i), l.Len, l.Tier}] = true
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.lost {
		m.Log("events were lost")
		return there
	}
	for c, n := range m.mu.there {
		if n != 0 && n != 1 || n == 1 != there[c] {
			m.Errorf("%s of %d bytes in %v: events count it %d times, there: %v", c.hash.Hex(hashLen), c.len, c.tier, n, there[c])
		}
	}
	for c := range there {
		if m.mu.there[c] != 1 {
			m.Errorf("%s of %d bytes in %v is there, and events do not say so", c.hash.Hex(hashLen), c.len, c.tier)
		}
	}
	m.count(there)
	return there
}

// count compares the counters with what is there.
func (m *model) count(there map[modelCopy]bool) {
	blocks, slots, payload := map[block.TierID]int64{}, map[block.TierID]int64{}, map[block.TierID]int64{}
	for c := range there {
		size, _ := tiers.SlotBytes(int64(c.len))
		blocks[c.tier]++
		payload[c.tier] += int64(c.len)
		slots[c.tier] += size
	}
	for _, tr := range m.s.Stats().Tiers {
		// A slot may be of a larger class than its block needs.
		if tr.Blocks != blocks[tr.Tier] || tr.Payload != payload[tr.Tier] || tr.Used < slots[tr.Tier] || blocks[tr.Tier] == 0 && tr.Used != 0 {
			m.Errorf("%v counts %d blocks, %d bytes, %d in slots; there are %d, %d, %d", tr.Tier, tr.Blocks, tr.Payload, tr.Used,
				blocks[tr.Tier], payload[tr.Tier], slots[tr.Tier])
		}
	}
}

// look reads everything.
func (m *model) look() {
	for i := range m.keys {
		data, p, err := get(m.s, m.ns, i, block.GetOptions{NoPromote: true})
		if err != nil {
			m.Errorf("get %d: %v", i, err)
		}
		p.Bytes = data
		m.check(i, m.keys[i].version.Load(), p)
	}
}

// survived compares what a store opened with to what it had in G3 before.
func (m *model) survived(before map[modelCopy]bool) {
	m.mu.Lock()
	for c := range before {
		if c.tier == block.G3 && m.mu.there[c] != 1 {
			m.Errorf("%s of %d bytes was in G3 and is not any more", c.hash.Hex(hashLen), c.len)
		}
	}
	for c := range m.mu.there {
		if !before[c] {
			m.Errorf("%s of %d bytes was not in G3 and is now", c.hash.Hex(hashLen), c.len)
		}
	}
	m.mu.Unlock()
	m.look()
}
