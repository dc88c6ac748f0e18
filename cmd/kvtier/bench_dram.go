package main

import (
	"context"
	"errors"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// maxBenchLease outlasts any pass.
const maxBenchLease = time.Hour

// benchDRAM measures the DRAM tier against loops over the same memory: the
// slots of the store and the caller's buffers.
func benchDRAM(ctx context.Context, b *bench) (err error) {
	s, err := b.openStore(ctx, "dram", roomFor(b.blocks, b.payload), 0, b.payload, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	d := &dramBench{bench: b, s: s, hash: xxh3.New()}
	if d.bufs, err = s.buffers(ctx, b.blocks, b.payload); err != nil {
		return err
	}
	if err := b.compare(ctx, "dram.put.1MiB", "GB/s", often*b.pairs, d.put, d.copyHashIn); err != nil {
		return err
	}
	if err := b.compare(ctx, "dram.get.1MiB", "GB/s", often*b.pairs, d.get(block.GetOptions{}), d.copyOut); err != nil {
		return err
	}
	return b.compare(ctx, "dram.get_verified.1MiB", "GB/s", often*b.pairs, d.get(block.GetOptions{Verify: true}), d.copyHashOut)
}

type dramBench struct {
	*bench
	s     *benchStore
	bufs  [][]byte
	keys  []byte   // of the blocks in the store
	mem   [][]byte // their slots
	unpin func() error
	hash  *xxh3.Hasher // on the heap, which aligns it
}

// clear removes the blocks of the last pass, so that the next one gets the same
// slots.
func (d *dramBench) clear(ctx context.Context) error {
	if d.keys == nil {
		return nil
	}
	if err := d.unpin(); err != nil {
		return err
	}
	_, err := d.s.Delete(ctx, d.s.ns, benchHashBytes, d.keys)
	return err
}

func (d *dramBench) put(ctx context.Context) (float64, error) {
	if err := d.clear(ctx); err != nil {
		return 0, err
	}
	d.keys = d.s.newKeys(d.blocks)
	took, err := side(ctx, d.blocks, 1, func(ctx context.Context, i int) error {
		return d.s.put(ctx, hashAt(d.keys, i), d.bufs[i], block.G2)
	})
	if err != nil {
		return 0, err
	}
	d.mem, d.unpin, err = d.s.slots(ctx, d.keys)
	return rate(d.blocks*d.payload, took), err
}

// copyHashIn is what a put cannot do without. It writes into the slots the very
// bytes that they hold.
func (d *dramBench) copyHashIn(context.Context) (float64, error) {
	begin := time.Now()
	for i, src := range d.bufs {
		d.copyHash(d.mem[i], src)
	}
	return rate(d.blocks*d.payload, time.Since(begin)), nil
}

func (d *dramBench) get(o block.GetOptions) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := side(ctx, d.blocks, 1, func(ctx context.Context, i int) error {
			return d.s.read(ctx, hashAt(d.keys, i), d.bufs[i], block.G2, o)
		})
		return rate(d.blocks*d.payload, took), err
	}
}

func (d *dramBench) copyOut(context.Context) (float64, error) {
	begin := time.Now()
	for i, dst := range d.bufs {
		copy(dst, d.mem[i])
	}
	return rate(d.blocks*d.payload, time.Since(begin)), nil
}

func (d *dramBench) copyHashOut(context.Context) (float64, error) {
	begin := time.Now()
	for i, dst := range d.bufs {
		d.copyHash(dst, d.mem[i])
	}
	return rate(d.blocks*d.payload, time.Since(begin)), nil
}

// copyHash copies and hashes in the steps in which the store does.
func (d *dramBench) copyHash(dst, src []byte) [16]byte {
	d.hash.Reset()
	for len(src) > 0 {
		n := copy(dst, src[:min(tiers.CopyStep, len(src))])
		d.hash.Write(dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return d.hash.Sum128().Bytes()
}
