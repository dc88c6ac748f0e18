package tiers_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// A call that has to wait is given waits, all others patience: they end by themselves.
const (
	deadlineWaits    = 100 * time.Millisecond
	deadlinePatience = 20 * time.Second
	// deadlineSlack is how much later than a timer of the same deadline a call may end.
	deadlineSlack = 100 * time.Millisecond
	deadlineTries = 4
)

// deadlineFaults are what can go wrong below a store, each with the kind that says how
// calls end.
var deadlineFaults = []struct{ name, kind string }{
	{"device", "device"},
	{"deaf", "deaf"},
	{"flush", "flush"},
	{"catalog", "catalog"},
	{"catalogRead", "catalogRead"},
	{"EIO", "fails"},
	{"ENOSPC", "fails"},
	{"short", "fails"},
	{"down", "fails"},
	{"wrong", "wrong"},
	{"catalogEIO", "refused"},
	{"catalogENOSPC", "refused"},
}

// The ways to make a call.
const (
	callBare    = 1 << iota // of the store
	callRemote              // of a client over gRPC
	callSession             // of a client whose blocks go over a session
)

type deadlineCall struct {
	name string
	call func(ctx context.Context, r *deadlineRig) error
	want map[string]func(error) bool // by kind of fault; none: the call does well
	ways int
}

func ranOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || err != nil && err.Error() == "miss: deadline"
}

func deadlineCalls() []deadlineCall {
	well := func(err error) bool { return err == nil }
	sick := func(err error) bool { return errors.Is(err, block.ErrUnavailable) }
	spoiled := func(err error) bool { return err != nil && err.Error() == "miss: corrupt" }
	noRoom := func(err error) bool { return well(err) || refused(err) } // no room is no failure of a drain
	type want = map[string]func(error) bool
	reads := want{"device": ranOut, "deaf": ranOut, "fails": sick, "wrong": spoiled}
	writes := want{"device": ranOut, "deaf": ranOut, "flush": ranOut, "catalog": ranOut, "fails": sick, "refused": refused}
	records := want{"catalog": ranOut, "refused": refused}
	const clients = callBare | callRemote
	return []deadlineCall{
		{"PutG2", func(ctx context.Context, r *deadlineRig) error { return r.put(ctx, block.G2) }, nil, clients | callSession},
		{"PutG3", func(ctx context.Context, r *deadlineRig) error { return r.put(ctx, block.G3) }, writes, clients | callSession},
		{"PutGrantedG2", func(ctx context.Context, r *deadlineRig) error { return r.putGranted(ctx, block.G2) }, nil, callBare},
		{"PutGrantedG3", func(ctx context.Context, r *deadlineRig) error { return r.putGranted(ctx, block.G3) }, writes, callBare},
		{"Get", func(ctx context.Context, r *deadlineRig) error { return r.get(ctx, block.GetOptions{NoPromote: true}) }, reads, clients | callSession},
		{"GetPromote", func(ctx context.Context, r *deadlineRig) error { return r.get(ctx, block.GetOptions{}) }, reads, clients | callSession},
		// Its memory is the caller's, so it waits for a device that cannot be interrupted.
		{"ReadInto", func(ctx context.Context, r *deadlineRig) error { return r.readInto(ctx) }, want{"device": ranOut, "fails": sick, "wrong": spoiled}, callBare},
		{"Lend", func(ctx context.Context, r *deadlineRig) error { return r.lend(ctx, 2) }, nil, callBare},
		{"LendFromG3", func(ctx context.Context, r *deadlineRig) error { return r.lend(ctx, 1) }, reads, callBare},
		{"Prefetch", func(ctx context.Context, r *deadlineRig) error {
			return r.by.Prefetch(ctx, r.ns.ID, hashLen, pack(hashOf(1)), block.PrefetchOptions{}, func(p block.Progress) error { return missed(p.Reason) })
		}, reads, clients},
		{"Delete", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.by.Delete(ctx, r.ns.ID, hashLen, pack(hashOf(3)))
			return err
		}, writes, clients},
		{"Clear", func(ctx context.Context, r *deadlineRig) error { _, err := r.by.Clear(ctx, r.other.ID); return err }, records, clients},
		// Behind one that is under way.
		{"ClearBehind", func(ctx context.Context, r *deadlineRig) error {
			short, cancel := context.WithTimeout(ctx, deadlineWaits/4)
			defer cancel()
			_, _ = r.by.Clear(short, r.other.ID)
			_, err := r.by.Clear(ctx, r.ns.ID)
			return err
		}, records, clients},
		{"OpenNamespace", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.by.OpenNamespace(ctx, block.Descriptor{Name: fmt.Sprint("new", r.next.Add(1)), MaxBlockBytes: 1 << 20}, 0)
			return err
		}, records, clients},
		// The first put of a namespace fixes its length of hashes.
		{"FirstPut", func(ctx context.Context, r *deadlineRig) error {
			_, _, err := r.by.Reserve(ctx, r.fresh.ID, hashLen, hashOf(int(1000+r.next.Add(1))), 100, block.PutOptions{})
			return err
		}, records, clients},
		{"Pin", func(ctx context.Context, r *deadlineRig) error {
			each, err := r.by.Pin(ctx, r.ns.ID, hashLen, pack(hashOf(1)))
			return errors.Join(append(each, err)...)
		}, records, clients},
		{"Unpin", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.by.Unpin(ctx, r.ns.ID, hashLen, pack(hashOf(4)))
			return err
		}, records, clients},
		{"Match", func(ctx context.Context, r *deadlineRig) error {
			return r.by.Match(ctx, r.ns.ID, hashLen, pack(hashOf(1)), block.MatchOptions{}, new(block.MatchResult))
		}, nil, clients},
		{"Lease", func(ctx context.Context, r *deadlineRig) error { return r.lease(ctx) }, nil, clients},
		{"Locate", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.by.Locate(ctx, r.ns.ID, hashLen, pack(hashOf(1)))
			return err
		}, nil, clients},
		{"List", func(ctx context.Context, r *deadlineRig) error {
			_, _, err := r.by.List(ctx, r.ns.ID, "", 10)
			return err
		}, nil, clients},
		{"Watch", func(ctx context.Context, r *deadlineRig) error { return r.snapshot(ctx) }, nil, clients},
		{"Stats", func(ctx context.Context, r *deadlineRig) error {
			if st := r.by.Stats(); st.Blocks == 0 {
				return errors.New("no blocks")
			}
			return ctx.Err()
		}, nil, clients},
		// What is left is in its result, also when its time is over.
		{"Drain", func(ctx context.Context, r *deadlineRig) error {
			_, err := r.Drain(ctx, nil)
			return err
		}, want{"device": well, "deaf": well, "flush": well, "catalog": well, "fails": sick, "refused": noRoom}, callBare},
	}
}

