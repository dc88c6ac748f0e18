package tiers_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// TestConflict: a key has one content, wherever it lies.
func TestConflict(t *testing.T) {
	s, _, ns := coldBlocks(t, nil, 1, 3000)
	mustPut(t, s, ns, 2, 3000, block.PutOptions{})
	for i := 1; i <= 2; i++ {
		e := tiers.EntryOf(s, keyOf(ns, i))
		for _, c := range []struct {
			n    int64
			flip byte
			want error
		}{{3000, 0, nil}, {3000, 1, block.ErrConflict}, {2999, 0, block.ErrConflict}} {
			sum := e.Sum
			sum[3] ^= c.flip
			err := s.CompareExisting(t.Context(), ns.ID, hashOf(i), c.n, sum, block.PutOptions{})
			if !errors.Is(err, c.want) {
				t.Errorf("block %d with %d bytes, flip %d: %v, want %v", i, c.n, c.flip, err, c.want)
			}
		}
		r, ex, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(i), 2999, block.PutOptions{})
		if err != nil || r.Status != block.Exists || r.ID != 0 || ex.Len != 3000 || ex.Sum != e.Sum {
			t.Errorf("reserve of block %d: %+v, %+v, %v", i, r, ex, err)
		}
	}
	if n := s.Stats().Conflicts; n != 4 {
		t.Errorf("%d conflicts counted, want 4", n)
	}
	wantHit(t, s, ns, 1, 3000)
}

// TestDeleteWhileLeased: a deleted block is found no more, its bytes stay under
// those who read them, and nobody gets its slots before they are done.
func TestDeleteWhileLeased(t *testing.T) {
	const size = 1 << 20
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)})
	ns := space(t, s, "a", size)
	mustPut(t, s, ns, 0, size, block.PutOptions{Durable: block.G3})
	l := lease(t, s, ns, 0)
	g2, g3 := placeIn(t, s, ns, 0, block.G2), placeIn(t, s, ns, 0, block.G3)
	err := s.Get(t.Context(), ns.ID, hashLen, []block.Wanted{{Hash: hashOf(0)}}, block.GetOptions{}, func(_ int, p block.Payload) error {
		mustDelete(t, s, ns, 1, 0)
		wantMiss(t, s, ns, 0, block.MissAbsent)
		for i := 1; i <= 50; i++ { // more than both tiers hold
			mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
			for _, pl := range placesOf(t, s, ns, i) {
				if pl.Tier == block.G2 && pl.Place == g2 || pl.Tier == block.G3 && pl.Place == g3 {
					t.Errorf("block %d got a slot in %v that is still read", i, pl.Tier)
				}
			}
		}
		if string(p.Bytes) != string(payload(0, size)) {
			t.Error("the bytes changed under the reader")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	releaseLease(t, s, l)
	wantEmpty(t, s)
}

// TestDeleteIsDurable deletes and puts blocks, durably, without drains: what was
// deleted never comes back, and what was put last is what is found.
func TestDeleteIsDurable(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	durable := block.PutOptions{Durable: block.G3}
	for i := range 40 {
		mustPut(t, s, ns, i, 3000, durable)
	}
	fresh := func(i int) []byte { return payload(1000+i, 2000+i) }
	for i := range 40 {
		switch i % 4 {
		case 0:
			mustDelete(t, s, ns, 1, i)
		case 1: // deleted, put again with other bytes
			mustDelete(t, s, ns, 1, i)
			if err := put(s, ns, i, fresh(i), durable); err != nil {
				t.Fatal(err)
			}
		case 2: // and once more deleted
			mustDelete(t, s, ns, 1, i)
			if err := put(s, ns, i, fresh(i), durable); err != nil {
				t.Fatal(err)
			}
			mustDelete(t, s, ns, 1, i)
		}
	}
	for range 2 {
		s = reopen(t, s, o)
		for i := range 40 {
			switch i % 4 {
			case 0, 2:
				wantMiss(t, s, ns, i, block.MissAbsent)
			case 1:
				if got, p, err := get(s, ns, i, block.GetOptions{}); err != nil || string(got) != string(fresh(i)) {
					t.Errorf("get %d: %v, %v", i, p.Reason, err)
				}
			case 3:
				wantHit(t, s, ns, i, 3000)
			}
		}
	}
	wantEmpty(t, s)
}

// TestDeleteWhileMovingDown deletes blocks whose way to G3 is under way, at each
// of its steps, and puts others in their place.
func TestDeleteWhileMovingDown(t *testing.T) {
	for _, step := range []string{"writing", "committing"} {
		t.Run(step, func(t *testing.T) {
			reached, goOn := make(chan struct{}), make(chan struct{})
			hold := false
			o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), DRAM: 16 << 20}
			o.Agent = agentWith(t, func(b xfer.Backend) xfer.Backend {
				return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
					if hold && op == xfer.Write {
						hold = false
						close(reached)
						<-goOn
					}
				}}
			})
			s := openStore(t, o)
			ns := space(t, s, "a", 1<<20)
			hold = step == "writing"
			release := func() { close(goOn) }
			if !hold {
				release = tiers.HoldCommits(s)
			}
			putDone := make(chan error, 1)
			go func() { putDone <- put(s, ns, 1, payload(1, 3000), block.PutOptions{Durable: block.G3}) }()
			if step == "writing" {
				<-reached
			} else {
				eventually(t, "the record is queued", func() bool {
					e := tiers.EntryOf(s, keyOf(ns, 1))
					return e.Ops > 0 && e.State[1] != 0
				})
			}
			deleted := make(chan error, 1)
			go func() {
				_, err := s.Delete(t.Context(), ns.ID, hashLen, pack(hashOf(1)))
				deleted <- err
			}()
			eventually(t, "the block is gone", func() bool { return tiersOf(t, s, ns, 1) == "" })
			again := make(chan error, 1)
			go func() { again <- put(s, ns, 1, payload(2, 5000), block.PutOptions{Durable: block.G3}) }()
			release()
			if err := <-putDone; err != nil && !errors.Is(err, block.ErrNotFound) {
				t.Errorf("the put that was overtaken by a delete: %v", err)
			}
			if err := <-deleted; err != nil {
				t.Fatal(err)
			}
			if err := <-again; err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if got, p, err := get(s, ns, 1, block.GetOptions{}); err != nil || string(got) != string(payload(2, 5000)) {
					t.Errorf("get: %v, %v", p.Reason, err)
				}
				eventually(t, "one slot is taken", func() bool { return used(s, block.G3) == 5632 })
				s = reopen(t, s, o)
			}
			wantEmpty(t, s)
		})
	}
}

