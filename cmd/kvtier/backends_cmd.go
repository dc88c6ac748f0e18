package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/backends"
)

// backendInfo is what kvtier backends prints of one kind.
type backendInfo struct {
	Kind   string     `json:"kind"`
	Usable bool       `json:"usable"`
	Engine string     `json:"engine"`
	Pairs  []pairInfo `json:"pairs"`
	Why    string     `json:"why"` // why it is not usable, or not by its best engine
}

// pairInfo is a pair of memory types between which a backend moves bytes.
type pairInfo struct {
	Local  string `json:"local"`
	Remote string `json:"remote"`
}

func newBackendsCmd() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "backends",
		Short: "Show which transfer backends work on this machine, and why others do not",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			infos := []backendInfo{}
			for _, in := range backends.Probe(c.Context(), nil) {
				out := backendInfo{Kind: in.Kind, Usable: in.Usable, Engine: in.Engine, Pairs: []pairInfo{}, Why: in.Why}
				for _, p := range in.Pairs {
					out.Pairs = append(out.Pairs, pairInfo{p.Local.String(), p.Remote.String()})
				}
				infos = append(infos, out)
			}
			if err := c.Context().Err(); err != nil {
				return fmt.Errorf("probe backends: %w", err)
			}
			if asJSON {
				return writeJSON(c.OutOrStdout(), infos)
			}
			return printBackends(c.OutOrStdout(), infos)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print an array of objects")
	return c
}

func printBackends(w io.Writer, infos []backendInfo) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "BACKEND\tUSABLE\tENGINE\tMOVES\tNOTE")
	for _, in := range infos {
		var pairs []string
		for _, p := range in.Pairs {
			pairs = append(pairs, p.Local+"-"+p.Remote)
		}
		usable := "yes"
		if !in.Usable {
			usable = "no"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", in.Kind, usable, orDash(in.Engine), orDash(strings.Join(pairs, " ")), orDash(in.Why))
	}
	return tw.Flush() // reports what the writes above met
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
