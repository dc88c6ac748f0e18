package tiers_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/backends/mem"
	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// slabDataAt is where the slots of a slab begin.
const slabDataAt = 1 << 20

// agentWith is an agent whose file backend is wrapped.
func agentWith(t testing.TB, wrap func(xfer.Backend) xfer.Backend) *xfer.Agent {
	t.Helper()
	a, err := xfer.NewAgent("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	p, err := posix.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []xfer.Backend{mem.New(), wrap(p)} {
		if err := a.AddBackend(b); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// spy calls before ahead of each transfer of a backend.
type spy struct {
	xfer.Backend
	before func(op xfer.Op, local, remote []xfer.Bound)
}

type spied struct {
	xfer.Prepared
	op            xfer.Op
	local, remote []xfer.Bound
}

func (s spy) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	p, err := s.Backend.Prepare(op, local, remote)
	if err != nil {
		return nil, err
	}
	return spied{p, op, local, remote}, nil
}

func (s spy) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	v := p.(spied)
	s.before(v.op, v.local, v.remote)
	return s.Backend.Transfer(ctx, v.Prepared, done)
}

func (s spy) Release(p xfer.Prepared) { s.Backend.Release(p.(spied).Prepared) }

// eventually waits until ok is true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited in vain until %s", what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// expiring is a context that is past its deadline when the test says so, however slow
// the machine is.
func expiring(t testing.TB) (ctx context.Context, expire func()) {
	x := &expirable{Context: t.Context(), over: make(chan struct{})}
	return x, sync.OnceFunc(func() { close(x.over) })
}

type expirable struct {
	context.Context
	over chan struct{}
}

func (x *expirable) Done() <-chan struct{} { return x.over }

