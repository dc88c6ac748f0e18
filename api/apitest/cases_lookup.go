package apitest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// Keys 0 1 2 and 4 6 are there: the prefix ends at the first gap.
func testPrefix(e *env) {
	ns := e.open("ns")
	for _, i := range []int{0, 1, 2, 4, 6} {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	hs := hashes(0, 8)
	for _, c := range []struct {
		hs   []block.Hash
		all  bool
		want string
	}{
		{hs, false, "3:RRR-"},
		{hs, true, "3:RRR-R-R-"},
		{hs[3:], false, "0:-"},
		{hs[3:], true, "0:-R-R-"},
		{hs[:3], false, "3:RRR"},
		{hs[:3], true, "3:RRR"},
		{hs[4:5], false, "1:R"},
	} {
		res := e.match(ns, block.MatchOptions{All: c.all}, c.hs...)
		if got := states(res); got != c.want {
			e.Fatalf("match of %d keys, all %v: %s, want %s", len(c.hs), c.all, got, c.want)
		}
		for _, b := range res.Blocks {
			if b.State == block.Resident && (b.Tier == block.NoTier || b.Len != 1000) {
				e.Fatalf("resident block %+v", b)
			}
		}
		if res.Lease.ID != 0 {
			e.Fatalf("a lease that was not asked for: %+v", res.Lease)
		}
	}
}

func testLengthsDiffer(e *env) {
	ns := e.open("ns")
	for i := range 5 {
		e.put(ns, i, 1000*(i+1), api.PutOptions{}, block.Stored)
	}
	res := e.match(ns, block.MatchOptions{All: true}, hashes(0, 7)...)
	for i, b := range res.Blocks {
		if want := uint32(1000 * (i + 1)); i < 5 && b.Len != want || i >= 5 && b.Len != 0 {
			e.Fatalf("block %d: %+v", i, b)
		}
	}
	// More keys than any small buffer holds.
	many := hashes(0, 20_000)
	if got := e.match(ns, block.MatchOptions{All: true}, many...); len(got.Blocks) != len(many) || got.Prefix != 5 {
		e.Fatalf("match of %d keys: %d answered, prefix %d", len(many), len(got.Blocks), got.Prefix)
	}
}

// A block between its reservation and its commit is pending, and not to be had.
func testPending(e *env) {
	ns := e.open("ns")
	r, _, err := e.s.Reserve(e.ctx, ns.ID, hashLen, hash(0, hashLen), 100, block.PutOptions{Durable: block.G2})
	e.ok(err)
	e.ok(e.s.Fill(e.ctx, r.ID, 0, data(0, 100)))
	if got := states(e.match(ns, block.MatchOptions{All: true}, hashes(0, 2)...)); got != "0:p-" {
		e.Fatalf("match of a pending block: %s", got)
	}
	e.misses(ns, 0, block.MissPending)
	e.ok(e.s.Commit(e.ctx, []uint64{r.ID})[0].Err)
	if got := states(e.match(ns, block.MatchOptions{All: true}, hashes(0, 2)...)); got != "1:R-" {
		e.Fatalf("match after the commit: %s", got)
	}
	e.has(ns, 0, 100)
}

// Errors say what was wrong with which value.
func testBadArguments(e *env) {
	exact, err := e.s.OpenNamespace(e.ctx, block.Descriptor{Name: "exact", BlockBytes: 4096}, 0)
	e.ok(err)
	put := func(n int) error {
		res, err := e.s.putBlocks(e.ctx, exact.ID, hashLen, []api.PutItem{{Hash: hash(1, hashLen), Data: data(1, n)}}, api.PutOptions{})
		if err != nil {
			return err
		}
		return res[0].Err
	}
	for _, n := range []int{1, 4095, 4097} {
		err := put(n)
		e.is(err, block.ErrInvalid)
		e.says(err, fmt.Sprint(n), "4096")
	}
	e.ok(put(4096))

	var res block.MatchResult
	err = e.s.Match(e.ctx, 99, hashLen, make([]byte, hashLen), block.MatchOptions{}, &res)
	e.is(err, block.ErrNotFound)
	e.says(err, "99")
	err = e.s.Match(e.ctx, exact.ID, 7, make([]byte, 7), block.MatchOptions{}, &res)
	e.is(err, block.ErrInvalid)
	e.says(err, "7", "8, 16, 20 or 32")
	_, _, err = e.s.List(e.ctx, exact.ID, "not a cursor", 10)
	e.is(err, block.ErrInvalid)
	e.says(err, "not a cursor")
	for _, d := range []block.Descriptor{
		{Name: "", BlockBytes: 1},
		{Name: "a/b", BlockBytes: 1},
		{Name: "none"},
		{Name: "both", BlockBytes: 1, MaxBlockBytes: 1},
		{Name: "big", BlockBytes: block.MaxBlockBytes + 1},
	} {
		_, err := e.s.OpenNamespace(e.ctx, d, 0)
		e.is(err, block.ErrInvalid)
	}
}

func (e *env) says(err error, parts ...string) {
	e.Helper()
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			e.Fatalf("error %q does not say %q", err, p)
		}
	}
}

