package tiers_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// The operations that read blocks, or keep them where they are.

// get reads some keys of anybody's, whole or in part.
func (w *modelWorker) get(r *rand.Rand) {
	var as []asked
	for range 1 + r.IntN(4) {
		a := w.ask(r.IntN(modelKeys))
		if r.IntN(3) == 0 {
			a.want.Offset = int64(r.IntN(300))
			a.want.Length = int64(r.IntN(200))
		}
		as = append(as, a)
	}
	want := make([]block.Wanted, len(as))
	for j := range as {
		want[j] = as[j].want
	}
	ctx, cancel := w.calls()
	defer cancel()
	o := block.GetOptions{NoPromote: r.IntN(3) == 0, Verify: r.IntN(2) == 0, Pieces: r.IntN(2) == 0}
	next := 0
	var parts []byte
	err := w.c.Get(ctx, w.ns[0].ID, hashLen, want, o, func(j int, p block.Payload) error {
		if j != next || p.Reason == block.Hit && p.At != int64(len(parts)) || p.More && (p.Reason != block.Hit || !o.Pieces) {
			return fmt.Errorf("key %d of the get at %d, %v, more: %v; want %d at %d", j, p.At, p.Reason, p.More, next, len(parts))
		}
		if p.Bytes = append(parts, p.Bytes...); p.More {
			parts = p.Bytes
			return nil
		}
		parts = nil
		next++
		w.served(p.Reason)
		w.check(as[j], p)
		return nil
	})
	if err != nil || next != len(as) {
		w.errorf("get: %d of %d, %v", next, len(as), err)
	}
}

// lease leases some keys and reads them under pressure; nobody else deletes them
// meanwhile. It ends the lease in one of many ways, late or twice.
func (w *modelWorker) lease(r *rand.Rand) {
	is := w.ours(r, 1+r.IntN(3))
	var hs []byte
	for _, i := range is {
		hs = append(hs, pack(hashOf(i))...)
	}
	ctx, cancel := w.calls()
	defer cancel()
	var res block.MatchResult
	o := block.MatchOptions{All: true, Lease: time.Minute, Session: w.session()}
	if err := w.c.Match(ctx, w.ns[0].ID, hashLen, hs, o, &res); err != nil {
		w.errorf("match %v: %v", is, err)
		return
	}
	if res.Lease.ID == 0 {
		return
	}
	for range 2 {
		w.putKey(w.mine(r), r)
		w.get(r)
	}
	if l, err := w.c.RenewLease(res.Lease.ID, time.Minute); err != nil || l.ID != res.Lease.ID {
		w.errorf("renew the lease of %v: %+v, %v", is, l, err)
	}
	for j, i := range is {
		if res.Blocks[j].State == block.Resident && !mortal(i) {
			w.must(i, "leased")
		}
	}
	if r.IntN(4) == 0 {
		w.deleteKey(is[0])
	}
	late := false
	if r.IntN(3) == 0 {
		w.c.EndSession(w.session())
		late = w.conf.grpc // the server notices a little later
	} else if err := w.c.ReleaseLease(res.Lease.ID); err != nil {
		w.errorf("release of keys %v: %v", is, err)
	}
	if err := w.c.ReleaseLease(res.Lease.ID); !errors.Is(err, block.ErrLeaseExpired) && !(late && err == nil) {
		w.errorf("second release of keys %v: %v", is, err)
	}
}

// lend borrows some keys and reads them in place, under pressure and when one is
// deleted; nobody else deletes them meanwhile.
func (w *modelWorker) lend(r *rand.Rand) {
	var as []asked
	var hs []byte
	for _, i := range w.ours(r, 1+r.IntN(3)) {
		as = append(as, w.ask(i))
		hs = append(hs, pack(hashOf(i))...)
	}
	ctx, cancel := w.calls()
	defer cancel()
	o := block.GetOptions{NoPromote: r.IntN(4) == 0, Verify: r.IntN(2) == 0}
	session := 1000 + w.session() // not that of the worker's connection
	loans, l, err := w.s.Lend(ctx, w.ns[0].ID, hashLen, hs, o, time.Minute, session)
	if err != nil {
		w.errorf("lend: %v", err)
		return
	}
	lent := 0
	check := func() {
		for j, v := range loans {
			w.check(as[j], block.Payload{Reason: v.Reason, Tier: v.Tier, Total: v.Len, Sum: v.Sum, Bytes: v.Mem})
		}
	}
	check()
	for j := range loans {
		as[j].until = 0 // it is lent beyond its time
		if loans[j].Reason == block.Hit {
			lent++
		}
	}
	if l.Count != lent || (l.ID != 0) != (lent > 0) {
		w.errorf("%d keys are lent under %+v", lent, l)
	}
	for range 2 {
		w.putKey(w.mine(r), r)
		w.get(r)
	}
	for j, a := range as {
		if loans[j].Reason == block.Hit && !mortal(a.i) {
			w.must(a.i, "lent")
		}
	}
	if r.IntN(3) == 0 {
		w.deleteKey(as[0].i)
		w.putKey(as[0].i, r)
	}
	check()
	if r.IntN(2) == 0 || l.ID == 0 {
		w.s.EndSession(session)
	} else if err := w.s.ReleaseLease(l.ID); err != nil {
		w.errorf("release of a loan: %v", err)
	}
	if err := w.s.ReleaseLease(l.ID); !errors.Is(err, block.ErrLeaseExpired) {
		w.errorf("second release of a loan: %v", err)
	}
}

