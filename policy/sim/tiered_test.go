package sim

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

func runTiers(t *testing.T, w *Workload, name string, o TierOptions) TierResult {
	t.Helper()
	dram, err := policy.New(name)
	if err != nil {
		t.Fatal(err)
	}
	ssd, err := policy.New(name)
	if err != nil {
		t.Fatal(err)
	}
	r, err := RunTiers(context.Background(), w, dram, ssd, o)
	if err != nil {
		t.Fatal(err)
	}
	if int64(dram.Len()) > r.Capacities[0] || int64(ssd.Len()) > r.Capacities[1] {
		t.Errorf("%d and %d blocks are resident at capacities of %v", dram.Len(), ssd.Len(), r.Capacities)
	}
	return r
}

// TestTierAnchors compares lru-leaf with published values of another simulator, and
// switch with what two tiers must reach: DRAM for 5 % of the unique blocks, SSD for 30.
func TestTierAnchors(t *testing.T) {
	type key struct {
		file string
		tail int
	}
	workloads := map[key]*Workload{}
	for _, c := range []struct {
		file   string
		tail   int // tokens of a full block; 0: all are full
		budget float64
		policy string

		rate, rateOff     float64 // prefix hit rate, and how far off it may be
		writes, writesOff float64 // to SSD, for each prefix hit on it
		least             float64 // prefix hit rate
		most              float64 // writes to SSD for each prefix hit on both
	}{
		{file: conversation, policy: "lru-leaf", rate: 0.317, rateOff: 0.001, writes: 3.08, writesOff: 0.02},
		{file: conversation, policy: "lru-leaf", tail: 512, rate: 0.320, rateOff: 0.0015, writes: 2.86, writesOff: 0.02},
		{file: airline, policy: "lru-leaf", rate: 0.938, rateOff: 0.0005, writes: 0.18, writesOff: 0.006},
		{file: conversation, policy: "switch", least: 0.31, most: 2.25},
		{file: conversation, policy: "switch", tail: 512, least: 0.31, most: 2.25},
		{file: airline, policy: "switch", least: 0.93, most: 0.08},
		{file: conversation, policy: "switch", budget: 0.2, least: 0.185, most: 0.2 / 0.185},
		{file: conversation, policy: "switch", tail: 512, budget: 0.2, least: 0.185, most: 0.2 / 0.185},
	} {
		if testing.Short() && c.file == airline {
			continue // with the race detector it takes long
		}
		w := workloads[key{c.file, c.tail}]
		if w == nil {
			w = loadFull(t, c.file, 0, c.tail)
			workloads[key{c.file, c.tail}] = w
		}
		r := runTiers(t, w, c.policy, TierOptions{DRAM: Options{Share: 0.05}, SSD: Options{Share: 0.3}, WriteBudget: c.budget})
		writes := float64(r.SSDWrites) / float64(r.PrefixHits[1])
		if c.rate != 0 && (math.Abs(r.PrefixHitRate-c.rate) > c.rateOff || math.Abs(writes-c.writes) > c.writesOff) {
			t.Errorf("%s of %d tokens, %s: prefix hit rate %.4f, %.3f writes for each hit on SSD; want %v and %v", c.file, c.tail, c.policy, r.PrefixHitRate, writes, c.rate, c.writes)
		}
		writes = float64(r.SSDWrites) / float64(r.PrefixHits[0]+r.PrefixHits[1])
		if c.least != 0 && (r.PrefixHitRate < c.least || writes > c.most) {
			t.Errorf("%s of %d tokens, %s, budget %v: prefix hit rate %.4f, %.3f writes for each hit; want %v and %v", c.file, c.tail, c.policy, c.budget, r.PrefixHitRate, writes, c.least, c.most)
		}
		if c.budget != 0 && float64(r.SSDWrites) > c.budget*float64(r.BlockRefs) {
			t.Errorf("%s: %d writes in %d block references, more than %v for each", c.file, r.SSDWrites, r.BlockRefs, c.budget)
		}
	}
}

// slowTiers replays through two lists of what is resident, least recently used first.
type slowTiers struct {
	order    [2][]uint32
	capacity [2]int
	parent   map[uint32]uint32
	path     []uint32 // of the request under way
	coming   int      // blocks that come into the lower tier

	hits   [2]int64
	writes int64
}

func (s *slowTiers) has(tier int, id uint32) bool { return slices.Contains(s.order[tier], id) }

// kids reports whether a block has a child in a tier.
func (s *slowTiers) kids(tier int, id uint32) bool {
	return slices.ContainsFunc(s.order[tier], func(o uint32) bool {
		p, some := s.parent[o]
		return some && p == id
	})
}

func (s *slowTiers) drop(tier, i int) { s.order[tier] = slices.Delete(s.order[tier], i, i+1) }

// use makes a block the latest of a tier.
func (s *slowTiers) use(tier int, id uint32) {
	s.order[tier] = append(slices.DeleteFunc(s.order[tier], func(o uint32) bool { return o == id }), id)
}

// room makes room for one block below.
func (s *slowTiers) room() bool {
	if len(s.order[1])+s.coming < s.capacity[1] {
		return true
	}
	i := slices.IndexFunc(s.order[1], func(id uint32) bool {
		return !slices.Contains(s.path, id) && !s.kids(1, id) && (s.has(0, id) || !s.kids(0, id))
	})
	if i >= 0 {
		s.drop(1, i)
	}
	return i >= 0
}

