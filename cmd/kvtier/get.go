package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// getFlags are the flags of get.
type getFlags struct {
	clientFlags
	namespace string
	output    string
	byteRange string
	ranged    bool // a range was given
}

// getOutput is what get prints as JSON.
type getOutput struct {
	Namespace string `json:"namespace"`
	Hash      string `json:"hash"`
	Tier      string `json:"tier"`  // that served it
	Bytes     int    `json:"bytes"` // written to the file
	Total     uint32 `json:"total"` // of the whole block
	Sum       string `json:"sum"`   // xxh3-128 of the whole block
}

func newGetCmd() *cobra.Command {
	f := &getFlags{}
	c := &cobra.Command{
		Use:   "get HASH",
		Short: "Read one block",
		Long: `Write the bytes of a block, or a range of them, to standard output or to a file.
A miss writes nothing, says why on standard error and exits with code 3.`,
		Example: `  kvtier get --namespace demo 00112233445566778899aabbccddeeff -o block.bin
  kvtier get --namespace demo 00112233445566778899aabbccddeeff --range 4096:512 | xxd`,
		Args: cobra.ExactArgs(1),
	}
	f.add(c, "print one JSON object that describes the block; needs -o")
	fs := c.Flags()
	namespaceFlag(c, &f.namespace)
	fs.StringVarP(&f.output, "output", "o", "-", "`file` to write to; \"-\" is standard output")
	fs.StringVar(&f.byteRange, "range", "", "`OFF:LEN` of the bytes wanted; without LEN to the end")
	f.addInline(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		f.ranged = c.Flags().Changed("range")
		return f.run(c.Context(), args[0], c.OutOrStdout())
	}
	return c
}

func (f *getFlags) run(ctx context.Context, hash string, stdout io.Writer) error {
	hashes, hashLen, err := parseHashes([]string{hash})
	if err != nil {
		return err
	}
	want := block.Wanted{Hash: hashes[0]}
	var o block.GetOptions
	if f.ranged {
		if want.Offset, want.Length, err = parseRange(f.byteRange); err != nil {
			return err
		}
		o.Verify = true // the client can check whole blocks only
	}
	if f.json && f.output == "-" {
		return usageErrorf("--json: the bytes go to standard output; add -o FILE")
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.findNamespace(ctx, client, f.namespace, hashLen)
		if err != nil {
			return err
		}
		ctx, cancel := f.call(ctx)
		defer cancel()
		return client.Get(ctx, ns, []block.Wanted{want}, o, func(_ int, p block.Payload) error {
			if p.Reason != block.Hit {
				return &exitError{exitMiss, fmt.Errorf("get %s: miss: %s", hash, p.Reason)}
			}
			if len(p.Bytes) == 0 { // no block is empty
				return fmt.Errorf("get %s: %w: range %s begins at the end of the block, %d bytes", hash, block.ErrInvalid, f.byteRange, p.Total)
			}
			if f.output == "-" {
				_, err := stdout.Write(p.Bytes)
				return err
			}
			if err := os.WriteFile(f.output, p.Bytes, 0o644); err != nil {
				return err
			}
			if !f.json {
				return nil
			}
			return writeJSON(stdout, getOutput{
				Namespace: f.namespace, Hash: hashes[0].Hex(hashLen), Tier: p.Tier.String(), Bytes: len(p.Bytes), Total: p.Total, Sum: p.Sum.String(),
			})
		})
	})
}
