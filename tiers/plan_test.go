package tiers_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// throttled is an agent whose files are read at so many bytes a second.
func throttled(t testing.TB, bytesPerSecond float64) *xfer.Agent {
	var one sync.Mutex
	return agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, local, _ []xfer.Bound) {
			if op != xfer.Read {
				return
			}
			one.Lock()
			defer one.Unlock()
			n := 0.0
			for i := range local {
				n += float64(local[i].Len)
			}
			time.Sleep(time.Duration(n / bytesPerSecond * 1e9))
		}}
	})
}

// TestPlannedGet: from a device of 20 MB/s a get hands out what is worth loading of a
// prompt, and no plan takes more than 5 % longer than to compute all.
func TestPlannedGet(t *testing.T) {
	t.Parallel()
	const (
		rate   = 20e6
		size   = 1 << 20
		blocks = 8
		tokens = 256
		near   = 3 // of them are in memory
	)
	s := openStore(t, tiers.Options{DRAM: 24 << 20, Slabs: slabIn(t, 64<<20), Agent: throttled(t, rate)})
	ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: "a", MaxBlockBytes: size, TokensPerBlock: tokens}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var want []block.Wanted
	var hs []byte
	for i := range blocks {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
		if i >= near {
			tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		}
		want, hs = append(want, block.Wanted{Hash: hashOf(i)}), append(hs, pack(hashOf(i))...)
	}
	for i := near; i < blocks; i++ { // it learns
		if _, p, err := get(s, ns, i, block.GetOptions{NoPromote: true, Quiet: true}); err != nil || p.Reason != block.Hit || p.Tier != block.G3 {
			t.Fatalf("get %d: %+v, %v", i, p, err)
		}
	}
	for _, c := range []struct {
		name         string
		perBlock     time.Duration // to compute
		o            block.PlanOptions
		least, most  int // blocks that are worth it
		tail, device bool
	}{
		{name: "all", perBlock: 2 * time.Second, least: blocks, most: blocks},
		{name: "what is in memory", perBlock: 10 * time.Millisecond, least: near, most: near},
		{name: "by the deadline", perBlock: 2 * time.Second, o: block.PlanOptions{Deadline: 130 * time.Millisecond}, least: near, most: near + 2},
		{name: "tail", perBlock: 50 * time.Millisecond, o: block.PlanOptions{Overlap: true}, least: 1, most: blocks},
		{name: "nothing", perBlock: time.Nanosecond * tokens, least: 0, most: 0},
	} {
		c.o.Prefill = block.Prefill{Token: c.perBlock / tokens}
		c.o.Prefill.Position = float64(c.o.Prefill.Token) / tokens / blocks / 100
		tiers.SetSpeed(s, block.G2, 10e9) // whatever else the machine does
		var m block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, hs, block.MatchOptions{Plan: &c.o}, &m); err != nil {
			t.Fatal(err)
		}
		p := m.Plan
		if p == nil || m.Prefix != blocks || p.Total > p.Recompute {
			t.Fatalf("%s: %+v, plan %+v", c.name, m, p)
		}
		hits, first, slow := 0, -1, 0.0
		err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{Plan: &c.o, NoPromote: true}, func(i int, b block.Payload) error {
			switch {
			case b.Reason == block.Hit:
				if string(b.Bytes) != string(payload(i, size)) {
					t.Errorf("%s: block %d has other bytes", c.name, i)
				}
				if first < 0 {
					first = i
				}
				hits++
				if b.Tier == block.G3 {
					slow += size
				}
			case b.Reason != block.MissRecompute:
				t.Errorf("%s: block %d: %v", c.name, i, b.Reason)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if hits < c.least || hits > c.most {
			t.Errorf("%s: %d blocks were worth it, want %d to %d; plan %+v", c.name, hits, c.least, c.most, p)
		}
		load, compute := slow/rate, p.Recompute.Seconds()*float64(blocks-hits)/blocks
		total := load + compute
		if first > 0 {
			total = max(load, compute)
		}
		if most := 1.05 * p.Recompute.Seconds(); total > most {
			t.Errorf("%s: %.3f s with %d blocks from block %d on, all computed takes %v", c.name, total, hits, first, p.Recompute)
		}
	}
	if n := s.Stats().Misses["recompute"]; n < blocks {
		t.Errorf("%d misses are counted that are not worth it", n)
	}
}

func TestBadPlan(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Prefill: func(name string) block.Prefill {
		if name == "known" {
			return block.Prefill{Token: time.Microsecond}
		}
		return block.Prefill{}
	}})
	open := func(name string, tokens uint32) block.Namespace {
		ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: name, MaxBlockBytes: 1 << 20, TokensPerBlock: tokens}, 0)
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, ns, 1, 1000, block.PutOptions{})
		return ns
	}
	known, unknown, flat := open("known", 16), open("unknown", 16), open("flat", 0)
	cost := block.Prefill{Token: time.Microsecond}
	for _, c := range []struct {
		ns block.Namespace
		o  block.MatchOptions
		ok bool
	}{
		{known, block.MatchOptions{Plan: &block.PlanOptions{}}, true},
		{unknown, block.MatchOptions{Plan: &block.PlanOptions{Prefill: cost}}, true},
		{unknown, block.MatchOptions{Plan: &block.PlanOptions{}}, false},
		{flat, block.MatchOptions{Plan: &block.PlanOptions{Prefill: cost}}, false},
		{known, block.MatchOptions{Plan: &block.PlanOptions{Deadline: -1}}, false},
		{known, block.MatchOptions{Plan: &block.PlanOptions{Prefill: block.Prefill{Token: -1}}}, false},
		{known, block.MatchOptions{Plan: &block.PlanOptions{}, Lease: time.Second}, false},
	} {
		err := s.Match(t.Context(), c.ns.ID, hashLen, pack(hashOf(1)), c.o, new(block.MatchResult))
		if c.ok && err != nil || !c.ok && !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%s: %+v, plan %+v: %v", c.ns.Desc.Name, c.o, c.o.Plan, err)
		}
	}
}
