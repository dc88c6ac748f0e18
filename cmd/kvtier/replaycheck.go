package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy/trace"
)

// check reads every block of the trace that the daemon lists, and prints the
// report, also of a check that ended early.
func (f *replayFlags) check(ctx context.Context, path string, stdout, stderr io.Writer) error {
	if err := f.validate(); err != nil {
		return err
	}
	keys, err := f.traceKeys(path)
	if err != nil {
		return err
	}
	var acked map[block.Hash]struct{}
	if f.journal != "" {
		if acked, err = readJournal(f.journal); err != nil {
			return err
		}
	}
	return f.connectAll(ctx, f.clients, func(clients []*api.Client) error {
		ns, err := f.findNamespace(ctx, clients[0], f.namespace, traceHashBytes)
		if err != nil {
			return err
		}
		if f.blockBytes != 0 && ns.Desc.BlockBytes != f.blockBytes {
			return &block.Mismatch{
				Name: f.namespace, Field: "block_bytes", Have: fmt.Sprint(ns.Desc.BlockBytes), Want: fmt.Sprint(f.blockBytes),
			}
		}
		ck := &checker{clients: clients, ns: ns, timeout: f.timeout, keys: keys, gone: maps.Clone(acked), report: newCheckReport()}
		rep := ck.report
		rep.TraceKeys = int64(len(keys))
		start := time.Now()
		runErr := ck.run(ctx, start, newProgress(stderr))
		rep.Seconds = time.Since(start).Seconds()
		if acked != nil {
			all, gone := int64(len(acked)), int64(len(ck.gone))
			rep.Acknowledged, rep.AcknowledgedGone = &all, &gone
		}
		if runErr != nil {
			rep.Errors++
			rep.Error = runErr.Error()
		}
		switch err := f.report(stdout, rep); {
		case err != nil:
			return err
		case runErr != nil:
			return fmt.Errorf("check %s: ended after %s: %w", path, counted(rep.Listed, "listed block"), runErr)
		case rep.WrongBytes > 0:
			return fmt.Errorf("check %s: %d wrong bytes", path, rep.WrongBytes)
		}
		return nil
	})
}

// traceKeys collects the hashes of the trace's blocks.
func (f *replayFlags) traceKeys(path string) (map[block.Hash]struct{}, error) {
	tr, err := trace.Open(path)
	if err != nil {
		return nil, err
	}
	defer tr.Close()
	keys := make(map[block.Hash]struct{})
	for n := int64(0); f.limit == 0 || n < f.limit; n++ {
		req, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		for _, id := range req.HashIDs {
			keys[traceHash(id)] = struct{}{}
		}
	}
	return keys, nil
}

// checker reads what a daemon lists.
type checker struct {
	clients []*api.Client
	ns      block.Namespace
	timeout time.Duration // of one call
	keys    map[block.Hash]struct{}

	mu     sync.Mutex              // while a page is read
	gone   map[block.Hash]struct{} // of a journal, those not seen yet
	report *checkReport
}

// run reads page by page, so that little can leave the store between the
// listing and the reading of a block.
func (c *checker) run(ctx context.Context, start time.Time, p *progress) error {
	defer p.done()
	cursor := ""
	for first := true; first || cursor != ""; first = false {
		lctx, cancel := context.WithTimeout(ctx, c.timeout)
		entries, next, err := c.clients[0].List(lctx, c.ns, cursor, listPage)
		cancel()
		if err != nil {
			return err
		}
		cursor = next
		want, lengths := make([]block.Wanted, 0, len(entries)), make([]int, 0, len(entries))
		longest := int64(1)
		for _, e := range entries {
			if _, ok := c.keys[e.Hash]; !ok {
				c.report.Foreign++
				continue
			}
			c.report.Listed++
			want, lengths = append(want, block.Wanted{Hash: e.Hash}), append(lengths, int(e.Len))
			longest = max(longest, int64(e.Len))
		}
		if err := c.page(ctx, want, lengths, batchBlocks(longest)); err != nil {
			return err
		}
		p.update(func() string { return c.report.progressLine(time.Since(start)) })
	}
	return nil
}

// page reads the blocks of a page, at most so many in one call, by all clients.
// The first that fails ends the others.
func (c *checker) page(ctx context.Context, want []block.Wanted, lengths []int, most int) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	size := max(1, min(most, (len(want)+len(c.clients)-1)/len(c.clients)))
	var next atomic.Int64
	var wg sync.WaitGroup
	for _, client := range c.clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				at := int(next.Add(int64(size))) - size
				if at >= len(want) {
					return
				}
				end := min(at+size, len(want))
				if err := c.read(ctx, client, want[at:end], lengths[at:end]); err != nil {
					stop(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// read gets blocks and checks their bytes. It leaves them in the tier where they
// are and tells no policy, so that the check changes nothing.
func (c *checker) read(ctx context.Context, client *api.Client, want []block.Wanted, lengths []int) error {
	gctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	rep := c.report
	return client.Get(gctx, c.ns, want, block.GetOptions{NoPromote: true, Quiet: true, Verify: true}, func(i int, p block.Payload) error {
		wrong := int64(0)
		if p.Reason == block.Hit {
			wrong = wrongLength(len(p.Bytes), lengths[i]) + wrongPattern(p.Bytes, want[i].Hash)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if p.Reason != block.Hit {
			rep.Missed++
			rep.MissReasons[p.Reason.String()]++
			return nil
		}
		rep.HitsByTier[p.Tier.String()]++
		rep.BytesGot += int64(len(p.Bytes))
		if rep.WrongBytes += wrong; wrong == 0 {
			rep.Present++
			delete(c.gone, want[i].Hash)
		}
		return nil
	})
}
