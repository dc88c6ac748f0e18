package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// benchRow is one figure that kvtier bench prints.
type benchRow struct {
	Name  string   `json:"name"`
	Value float64  `json:"value"`
	Unit  string   `json:"unit"`
	Limit *float64 `json:"limit"` // nil where there is none to compare with
	Ratio *float64 `json:"ratio"` // value / limit: the median over the pairs
}

// benchTarget is what one word on the command line measures.
type benchTarget struct {
	name  string
	run   func(ctx context.Context, b *bench) error
	needs func(ctx context.Context, b *bench) error // says, before the first target runs, what is missing for it; or nil
}

// benchTargets lists the targets in the order in which they run.
func benchTargets() []benchTarget {
	return []benchTarget{
		{name: "dram", run: benchDRAM},
		{name: "nvme", run: benchNVMe},
		{name: "catalog", run: benchCatalog},
		{name: "match", run: benchMatch},
		{name: "grpc", run: benchGRPC},
		{name: "policy", run: benchPolicy},
		{name: "tcp", run: benchTCP},
		{name: "shm", run: benchSHM},
		{name: "store", run: benchSessions},
		{name: "attach", run: benchAttach, needs: needPython},
		{name: "object", run: benchObject, needs: needObject},
		{name: "restart", run: benchRestart},
	}
}

// allTargets stands for every target on the command line.
const allTargets = "all"

// minPairs is the least number of pairs whose median is worth printing.
const minPairs = 7

// benchScale says how much is measured. Tests measure less.
type benchScale struct {
	pairs, warmups int
	payload        int // bytes of a block of dram and nvme
	blocks         int // of a pass of dram and nvme
	records        int // of a pass of catalog
	tableBlocks    int // blocks among which match and grpc look up
	lookups        int // of 256 keys in a pass of match
	calls          int // in a pass of grpc
	objects        int // of a pass of object
	policyBlocks   int // of the tier of policy
	restartBlocks  int // blocks that restart recovers
	restartDRAM    string
}

// fullScale is what the command measures.
func fullScale(pairs int) benchScale {
	return benchScale{
		pairs: pairs, warmups: 2,
		payload: 1 << 20, blocks: 256,
		records:     50_000,
		tableBlocks: 1_000_000, lookups: 1000, calls: 500,
		objects:       32,
		policyBlocks:  200_000,
		restartBlocks: 1_000_000, restartDRAM: "1GiB",
	}
}

