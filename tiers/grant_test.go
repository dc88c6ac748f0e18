package tiers_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// grantOf is a grant of n bytes.
func grantOf(t testing.TB, s *tiers.Store, ns block.Namespace, n int64) block.Grant {
	t.Helper()
	gs, err := s.Grant(within(t, 10*time.Second), ns.ID, n, 1)
	if err != nil || len(gs) != 1 || int64(len(gs[0].Mem)) != n {
		t.Fatalf("grant of %d bytes: %d grants, %v", n, len(gs), err)
	}
	return gs[0]
}

// granted is a put of data as block i by a grant.
func granted(ns block.Namespace, g block.Grant, i int, data []byte, o block.PutOptions) block.GrantPut {
	return block.GrantPut{
		Grant: g.ID, Key: keyOf(ns, i), Hlen: hashLen, Len: int64(len(data)), Sum: xxh3.Hash128(data).Bytes(), PutOptions: o,
	}
}

// putGranted fills a grant and puts it.
func putGranted(t testing.TB, s *tiers.Store, ns block.Namespace, g block.Grant, i int, data []byte, o block.PutOptions) block.CommitResult {
	t.Helper()
	copy(g.Mem, data)
	return s.PutGranted(within(t, 10*time.Second), []block.GrantPut{granted(ns, g, i, data, o)})[0]
}

// TestGrantSizes puts blocks through grants of their own size and of larger ones.
// Those that wrote whole slots leave nothing of what was in the grant behind the
// payload, neither in memory nor on the device, and are the same after a restart.
func TestGrantSizes(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 512<<20), Agent: newAgent(t), DRAM: 128 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	sizes := []int{1, 511, 512, 513, 4096, 16 << 10, 65535, 65536, 65537, 300_001, 1 << 20, 1<<20 + 1, 4 << 20, 8 << 20}
	var lens []int
	for _, room := range sizes {
		for _, n := range sizes {
			if n > room {
				continue
			}
			i := len(lens)
			g := grantOf(t, s, ns, int64(room))
			for j := range g.Mem {
				g.Mem[j] = 0xee
			}
			tier := block.G2
			if i%2 == 0 {
				tier = block.G3
			}
			if res := putGranted(t, s, ns, g, i, payload(i, n), block.PutOptions{Durable: tier}); res.Err != nil || res.Status != block.Stored {
				t.Fatalf("%d bytes by a grant of %d: %+v", n, room, res)
			}
			lens = append(lens, n)
			wantHit(t, s, ns, i, n)
			for _, l := range placesOf(t, s, ns, i) {
				if tail := tiers.PaddingOf(s, l); len(tail) > 0 && string(tail) != string(make([]byte, len(tail))) {
					t.Errorf("%d bytes by a grant of %d: other bytes behind the payload in %v", n, room, l.Tier)
				}
			}
		}
	}
	for i, n := range lens {
		wantHit(t, s, ns, i, n)
	}
	if st := s.Stats(); st.Reservations != 0 {
		t.Errorf("%d reservations are left", st.Reservations)
	}
	if _, err := s.Drain(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s, o)
	for i, n := range lens {
		if i%2 == 0 {
			wantHit(t, s, ns, i, n)
		}
	}
	wantEmpty(t, s)
}

// TestGrantShrinks: a block that is much smaller than its grant does not keep the
// grant's slot, one that is a little smaller does.
func TestGrantShrinks(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 64 << 20})
	ns := space(t, s, "a", 8<<20)
	for i, c := range []struct {
		n    int
		same bool
	}{{1 << 20, true}, {900_000, true}, {300_000, false}, {1000, false}} {
		g := grantOf(t, s, ns, 1<<20)
		before := g.Offset
		if res := putGranted(t, s, ns, g, i, payload(i, c.n), block.PutOptions{}); res.Err != nil {
			t.Fatal(res.Err)
		}
		wantHit(t, s, ns, i, c.n)
		_, header := tiers.SlotBytes(int64(c.n))
		if same := placeIn(t, s, ns, i, block.G2).Offset()+header == before; same != c.same {
			t.Errorf("%d bytes by a grant of 1 MiB: where the grant was: %v", c.n, same)
		}
	}
	wantEmpty(t, s)
}

