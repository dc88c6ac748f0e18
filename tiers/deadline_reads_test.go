package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/tiers/bucket"
)

// stuckReads is the part of a rig in which the catalog's disk does not answer reads.
type stuckReads struct {
	readsStuck atomic.Bool     // of the catalog's tables
	waiting    atomic.Int64    // reads of them that have waited
	planned    block.Namespace // of a rig with a bucket: one in which plans can be made
}

// newDeadlineRigFor is a rig for a kind of fault.
func newDeadlineRigFor(t *testing.T, kind string) *deadlineRig {
	if kind == "catalogRead" {
		return newFarDeadlineRig(t)
	}
	return newDeadlineRig(t)
}

// newFarDeadlineRig is a rig with a bucket, and a catalog that finds nothing without its
// disk. Blocks 1 and 3 are in G4 only.
func newFarDeadlineRig(t *testing.T) *deadlineRig {
	r := newDeadlineRig(t)
	r.o.Objects, r.o.Cluster = []bucket.Service{newFakeBucket()}, "test"
	r.o.Catalog.CacheBytes = 1
	r.Store = reopen(t, r.Store, r.o)
	var err error
	if r.planned, err = r.OpenNamespace(t.Context(), block.Descriptor{Name: "planned", MaxBlockBytes: 8 << 20, TokensPerBlock: 16}, 0); err != nil {
		t.Fatal(err)
	}
	mustPut(t, r.Store, r.planned, 1, sickBytes, block.PutOptions{Durable: block.G3})
	sendDown(t, r.Store, r.planned, 1)
	sendDown(t, r.Store, r.ns, 1, 3)
	r.Store = reopen(t, r.Store, r.o) // what the catalog had in memory is in its tables
	mustPut(t, r.Store, r.ns, 2, sickBytes, block.PutOptions{})
	return r
}

// readsOf lets reads of the catalog's tables wait while they are stuck.
func (r *deadlineRig) readsOf(op errorfs.Op) error {
	if (op.Kind == errorfs.OpFileRead || op.Kind == errorfs.OpFileReadAt) && r.readsStuck.Load() {
		r.waiting.Add(1)
		<-r.resume
	}
	return nil
}

// deadlineCallsFor are the calls that are made with a kind of fault.
func deadlineCallsFor(kind string) []deadlineCall {
	calls := deadlineCalls()
	if kind != "catalogRead" {
		return calls
	}
	const clients = callBare | callRemote
	plan := &block.PlanOptions{Prefill: block.Prefill{Token: time.Minute}}
	// Those that get by with what is in memory, or are the committer's alone.
	unread := map[string]bool{"Lend": true, "Stats": true, "Unpin": true, "Drain": true}
	for i := range calls {
		calls[i].want = map[string]func(error) bool{}
		if !unread[calls[i].name] {
			calls[i].want[kind] = ranOut
		}
	}
	want := map[string]func(error) bool{kind: ranOut}
	return append(calls,
		deadlineCall{"PutExisting", func(ctx context.Context, r *deadlineRig) error {
			v, _, err := r.by.Reserve(ctx, r.ns.ID, hashLen, hashOf(1), sickBytes, block.PutOptions{})
			if err == nil && v.Status != block.Exists {
				err = fmt.Errorf("status %v", v.Status)
			}
			return err
		}, want, clients},
		deadlineCall{"CompareExisting", func(ctx context.Context, r *deadlineRig) error {
			err := r.CompareExisting(ctx, r.ns.ID, hashOf(1), sickBytes, block.Sum{1}, block.PutOptions{})
			if errors.Is(err, block.ErrConflict) {
				err = nil
			}
			return err
		}, want, callBare},
		deadlineCall{"MatchAll", func(ctx context.Context, r *deadlineRig) error {
			hashes := append(pack(hashOf(99)), pack(hashOf(1))...)
			return r.by.Match(ctx, r.ns.ID, hashLen, hashes, block.MatchOptions{All: true}, new(block.MatchResult))
		}, want, clients},
		deadlineCall{"MatchPlanned", func(ctx context.Context, r *deadlineRig) error {
			return r.by.Match(ctx, r.planned.ID, hashLen, pack(hashOf(1)), block.MatchOptions{Plan: plan}, new(block.MatchResult))
		}, want, clients},
		deadlineCall{"GetPlanned", func(ctx context.Context, r *deadlineRig) error {
			return r.by.Get(ctx, r.planned.ID, hashLen, []block.Wanted{{Hash: hashOf(1)}}, block.GetOptions{Plan: plan}, func(_ int, p block.Payload) error {
				return missed(p.Reason)
			})
		}, want, clients},
		deadlineCall{"ListFar", func(ctx context.Context, r *deadlineRig) error {
			_, _, err := r.by.List(ctx, r.ns.ID, "g4:", 10)
			return err
		}, want, clients},
		deadlineCall{"ListObjects", func(ctx context.Context, r *deadlineRig) error {
			_, _, err := r.ListObjects(ctx, "", 10)
			return err
		}, want, callBare},
		deadlineCall{"ObjectUsage", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.ObjectUsage(ctx)
			return err
		}, want, callBare},
		deadlineCall{"ImportObjects", func(ctx context.Context, r *deadlineRig) error {
			err := r.ImportObjects(ctx, nil)
			for errors.Is(err, block.ErrUnavailable) && ctx.Err() == nil { // one that was given up has not ended
				time.Sleep(time.Millisecond)
				err = r.ImportObjects(ctx, nil)
			}
			return err
		}, want, callBare},
		deadlineCall{"SweepObjects", func(ctx context.Context, r *deadlineRig) error {
			return r.SweepObjects(ctx, nil)
		}, want, callBare},
		// With as many reads under way as there may be.
		deadlineCall{"MatchBehind", func(ctx context.Context, r *deadlineRig) error {
			short, cancel := context.WithTimeout(ctx, deadlineWaits/4)
			defer cancel()
			for range tiers.CatalogReaders {
				go func() {
					_ = r.by.Match(short, r.ns.ID, hashLen, pack(hashOf(1)), block.MatchOptions{}, new(block.MatchResult))
				}()
			}
			<-short.Done()
			return r.by.Match(ctx, r.ns.ID, hashLen, pack(hashOf(1)), block.MatchOptions{}, new(block.MatchResult))
		}, want, callBare},
	)
}

