package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/sim"
)

// benchPolicy replays conversations through each policy, in a tier that is full.
func benchPolicy(ctx context.Context, b *bench) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	w, err := conversations(b.policyBlocks)
	if err != nil {
		return err
	}
	idle := clockCost()
	for _, name := range policy.Names() {
		var refs, victims []float64
		for range policyPasses {
			p, err := policy.New(name)
			if err != nil {
				return err
			}
			m := &policyMeter{Policy: p, warm: b.policyBlocks, idle: idle}
			if _, err := sim.Run(ctx, w, m, sim.Options{Capacity: int64(b.policyBlocks)}); err != nil {
				return err
			}
			if m.uses == 0 || m.chosen == 0 {
				return fmt.Errorf("policy %s: nothing was measured in %d requests", name, w.Requests())
			}
			refs = append(refs, float64((m.useTime+m.evictTime).Nanoseconds())/float64(m.uses))
			victims = append(victims, float64(m.evictTime.Nanoseconds())/float64(m.chosen))
		}
		bytes, err := policyState(name, b.policyBlocks)
		if err != nil {
			return err
		}
		pinned, err := policyPinned(name, b.policyBlocks)
		if err != nil {
			return err
		}
		b.rows = append(b.rows,
			benchRow{Name: "policy." + name + ".ref", Value: median(refs), Unit: "ns"},
			benchRow{Name: "policy." + name + ".victim", Value: median(victims), Unit: "ns"},
			benchRow{Name: "policy." + name + ".bytes", Value: bytes, Unit: "bytes"},
			benchRow{Name: "policy." + name + ".pinned", Value: pinned, Unit: "ratio"},
		)
	}
	return nil
}

// policyPasses is how often each policy is measured; the median is printed.
const policyPasses = 3

// conversations makes a workload that fills a tier of so many blocks five times:
// prompts that begin with one of a few heads, and grow by turns until they are
// left alone.
func conversations(blocks int) (*sim.Workload, error) {
	const heads, head, turn, open, longest = 50, 4, 6, 500, 120
	rng := rand.New(rand.NewPCG(8, 8))
	w := sim.NewWorkload()
	fresh := uint64(heads * head)
	var recent [][]uint64
	for w.Unique() < 5*blocks {
		i := rng.IntN(open)
		for len(recent) <= i {
			recent = append(recent, nil)
		}
		path := recent[i]
		if len(path) == 0 || len(path) > longest || rng.IntN(3) == 0 { // another conversation begins
			path = path[:0:0]
			from := rng.Uint64N(heads) * head
			for j := range uint64(head) {
				path = append(path, from+j)
			}
		}
		for range 1 + rng.IntN(2*turn) {
			path = append(path, fresh)
			fresh++
		}
		recent[i] = path
		if err := w.Add(path, false); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// policyMeter times the calls of a policy, many at once since a clock costs more
// than a call: it holds back what has no answer until there is enough of it
// or victims are wanted.
type policyMeter struct {
	policy.Policy
	warm      int           // evictions before it counts
	idle      time.Duration // what reading the clock costs
	calls     []policyCall
	prints    []uint64 // of the requests among calls
	evicting  bool     // calls are those that follow an eviction
	used      int      // blocks used by calls
	evictions int

	useTime, evictTime time.Duration
	uses, chosen       int
}

// policyCall is a call that is held back.
type policyCall struct {
	kind policyCallKind
	leaf bool
	why  block.Reason
	h    block.Handle
	b    policy.Block
	n    int // fingerprints of a request
	hits int
}

type policyCallKind uint8

const (
	callRequest policyCallKind = iota
	callHit
	callInsert
	callLeaf
	callRemove
)

// maxCalls is how many calls are held back: few enough to stay in the cache.
const maxCalls = 256

// Request holds a call back, as the next four do.
func (m *policyMeter) Request(path []uint64, hits int, _ uint8) {
	m.turn(false)
	m.prints = append(m.prints, path...)
	m.hold(policyCall{kind: callRequest, n: len(path), hits: hits})
}

// Hit uses a block.
func (m *policyMeter) Hit(h block.Handle) {
	m.turn(false)
	m.used++
	m.hold(policyCall{kind: callHit, h: h})
}

// Insert uses a block.
func (m *policyMeter) Insert(h block.Handle, b policy.Block) {
	m.turn(false)
	m.used++
	m.hold(policyCall{kind: callInsert, h: h, b: b})
}

// Leaf belongs to what was before it.
func (m *policyMeter) Leaf(h block.Handle, leaf bool) {
	m.hold(policyCall{kind: callLeaf, h: h, leaf: leaf})
}

// Remove belongs to an eviction.
func (m *policyMeter) Remove(h block.Handle, why block.Reason) {
	m.turn(true)
	m.hold(policyCall{kind: callRemove, h: h, why: why})
}

// Victims makes the calls that were held back, and is timed by itself.
func (m *policyMeter) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	m.turn(true)
	begin := threadTime()
	dst = m.Policy.Victims(dst, need, ok)
	took := threadTime() - begin - m.idle
	m.evictions += len(dst)
	if m.evictions > m.warm {
		m.evictTime += took
		m.chosen += len(dst)
	}
	return dst
}

// turn makes the calls that were held back when what follows counts otherwise.
func (m *policyMeter) turn(evicting bool) {
	if m.evicting != evicting {
		m.flush()
	}
	m.evicting = evicting
}

func (m *policyMeter) hold(c policyCall) {
	m.calls = append(m.calls, c)
	if len(m.calls) >= maxCalls {
		m.flush()
	}
}

func (m *policyMeter) flush() {
	prints := m.prints
	begin := threadTime()
	for i := range m.calls {
		switch c := &m.calls[i]; c.kind {
		case callRequest:
			m.Policy.Request(prints[:c.n], c.hits, 0)
			prints = prints[c.n:]
		case callHit:
			m.Policy.Hit(c.h)
		case callInsert:
			m.Policy.Insert(c.h, c.b)
		case callLeaf:
			m.Policy.Leaf(c.h, c.leaf)
		case callRemove:
			m.Policy.Remove(c.h, c.why)
		}
	}
	took := threadTime() - begin - m.idle
	switch {
	case m.evictions <= m.warm:
	case m.evicting:
		m.evictTime += took
	default:
		m.useTime += took
		m.uses += m.used
	}
	m.calls, m.prints, m.used = m.calls[:0], m.prints[:0], 0
}

// threadTime is the processor time of this thread. A policy only computes, and what
// else runs on the machine is not its time.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // every kernel that Go runs on has this clock
	}
	return time.Duration(t.Nano())
}

