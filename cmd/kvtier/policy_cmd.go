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

	Curves []statCurve `json:"curves,omitempty"` // what the tier would have had with others
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
start. ALL is what a tier with room for everything would have had: no more can be hit.`,
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
				out := describePolicies(all)
				for i := range out {
					for _, t := range s.Tiers {
						if t.Tier == all[i].Tier {
							out[i].Curves = describeCurves(t.Curves)
						}
					}
				}
				return writeJSON(c.OutOrStdout(), out)
			}
			if err := printPolicies(c.OutOrStdout(), all); err != nil {
				return err
			}
			return printCurves(c.OutOrStdout(), s.Tiers)
		})
	}
	return c
}

func newPolicySetCmd() *cobra.Command {
	var f clientFlags
	var tier string
	c := &cobra.Command{
		Use:   "set NAME",
		Short: "Change the policy of a tier, or of all",
		Long: `Change which blocks leave a tier first, while the daemon runs: NAME is one of
` + strings.Join(policy.Names(), ", ") + `.

The new policy gets the blocks in the order in which the old one would have evicted
them; none is lost, and puts and gets go on meanwhile. The command ends when that is
done. When it ends earlier, because of --timeout, the daemon goes on.

What is set lasts until it is set again or the daemon stops: at its next start it has
the policy of its --policy again. All namespaces share the room of a tier, and so its
policy.`,
		Example: `  kvtier policy set arc
  kvtier policy set s3-ghost --tier g3`,
		Args: cobra.ExactArgs(1),
	}
	f.add(c, "print one JSON array with the policy of each tier")
	c.Flags().StringVar(&tier, "tier", "all", "which `tier`: g2, g3 or all")
	c.RunE = func(c *cobra.Command, args []string) error {
		if !slices.Contains(policy.Names(), args[0]) {
			return usageErrorf("policy %q: want one of %s", args[0], strings.Join(policy.Names(), ", "))
		}
		id := block.NoTier
		if tier != "all" {
			var err error
			if id, err = block.ParseTier(tier); err != nil {
				return usageErrorf("--tier: %w", err)
			}
		}
		return f.connect(c.Context(), func(client *api.Client) error {
			ctx, cancel := f.call(c.Context())
			defer cancel()
			if err := client.SetPolicy(ctx, id, args[0]); err != nil {
				return err
			}
			all, err := client.Policies(ctx)
			if err != nil {
				return err
			}
			if f.json {
				return writeJSON(c.OutOrStdout(), describePolicies(all))
			}
			return printPolicies(c.OutOrStdout(), all)
		})
	}
	return c
}

func describePolicies(all []block.TierPolicy) []policyOutput {
	out := []policyOutput{}
	for _, p := range all {
		out = append(out, policyOutput{Tier: p.Tier.String(), Policy: p.Policy, Start: p.Start, Moving: p.Moving})
	}
	return out
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
