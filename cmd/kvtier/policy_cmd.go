package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// policyOutput is what policy prints of a tier as JSON.
type policyOutput struct {
	Tier   string `json:"tier"`
	Policy string `json:"policy"`
	Start  string `json:"start"`  // the one that the daemon was started with
	Moving int64  `json:"moving"` // blocks that the policy before it still has

	Curves  []statCurve  `json:"curves,omitempty"`  // what the tier would have had with others
	Budgets []statBudget `json:"budgets,omitempty"` // of what is written to it
}

func newPolicyCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "policy",
		Short: "Show or change which blocks leave a tier first",
	}
	c.AddCommand(newPolicyShowCmd(), newPolicySetCmd())
	return c
}

func newPolicyShowCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "show",
		Short: "Print the policy of each tier, and what others would have hit",
		Long: `Print the policy of each tier, and what share of the blocks asked for the tier would
have had by itself with each of the policies, and with half and twice the room under
the one that it has: all estimated from a sample of the requests since the daemon's
start. ALL is what a tier with room for everything would have had: no more can be hit.
Then the write budgets, what may be written now, and what was turned away; and what
prefill costs the engines of namespaces, as serve --prefill says it or they have
reported it (as JSON: see stat).`,
		Args: noArgs,
	}
	f.add(c, "print one JSON array")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.connect(c.Context(), func(client *api.Client) error {
			ctx, cancel := f.call(c.Context())
			defer cancel()
			all, err := client.Policies(ctx)
			if err != nil {
				return err
			}
			s, err := client.Stats(ctx)
			if err != nil {
				return err
			}
			if f.json {
				return writeJSON(c.OutOrStdout(), describeTiers(all, s.Tiers))
			}
			if err := printPolicies(c.OutOrStdout(), all); err != nil {
				return err
			}
			if err := printCurves(c.OutOrStdout(), s.Tiers); err != nil {
				return err
			}
			if err := printBudgets(c.OutOrStdout(), s.Tiers); err != nil {
				return err
			}
			return printPrefills(c.OutOrStdout(), s.ByNamespace)
		})
	}
	return c
}

func newPolicySetCmd() *cobra.Command {
	var f clientFlags
	var tier string
	var budgets []string
	c := &cobra.Command{
		Use:   "set [NAME]",
		Short: "Change the policy of a tier, or of all, and the write budgets",
		Long: `Change which blocks leave a tier first, while the daemon runs: NAME is one of
` + strings.Join(policy.Names(), ", ") + `.

The new policy gets the blocks in the order in which the old one would have evicted
them; none is lost, and puts and gets go on meanwhile. The command ends when that is
done. When it ends earlier, because of --timeout, the daemon goes on.

With --write-budget change what evictions may write to a tier in a day, as serve says
it. What is left of a budget stays; none takes the budget away.

What is set lasts until it is set again or the daemon stops: at its next start it has
the policy of its --policy and the budgets of its --write-budget again. All namespaces
share the room of a tier, and so its policy.`,
		Example: `  kvtier policy set arc
  kvtier policy set s3-ghost --tier g3
  kvtier policy set --write-budget 500GB --write-budget g4/batch-*=50GB,10000`,
		Args: cobra.MaximumNArgs(1),
	}
	f.add(c, "print one JSON array with the policy and the budgets of each tier")
	c.Flags().StringVar(&tier, "tier", "all", "which `tier` NAME is for: g2, g3 or all")
	c.Flags().Var(&listValue{p: &budgets, kind: "budget", check: checkBudget}, "write-budget",
		"[TIER[/GLOB]=]SIZE[,REQUESTS]: what evictions may write to a tier in a day; repeatable")
	c.RunE = func(c *cobra.Command, args []string) error {
		set, err := parseBudgets(budgets)
		switch {
		case err != nil:
			return usageErrorf("--write-budget: %w", err)
		case len(args) == 0 && len(set) == 0:
			return usageErrorf("want the NAME of a policy, --write-budget, or both")
		case len(args) == 0 && c.Flags().Changed("tier"):
			return usageErrorf("--tier %s is for the NAME of a policy", tier)
		case len(args) == 1 && !slices.Contains(policy.Names(), args[0]):
			return usageErrorf("policy %q: want one of %s", args[0], strings.Join(policy.Names(), ", "))
		}
		id := block.NoTier
		if tier != "all" {
			if id, err = block.ParseTier(tier); err != nil {
				return usageErrorf("--tier: %w", err)
			}
		}
		return f.connect(c.Context(), func(client *api.Client) error {
			ctx, cancel := f.call(c.Context())
			defer cancel()
			for _, b := range set {
				if err := client.SetWriteBudget(ctx, b); err != nil {
					return err
				}
			}
			if len(args) == 1 {
				if err := client.SetPolicy(ctx, id, args[0]); err != nil {
					return err
				}
			}
			all, err := client.Policies(ctx)
			if err != nil {
				return err
			}
			var now []block.TierStats
			if len(set) > 0 {
				s, err := client.Stats(ctx)
				if err != nil {
					return err
				}
				now = s.Tiers
				for i := range now {
					now[i].Curves = nil
				}
			}
			if f.json {
				return writeJSON(c.OutOrStdout(), describeTiers(all, now))
			}
			if err := printPolicies(c.OutOrStdout(), all); err != nil {
				return err
			}
			return printBudgets(c.OutOrStdout(), now)
		})
	}
	return c
}

