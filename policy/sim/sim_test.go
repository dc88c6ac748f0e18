package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/trace"
)

// The traces there are.
const conversation, airline = "mooncake_conversation_h1.jsonl.gz", "agent_tau_airline.jsonl.gz"

// load loads the first limit requests of a trace, all if 0.
func load(t *testing.T, file string, limit int) *Workload {
	t.Helper()
	return loadFull(t, file, limit, 0)
}

// loadFull takes last blocks as partial that have fewer than full tokens.
func loadFull(t *testing.T, file string, limit, full int) *Workload {
	t.Helper()
	r, err := trace.Open(filepath.Join("..", "trace", "testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	w := NewWorkload()
	for limit == 0 || w.Requests() < limit {
		req, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Add(req.HashIDs, req.InputLength < full*len(req.HashIDs)); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func run(t *testing.T, w *Workload, name string, o Options) Result {
	t.Helper()
	p, err := policy.New(name)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Run(context.Background(), w, p, o)
	if err != nil {
		t.Fatal(err)
	}
	if int64(p.Len()) > r.Capacity {
		t.Errorf("%d blocks are resident at a capacity of %d", p.Len(), r.Capacity)
	}
	return r
}

// oracle returns Belady's prefix and plain hits.
func oracle(t *testing.T, w *Workload, capacity int) (prefixHits, hits int64) {
	t.Helper()
	r, err := Belady(context.Background(), w, Options{Capacity: int64(capacity)})
	if err != nil {
		t.Fatal(err)
	}
	refs := float64(r.BlockRefs)
	return int64(r.PrefixHitRate*refs + 0.5), int64(r.HitRate*refs + 0.5)
}

// TestAnchors compares with published values of another simulator, and the
// policies with what they must reach.
func TestAnchors(t *testing.T) {
	workloads := map[string]*Workload{conversation: load(t, conversation, 0), airline: load(t, airline, 0)}
	for _, c := range []struct {
		file     string
		capacity int64
		share    float64
		lruLeaf  string // prefix hit rate
		belady   string
		bar      float64 // of switch, percent of Belady
	}{
		{conversation, 951, 0.01, "0.0429", "0.1819", 40},
		{conversation, 1903, 0.02, "0.0511", "0.2430", 39},
		{conversation, 4759, 0.05, "0.1037", "0.3223", 45},
		{conversation, 9518, 0.10, "0.1965", "0.3402", 57},
		{conversation, 19037, 0.20, "0.2727", "0.3402", 80},
		{conversation, 47594, 0.50, "0.3359", "0.3402", 98},
		{airline, 297, 0.01, "0.5046", "0.5636", 89},
		{airline, 594, 0.02, "0.5136", "0.6387", 80},
		{airline, 1485, 0.05, "0.6068", "0.7945", 75},
		{airline, 2970, 0.10, "0.8222", "0.9147", 89},
		{airline, 5941, 0.20, "0.9369", "0.9381", 99},
		{airline, 14853, 0.50, "0.9381", "0.9381", 99.9},
	} {
		if testing.Short() && c.share != 0.05 && c.share != 0.2 {
			continue // the others take half a minute with the race detector
		}
		w := workloads[c.file]
		t.Run(fmt.Sprintf("%s/%d", c.file, c.capacity), func(t *testing.T) {
			best, err := Belady(context.Background(), w, Options{Share: c.share})
			if err != nil {
				t.Fatal(err)
			}
			if best.Capacity != c.capacity {
				t.Errorf("%v of the unique blocks is %d, want %d", c.share, best.Capacity, c.capacity)
			}
			if got := fmt.Sprintf("%.4f", best.PrefixHitRate); got != c.belady {
				t.Errorf("Belady's prefix hit rate is %s, want %s", got, c.belady)
			}
			if best.PrefixHitRate != best.HitRate {
				t.Errorf("Belady's prefix hit rate is %v and its plain one %v, want the same", best.PrefixHitRate, best.HitRate)
			}
			var lruLeaf float64
			for _, name := range policy.Names() {
				if c.share != 0.05 && name != "lru-leaf" && name != "switch" {
					continue // one capacity shows whether the optimum is respected
				}
				r := run(t, w, name, Options{Capacity: c.capacity})
				if r.PrefixHitRate > best.PrefixHitRate || r.HitRate > best.HitRate {
					t.Errorf("%s has prefix and plain hit rates of %v and %v, better than the optimum %v", name, r.PrefixHitRate, r.HitRate, best.PrefixHitRate)
				}
				switch name {
				case "lru-leaf":
					if lruLeaf = r.PrefixHitRate; fmt.Sprintf("%.4f", lruLeaf) != c.lruLeaf {
						t.Errorf("prefix hit rate of lru-leaf is %.4f, want %s", lruLeaf, c.lruLeaf)
					}
				case "switch":
					if got := 100 * r.PrefixHitRate / best.PrefixHitRate; got < c.bar {
						t.Errorf("switch has %.2f %% of the optimum, want %v", got, c.bar)
					}
					if r.PrefixHitRate < lruLeaf-0.01 {
						t.Errorf("switch has a prefix hit rate of %.4f, more than a point below lru-leaf with %.4f", r.PrefixHitRate, lruLeaf)
					}
				}
			}
		})
	}
}

// best tries every choice of what to keep after each request, and returns the
// most plain and the most prefix hits that any of them has.
func best(w *Workload, capacity int) (prefixHits, hits int64) {
	type key struct {
		request int
		kept    uint32 // bit set of blocks
	}
	var search func(k key, prefix bool) int64
	memo := map[bool]map[key]int64{true: {}, false: {}}
	search = func(k key, prefix bool) int64 {
		if k.request == w.Requests() {
			return 0
		}
		if n, known := memo[prefix][k]; known {
			return n
		}
		var now int64
		all, unbroken := k.kept, true
		for _, id := range w.path(k.request) {
			found := k.kept>>id&1 == 1
			unbroken = unbroken && found
			if found && (unbroken || !prefix) {
				now++
			}
			all |= 1 << id
		}
		var most int64
		for sub := all; ; sub = (sub - 1) & all {
			if popcount(sub) <= capacity {
				most = max(most, search(key{k.request + 1, sub}, prefix))
			}
			if sub == 0 {
				break
			}
		}
		memo[prefix][k] = now + most
		return now + most
	}
	return search(key{}, true), search(key{}, false)
}

func popcount(v uint32) (n int) {
	for ; v != 0; v &= v - 1 {
		n++
	}
	return n
}

// randomWorkload has paths in a random tree of few blocks.
func randomWorkload(t *testing.T, rng *rand.Rand, blocks, requests int) *Workload {
	t.Helper()
	parent := make([]int, blocks)
	for b := range parent {
		parent[b] = rng.IntN(b+1) - 1 // -1: a root
	}
	w := NewWorkload()
	for range requests {
		var path []uint64
		for b := rng.IntN(blocks); b >= 0; b = parent[b] {
			path = append(path, uint64(b))
		}
		slices.Reverse(path)
		if err := w.Add(path, false); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func TestBeladyIsTheOptimum(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	for i := range 200 {
		w := randomWorkload(t, rng, 7, 8)
		for capacity := 1; capacity <= 4; capacity++ {
			prefix, plain := oracle(t, w, capacity)
			bestPrefix, bestPlain := best(w, capacity)
			if prefix != bestPrefix || plain != bestPlain {
				t.Fatalf("case %d, capacity %d: Belady has %d prefix and %d plain hits, the best choices %d and %d: %v",
					i, capacity, prefix, plain, bestPrefix, bestPlain, w.refs)
			}
		}
	}
}

// slowLRU replays with a list of what is resident, least recently used first.
func slowLRU(w *Workload, capacity int) (prefixHits, hits int64) {
	var order []uint32
	for i := range w.Requests() {
		path := w.path(i)
		found := func(id uint32) bool { return slices.Contains(order, id) }
		prefix := slices.IndexFunc(path, func(id uint32) bool { return !found(id) })
		if prefix < 0 {
			prefix = len(path)
		}
		resident := 0
		for _, id := range path {
			if found(id) {
				resident++
			}
		}
		prefixHits += int64(prefix)
		hits += int64(resident)
		insert := min(len(path)-resident, capacity-resident)
		for len(order)+insert > capacity {
			j := slices.IndexFunc(order, func(id uint32) bool { return !slices.Contains(path, id) })
			order = slices.Delete(order, j, j+1)
		}
		kept := path[:0:0]
		for _, id := range path {
			if !found(id) {
				if insert == 0 {
					break
				}
				insert--
			}
			kept = append(kept, id)
		}
		for _, id := range slices.Backward(kept) {
			order = append(slices.DeleteFunc(order, func(o uint32) bool { return o == id }), id)
		}
	}
	return prefixHits, hits
}

func TestLRULeafByTheBook(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 6))
	for i := range 500 {
		w := randomWorkload(t, rng, 5+rng.IntN(40), 80)
		capacity := 1 + rng.IntN(w.Unique())
		prefix, plain := slowLRU(w, capacity)
		r := run(t, w, "lru-leaf", Options{Capacity: int64(capacity)})
		refs := float64(r.BlockRefs)
		if got := int64(r.PrefixHitRate*refs + 0.5); got != prefix {
			t.Fatalf("case %d: %d prefix hits at %d blocks, want %d", i, got, capacity, prefix)
		}
		if got := int64(r.HitRate*refs + 0.5); got != plain {
			t.Fatalf("case %d: %d hits at %d blocks, want %d", i, got, capacity, plain)
		}
	}
}

func TestBeladyWatermarks(t *testing.T) {
	w := load(t, conversation, 1000)
	marks := Options{Share: 0.1, High: 0.9, Low: 0.5}
	best, err := Belady(context.Background(), w, marks)
	if err != nil {
		t.Fatal(err)
	}
	free, err := Belady(context.Background(), w, Options{Share: 0.1})
	if err != nil {
		t.Fatal(err)
	}
	if best.PrefixHitRate >= free.PrefixHitRate {
		t.Errorf("hit rate %v between watermarks, %v without", best.PrefixHitRate, free.PrefixHitRate)
	}
	if r := run(t, w, "lru-leaf", marks); r.PrefixHitRate >= best.PrefixHitRate {
		t.Errorf("hit rate %v between watermarks, that of lru-leaf is %v", best.PrefixHitRate, r.PrefixHitRate)
	}
}

func TestPoliciesNeverBeatBelady(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for i := range 300 {
		w := randomWorkload(t, rng, 5+rng.IntN(60), 120)
		capacity := 1 + rng.IntN(w.Unique())
		prefix, plain := oracle(t, w, capacity)
		for _, name := range policy.Names() {
			r := run(t, w, name, Options{Capacity: int64(capacity)})
			if got := int64(r.PrefixHitRate*float64(r.BlockRefs) + 0.5); got > prefix {
				t.Errorf("case %d: %s has %d prefix hits at %d blocks, the optimum is %d", i, name, got, capacity, prefix)
			}
			if got := int64(r.HitRate*float64(r.BlockRefs) + 0.5); got > plain {
				t.Errorf("case %d: %s has %d hits at %d blocks, the optimum is %d", i, name, got, capacity, plain)
			}
		}
	}
}

func TestWatermarks(t *testing.T) {
	w := load(t, conversation, 2000)
	plain := run(t, w, "lru-leaf", Options{Share: 0.1})
	full := run(t, w, "lru-leaf", Options{Share: 0.1, High: 1, Low: 1})
	if full.PrefixHitRate != plain.PrefixHitRate || full.Evictions != plain.Evictions {
		t.Errorf("watermarks at the top give %+v, none %+v", full, plain)
	}
	p := policy.NewLRULeaf()
	low, err := Run(context.Background(), w, p, Options{Share: 0.1, High: 0.9, Low: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	if low.PrefixHitRate >= plain.PrefixHitRate {
		t.Errorf("hit rate %v between watermarks of 0.9 and 0.5, %v without", low.PrefixHitRate, plain.PrefixHitRate)
	}
	if most := low.Capacity * 9 / 10; int64(p.Len()) > most {
		t.Errorf("%d blocks are resident after the last request, want at most %d", p.Len(), most)
	}
}

func TestSmallCases(t *testing.T) {
	for _, c := range []struct {
		name                    string
		paths                   [][]uint64
		capacity                int64
		prefix, hits, evictions int64
	}{
		{"all fits", [][]uint64{{1, 2}, {1, 2}, {1, 2, 3}}, 3, 4, 4, 0},
		{"leaf goes first", [][]uint64{{1, 2, 3}, {1, 4}, {1, 2}}, 3, 3, 3, 1},
		{"cut at the leaf end", [][]uint64{{1, 2, 3, 4}, {1, 2, 3, 4}}, 2, 2, 2, 0},
		{"prefix longer than the cache stays", [][]uint64{{1, 2}, {1, 2, 3}, {1, 2, 3}}, 2, 4, 4, 0},
		{"one block", [][]uint64{{1}, {2}, {1}, {1}}, 1, 1, 1, 2},
		{"empty requests", [][]uint64{{}, {1}, {}}, 1, 0, 0, 0},
		{"a block twice in a request", [][]uint64{{1, 2, 1}, {1, 2, 1}, {3, 4}, {5, 6}}, 2, 3, 3, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := NewWorkload()
			for _, path := range c.paths {
				if err := w.Add(path, false); err != nil {
					t.Fatal(err)
				}
			}
			r := run(t, w, "lru-leaf", Options{Capacity: c.capacity})
			refs := float64(len(w.refs))
			if r.PrefixHitRate*refs != float64(c.prefix) || r.HitRate*refs != float64(c.hits) || r.Evictions != c.evictions {
				t.Errorf("prefix hits %v, hits %v, evictions %d; want %d, %d, %d",
					r.PrefixHitRate*refs, r.HitRate*refs, r.Evictions, c.prefix, c.hits, c.evictions)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	w := NewWorkload()
	for id := range uint64(100) {
		if err := w.Add([]uint64{id}, false); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		o    Options
		want string // in the error; empty: none
	}{
		{Options{Capacity: 1}, ""},
		{Options{Share: 1}, ""},
		{Options{Capacity: 10, High: 0.5, Low: 0.5}, ""},
		{Options{}, "capacity 0"},
		{Options{Capacity: -4}, "capacity -4"},
		{Options{Capacity: 1, Share: 0.5}, "exclude"},
		{Options{Share: 1.5}, "share 1.5"},
		{Options{Share: -1}, "share -1"},
		{Options{Share: 0.001}, "less than one block"},
		{Options{Capacity: 10, High: 0.5}, "low 0"},
		{Options{Capacity: 10, Low: 0.5}, "high 0"},
		{Options{Capacity: 10, High: 0.5, Low: 0.6}, "low 0.6"},
		{Options{Capacity: 10, High: 1.5, Low: 0.6}, "high 1.5"},
	} {
		_, err := Run(context.Background(), w, policy.NewLRULeaf(), c.o)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%+v: %v", c.o, err)
		case c.want != "" && (!errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: error %v, want ErrInvalid with %q", c.o, err, c.want)
		}
	}
	for percent := 1; percent <= 100; percent++ {
		if r := run(t, w, "lru-leaf", Options{Share: float64(percent) / 100}); r.Capacity != int64(percent) {
			t.Errorf("%d %% of 100 blocks is %d", percent, r.Capacity)
		}
	}
}

// rogue proposes what it must not.
type rogue struct {
	*policy.LRULeaf
	victim block.Handle
}

func (r rogue) Victims(dst []block.Handle, _ int64, _ func(block.Handle) bool) []block.Handle {
	return append(dst, r.victim)
}

func TestBrokenPolicy(t *testing.T) {
	for _, c := range []struct {
		victim block.Handle
		want   string
	}{{0, "not resident"}, {77, "not resident"}, {1, "children"}, {3, "pinned"}} {
		w := NewWorkload()
		for _, path := range [][]uint64{{1, 2}, {3}, {3, 4}} { // handles 1, 2 and 3
			if err := w.Add(path, false); err != nil {
				t.Fatal(err)
			}
		}
		_, err := Run(context.Background(), w, rogue{policy.NewLRULeaf(), c.victim}, Options{Capacity: 3})
		if !errors.Is(err, ErrPolicy) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("victim %d: error %v, want ErrPolicy with %q", c.victim, err, c.want)
		}
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	w := NewWorkload()
	if err := w.Add([]uint64{1}, false); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(ctx, w, policy.NewLRULeaf(), Options{Capacity: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("Run = %v, want context.Canceled", err)
	}
}
