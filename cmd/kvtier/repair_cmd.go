package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/tiers"
)

// repairReport is what kvtier repair prints.
type repairReport struct {
	Data     string   `json:"data"`
	Blocks   int64    `json:"blocks"`
	Bytes    int64    `json:"bytes"`
	Damaged  int64    `json:"damaged"`
	Stale    int64    `json:"stale"`
	Unknown  int64    `json:"unknown"`
	Old      string   `json:"old,omitempty"`
	Problems []string `json:"problems"`
}

func newRepairCmd() *cobra.Command {
	var (
		data   string
		asJSON bool
		level  string
		o      tiers.RepairOptions
	)
	c := &cobra.Command{
		Use:   "repair",
		Short: "Rebuild a lost or damaged catalog from the slabs, while no daemon runs",
		Long: `Make a new catalog for a data directory whose catalog is lost or damaged, from
catalog.manifest and catalog.tombstones in that directory and from the headers of
the blocks on its slabs. The slabs are only read, all of them, and the old catalog is kept beside
the new one. No daemon may run on the directory.

Blocks that were deleted, cleared or are past their time do not come back. Pins
do not either: only the catalog knew them. Nor are the blocks in buckets in the new
catalog; what lies in the buckets stays as it is, and kvtier object import finds it.

A catalog that can be read whole is left as it is, unless --force is given.`,
		Example: `  kvtier repair --data kv
  kvtier repair --data kv --nvme /mnt/moved/g3.slab --partial`,
		Args: noArgs,
	}
	fs := c.Flags()
	fs.StringVar(&data, "data", "", "data `directory` (default as for serve)")
	fs.StringArrayVar(&o.Slabs, "nvme", nil, "`path` of a slab that is not where it was last; repeatable")
	fs.BoolVar(&o.Partial, "partial", false, "go on without slabs that are not there and blocks of unknown namespaces: they are given up")
	fs.BoolVar(&o.Unsealed, "unsealed", false, "trust slabs of format 1, on which a payload can pass for other blocks' headers")
	fs.BoolVar(&o.NoTombstones, "no-tombstones", false, "go on without catalog.tombstones that are damaged or lost: some deleted blocks may come back")
	fs.BoolVar(&o.Force, "force", false, "make a new catalog although the old one can be read whole")
	fs.BoolVar(&asJSON, "json", false, "print one JSON object")
	enumVar(fs, &level, "log-level", "error", "debug, info, warn or error", "debug", "info", "warn", "error")
	c.RunE = func(c *cobra.Command, _ []string) error {
		dir, err := dataDir(data)
		if err != nil {
			return fmt.Errorf("repair --data %s: %w", data, err)
		}
		prog := newProgress(c.ErrOrStderr())
		o.Logger = newLogger(c.ErrOrStderr(), level, "text")
		o.Progress = func(done, total int64) {
			prog.update(func() string {
				return fmt.Sprintf("repair: read %s of %s", formatSizeShort(done), formatSizeShort(total))
			})
		}
		rep, err := tiers.Repair(c.Context(), dir, &o)
		prog.done()
		if err != nil {
			return err
		}
		out := repairReport{
			Data: dir, Blocks: rep.Blocks, Bytes: rep.Bytes, Damaged: rep.Damaged, Stale: rep.Stale, Unknown: rep.Unknown,
			Old: rep.Old, Problems: rep.Problems,
		}
		if out.Problems == nil {
			out.Problems = []string{}
		}
		if asJSON {
			return writeJSON(c.OutOrStdout(), out)
		}
		return printRepair(c.OutOrStdout(), out)
	}
	return c
}

func printRepair(w io.Writer, r repairReport) error {
	for _, p := range r.Problems {
		if _, err := fmt.Fprintln(w, p); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%s: new catalog of %s, %s; left out: %d damaged, %d stale, %d of unknown namespaces\n",
		r.Data, counted(r.Blocks, "block"), formatSizeShort(r.Bytes), r.Damaged, r.Stale, r.Unknown)
	if err == nil && r.Old != "" {
		_, err = fmt.Fprintf(w, "the old catalog is kept at %s\n", r.Old)
	}
	return err
}
