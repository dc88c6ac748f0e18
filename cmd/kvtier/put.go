package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// putFlags are the flags of put.
type putFlags struct {
	clientFlags
	namespace     string
	blockBytes    int64
	maxBlockBytes int64
	durable       string
	parent        string
	ttl           time.Duration
}

// putOutput is what put prints as JSON.
type putOutput struct {
	Namespace string `json:"namespace"`
	Hash      string `json:"hash"`
	Status    string `json:"status"` // stored or exists
	Bytes     int    `json:"bytes"`
	Durable   string `json:"durable"`
}

func newPutCmd() *cobra.Command {
	f := &putFlags{}
	c := &cobra.Command{
		Use:   "put HASH FILE",
		Short: "Store one block",
		Long: `Store the bytes of FILE ("-" for standard input) as the block of HASH, which is
hex of 8, 16, 20 or 32 bytes. The namespace is made when there is none of that
name; one that is there must have the same block size, and may have been opened
with more, such as a model. Its first put fixes the length of its hashes. Exit
code 0 means that the block is as durable as was asked for. A block that is there
with the same bytes is no error, one with other bytes is a conflict.`,
		Example: `  kvtier put --namespace demo --block-bytes 64KiB --durable g3 00112233445566778899aabbccddeeff block.bin
  head -c 65536 /dev/zero | kvtier put --namespace demo --block-bytes 64KiB 00112233445566778899aabbccddeefe -`,
		Args: cobra.ExactArgs(2),
	}
	f.add(c, "print one JSON object")
	fs := c.Flags()
	namespaceFlag(c, &f.namespace)
	sizeVar(fs, &f.blockBytes, "block-bytes", 0, "exact `size` of the namespace's blocks")
	sizeVar(fs, &f.maxBlockBytes, "max-block-bytes", 0, "largest `size` of the namespace's blocks, which may differ")
	c.MarkFlagsOneRequired("block-bytes", "max-block-bytes")
	c.MarkFlagsMutuallyExclusive("block-bytes", "max-block-bytes")
	enumVar(fs, &f.durable, "durable", "g2", "how durable the block is when put ends: in DRAM (g2) or on NVMe (g3)", "g2", "g3")
	fs.StringVar(&f.parent, "parent", "", "`hash` of the block before this one in its sequence")
	fs.DurationVar(&f.ttl, "ttl", 0, "time to live of the block, rounded up to whole seconds (default the namespace's)")
	f.addInline(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return f.run(c.Context(), args[0], args[1], c.InOrStdin(), c.OutOrStdout())
	}
	return c
}

func (f *putFlags) run(ctx context.Context, hash, path string, stdin io.Reader, stdout io.Writer) error {
	names := []string{hash}
	if f.parent != "" {
		names = append(names, f.parent)
	}
	hashes, hashLen, err := parseHashes(names)
	if err != nil {
		return err
	}
	durable, err := block.ParseTier(f.durable)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	if f.ttl < 0 {
		return usageErrorf("--ttl %v: want 0 or more", f.ttl)
	}
	d := block.Descriptor{Name: f.namespace, BlockBytes: f.blockBytes, MaxBlockBytes: f.maxBlockBytes}
	if err := d.Validate(); err != nil {
		return &exitError{exitUsage, err}
	}
	// All is read and checked before the daemon is asked for room.
	data, err := readPayload(path, stdin)
	if err != nil {
		return err
	}
	item := api.PutItem{Hash: hashes[0], Data: data}
	if len(hashes) > 1 {
		item.Parent, item.HasParent = hashes[1], true
	}
	return f.connect(ctx, func(client *api.Client) error {
		ns, err := f.namespaceFor(ctx, client, d, hashLen, int64(len(data)))
		if err != nil {
			return fmt.Errorf("put %s: %w", hash, err)
		}
		ctx, cancel := f.call(ctx)
		defer cancel()
		res, err := client.Put(ctx, ns, []api.PutItem{item}, api.PutOptions{Durable: durable, TTL: f.ttl})
		if err != nil {
			return err
		}
		if res[0].Err != nil {
			return res[0].Err
		}
		out := putOutput{Namespace: f.namespace, Hash: item.Hash.Hex(hashLen), Status: putStatusName(res[0].Status), Bytes: len(data), Durable: durable.String()}
		if f.json {
			return writeJSON(stdout, out)
		}
		_, err = fmt.Fprintf(stdout, "%s %s, %d bytes, %s\n", out.Status, out.Hash, out.Bytes, out.Durable)
		return err
	})
}

// namespaceFor finds the namespace for a payload of size bytes, or makes it as d
// says. One that is there must have d's block size and may have more than d says.
func (f *putFlags) namespaceFor(ctx context.Context, client *api.Client, d block.Descriptor, hashLen int, size int64) (block.Namespace, error) {
	cctx, cancel := f.call(ctx)
	ns, err := client.Namespace(cctx, d.Name)
	cancel()
	if errors.Is(err, block.ErrNotFound) {
		// What is made stays: not for a payload that does not fit.
		if err := d.CheckLen(size); err != nil {
			return block.Namespace{}, err
		}
		return f.openNamespace(ctx, client, d, hashLen)
	}
	if err != nil {
		return ns, err
	}
	want := ns.Desc
	want.BlockBytes, want.MaxBlockBytes = d.BlockBytes, d.MaxBlockBytes
	if m := ns.Desc.Differs(want); m != nil {
		return ns, m
	}
	if err := ns.Desc.CheckLen(size); err != nil {
		return ns, err
	}
	return withHashLen(ns, hashLen)
}

func putStatusName(s block.PutStatus) string {
	if s == block.Exists {
		return "exists"
	}
	return "stored"
}

// readPayload reads a file, or standard input for "-", up to the largest size
// of a block.
func readPayload(path string, stdin io.Reader) ([]byte, error) {
	r, name := stdin, "standard input"
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r, name = f, path
	}
	data, err := io.ReadAll(io.LimitReader(r, block.MaxBlockBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(data) > block.MaxBlockBytes {
		return nil, fmt.Errorf("%w: %s: more than %d bytes, the largest block", block.ErrInvalid, name, block.MaxBlockBytes)
	}
	return data, nil
}