func testNamespaces(e *env) {
	d := block.Descriptor{
		Name: "b", Model: "llama", Revision: "r1", DType: "bf16", Layout: "NHD", TokensPerBlock: 16, MaxBlockBytes: 65536,
		HashAlgorithm: "sha256", HashSeed: "0", RankLayout: "tp2", KVGroup: "0", Tenant: "t",
	}
	n, err := e.s.OpenNamespace(e.ctx, d, time.Hour)
	e.ok(err)
	if n.ID == 0 || n.Desc != d || n.TTL != time.Hour || n.Created.IsZero() {
		e.Fatalf("opened %+v", n)
	}
	again, err := e.s.OpenNamespace(e.ctx, d, 0)
	e.ok(err)
	byName, err := e.s.Namespace("b")
	e.ok(err)
	byID, err := e.s.NamespaceByID(n.ID)
	e.ok(err)
	for _, got := range []block.Namespace{again, byName, byID} {
		if got.ID != n.ID || got.Desc != d || got.TTL != time.Hour {
			e.Fatalf("found %+v, opened %+v", got, n)
		}
	}
	_, err = e.s.Namespace("nobody")
	e.is(err, block.ErrNotFound)
	e.says(err, "nobody")
	_, err = e.s.NamespaceByID(n.ID + 100)
	e.is(err, block.ErrNotFound)

	a := e.open("a")
	e.put(a, 1, 300, api.PutOptions{}, block.Stored)
	e.put(a, 2, 400, api.PutOptions{}, block.Stored)
	list := e.s.Namespaces()
	if len(list) != 2 || list[0].Desc.Name != "a" || list[1].Desc != d {
		e.Fatalf("namespaces: %+v", list)
	}
	if list[0].Blocks != 2 || list[0].Bytes != 700 || list[1].Blocks != 0 {
		e.Fatalf("namespaces: %+v", list)
	}
	e.put(n, 1, 100, api.PutOptions{}, block.Stored) // the same hash, another namespace
	e.has(n, 1, 100)
	e.has(a, 1, 300)
}

// A known name with another descriptor is refused, naming the field.
func testMismatch(e *env) {
	d := block.Descriptor{Name: "ns", Model: "m", DType: "bf16", BlockBytes: 4096}
	_, err := e.s.OpenNamespace(e.ctx, d, 0)
	e.ok(err)
	other := d
	other.DType = "fp8"
	_, err = e.s.OpenNamespace(e.ctx, other, 0)
	e.is(err, block.ErrMismatch)
	var m *block.Mismatch
	if !errors.As(err, &m) || *m != (block.Mismatch{Name: "ns", Field: "dtype", Have: "bf16", Want: "fp8"}) {
		e.Fatalf("mismatch %+v of %v", m, err)
	}
	other = d
	other.BlockBytes = 8192
	_, err = e.s.OpenNamespace(e.ctx, other, 0)
	if !errors.As(err, &m) || m.Field != "block_bytes" || m.Have != "4096" || m.Want != "8192" {
		e.Fatalf("mismatch %+v of %v", m, err)
	}
}

