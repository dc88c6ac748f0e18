package tiers

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

func mustGrant(t *testing.T, l *Leases, session uint64, d time.Duration, handles ...block.Handle) block.Lease {
	t.Helper()
	lease, err := l.Grant(session, handles, d)
	if err != nil {
		t.Fatal(err)
	}
	if lease.ID == 0 || lease.Left != d || lease.Count != len(handles) {
		t.Errorf("lease %+v of %d blocks for %v", lease, len(handles), d)
	}
	return lease
}

func TestLeaseLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLeases(10, 10)
		if _, ok := l.Next(); ok {
			t.Error("an empty table has a next expiry")
		}
		handles := []block.Handle{1, 2, 3}
		a := mustGrant(t, l, 5, time.Minute, handles...)
		handles[0] = 99 // the caller's slice is its own
		b := mustGrant(t, l, 5, time.Hour, 4)
		if at, ok := l.Next(); !ok || time.Until(at) != time.Minute {
			t.Errorf("next expiry in %v, %v", time.Until(at), ok)
		}
		time.Sleep(time.Minute - 1)
		if got := l.Expire(time.Now()); got != nil {
			t.Errorf("expired early: %v", got)
		}
		if r, err := l.Renew(a.ID, 2*time.Minute); err != nil || r != (block.Lease{ID: a.ID, Left: 2 * time.Minute, Count: 3}) {
			t.Errorf("renewed: %+v, %v", r, err)
		}
		time.Sleep(2 * time.Minute)
		// Over is over, also before Expire was called; only Expire has the handles.
		if _, err := l.Renew(a.ID, time.Hour); !errors.Is(err, block.ErrLeaseExpired) {
			t.Errorf("renew of an expired lease: %v", err)
		}
		if _, err := l.Release(a.ID); !errors.Is(err, block.ErrLeaseExpired) {
			t.Errorf("release of an expired lease: %v", err)
		}
		if got := l.Expire(time.Now()); len(got) != 1 || !slices.Equal(got[0], []block.Handle{1, 2, 3}) {
			t.Errorf("expired: %v", got)
		}
		if got, err := l.Release(b.ID); err != nil || !slices.Equal(got, []block.Handle{4}) {
			t.Errorf("released: %v, %v", got, err)
		}
		if _, err := l.Release(b.ID); !errors.Is(err, block.ErrLeaseExpired) {
			t.Errorf("released twice: %v", err)
		}
		if got := l.EndSession(5); got != nil {
			t.Errorf("the session still held %v", got)
		}
		want := LeaseStats{Granted: 2, Renewed: 1, Expired: 1, Released: 1}
		if got := l.Stats(); got != want {
			t.Errorf("counters %+v, want %+v", got, want)
		}
	})
}

func TestLeaseExpireOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLeases(10, 10)
		for _, s := range []int{3, 1, 4, 2, 5} {
			mustGrant(t, l, 0, time.Duration(s)*time.Second, block.Handle(s))
		}
		time.Sleep(4 * time.Second)
		var got []block.Handle
		for _, h := range l.Expire(time.Now()) {
			got = append(got, h...)
		}
		if !slices.Equal(got, []block.Handle{1, 2, 3, 4}) {
			t.Errorf("expired %v", got)
		}
		if got := l.Expire(time.Now().Add(time.Hour)); len(got) != 1 || got[0][0] != 5 {
			t.Errorf("expired %v", got)
		}
	})
}

func TestLeaseEarlier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLeases(10, 10)
		told := func() bool {
			select {
			case <-l.Earlier():
				return true
			default:
				return false
			}
		}
		mustGrant(t, l, 0, time.Minute, 1)
		if !told() {
			t.Error("not told of the first lease")
		}
		b := mustGrant(t, l, 0, time.Hour, 2)
		if told() {
			t.Error("told of a later one")
		}
		if _, err := l.Renew(b.ID, time.Second); err != nil {
			t.Fatal(err)
		}
		if !told() {
			t.Error("not told of a lease that was shortened")
		}
		mustGrant(t, l, 0, time.Millisecond, 3)
		mustGrant(t, l, 0, time.Microsecond, 4)
		if !told() || told() {
			t.Error("two leases want to be told once")
		}
		if at, ok := l.Next(); !ok || time.Until(at) != time.Microsecond {
			t.Errorf("next %v, %v", at, ok)
		}
		// Who waits for one that has ended looks again by itself, and needs no waking before.
		l.Expire(time.Now().Add(2 * time.Hour))
		c := mustGrant(t, l, 0, time.Minute, 5)
		if told() {
			t.Error("told of a lease that is due after what is waited for")
		}
		if _, err := l.Release(c.ID); err != nil {
			t.Fatal(err)
		}
		if at, ok := l.Next(); ok {
			t.Errorf("next %v without a lease", at)
		}
		mustGrant(t, l, 0, time.Minute, 6)
		if !told() {
			t.Error("not told of the first lease after none")
		}
	})
}

