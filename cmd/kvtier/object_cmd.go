package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

func newObjectCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "object",
		Short: "Look into the object tier, sweep it, and import what other nodes wrote",
	}
	c.AddCommand(newObjectLsCmd(), newObjectUsageCmd(), newObjectSweepCmd(), newObjectImportCmd())
	return c
}

// objectOutput is what object ls prints of one object as JSON.
type objectOutput struct {
	Bucket    string `json:"bucket"` // empty: the daemon was not given it
	Key       string `json:"key"`
	Namespace string `json:"namespace,omitempty"` // empty: it is not there any more
	Own       bool   `json:"own"`                 // this daemon wrote it
	Bytes     int64  `json:"bytes"`
	Blocks    int64  `json:"blocks"`
	Live      int64  `json:"live"` // of the blocks, those that the object is read for
	LiveBytes int64  `json:"live_bytes"`
	Packed    string `json:"packed"`
}

func newObjectLsCmd() *cobra.Command {
	var f clientFlags
	var limit int64
	c := &cobra.Command{
		Use:   "ls",
		Short: "List the objects that the daemon's catalog knows",
		Long: `List the objects of the object tier that the daemon's catalog knows, oldest first, one
line each: how many of the blocks in it live, its length, who wrote it (own: this
daemon; other: another one, or this one with another catalog), and its key below the
bucket's prefix.`,
		Args: noArgs,
	}
	f.add(c, "print a line of JSON for each object")
	c.Flags().Int64Var(&limit, "limit", 0, "list so many objects at most; 0 lists all")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if limit < 0 {
			return usageErrorf("--limit %d: want 0 or more", limit)
		}
		return f.connect(c.Context(), func(client *api.Client) error {
			left, cursor := limit, ""
			for first := true; first || cursor != ""; first = false {
				page := listPage
				if limit > 0 {
					page = int(min(left, listPage))
				}
				ctx, cancel := f.call(c.Context())
				objects, next, err := client.ListObjects(ctx, cursor, page)
				cancel()
				if err != nil {
					return err
				}
				if err := f.printObjects(c.OutOrStdout(), objects); err != nil {
					return err
				}
				cursor = next
				if left -= int64(len(objects)); limit > 0 && left <= 0 {
					return nil
				}
			}
			return nil
		})
	}
	return c
}

func (f *clientFlags) printObjects(w io.Writer, objects []block.ObjectInfo) (err error) {
	for i := range objects {
		o := &objects[i]
		if f.json {
			err = writeJSONLine(w, objectOutput{
				Bucket: o.Bucket, Key: o.Key, Namespace: o.Namespace, Own: o.Own, Bytes: o.Bytes, Blocks: o.Blocks, Live: o.Live,
				LiveBytes: o.LiveBytes, Packed: rfc3339(o.Packed),
			})
		} else {
			by := "other"
			if o.Own {
				by = "own"
			}
			_, err = fmt.Fprintf(w, "%4d of %4d blocks  %10s  %-5s  %s\n", o.Live, o.Blocks, formatSizeShort(o.Bytes), by, o.Key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// objectUsageOutput is what object usage prints of a namespace in a bucket as JSON.
type objectUsageOutput struct {
	Bucket    string `json:"bucket"`
	Namespace string `json:"namespace"`
	Objects   int64  `json:"objects"`
	Bytes     int64  `json:"bytes"`
	Blocks    int64  `json:"blocks"`
	Live      int64  `json:"live"`
	LiveBytes int64  `json:"live_bytes"`
}

func newObjectUsageCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "usage",
		Short: "Sum up the objects of each namespace in each bucket",
		Args:  noArgs,
	}
	f.add(c, "print one JSON array")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.connect(c.Context(), func(client *api.Client) error {
			ctx, cancel := f.call(c.Context())
			defer cancel()
			usage, err := client.ObjectUsage(ctx)
			if err != nil {
				return err
			}
			if f.json {
				out := []objectUsageOutput{}
				for _, u := range usage {
					out = append(out, objectUsageOutput(u))
				}
				return writeJSON(c.OutOrStdout(), out)
			}
			tw := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "NAMESPACE\tOBJECTS\tSIZE\tBLOCKS\tLIVE\tLIVE SIZE\tBUCKET")
			for _, u := range usage {
				fmt.Fprintf(tw, "%s\t%d\t%s\t%d\t%d\t%s\t%s\n", orDash(u.Namespace), u.Objects, formatSizeShort(u.Bytes), u.Blocks, u.Live,
					formatSizeShort(u.LiveBytes), orDash(u.Bucket))
			}
			return tw.Flush()
		})
	}
	return c
}