func newBenchCmd() *cobra.Command {
	var (
		asJSON bool
		dir    string
		object string
		python string
		pairs  int
	)
	var names []string
	for _, t := range benchTargets() {
		names = append(names, t.name)
	}
	c := &cobra.Command{
		Use:   "bench TARGET...",
		Short: "Measure the store on this machine, each figure beside its limit",
		Long: `bench measures the store in a directory of its own, which it removes at the end,
and beside each figure the limit that the machine sets: a bare loop that does the
same without a store. Figure and limit are taken by turns on the same buffers,
after two passes for warming up, --pairs times, and five times as often where a
pass is short. What is printed are the medians, and the median of the ratios
(value / limit, for times too). Keep the machine quiet meanwhile.

Targets: ` + strings.Join(names, " ") + `, or all.

  dram.get.1MiB            a read from the DRAM tier into the caller's memory; memcpy
  dram.put.1MiB            reserve, fill and commit; a loop that copies and hashes
  dram.get_verified.1MiB   a read that checks the checksum; the same loop
  nvme.read.1MiB.d1, .d8   a read from the NVMe tier, checksum verified, 1 or 8 at a
                           time; O_DIRECT reads of the same file at the same places
  nvme.write.1MiB.d8       blocks going down from DRAM, catalog included; O_DIRECT writes
  nvme.put_durable.1MiB.d8 8 durable puts at a time; the same with every sync left out
  catalog.insert           records, 1000 a commit; Pebble alone, same keys and values
  match.inproc.256         time per key of lookups of 256 keys among 1 M blocks
  grpc.match.256           the same over gRPC and TCP, median call; an empty call plus
                           256 bare lookups in the same table
  policy.NAME.ref          processor time of an eviction policy per block that a request
                           uses, in a full tier of 200,000 blocks, evictions included
  policy.NAME.victim       the part of that for evictions, per block that leaves
  policy.NAME.bytes        memory of the policy per resident block, without ghosts
  policy.NAME.pinned       how many times as long a call for 64 victims takes, at the
                           99th percentile, when a tenth of the blocks are pinned
  tcp.read.1MiB.c1, .c4    transfers between two agents over TCP on loopback, and
  tcp.write.1MiB.c1, .c4   1 or 4 connections; a bare loop: requests of 24 bytes, writev,
                           read in full, the same bytes and connections
  shm.read.1MiB.d1, .d16   the same through shared memory, 1 or 16 at a time; memcpy
  shm.write.1MiB.d1, .d16
  store.get.1MiB.c1, ...   calls on kvtier serve through sessions over TCP, checksums
  store.put.1MiB.c1, ...   verified, for 64 KiB, 1 MiB and 4 MiB, with 1 and 4 connections;
                           the bare loop
  store.get_batch16.64KiB.c1  16 blocks a call; the bare loop that gets 1 MiB
  store.put.1MiB.p99       the 99th percentile of the puts' times as multiple of the median
  store.local_get.1MiB.c1  through shared memory; the bare loop over a unix socket
  store.cpu.get.1MiB       processor time of both ends; that of the bare loop's
  store.nvme_get.1MiB.c1, .c4  blocks on NVMe only; a bare loop that reads O_DIRECT and
                           sends. With .disk: O_DIRECT reads alone
  attach.get.1MiB.d16      a worker's calls through the Python client, 16 blocks each,
  attach.put.1MiB.d16      between its buffers and the store's memory; a bare loop in the
                           worker that copies and hashes in the same steps, between the
                           same buffers and memory like the store's
  attach.region_get.1MiB.d16  the same where the daemon moves the bytes, to and from the
  attach.region_put.1MiB.d16  worker's region, by several goroutines; a bare loop as the
                           daemon's, but one: with idle cores the ratio is above 1
  attach.lease_read.1MiB   from the call to a byte of a block that is lent where it lies,
                           median call; an empty call of the same client
  attach.match_lease.256   a match of 256 keys with a lease, median call; a call of the same
                           client with the same bytes to a server that only answers, plus
                           a match with lease in this process
  object.put.d8            objects of 8 MiB, packed of blocks of 64 KiB, 8 at a time, to the
  object.get.d8            bucket that --object names and back, headers and checksums
                           verified; the SDK alone, objects of the same size
  object.requests_per_block  requests of the service per block of these; one object a block
  restart.1M               kvtier serve is killed by SIGKILL when it has 1 M durable
                           blocks of 4 KiB; from its next start to "ready"
  memory.resident          by target restart: what the daemon's memory grows by per
                           block from 1 M to 2 M blocks

Target attach needs Python with the packages kvtier and xxhash: python3, or what
--python names, with PYTHONPATH as it is. It tells what is missing before anything is
measured, also where target is all. Target object needs --object, and is not one of all
without it. It makes and removes a prefix of its own below the one that is given.

Targets tcp, shm, store and attach run a second process. Shared memory needs huge pages to
be measured at its best: as root, bench sets aside as many as it needs and gives
them back at its end; where it cannot it says so, and measures figure and limit on
the pages that shared memory has without. restart.1M and memory.resident are
measured once and take about 10 GB of disk. memory.resident is taken from two daemons that have just recovered:
resident memory after a garbage collection, less heap that is free, Pebble's memory
tables and its cache (which are fixed by their options), and less what the eviction
policy keeps of as many blocks, which is measured apart.`,
		Example:   "  kvtier bench dram nvme\n  kvtier bench all --json --dir /mnt/nvme0",
		Args:      cobra.MinimumNArgs(1),
		ValidArgs: append(names, allTargets),
		RunE: func(c *cobra.Command, args []string) error {
			if pairs < minPairs {
				return usageErrorf("--pairs %d: want at least %d", pairs, minPairs)
			}
			targets, err := chooseTargets(args, object != "")
			if err != nil {
				return err
			}
			rows, err := runBench(c.Context(), targets, dir, python, object, fullScale(pairs), c.ErrOrStderr())
			if err != nil {
				return err
			}
			if asJSON {
				return writeJSON(c.OutOrStdout(), rows)
			}
			return printBench(c.OutOrStdout(), rows)
		},
	}
	f := c.Flags()
	f.BoolVar(&asJSON, "json", false, "print an array of objects")
	f.StringVar(&dir, "dir", "", "`directory` on the disk to measure, where a directory is made for the time being (default: the user's cache directory)")
	f.StringVar(&python, "python", "python3", "`program` that runs the worker of target attach, with the packages kvtier and xxhash")
	f.StringVar(&object, "object", "", "`URL` of the bucket of target object: s3://BUCKET/PREFIX?endpoint=URL&path_style=true&region=R")
	f.IntVar(&pairs, "pairs", minPairs, "how many times figure and limit are taken")
	return c
}

