package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/tiers"
)

// nvmeDepth is how many blocks are under way at a time in the rows of that depth.
const nvmeDepth = 8

// benchNVMe measures the NVMe tier against O_DIRECT I/O of one request a block
// on its slab. Requests come from goroutines, each in a system call of its own,
// which is as fast as io_uring at this size.
func benchNVMe(ctx context.Context, b *bench) (err error) {
	room := roomFor(b.blocks, b.payload)
	if err := b.needSpace(2*2*room + 1<<30); err != nil {
		return err
	}
	dataAt, err := b.makeSlab(ctx, "nvme", 2*room)
	if err != nil {
		return err
	}
	n, err := b.openNVMe(ctx, "nvme", dataAt, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()

	if err := b.compare(ctx, "nvme.write.1MiB.d8", "GB/s", often*b.pairs, n.drain, n.rawWrite); err != nil {
		return err
	}
	if err := n.comparePuts(ctx); err != nil {
		return err
	}
	// The store opens again to find its blocks in G3 only.
	if _, err := n.put(ctx); err != nil {
		return err
	}
	if err := n.close(); err != nil {
		return err
	}
	again, err := b.openNVMe(ctx, "nvme", dataAt, false)
	if err != nil {
		return err
	}
	again.keys, again.order = n.keys, rand.New(rand.NewPCG(1, 2)).Perm(b.blocks)
	n = again
	for _, depth := range []int{1, nvmeDepth} {
		name := fmt.Sprintf("nvme.read.1MiB.d%d", depth)
		if err := b.compare(ctx, name, "GB/s", often*b.pairs, n.read(depth), n.rawRead(depth)); err != nil {
			return err
		}
	}
	return nil
}

// makeSlab makes a store's slab and writes all of it once: the first write to a
// part of a file that is only set aside costs the file system more than later
// ones. It returns where the slab's data begins.
func (b *bench) makeSlab(ctx context.Context, name string, bytes int64) (dataAt int64, err error) {
	b.note("making %s of slab", formatSizeShort(bytes))
	s, err := b.openStore(ctx, name, minDRAM, bytes, b.payload, true)
	if err != nil {
		return 0, err
	}
	if err := s.close(); err != nil {
		return 0, err
	}
	sl, err := tiers.OpenSlab(b.slabPath(name), tiers.SlabOptions{})
	if err != nil {
		return 0, err
	}
	at, end := sl.DataOffset(), sl.DataOffset()+sl.DataBytes()
	if err := sl.Close(); err != nil {
		return 0, err
	}
	mem, err := arena.New(arena.HugeBytes, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	f, err := openDirect(b.slabPath(name))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for off := at; off < end; off += mem.Size() {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if _, err := f.WriteAt(mem.Slice(0, min(mem.Size(), end-off)), off); err != nil {
			return 0, fmt.Errorf("write zeros: %w", err)
		}
	}
	return at, f.Sync()
}

func openDirect(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
}

// nvmeBench is a store with a slab, and the slab's file opened beside it.
type nvmeBench struct {
	*bench
	*benchStore
	bufs   [][]byte
	keys   []byte // of the blocks in the store
	order  []int  // in which blocks are read
	file   *os.File
	dataAt int64
	places []int64 // of the blocks' payloads in the file
}

// openNVMe opens a store that was made by makeSlab.
func (b *bench) openNVMe(ctx context.Context, name string, dataAt int64, noSync bool) (*nvmeBench, error) {
	room := roomFor(b.blocks, b.payload)
	s, err := b.openStore(ctx, name, room, 2*room, b.payload, noSync)
	if err != nil {
		return nil, err
	}
	n := &nvmeBench{bench: b, benchStore: s, dataAt: dataAt}
	if n.bufs, err = s.buffers(ctx, b.blocks, b.payload); err == nil {
		n.file, err = openDirect(b.slabPath(name))
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.add(n.file.Close)
	return n, nil
}

func (n *nvmeBench) close() error { return n.benchStore.close() }

// clear removes the blocks of the last pass.
func (n *nvmeBench) clear(ctx context.Context) error {
	if n.keys == nil {
		return nil
	}
	_, err := n.Delete(ctx, n.ns, benchHashBytes, n.keys)
	return err
}

// fill puts new blocks.
func (n *nvmeBench) fill(ctx context.Context, durable block.TierID) (time.Duration, error) {
	if err := n.clear(ctx); err != nil {
		return 0, err
	}
	n.keys, n.places = n.newKeys(n.blocks), nil
	return side(ctx, n.blocks, nvmeDepth, func(ctx context.Context, i int) error {
		return n.benchStore.put(ctx, hashAt(n.keys, i), n.bufs[i], durable)
	})
}

// drain writes blocks of G2 down.
func (n *nvmeBench) drain(ctx context.Context) (float64, error) {
	if _, err := n.fill(ctx, block.G2); err != nil {
		return 0, err
	}
	begin := time.Now()
	res, err := n.Drain(ctx, nil)
	took := time.Since(begin)
	if err == nil && int(res.Kept) != n.blocks {
		err = fmt.Errorf("drain kept %d of %d blocks", res.Kept, n.blocks)
	}
	return rate(n.blocks*n.payload, took), err
}

// put is durable.
func (n *nvmeBench) put(ctx context.Context) (float64, error) {
	took, err := n.fill(ctx, block.G3)
	return rate(n.blocks*n.payload, took), err
}

// comparePuts measures durable puts beside those of a store that leaves out
// every sync.
func (n *nvmeBench) comparePuts(ctx context.Context) (err error) {
	const name = "nvme-nosync"
	dataAt, err := n.makeSlab(ctx, name, 2*roomFor(n.blocks, n.payload))
	if err != nil {
		return err
	}
	other, err := n.openNVMe(ctx, name, dataAt, true)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, other.close(), os.Remove(n.slabPath(name)))
	}()
	return n.compare(ctx, "nvme.put_durable.1MiB.d8", "GB/s", often*n.pairs, n.put, other.put)
}

func (n *nvmeBench) read(depth int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := side(ctx, n.blocks, depth, func(ctx context.Context, i int) error {
			i = n.order[i]
			return n.benchStore.read(ctx, hashAt(n.keys, i), n.bufs[i], block.G3, block.GetOptions{})
		})
		return rate(n.blocks*n.payload, took), err
	}
}