func testLeases(e *env) {
	ns := e.open("ns")
	for i := range 3 {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	if l := e.match(ns, block.MatchOptions{Lease: time.Hour}, hash(9, hashLen)).Lease; l.ID != 0 {
		e.Fatalf("a lease of nothing: %+v", l)
	}
	l := e.match(ns, block.MatchOptions{Lease: time.Hour}, hashes(0, 5)...).Lease
	if l.ID == 0 || l.Count != 3 || l.Left <= 0 || l.Left > time.Hour {
		e.Fatalf("lease %+v of 3 blocks for an hour", l)
	}
	if n := e.s.Stats().Leases; n != 1 {
		e.Fatalf("%d leases are held, want 1", n)
	}
	r, err := e.s.RenewLease(l.ID, 2*time.Hour)
	e.ok(err)
	if r.ID != l.ID || r.Count != 3 || r.Left <= time.Hour || r.Left > 2*time.Hour {
		e.Fatalf("renewed %+v to %+v", l, r)
	}
	e.ok(e.s.ReleaseLease(l.ID))
	e.is(e.s.ReleaseLease(l.ID), block.ErrLeaseExpired)
	_, err = e.s.RenewLease(l.ID, time.Hour)
	e.is(err, block.ErrLeaseExpired)
	if n := e.s.Stats().Leases; n != 0 {
		e.Fatalf("%d leases are held, want none", n)
	}
}

// A conversation's lease is not longer than it asks for, and outlives its pauses.
func testConversations(e *env) {
	ns := e.open("ns")
	e.put(ns, 0, 1000, api.PutOptions{}, block.Stored)
	for i := range 10 {
		o := block.MatchOptions{Lease: time.Hour, Conversation: fmt.Sprint("run ", i%2), Class: 3}
		l := e.match(ns, o, hash(0, hashLen)).Lease
		if l.ID == 0 || l.Count != 1 || l.Left <= 0 || l.Left > time.Hour {
			e.Fatalf("request %d: lease %+v", i, l)
		}
		e.ok(e.s.ReleaseLease(l.ID))
	}
	if l := e.match(ns, block.MatchOptions{Conversation: "run 0"}, hash(0, hashLen)).Lease; l.ID != 0 {
		e.Fatalf("a lease that was not asked for: %+v", l)
	}
}

func testLeaseExpires(e *env) {
	ns := e.open("ns")
	e.put(ns, 0, 1000, api.PutOptions{}, block.Stored)
	l := e.match(ns, block.MatchOptions{Lease: 20 * time.Millisecond}, hash(0, hashLen)).Lease
	e.eventually("the lease has expired", func() bool { return e.s.Stats().Leases == 0 })
	_, err := e.s.RenewLease(l.ID, time.Hour)
	e.is(err, block.ErrLeaseExpired)
	e.has(ns, 0, 1000)
}

// Leases and reservations end with the session that owns them, and only those.
func testSessionEnds(e *env) {
	ns := e.open("ns")
	e.put(ns, 0, 1000, api.PutOptions{}, block.Stored)
	lost := e.match(ns, block.MatchOptions{Lease: time.Hour, Session: 7}, hash(0, hashLen)).Lease
	kept := e.match(ns, block.MatchOptions{Lease: time.Hour, Session: 8}, hash(0, hashLen)).Lease
	r, _, err := e.s.Reserve(e.ctx, ns.ID, hashLen, hash(1, hashLen), 1000, block.PutOptions{Durable: block.G2, Session: 7})
	e.ok(err)
	e.s.EndSession(7)
	e.eventually("the session's lease and reservation are gone", func() bool {
		st := e.s.Stats()
		return st.Leases == 1 && st.Reservations == 0
	})
	e.is(e.s.ReleaseLease(lost.ID), block.ErrLeaseExpired)
	e.is(e.s.Fill(e.ctx, r.ID, 0, data(1, 1000)), block.ErrLeaseExpired)
	e.ok(e.s.ReleaseLease(kept.ID))
	e.has(ns, 0, 1000)
}

// Every key has one progress, in order.
func testPrefetch(e *env) {
	ns := e.open("ns")
	for _, i := range []int{0, 1, 3} {
		e.put(ns, i, 1000, api.PutOptions{}, block.Stored)
	}
	var got []block.Progress
	e.ok(e.s.Prefetch(e.ctx, ns.ID, hashLen, pack(hashLen, hashes(0, 5)...), block.PrefetchOptions{ID: "r1", Priority: block.MaxPriority, Within: time.Hour}, func(p block.Progress) error {
		got = append(got, p)
		return nil
	}))
	want := []block.MissReason{block.Hit, block.Hit, block.MissAbsent, block.Hit, block.MissAbsent}
	if len(got) != len(want) {
		e.Fatalf("progress of %d keys: %+v", len(want), got)
	}
	for i, p := range got {
		if p.Index != i || p.Reason != want[i] || p.Reason == block.Hit && p.Tier != block.G2 {
			e.Fatalf("progress %d: %+v, want %v", i, p, want[i])
		}
	}
	e.is(e.s.CancelPrefetch("r1"), block.ErrNotFound) // it is over
	e.is(e.s.Prefetch(e.ctx, ns.ID, hashLen, pack(hashLen, hashes(0, 1)...), block.PrefetchOptions{Priority: block.MaxPriority + 1}, nil), block.ErrInvalid)
	stop := errors.New("enough")
	err := e.s.Prefetch(e.ctx, ns.ID, hashLen, pack(hashLen, hashes(0, 5)...), block.PrefetchOptions{}, func(block.Progress) error { return stop })
	e.is(err, stop)
}

// A prefetch ends when its request is cancelled or its caller goes.
func testCancelPrefetch(e *env) {
	ns := e.open("ns")
	keys := pack(hashLen, hashes(0, 60_000)...)
	calls := 0
	var cancelErr error
	err := e.s.Prefetch(e.ctx, ns.ID, hashLen, keys, block.PrefetchOptions{ID: "r1"}, func(block.Progress) error {
		if calls == 0 {
			cancelErr = e.s.CancelPrefetch("r1")
		}
		calls++
		return nil
	})
	// Behind a connection the server may be done before the cancel arrives, and
	// says so; then all progress is told.
	switch {
	case cancelErr == nil:
		e.is(err, context.Canceled)
	case errors.Is(cancelErr, block.ErrNotFound):
		e.ok(err)
		if calls != 60_000 {
			e.Fatalf("%d of 60000 keys were told", calls)
		}
	default:
		e.Fatal(cancelErr)
	}
	e.is(e.s.CancelPrefetch("nobody"), block.ErrNotFound)

	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	err = e.s.Prefetch(ctx, ns.ID, hashLen, keys, block.PrefetchOptions{ID: "r2"}, func(block.Progress) error {
		cancel()
		return ctx.Err()
	})
	e.is(err, context.Canceled)
	e.eventually("the request id is free", func() bool {
		return errors.Is(e.s.CancelPrefetch("r2"), block.ErrNotFound)
	})
}