// TestGrantShrinksWhenFull: with no smaller slot to be had the block keeps its
// grant's, with a header of its own length in front.
func TestGrantShrinksWhenFull(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 8<<20)
	g := grantOf(t, s, ns, 1<<20)
	copy(g.Mem, payload(1, 1000))
	var rest []uint64
	for {
		r, _, err := s.Reserve(within(t, 10*time.Second), ns.ID, hashLen, hashOf(100+len(rest)), 1<<20, block.PutOptions{})
		if err != nil {
			break
		}
		rest = append(rest, r.ID)
	}
	if len(rest) == 0 {
		t.Fatal("nothing could be reserved")
	}
	if res := putGranted(t, s, ns, g, 1, payload(1, 1000), block.PutOptions{}); res.Err != nil {
		t.Fatal(res.Err)
	}
	wantHit(t, s, ns, 1, 1000)
	if at := placeIn(t, s, ns, 1, block.G2).Offset(); at+4096 != g.Offset {
		t.Errorf("the block is at %d, the grant was at %d", at, g.Offset)
	}
	s.Abort(rest)
	wantEmpty(t, s)
}

// TestGrantLimits: grants are bounded in number and bytes, and leave the rest of G2
// to others; the first is given in any case. They count as reservations until they
// are put or aborted, and no session's end or time takes them.
func TestGrantLimits(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 64 << 20, MaxReservations: 20, ReserveTTL: time.Nanosecond})
	ns := space(t, s, "a", 8<<20)
	ids := func(gs []block.Grant) (ids []uint64) {
		for _, g := range gs {
			ids = append(ids, g.ID)
		}
		return ids
	}
	for _, c := range []struct {
		n    int64
		want int
	}{{1000, 20}, {1 << 20, 15}, {8 << 20, 1}} {
		gs, err := s.Grant(t.Context(), ns.ID, c.n, 100)
		if err != nil || len(gs) != c.want {
			t.Errorf("100 grants of %d bytes: %d, %v, want %d", c.n, len(gs), err, c.want)
		}
		seen := map[uint64]bool{0: true}
		for _, g := range gs {
			if seen[g.ID] {
				t.Errorf("id %d twice, or 0", g.ID)
			}
			seen[g.ID] = true
		}
		tiers.Sweep(s)
		s.EndSession(1)
		if st := s.Stats(); st.Reservations != int64(len(gs)) {
			t.Errorf("%d reservations are counted, there are %d grants", st.Reservations, len(gs))
		}
		if _, err := s.Grant(t.Context(), ns.ID, c.n, 1); !errors.Is(err, block.ErrNoSpace) {
			t.Errorf("one more: %v", err)
		}
		mustPut(t, s, ns, int(c.n), 8<<20, block.PutOptions{}) // there is room for it
		s.Abort(ids(gs))                                       // which are no reservations
		if st := s.Stats(); st.Reservations != int64(len(gs)) {
			t.Errorf("%d of %d grants are left", st.Reservations, len(gs))
		}
		s.AbortGrants(append(ids(gs), 12345))
		s.AbortGrants(ids(gs))
		wantEmpty(t, s)
	}
	if s.Stats().Tiers[0].Refused == 0 {
		t.Error("refused grants are not counted")
	}
	for _, c := range []struct {
		ns    block.NamespaceID
		n     int64
		count int
		want  error
	}{{ns.ID, 0, 1, block.ErrInvalid}, {ns.ID, 8<<20 + 1, 1, block.ErrInvalid}, {ns.ID, 100, 0, block.ErrInvalid}, {ns.ID, 100, -1, block.ErrInvalid}, {ns.ID + 9, 100, 1, block.ErrNotFound}} {
		if gs, err := s.Grant(t.Context(), c.ns, c.n, c.count); !errors.Is(err, c.want) || gs != nil {
			t.Errorf("%d grants of %d bytes in namespace %d: %v, %v", c.count, c.n, c.ns, gs, err)
		}
	}
	wantEmpty(t, s)
}

