package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy/trace"
)

const (
	maxClients = 1024
	// rateClients is how many clients --rate has as a rule: enough for a stall to
	// hold up more than one request.
	rateClients = 16
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
	clients    int
	rate       float64
	abandon    float64
	seed       uint64
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

Each of --clients has a connection and a session of its own; the report says which
way the blocks went. The requests are dealt out in the
order of the trace, each to one client, and there is one report. Requests that
share blocks may then be under way at once.

With --rate or --speed each request has a moment at which it should begin, by its
place in the trace or by its recorded time. No request is left out: one for which
no client is free begins late. The report counts those that began more than 1 ms
late, and says by how much at most. The latencies count from those moments, so
that a stall shows in all that it held up: a request's goes from its moment to
its end, a call's from when it should have begun, which is the moment for a
request's first call and the end of the call before for the others. Without
--rate and --speed a request's goes from when a client took it up, a call's from
its own start. The tries of a put that was refused are one call; calls that
failed count too; with --verify a get includes the checking.

A journal takes the hash of each block as soon as the daemon has acknowledged
its put. Given to --check-only, it tells how many of those are gone: after a
crash that must be none, but for blocks that were evicted.`,
		Example: `  kvtier replay conversation.jsonl.gz --block-bytes 64KiB --durable g3 --verify
  kvtier replay conversation.jsonl.gz --block-bytes 64KiB --rate 200 --clients 32 --json
  kvtier replay conversation.jsonl.gz --check-only --json`,
		Args: cobra.ExactArgs(1),
	}
	f.add(c, "print one JSON object")
	fs := c.Flags()
	fs.StringVar(&f.namespace, "namespace", "replay", "`name` of the namespace")
	sizeVar(fs, &f.blockBytes, "block-bytes", 0, "`size` of each block (required, but with --check-only)")
	fs.Var(&speedValue{numberValue{&f.speed, "a number from 0 to 1e9", 1e9}}, "speed", "how many times faster than recorded; 0 is as fast as possible")
	fs.Var(&numberValue{&f.rate, "a number of requests per second from 0 to 1e6", 1e6}, "rate", "requests that begin each second, whether or not those before have ended; excludes --speed (default 0: none is waited for)")
	fs.IntVar(&f.clients, "clients", 0, "`number` of clients, and so of requests that are under way at once (default 1, with --rate 16)")
	fs.Int64Var(&f.limit, "limit", 0, "replay the first so many requests; 0 replays all")
	enumVar(fs, &f.durable, "durable", "g2", "how durable a block is when its put ends: in DRAM (g2) or on NVMe (g3)", "g2", "g3")
	fs.BoolVar(&f.verify, "verify", false, "check every byte that is read")
	fs.BoolVar(&f.checkOnly, "check-only", false, "put nothing: read and check the trace's blocks that the daemon lists")
	fs.StringVar(&f.journal, "journal", "", "`file` to append the hashes of acknowledged blocks to; with --check-only to read them from")
	shareVar(fs, &f.abandon, "abandon", 0, "for tests: share of the puts to break off at a random point; their blocks are not in the journal")
	fs.Uint64Var(&f.seed, "seed", 1, "for tests: draws which puts --abandon breaks off")
	f.addInline(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if !c.Flags().Changed("clients") {
			if f.clients = 1; f.rate > 0 {
				f.clients = rateClients
			}
		}
		if f.checkOnly {
			return f.check(c.Context(), args[0], c.OutOrStdout(), c.ErrOrStderr())
		}
		return f.replay(c.Context(), args[0], c.OutOrStdout(), c.ErrOrStderr())
	}
	return c
}

// numberValue is a flag that holds a number from 0 to most, which want describes.
type numberValue struct {
	p    *float64
	want string
	most float64
}

// String gives the number.
func (v *numberValue) String() string {
	if v.p == nil {
		return ""
	}
	return strconv.FormatFloat(*v.p, 'g', -1, 64)
}

// Set reads a number.
func (v *numberValue) Set(s string) error {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f >= 0 && f <= v.most) {
		return fmt.Errorf("%q: want %s", s, v.want)
	}
	*v.p = f
	return nil
}

// Type is the name that help shows.
func (v *numberValue) Type() string { return "number" }

// speedValue is a flag that holds how many times faster a trace is replayed.
type speedValue struct{ numberValue }

// Set reads a speed, with or without an x behind it.
func (v *speedValue) Set(s string) error {
	number := s
	if n := len(s); n > 1 && s[n-1] == 'x' {
		number = s[:n-1]
	}
	if v.numberValue.Set(number) != nil {
		return fmt.Errorf("%q: want %s", s, v.want)
	}
	return nil
}

func (f *replayFlags) validate() error {
	if f.limit < 0 {
		return usageErrorf("--limit %d: want 0 or more", f.limit)
	}
	if f.rate > 0 && (f.speed > 0 || f.checkOnly) {
		return usageErrorf("--rate %g: not with --speed or --check-only", f.rate)
	}
	if f.clients < 1 || f.clients > maxClients {
		return usageErrorf("--clients %d: want 1 to %d", f.clients, maxClients)
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
	return f.connectAll(ctx, f.clients, func(clients []*api.Client) error {
		ns, err := f.openNamespace(ctx, clients[0], d, traceHashBytes)
		if err != nil {
			return err
		}
		run := &replayRun{next: tr.Next, limit: f.limit, rate: f.rate, speed: f.speed, progress: newProgress(stderr), report: newReplayReport()}
		rep := run.report
		rep.Durable, rep.BlockBytes, rep.Clients, rep.Rate = durable.String(), f.blockBytes, f.clients, f.rate
		var rs []*replayer
		for i, client := range clients {
			rs = append(rs, &replayer{
				client: client, ns: ns, blockBytes: int(f.blockBytes), durable: durable, verify: f.verify,
				timeout: f.timeout, journal: j, abandon: f.abandon, rng: rand.New(rand.NewPCG(f.seed, uint64(i))),
			})
		}
		before, err := f.stats(ctx, clients[0])
		if err != nil {
			return err
		}
		runErr := run.run(ctx, rs)
		rep.Way = wayOf(clients)
		if after, err := f.stats(ctx, clients[0]); err == nil {
			rep.countEvictions(before, after)
		} else if runErr == nil {
			runErr = err
		}
		return f.finish(path, run, runErr, stdout)
	})
}

// wayOf says which way blocks went, of each client the last.
func wayOf(clients []*api.Client) string {
	counts := map[string]int{}
	for _, c := range clients {
		counts[c.SessionInfo().Way]++
	}
	if len(counts) == 1 {
		return clients[0].SessionInfo().Way
	}
	var parts []string
	for _, way := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", way, counts[way]))
	}
	return strings.Join(parts, ", ")
}

// stats asks a daemon for its counters.
func (f *replayFlags) stats(ctx context.Context, client *api.Client) (block.Stats, error) {
	ctx, cancel := f.call(ctx)
	defer cancel()
	return client.Stats(ctx)
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
func (f *replayFlags) finish(path string, run *replayRun, runErr error, stdout io.Writer) error {
	rep := run.report
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
		return fmt.Errorf("replay %s: %s, the first: %w", path, counted(rep.Errors, "error"), run.firstErr)
	}
	return nil
}
