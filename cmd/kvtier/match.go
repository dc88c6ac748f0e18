package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// matchFlags are the flags of match.
type matchFlags struct {
	clientFlags
	namespace    string
	all          bool
	lease        time.Duration
	conversation string
	plan         bool
	planned      block.PlanOptions
}

// matchOutput is what match prints as JSON.
type matchOutput struct {
	Prefix int            `json:"prefix"` // keys from the first one on that are resident without a gap
	Blocks []matchedBlock `json:"blocks"`
	Lease  *matchLease    `json:"lease,omitempty"`
	Plan   *matchPlan     `json:"plan,omitempty"` // with --plan
}

// matchPlan says what of the prefix is worth loading. Times are ns.
type matchPlan struct {
	From      int   `json:"from"` // first block to load
	To        int   `json:"to"`   // and the one behind the last; the same: none
	Load      int64 `json:"load_ns"`
	Compute   int64 `json:"compute_ns"` // of the rest
	Total     int64 `json:"total_ns"`
	Recompute int64 `json:"recompute_ns"` // of all
}

func describePlan(p block.Plan) *matchPlan {
	return &matchPlan{p.From, p.To, int64(p.Load), int64(p.Compute), int64(p.Total), int64(p.Recompute)}
}

// line says the same of a prefix of so many blocks.
func (p *matchPlan) line(prefix int) string {
	load, compute, total, all := time.Duration(p.Load), time.Duration(p.Compute), time.Duration(p.Total), time.Duration(p.Recompute)
	switch {
	case prefix == 0:
		return "nothing to load\n"
	case p.From == p.To:
		return fmt.Sprintf("compute all: %v, no loading is faster\n", all)
	case p.From == 0 && p.To == prefix:
		return fmt.Sprintf("load all %s: %v, computing all takes %v\n", counted(int64(prefix), "block"), load, all)
	}
	return fmt.Sprintf("load blocks %d to %d of %d and compute the rest: %v (load %v, compute %v), computing all takes %v\n",
		p.From, p.To-1, prefix, total, load, compute, all)
}

type matchedBlock struct {
	Hash  string `json:"hash"`
	State string `json:"state"`          // absent, pending or resident
	Tier  string `json:"tier,omitempty"` // nearest that has it
	Bytes uint32 `json:"bytes,omitempty"`
}

type matchLease struct {
	ID     uint64 `json:"id"`
	LeftMS int64  `json:"left_ms"`
	Blocks int    `json:"blocks"`
}

func newMatchCmd() *cobra.Command {
	f := &matchFlags{}
	c := &cobra.Command{
		Use:   "match HASH...",
		Short: "Find the longest prefix of a sequence that is resident",
		Long: `Look up the blocks of a sequence, root first, without touching a device, and
print how many from the first on are resident without a gap. It stops at the
first block that is not resident unless told to look up all.

A lease ends with the connection, so the one that this command takes ends with
it; it shows whether the blocks could be held. With --conversation it shows for how
long those of that conversation would be, with --lease as the longest.

With --plan it says which of the blocks are worth loading: from how fast the tiers
have been lately, and what prefill costs, which --prefill says or the daemon's.`,
		Args: cobra.MinimumNArgs(1),
	}
	f.add(c, "print one JSON object")
	namespaceFlag(c, &f.namespace)
	c.Flags().BoolVar(&f.all, "all", false, "look up every block")
	c.Flags().DurationVar(&f.lease, "lease", 0, "lease the resident blocks for so long")
	c.Flags().StringVar(&f.conversation, "conversation", "", "with --lease, `id` of the conversation: lease no longer than it pauses")
	c.Flags().BoolVar(&f.plan, "plan", false, "say which blocks of the prefix are worth loading")
	c.Flags().Var(&prefillValue{&f.planned.Prefill}, "prefill", "with --plan, what a token costs at the beginning of a prompt, such as 33us, and how many ns more for each token before it")
	c.Flags().BoolVar(&f.planned.Overlap, "overlap", false, "with --plan, the engine computes the head of a prompt while the tail is loaded")
	c.Flags().DurationVar(&f.planned.Deadline, "load-within", 0, "with --plan, longest time that loading may take; 0 is any")
	f.addInline(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return f.run(c.Context(), args, c.OutOrStdout())
	}
	return c
}

func (f *matchFlags) run(ctx context.Context, args []string, stdout io.Writer) error {
	hashes, hashLen, err := parseHashes(args)
	if err != nil {
		return err
	}
	if f.lease < 0 {
		return usageErrorf("--lease %v: want 0 or more", f.lease)
	}
	o := block.MatchOptions{All: f.all, Lease: f.lease, Conversation: f.conversation, Quiet: true}
	switch {
	case !f.plan && f.planned != (block.PlanOptions{}):
		return usageErrorf("--prefill, --overlap and --load-within are for --plan")
	case f.conversation != "" && f.lease == 0:
		return usageErrorf("--conversation is for --lease")
	case f.plan && f.lease > 0:
		return usageErrorf("--plan and --lease exclude each other")
	case f.planned.Deadline < 0:
		return usageErrorf("--load-within %v: want 0 or more", f.planned.Deadline)
	case f.plan:
		o.Plan = &f.planned
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.findNamespace(ctx, client, f.namespace, hashLen)
		if err != nil {
			return err
		}
		ctx, cancel := f.call(ctx)
		defer cancel()
		res, err := client.Match(ctx, ns, hashes, o)
		if err != nil {
			return err
		}
		out := matchOutput{Prefix: res.Prefix, Blocks: []matchedBlock{}}
		for i, b := range res.Blocks {
			m := matchedBlock{Hash: hashes[i].Hex(hashLen), State: stateName(b.State)}
			if b.State == block.Resident {
				m.Tier, m.Bytes = b.Tier.String(), b.Len
			}
			out.Blocks = append(out.Blocks, m)
		}
		if res.Lease.ID != 0 {
			out.Lease = &matchLease{ID: res.Lease.ID, LeftMS: res.Lease.Left.Milliseconds(), Blocks: res.Lease.Count}
		}
		if res.Plan != nil {
			out.Plan = describePlan(*res.Plan)
		}
		if f.json {
			return writeJSON(stdout, out)
		}
		return out.print(stdout, len(hashes))
	})
}

func (m *matchOutput) print(w io.Writer, asked int) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "HASH\tSTATE\tTIER\tBYTES")
	for _, b := range m.Blocks {
		if b.Tier == "" {
			fmt.Fprintf(tw, "%s\t%s\t-\t-\n", b.Hash, b.State)
			continue
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%d\n", b.Hash, b.State, b.Tier, b.Bytes)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "prefix %d of %d\n", m.Prefix, asked)
	if err == nil && m.Lease != nil {
		_, err = fmt.Fprintf(w, "lease %d: %s for %v\n", m.Lease.ID, counted(int64(m.Lease.Blocks), "block"), time.Duration(m.Lease.LeftMS)*time.Millisecond)
	}
	if err == nil && m.Plan != nil {
		_, err = io.WriteString(w, m.Plan.line(m.Prefix))
	}
	return err
}

func stateName(s block.State) string {
	switch s {
	case block.Absent:
		return "absent"
	case block.Pending:
		return "pending"
	case block.Resident:
		return "resident"
	}
	return fmt.Sprintf("state(%d)", s)
}
