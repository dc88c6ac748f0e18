package policy

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

func TestPrints(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 6))
	var s prints[int]
	want := make(map[uint64]block.Handle)
	for step := range 20000 {
		hash := rng.Uint64N(3000)
		if step%2 == 0 {
			hash <<= 52 // fingerprints that differ in the highest bits only
		}
		h, known := want[hash]
		if got := s.find(hash); got != h {
			t.Fatalf("step %d: find(%#x) = %d, want %d", step, hash, got, h)
		}
		switch {
		case !known:
			h = s.add(hash)
			for _, other := range want {
				if other == h {
					t.Fatalf("step %d: handle %d is given twice", step, h)
				}
			}
			want[hash] = h
		case rng.IntN(2) == 0:
			s.remove(h)
			delete(want, hash)
		}
		if s.count != len(want) {
			t.Fatalf("step %d: %d fingerprints, want %d", step, s.count, len(want))
		}
		if h != 0 && want[hash] == h && s.hash(h) != hash {
			t.Fatalf("step %d: hash(%d) = %#x, want %#x", step, h, s.hash(h), hash)
		}
	}
	if int(s.last) > 6000 {
		t.Errorf("handles up to %d for at most 6000 fingerprints at a time", s.last)
	}
}

func TestGhosts(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	var g ghosts
	var want []uint64 // oldest first
	for step := range 5000 {
		hash := rng.Uint64N(50)
		i := slices.Index(want, hash)
		switch rng.IntN(4) {
		case 0, 1:
			if i < 0 {
				g.add(hash)
				want = append(want, hash)
			}
		case 2:
			if g.take(hash) != (i >= 0) {
				t.Fatalf("step %d: take(%d) = %v", step, hash, i < 0)
			}
			if i >= 0 {
				want = slices.Delete(want, i, i+1)
			}
		default:
			n := rng.IntN(60) - 5
			g.trim(n)
			want = want[max(0, len(want)-max(n, 0)):]
		}
		if g.len() != len(want) {
			t.Fatalf("step %d: %d ghosts, want %d", step, g.len(), len(want))
		}
	}
}

// TestGhostBytes holds a ghost to its 24 bytes.
func TestGhostBytes(t *testing.T) {
	before := heapBytes()
	g := new(ghosts)
	for i := range 1 << 18 {
		g.add(uint64(i) * 0x9e3779b97f4a7c15)
	}
	if each := float64(heapBytes()-before) / float64(g.len()); each > 24 {
		t.Errorf("%d ghosts take %.2f bytes each, want at most 24", g.len(), each)
	}
	runtime.KeepAlive(g)
}

func heapBytes() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestExtent(t *testing.T) {
	var e extent
	for n := 1; n <= 1000; n++ {
		e.insert(n)
	}
	if e.blocks != 1000 {
		t.Fatalf("extent %d after 1000 insertions, want 1000", e.blocks)
	}
	for range 10 { // a batch of victims, then as many insertions
		for n := 901; n <= 1000; n++ {
			if e.insert(n); e.blocks < 900 {
				t.Fatalf("extent %d in a batch of 100, want nearly 1000", e.blocks)
			}
		}
		if e.blocks != 1000 {
			t.Fatalf("extent %d when the tier is full, want 1000", e.blocks)
		}
	}
	for range 20 * extentFall { // the tier has become smaller
		e.insert(500)
	}
	if e.blocks != 500 {
		t.Errorf("extent %d, want 500", e.blocks)
	}
}

// TestGhostsAreOfEvictedBlocks: what was deleted is not wanted back.
func TestGhostsAreOfEvictedBlocks(t *testing.T) {
	for why, want := range map[block.Reason]int{block.Evicted: 1, block.Moved: 1, block.Deleted: 0, block.Expired: 0, block.Damaged: 0, block.Discarded: 0} {
		s3, arc := NewS3Ghost(), NewARC()
		for _, p := range []Policy{s3, arc} {
			p.Insert(2, Block{Hash: 2, Bytes: 1})
			p.Insert(1, Block{Hash: 1, Bytes: 1})
			p.Insert(3, Block{Hash: 3, Bytes: 1})
			p.Hit(3)
			p.Remove(1, why)
		}
		if got := s3.ghosts.len(); got != want {
			t.Errorf("s3-ghost has %d ghosts of a block that is %v, want %d", got, why, want)
		}
		if got := arc.gone[arcOnce].len(); got != want {
			t.Errorf("arc has %d ghosts of a block that is %v, want %d", got, why, want)
		}
	}
}

// TestShadowsAreBounded: shadows stay near the tier's size when nobody tells of
// requests and when nobody asks for victims.
func TestShadowsAreBounded(t *testing.T) {
	for name, tell := range map[string]bool{"requests": true, "none": false} {
		t.Run(name, func(t *testing.T) {
			p := NewSwitch()
			for i := range uint64(20000) {
				h := block.Handle(1 + i%500)
				p.Remove(h, block.Evicted)
				if tell {
					p.Request([]uint64{i}, 0, 0)
				}
				p.Insert(h, Block{Hash: i, Bytes: 1})
				for j, s := range p.shadows {
					if n := s.p.Len(); n > 2*p.extent.blocks+shadowBatch+1 {
						t.Fatalf("shadow %d has %d blocks, the tier %d", j, n, p.Len())
					}
				}
			}
		})
	}
}

func TestGDSFStamp(t *testing.T) {
	p := NewGDSF()
	var last uint64
	for _, v := range []float64{1e-30, 0.001, 0.5, 1, 1.0001, 2, 3e4, 1e9, 1e18} {
		p.floor = v
		for range 3 { // of the same priority the later is above
			s := p.stamp(&worth{uses: 1})
			if s <= last {
				t.Errorf("stamp %#x for %v is not above %#x", s, v, last)
			}
			last = s
			if got := priority(s); v > 1e-19 && (got > v || got < v*(1-1e-9)) {
				t.Errorf("priority(stamp(%v)) = %v", v, got)
			}
		}
	}
}