func TestLeaseSessions(t *testing.T) {
	l := NewLeases(10, 10)
	mustGrant(t, l, 1, time.Hour, 1)
	mustGrant(t, l, 1, time.Hour, 2, 3)
	mustGrant(t, l, 2, time.Hour, 4)
	mustGrant(t, l, 0, time.Hour, 5)
	sorted := func(held [][]block.Handle) []block.Handle {
		all := slices.Concat(held...)
		slices.Sort(all)
		return all
	}
	if got := sorted(l.EndSession(1)); !slices.Equal(got, []block.Handle{1, 2, 3}) {
		t.Errorf("session 1 held %v", got)
	}
	if got := l.EndSession(1); got != nil {
		t.Errorf("session 1 held %v after its end", got)
	}
	if got := l.EndSession(0); got != nil {
		t.Errorf("no session held %v", got)
	}
	if got := sorted(l.EndSession(2)); !slices.Equal(got, []block.Handle{4}) {
		t.Errorf("session 2 held %v", got)
	}
	if got, want := l.Stats(), (LeaseStats{Leases: 1, Handles: 1, Granted: 4, Ended: 3}); got != want {
		t.Errorf("counters %+v, want %+v", got, want)
	}
}

func TestLeaseRefused(t *testing.T) {
	l := NewLeases(2, 4)
	full := mustGrant(t, l, 1, time.Hour, 1, 2, 3)
	for _, c := range []struct {
		name    string
		handles []block.Handle
		d       time.Duration
		want    error
	}{
		{"no blocks", nil, time.Hour, block.ErrInvalid},
		{"no time", []block.Handle{1}, 0, block.ErrInvalid},
		{"negative time", []block.Handle{1}, -1, block.ErrInvalid},
		{"too many blocks", []block.Handle{1, 2}, time.Hour, block.ErrNoSpace},
		{"room for one", []block.Handle{1}, time.Hour, nil},
		{"too many leases", []block.Handle{1}, time.Hour, block.ErrNoSpace},
	} {
		if _, err := l.Grant(1, c.handles, c.d); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if _, err := l.Renew(full.ID, 0); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("renew for no time: %v", err)
	}
	if _, err := l.Renew(full.ID+1, time.Hour); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("renew of an unknown lease: %v", err)
	}
	if got, want := l.Stats(), (LeaseStats{Leases: 2, Handles: 4, Granted: 2, Refused: 2}); got != want {
		t.Errorf("counters %+v, want %+v", got, want)
	}
	l.EndSession(1)
	mustGrant(t, l, 1, time.Hour, 1, 2, 3, 4)
}

// TestLeaseConcurrent: whatever ends a lease, each granted handle comes back once.
func TestLeaseConcurrent(t *testing.T) {
	l := NewLeases(1000, 10000)
	var mu sync.Mutex
	granted, back := 0, 0
	count := func(held ...[]block.Handle) {
		mu.Lock()
		defer mu.Unlock()
		for _, h := range held {
			back += len(h)
		}
	}
	var wg sync.WaitGroup
	for w := range uint64(4) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(w, 1))
			var ids []uint64
			for range 3000 {
				switch rng.IntN(8) {
				case 0, 1, 2:
					h := make([]block.Handle, 1+rng.IntN(3))
					lease, err := l.Grant(1+rng.Uint64N(3), h, time.Duration(1+rng.IntN(100))*time.Microsecond)
					if errors.Is(err, block.ErrNoSpace) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					granted += len(h)
					mu.Unlock()
					ids = append(ids, lease.ID)
				case 3:
					count(l.EndSession(1 + rng.Uint64N(3))...)
				case 4:
					count(l.Expire(time.Now())...)
				default:
					if len(ids) == 0 {
						continue
					}
					id := ids[rng.IntN(len(ids))]
					if h, err := l.Release(id); err == nil {
						count(h)
					} else if !errors.Is(err, block.ErrLeaseExpired) {
						t.Error(err)
					}
					if _, err := l.Renew(id, time.Millisecond); err != nil && !errors.Is(err, block.ErrLeaseExpired) {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	count(l.Expire(time.Now().Add(time.Hour))...)
	if granted != back {
		t.Errorf("%d handles were leased, %d came back", granted, back)
	}
	if st := l.Stats(); st.Leases != 0 || st.Handles != 0 || st.Granted != st.Released+st.Ended+st.Expired {
		t.Errorf("counters %+v", st)
	}
	if len(l.mu.bySession) != 0 || len(l.mu.byID) != 0 {
		t.Errorf("%d sessions and %d leases are left", len(l.mu.bySession), len(l.mu.byID))
	}
}

func BenchmarkLeaseGrantRelease(b *testing.B) {
	l := NewLeases(1<<16, 1<<20)
	h := make([]block.Handle, 32)
	b.ReportAllocs()
	for b.Loop() {
		lease, err := l.Grant(1, h, time.Minute)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := l.Release(lease.ID); err != nil {
			b.Fatal(err)
		}
	}
}
