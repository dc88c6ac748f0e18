package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// batchBytes bounds the payload of one call: a put's lies in memory at once,
	// and each call must end within --timeout.
	batchBytes = 64 << 20
	// retryFirst and retryMost are the first and the longest pause before a
	// refused put is tried again: an evictor frees room within milliseconds, a
	// slow disk may need longer.
	retryFirst = 5 * time.Millisecond
	retryMost  = 500 * time.Millisecond
	// mostTimeouts is how many calls in a row may reach their deadline before the
	// daemon is taken for dead.
	mostTimeouts = 3
)

// replayer is one client: it works requests off against one daemon and counts
// what happens. One goroutine uses it.
type replayer struct {
	client     *api.Client
	ns         block.Namespace
	blockBytes int
	durable    block.TierID
	verify     bool
	timeout    time.Duration // of one call
	report     *replayReport // of the request under way
	watch      stopwatch
	journal    *journal // nil: none is kept
	firstErr   error    // of all reports' Errors

	abandon float64 // share of the puts that are broken off
	rng     *rand.Rand
	putTime time.Duration // of the last put that was not

	timeouts int // calls in a row that reached their deadline

	// Reused from request to request.
	hashes []block.Hash
	want   []block.Wanted
	wanted []int // index in hashes of each of want
	miss   []int // index in hashes of each block to put
	items  []api.PutItem
	buf    []byte // payload of items
	acked  []block.Hash
}

// request replays one request: match, get what is resident, put the rest. It
// fails when the replay cannot go on; what concerns single blocks is counted.
func (r *replayer) request(ctx context.Context, ids []uint64) error {
	r.report.Requests++
	r.report.BlockRefs += int64(len(ids))
	r.hashes = r.hashes[:0]
	for _, id := range ids {
		r.hashes = append(r.hashes, traceHash(id))
	}
	r.want, r.wanted, r.miss = r.want[:0], r.wanted[:0], r.miss[:0]
	if err := r.match(ctx); err != nil {
		return err
	}
	if err := r.get(ctx); err != nil {
		return err
	}
	return r.put(ctx)
}

// match finds out which blocks to get and which to put.
func (r *replayer) match(ctx context.Context) error {
	unbroken := true // all before are resident
	at := 0
	for keys := range slices.Chunk(r.hashes, api.MaxMatchKeys) {
		mctx, cancel := context.WithTimeout(ctx, r.timeout)
		done := r.watch.call(matchCall)
		res, err := r.client.Match(mctx, r.ns, keys, block.MatchOptions{All: true})
		done()
		cancel()
		if err != nil {
			return r.failed(ctx, err)
		}
		if len(res.Blocks) != len(keys) {
			return fmt.Errorf("match: server answered %d of %d blocks", len(res.Blocks), len(keys))
		}
		r.timeouts = 0
		if unbroken {
			r.report.PrefixHits += int64(res.Prefix)
			unbroken = res.Prefix == len(keys)
		}
		for i, b := range res.Blocks {
			if b.State == block.Resident {
				r.want = append(r.want, block.Wanted{Hash: keys[i]})
				r.wanted = append(r.wanted, at+i)
				r.report.Hits++
			} else {
				r.miss = append(r.miss, at+i)
			}
		}
		at += len(keys)
	}
	return nil
}

// get reads the blocks that the match found. Those that are gone since are put
// again.
func (r *replayer) get(ctx context.Context) error {
	rep := r.report
	size := min(batchBlocks(int64(r.blockBytes)), api.MaxKeys)
	for at := 0; at < len(r.want); at += size {
		part := r.want[at:min(at+size, len(r.want))]
		rep.Gets += int64(len(part))
		gctx, cancel := context.WithTimeout(ctx, r.timeout)
		done := r.watch.call(getCall)
		err := r.client.Get(gctx, r.ns, part, block.GetOptions{}, func(i int, p block.Payload) error {
			if p.Reason != block.Hit {
				rep.Missed++
				rep.MissReasons[p.Reason.String()]++
				r.miss = append(r.miss, r.wanted[at+i])
				return nil
			}
			rep.HitsByTier[p.Tier.String()]++
			rep.BytesGot += int64(len(p.Bytes))
			rep.WrongBytes += wrongLength(len(p.Bytes), r.blockBytes)
			if r.verify {
				rep.WrongBytes += wrongPattern(p.Bytes, part[i].Hash)
			}
			return nil
		})
		done()
		cancel()
		if err != nil {
			if err := r.failed(ctx, err); err != nil {
				return err
			}
			continue
		}
		r.timeouts = 0
	}
	slices.Sort(r.miss) // parents before children
	return nil
}

// batchBlocks is how many blocks of a size one call carries.
func batchBlocks(blockBytes int64) int {
	return int(max(1, batchBytes/max(1, blockBytes)))
}

// wrongLength counts the bytes by which a block is too short or too long.
func wrongLength(got, want int) int64 {
	return int64(max(got-want, want-got))
}