// TestDeadlines makes each call with a deadline, bare, through a client and over a session,
// while something below the store does not answer, fails or gives wrong bytes, and nothing
// has noticed that yet: each ends by its deadline, with the right error or reason for each
// key. When all answers again, each call does what it should, without a restart.
//
// By its deadline is not later than a plain timer of the same deadline beside it, and the
// slack: a machine that does other things runs both late. A call that goes through many
// goroutines it can run later than one timer, so the best of a few stores counts; what
// waits for the fault, or for a period of its own, is late in each.
func TestDeadlines(t *testing.T) {
	t.Parallel()
	for _, f := range deadlineFaults {
		for suffix, way := range map[string]int{"": callBare, "/grpc": callRemote, "/session": callSession} {
			for _, c := range deadlineCallsFor(f.kind) {
				right, meets := c.want[f.kind]
				switch {
				case c.ways&way == 0:
					continue
				case !meets && (f.kind != "device" && f.kind != "catalog" && f.kind != "catalogRead" || way == callSession):
					continue // it does not come near the fault
				case way != callBare && (f.name == "ENOSPC" || f.name == "short" || f.name == "catalogENOSPC"):
					continue // to a client they are as EIO
				case raceEnabled && (way != callBare || f.kind != "device" && f.kind != "catalog" && f.kind != "catalogRead"):
					continue // the detector has seen these calls elsewhere
				}
				t.Run(f.name+"/"+c.name+suffix, func(t *testing.T) {
					t.Parallel() // most of it waits
					stalls := f.kind == "device" || f.kind == "deaf" || f.kind == "flush" || f.kind == "catalog" || f.kind == "catalogRead"
					deadline := deadlinePatience
					if meets && stalls {
						deadline = deadlineWaits
					}
					if right == nil {
						right = func(err error) bool { return err == nil }
					}
					once := func() time.Duration {
						r := newDeadlineRigFor(t, f.kind)
						defer r.mend()
						r.reach(t, way)
						r.stall(f.name)
						late, err := r.timed(t, deadline, c.call)
						if !right(err) {
							t.Errorf("it ends with %v", err)
						}
						r.mend()
						again := func() error {
							return ends(t, "a call", func() error { return c.call(within(t, deadlinePatience), r) })
						}
						switch {
						case stalls:
							err = again()
						case f.kind == "wrong":
							// What was damaged has left.
							if err = again(); err != nil && err.Error() == "miss: absent" {
								err = nil
							}
						default: // it takes a while until it is noticed
							eventually(t, "a call does well again", func() bool { return again() == nil })
							err = nil
						}
						if err != nil {
							t.Errorf("when all answers again: %v", err)
						}
						return late
					}
					late := once()
					for range deadlineTries - 1 {
						if late > deadlineSlack {
							late = min(late, once())
						}
					}
					if late > deadlineSlack {
						t.Errorf("of %d it ends %v later than a timer at best", deadlineTries, late)
					}
				})
			}
		}
	}
}

// timed makes a call with a deadline, and says how much later it has ended than a timer
// that was set to the same deadline; not at all when it ended before.
func (r *deadlineRig) timed(t *testing.T, deadline time.Duration, call func(ctx context.Context, r *deadlineRig) error) (late time.Duration, err error) {
	t.Helper()
	rang, ended := make(chan time.Time, 1), make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	go func() {
		select {
		case <-timer.C:
			rang <- time.Now()
		case <-ended:
			close(rang)
		}
	}()
	var end time.Time
	err = ends(t, "a call", func() error {
		err := call(ctx, r)
		end = time.Now()
		return err
	})
	close(ended)
	if at, ok := <-rang; ok {
		late = max(0, end.Sub(at))
	}
	return late, err
}
