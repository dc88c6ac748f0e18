package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// namespaceOutput is what the ns commands print of a namespace as JSON.
type namespaceOutput struct {
	Name           string `json:"name"`
	ID             uint32 `json:"id"`
	Model          string `json:"model,omitempty"`
	Revision       string `json:"revision,omitempty"`
	DType          string `json:"dtype,omitempty"`
	Layout         string `json:"layout,omitempty"`
	TokensPerBlock uint32 `json:"tokens_per_block,omitempty"`
	BlockBytes     int64  `json:"block_bytes,omitempty"`
	MaxBlockBytes  int64  `json:"max_block_bytes,omitempty"`
	HashAlgorithm  string `json:"hash_algorithm,omitempty"`
	HashSeed       string `json:"hash_seed,omitempty"`
	RankLayout     string `json:"rank_layout,omitempty"`
	KVGroup        string `json:"kv_group,omitempty"`
	Tenant         string `json:"tenant,omitempty"`
	Digest         string `json:"digest"`
	HashLen        int    `json:"hash_len"` // bytes; 0 until the first put
	Epoch          uint32 `json:"epoch"`
	TTLMS          int64  `json:"ttl_ms"` // 0: without end
	Created        string `json:"created"`
	Blocks         *int64 `json:"blocks,omitempty"`
	Bytes          *int64 `json:"bytes,omitempty"`

	// Where sessions are served, of open and show.
	SessionAddress string `json:"session_address,omitempty"` // HOST:PORT
	SessionSocket  string `json:"session_socket,omitempty"`
}

func describeNamespace(n block.Namespace) namespaceOutput {
	d := n.Desc
	return namespaceOutput{
		Name: d.Name, ID: uint32(n.ID), Model: d.Model, Revision: d.Revision, DType: d.DType, Layout: d.Layout,
		TokensPerBlock: d.TokensPerBlock, BlockBytes: d.BlockBytes, MaxBlockBytes: d.MaxBlockBytes,
		HashAlgorithm: d.HashAlgorithm, HashSeed: d.HashSeed, RankLayout: d.RankLayout, KVGroup: d.KVGroup, Tenant: d.Tenant,
		Digest: fmt.Sprintf("%x", d.Digest()), HashLen: n.HashLen, Epoch: n.Epoch, TTLMS: n.TTL.Milliseconds(),
		Created: rfc3339(n.Created),
	}
}

func describeNamespaceInfo(n block.NamespaceInfo) namespaceOutput {
	o := describeNamespace(n.Namespace)
	o.Blocks, o.Bytes = &n.Blocks, &n.Bytes
	return o
}

// addSessions asks where sessions are served.
func (o *namespaceOutput) addSessions(ctx context.Context, client *api.Client) error {
	info, err := client.Ping(ctx)
	o.SessionAddress, o.SessionSocket = info.Sessions.Address, info.Sessions.Socket
	return err
}

// print writes a namespace for people, without the fields that it leaves open.
func (o *namespaceOutput) print(w io.Writer) error {
	rows := [][2]string{{"name", o.Name}, {"id", fmt.Sprint(o.ID)}}
	for _, r := range [][2]string{
		{"model", o.Model},
		{"revision", o.Revision},
		{"dtype", o.DType},
		{"layout", o.Layout},
		{"tokens per block", numberOrNone(int64(o.TokensPerBlock))},
		{"block bytes", numberOrNone(o.BlockBytes)},
		{"max block bytes", numberOrNone(o.MaxBlockBytes)},
		{"hash algorithm", o.HashAlgorithm},
		{"hash seed", o.HashSeed},
		{"rank layout", o.RankLayout},
		{"kv group", o.KVGroup},
		{"tenant", o.Tenant},
	} {
		if r[1] != "" {
			rows = append(rows, r)
		}
	}
	rows = append(rows, [][2]string{
		{"digest", o.Digest},
		{"hash length", hashLenText(o.HashLen)},
		{"epoch", fmt.Sprint(o.Epoch)},
		{"time to live", ttlText(o.TTLMS)},
		{"created", o.Created},
	}...)
	for _, r := range [][2]string{{"session address", o.SessionAddress}, {"session socket", o.SessionSocket}} {
		if r[1] != "" {
			rows = append(rows, r)
		}
	}
	if o.Blocks != nil {
		rows = append(rows, [2]string{"blocks", fmt.Sprint(*o.Blocks)}, [2]string{"payload", formatSizeShort(*o.Bytes)})
	}
	return printTable(w, rows)
}

func numberOrNone(n int64) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

func hashLenText(n int) string {
	if n == 0 {
		return "open"
	}
	return fmt.Sprint(n)
}

func ttlText(ms int64) string {
	if ms == 0 {
		return "none"
	}
	return (time.Duration(ms) * time.Millisecond).String()
}

// blockBytesText writes the length that a namespace's blocks may have.
func (o *namespaceOutput) blockBytesText() string {
	if o.BlockBytes == 0 {
		return fmt.Sprintf("<=%d", o.MaxBlockBytes)
	}
	return fmt.Sprint(o.BlockBytes)
}

func newNsCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "ns",
		Short: "List, open and show namespaces",
		Long:  `List all namespaces by name, with what the store holds of each.`,
		Args:  cobra.NoArgs,
	}
	f.add(c, "print one JSON array")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return listNamespaces(c.Context(), &f, c.OutOrStdout())
	}
	c.AddCommand(newNsOpenCmd(), newNsShowCmd())
	return c
}

