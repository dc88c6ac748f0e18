package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers"
)

// restartPayload is the size of the blocks of the restart target: small, since
// recovery reads records and not blocks.
const restartPayload = 4096

// streamBlocks is how many blocks go into one stream of puts.
const streamBlocks = 4096

// benchRestart fills a daemon with durable blocks, kills it, and takes the time
// until the next one serves. Then it does so again with twice as many, for the
// memory that each of them takes.
func benchRestart(ctx context.Context, b *bench) (err error) {
	slot, _ := tiers.SlotBytes(restartPayload)
	slabBytes := (int64(2*b.restartBlocks)*slot*21/20 + 256<<20) >> 20 << 20
	if err := b.needSpace(slabBytes + 2<<30); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	dir := filepath.Join(b.dir, "restart")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r := &restartBench{bench: b, self: self, dir: dir, slabBytes: slabBytes}
	defer func() { err = errors.Join(err, r.kill()) }()

	if _, err := r.start(ctx); err != nil {
		return err
	}
	took, one, err := r.growTo(ctx, b.restartBlocks)
	if err != nil {
		return err
	}
	b.once("restart.1M", "s", took.Seconds())
	_, two, err := r.growTo(ctx, 2*b.restartBlocks)
	if err != nil {
		return err
	}
	state, err := policyBytes(b.restartBlocks)
	if err != nil {
		return err
	}
	b.note("memory: %v, then %v; policy %.1f bytes a block", one, two, state)
	b.once("memory.resident", "bytes", float64(two.held()-one.held())/float64(b.restartBlocks)-state)
	return nil
}

// restartBench is a data directory and the daemon that serves it.
type restartBench struct {
	*bench
	self      string // the program
	dir       string
	slabBytes int64
	daemon    *benchDaemon // nil when none runs
	blocks    int          // put so far
}

// start starts the daemon and returns how long it took to become ready.
func (r *restartBench) start(ctx context.Context) (took time.Duration, err error) {
	begin := time.Now()
	r.daemon, err = startBenchDaemon(ctx, r.self, "--data", filepath.Join(r.dir, "data"), "--listen", "127.0.0.1:0", "--dram", r.restartDRAM,
		"--nvme", fmt.Sprintf("%s=%d", filepath.Join(r.dir, "slab"), r.slabBytes), "--log-level", "warn")
	return time.Since(begin), err
}

func (r *restartBench) kill() error {
	if r.daemon == nil {
		return nil
	}
	err := r.daemon.kill()
	r.daemon = nil
	return err
}

// growTo puts blocks until there are n, kills the daemon, starts it again, and
// takes its memory.
func (r *restartBench) growTo(ctx context.Context, n int) (took time.Duration, m processMemory, err error) {
	if err := r.fill(ctx, n); err != nil {
		return 0, m, err
	}
	if err := r.kill(); err != nil {
		return 0, m, err
	}
	if took, err = r.start(ctx); err != nil {
		return 0, m, err
	}
	r.note("ready after %.2f s with %d blocks", took.Seconds(), n)
	if err := r.check(ctx, n); err != nil {
		return 0, m, err
	}
	m, err = r.daemon.settledMemory(ctx)
	return took, m, err
}

// fill puts durable blocks until there are n.
func (r *restartBench) fill(ctx context.Context, n int) (err error) {
	client, err := api.Dial(ctx, r.daemon.addr, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	ns, err := client.OpenNamespace(ctx, block.Descriptor{Name: "bench", BlockBytes: restartPayload}, 0)
	if err != nil {
		return err
	}
	ns.HashLen = benchHashBytes
	show := newProgress(r.out)
	defer show.done()
	data := make([]byte, restartPayload)
	items := make([]api.PutItem, 0, streamBlocks)
	for r.blocks < n {
		items = items[:0]
		for i := range min(streamBlocks, n-r.blocks) {
			items = append(items, api.PutItem{Hash: benchHash(uint64(r.blocks + i)), Data: data})
		}
		results, err := client.Put(ctx, ns, items, api.PutOptions{Durable: block.G3})
		if err != nil {
			return err
		}
		for _, res := range results {
			if res.Err != nil {
				return res.Err
			}
		}
		r.blocks += len(items)
		show.update(func() string { return fmt.Sprintf("put %d of %d blocks", r.blocks, n) })
	}
	return nil
}

// check sees that the daemon serves all blocks.
func (r *restartBench) check(ctx context.Context, n int) (err error) {
	client, err := api.Dial(ctx, r.daemon.addr, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	st, err := client.Stats(ctx)
	if err != nil {
		return err
	}
	if st.Blocks != int64(n) {
		return fmt.Errorf("%d of %d blocks are there after the restart", st.Blocks, n)
	}
	return nil
}

// policyBytes is what the default policy keeps of each block of a tier.
func policyBytes(blocks int) (float64, error) {
	p, err := policy.New(policy.Default)
	if err != nil {
		return 0, err
	}
	grow := func(from, to int) int64 {
		for i := from; i < to; i++ {
			p.Insert(block.Handle(i+1), policy.Block{Hash: uint64(i), Bytes: restartPayload})
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	one := grow(0, blocks)
	two := grow(blocks, 2*blocks)
	runtime.KeepAlive(p)
	return float64(two-one) / float64(blocks), nil
}
