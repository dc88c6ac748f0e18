package xfer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

func TestCoveringRule(t *testing.T) {
	regs := []Desc{
		{Addr: 100, Len: 100},
		{Addr: 200, Len: 100}, // adjacent to the first
		{Addr: 1000, Len: 1000},
		{Addr: 1100, Len: 10}, // inside the one before, and in front of it in the order
		{Addr: 1100, Len: 20},
		{Addr: math.MaxUint64 - 50, Len: 50},
		{Addr: 100, Len: 100, Dev: 7},
		{Addr: 0, Len: 0, Dev: 8, Meta: "unbounded"},
		{Addr: 4096, Len: 0, Dev: 9, Meta: "unbounded, at an offset"},
	}
	var s section
	for i, d := range regs {
		s.insert([]*registration{newRegistration(FILE, d, i)})
	}
	for _, c := range []struct {
		d    Desc
		want int // index in regs; -1: not covered
	}{
		{Desc{Addr: 100, Len: 100}, 0},
		{Desc{Addr: 199, Len: 1}, 0},
		{Desc{Addr: 200, Len: 1}, 1},
		{Desc{Addr: 199, Len: 2}, -1}, // never across two
		{Desc{Addr: 99, Len: 2}, -1},
		{Desc{Addr: 300, Len: 1}, -1},
		{Desc{Addr: 1100, Len: 5}, 4},
		{Desc{Addr: 1100, Len: 21}, 2}, // the nearest does not cover, the furthest reaching does
		{Desc{Addr: 1500, Len: 500}, 2},
		{Desc{Addr: 1500, Len: 501}, -1},
		{Desc{Addr: math.MaxUint64 - 10, Len: 10}, 5},
		{Desc{Addr: math.MaxUint64 - 1, Len: 1}, 5},
		{Desc{Addr: 150, Len: 10, Dev: 7}, 6},
		{Desc{Addr: 250, Len: 10, Dev: 7}, -1},
		{Desc{Addr: 0, Len: math.MaxUint64, Dev: 8}, 7},
		{Desc{Addr: 1 << 60, Len: 1, Dev: 8}, 7},
		{Desc{Addr: 1, Len: 1, Dev: 9}, 8},
		{Desc{Addr: 1, Len: 1, Dev: 10}, -1},
	} {
		got := -1
		if r := s.find(c.d); r != nil {
			got = r.region.(int)
		}
		if got != c.want {
			t.Errorf("find(%s) = %d, want %d", c.d, got, c.want)
		}
	}
}

// TestSectionAgainstModel compares with a plain search through all
// registrations while they come and go.
func TestSectionAgainstModel(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	desc := func(maxLen uint64) Desc {
		return Desc{Addr: random.Uint64N(300), Len: 1 + random.Uint64N(maxLen), Dev: random.Uint64N(2)}
	}
	var s section
	var model []*registration
	for range 3000 {
		switch random.IntN(3) {
		case 0:
			var regs []*registration
			for range 1 + random.IntN(4) {
				regs = append(regs, newRegistration(DRAM, desc(80), nil))
			}
			s.insert(regs)
			model = append(model, regs...)
		case 1:
			if len(model) == 0 {
				continue
			}
			i := random.IntN(len(model))
			gone := model[i]
			model = append(model[:i], model[i+1:]...)
			found := false
			for _, r := range s.exact(DRAM, gone.desc) {
				found = found || r == gone
			}
			if !found {
				t.Fatalf("exact(%s) does not find it", gone.desc)
			}
			s.remove(map[*registration]bool{gone: true})
		}
		if len(model) > 40 {
			s.remove(map[*registration]bool{model[0]: true, model[1]: true})
			model = model[2:]
		}
		var total uint64
		for _, r := range model {
			total += r.desc.Len
		}
		if s.bytes != total || len(s.regs) != len(model) {
			t.Fatalf("%d registrations of %d bytes, want %d of %d", len(s.regs), s.bytes, len(model), total)
		}
		for range 5 {
			d := desc(60)
			want := false
			for _, r := range model {
				want = want || r.covers(d)
			}
			if got := s.find(d); (got != nil) != want || (got != nil && !got.covers(d)) {
				t.Fatalf("find(%s) = %v, want one that covers: %v", d, got, want)
			}
		}
	}
}

func BenchmarkFind(b *testing.B) {
	for _, n := range []int{1, 1000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var s section
			regs := make([]*registration, n)
			for i := range regs {
				regs[i] = newRegistration(DRAM, Desc{Addr: uint64(i) * 100, Len: 100}, nil)
			}
			s.insert(regs)
			random := rand.New(rand.NewPCG(1, 2))
			b.ReportAllocs()
			for b.Loop() {
				if s.find(Desc{Addr: random.Uint64N(uint64(n)) * 100, Len: 50}) == nil {
					b.Fatal("not found")
				}
			}
		})
	}
}
