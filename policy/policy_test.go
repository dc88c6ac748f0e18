package policy_test

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/policytest"
)

func TestContract(t *testing.T) {
	for _, name := range policy.Names() {
		t.Run(name, func(t *testing.T) {
			policytest.Run(t, func() policy.Policy { return newPolicy(t, name) })
		})
	}
}

func newPolicy(t testing.TB, name string) policy.Policy {
	t.Helper()
	p, err := policy.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNew(t *testing.T) {
	for _, name := range policy.Names() {
		if p := newPolicy(t, name); p.Name() != name {
			t.Errorf("New(%q).Name() = %q", name, p.Name())
		}
	}
	_, err := policy.New("mru")
	if !errors.Is(err, block.ErrInvalid) {
		t.Fatalf("New(mru) = %v, want ErrInvalid", err)
	}
	for _, want := range append(policy.Names(), "mru") {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %q", err, want)
		}
	}
}

// twin drives a policy and its slow reference with the same calls. A block's
// handle is its number, its fingerprint a hundred times that.
type twin struct {
	t        *testing.T
	p        policy.Policy
	slow     slowPolicy
	draw     func(n int) int // the next choice out of n
	parent   []block.Handle  // by handle: a lower one
	resident map[block.Handle]bool
	pinned   []block.Handle
	capacity int
}

// pins is how many blocks are pinned at most: so many are asked about again by
// each call of Victims, so that the policy misses none whose pin has ended.
const pins = 8

func newTwin(t *testing.T, name string, draw func(n int) int) *twin {
	tw := &twin{t: t, p: newPolicy(t, name), slow: newSlow(name), draw: draw, resident: make(map[block.Handle]bool)}
	if tw.slow == nil {
		t.Fatalf("policy %s has no reference", name)
	}
	tw.parent = make([]block.Handle, 20+draw(80))
	for h := 2; h < len(tw.parent); h++ {
		tw.parent[h] = block.Handle(draw(h))
	}
	tw.capacity = 8 + draw(len(tw.parent))
	return tw
}

func (tw *twin) ok(h block.Handle) bool { return !slices.Contains(tw.pinned, h) }

func hashOf(h block.Handle) uint64 { return 100 * uint64(h) }

func (tw *twin) block(h block.Handle) policy.Block {
	// Powers of two have no rounding in GDSF.
	return policy.Block{Hash: hashOf(h), Parent: tw.parent[h], Depth: uint32(h), Bytes: 1, Recompute: float32(uint(1) << (h % 3))}
}

// path returns a block and all blocks above it, leaf first, of which the first n
// from the root at most.
func (tw *twin) path(h block.Handle, n int) []block.Handle {
	var path []block.Handle
	for ; h != 0; h = tw.parent[h] {
		path = append(path, h)
	}
	return path[max(0, len(path)-n):]
}

// request does what a tier does.
func (tw *twin) request(h block.Handle) {
	path := tw.path(h, pins)
	prints := make([]uint64, 0, len(path))
	misses := 0
	for _, h := range slices.Backward(path) {
		prints = append(prints, hashOf(h))
		if !tw.resident[h] {
			misses++
		}
	}
	tw.p.Request(prints, 0, 0)
	tw.slow.request(prints)
	tw.pinned = path
	tw.evict(len(tw.resident)+misses-tw.capacity, 0)
	for _, h := range path {
		tw.use(h)
	}
	tw.pinned = nil
}

func (tw *twin) use(h block.Handle) {
	if tw.resident[h] {
		tw.p.Hit(h)
		tw.slow.hit(h)
		return
	}
	tw.resident[h] = true
	tw.p.Insert(h, tw.block(h))
	tw.slow.insert(h, tw.block(h))
}

func (tw *twin) remove(h block.Handle, why block.Reason) {
	delete(tw.resident, h)
	tw.p.Remove(h, why)
	tw.slow.remove(h, why)
}

// evict compares the victims, and removes them but for one in refuse, which the
// store keeps.
func (tw *twin) evict(need, refuse int) {
	tw.t.Helper()
	got := tw.p.Victims(nil, int64(need), tw.ok)
	want := tw.slow.victims(need, tw.ok)
	if !slices.Equal(got, want) {
		tw.t.Fatalf("%s: Victims(%d) with %v pinned = %v, want %v", tw.p.Name(), need, tw.pinned, got, want)
	}
	for _, h := range got {
		if refuse == 0 || tw.draw(refuse) > 0 {
			tw.remove(h, block.Evicted)
		}
	}
	if tw.p.Len() != len(tw.resident) {
		tw.t.Fatalf("%s: Len = %d, want %d", tw.p.Name(), tw.p.Len(), len(tw.resident))
	}
}

func (tw *twin) step() {
	h := block.Handle(1 + tw.draw(len(tw.parent)-1))
	switch k := tw.draw(20); {
	case k < 12:
		tw.request(h)
	case k < 14:
		tw.use(h) // without the blocks above it, and without a request
	case k < 15 && tw.resident[h]:
		tw.remove(h, block.Deleted)
	case k < 16 && tw.resident[h]:
		tw.remove(h, block.Evicted) // others chose it
	case k < 18:
		tw.pinned = tw.path(h, pins)
		tw.evict(tw.draw(8), 3)
		tw.pinned = nil
	default:
		tw.evict(tw.draw(8), 3)
	}
}

// TestReference uses blocks without their parents and parents without their
// children, so that parents move in anywhere.
func TestReference(t *testing.T) {
	for _, name := range policy.Names() {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(40) {
				rng := rand.New(rand.NewPCG(seed, 2))
				tw := newTwin(t, name, rng.IntN)
				for range 400 {
					tw.step()
				}
			}
		})
	}
}

// FuzzReference lets the fuzzer choose the calls.
func FuzzReference(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range policy.Names() {
		seed := make([]byte, 0, 512)
		for len(seed) < 512 {
			seed = binary.LittleEndian.AppendUint64(seed, rng.Uint64())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		draw := func(n int) int {
			if len(data) == 0 {
				return 0
			}
			c := int(data[0])
			data = data[1:]
			return c % n
		}
		names := policy.Names()
		tw := newTwin(t, names[draw(len(names))], draw)
		for steps := 0; len(data) > 0 && steps < 2000; steps++ {
			tw.step()
		}
	})
}