func (x *expirable) Err() error {
	select {
	case <-x.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// patiently makes a call with a deadline, and with longer ones while done is false: on
// a machine that is busy a short one may be over before the call has begun.
func patiently(t testing.TB, d time.Duration, call func(ctx context.Context) (done bool)) {
	t.Helper()
	for ; !call(within(t, d)); d *= 2 {
		if d > 10*time.Second {
			t.Fatalf("it is not so with %v either", d)
		}
	}
}

// putBriefly puts block i in G3 with a time to live of a second, which may be over
// before the put is answered.
func putBriefly(t testing.TB, s *tiers.Store, ns block.Namespace, i, n int) {
	t.Helper()
	if err := put(s, ns, i, payload(i, n), block.PutOptions{Durable: block.G3, TTL: time.Second}); err != nil && !errors.Is(err, block.ErrNotFound) {
		t.Fatalf("put %d: %v", i, err)
	}
}

// mustPut puts block i with its payload of n bytes.
func mustPut(t testing.TB, s *tiers.Store, ns block.Namespace, i, n int, o block.PutOptions) {
	t.Helper()
	if err := put(s, ns, i, payload(i, n), o); err != nil {
		t.Fatalf("put %d: %v", i, err)
	}
}

// wantHit wants block i with its payload of n bytes.
func wantHit(t testing.TB, s *tiers.Store, ns block.Namespace, i, n int) {
	t.Helper()
	got, p, err := get(s, ns, i, block.GetOptions{Verify: true})
	if err != nil || p.Reason != block.Hit || string(got) != string(payload(i, n)) {
		t.Fatalf("get %d: %v from %v, %v; right bytes: %v", i, p.Reason, p.Tier, err, string(got) == string(payload(i, n)))
	}
}

// wantMiss wants block i to be missed for a reason.
func wantMiss(t testing.TB, s *tiers.Store, ns block.Namespace, i int, why block.MissReason) {
	t.Helper()
	_, p, err := get(s, ns, i, block.GetOptions{Verify: true})
	if err != nil || p.Reason != why {
		t.Fatalf("get %d: %v from %v, %v, want %v", i, p.Reason, p.Tier, err, why)
	}
}

func mustDelete(t testing.TB, s *tiers.Store, ns block.Namespace, there int, is ...int) {
	t.Helper()
	var hs []byte
	for _, i := range is {
		hs = append(hs, pack(hashOf(i))...)
	}
	n, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, hs)
	if err != nil || n != there {
		t.Fatalf("delete %v: %d, %v, want %d", is, n, err, there)
	}
}

// lease leases blocks for a minute.
func lease(t testing.TB, s *tiers.Store, ns block.Namespace, is ...int) block.Lease {
	t.Helper()
	var hs []byte
	for _, i := range is {
		hs = append(hs, pack(hashOf(i))...)
	}
	var res block.MatchResult
	if err := s.Match(t.Context(), ns.ID, hashLen, hs, block.MatchOptions{All: true, Lease: time.Minute}, &res); err != nil {
		t.Fatal(err)
	}
	if res.Lease.Count != len(is) {
		t.Fatalf("lease of %v: %+v", is, res)
	}
	return res.Lease
}

func releaseLease(t testing.TB, s *tiers.Store, l block.Lease) {
	t.Helper()
	if err := s.ReleaseLease(l.ID); err != nil {
		t.Fatal(err)
	}
}

// tiersOf says where block i can be read.
func tiersOf(t testing.TB, s *tiers.Store, ns block.Namespace, i int) string {
	t.Helper()
	where := ""
	for _, l := range placesOf(t, s, ns, i) {
		where += l.Tier.String()
	}
	return where
}

func placesOf(t testing.TB, s *tiers.Store, ns block.Namespace, i int) []block.Located {
	t.Helper()
	all, err := s.Locate(t.Context(), ns.ID, hashLen, pack(hashOf(i)))
	if err != nil {
		t.Fatal(err)
	}
	return all[0]
}

func placeIn(t testing.TB, s *tiers.Store, ns block.Namespace, i int, tier block.TierID) block.Place {
	t.Helper()
	for _, l := range placesOf(t, s, ns, i) {
		if l.Tier == tier {
			return l.Place
		}
	}
	t.Fatalf("block %d is not in %v", i, tier)
	return 0
}

func keyOf(ns block.Namespace, i int) block.Key { return block.Key{NS: ns.ID, Hash: hashOf(i)} }

// used is the bytes that the slots of a tier take.
func used(s *tiers.Store, id block.TierID) int64 {
	for _, t := range s.Stats().Tiers {
		if t.Tier == id {
			return t.Used
		}
	}
	return -1
}

// wantEmpty deletes all blocks and wants every counter to be back at zero.
func wantEmpty(t testing.TB, s *tiers.Store) {
	t.Helper()
	for _, n := range s.Namespaces() {
		if _, err := s.Clear(within(t, 30*time.Second), n.ID); err != nil {
			t.Fatal(err)
		}
	}
	empty := func() error {
		st := s.Stats()
		if st.Blocks != 0 || st.Reservations != 0 || st.Leases != 0 {
			return errors.New("blocks, reservations or leases are left")
		}
		if st.Pinned != 0 || st.PinnedBytes != 0 || tiers.PinnedSlots(s) != 0 {
			return errors.New("pins are counted")
		}
		for _, n := range s.Namespaces() {
			if n.Blocks != 0 || n.Bytes != 0 {
				return errors.New("a namespace counts blocks or bytes")
			}
		}
		for _, tr := range st.Tiers {
			if tr.Used != 0 || tr.Blocks != 0 || tr.Payload != 0 {
				return errors.New(tr.Tier.String() + " counts slots, blocks or bytes")
			}
		}
		if tiers.TableLen(s) != 0 {
			return errors.New("the table has entries")
		}
		return nil
	}
	deadline := time.Now().Add(10 * time.Second)
	for empty() != nil && time.Now().Before(deadline) {
		time.Sleep(2 * time.Millisecond) // transfers under way end by themselves
	}
	if err := empty(); err != nil {
		t.Errorf("everything is deleted, but %v: %d entries, namespaces %+v, stats %+v", err, tiers.TableLen(s), s.Namespaces(), s.Stats())
	}
}

// reopen closes a store without draining it and opens it again.
func reopen(t testing.TB, s *tiers.Store, o tiers.Options) *tiers.Store {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return openStore(t, o)
}

// inFile changes bytes of a slab's slots behind the store's back. Who only looks writes
// nothing: what the store has written meanwhile stays.
func inFile(t testing.TB, path string, off int64, n int, change func(b []byte)) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, n)
	if _, err := f.ReadAt(b, slabDataAt+off); err != nil {
		t.Fatal(err)
	}
	was := bytes.Clone(b)
	if change(b); bytes.Equal(b, was) {
		return
	}
	if _, err := f.WriteAt(b, slabDataAt+off); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// damageG2 flips a byte of a block in memory.
func damageG2(t testing.TB, s *tiers.Store, ns block.Namespace, i int) {
	t.Helper()
	err := s.Get(t.Context(), ns.ID, hashLen, []block.Wanted{{Hash: hashOf(i)}}, block.GetOptions{}, func(_ int, p block.Payload) error {
		if p.Reason != block.Hit || p.Tier != block.G2 {
			t.Fatalf("block %d: %v from %v", i, p.Reason, p.Tier)
		}
		p.Bytes[0] ^= 1
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
