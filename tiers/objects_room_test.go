package tiers_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// TestObjectPrefetchRoom: a prefetch of more than memory holds gets room for every block, as
// long as what is there may be evicted. What it brings up ahead does not take the room of what
// is waited for.
func TestObjectPrefetchRoom(t *testing.T) {
	const n, size = 24, 1 << 20
	for name, durable := range map[string]block.TierID{"nvme": block.G3, "no nvme": block.G2} {
		t.Run(name, func(t *testing.T) {
			b := newFakeBucket()
			o := farOptions(t, b)
			if durable == block.G2 {
				o.Slabs, o.NoSlabs = nil, true
			}
			s := openStore(t, o)
			ns := space(t, s, "n", 1<<20)
			is, ids := farChain(t, s, ns, n, size, durable)
			for i := n; i < 2*n; i++ {
				mustPutDown(t, s, ns, i, size, block.PutOptions{})
			}
			for range 4 {
				wantPrefetched(t, s, ns, ids, block.Hit)
				sendDown(t, s, ns, is...)
			}
			wantEmpty(t, s)
		})
	}
}

// TestObjectPrefetchNoRoom: with all memory leased a prefetch says so, and a get reads what is
// in G4 without it.
func TestObjectPrefetchNoRoom(t *testing.T) {
	const n, size = 6, 1 << 20
	b := newFakeBucket()
	o := farOptions(t, b)
	o.Slabs, o.NoSlabs = nil, true
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	_, ids := farChain(t, s, ns, n, size, block.G2)
	var leases []block.Lease
	for i := n; ; i++ {
		r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(i), size, block.PutOptions{})
		if errors.Is(err, block.ErrNoSpace) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		s.Abort([]uint64{r.ID}) // its slot is there for the put
		mustPut(t, s, ns, i, size, block.PutOptions{})
		var res block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, pack(hashOf(i)), block.MatchOptions{Lease: time.Hour}, &res); err != nil {
			t.Fatal(err)
		}
		if res.Prefix == 1 { // else it has left again meanwhile
			leases = append(leases, res.Lease)
		}
	}
	wantPrefetched(t, s, ns, ids, block.MissNoRoom)
	for i := range n {
		if got, p, err := get(s, ns, i, block.GetOptions{}); err != nil || p.Tier != block.G4 || string(got) != string(payload(i, size)) {
			t.Errorf("get %d: %v from %v, %v", i, p.Reason, p.Tier, err)
		}
	}
	for _, l := range leases {
		releaseLease(t, s, l)
	}
	wantPrefetched(t, s, ns, ids, block.Hit)
	wantEmpty(t, s)
}

// farChain puts a chain of blocks that are only in G4 then.
func farChain(t testing.TB, s *tiers.Store, ns block.Namespace, n, size int, durable block.TierID) (is []int, ids []byte) {
	t.Helper()
	for i := range n {
		o := block.PutOptions{Durable: durable}
		if i > 0 {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		mustPutDown(t, s, ns, i, size, o)
		is, ids = append(is, i), append(ids, pack(hashOf(i))...)
	}
	slices.Reverse(is) // children leave before their parents
	sendDown(t, s, ns, is...)
	return is, ids
}

func wantPrefetched(t testing.TB, s *tiers.Store, ns block.Namespace, ids []byte, want block.MissReason) {
	t.Helper()
	if err := s.Prefetch(within(t, time.Minute), ns.ID, hashLen, ids, block.PrefetchOptions{}, func(p block.Progress) error {
		if p.Reason != want {
			t.Errorf("prefetch of block %d: %v from %v, want %v", p.Index, p.Reason, p.Tier, want)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