// locate finds where in the file the blocks lie.
func (n *nvmeBench) locate(ctx context.Context) error {
	if n.places != nil {
		return nil
	}
	found, err := n.Locate(ctx, n.ns, benchHashBytes, n.keys)
	if err != nil {
		return err
	}
	_, header := tiers.SlotBytes(int64(n.payload))
	for i, places := range found {
		for _, p := range places {
			if p.Tier == block.G3 {
				n.places = append(n.places, n.dataAt+p.Place.Offset()+header)
			}
		}
		if len(n.places) != i+1 {
			return fmt.Errorf("block %d is not in g3", i)
		}
	}
	return nil
}

func (n *nvmeBench) rawRead(depth int) pass {
	return func(ctx context.Context) (float64, error) {
		if err := n.locate(ctx); err != nil {
			return 0, err
		}
		took, err := side(ctx, n.blocks, depth, func(_ context.Context, i int) error {
			i = n.order[i]
			_, err := n.file.ReadAt(n.bufs[i], n.places[i])
			return err
		})
		return rate(n.blocks*n.payload, took), err
	}
}

// rawWrite writes to each block's place the very bytes that lie there.
func (n *nvmeBench) rawWrite(ctx context.Context) (float64, error) {
	if err := n.locate(ctx); err != nil {
		return 0, err
	}
	took, err := side(ctx, n.blocks, nvmeDepth, func(_ context.Context, i int) error {
		_, err := n.file.WriteAt(n.bufs[i], n.places[i])
		return err
	})
	return rate(n.blocks*n.payload, took), err
}
