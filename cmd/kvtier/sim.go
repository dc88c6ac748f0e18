package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/sim"
	"github.com/kvtier/kvtier/policy/trace"
)

// beladyName stands for the optimum where policies are named.
const beladyName = "belady"

// simPolicies lists what sim can replay through: the optimum, and the policies
// that there are.
func simPolicies() []string { return append(policy.Names(), beladyName) }

// simFlags are the flags of sim.
type simFlags struct {
	policy     string
	compare    string
	capacities capacityList
	tiers      capacityList // none, or of DRAM and SSD
	budget     float64      // SSD block writes for each block reference; 0: any number
	full       int          // tokens of a full block; 0: all are taken as full
	opts       sim.Options  // all but the capacity
	limit      int
	asJSON     bool
	csv, plot  string
}

// sweep is what --compare replays at if no capacities are given.
const sweep = "1%,2%,5%,10%,20%,50%"

func newSimCmd() *cobra.Command {
	f := &simFlags{capacities: capacityList{{share: 0.1}}}
	c := &cobra.Command{
		Use:   "sim TRACE",
		Short: "Replay a request trace through eviction policies, over metadata only",
		Long: `sim tells which hit rate a policy would have on a trace (.jsonl or .jsonl.gz) in a
tier of some capacity. It moves no bytes and needs no server. The tier starts
empty; a request's blocks are pinned while it is served.

Policy belady knows the future: no other has more hits.

With several capacities, and with --compare, there is a table with the prefix hit
rate of each policy at each capacity, and how many percent of belady's it is. --json
prints an array then. --compare replays at ` + sweep + ` if no
--capacity is given. --csv and --plot write the same to files.

With --tiers there are two, of the same policy: what leaves DRAM is written to SSD unless
it is there, what is hit on SSD comes up and keeps its copy, and what DRAM has no room
for is written to SSD at once. ssd_writes_per_hit is the blocks written to SSD over the
prefix hit blocks of both. Of what --block-tokens shows to be a partial last block of a
prompt, nothing is written. belady has one tier of both sizes together.

With --high and --low, shares of the capacity, the tier is emptied down to the low
watermark whenever a request leaves it above the high one, as the store does.`,
		Example: `  kvtier sim conversation.jsonl.gz --policy switch --capacity 5%
  kvtier sim conversation.jsonl.gz --compare all --csv hits.csv --plot hits.svg
  kvtier sim conversation.jsonl.gz --compare lru-leaf,switch,belady --capacity 1000,2000,4000
  kvtier sim conversation.jsonl.gz --policy switch --tiers 5%,30% --write-budget 0.2`,
		Args: cobra.ExactArgs(1),
	}
	fs := c.Flags()
	fs.StringVar(&f.policy, "policy", policy.Default, "eviction policy: "+strings.Join(simPolicies(), ", "))
	fs.StringVar(&f.compare, "compare", "", "several policies, separated by commas, or all; excludes --policy")
	fs.Var(&f.capacities, "capacity", "size of the tier: a number of blocks, or P% of the unique blocks of the requests replayed; several are separated by commas")
	fs.Var(&f.tiers, "tiers", "sizes of DRAM and SSD, separated by a comma, each as of --capacity; excludes it")
	fs.Float64Var(&f.budget, "write-budget", 0, "with --tiers, blocks that may be written to SSD for each block reference, paid from a bucket; 0 is any number")
	fs.IntVar(&f.full, "block-tokens", 0, "with --tiers, tokens of a full block: the last block of a shorter prompt is partial; 0 takes all as full")
	shareVar(fs, &f.opts.High, "high", 0, "high watermark, a share of the capacity; 0 evicts one for one when full")
	shareVar(fs, &f.opts.Low, "low", 0, "low watermark, a share of the capacity")
	fs.IntVar(&f.limit, "limit", 0, "replay only the first so many requests; 0 replays all")
	fs.BoolVar(&f.asJSON, "json", false, "print one JSON object, or an array of them")
	fs.StringVar(&f.csv, "csv", "", "`file` to write a line to for each policy and capacity")
	fs.StringVar(&f.plot, "plot", "", "`file` to draw the hit rates over the capacity in, as SVG")
	c.RunE = func(c *cobra.Command, args []string) error {
		sized := c.Flags().Changed("capacity")
		if sized && f.tiers != nil {
			return usageErrorf("--tiers and --capacity exclude each other")
		}
		if f.compare != "" && !sized {
			if err := f.capacities.Set(sweep); err != nil {
				return err
			}
		}
		names, err := f.check(c.Flags().Changed("policy"))
		if err != nil {
			return err
		}
		reports, err := f.run(c.Context(), args[0], names, newProgress(c.ErrOrStderr()))
		if err != nil {
			return err
		}
		return f.show(c.OutOrStdout(), reports)
	}
	return c
}

