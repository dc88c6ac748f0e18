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

// What a call may take after its deadline, and how often it is tried.
const (
	deadlineSlack = 100 * time.Millisecond
	deadlineTries = 10
)

// TestDeadlines makes each call with a deadline, bare and through a client, while
// something below the store does not answer, or fails, and nothing has noticed that yet: each ends soon after its
// deadline, with the right error or reason for each key. When all answers again,
// each call does what it should, without a restart.
func TestDeadlines(t *testing.T) {
	t.Parallel()
	const deadline = 200 * time.Millisecond
	late := func(err error) bool {
		return errors.Is(err, context.DeadlineExceeded) || err != nil && err.Error() == "miss: deadline"
	}
	sick := func(err error) bool {
		return errors.Is(err, block.ErrUnavailable) || err != nil && err.Error() == "miss: unavailable"
	}
	well := func(err error) bool { return err == nil }
	type want map[string]func(error) bool // by fault; none: the call does well
	calls := []struct {
		name string
		call func(ctx context.Context, r *deadlineRig) error
		want want
		bare bool // not a call of clients
	}{
		{"PutG2", func(ctx context.Context, r *deadlineRig) error { return r.put(ctx, block.G2) }, nil, false},
		{"PutG3", func(ctx context.Context, r *deadlineRig) error { return r.put(ctx, block.G3) }, want{"device": late, "deaf": late, "fails": sick, "flush": late, "catalog": late}, false},
		{"Get", func(ctx context.Context, r *deadlineRig) error { return r.get(ctx, block.GetOptions{NoPromote: true}) }, want{"device": late, "deaf": late, "fails": sick}, false},
		{"GetPromote", func(ctx context.Context, r *deadlineRig) error { return r.get(ctx, block.GetOptions{}) }, want{"device": late, "deaf": late, "fails": sick}, false},
		{"Prefetch", func(ctx context.Context, r *deadlineRig) error {
			return r.by.Prefetch(ctx, r.ns.ID, hashLen, pack(hashOf(1)), "", func(p block.Progress) error { return missed(p.Reason) })
		}, want{"device": late, "deaf": late, "fails": sick}, false},
		{"Delete", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.by.Delete(ctx, r.ns.ID, hashLen, pack(hashOf(3)))
			return err
		}, want{"device": late, "deaf": late, "fails": sick, "flush": late, "catalog": late}, false},
		{"Clear", func(ctx context.Context, r *deadlineRig) error { _, err := r.by.Clear(ctx, r.other.ID); return err }, want{"catalog": late}, false},
		{"OpenNamespace", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.OpenNamespace(ctx, block.Descriptor{Name: fmt.Sprint("new", r.next.Add(1)), MaxBlockBytes: 1 << 20}, 0)
			return err
		}, want{"catalog": late}, true},
		{"Pin", func(ctx context.Context, r *deadlineRig) error {
			each, err := r.Pin(ctx, r.ns.ID, hashLen, pack(hashOf(1)))
			return errors.Join(append(each, err)...)
		}, want{"catalog": late}, true},
		{"Unpin", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.Unpin(ctx, r.ns.ID, hashLen, pack(hashOf(4)))
			return err
		}, want{"catalog": late}, true},
		{"Match", func(ctx context.Context, r *deadlineRig) error {
			return r.by.Match(ctx, r.ns.ID, hashLen, pack(hashOf(1)), block.MatchOptions{}, new(block.MatchResult))
		}, nil, false},
		{"List", func(ctx context.Context, r *deadlineRig) error {
			_, _, err := r.by.List(ctx, r.ns.ID, "", 10)
			return err
		}, nil, false},
		{"Drain", func(ctx context.Context, r *deadlineRig) error { _, err := r.Drain(ctx, nil); return err }, want{"fails": sick}, true}, // what is left is in its result
		// The first put of a namespace fixes its length of hashes.
		{"FirstPut", func(ctx context.Context, r *deadlineRig) error {
			_, _, err := r.by.Reserve(ctx, r.fresh.ID, hashLen, hashOf(int(1000+r.next.Add(1))), 100, block.PutOptions{})
			return err
		}, want{"catalog": late}, false},
		// Behind one that is under way.
		{"ClearBehind", func(ctx context.Context, r *deadlineRig) error {
			short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_, _ = r.by.Clear(short, r.other.ID)
			_, err := r.by.Clear(ctx, r.ns.ID)
			return err
		}, want{"catalog": late}, false},
	}
	for _, f := range []struct{ fault, kind string }{
		{"device", "device"},
		{"deaf", "deaf"},
		{"flush", "flush"},
		{"catalog", "catalog"},
		{"EIO", "fails"},
		{"ENOSPC", "fails"},
		{"short", "fails"},
	} {
		for _, remote := range []bool{false, true} {
			for _, c := range calls {
				switch {
				case remote && c.bare:
					continue
				case remote && (f.fault == "ENOSPC" || f.fault == "short"):
					continue // to a client they are as EIO
				case raceEnabled && (remote || f.kind != "device" && f.kind != "catalog"):
					continue // the detector has seen these calls elsewhere
				}
				name := f.fault + "/" + c.name
				if remote {
					name += "/grpc"
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel() // most of it waits
					right := c.want[f.kind]
					if right == nil {
						right = well
					}
					// A machine that does other things is late now and then, also with what is to
					// be done before the deadline. A call that waits for more than its deadline,
					// or for what does not come, does so every time.
					for try := 1; ; try++ {
						took, err, again := stalled(t, f.fault, remote, deadline, c.call)
						if again != nil {
							t.Errorf("when all answers again: %v", again)
						}
						switch {
						case right(err) && took <= deadline+deadlineSlack:
							return
						case took < deadline || try == deadlineTries:
							t.Fatalf("%v after %v", err, took)
						}
					}
				})
			}
		}
	}
}

