package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// deadlineRig is a store below which things can stall. Blocks 1, 3 and 4 are in G3
// only, 4 is pinned, 2 is in G2 only; the other namespace has block 1 in both.
type deadlineRig struct {
	*sickRig
	stuckReads
	by     apitest.Caller // the store, or a client of it
	other  block.Namespace
	fresh  block.Namespace // nothing was put yet
	next   atomic.Int64
	mem    []byte // registered, for ReadInto
	resume chan struct{}
	mend   func()
	stuck  atomic.Bool           // the catalog's disk
	broken atomic.Pointer[error] // what the catalog's disk fails with
	slabs  atomic.Bool           // flushes of the slab
}

func newDeadlineRig(t *testing.T) *deadlineRig {
	r := &deadlineRig{sickRig: &sickRig{}, resume: make(chan struct{})}
	dir := t.TempDir()
	r.o = tiers.Options{
		Dir: filepath.Join(dir, "data"), Slabs: slabIn(t, 32<<20), DRAM: 16 << 20, StallAfter: time.Hour, ProbeEvery: 20 * time.Millisecond,
		Agent: agentWith(t, r.disk.Wrap),
	}
	r.o.Catalog = &index.CatalogOptions{FS: errorfs.Wrap(crashableDir(t, r.o.Dir), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if strings.HasSuffix(op.Path, ".sst") {
			return r.readsOf(op)
		}
		if op.Kind.ReadOrWrite() == errorfs.OpIsRead || !strings.HasSuffix(op.Path, ".log") && !strings.Contains(op.Path, ".manifest") {
			return nil
		}
		if r.stuck.Load() {
			<-r.resume
		}
		if err := r.broken.Load(); err != nil {
			return *err
		}
		return nil
	}))}
	r.Store = openStore(t, r.o)
	r.mem = clientMemory(t, r.o.Agent, sickBytes)
	r.ns, r.other = space(t, r.Store, "a", 8<<20), space(t, r.Store, "b", 8<<20)
	r.fresh = space(t, r.Store, "fresh", 8<<20)
	tiers.WrapFlush(r.Store, func(_ int, _ string, flush func() error) error {
		if r.slabs.Load() {
			<-r.resume
		}
		return flush()
	})
	for _, i := range []int{1, 3, 4} {
		mustPut(t, r.Store, r.ns, i, sickBytes, block.PutOptions{Durable: block.G3})
		r.cool(t, i)
	}
	mustPut(t, r.Store, r.other, 1, sickBytes, block.PutOptions{Durable: block.G3})
	mustPut(t, r.Store, r.ns, 2, sickBytes, block.PutOptions{})
	if each, err := r.Pin(t.Context(), r.ns.ID, hashLen, pack(hashOf(4))); errors.Join(append(each, err)...) != nil {
		t.Fatal(each, err)
	}
	r.mend = sync.OnceFunc(func() {
		r.stuck.Store(false)
		r.readsStuck.Store(false)
		r.slabs.Store(false)
		r.broken.Store(nil)
		r.disk.Clear()
		close(r.resume)
	})
	return r
}

// stall lets something no longer answer.
func (r *deadlineRig) stall(what string) {
	switch what {
	case "device":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Stall, Resume: r.resume})
	case "deaf":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Hang, Resume: r.resume})
	case "flush":
		r.slabs.Store(true)
	case "catalog":
		r.stuck.Store(true)
	case "catalogRead":
		r.readsStuck.Store(true)
	case "EIO":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Fail, Err: fmt.Errorf("%w: %w", xfer.ErrUnavailable, syscall.EIO)})
	case "ENOSPC":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Fail, Err: fmt.Errorf("%w: %w", xfer.ErrUnavailable, syscall.ENOSPC)})
	case "short":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Short})
	case "down":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Down})
	case "wrong":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Corrupt, Ops: []xfer.Op{xfer.Read}})
	case "catalogEIO":
		r.breakCatalog(syscall.EIO)
	case "catalogENOSPC":
		r.breakCatalog(syscall.ENOSPC)
	}
}

func (r *deadlineRig) breakCatalog(err error) { r.broken.Store(&err) }