// hold keeps the bytes of a block while it and others are put, deleted and read.
func (w *modelWorker) hold(r *rand.Rand) {
	i := w.mine(r)
	a := w.ask(i)
	ctx, cancel := w.calls()
	defer cancel()
	err := w.c.Get(ctx, w.space(i).ID, hashLen, []block.Wanted{a.want}, block.GetOptions{NoPromote: r.IntN(3) == 0}, func(_ int, p block.Payload) error {
		w.check(a, p)
		if p.Reason != block.Hit {
			return nil
		}
		version := int64(p.Total) - int64(w.len(i, 0))
		if r.IntN(2) == 0 {
			w.deleteKey(i)
			w.putKey(i, r)
		}
		for range 3 {
			w.putKey(w.mine(r), r)
		}
		if !bytes.Equal(p.Bytes, w.data(i, version)) {
			w.errorf("key %d: the bytes that a get handed out from %v have changed", i, p.Tier)
		}
		return nil
	})
	if err != nil {
		w.errorf("get %d: %v", i, err)
	}
}

// prefetch brings keys up, and may be cancelled.
func (w *modelWorker) prefetch(r *rand.Rand) {
	var hs []byte
	for range 5 {
		hs = append(hs, pack(hashOf(r.IntN(modelKeys)))...)
	}
	ctx, cancel := w.calls()
	defer cancel()
	id := ""
	o := block.PrefetchOptions{Priority: uint8(r.IntN(block.MaxPriority + 1)), Within: time.Duration(r.IntN(2)) * time.Millisecond}
	cancelled := make(chan error, 1)
	if r.IntN(3) == 0 {
		id = fmt.Sprintf("worker %d", w.id)
		o.ID = id
		go func() { cancelled <- w.c.CancelPrefetch(id) }()
	}
	n := 0
	err := w.c.Prefetch(ctx, w.ns[0].ID, hashLen, hs, o, func(p block.Progress) error {
		if p.Index != n {
			return fmt.Errorf("progress of %d, want %d", p.Index, n)
		}
		n++
		return nil
	})
	if id == "" {
		if err != nil || n != 5 {
			w.errorf("prefetch: %d of 5, %v", n, err)
		}
		return
	}
	switch cerr := <-cancelled; {
	case cerr != nil && !errors.Is(cerr, block.ErrNotFound):
		w.errorf("cancel: %v", cerr)
	case err != nil && cerr != nil:
		w.errorf("prefetch that nobody cancelled: %v", err)
	case err == nil && n != 5:
		w.errorf("prefetch: %d of 5", n)
	}
}

func (w *modelWorker) list(r *rand.Rand) {
	var oldest [modelKeys]int64
	for i := range oldest {
		oldest[i] = w.keys[i].version.Load()
	}
	ctx, cancel := w.calls()
	defer cancel()
	limit := 8 + r.IntN(64)
	for cursor := ""; ; {
		entries, next, err := w.c.List(ctx, w.ns[0].ID, cursor, limit)
		if err != nil || len(entries) > limit {
			w.errorf("list: %d of at most %d, %v", len(entries), limit, err)
			return
		}
		for _, e := range entries {
			i := keyOfHash(e.Hash)
			if i < 0 || i >= modelKeys {
				w.errorf("%s is listed, and nobody put it", e.Hash.Hex(hashLen))
			} else if v := int64(e.Len) - int64(w.len(i, 0)); v < oldest[i] || v > w.keys[i].version.Load() {
				w.errorf("key %d is listed with version %d, at least %d is wanted", i, v, oldest[i])
			}
		}
		if cursor = next; cursor == "" {
			return
		}
	}
}

// pin pins a key or lets it go. What the worker has pinned is there meanwhile.
func (w *modelWorker) pin(r *rand.Rand) {
	ctx, cancel := w.calls()
	defer cancel()
	i := w.mine(r)
	k := &w.keys[i]
	if k.pinned {
		w.must(i, "pinned")
		if n, err := w.s.Unpin(ctx, w.space(i).ID, hashLen, pack(hashOf(i))); n > 1 || err != nil && !w.conf.shaky {
			w.errorf("unpin %d: %d, %v", i, n, err)
		}
		k.pinned = false
		return
	}
	errs, err := w.s.Pin(ctx, w.space(i).ID, hashLen, pack(hashOf(i)))
	switch {
	case err != nil:
		w.errorf("pin %d: %v", i, err)
	case errs[0] == nil:
		k.pinned = !mortal(i)
	case errors.Is(errs[0], block.ErrNotFound), errors.Is(errs[0], block.ErrNoSpace):
	case w.conf.rough() && errors.Is(errs[0], block.ErrUnavailable):
	default:
		w.errorf("pin %d: %v", i, errs[0])
	}
}
