package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// prefetchFlags are the flags of prefetch.
type prefetchFlags struct {
	clientFlags
	namespace string
	id        string
	priority  uint8
	within    time.Duration
	cancelID  string
}

// prefetchLine is what prefetch prints of one key as JSON.
type prefetchLine struct {
	Index  int    `json:"index"` // of the key in the command line, from 0
	Hash   string `json:"hash"`
	Reason string `json:"reason"` // hit: it is in the tier now; otherwise why not
	Tier   string `json:"tier,omitempty"`
}

func newPrefetchCmd() *cobra.Command {
	f := &prefetchFlags{}
	c := &cobra.Command{
		Use:   "prefetch HASH...",
		Short: "Bring blocks up to DRAM",
		Long: `Bring blocks up to DRAM, root first, and print a line for each as it is settled,
in the order given. A block that is not there is no error: its line says why.
A prefetch that was given an id can be cancelled from elsewhere. The queue is bounded: one of a
higher priority goes first, and displaces blocks of lower ones when there is no room. What is not
begun within --within, or --timeout, is dropped, since it would come too late for its use.`,
		Example: `  kvtier prefetch --namespace demo --id request-17 00112233445566778899aabbccddeeff
  kvtier prefetch --cancel request-17`,
		Args: func(c *cobra.Command, args []string) error {
			if f.cancelID != "" {
				return noArgsWith("--cancel")(c, args)
			}
			return cobra.MinimumNArgs(1)(c, args)
		},
	}
	f.add(c, "print a line of JSON for each block")
	fs := c.Flags()
	fs.StringVar(&f.namespace, "namespace", "", "`name` of the namespace")
	fs.StringVar(&f.id, "id", "", "`id` of the request, by which it can be cancelled")
	fs.Uint8Var(&f.priority, "priority", 0, fmt.Sprintf("0 to %d: those of a higher one go first", block.MaxPriority))
	fs.DurationVar(&f.within, "within", 0, "after how `long` blocks are of no use any more: those not begun by then are dropped (default: never)")
	fs.StringVar(&f.cancelID, "cancel", "", "cancel the prefetch of this `id`")
	c.MarkFlagsOneRequired("namespace", "cancel")
	c.MarkFlagsMutuallyExclusive("namespace", "cancel")
	for _, name := range []string{"id", "priority", "within"} {
		c.MarkFlagsMutuallyExclusive(name, "cancel")
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if f.cancelID != "" {
			return f.cancel(c.Context())
		}
		return f.run(c.Context(), args, c.OutOrStdout())
	}
	return c
}

func (f *prefetchFlags) cancel(ctx context.Context) error {
	return f.connect(ctx, func(client *api.Client) error {
		ctx, cancel := f.call(ctx)
		defer cancel()
		return client.CancelPrefetch(ctx, f.cancelID)
	})
}

func (f *prefetchFlags) run(ctx context.Context, args []string, stdout io.Writer) error {
	o := block.PrefetchOptions{ID: f.id, Priority: f.priority, Within: f.within}
	if err := o.Check(); err != nil {
		return usageErrorf("%w", err)
	}
	hashes, hashLen, err := parseHashes(args)
	if err != nil {
		return err
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.findNamespace(ctx, client, f.namespace, hashLen)
		if err != nil {
			return err
		}
		cctx, cancel := f.call(ctx)
		defer cancel()
		err = client.Prefetch(cctx, ns, hashes, o, func(p block.Progress) error {
			if p.Index < 0 || p.Index >= len(hashes) {
				return fmt.Errorf("prefetch: server told of block %d of %d", p.Index, len(hashes))
			}
			l := prefetchLine{Index: p.Index, Hash: hashes[p.Index].Hex(hashLen), Reason: p.Reason.String()}
			if p.Reason == block.Hit {
				l.Tier = p.Tier.String()
			}
			if f.json {
				return writeJSONLine(stdout, l)
			}
			if l.Tier == "" {
				_, err := fmt.Fprintf(stdout, "%d/%d %s missed: %s\n", p.Index+1, len(hashes), l.Hash, l.Reason)
				return err
			}
			_, err := fmt.Fprintf(stdout, "%d/%d %s in %s\n", p.Index+1, len(hashes), l.Hash, l.Tier)
			return err
		})
		if errors.Is(err, context.Canceled) && ctx.Err() == nil {
			return fmt.Errorf("prefetch %s was cancelled: %w", f.id, err)
		}
		return err
	})
}
