package access_test

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

func leased(id uint64, left time.Duration, blocks int) block.Lease {
	return block.Lease{ID: id, Left: left, Count: blocks}
}

// TestLeases shows that room is for so many leases, and comes back in all the ways that
// a lease can end.
func TestLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := access.NewLeases(3)
		take := func(want bool) {
			t.Helper()
			if got := l.Take(); got != want {
				t.Fatalf("room is %v, want %v", got, want)
			}
		}
		now := func(wantN, wantBlocks int, wantRefused int64) {
			t.Helper()
			if n, blocks, refused := l.Now(); n != wantN || blocks != wantBlocks || refused != wantRefused {
				t.Fatalf("%d leases of %d blocks, %d refused, want %d, %d, %d", n, blocks, refused, wantN, wantBlocks, wantRefused)
			}
		}
		for id := range uint64(3) {
			take(true)
			if id > 0 {
				l.Add(leased(id, time.Duration(id)*time.Minute, int(id)), 7+id)
			}
		}
		take(false) // though one of the three is not there yet
		now(2, 3, 1)
		l.Add(block.Lease{}, 7) // none after all
		take(true)
		l.Cancel()
		take(true)
		l.Add(leased(3, time.Hour, 10), 7)
		take(false)
		now(3, 13, 2)

		time.Sleep(time.Minute + 1) // the first has run out
		take(true)
		l.Add(leased(4, time.Hour, 100), 7)
		if l.Has(1) || !l.Has(2) {
			t.Error("what has run out is there, or what has not is gone")
		}
		l.Renew(leased(2, time.Hour, 2))
		l.Renew(leased(77, time.Hour, 2)) // nobody's
		time.Sleep(2 * time.Minute)
		take(false)
		now(3, 112, 3)
		l.Drop(2)
		l.Drop(2)
		now(2, 110, 3)
		l.EndSession(7)
		l.EndSession(7)
		now(0, 0, 3)
		for range 3 {
			take(true)
		}
		take(false)
	})
}

// TestLeasesNone: nobody's leases are not counted, and there is room for any number
// without a limit.
func TestLeasesNone(t *testing.T) {
	var none *access.Leases
	all := access.NewLeases(0)
	for id := range uint64(100) {
		for _, l := range []*access.Leases{none, all} {
			if !l.Take() {
				t.Fatal("no room")
			}
			l.Add(leased(id+1, time.Hour, 1), 1)
			l.Renew(leased(id+1, time.Hour, 1))
		}
	}
	if n, _, _ := all.Now(); n != 100 {
		t.Errorf("%d leases, want 100", n)
	}
	none.Cancel()
	none.Drop(1)
	none.EndSession(1)
	if n, _, _ := none.Now(); n != 0 || none.Has(1) || none.Most() != 0 {
		t.Errorf("%d leases of nobody", n)
	}
}

// TestLeasesModel compares with a map, whatever the order in which leases come and go.
func TestLeasesModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(1, 2))
		const most = 20
		l := access.NewLeases(most)
		type held struct {
			until   time.Time
			session uint64
			blocks  int
		}
		model := map[uint64]held{}
		forget := func() {
			for id, h := range model {
				if time.Now().After(h.until) {
					delete(model, id)
				}
			}
		}
		for step := range 20000 {
			id := rng.Uint64N(40) + 1
			b := leased(id, time.Duration(rng.IntN(1000))*time.Second, rng.IntN(5))
			switch rng.IntN(8) {
			case 0, 1, 2, 3:
				forget()
				_, there := model[id]
				if there {
					break // the store gives no number twice
				}
				if room := l.Take(); room != (len(model) < most) {
					t.Fatalf("step %d: room is %v beside %d", step, room, len(model))
				} else if room {
					l.Add(b, id%3)
					model[id] = held{time.Now().Add(b.Left), id % 3, b.Count}
				}
			case 4:
				forget()
				_, _, _ = l.Now() // what has run out is renewed in neither
				if h, there := model[id]; there {
					l.Renew(b)
					h.until = time.Now().Add(b.Left)
					model[id] = h
				}
			case 5:
				l.Drop(id)
				delete(model, id)
			case 6:
				if rng.IntN(20) == 0 {
					l.EndSession(id % 3)
					for id2, h := range model {
						if h.session == id%3 {
							delete(model, id2)
						}
					}
				}
			case 7:
				time.Sleep(time.Duration(rng.IntN(100)) * time.Second)
			}
			forget()
			blocks := 0
			for _, h := range model {
				blocks += h.blocks
			}
			if n, got, _ := l.Now(); n != len(model) || got != blocks {
				t.Fatalf("step %d: %d leases of %d blocks, want %d of %d", step, n, got, len(model), blocks)
			}
		}
	})
}

// BenchmarkLeasesFull takes room where there is none: it does not look at every lease.
func BenchmarkLeasesFull(b *testing.B) {
	const most = 65536
	l := access.NewLeases(most)
	for id := range uint64(most) {
		l.Take()
		l.Add(leased(id+1, time.Hour, 1), 1)
	}
	b.ReportAllocs()
	for b.Loop() {
		if l.Take() {
			b.Fatal("there is room")
		}
	}
}