// TestPutGranted: what puts by grants answer.
func TestPutGranted(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 64 << 20, Slabs: slabIn(t, 64<<20)})
	ns, other := space(t, s, "a", 1<<20), space(t, s, "b", 1<<20)
	const size = 5000
	data := payload(1, size)
	put := func(i int, data []byte, o block.PutOptions) block.CommitResult {
		return putGranted(t, s, ns, grantOf(t, s, ns, size), i, data, o)
	}
	if res := put(1, data, block.PutOptions{}); res.Err != nil || res.Status != block.Stored {
		t.Fatalf("put: %+v", res)
	}
	if got := tiersOf(t, s, ns, 1); got != "g2" {
		t.Errorf("put to g2: in %s", got)
	}
	if res := put(1, data, block.PutOptions{Durable: block.G3}); res.Err != nil || res.Status != block.Exists {
		t.Errorf("again, durable: %+v", res)
	}
	if got := tiersOf(t, s, ns, 1); got != "g2g3" {
		t.Errorf("put to g3: in %s", got)
	}
	if res := put(1, payload(2, size), block.PutOptions{}); !errors.Is(res.Err, block.ErrConflict) {
		t.Errorf("other bytes: %+v", res)
	}
	if res := put(1, data[:size-1], block.PutOptions{}); !errors.Is(res.Err, block.ErrConflict) {
		t.Errorf("fewer bytes: %+v", res)
	}
	if n := s.Stats().Conflicts; n != 2 {
		t.Errorf("%d conflicts, want 2", n)
	}
	wantHit(t, s, ns, 1, size)

	good := block.PutOptions{}
	for name, change := range map[string]func(p *block.GrantPut){
		"other namespace": func(p *block.GrantPut) { p.Key.NS = other.ID },
		"too long":        func(p *block.GrantPut) { p.Len = size + 1 },
		"empty":           func(p *block.GrantPut) { p.Len = 0 },
		"negative":        func(p *block.GrantPut) { p.Len = -1 },
		"hash length":     func(p *block.GrantPut) { p.Hlen = 32 },
		"no hash":         func(p *block.GrantPut) { p.Hlen = 0 },
		"own parent":      func(p *block.GrantPut) { p.HasParent, p.Parent = true, p.Key.Hash },
		"ttl":             func(p *block.GrantPut) { p.TTL = -1 },
		"durable":         func(p *block.GrantPut) { p.Durable = 77 },
	} {
		g := grantOf(t, s, ns, size)
		p := granted(ns, g, 9, data, good)
		change(&p)
		if res := s.PutGranted(t.Context(), []block.GrantPut{p}); !errors.Is(res[0].Err, block.ErrInvalid) {
			t.Errorf("%s: %+v", name, res[0])
		}
		if res := s.PutGranted(t.Context(), []block.GrantPut{granted(ns, g, 9, data, good)}); !errors.Is(res[0].Err, block.ErrLeaseExpired) {
			t.Errorf("%s: the grant was not used up: %+v", name, res[0])
		}
	}

	// Several at once: a chain, one key twice, one grant twice, an unknown one.
	var gs []block.Grant
	var puts []block.GrantPut
	for j, i := range []int{10, 11, 12, 11} {
		gs = append(gs, grantOf(t, s, ns, size))
		o := block.PutOptions{}
		if i > 10 {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		copy(gs[j].Mem, payload(i, size))
		puts = append(puts, granted(ns, gs[j], i, payload(i, size), o))
	}
	puts = append(puts, granted(ns, gs[0], 13, data, good), granted(ns, block.Grant{ID: 99}, 14, data, good))
	var got []string
	for _, r := range s.PutGranted(t.Context(), puts) {
		got = append(got, fmt.Sprint(r.Status, errors.Is(r.Err, block.ErrLeaseExpired)))
	}
	if want := "[0 false 0 false 0 false 1 false 0 true 0 true]"; fmt.Sprint(got) != want {
		t.Errorf("results %v, want %s", got, want)
	}
	for _, i := range []int{10, 11, 12} {
		wantHit(t, s, ns, i, size)
	}
	entries, _, err := s.List(t.Context(), ns.ID, "", 100)
	if err != nil || len(entries) != 4 {
		t.Fatalf("list: %d, %v", len(entries), err)
	}
	for _, e := range entries {
		if i := keyOfHash(e.Hash); e.HasPar != (i > 10) || e.HasPar && e.Parent != hashOf(i-1) {
			t.Errorf("block %d is listed with parent %v %s", i, e.HasPar, e.Parent.Hex(hashLen))
		}
	}

	// A grant is no reservation.
	g := grantOf(t, s, ns, size)
	if err := s.Fill(t.Context(), g.ID, 0, data); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("fill of a grant: %v", err)
	}
	if res := s.Commit(t.Context(), []uint64{g.ID}); !errors.Is(res[0].Err, block.ErrLeaseExpired) {
		t.Errorf("commit of a grant: %+v", res[0])
	}
	if res := putGranted(t, s, ns, g, 20, data, block.PutOptions{TTL: time.Hour}); res.Err != nil {
		t.Errorf("put after that: %+v", res)
	}
	if e := tiers.EntryOf(s, keyOf(ns, 20)); e.Expires == 0 {
		t.Error("the time to live is lost")
	}
	wantEmpty(t, s)
}

