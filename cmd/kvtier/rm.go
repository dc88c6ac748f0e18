package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// rmFlags are the flags of rm.
type rmFlags struct {
	clientFlags
	namespace string
	all       bool
	yes       bool
}

// rmOutput is what rm prints as JSON.
type rmOutput struct {
	Namespace string `json:"namespace"`
	Asked     int64  `json:"asked,omitempty"` // hashes given
	Deleted   int64  `json:"deleted"`         // of those, or of all, that were there
}

func newRmCmd() *cobra.Command {
	f := &rmFlags{}
	c := &cobra.Command{
		Use:   "rm HASH... | --all --yes",
		Short: "Delete blocks from all tiers",
		Long: `Delete blocks of a namespace, or all of them, from all tiers, and print how many
were there. When it ends they are gone for good: no restart brings them back.`,
		Args: func(c *cobra.Command, args []string) error {
			if f.all {
				return noArgsWith("--all")(c, args)
			}
			return cobra.MinimumNArgs(1)(c, args)
		},
	}
	f.add(c, "print one JSON object")
	namespaceFlag(c, &f.namespace)
	c.Flags().BoolVar(&f.all, "all", false, "delete every block of the namespace; needs --yes")
	c.Flags().BoolVar(&f.yes, "yes", false, "confirm --all")
	c.RunE = func(c *cobra.Command, args []string) error {
		return f.run(c.Context(), args, c.OutOrStdout())
	}
	return c
}

func (f *rmFlags) run(ctx context.Context, args []string, stdout io.Writer) error {
	if f.all && !f.yes {
		return usageErrorf("--all: deletes every block of namespace %q; add --yes", f.namespace)
	}
	hashes, hashLen, err := parseHashes(args)
	if err != nil {
		return err
	}
	return f.connect(ctx, func(client *api.Client) error {
		out := rmOutput{Namespace: f.namespace, Asked: int64(len(hashes))}
		if f.all {
			out.Deleted, err = f.clear(ctx, client)
		} else {
			out.Deleted, err = f.delete(ctx, client, hashes, hashLen)
		}
		if err != nil {
			return err
		}
		switch {
		case f.json:
			return writeJSON(stdout, out)
		case f.all:
			_, err = fmt.Fprintf(stdout, "deleted %d\n", out.Deleted)
		default:
			_, err = fmt.Fprintf(stdout, "deleted %d of %d\n", out.Deleted, out.Asked)
		}
		return err
	})
}

func (f *rmFlags) clear(ctx context.Context, client *api.Client) (int64, error) {
	ctx, cancel := f.call(ctx)
	defer cancel()
	ns, err := client.Namespace(ctx, f.namespace)
	if err != nil {
		return 0, err
	}
	return client.Clear(ctx, ns)
}

func (f *rmFlags) delete(ctx context.Context, client *api.Client, hashes []block.Hash, hashLen int) (int64, error) {
	ns, err := f.findNamespace(ctx, client, f.namespace, hashLen)
	if err != nil {
		return 0, err
	}
	var deleted int64
	err = f.batches(ctx, hashes, func(ctx context.Context, part []block.Hash) error {
		n, err := client.Delete(ctx, ns, part)
		deleted += int64(n)
		return err
	})
	return deleted, err
}
