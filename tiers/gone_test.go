package tiers_test

import (
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// Each key that is not there is counted with the reason, by namespace.
func TestMissesSayWhy(t *testing.T) {
	t.Parallel()
	const size = 4<<10 - 512
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns, other := space(t, s, "a", 1<<20), space(t, s, "b", 1<<20)
	misses := func(i int) block.NamespaceStats {
		for _, n := range s.Stats().ByNamespace {
			if n.Name == []string{"a", "b"}[i] {
				return n
			}
		}
		t.Fatal("no such namespace")
		return block.NamespaceStats{}
	}
	match := func(ns block.Namespace, is ...int) {
		t.Helper()
		var hs []byte
		for _, i := range is {
			hs = append(hs, pack(hashOf(i))...)
		}
		if err := s.Match(t.Context(), ns.ID, hashLen, hs, block.MatchOptions{All: true}, new(block.MatchResult)); err != nil {
			t.Fatal(err)
		}
	}
	var n int
	for ; s.Stats().Tiers[0].Evictions == 0; n++ {
		mustPut(t, s, ns, n, size, block.PutOptions{})
	}
	mustPut(t, s, ns, n, size, block.PutOptions{})
	if _, err := s.Delete(t.Context(), ns.ID, hashLen, pack(hashOf(n))); err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, other, 0, size, block.PutOptions{TTL: time.Second})
	eventually(t, "it has expired", func() bool {
		_, p, err := get(s, other, 0, block.GetOptions{})
		return err == nil && p.Reason != block.Hit
	})
	match(ns, n-1, 0, n, n+1) // resident, evicted, deleted, never stored
	match(other, 0)
	a, b := misses(0), misses(1)
	if a.Asked != 4 || a.Matched != 1 || a.Misses["evicted"] != 1 || a.Misses["deleted"] != 1 || a.Misses["never_stored"] != 1 {
		t.Errorf("a: %+v", a)
	}
	if b.Asked != 1 || b.Matched != 0 || b.Misses["expired"] < 2 || b.Misses["never_stored"] != 0 || b.Misses["evicted"] != 0 {
		t.Errorf("b: %+v", b)
	}

	mustPut(t, s, ns, 0, size, block.PutOptions{}) // it is there again
	match(ns, 0)
	if a = misses(0); a.Matched != 2 || a.Misses["evicted"] != 1 {
		t.Errorf("a: %+v", a)
	}
}
