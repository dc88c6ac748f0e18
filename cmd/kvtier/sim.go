package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/sim"
	"github.com/kvtier/kvtier/policy/trace"
)

// simReport is what kvtier sim prints.
type simReport struct {
	Policy        string  `json:"policy"`
	Requests      int64   `json:"requests"`
	BlockRefs     int64   `json:"block_refs"`
	UniqueBlocks  int64   `json:"unique_blocks"`
	Capacity      int64   `json:"capacity"` // blocks
	PrefixHitRate float64 `json:"prefix_hit_rate"`
	HitRate       float64 `json:"hit_rate"`
	Evictions     int64   `json:"evictions"`
	NsPerRef      float64 `json:"ns_per_ref"`
}

func newSimCmd() *cobra.Command {
	var (
		name     string
		capacity = capacityValue{share: 0.1}
		opts     sim.Options
		limit    int
		asJSON   bool
	)
	c := &cobra.Command{
		Use:   "sim TRACE",
		Short: "Replay a request trace through an eviction policy, over metadata only",
		Long: `sim tells which hit rate a policy would have on a trace (.jsonl or .jsonl.gz) in a
tier of some capacity. It moves no bytes and needs no server. The tier starts
empty; a request's blocks are pinned while it is served.

With --high and --low, shares of the capacity, the tier is emptied down to the low
watermark whenever a request leaves it above the high one, as the store does.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if limit < 0 {
				return usageErrorf("--limit %d: want 0 (all requests) or more", limit)
			}
			p, err := policy.New(name)
			if err != nil {
				return usageErrorf("--policy: %w", err)
			}
			opts.Capacity, opts.Share = capacity.blocks, capacity.share
			r, err := runSim(c.Context(), args[0], limit, p, opts, newProgress(c.ErrOrStderr()))
			if err != nil {
				return err
			}
			if asJSON {
				return writeJSON(c.OutOrStdout(), r)
			}
			return r.print(c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&name, "policy", "lru-leaf", "eviction policy: "+strings.Join(policy.Names(), ", "))
	f.Var(&capacity, "capacity", "size of the tier: a number of blocks, or P% of the unique blocks of the requests replayed")
	shareVar(f, &opts.High, "high", 0, "high watermark, a share of the capacity; 0 evicts one for one when full")
	shareVar(f, &opts.Low, "low", 0, "low watermark, a share of the capacity")
	f.IntVar(&limit, "limit", 0, "replay only the first so many requests; 0 replays all")
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}

// runSim loads the trace and replays it.
func runSim(ctx context.Context, path string, limit int, p policy.Policy, o sim.Options, show *progress) (simReport, error) {
	defer show.done()
	w, err := loadWorkload(ctx, path, limit, show)
	if err != nil {
		return simReport{}, err
	}
	r, err := sim.Run(ctx, w, p, o)
	if errors.Is(err, block.ErrInvalid) {
		return simReport{}, usageErrorf("%w", err) // of the options, since the trace is read
	}
	if err != nil {
		return simReport{}, err
	}
	return simReport{
		Policy:        p.Name(),
		Requests:      r.Requests,
		BlockRefs:     r.BlockRefs,
		UniqueBlocks:  r.UniqueBlocks,
		Capacity:      r.Capacity,
		PrefixHitRate: r.PrefixHitRate,
		HitRate:       r.HitRate,
		Evictions:     r.Evictions,
		NsPerRef:      r.NsPerRef,
	}, nil
}

// loadWorkload reads the first limit requests of a trace, all when limit is 0.
func loadWorkload(ctx context.Context, path string, limit int, show *progress) (*sim.Workload, error) {
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
		if err := w.Add(req.HashIDs); err != nil {
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

// print writes the report for people.
func (r simReport) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "policy\t%s\n", r.Policy)
	fmt.Fprintf(w, "capacity\t%d of %d unique blocks (%.1f %%)\n", r.Capacity, r.UniqueBlocks, 100*float64(r.Capacity)/float64(r.UniqueBlocks))
	fmt.Fprintf(w, "requests\t%d, %d block references\n", r.Requests, r.BlockRefs)
	fmt.Fprintf(w, "prefix hit rate\t%.4f\n", r.PrefixHitRate)
	fmt.Fprintf(w, "hit rate\t%.4f\n", r.HitRate)
	fmt.Fprintf(w, "evictions\t%d\n", r.Evictions)
	fmt.Fprintf(w, "time\t%.0f ns a reference\n", r.NsPerRef)
	return w.Flush()
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
