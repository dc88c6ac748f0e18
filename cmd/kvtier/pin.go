package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// pinFlags are the flags of pin and unpin.
type pinFlags struct {
	clientFlags
	namespace string
}

// pinOutput is what pin prints as JSON.
type pinOutput struct {
	Namespace string        `json:"namespace"`
	Asked     int           `json:"asked"`  // hashes given
	Pinned    int           `json:"pinned"` // of those, that are pinned now
	Blocks    []pinnedBlock `json:"blocks"`
}

type pinnedBlock struct {
	Hash   string `json:"hash"`
	Pinned bool   `json:"pinned"`
	Error  string `json:"error,omitempty"` // why it is not
}

// unpinOutput is what unpin prints as JSON.
type unpinOutput struct {
	Namespace string `json:"namespace"`
	Asked     int    `json:"asked"`    // hashes given
	Unpinned  int    `json:"unpinned"` // of those, that were pinned
}

func newPinCmd() *cobra.Command {
	f := &pinFlags{}
	c := &cobra.Command{
		Use:   "pin HASH...",
		Short: "Keep blocks from being evicted",
		Long: `Pin blocks, and print a line for each. A pinned block moves between tiers but is
not evicted; it may still be deleted, cleared, expire, or be dropped as damaged.
Where there is NVMe a pin survives restarts, and is durable when this ends. At most
half of NVMe, or of DRAM where there is no NVMe, can be pinned.

The exit code is 0 only if all are pinned.`,
		Args: cobra.MinimumNArgs(1),
	}
	f.add(c, "print one JSON object")
	namespaceFlag(c, &f.namespace)
	c.RunE = func(c *cobra.Command, args []string) error {
		return f.pin(c.Context(), args, c.OutOrStdout())
	}
	return c
}

func newUnpinCmd() *cobra.Command {
	f := &pinFlags{}
	c := &cobra.Command{
		Use:   "unpin HASH...",
		Short: "Let pinned blocks be evicted again",
		Long:  "Unpin blocks, and print how many of them were pinned.",
		Args:  cobra.MinimumNArgs(1),
	}
	f.add(c, "print one JSON object")
	namespaceFlag(c, &f.namespace)
	c.RunE = func(c *cobra.Command, args []string) error {
		return f.unpin(c.Context(), args, c.OutOrStdout())
	}
	return c
}

// parts calls fn with the hashes, as many at a time as one call may name.
func (f *pinFlags) parts(ctx context.Context, args []string, fn func(ctx context.Context, client *api.Client, ns block.Namespace, part []block.Hash) error) error {
	hashes, hashLen, err := parseHashes(args)
	if err != nil {
		return err
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.findNamespace(ctx, client, f.namespace, hashLen)
		if err != nil {
			return err
		}
		return f.batches(ctx, hashes, func(ctx context.Context, part []block.Hash) error { return fn(ctx, client, ns, part) })
	})
}

func (f *pinFlags) pin(ctx context.Context, args []string, stdout io.Writer) error {
	out := pinOutput{Namespace: f.namespace, Asked: len(args)}
	err := f.parts(ctx, args, func(ctx context.Context, client *api.Client, ns block.Namespace, part []block.Hash) error {
		errs, err := client.Pin(ctx, ns, part)
		if err != nil {
			return err
		}
		for i, err := range errs {
			b := pinnedBlock{Hash: part[i].Hex(ns.HashLen), Pinned: err == nil}
			if err != nil {
				b.Error = err.Error()
			} else {
				out.Pinned++
			}
			out.Blocks = append(out.Blocks, b)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if f.json {
		err = writeJSON(stdout, out)
	} else {
		err = out.print(stdout)
	}
	if err == nil && out.Pinned < out.Asked {
		err = fmt.Errorf("pin: %d of %s could not be pinned", out.Asked-out.Pinned, counted(int64(out.Asked), "block"))
	}
	return err
}

func (o *pinOutput) print(w io.Writer) error {
	for _, b := range o.Blocks {
		line := "pinned " + b.Hash
		if !b.Pinned {
			line = "failed " + b.Hash + ": " + b.Error
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}

func (f *pinFlags) unpin(ctx context.Context, args []string, stdout io.Writer) error {
	out := unpinOutput{Namespace: f.namespace, Asked: len(args)}
	err := f.parts(ctx, args, func(ctx context.Context, client *api.Client, ns block.Namespace, part []block.Hash) error {
		n, err := client.Unpin(ctx, ns, part)
		out.Unpinned += n
		return err
	})
	switch {
	case err != nil:
		return err
	case f.json:
		return writeJSON(stdout, out)
	}
	_, err = fmt.Fprintf(stdout, "unpinned %d of %d\n", out.Unpinned, out.Asked)
	return err
}