// sweepOutput is what object sweep and stat print of a bucket's sweep as JSON.
type sweepOutput struct {
	Bucket      string `json:"bucket"`
	State       string `json:"state"` // never, running or done
	Started     string `json:"started,omitempty"`
	Ended       string `json:"ended,omitempty"`
	Listed      int64  `json:"listed"`  // objects
	Orphans     int64  `json:"orphans"` // objects that were removed
	OrphanBytes int64  `json:"orphan_bytes"`
	Missing     int64  `json:"missing"`   // objects that are not there
	Lost        int64  `json:"lost"`      // blocks in them
	Expired     int64  `json:"expired"`   // blocks
	Rewritten   int64  `json:"rewritten"` // objects
	Moved       int64  `json:"moved"`     // blocks in them
	MovedBytes  int64  `json:"moved_bytes"`
	Error       string `json:"error,omitempty"`
}

func describeSweep(s block.ObjectSweep) sweepOutput {
	o := sweepOutput{
		Bucket: s.Bucket, State: "done", Started: rfc3339(s.Started), Ended: rfc3339(s.Ended), Listed: s.Listed, Orphans: s.Orphans,
		OrphanBytes: s.OrphanBytes, Missing: s.Missing, Lost: s.Lost, Expired: s.Expired, Rewritten: s.Rewritten, Moved: s.Moved,
		MovedBytes: s.MovedBytes, Error: s.Error,
	}
	switch {
	case s.Started.IsZero():
		o.State = "never"
	case s.Running():
		o.State = "running"
	}
	return o
}

// line writes a sweep for people.
func (o *sweepOutput) line() string {
	if o.State == "never" {
		return o.Bucket + ": never swept"
	}
	s := fmt.Sprintf("%s: %s: %s listed, %s removed (%s), %d missing (%s lost), %s expired, %d rewritten (%s moved)", o.Bucket, o.State,
		counted(o.Listed, "object"), counted(o.Orphans, "orphan"), formatSizeShort(o.OrphanBytes), o.Missing, counted(o.Lost, "block"),
		counted(o.Expired, "block"), o.Rewritten, formatSizeShort(o.MovedBytes))
	if o.Error != "" {
		s += ": " + o.Error
	}
	return s
}

func newObjectSweepCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "sweep",
		Short: "Compare the buckets with the catalog now, and mend the differences",
		Long: `Compare each bucket of the object tier with the daemon's catalog, as the daemon does by
itself now and then, and wait for the end:

  - objects that this daemon wrote and its catalog does not know are removed when they
    are older than --object-grace of serve, and so are those of others, that it knew,
    in which all is dead by the tombstones and times in the bucket;
  - blocks of objects that are not in the bucket, and blocks past their time, are
    dropped from the catalog;
  - objects of which less than half lives are rewritten.

One that runs is waited for, and another begins behind it, since that has seen only what
there was at its beginning. When the command is interrupted the daemon goes on later.

The exit code is 0 at the end, and 3 when objects were missing and blocks lost by it.`,
		Args: noArgs,
	}
	f.add(c, "print one JSON array")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.connect(c.Context(), func(client *api.Client) error {
			prog := newProgress(c.ErrOrStderr())
			all := follower[block.ObjectSweep]{of: func(s *block.ObjectSweep) string { return s.Bucket }}
			err := client.SweepObjects(c.Context(), func(s block.ObjectSweep) error {
				all.note(s)
				prog.update(func() string {
					o := describeSweep(s)
					return "sweep of " + o.line()
				})
				return nil
			})
			prog.done()
			if err != nil {
				return interrupted(c.Context(), "sweep: the daemon goes on with it later", err)
			}
			out := []sweepOutput{}
			var lost int64
			for _, s := range all.last {
				out = append(out, describeSweep(s))
				lost += s.Lost
			}
			if err := printAll(c.OutOrStdout(), f.json, out, (*sweepOutput).line); err != nil {
				return err
			}
			if lost > 0 {
				return &exitError{exitMiss, fmt.Errorf("sweep: %s lost with objects that are not in the bucket any more", counted(lost, "block"))}
			}
			return nil
		})
	}
	return c
}