// TestPutWhileMovingUp deletes a block that is being read from G3 and puts
// another in its place.
func TestPutWhileMovingUp(t *testing.T) {
	reached, goOn := make(chan struct{}), make(chan struct{})
	hold := true
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, _ []xfer.Bound) {
			if hold && op == xfer.Read {
				hold = false
				close(reached)
				<-goOn
			}
		}}
	})
	s, _, ns := coldBlocks(t, agent, 1, 3000)
	type answer struct {
		data   []byte
		reason block.MissReason
		err    error
	}
	got := make(chan answer, 1)
	go func() {
		data, p, err := get(s, ns, 1, block.GetOptions{})
		got <- answer{data, p.Reason, err}
	}()
	<-reached
	mustDelete(t, s, ns, 1, 1)
	if err := put(s, ns, 1, payload(2, 5000), block.PutOptions{Durable: block.G3}); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	a := <-got
	if a.err != nil || a.reason == block.Hit && string(a.data) != string(payload(1, 3000)) {
		t.Errorf("the get that was overtaken by a delete: %v, %v, %d bytes", a.reason, a.err, len(a.data))
	}
	if data, p, err := get(s, ns, 1, block.GetOptions{}); err != nil || string(data) != string(payload(2, 5000)) {
		t.Errorf("get: %v, %v", p.Reason, err)
	}
	wantEmpty(t, s)
}

// TestClear empties a namespace for good, and only that one; what is put later
// stays.
func TestClear(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	a, b := space(t, s, "a", 1<<20), space(t, s, "b", 1<<20)
	durable := block.PutOptions{Durable: block.G3}
	for i := range 20 {
		mustPut(t, s, a, i, 3000, durable)
		mustPut(t, s, b, i, 4000, durable)
	}
	l := lease(t, s, a, 3, 4)
	var during []uint64 // reserved before, committed after
	for i := 100; i < 102; i++ {
		r, _, err := s.Reserve(t.Context(), a.ID, hashLen, hashOf(i), 3000, durable)
		if err == nil {
			err = s.Fill(t.Context(), r.ID, 0, payload(i, 3000))
		}
		if err != nil {
			t.Fatal(err)
		}
		during = append(during, r.ID)
	}
	n, err := s.Clear(t.Context(), a.ID)
	if err != nil || n != 20 {
		t.Fatalf("clear: %d, %v", n, err)
	}
	for _, r := range s.Commit(t.Context(), during) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	mustPut(t, s, a, 5, 3000, durable)
	releaseLease(t, s, l)
	for range 3 {
		for i := range 20 {
			wantHit(t, s, b, i, 4000)
			if i != 5 {
				wantMiss(t, s, a, i, block.MissAbsent)
			}
		}
		wantHit(t, s, a, 5, 3000)
		wantHit(t, s, a, 100, 3000)
		wantHit(t, s, a, 101, 3000)
		s = reopen(t, s, o)
	}
	if n, err := s.Namespace("a"); err != nil || n.Epoch == a.Epoch {
		t.Errorf("epoch %d, %v, was %d", n.Epoch, err, a.Epoch)
	}
	wantEmpty(t, s)
}