// TestGrantDurable: what was put by grants as durable is there with the same bytes
// after a stop out of order; what was granted and not put has left nothing.
func TestGrantDurable(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 64 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	const n = 6
	for i := range n {
		if res := putGranted(t, s, ns, grantOf(t, s, ns, 1<<20), i, payload(i, 100_000*(i+1)), block.PutOptions{Durable: block.G3}); res.Err != nil {
			t.Fatal(res.Err)
		}
	}
	copy(grantOf(t, s, ns, 1<<20).Mem, payload(n, 1000))
	tiers.CloseUnclean(t, s)
	s = openStore(t, o)
	for i := range n {
		wantHit(t, s, ns, i, 100_000*(i+1))
	}
	if st := s.Stats(); st.Blocks != n || st.Reservations != 0 {
		t.Errorf("%d blocks, %d reservations", st.Blocks, st.Reservations)
	}
	wantEmpty(t, s)
}

// TestGrantStarves: grants that nobody fills do not keep others from putting, and
// a grant waits for the evictor as a reservation does.
func TestGrantStarves(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 32 << 20})
	ns := space(t, s, "a", 1<<20)
	idle, err := s.Grant(t.Context(), ns.ID, 1<<20, 100)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 64 {
		mustPut(t, s, ns, i, 1<<20, block.PutOptions{})
	}
	for _, g := range idle {
		s.AbortGrants([]uint64{g.ID})
		if res := putGranted(t, s, ns, grantOf(t, s, ns, 1<<20), 100+int(g.ID%1000), payload(1, 1<<20), block.PutOptions{}); res.Err != nil && !errors.Is(res.Err, block.ErrConflict) {
			t.Fatal(res.Err)
		}
	}
	wantEmpty(t, s)
}

// TestGrantBatch puts new keys, one of them twice, and keys that are there, with the same
// bytes and with others, in one batch: each is answered, and the rest is stored.
func TestGrantBatch(t *testing.T) {
	const size = 5000
	for _, tier := range []block.TierID{block.G2, block.G3} {
		s := openStore(t, tiers.Options{Slabs: slabIn(t, 64<<20)})
		ns := space(t, s, "a", 1<<20)
		mustPut(t, s, ns, 1, size, block.PutOptions{Durable: tier})
		mustPut(t, s, ns, 2, size, block.PutOptions{})
		batch := []struct{ key, bytes int }{{3, 3}, {1, 1}, {2, 9}, {3, 3}, {4, 4}, {2, 2}}
		var puts []block.GrantPut
		for _, b := range batch {
			g := grantOf(t, s, ns, size)
			data := payload(b.bytes, size)
			copy(g.Mem, data)
			puts = append(puts, granted(ns, g, b.key, data, block.PutOptions{Durable: tier}))
		}
		res := s.PutGranted(within(t, 10*time.Second), puts)
		stored := map[int]int{}
		for i, b := range batch {
			switch {
			case b.key != b.bytes:
				if !errors.Is(res[i].Err, block.ErrConflict) {
					t.Errorf("%v: other bytes for key %d: %+v", tier, b.key, res[i])
				}
			case res[i].Err != nil:
				t.Errorf("%v: key %d: %v", tier, b.key, res[i].Err)
			case res[i].Status == block.Stored:
				stored[b.key]++
			case res[i].Status != block.Exists:
				t.Errorf("%v: key %d: status %v", tier, b.key, res[i].Status)
			}
		}
		if len(stored) != 2 || stored[3] != 1 || stored[4] != 1 {
			t.Errorf("%v: stored by key: %v, want 3 and 4 once each", tier, stored)
		}
		for i := 1; i <= 4; i++ {
			wantHit(t, s, ns, i, size)
		}
		if st := s.Stats(); st.Blocks != 4 || st.Reservations != 0 || st.Conflicts != 1 {
			t.Errorf("%v: %d blocks, %d reservations, %d conflicts", tier, st.Blocks, st.Reservations, st.Conflicts)
		}
		if entries, _, err := s.List(t.Context(), ns.ID, "", 10); err != nil || len(entries) != 4 {
			t.Errorf("%v: %d blocks are listed, %v", tier, len(entries), err)
		}
		wantEmpty(t, s)
	}
}