// chooseTargets finds the targets that are named, in the order in which they run. Without
// a bucket, all is all but object.
func chooseTargets(args []string, bucket bool) ([]benchTarget, error) {
	all := benchTargets()
	for _, a := range args {
		if a != allTargets && !slices.ContainsFunc(all, func(t benchTarget) bool { return t.name == a }) {
			var names []string
			for _, t := range all {
				names = append(names, t.name)
			}
			return nil, usageErrorf("target %q: want %s or %s", a, strings.Join(names, ", "), allTargets)
		}
	}
	every := slices.Contains(args, allTargets)
	return slices.DeleteFunc(all, func(t benchTarget) bool {
		return !slices.Contains(args, t.name) && (!every || t.name == "object" && !bucket)
	}), nil
}

// bench is one run of the command.
type bench struct {
	benchScale
	dir     string // its own
	python  string
	object  string // URL of a bucket; empty: none
	out     io.Writer
	log     *slog.Logger
	rows    []benchRow
	closers closers
	table   *lookupStore // of match and grpc, made by the first of them
}

// runBench measures targets in a directory of its own under dir.
func runBench(ctx context.Context, targets []benchTarget, dir, python, object string, scale benchScale, stderr io.Writer) (rows []benchRow, err error) {
	if dir, err = benchDir(dir); err != nil {
		return nil, err
	}
	b := &bench{benchScale: scale, dir: dir, python: python, object: object, out: stderr, log: newLogger(stderr, "warn", "text")}
	defer func() {
		err = errors.Join(err, b.closers.close(), os.RemoveAll(b.dir))
	}()
	for _, t := range targets {
		if t.needs == nil {
			continue
		}
		if err := t.needs(ctx, b); err != nil {
			return nil, fmt.Errorf("bench %s: %w", t.name, err)
		}
	}
	b.warnIfBusy(os.DirFS("/"))
	for _, t := range targets {
		if err := t.run(ctx, b); err != nil {
			return nil, fmt.Errorf("bench %s: %w", t.name, err)
		}
	}
	return b.rows, nil
}

// benchDir makes a new directory under dir.
func benchDir(dir string) (string, error) {
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			cache = os.TempDir() // no home
		}
		dir = filepath.Join(cache, "kvtier")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", fmt.Errorf("make a directory for bench: %w; give --dir", err)
		}
	}
	dir, err := os.MkdirTemp(dir, "bench-")
	if err != nil {
		return "", fmt.Errorf("make a directory for bench: %w; give --dir", err)
	}
	return filepath.Abs(dir)
}

// needSpace refuses to begin what would fill the file system.
func (b *bench) needSpace(n int64) error {
	free, err := freeSpace(b.dir)
	if err != nil {
		return err
	}
	if free < n {
		return fmt.Errorf("%s has %s free and %s are needed; give --dir", b.dir, formatSizeShort(free), formatSizeShort(n))
	}
	return nil
}

// note tells how far the run is.
func (b *bench) note(format string, args ...any) {
	fmt.Fprintf(b.out, format+"\n", args...)
}

// printBench writes the rows for people.
func printBench(out io.Writer, rows []benchRow) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "NAME\tVALUE\tLIMIT\tUNIT\tRATIO\t")
	for _, r := range rows {
		limit, ratio := "-", "-"
		if r.Limit != nil {
			limit, ratio = figure(*r.Limit), fmt.Sprintf("%.3f", *r.Ratio)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t\n", r.Name, figure(r.Value), limit, r.Unit, ratio)
	}
	return w.Flush()
}

// figure writes a number in about four digits.
func figure(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}
