package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// listPage is how many blocks one call of ls lists at most.
const listPage = 1000

// lsFlags are the flags of ls.
type lsFlags struct {
	clientFlags
	namespace string
	limit     int64
}

// listedBlock is what ls prints of one block as JSON.
type listedBlock struct {
	Hash    string   `json:"hash"`
	Parent  string   `json:"parent,omitempty"`
	Bytes   uint32   `json:"bytes"`
	Sum     string   `json:"sum"`   // xxh3-128 of the payload
	Tiers   []string `json:"tiers"` // nearest first
	Expires string   `json:"expires,omitempty"`
	Pinned  bool     `json:"pinned,omitempty"`
}

func newLsCmd() *cobra.Command {
	f := &lsFlags{}
	c := &cobra.Command{
		Use:   "ls",
		Short: "List the blocks of a namespace",
		Long: `List the blocks of a namespace, one line each, as they come in. The order is the
store's own and stays while the store changes: a block that is there throughout
is listed exactly once.`,
		Args: noArgs,
	}
	f.add(c, "print a line of JSON for each block")
	namespaceFlag(c, &f.namespace)
	c.Flags().Int64Var(&f.limit, "limit", 0, "list so many blocks at most; 0 lists all")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.run(c.Context(), c.OutOrStdout())
	}
	return c
}

func (f *lsFlags) run(ctx context.Context, stdout io.Writer) error {
	if f.limit < 0 {
		return usageErrorf("--limit %d: want 0 or more", f.limit)
	}
	return f.connect(ctx, func(client *api.Client) error {
		cctx, cancel := f.call(ctx)
		ns, err := client.Namespace(cctx, f.namespace)
		cancel()
		if err != nil {
			return err
		}
		left := f.limit
		var cursor string
		for first := true; first || cursor != ""; first = false {
			page := listPage
			if f.limit > 0 {
				page = int(min(left, listPage))
			}
			cctx, cancel := f.call(ctx)
			var entries []block.ListEntry
			entries, cursor, err = client.List(cctx, ns, cursor, page)
			cancel()
			if err != nil {
				return err
			}
			if ns.HashLen == 0 && len(entries) > 0 {
				if ns, err = f.refresh(ctx, client); err != nil {
					return err
				}
			}
			if err := f.print(stdout, ns.HashLen, entries); err != nil {
				return err
			}
			if left -= int64(len(entries)); f.limit > 0 && left <= 0 {
				return nil
			}
		}
		return nil
	})
}

// refresh asks again for the namespace, whose hash length a first put has fixed
// since it was asked for.
func (f *lsFlags) refresh(ctx context.Context, client *api.Client) (block.Namespace, error) {
	ctx, cancel := f.call(ctx)
	defer cancel()
	return client.Namespace(ctx, f.namespace)
}

func (f *lsFlags) print(w io.Writer, hashLen int, entries []block.ListEntry) error {
	for _, e := range entries {
		b := listedBlock{Hash: e.Hash.Hex(hashLen), Bytes: e.Len, Sum: e.Sum.String(), Tiers: tierNames(e.Tiers), Expires: rfc3339(e.Expires), Pinned: e.Pinned}
		if e.HasPar {
			b.Parent = e.Parent.Hex(hashLen)
		}
		var err error
		if f.json {
			err = writeJSONLine(w, b)
		} else {
			_, err = fmt.Fprintln(w, b.line())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// line writes a block for people. The columns are of fixed width, since a
// listing may be longer than memory.
func (b *listedBlock) line() string {
	s := fmt.Sprintf("%s  %8d  %-5s", b.Hash, b.Bytes, strings.Join(b.Tiers, ","))
	if b.Parent != "" {
		s += "  parent " + b.Parent
	}
	if b.Expires != "" {
		s += "  expires " + b.Expires
	}
	if b.Pinned {
		s += "  pinned"
	}
	return strings.TrimRight(s, " ")
}