// check says what is wrong with the flags, and which policies they mean.
func (f *simFlags) check(chosen bool) (names []string, err error) {
	if f.limit < 0 {
		return nil, usageErrorf("--limit %d: want 0 (all requests) or more", f.limit)
	}
	if f.plot != "" && !strings.HasSuffix(f.plot, ".svg") {
		return nil, usageErrorf("--plot %q: want a name that ends in .svg", f.plot)
	}
	if err := f.checkTiers(); err != nil {
		return nil, err
	}
	flag := "--policy"
	switch {
	case f.compare == "":
		names = []string{f.policy}
	case chosen:
		return nil, usageErrorf("--compare and --policy exclude each other")
	case f.compare == "all":
		return simPolicies(), nil
	default:
		flag, names = "--compare", strings.Split(f.compare, ",")
	}
	for i, name := range names {
		if !slices.Contains(simPolicies(), name) {
			return nil, usageErrorf("%s: policy %q: want %s", flag, name, strings.Join(simPolicies(), ", "))
		}
		if slices.Contains(names[:i], name) {
			return nil, usageErrorf("%s: policy %q is there twice", flag, name)
		}
	}
	return names, nil
}

// checkTiers says what is wrong with the flags for two tiers.
func (f *simFlags) checkTiers() error {
	switch {
	case f.budget < 0 || math.IsNaN(f.budget) || math.IsInf(f.budget, 0):
		return usageErrorf("--write-budget %v: want 0 (any number) or more", f.budget)
	case f.full < 0:
		return usageErrorf("--block-tokens %d: want 0 (all blocks are full) or more", f.full)
	case f.tiers == nil && f.budget != 0:
		return usageErrorf("--write-budget is for --tiers")
	case f.tiers == nil && f.full != 0:
		return usageErrorf("--block-tokens is for --tiers")
	case f.tiers != nil && len(f.tiers) != 2:
		return usageErrorf("--tiers %s: want two sizes, DRAM,SSD", f.tiers.String())
	case f.tiers != nil && f.plot != "":
		return usageErrorf("--plot draws over --capacity, and excludes --tiers")
	}
	return nil
}

// run loads the trace and replays it through each policy at each capacity.
func (f *simFlags) run(ctx context.Context, path string, names []string, show *progress) (reports []simReport, err error) {
	defer show.done()
	w, err := loadWorkload(ctx, path, f.limit, f.full, show)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if f.tiers != nil {
			show.update(func() string { return fmt.Sprintf("replaying through %s at %s", name, f.tiers.String()) })
			r, err := f.simulateTiers(ctx, w, name)
			if err != nil {
				return nil, err
			}
			reports = append(reports, r)
			continue
		}
		for _, capacity := range f.capacities {
			show.update(func() string { return fmt.Sprintf("replaying through %s at %s", name, capacity.String()) })
			r, err := simulate(ctx, w, name, f.sized(capacity))
			if err != nil {
				return nil, err
			}
			reports = append(reports, r)
		}
	}
	return reports, nil
}

// simulate replays through one policy at one capacity.
func simulate(ctx context.Context, w *sim.Workload, name string, o sim.Options) (simReport, error) {
	var r sim.Result
	var err error
	if name == beladyName {
		r, err = sim.Belady(ctx, w, o)
	} else {
		var p policy.Policy
		if p, err = policy.New(name); err != nil {
			return simReport{}, err
		}
		r, err = sim.Run(ctx, w, p, o)
	}
	if err != nil {
		return simReport{}, simError(err)
	}
	return report(name, r), nil
}

// simulateTiers replays through two tiers of one policy. The optimum has one of both
// sizes together.
func (f *simFlags) simulateTiers(ctx context.Context, w *sim.Workload, name string) (simReport, error) {
	o := sim.TierOptions{DRAM: f.sized(f.tiers[0]), SSD: f.sized(f.tiers[1]), WriteBudget: f.budget}
	if name == beladyName {
		both, err := o.Together(w)
		if err != nil {
			return simReport{}, simError(err)
		}
		return simulate(ctx, w, name, both)
	}
	dram, err := policy.New(name)
	if err != nil {
		return simReport{}, err
	}
	ssd, err := policy.New(name)
	if err != nil {
		return simReport{}, err
	}
	t, err := sim.RunTiers(ctx, w, dram, ssd, o)
	if err != nil {
		return simReport{}, simError(err)
	}
	r := report(name, t.Result)
	r.tierReport = &tierReport{
		CapacityByTier: byTier{t.Capacities[0], t.Capacities[1]},
		HitsByTier:     byTier{t.PrefixHits[0], t.PrefixHits[1]},
		SSDWrites:      t.SSDWrites,
	}
	if hits := t.PrefixHits[0] + t.PrefixHits[1]; hits > 0 {
		r.SSDWritesPerHit = float64(t.SSDWrites) / float64(hits)
	}
	return r, nil
}