// TestTimeToLive: a block past its time is a miss, also after a restart, and its
// room comes back without anybody asking for it.
func TestTimeToLive(t *testing.T) {
	t.Parallel()
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	putBriefly(t, s, ns, 1, 3000)
	putBriefly(t, s, ns, 2, 3000)
	mustPut(t, s, ns, 3, 3000, block.PutOptions{Durable: block.G3, TTL: time.Hour})
	mustPut(t, s, ns, 4, 3000, block.PutOptions{Durable: block.G3})
	eventually(t, "block 1 is swept", func() bool { return used(s, block.G3) <= 3*3584 && used(s, block.G2) <= 3*3584 })
	wantMiss(t, s, ns, 1, block.MissAbsent)
	s = reopen(t, s, o)
	eventually(t, "block 2 is swept", func() bool { return used(s, block.G3) == 2*3584 })
	wantMiss(t, s, ns, 2, block.MissAbsent)
	putBriefly(t, s, ns, 5, 3000)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second) // its time passes while nobody looks
	s = openStore(t, o)
	wantMiss(t, s, ns, 5, block.MissAbsent)
	wantHit(t, s, ns, 3, 3000)
	wantHit(t, s, ns, 4, 3000)
	wantEmpty(t, s)
}

// TestNamespaceTTL: blocks without a time of their own have the namespace's.
func TestNamespaceTTL(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: "a", MaxBlockBytes: 1 << 20}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	mustPut(t, s, ns, 2, 3000, block.PutOptions{TTL: time.Hour})
	eventually(t, "block 1 is swept", func() bool { return used(s, block.G2) == 3584 })
	wantHit(t, s, ns, 2, 3000)
}

// TestReservations: what is reserved comes back when it is aborted, when its
// session ends, and when it is left alone.
func TestReservations(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20, MaxReservations: 3})
	ns := space(t, s, "a", 1<<20)
	reserve := func(i int, session uint64) uint64 {
		t.Helper()
		r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(i), 3000, block.PutOptions{Session: session})
		if err != nil {
			t.Fatal(err)
		}
		return r.ID
	}
	a, _, _ := reserve(1, 7), reserve(2, 7), reserve(3, 8)
	if _, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(4), 3000, block.PutOptions{}); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("a fourth reservation: %v, want ErrNoSpace", err)
	}
	match := func() (states string) {
		var res block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, pack(hashOf(1), hashOf(2), hashOf(3)), block.MatchOptions{All: true}, &res); err != nil {
			t.Fatal(err)
		}
		for _, b := range res.Blocks {
			states += string("-pR"[b.State])
		}
		return states
	}
	if got := match(); got != "ppp" {
		t.Errorf("states %q of reserved blocks", got)
	}
	wantMiss(t, s, ns, 1, block.MissPending)
	s.EndSession(7)
	if got := match(); got != "--p" {
		t.Errorf("states %q after the session ended", got)
	}
	if err := s.Fill(t.Context(), a, 0, payload(1, 3000)); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("fill after the session ended: %v", err)
	}
	if res := s.Commit(t.Context(), []uint64{a}); !errors.Is(res[0].Err, block.ErrLeaseExpired) {
		t.Errorf("commit after the session ended: %v", res[0].Err)
	}
	s.EndSession(8)
	b := reserve(5, 0)
	s.Abort([]uint64{b, b, 99})
	wantEmpty(t, s)

	s = openStore(t, tiers.Options{DRAM: 16 << 20, ReserveTTL: 100 * time.Millisecond})
	ns = space(t, s, "a", 1<<20)
	reserve(1, 7)
	eventually(t, "it has run out", func() bool { return match() == "---" && used(s, block.G2) == 0 })
	wantEmpty(t, s)
}

// TestLeaseExpires: a lease that runs out lets its block go.
func TestLeaseExpires(t *testing.T) {
	t.Parallel()
	s := openStore(t, tiers.Options{DRAM: 16 << 20})
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{})
	var res block.MatchResult
	if err := s.Match(t.Context(), ns.ID, hashLen, pack(hashOf(1)), block.MatchOptions{Lease: time.Minute}, &res); err != nil {
		t.Fatal(err)
	}
	if e := tiers.EntryOf(s, keyOf(ns, 1)); e.Refs != 1 {
		t.Errorf("%d references", e.Refs)
	}
	if _, err := s.RenewLease(res.Lease.ID, 100*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lease is over", func() bool { return tiers.EntryOf(s, keyOf(ns, 1)).Refs == 0 })
	if err := s.ReleaseLease(res.Lease.ID); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("release: %v", err)
	}
	if _, err := s.RenewLease(res.Lease.ID, time.Second); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("renew: %v", err)
	}
}