// reach says how calls come to the store.
func (r *deadlineRig) reach(t *testing.T, way int) {
	switch way {
	case callBare:
		r.by = r.Store
	case callRemote:
		r.by = apitest.Remote(t, r.Store)
	case callSession:
		r.by = apitest.RemoteBySession(t, r.Store)
		// The session is opened by the first call that moves a block, and that takes its time.
		err := r.by.Get(within(t, deadlinePatience), r.ns.ID, hashLen, []block.Wanted{{Hash: hashOf(2)}}, block.GetOptions{}, func(_ int, p block.Payload) error {
			return missed(p.Reason)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// put puts another block in one go.
func (r *deadlineRig) put(ctx context.Context, tier block.TierID) error {
	i := int(1000 + r.next.Add(1))
	if p, ok := r.by.(apitest.Putter); ok {
		return p.PutOne(ctx, r.ns.ID, hashLen, hashOf(i), payload(i, sickBytes), tier)
	}
	v, _, err := r.by.Reserve(ctx, r.ns.ID, hashLen, hashOf(i), sickBytes, block.PutOptions{Durable: tier})
	if err == nil {
		err = r.by.Fill(ctx, v.ID, 0, payload(i, sickBytes))
	}
	if err != nil {
		return err
	}
	return r.by.Commit(ctx, []uint64{v.ID})[0].Err
}

// get wants block 2 from DRAM at once and says how block 1 of G3 is read.
func (r *deadlineRig) get(ctx context.Context, o block.GetOptions) error {
	want := []block.Wanted{{Hash: hashOf(2)}, {Hash: hashOf(1)}, {Hash: hashOf(99)}}
	var why []block.MissReason
	err := r.by.Get(ctx, r.ns.ID, hashLen, want, o, func(_ int, p block.Payload) error {
		why = append(why, p.Reason)
		return nil
	})
	if err != nil {
		return err
	}
	if len(why) > 0 && why[0] == block.MissDeadline {
		return missed(why[0]) // the machine was too slow for any of them
	}
	absent := len(why) == 3 && (why[2] == block.MissAbsent || why[2] == why[1]) // or it is not known
	if !absent || why[0] != block.Hit {
		return fmt.Errorf("answers %v", why)
	}
	return missed(why[1])
}

// putGranted puts another block by a grant.
func (r *deadlineRig) putGranted(ctx context.Context, tier block.TierID) error {
	gs, err := r.Grant(ctx, r.ns.ID, sickBytes, 1)
	if err != nil {
		return err
	}
	i := int(1000 + r.next.Add(1))
	data := payload(i, sickBytes)
	copy(gs[0].Mem, data)
	return r.PutGranted(ctx, []block.GrantPut{granted(r.ns, gs[0], i, data, block.PutOptions{Durable: tier})})[0].Err
}

// lend lends one block, and gives it back.
func (r *deadlineRig) lend(ctx context.Context, i int) error {
	loans, l, err := r.Lend(ctx, r.ns.ID, hashLen, pack(hashOf(i)), block.GetOptions{}, time.Minute, lendSession)
	if err != nil {
		return err
	}
	if l.Count > 0 {
		err = r.ReleaseLease(l.ID)
	}
	return errors.Join(err, missed(loans[0].Reason))
}

// readInto reads block 1 into memory of the caller's.
func (r *deadlineRig) readInto(ctx context.Context) error {
	res := r.ReadInto(ctx, keyOf(r.ns, 1), r.mem, block.GetOptions{})
	return missed(res.Reason)
}

// lease leases a block of each tier, for longer, and not any more.
func (r *deadlineRig) lease(ctx context.Context) error {
	var res block.MatchResult
	hashes := append(pack(hashOf(1)), pack(hashOf(2))...)
	err := r.by.Match(ctx, r.ns.ID, hashLen, hashes, block.MatchOptions{Lease: time.Minute, Session: 1}, &res)
	if err != nil {
		return err
	}
	want := 2
	if r.planned.ID != 0 {
		want = 1 // block 1 is in G4, and needs none
	}
	if res.Lease.Count != want {
		return fmt.Errorf("leased %d blocks", res.Lease.Count)
	}
	_, err = r.by.RenewLease(res.Lease.ID, time.Hour)
	return errors.Join(err, r.by.ReleaseLease(res.Lease.ID))
}

// snapshot watches until all has been told that is there.
func (r *deadlineRig) snapshot(ctx context.Context) error {
	all := errors.New("all was told")
	err := r.by.Watch(ctx, block.WatchOptions{Snapshot: true}, func(ev block.Event) error {
		if ev.Kind == block.EventSnapshot {
			return all
		}
		return nil
	})
	if errors.Is(err, all) {
		return nil
	}
	return fmt.Errorf("the snapshot has no end: %w", err)
}