// clockCost is how much time passes between two readings of the clock.
func clockCost() time.Duration {
	least := time.Hour
	for range 1000 {
		begin := threadTime()
		least = min(least, threadTime()-begin)
	}
	return least
}

// policyState is what a policy keeps of each resident block, in bytes, without
// ghosts: blocks leave as deleted, which are not remembered.
func policyState(name string, blocks int) (float64, error) {
	p, err := policy.New(name)
	if err != nil {
		return 0, err
	}
	before := heapInUse()
	c := newPolicyChurn(p, blocks)
	for range 2 * blocks / churnBatch { // until blocks stand in all places
		c.round(tenthPinned, block.Deleted)
	}
	grown := heapInUse() - before
	bytes := float64(grown) / float64(p.Len())
	runtime.KeepAlive(p)
	return bytes, nil
}

// policyPinned is how many times as long a call for victims takes, at the 99th
// percentile, when a tenth of the blocks are pinned.
func policyPinned(name string, blocks int) (float64, error) {
	var p99 [2]float64
	for i, ok := range []func(block.Handle) bool{func(block.Handle) bool { return true }, tenthPinned} {
		p, err := policy.New(name)
		if err != nil {
			return 0, err
		}
		c := newPolicyChurn(p, blocks)
		var took []time.Duration
		for range max(2*blocks/churnBatch, 1000) {
			took = append(took, c.round(ok, block.Evicted))
		}
		took = took[len(took)/2:] // when pinned blocks have come to the front
		slices.Sort(took)
		p99[i] = float64(max(took[len(took)*99/100], 1))
	}
	return p99[1] / p99[0], nil
}

// tenthPinned allows victims, but a tenth of the blocks.
func tenthPinned(h block.Handle) bool { return h%10 != 0 }

// policyChurn is a tier with paths of churnDepth blocks, of which some are used and
// some leave and come back.
type policyChurn struct {
	p       policy.Policy
	rng     *rand.Rand
	blocks  int
	victims []block.Handle
}

const churnDepth, churnBatch = 16, 64

func newPolicyChurn(p policy.Policy, blocks int) *policyChurn {
	c := &policyChurn{p: p, rng: rand.New(rand.NewPCG(9, 9)), blocks: blocks / churnDepth * churnDepth}
	for h := range block.Handle(c.blocks) {
		c.insert(h + 1)
	}
	return c
}

func (c *policyChurn) insert(h block.Handle) {
	b := policy.Block{Hash: uint64(h), Bytes: 1}
	if h%churnDepth != 0 { // leaf to root
		b.Parent = h + 1
	}
	c.p.Insert(h, b)
}

// round uses as many blocks as then leave, and come back. It returns the processor
// time that it took to choose them.
func (c *policyChurn) round(ok func(block.Handle) bool, why block.Reason) time.Duration {
	for range churnBatch {
		c.p.Hit(block.Handle(1 + c.rng.IntN(c.blocks)))
	}
	begin := threadTime()
	c.victims = c.p.Victims(c.victims[:0], churnBatch, ok)
	took := threadTime() - begin
	for _, h := range c.victims {
		c.p.Remove(h, why)
	}
	for _, h := range slices.Backward(c.victims) {
		c.insert(h)
	}
	return took
}

// heapInUse is the bytes of what is reachable. What pools and finalizers hold goes by the
// second collection, and what these held by a later one, so it collects until less does not
// come.
func heapInUse() int64 {
	var m runtime.MemStats
	least := int64(math.MaxInt64)
	for same := 0; same < 3; same++ {
		runtime.GC()
		runtime.ReadMemStats(&m)
		if now := int64(m.HeapAlloc); now < least {
			least, same = now, 0
		}
	}
	return least
}
