package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// locatedBlock is what locate prints of one key as JSON.
type locatedBlock struct {
	Hash   string         `json:"hash"`
	Places []locatedPlace `json:"places"` // nearest tier first; none when it is absent
}

type locatedPlace struct {
	Tier   string `json:"tier"`
	Device uint8  `json:"device"` // number in its tier
	Offset int64  `json:"offset"` // of the slot on the device
	Bytes  uint32 `json:"bytes"`  // of payload
}

func newLocateCmd() *cobra.Command {
	var f clientFlags
	var namespace string
	c := &cobra.Command{
		Use:   "locate HASH...",
		Short: "List every place where blocks lie",
		Args:  cobra.MinimumNArgs(1),
	}
	f.add(c, "print one JSON array")
	namespaceFlag(c, &namespace)
	c.RunE = func(c *cobra.Command, args []string) error {
		return locate(c.Context(), &f, namespace, args, c.OutOrStdout())
	}
	return c
}

func locate(ctx context.Context, f *clientFlags, namespace string, args []string, stdout io.Writer) error {
	hashes, hashLen, err := parseHashes(args)
	if err != nil {
		return err
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.findNamespace(ctx, client, namespace, hashLen)
		if err != nil {
			return err
		}
		out := make([]locatedBlock, 0, len(hashes))
		err = f.batches(ctx, hashes, func(ctx context.Context, part []block.Hash) error {
			found, err := client.Locate(ctx, ns, part)
			if err != nil {
				return err
			}
			for i, places := range found {
				b := locatedBlock{Hash: part[i].Hex(hashLen), Places: []locatedPlace{}}
				for _, p := range places {
					b.Places = append(b.Places, locatedPlace{p.Tier.String(), p.Place.Device(), p.Place.Offset(), p.Len})
				}
				out = append(out, b)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if f.json {
			return writeJSON(stdout, out)
		}
		tw := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, "HASH\tTIER\tDEVICE\tOFFSET\tBYTES")
		for _, b := range out {
			if len(b.Places) == 0 {
				fmt.Fprintf(tw, "%s\t-\t-\t-\t-\n", b.Hash)
			}
			for _, p := range b.Places {
				fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\n", b.Hash, p.Tier, p.Device, p.Offset, p.Bytes)
			}
		}
		return tw.Flush()
	})
}