// put stores the blocks that are missing, root first, each with its parent.
func (r *replayer) put(ctx context.Context) error {
	for part := range slices.Chunk(r.miss, batchBlocks(int64(r.blockBytes))) {
		if n := len(part) * r.blockBytes; cap(r.buf) < n {
			r.buf = make([]byte, n)
		}
		r.items = r.items[:0]
		for i, at := range part {
			it := api.PutItem{Hash: r.hashes[at], Data: r.buf[:cap(r.buf)][i*r.blockBytes : (i+1)*r.blockBytes]}
			if at > 0 {
				it.Parent, it.HasParent = r.hashes[at-1], true
			}
			fillPattern(it.Data, it.Hash)
			r.items = append(r.items, it)
		}
		r.report.Puts += int64(len(part))
		if err := r.putBatch(ctx, r.items); err != nil {
			return err
		}
	}
	return nil
}

// putBatch puts items in one call, and those for which there was no room again,
// with growing pauses, until the call's deadline.
func (r *replayer) putBatch(ctx context.Context, items []api.PutItem) error {
	pctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	defer r.watch.call(putCall)()
	if r.abandon > 0 && r.rng.Float64() < r.abandon {
		return r.breakOff(ctx, pctx, items)
	}
	pause := retryFirst
	var noRoom error // of the last try
	for try := 0; ; try++ {
		start := time.Now()
		res, callErr := r.client.Put(pctx, r.ns, items, api.PutOptions{Durable: r.durable})
		r.putTime = time.Since(start)
		cause := callErr
		if try > 0 && isDeadline(ctx, callErr) {
			cause = noRoom // it came while waiting for room
		}
		var refused []api.PutItem
		refused, noRoom = r.settle(items, res, cause)
		if err := r.note(); err != nil {
			return err
		}
		if try == 0 {
			r.report.Refused += int64(len(refused))
		}
		if callErr != nil {
			r.addErrors(len(refused), noRoom)
			if cause != callErr {
				return nil
			}
			return r.stop(ctx, callErr)
		}
		r.timeouts = 0
		if len(refused) == 0 {
			return nil
		}
		if sleep(pctx, pause) != nil {
			r.addErrors(len(refused), noRoom)
			return ctx.Err()
		}
		pause = min(2*pause, retryMost)
		items = refused
		r.report.Retries += int64(len(items))
	}
}

// breakOff cuts a put's stream at a random point, about half way as a rule. What
// it has acknowledged until then counts as not acknowledged.
func (r *replayer) breakOff(ctx, pctx context.Context, items []api.PutItem) error {
	cctx, cut := context.WithCancel(pctx)
	defer cut()
	t := time.AfterFunc(time.Duration(r.rng.Float64()*float64(max(r.putTime, time.Millisecond))), cut)
	defer t.Stop()
	_, err := r.client.Put(cctx, r.ns, items, api.PutOptions{Durable: r.durable})
	r.report.Abandoned += int64(len(items))
	if err == nil || cctx.Err() != nil && pctx.Err() == nil {
		return nil
	}
	r.addErrors(len(items), err)
	return r.stop(ctx, err)
}

// note writes what was acknowledged to the journal.
func (r *replayer) note() error {
	defer func() { r.acked = r.acked[:0] }()
	if r.journal == nil {
		return nil
	}
	return r.journal.write(r.acked)
}

// settle counts how the puts of items ended and returns those that may be tried
// again, with the reason. Items that the call, when it failed, left without a
// result failed with it.
func (r *replayer) settle(items []api.PutItem, res []api.PutResult, callErr error) (refused []api.PutItem, noRoom error) {
	rep := r.report
	for i := range items {
		one := api.PutResult{Err: callErr}
		if i < len(res) {
			one = res[i]
		}
		switch {
		case errors.Is(one.Err, block.ErrNoSpace):
			refused, noRoom = append(refused, items[i]), one.Err
		case one.Err != nil:
			if errors.Is(one.Err, block.ErrConflict) {
				rep.Conflicts++
			}
			r.addErrors(1, fmt.Errorf("put %s: %w", items[i].Hash.Hex(traceHashBytes), one.Err))
		default:
			if one.Status == block.Exists {
				rep.Existed++
			} else {
				rep.BytesPut += int64(len(items[i].Data))
			}
			r.acked = append(r.acked, items[i].Hash)
		}
	}
	return refused, noRoom
}

// addErrors counts n errors and keeps the first.
func (r *replayer) addErrors(n int, err error) {
	if n > 0 && r.firstErr == nil {
		r.firstErr = err
	}
	r.report.Errors += int64(n)
}

// failed counts a call that failed, and returns an error when the replay must end.
func (r *replayer) failed(ctx context.Context, err error) error {
	r.addErrors(1, err)
	return r.stop(ctx, err)
}

// stop returns an error when the replay must end after a call that failed. One
// slow call is no reason to, several in a row are.
func (r *replayer) stop(ctx context.Context, err error) error {
	if !isDeadline(ctx, err) {
		return err
	}
	if r.timeouts++; r.timeouts < mostTimeouts {
		return nil
	}
	return fmt.Errorf("%d calls in a row reached --timeout: %w", r.timeouts, err)
}

// isDeadline reports whether a call failed because of its own deadline, not of
// the end of ctx.
func isDeadline(ctx context.Context, err error) bool {
	return ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded)
}