// stalled makes a call during a fault, and once more when it is over.
func stalled(t *testing.T, fault string, remote bool, deadline time.Duration, call func(ctx context.Context, r *deadlineRig) error) (took time.Duration, err, again error) {
	t.Helper()
	r := newDeadlineRig(t)
	defer r.mend()
	if r.by = apitest.Caller(r.Store); remote {
		r.by = apitest.Remote(t, r.Store)
	}
	r.stall(fault)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	begun := time.Now()
	err = ends(t, "a call", func() error { return call(ctx, r) })
	took = time.Since(begun)
	r.mend()
	again = ends(t, "a call", func() error { return call(within(t, 20*time.Second), r) })
	return took, err, again
}

// deadlineRig is a store below which things can stall. Blocks 1, 3 and 4 are in G3
// only, 4 is pinned, 2 is in G2 only; the other namespace has block 1 in both.
type deadlineRig struct {
	*sickRig
	by     apitest.Caller // the store, or a client of it
	other  block.Namespace
	fresh  block.Namespace // nothing was put yet
	next   atomic.Int64
	resume chan struct{}
	mend   func()
	stuck  atomic.Bool // the catalog's disk
	slabs  atomic.Bool // flushes of the slab
}

func newDeadlineRig(t *testing.T) *deadlineRig {
	r := &deadlineRig{sickRig: &sickRig{}, resume: make(chan struct{})}
	dir := t.TempDir()
	r.o = tiers.Options{
		Dir: filepath.Join(dir, "data"), Slabs: slabIn(t, 64<<20), DRAM: 16 << 20, StallAfter: time.Hour, ProbeEvery: 20 * time.Millisecond,
		Agent: agentWith(t, r.disk.Wrap),
	}
	r.o.Catalog = &index.CatalogOptions{FS: errorfs.Wrap(crashableDir(t, r.o.Dir), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if r.stuck.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && (strings.HasSuffix(op.Path, ".log") || strings.Contains(op.Path, ".manifest")) {
			<-r.resume
		}
		return nil
	}))}
	r.Store = openStore(t, r.o)
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
		r.slabs.Store(false)
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
	case "EIO":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Fail, Err: fmt.Errorf("%w: %w", xfer.ErrUnavailable, syscall.EIO)})
	case "ENOSPC":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Fail, Err: fmt.Errorf("%w: %w", xfer.ErrUnavailable, syscall.ENOSPC)})
	case "short":
		r.disk.Set(xfertest.Rule{Fault: xfertest.Short})
	}
}

// put puts another block in one go.
func (r *deadlineRig) put(ctx context.Context, tier block.TierID) error {
	i := int(1000 + r.next.Add(1))
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
	if len(why) != 3 || why[0] != block.Hit || why[2] != block.MissAbsent {
		return fmt.Errorf("answers %v", why)
	}
	return missed(why[1])
}