// TestLedgerReadsWithoutGates: while the ledger waits for the catalog's disk before it
// records an object, calls that change the namespace end by their deadlines, and what it
// records then is what is true then.
func TestLedgerReadsWithoutGates(t *testing.T) {
	t.Parallel()
	r := newFarDeadlineRig(t)
	defer r.mend()
	b := r.o.Objects[0].(*fakeBucket)
	mustPut(t, r.Store, r.ns, 5, sickBytes, block.PutOptions{Durable: block.G3})
	r.cool(t, 5)
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "blocks/") {
			r.readsStuck.Store(true)
		}
		return nil
	})
	left := make(chan struct{})
	go func() {
		defer close(left)
		tiers.Evict(r.Store, block.G3, tiers.HandleOf(r.Store, keyOf(r.ns, 5)))
	}()
	eventually(t, "a read waits", func() bool { return r.waiting.Load() > 0 })
	for what, call := range map[string]func(ctx context.Context) error{
		"clear": func(ctx context.Context) error { _, err := r.Clear(ctx, r.ns.ID); return err },
		"pin": func(ctx context.Context) error {
			_, err := r.Pin(ctx, r.ns.ID, hashLen, pack(hashOf(2)))
			return err
		},
	} {
		if err := ends(t, what, func() error { return call(within(t, deadlineWaits)) }); err != nil && !ranOut(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	r.mend()
	<-left
	if _, err := r.Clear(within(t, deadlinePatience), r.ns.ID); err != nil {
		t.Error(err)
	}
	wantMiss(t, r.Store, r.ns, 5, block.MissAbsent)
	wantEmpty(t, r.Store)
}

// TestDrainBesideStuckRead: a drain into objects ends by its deadline while the catalog's
// disk does not answer, and the next one finds what was under way.
func TestDrainBesideStuckRead(t *testing.T) {
	t.Parallel()
	r := &deadlineRig{sickRig: &sickRig{}, resume: make(chan struct{})}
	b := newFakeBucket()
	r.o = farOptions(t, b)
	r.o.Slabs = nil
	r.o.Catalog = &index.CatalogOptions{CacheBytes: 1, FS: errorfs.Wrap(crashableDir(t, r.o.Dir), errorfs.InjectorFunc(r.readsOf))}
	s := openStore(t, r.o)
	ns := space(t, s, "a", 1<<20)
	mustPut(t, s, ns, 1, sickBytes, block.PutOptions{})
	if res, err := s.Drain(within(t, deadlinePatience), nil); err != nil || res.Kept != 1 {
		t.Fatalf("drain: %+v, %v", res, err)
	}
	s = reopen(t, s, r.o)
	mend := sync.OnceFunc(func() {
		r.readsStuck.Store(false)
		close(r.resume)
	})
	defer mend()
	mustPut(t, s, ns, 2, sickBytes, block.PutOptions{})
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "blocks/") {
			r.readsStuck.Store(true)
		}
		return nil
	})
	patiently(t, deadlineWaits, func(ctx context.Context) bool {
		err := ends(t, "drain", func() error { _, err := s.Drain(ctx, nil); return err })
		if err != nil {
			t.Errorf("drain: %v", err)
		}
		return r.readsStuck.Load()
	})
	mend()
	eventually(t, "it is in g4", func() bool { return tiersOf(t, s, ns, 2) == "g2g4" })
	if res, err := s.Drain(within(t, deadlinePatience), nil); err != nil || res.Left != 0 {
		t.Errorf("drain: %+v, %v", res, err)
	}
	wantEmpty(t, s)
}