// sized are the options of a tier of that size.
func (f *simFlags) sized(capacity capacityValue) sim.Options {
	o := f.opts
	o.Capacity, o.Share = capacity.blocks, capacity.share
	return o
}

// simError tells what is wrong with the options from what else can fail.
func simError(err error) error {
	if errors.Is(err, block.ErrInvalid) {
		return usageErrorf("%w", err) // since the trace is read
	}
	return err
}

// report is what is printed of a replay.
func report(name string, r sim.Result) simReport {
	return simReport{
		Policy:        name,
		Requests:      r.Requests,
		BlockRefs:     r.BlockRefs,
		UniqueBlocks:  r.UniqueBlocks,
		Capacity:      r.Capacity,
		PrefixHitRate: r.PrefixHitRate,
		HitRate:       r.HitRate,
		Evictions:     r.Evictions,
		NsPerRef:      r.NsPerRef,
	}
}

// show prints the reports and writes the files that are wanted.
func (f *simFlags) show(out io.Writer, reports []simReport) error {
	if f.csv != "" {
		if err := os.WriteFile(f.csv, simCSV(reports), 0o666); err != nil {
			return fmt.Errorf("write --csv: %w", err)
		}
	}
	if f.plot != "" {
		if err := os.WriteFile(f.plot, simPlot(reports), 0o666); err != nil {
			return fmt.Errorf("write --plot: %w", err)
		}
	}
	one := f.compare == "" && (f.tiers != nil || len(f.capacities) == 1)
	switch {
	case one && f.asJSON:
		return writeJSON(out, reports[0])
	case one:
		return reports[0].print(out)
	case f.asJSON:
		return writeJSON(out, reports)
	case f.tiers != nil:
		return printTiers(out, reports)
	}
	return printComparison(out, reports)
}

// loadWorkload reads the first limit requests of a trace, all when limit is 0. Last
// blocks are partial that have fewer than full tokens.
func loadWorkload(ctx context.Context, path string, limit, full int, show *progress) (*sim.Workload, error) {
	r, err := trace.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close() // it was only read
	w := sim.NewWorkload()
	for limit == 0 || w.Requests() < limit {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("read trace %s: %w", path, err)
		}
		req, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := w.Add(req.HashIDs, req.InputLength < full*len(req.HashIDs)); err != nil {
			return nil, fmt.Errorf("load trace %s: %w", path, err)
		}
		show.update(func() string {
			return fmt.Sprintf("read %d requests, %d unique blocks", w.Requests(), w.Unique())
		})
	}
	if w.Unique() == 0 {
		return nil, fmt.Errorf("%w: trace %s has no blocks in %d requests", block.ErrInvalid, path, w.Requests())
	}
	return w, nil
}

// capacityValue is a flag that holds a number of blocks or a share, one of which
// is zero.
type capacityValue struct {
	blocks int64
	share  float64
}

// String gives the value as it is written on the command line.
func (v *capacityValue) String() string {
	if v.share != 0 {
		// In as few digits as tell the share apart.
		return strconv.FormatFloat(100*v.share, 'g', 12, 64) + "%"
	}
	return strconv.FormatInt(v.blocks, 10)
}

// Set reads BLOCKS or P%.
func (v *capacityValue) Set(s string) error {
	if percent, found := strings.CutSuffix(s, "%"); found {
		f, err := strconv.ParseFloat(percent, 64)
		if err != nil || !(f > 0 && f <= 100) {
			return fmt.Errorf("capacity %q: want above 0%% and at most 100%%", s)
		}
		*v = capacityValue{share: f / 100}
		return nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 1 {
		return fmt.Errorf("capacity %q: want a whole number of blocks from 1, or P%%", s)
	}
	*v = capacityValue{blocks: n}
	return nil
}

// Type is the name that help shows.
func (v *capacityValue) Type() string { return "BLOCKS|P%" }

// capacityList is a flag that holds capacities, separated by commas.
type capacityList []capacityValue

// String gives the capacities as they are written on the command line.
func (l *capacityList) String() string {
	var all []string
	for _, v := range *l {
		all = append(all, v.String())
	}
	return strings.Join(all, ",")
}

// Set reads capacities.
func (l *capacityList) Set(s string) error {
	var all capacityList
	for part := range strings.SplitSeq(s, ",") {
		var v capacityValue
		if err := v.Set(part); err != nil {
			return err
		}
		all = append(all, v)
	}
	*l = all
	return nil
}

// Type is the name that help shows.
func (l *capacityList) Type() string { return "BLOCKS|P%,..." }
