package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// watchFlags are the flags of watch.
type watchFlags struct {
	clientFlags
	namespace string
	span      time.Duration
	count     int64

	incarnation string // hex
	after       uint64
	snapshot    bool
}

// watchLine is one event as JSON.
type watchLine struct {
	Seq       uint64 `json:"seq"`
	Event     string `json:"event"` // stored, removed, cleared, lost, present or snapshot
	Namespace string `json:"namespace,omitempty"`
	Hash      string `json:"hash,omitempty"`
	Parent    string `json:"parent,omitempty"`
	Tier      string `json:"tier,omitempty"`
	Reason    string `json:"reason,omitempty"` // why it was removed
	Bytes     uint32 `json:"bytes,omitempty"`
	Last      bool   `json:"last,omitempty"`  // removed from the last tier that had it
	Count     int64  `json:"count,omitempty"` // of blocks cleared, events lost, or blocks in a snapshot
}

func describeEvent(e block.Event) watchLine {
	l := watchLine{Seq: e.Seq, Event: e.Kind.String(), Namespace: e.NS, Bytes: e.Len, Last: e.Last, Count: e.Count}
	if e.Hlen > 0 && int(e.Hlen) <= block.HashBytes {
		l.Hash = e.Hash.Hex(int(e.Hlen))
		if e.HasPar {
			l.Parent = e.Parent.Hex(int(e.Hlen))
		}
	}
	if e.Tier != block.NoTier {
		l.Tier = e.Tier.String()
	}
	if e.Reason != block.NoReason {
		l.Reason = e.Reason.String()
	}
	return l
}

// line writes an event for people.
func (l *watchLine) line() string {
	words := []string{fmt.Sprint(l.Seq), l.Event, l.Namespace, l.Hash, l.Tier, l.Reason}
	words = slices.DeleteFunc(words, func(s string) bool { return s == "" })
	if l.Bytes > 0 {
		words = append(words, fmt.Sprintf("%d bytes", l.Bytes))
	}
	if l.Parent != "" {
		words = append(words, "parent "+l.Parent)
	}
	if l.Last {
		words = append(words, "last")
	}
	if l.Count > 0 {
		words = append(words, fmt.Sprintf("count %d", l.Count))
	}
	return strings.Join(words, " ")
}

func newWatchCmd() *cobra.Command {
	f := &watchFlags{}
	c := &cobra.Command{
		Use:   "watch",
		Short: "Print what happens to blocks, a line for each event",
		Long: `Print what happens to blocks from now on, a line for each event, until
interrupted. A line on standard error that begins with "watching" says that the
daemon listens: what is done after it is told. It names the incarnation of the
store and the number of the last event before those that are printed. --timeout
bounds only the connecting.

A watcher that comes back gives the incarnation, and the number of the last event
that it knows of, and is told of what happened meanwhile. When the daemon cannot
tell that any more, the first event is "lost", or a snapshot if one is wanted.

A snapshot is a line "present" for each block in each tier, and one "snapshot"
that ends it. Whoever applies all lines in order knows what is there.`,
		Example: `  kvtier watch --snapshot --json
  kvtier watch --incarnation 5f0c1b9a7d3e2846 --after 1234`,
		Args: noArgs,
	}
	f.add(c, "print a line of JSON for each event")
	fs := c.Flags()
	fs.StringVar(&f.namespace, "namespace", "", "`name` of the namespace (default all)")
	fs.DurationVar(&f.span, "for", 0, "end after so long; 0 goes on")
	fs.Int64Var(&f.count, "count", 0, "end after so many events; 0 goes on")
	fs.BoolVar(&f.snapshot, "snapshot", false, "begin with what is there, unless the watch goes on where it was")
	fs.StringVar(&f.incarnation, "incarnation", "", "go on with events of this `incarnation` of the store")
	fs.Uint64Var(&f.after, "after", 0, "`number` of the last event known; with --incarnation")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
	}
	return c
}

// watchOptions reads what the flags ask for. The line that says where the watch
// begins goes to stderr.
func (f *watchFlags) watchOptions(stderr io.Writer) (block.WatchOptions, error) {
	o := block.WatchOptions{After: f.after, Snapshot: f.snapshot}
	if f.incarnation != "" {
		var err error
		if o.Incarnation, err = parseIncarnation(f.incarnation); err != nil {
			return o, usageErrorf("--incarnation %w", err)
		}
	} else if f.after != 0 {
		return o, usageErrorf("--after %d: of which --incarnation?", f.after)
	}
	o.Ready = func(at block.WatchStart) {
		line := fmt.Sprintf("watching incarnation %s after %d", formatIncarnation(at.Incarnation), at.Seq)
		if at.Resumed {
			line += ", resumed"
		}
		fmt.Fprintln(stderr, line)
	}
	return o, nil
}

// formatIncarnation writes an incarnation as text: as a number, many a JSON reader
// would round it.
func formatIncarnation(n uint64) string { return fmt.Sprintf("%016x", n) }

// parseIncarnation reads what formatIncarnation writes.
func parseIncarnation(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 16, 64)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q: want up to 16 hex digits, not all 0", s)
	}
	return n, nil
}

// errWatchedEnough ends a watch that has printed what was asked for.
var errWatchedEnough = errors.New("enough events")

func (f *watchFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	if f.span < 0 || f.count < 0 {
		return usageErrorf("--for %v, --count %d: want 0 or more", f.span, f.count)
	}
	o, err := f.watchOptions(stderr)
	if err != nil {
		return err
	}
	return f.connect(ctx, func(client *api.Client) error {
		var ns *block.Namespace
		if f.namespace != "" {
			cctx, cancel := f.call(ctx)
			n, err := client.Namespace(cctx, f.namespace)
			cancel()
			if err != nil {
				return err
			}
			ns = &n
		}
		wctx, cancel := ctx, context.CancelFunc(func() {})
		if f.span > 0 {
			wctx, cancel = context.WithTimeout(ctx, f.span)
		}
		defer cancel()
		var seen int64
		err := client.Watch(wctx, ns, o, func(e block.Event) error {
			l := describeEvent(e)
			var err error
			if f.json {
				err = writeJSONLine(stdout, l)
			} else {
				_, err = fmt.Fprintln(stdout, l.line())
			}
			if err != nil {
				return err
			}
			if seen++; seen == f.count {
				return errWatchedEnough
			}
			return nil
		})
		// To be interrupted is how a watch is meant to end. The daemon knows --for as
		// the call's deadline and may be the first to notice it.
		if errors.Is(err, errWatchedEnough) || wctx.Err() != nil || f.span > 0 && errors.Is(err, context.DeadlineExceeded) {
			return nil
		}
		return err
	})
}