// down takes the least recently used block that may out of the upper tier.
func (s *slowTiers) down() bool {
	for i, id := range s.order[0] {
		if slices.Contains(s.path, id) || s.kids(0, id) {
			continue
		}
		if !s.has(1, id) {
			if s.room() {
				s.order[1] = append(s.order[1], id)
				s.writes++
			} else if s.kids(1, id) {
				continue
			}
		}
		s.drop(0, i)
		return true
	}
	return false
}

func (s *slowTiers) request(path []uint32) {
	s.path = path
	resident := 0
	unbroken := true
	for _, id := range path {
		if s.has(0, id) {
			resident++
		}
		switch {
		case !unbroken:
		case s.has(0, id):
			s.hits[0]++
		case s.has(1, id):
			s.hits[1]++
		default:
			unbroken = false
		}
	}
	insert := min(len(path)-resident, s.capacity[0]-resident)
	for len(s.order[0])+insert > s.capacity[0] && s.down() {
	}
	insert = min(insert, s.capacity[0]-len(s.order[0]))
	var come [2][]uint32
	for i, id := range path {
		switch {
		case s.has(0, id):
			come[0] = append(come[0], id)
		case insert > 0:
			insert--
			come[0] = append(come[0], id)
		case s.has(1, id):
		case s.room():
			s.writes++
			s.coming++
			come[1] = append(come[1], id)
			continue
		default:
			path = path[:i]
		}
		if i == len(path) {
			break
		}
		if s.has(1, id) {
			come[1] = append(come[1], id)
		}
	}
	s.coming = 0
	for tier, ids := range come {
		for _, id := range slices.Backward(ids) {
			s.use(tier, id)
		}
	}
}

func TestTiersByTheBook(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range 400 {
		w := randomWorkload(t, rng, 5+rng.IntN(30), 60)
		s := &slowTiers{parent: map[uint32]uint32{}}
		s.capacity = [2]int{1 + rng.IntN(8), 1 + rng.IntN(12)}
		for i := range w.Requests() {
			path := w.path(i)
			for j := 1; j < len(path); j++ {
				s.parent[path[j]] = path[j-1]
			}
			s.request(path)
		}
		r := runTiers(t, w, "lru-leaf", TierOptions{DRAM: Options{Capacity: int64(s.capacity[0])}, SSD: Options{Capacity: int64(s.capacity[1])}})
		if r.PrefixHits != s.hits || r.SSDWrites != s.writes {
			t.Fatalf("case %d, %v blocks: hits %v, %d writes; want %v and %d", i, s.capacity, r.PrefixHits, r.SSDWrites, s.hits, s.writes)
		}
	}
}

func TestTiersNeverBeatBelady(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	for i := range 200 {
		w := randomWorkload(t, rng, 5+rng.IntN(60), 120)
		capacity := [2]int64{1 + rng.Int64N(10), 1 + rng.Int64N(20)}
		prefix, plain := oracle(t, w, int(capacity[0]+capacity[1]))
		for _, name := range policy.Names() {
			o := TierOptions{DRAM: Options{Capacity: capacity[0]}, SSD: Options{Capacity: capacity[1]}}
			if i%2 == 1 {
				o.WriteBudget = 0.3
			}
			if i%4 > 1 {
				o.DRAM.High, o.DRAM.Low, o.SSD.High, o.SSD.Low = 1, 0.8, 1, 0.8
			}
			r := runTiers(t, w, name, o)
			if got := r.PrefixHits[0] + r.PrefixHits[1]; got > prefix {
				t.Errorf("case %d: %s has %d prefix hits in %v blocks, the optimum is %d", i, name, got, capacity, prefix)
			}
			if got := int64(r.HitRate*float64(r.BlockRefs) + 0.5); got > plain {
				t.Errorf("case %d: %s has %d hits in %v blocks, the optimum is %d", i, name, got, capacity, plain)
			}
		}
	}
}

func TestTierWatermarks(t *testing.T) {
	w := load(t, conversation, 2000)
	marks := Options{Share: 0.1, High: 0.9, Low: 0.5}
	dram, ssd := policy.NewLRULeaf(), policy.NewLRULeaf()
	r, err := RunTiers(context.Background(), w, dram, ssd, TierOptions{DRAM: marks, SSD: marks})
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range []policy.Policy{dram, ssd} {
		if most := r.Capacities[i] * 9 / 10; int64(p.Len()) > most {
			t.Errorf("%d blocks are in tier %d after the last request, want at most %d", p.Len(), i, most)
		}
	}
	free := runTiers(t, w, "lru-leaf", TierOptions{DRAM: Options{Share: 0.1}, SSD: Options{Share: 0.1}})
	if r.PrefixHitRate >= free.PrefixHitRate {
		t.Errorf("hit rate %v between watermarks, %v without", r.PrefixHitRate, free.PrefixHitRate)
	}
}

func TestTierOptions(t *testing.T) {
	w := NewWorkload()
	for id := range uint64(100) {
		if err := w.Add([]uint64{id}, false); err != nil {
			t.Fatal(err)
		}
	}
	one := Options{Capacity: 1}
	for _, c := range []struct {
		o    TierOptions
		want string // in the error
	}{
		{TierOptions{SSD: one}, "DRAM"},
		{TierOptions{DRAM: one}, "SSD"},
		{TierOptions{DRAM: one, SSD: Options{Share: 2}}, "SSD"},
		{TierOptions{DRAM: one, SSD: one, WriteBudget: -1}, "write budget -1"},
	} {
		_, err := RunTiers(context.Background(), w, policy.NewLRULeaf(), policy.NewLRULeaf(), c.o)
		if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want ErrInvalid with %q", c.o, err, c.want)
		}
	}
}
