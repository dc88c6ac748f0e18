package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
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
}

// watchLine is one event as JSON.
type watchLine struct {
	Seq       uint64 `json:"seq"`
	Event     string `json:"event"` // stored, removed, cleared or lost
	Namespace string `json:"namespace,omitempty"`
	Hash      string `json:"hash,omitempty"`
	Parent    string `json:"parent,omitempty"`
	Tier      string `json:"tier,omitempty"`
	Reason    string `json:"reason,omitempty"` // why it was removed
	Bytes     uint32 `json:"bytes,omitempty"`
	Last      bool   `json:"last,omitempty"`  // removed from the last tier that had it
	Count     int64  `json:"count,omitempty"` // of blocks cleared or events lost
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
interrupted. "watching" on standard error says that the daemon listens: what is
done after it is told. --timeout bounds only the connecting.`,
		Args: noArgs,
	}
	f.add(c, "print a line of JSON for each event")
	fs := c.Flags()
	fs.StringVar(&f.namespace, "namespace", "", "`name` of the namespace (default all)")
	fs.DurationVar(&f.span, "for", 0, "end after so long; 0 goes on")
	fs.Int64Var(&f.count, "count", 0, "end after so many events; 0 goes on")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
	}
	return c
}

// errWatchedEnough ends a watch that has printed what was asked for.
var errWatchedEnough = errors.New("enough events")

func (f *watchFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	if f.span < 0 || f.count < 0 {
		return usageErrorf("--for %v, --count %d: want 0 or more", f.span, f.count)
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
		err := client.Watch(wctx, ns, func() { fmt.Fprintln(stderr, "watching") }, func(e block.Event) error {
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