func listNamespaces(ctx context.Context, f *clientFlags, stdout io.Writer) error {
	return f.connect(ctx, func(client *api.Client) error {
		ctx, cancel := f.call(ctx)
		defer cancel()
		infos, err := client.Namespaces(ctx)
		if err != nil {
			return err
		}
		out := make([]namespaceOutput, 0, len(infos))
		for _, n := range infos {
			out = append(out, describeNamespaceInfo(n))
		}
		if f.json {
			return writeJSON(stdout, out)
		}
		tw := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, "NAME\tBLOCKS\tPAYLOAD\tBLOCK BYTES\tHASH LENGTH\tEPOCH\tTIME TO LIVE")
		for _, o := range out {
			fmt.Fprintf(tw, "%s\t%d\t%s\t%s\t%s\t%d\t%s\n",
				o.Name, *o.Blocks, formatSizeShort(*o.Bytes), o.blockBytesText(), hashLenText(o.HashLen), o.Epoch, ttlText(o.TTLMS))
		}
		return tw.Flush()
	})
}

func newNsShowCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "show NAME",
		Short: "Show all that is known of a namespace",
		Args:  cobra.ExactArgs(1),
	}
	f.add(c, "print one JSON object")
	c.RunE = func(c *cobra.Command, args []string) error {
		return f.connect(c.Context(), func(client *api.Client) error {
			ctx, cancel := f.call(c.Context())
			defer cancel()
			infos, err := client.Namespaces(ctx)
			if err != nil {
				return err
			}
			for _, n := range infos {
				if n.Desc.Name != args[0] {
					continue
				}
				o := describeNamespaceInfo(n)
				if err := o.addSessions(ctx, client); err != nil {
					return err
				}
				if f.json {
					return writeJSON(c.OutOrStdout(), o)
				}
				return o.print(c.OutOrStdout())
			}
			return fmt.Errorf("show namespace %q: %w", args[0], block.ErrNotFound)
		})
	}
	return c
}

// nsOpenFlags are the flags of ns open.
type nsOpenFlags struct {
	clientFlags
	desc block.Descriptor
	ttl  time.Duration
}

func newNsOpenCmd() *cobra.Command {
	f := &nsOpenFlags{}
	c := &cobra.Command{
		Use:   "open NAME",
		Short: "Open a namespace, or make it",
		Long: `Open the namespace of that name, or make it. What the flags say is its identity:
a name that is known with anything else is refused, and the message names the
first field that differs.`,
		Example: `  kvtier ns open llama --model llama-3-8b --dtype bf16 --tokens-per-block 16 --block-bytes 2MiB`,
		Args:    cobra.ExactArgs(1),
	}
	f.add(c, "print one JSON object")
	f.descriptorFlags(c.Flags())
	c.MarkFlagsOneRequired("block-bytes", "max-block-bytes")
	c.MarkFlagsMutuallyExclusive("block-bytes", "max-block-bytes")
	c.RunE = func(c *cobra.Command, args []string) error {
		f.desc.Name = args[0]
		return f.run(c.Context(), c.OutOrStdout())
	}
	return c
}

func (f *nsOpenFlags) descriptorFlags(fs *pflag.FlagSet) {
	d := &f.desc
	sizeVar(fs, &d.BlockBytes, "block-bytes", 0, "exact `size` of the blocks")
	sizeVar(fs, &d.MaxBlockBytes, "max-block-bytes", 0, "largest `size` of the blocks, which may differ")
	fs.StringVar(&d.Model, "model", "", "name of the model")
	fs.StringVar(&d.Revision, "revision", "", "revision of the model")
	fs.StringVar(&d.DType, "dtype", "", "element type of the cache, such as bf16")
	fs.StringVar(&d.Layout, "layout", "", "order of the payload's dimensions")
	fs.Uint32Var(&d.TokensPerBlock, "tokens-per-block", 0, "tokens per block")
	fs.StringVar(&d.HashAlgorithm, "hash-algorithm", "", "how the engine computes sequence hashes")
	fs.StringVar(&d.HashSeed, "hash-seed", "", "seed of the hash algorithm")
	fs.StringVar(&d.RankLayout, "rank-layout", "", "how the cache is spread over ranks")
	fs.StringVar(&d.KVGroup, "kv-group", "", "group of layers")
	fs.StringVar(&d.Tenant, "tenant", "", "owner")
	fs.DurationVar(&f.ttl, "ttl", 0, "default time to live of its blocks, without end when 0; counts only when the namespace is made")
}

func (f *nsOpenFlags) run(ctx context.Context, stdout io.Writer) error {
	if f.ttl < 0 {
		return usageErrorf("--ttl %v: want 0 or more", f.ttl)
	}
	if err := f.desc.Validate(); err != nil {
		return &exitError{exitUsage, err}
	}
	return f.connect(ctx, func(client *api.Client) error {
		ctx, cancel := f.call(ctx)
		defer cancel()
		n, err := client.OpenNamespace(ctx, f.desc, f.ttl)
		if err != nil {
			return err
		}
		o := describeNamespace(n)
		if err := o.addSessions(ctx, client); err != nil {
			return err
		}
		if f.json {
			return writeJSON(stdout, o)
		}
		return o.print(stdout)
	})
}