// importOutput is what object import prints of a bucket as JSON.
type importOutput struct {
	Bucket     string   `json:"bucket"`
	Objects    int64    `json:"objects"`    // that were read: the catalog did not know them
	Namespaces int64    `json:"namespaces"` // that were made
	Blocks     int64    `json:"blocks"`     // that are served since
	Bytes      int64    `json:"bytes"`
	Known      int64    `json:"known"`   // blocks that the catalog had already
	Dead       int64    `json:"dead"`    // blocks that were deleted, cleared, or are past their time
	Refused    int64    `json:"refused"` // blocks that disagree with what is here
	Failed     int64    `json:"failed"`  // objects that cannot be used
	Problems   []string `json:"problems"`
}

func describeImport(i block.ObjectImport) importOutput {
	o := importOutput{
		Bucket: i.Bucket, Objects: i.Objects, Namespaces: i.Namespaces, Blocks: i.Blocks, Bytes: i.Bytes, Known: i.Known, Dead: i.Dead,
		Refused: i.Refused, Failed: i.Failed, Problems: i.Problems,
	}
	if o.Problems == nil {
		o.Problems = []string{}
	}
	return o
}

// line writes an import for people.
func (o *importOutput) line() string {
	s := fmt.Sprintf("%s: %s read, %s imported (%s) into %s more; left out: %d known, %d dead, %d refused, %s unusable", o.Bucket,
		counted(o.Objects, "object"), counted(o.Blocks, "block"), formatSizeShort(o.Bytes), counted(o.Namespaces, "namespace"),
		o.Known, o.Dead, o.Refused, counted(o.Failed, "object"))
	for _, p := range o.Problems {
		s += "\n  " + p
	}
	return s
}

func newObjectImportCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "import",
		Short: "Have the catalog know what is in the buckets",
		Long: `List each bucket of the object tier, and have the daemon's catalog know what other
nodes of the cluster, or this one with another data directory, have written there. It
ends when all that is served. What this daemon wrote itself its catalog knows.

Blocks that were deleted or cleared, or are past their time, do not come back. Blocks
that other nodes put or delete while it runs it may not see: run it again then.

When it is interrupted, what it has found until then stays. The exit code is 0 at the
end, and 3 when something was refused or cannot be used: the first problems are told.`,
		Args: noArgs,
	}
	f.add(c, "print one JSON array")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.connect(c.Context(), func(client *api.Client) error {
			prog := newProgress(c.ErrOrStderr())
			all := follower[block.ObjectImport]{of: func(i *block.ObjectImport) string { return i.Bucket }}
			err := client.ImportObjects(c.Context(), func(i block.ObjectImport) error {
				all.note(i)
				prog.update(func() string {
					return fmt.Sprintf("import from %s: %s, %s", i.Bucket, counted(i.Objects, "object"), counted(i.Blocks, "block"))
				})
				return nil
			})
			prog.done()
			if err != nil {
				return interrupted(c.Context(), "import: what it has found stays, and the next one goes on", err)
			}
			out := []importOutput{}
			var left int64
			for _, i := range all.last {
				out = append(out, describeImport(i))
				left += i.Refused + i.Failed
			}
			if err := printAll(c.OutOrStdout(), f.json, out, (*importOutput).line); err != nil {
				return err
			}
			if left > 0 {
				return &exitError{exitMiss, errors.New("import: not all could be taken in")}
			}
			return nil
		})
	}
	return c
}

// follower keeps the last that was told of each bucket.
type follower[T any] struct {
	of   func(*T) string
	last []T
}

func (f *follower[T]) note(t T) {
	at := slices.IndexFunc(f.last, func(l T) bool { return f.of(&l) == f.of(&t) })
	if at < 0 {
		f.last = append(f.last, t)
		return
	}
	f.last[at] = t
}

// interrupted is err, or when the user has ended the call, what that means.
func interrupted(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", what, ctx.Err())
	}
	return err
}

// printAll prints an array, or a line for each.
func printAll[T any](w io.Writer, asJSON bool, all []T, line func(*T) string) error {
	if asJSON {
		return writeJSON(w, all)
	}
	for i := range all {
		if _, err := fmt.Fprintln(w, line(&all[i])); err != nil {
			return err
		}
	}
	return nil
}
