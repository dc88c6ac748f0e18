package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/tiers"
)

// verifyReport is what kvtier verify prints.
type verifyReport struct {
	Data     string   `json:"data"`
	Records  int64    `json:"records"`
	Good     int64    `json:"good"`
	Bad      int64    `json:"bad"`
	Bytes    int64    `json:"bytes"`
	Problems []string `json:"problems"`
}

func newVerifyCmd() *cobra.Command {
	var (
		data   string
		asJSON bool
		level  string
	)
	c := &cobra.Command{
		Use:   "verify",
		Short: "Check that every committed block reads back right, while no daemon runs",
		Long: `Read every block that the catalog of a data directory lists from its slab and
check it: the slot's header, the length and the checksum. Nothing is changed. No
daemon may run on the directory.

The exit code is 0 only if every committed block reads back right.`,
		Args: noArgs,
	}
	fs := c.Flags()
	fs.StringVar(&data, "data", "", "data `directory` (default as for serve)")
	fs.BoolVar(&asJSON, "json", false, "print one JSON object")
	enumVar(fs, &level, "log-level", "warn", "debug, info, warn or error", "debug", "info", "warn", "error")
	c.RunE = func(c *cobra.Command, _ []string) error {
		dir, err := dataDir(data)
		if err != nil {
			return fmt.Errorf("verify --data %s: %w", data, err)
		}
		prog := newProgress(c.ErrOrStderr())
		rep, err := tiers.Verify(c.Context(), dir, &tiers.VerifyOptions{
			Logger: newLogger(c.ErrOrStderr(), level, "text"),
			Progress: func(done, total int64) {
				prog.update(func() string { return fmt.Sprintf("verify: %d of %d blocks", done, total) })
			},
		})
		prog.done()
		if err != nil {
			return err
		}
		out := verifyReport{Data: dir, Records: rep.Records, Good: rep.Good, Bad: rep.Bad, Bytes: rep.Bytes, Problems: rep.Problems}
		if out.Problems == nil {
			out.Problems = []string{}
		}
		w := c.OutOrStdout()
		if asJSON {
			err = writeJSON(w, out)
		} else {
			err = printVerify(w, out)
		}
		switch {
		case err != nil:
			return err
		case rep.Good != rep.Records:
			return fmt.Errorf("verify %s: %d of %d committed blocks do not read back right", dir, rep.Records-rep.Good, rep.Records)
		case len(rep.Problems) > 0:
			return fmt.Errorf("verify %s: %s", dir, counted(int64(len(rep.Problems)), "problem"))
		}
		return nil
	}
	return c
}

func printVerify(w io.Writer, r verifyReport) error {
	for _, p := range r.Problems {
		if _, err := fmt.Fprintln(w, p); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%s: %s, %s: %d good, %d bad\n", r.Data, counted(r.Records, "committed block"), formatSizeShort(r.Bytes), r.Good, r.Bad)
	return err
}