// describeTiers tells the policies of tiers, and what their statistics add. A tier that has a
// budget and no policy comes last.
func describeTiers(all []block.TierPolicy, stats []block.TierStats) []policyOutput {
	out := []policyOutput{}
	for _, p := range all {
		out = append(out, policyOutput{Tier: p.Tier.String(), Policy: p.Policy, Start: p.Start, Moving: p.Moving})
	}
	for _, t := range stats {
		i := slices.IndexFunc(all, func(p block.TierPolicy) bool { return p.Tier == t.Tier })
		if i < 0 {
			if t.Admission == nil {
				continue
			}
			i = len(out)
			out = append(out, policyOutput{Tier: t.Tier.String()})
		} else if len(t.Curves) > 0 {
			out[i].Curves = describeCurves(t.Curves)
		}
		out[i].Budgets = describeBudgets(t.Admission)
	}
	return out
}

// printBudgets prints the write budgets of tiers, those that have one.
func printBudgets(w io.Writer, tiers []block.TierStats) error {
	for _, t := range tiers {
		budgets := describeBudgets(t.Admission)
		if len(budgets) == 0 {
			continue
		}
		fmt.Fprintln(w)
		for _, b := range budgets {
			fmt.Fprintln(w, b.line())
		}
		a := &statAdmission{nil, t.Admission.Admitted, t.Admission.Rejected}
		if _, err := fmt.Fprintf(w, "%s: %s\n", t.Tier, a.line()); err != nil {
			return err
		}
	}
	return nil
}

// printPrefills prints what prefill costs, of namespaces of which something is known.
func printPrefills(w io.Writer, spaces []block.NamespaceStats) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	head := "\nNAMESPACE\tPREFILL\tKNOWN FROM\n"
	for _, n := range spaces {
		c := n.Prefill
		if c == nil {
			continue
		}
		cost, from := "-", counted(c.Reports, "report")
		if c.Prefill != (block.Prefill{}) {
			cost = formatPrefill(c.Prefill)
		}
		if !c.Learned {
			from = "--prefill"
		}
		fmt.Fprintf(tw, "%s%s\t%s\t%s\n", head, n.Name, cost, from)
		head = ""
	}
	return tw.Flush()
}

func printPolicies(w io.Writer, all []block.TierPolicy) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "TIER\tPOLICY\tAT START\tMOVING")
	for _, p := range all {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", p.Tier, p.Policy, p.Start, counted(p.Moving, "block"))
	}
	return tw.Flush()
}

// printCurves prints what tiers would have hit, those that were asked for something.
func printCurves(w io.Writer, tiers []block.TierStats) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	head := false
	for _, t := range tiers {
		var names, shares []string
		var asked int64
		for _, k := range t.Curves {
			if k.Size == 0 {
				asked = k.Asked
			}
			name := k.Policy
			if k.Size != 1 {
				name = map[float64]string{0: "ALL", 0.5: "HALF", 2: "TWICE"}[k.Size]
			}
			share := "-"
			if k.Asked > 0 {
				share = fmt.Sprintf("%.1f%%", 100*float64(k.Hits)/float64(k.Asked))
			}
			names, shares = append(names, name), append(shares, share)
		}
		if asked == 0 {
			continue
		}
		if !head {
			fmt.Fprintf(tw, "\nTIER\tASKED\t%s\n", strings.Join(names, "\t"))
			head = true
		}
		fmt.Fprintf(tw, "%s\t%d\t%s\n", t.Tier, asked, strings.Join(shares, "\t"))
	}
	return tw.Flush()
}

// curveSize writes the size of a tier that might have been.
func curveSize(size float64) string {
	if size == 0 {
		return "all"
	}
	return fmt.Sprint(size)
}

// checkTierPolicy checks a value of --policy: NAME, or TIER=NAME for one tier.
func checkTierPolicy(s string) error {
	_, _, err := parseTierPolicy(s)
	return err
}

// parseTierPolicy reads NAME or TIER=NAME. NoTier stands for all.
func parseTierPolicy(s string) (id block.TierID, name string, err error) {
	name = s
	if tier, rest, one := strings.Cut(s, "="); one {
		if id, err = block.ParseTier(tier); err != nil {
			return 0, "", err
		}
		if id != block.G2 && id != block.G3 {
			return 0, "", fmt.Errorf("policy %q: want g2 or g3 before the =", s)
		}
		name = rest
	}
	if !slices.Contains(policy.Names(), name) {
		return 0, "", fmt.Errorf("policy %q: want one of %s", name, strings.Join(policy.Names(), ", "))
	}
	return id, name, nil
}