// TestMatchTouchesNoDevice: a lookup of blocks in G3 transfers nothing.
func TestMatchTouchesNoDevice(t *testing.T) {
	transfers := 0
	agent := agentWith(t, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(xfer.Op, []xfer.Bound, []xfer.Bound) { transfers++ }}
	})
	s, _, ns := coldBlocks(t, agent, 10, 3000)
	var hs []byte
	for i := 1; i <= 12; i++ {
		hs = append(hs, pack(hashOf(i))...)
	}
	for _, o := range []block.MatchOptions{{}, {All: true}, {Lease: time.Minute}} {
		var res block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, hs, o, &res); err != nil || res.Prefix != 10 || res.Blocks[0].Tier != block.G3 {
			t.Errorf("match %+v: prefix %d, %v", o, res.Prefix, err)
		}
	}
	if _, _, err := s.List(t.Context(), ns.ID, "", 100); err != nil {
		t.Error(err)
	}
	if transfers != 0 {
		t.Errorf("%d transfers", transfers)
	}
	wantHit(t, s, ns, 1, 3000)
	if transfers != 1 {
		t.Errorf("%d transfers of one get: the spy is blind", transfers)
	}
}

// TestDurableWaitIsBounded: a commit answers by its deadline although the
// catalog does not, and the block is there.
func TestDurableWaitIsBounded(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20, Slabs: slabIn(t, 32<<20)})
	ns := space(t, s, "a", 1<<20)
	r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(1), 3000, block.PutOptions{Durable: block.G3})
	if err == nil {
		err = s.Fill(t.Context(), r.ID, 0, payload(1, 3000))
	}
	if err != nil {
		t.Fatal(err)
	}
	release := tiers.HoldCommits(s)
	ctx, expire := expiring(t)
	answered := make(chan error, 1)
	go func() { answered <- s.Commit(ctx, []uint64{r.ID})[0].Err }()
	eventually(t, "the record is queued", func() bool {
		e := tiers.EntryOf(s, keyOf(ns, 1))
		return e.Ops > 0 && e.State[1] != 0
	})
	expire()
	if err := <-answered; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("commit: %v", err)
	}
	wantHit(t, s, ns, 1, 3000)
	release()
	eventually(t, "it is durable", func() bool { return tiersOf(t, s, ns, 1) == "g2g3" })
	wantEmpty(t, s)
}

// TestRecordOfAnOldEpoch: a record that a clear did not reach, since it was
// committed later, stands for nothing when the store is opened.
func TestRecordOfAnOldEpoch(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 32<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	cat := tiers.Catalog(s)
	rec, there, err := cat.Get(keyOf(ns, 1), hashLen)
	if err != nil || !there {
		t.Fatalf("no record: %v", err)
	}
	if _, err := s.Clear(t.Context(), ns.ID); err != nil {
		t.Fatal(err)
	}
	b := cat.NewBatch()
	b.Put(&rec)
	if err := cat.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s, o)
	wantMiss(t, s, ns, 1, block.MissAbsent)
	eventually(t, "the record is dropped", func() bool {
		_, there, err := tiers.Catalog(s).Get(keyOf(ns, 1), hashLen)
		return !there && err == nil
	})
	wantEmpty(t, s)
}

// TestTwoRecordsForOneSlot: one of two blocks that claim a place keeps it, and
// nobody gets wrong bytes.
func TestTwoRecordsForOneSlot(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 32<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, 3000, block.PutOptions{Durable: block.G3})
	mustPut(t, s, ns, 3, 3000, block.PutOptions{Durable: block.G3, Parent: hashOf(1), HasParent: true})
	cat := tiers.Catalog(s)
	rec, _, err := cat.Get(keyOf(ns, 1), hashLen)
	if err != nil {
		t.Fatal(err)
	}
	rec.Key.Hash, rec.Parent, rec.HasParent = hashOf(2), hashOf(3), true
	b := cat.NewBatch()
	b.Put(&rec)
	if err := cat.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s, o)
	for i := 1; i <= 2; i++ {
		got, p, err := get(s, ns, i, block.GetOptions{})
		if err != nil || p.Reason == block.Hit && (i == 2 || string(got) != string(payload(i, 3000))) {
			t.Errorf("get %d: %v, %v", i, p.Reason, err)
		}
	}
	wantHit(t, s, ns, 3, 3000)
	eventually(t, "one slot is free", func() bool { return used(s, block.G3) <= 2*3584 })
	wantEmpty(t, s)
}
