package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy/trace"
)

// replayFlags are the flags of replay.
type replayFlags struct {
	clientFlags
	namespace  string
	blockBytes int64
	speed      float64
	limit      int64
	durable    string
	verify     bool
	checkOnly  bool
	journal    string
}

func newReplayCmd() *cobra.Command {
	f := &replayFlags{}
	c := &cobra.Command{
		Use:   "replay TRACE",
		Short: "Replay a trace of requests with real bytes",
		Long: `Replay a trace of requests (.jsonl or .jsonl.gz) with real bytes. For each request
it looks all blocks up, gets those that are resident and puts the others, each
with its parent, and at the end it prints what was hit, moved and refused.

The hash of block id I has 16 bytes: I in little-endian order and a mix of it.
The bytes of a block follow from its hash and the offset, so --verify needs no
copy of them, and finds wrong blocks, torn blocks and shifted pieces.

A put for which there is no room is tried again until --timeout and counted as
refused; it is an error only when there is no room then either. The exit code is
1 after errors, conflicts or wrong bytes.

With --check-only nothing is put: every block of the trace that the daemon lists
is read and checked. The exit code is 1 after wrong bytes; listed blocks that
could not be read are reported as missed.

A journal takes the hash of each block as soon as the daemon has acknowledged
its put. Given to --check-only, it tells how many of those are gone: after a
crash that must be none, but for blocks that were evicted.`,
		Example: `  kvtier replay conversation.jsonl.gz --block-bytes 64KiB --durable g3 --verify
  kvtier replay conversation.jsonl.gz --check-only --json`,
		Args: cobra.ExactArgs(1),
	}
	f.add(c, "print one JSON object")
	fs := c.Flags()
	fs.StringVar(&f.namespace, "namespace", "replay", "`name` of the namespace")
	sizeVar(fs, &f.blockBytes, "block-bytes", 0, "`size` of each block (required, but with --check-only)")
	fs.Var(&speedValue{&f.speed}, "speed", "how many times faster than recorded; 0 is as fast as possible")
	fs.Int64Var(&f.limit, "limit", 0, "replay the first so many requests; 0 replays all")
	enumVar(fs, &f.durable, "durable", "g2", "how durable a block is when its put ends: in DRAM (g2) or on NVMe (g3)", "g2", "g3")
	fs.BoolVar(&f.verify, "verify", false, "check every byte that is read")
	fs.BoolVar(&f.checkOnly, "check-only", false, "put nothing: read and check the trace's blocks that the daemon lists")
	fs.StringVar(&f.journal, "journal", "", "`file` to append the hashes of acknowledged blocks to; with --check-only to read them from")
	c.RunE = func(c *cobra.Command, args []string) error {
		if f.checkOnly {
			return f.check(c.Context(), args[0], c.OutOrStdout(), c.ErrOrStderr())
		}
		return f.replay(c.Context(), args[0], c.OutOrStdout(), c.ErrOrStderr())
	}
	return c
}

// speedValue is a flag that holds how many times faster a trace is replayed.
type speedValue struct{ p *float64 }

// String gives the speed.
func (v *speedValue) String() string {
	if v.p == nil {
		return ""
	}
	return strconv.FormatFloat(*v.p, 'g', -1, 64)
}

// Set reads a speed, with or without an x behind it.
func (v *speedValue) Set(s string) error {
	number := s
	if n := len(s); n > 1 && s[n-1] == 'x' {
		number = s[:n-1]
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || !(f >= 0 && f <= 1e9) {
		return fmt.Errorf("%q: want a number from 0 to 1e9", s)
	}
	*v.p = f
	return nil
}

// Type is the name that help shows.
func (v *speedValue) Type() string { return "number" }

func (f *replayFlags) validate() error {
	if f.limit < 0 {
		return usageErrorf("--limit %d: want 0 or more", f.limit)
	}
	return nil
}

// replay runs the trace and prints the report, also of a replay that ended early.
func (f *replayFlags) replay(ctx context.Context, path string, stdout, stderr io.Writer) (err error) {
	if err := f.validate(); err != nil {
		return err
	}
	if f.blockBytes == 0 {
		return usageErrorf("--block-bytes: give the size of each block; only --check-only does without")
	}
	d := block.Descriptor{Name: f.namespace, BlockBytes: f.blockBytes}
	if err := d.Validate(); err != nil {
		return &exitError{exitUsage, err}
	}
	durable, err := block.ParseTier(f.durable)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	tr, err := trace.Open(path)
	if err != nil {
		return err
	}
	defer tr.Close()
	var j *journal
	if f.journal != "" {
		if j, err = openJournal(f.journal); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, j.close()) }()
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.openNamespace(ctx, client, d, traceHashBytes)
		if err != nil {
			return err
		}
		r := &replayer{
			client: client, ns: ns, blockBytes: int(f.blockBytes), durable: durable, verify: f.verify,
			timeout: f.timeout, report: newReplayReport(), journal: j,
		}
		r.report.Durable, r.report.BlockBytes = durable.String(), f.blockBytes
		before, err := r.evictions(ctx)
		if err != nil {
			return err
		}
		start := time.Now()
		runErr := f.requests(ctx, tr, r, start, newProgress(stderr))
		r.report.Seconds = time.Since(start).Seconds()
		r.report.rates()
		if after, err := r.evictions(ctx); err == nil {
			r.report.countEvictions(before, after)
		} else if runErr == nil {
			runErr = err
		}
		return f.finish(path, r, runErr, stdout)
	})
}

// report prints what a replay or a check has found.
func (f *replayFlags) report(stdout io.Writer, rep interface{ print(io.Writer) error }) error {
	if f.json {
		return writeJSONLine(stdout, rep)
	}
	return rep.print(stdout)
}

// finish prints the report and says why the replay failed, if it did. runErr is
// what ended it early.
func (f *replayFlags) finish(path string, r *replayer, runErr error, stdout io.Writer) error {
	rep := r.report
	if runErr != nil {
		rep.Error = runErr.Error()
	}
	switch err := f.report(stdout, rep); {
	case err != nil:
		return err
	case runErr != nil:
		return fmt.Errorf("replay %s: ended after %s: %w", path, counted(rep.Requests, "request"), runErr)
	case rep.WrongBytes > 0:
		return fmt.Errorf("replay %s: %d wrong bytes", path, rep.WrongBytes)
	case rep.Errors > 0:
		return fmt.Errorf("replay %s: %s, the first: %w", path, counted(rep.Errors, "error"), r.firstErr)
	}
	return nil
}

// requests replays the trace's requests in their order, one after another.
func (f *replayFlags) requests(ctx context.Context, tr *trace.Reader, r *replayer, start time.Time, p *progress) error {
	defer p.done()
	var zero time.Duration // time of the first request
	for n := int64(0); f.limit == 0 || n < f.limit; n++ {
		req, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n == 0 {
			zero = req.Time
		}
		if f.speed > 0 {
			due := time.Duration(float64(req.Time-zero) / f.speed)
			if err := sleep(ctx, due-time.Since(start)); err != nil {
				return err
			}
			r.report.LagSeconds = max(r.report.LagSeconds, (time.Since(start) - due).Seconds())
		}
		if err := r.request(ctx, req.HashIDs); err != nil {
			return err
		}
		p.update(func() string { return r.report.progressLine(time.Since(start)) })
	}
	return nil
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
