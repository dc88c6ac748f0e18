package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/blocksum"
)

// regionStep is how much a daemon copies between a region and its memory before it
// hashes it; the limit does so in the same steps.
const regionStep = 64 << 10

// attachBench is a daemon, and a worker in Python that is attached to it.
type attachBench struct {
	*bench
	closers
	admin  *api.Client
	ns     block.Namespace
	worker *benchWorker
	// What the bare loops copy between: memory as the store's and the region.
	store, region *arena.Arena
	next          uint64
	keys          []block.Hash // of the blocks in the store
}

// benchAttach measures what a worker does through the Python client.
func benchAttach(ctx context.Context, b *bench) (err error) {
	total := int64(b.blocks) * int64(b.payload)
	room := roomFor(b.blocks, b.payload)
	huge, giveBack := b.reservePages(room + total + 16<<20)
	defer func() { err = errors.Join(err, giveBack()) }()
	a := &attachBench{bench: b}
	defer func() { err = errors.Join(err, a.close()) }()
	if a.store, err = arena.New(total, &arena.Options{Memfd: true, NoHugePages: !huge}); err != nil {
		return err
	}
	a.add(a.store.Close)
	if a.region, err = arena.New(total, &arena.Options{Memfd: true, NoHugePages: true, Reserved: arena.ReservedNever}); err != nil {
		return err
	}
	a.add(a.region.Close)
	for i := range b.blocks {
		fillPattern(a.regionRow(i), benchHash(uint64(i)))
	}
	if err := a.start(ctx, room); err != nil {
		return err
	}
	if err := a.compareCopies(ctx); err != nil {
		return err
	}
	return a.compareCalls(ctx)
}

func (a *attachBench) row(m *arena.Arena, i int) []byte {
	return m.Slice(int64(i)*int64(a.payload), int64(a.payload))
}
func (a *attachBench) storeRow(i int) []byte  { return a.row(a.store, i) }
func (a *attachBench) regionRow(i int) []byte { return a.row(a.region, i) }

// start starts the daemon, the server that only answers, and the worker.
func (a *attachBench) start(ctx context.Context, room int64) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	socket, bare := filepath.Join(a.dir, "attach.sock"), filepath.Join(a.dir, "bare.sock")
	daemon, err := startBenchDaemon(ctx, self,
		"--data", filepath.Join(a.dir, "attach"), "--listen", "127.0.0.1:0", "--socket", socket, "--log-level", "warn",
		"--dram", fmt.Sprint(room), "--nvme", noNVMe, "--shared-memory", "on")
	if err != nil {
		return err
	}
	a.add(daemon.kill)
	match, err := a.matchHere(ctx)
	if err != nil {
		return err
	}
	echo, err := startEcho(ctx, bare, matchKeys, match, a.note)
	if err != nil {
		return err
	}
	a.add(echo.close)
	files := make([]*os.File, 2)
	for i, m := range []*arena.Arena{a.store, a.region} {
		if files[i], err = fileOf(m); err != nil {
			return err
		}
		defer files[i].Close()
	}
	if a.worker, err = startWorker(ctx, a.python, socket, bare, a.payload, a.blocks, files...); err != nil {
		return err
	}
	a.add(a.worker.close)
	if a.admin, err = api.Dial(ctx, daemon.addr, &api.ClientOptions{Inline: true}); err != nil {
		return err
	}
	a.add(a.admin.Close)
	if a.ns, err = a.admin.Namespace(ctx, "attach"); err != nil {
		return err
	}
	a.ns.HashLen = benchHashBytes
	return a.checkPages(ctx, a.admin, a.store)
}

// fileOf is the file of an arena in one chunk, opened again.
func fileOf(m *arena.Arena) (*os.File, error) {
	fd, _, ok := m.FileOf(arena.Addr(m.Chunks()[0]), uint64(m.Size()))
	if !ok {
		return nil, fmt.Errorf("%d bytes of memory are not in one file", m.Size())
	}
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a memory file again: %w", err)
	}
	return os.NewFile(uintptr(fd), "memory"), nil
}

func (a *attachBench) newKeys(n int) []block.Hash {
	keys := make([]block.Hash, n)
	for i := range keys {
		keys[i] = benchHash(a.next)
		a.next++
	}
	return keys
}

func (a *attachBench) remove(ctx context.Context, keys []block.Hash) error {
	for part := range slices.Chunk(keys, api.MaxKeys) {
		if _, err := a.admin.Delete(ctx, a.ns, part); err != nil {
			return err
		}
	}
	return nil
}

// compareCopies measures sixteen blocks a call: the client copies them in and out of
// the store's memory, or the daemon copies them from and to the region.
func (a *attachBench) compareCopies(ctx context.Context) error {
	for _, c := range []struct {
		name         string
		value, limit pass
	}{
		{"attach.put.1MiB.d16", a.put("put"), a.bareLoop("copy_in")},
		{"attach.region_put.1MiB.d16", a.put("region_put"), a.bareRegion(a.storeRow, a.regionRow)},
		{"attach.get.1MiB.d16", a.get("get"), a.bareLoop("copy_out")},
		{"attach.region_get.1MiB.d16", a.get("region_get"), a.bareRegion(a.regionRow, a.storeRow)},
	} {
		if err := a.compare(ctx, c.name, "GB/s", often*a.pairs, c.value, c.limit); err != nil {
			return err
		}
	}
	return a.remove(ctx, a.keys)
}

// put puts new blocks, and removes them outside the time.
func (a *attachBench) put(how string) pass {
	return func(ctx context.Context) (float64, error) {
		keys := a.newKeys(a.blocks)
		f, err := a.worker.do(how, keys, 0)
		if err != nil {
			return 0, err
		}
		return a.rate(f), a.remove(ctx, keys)
	}
}

// get gets blocks that the first pass puts: not before, since the memory has room for
// the blocks of one pass.
func (a *attachBench) get(how string) pass {
	return func(context.Context) (float64, error) {
		if a.keys == nil {
			keys := a.newKeys(a.blocks)
			if _, err := a.worker.do("put", keys, 0); err != nil {
				return 0, err
			}
			a.keys = keys
		}
		f, err := a.worker.do(how, a.keys, 0)
		return a.rate(f), err
	}
}

func (a *attachBench) rate(f workerFigures) float64 {
	return rate(a.blocks*a.payload, time.Duration(f.Value*float64(time.Second)))
}

// bareLoop is the worker's, which copies and hashes as the client does.
func (a *attachBench) bareLoop(how string) pass {
	return func(context.Context) (float64, error) {
		f, err := a.worker.do(how, nil, 0)
		return a.rate(f), err
	}
}

// bareRegion is what the daemon cannot do without to move blocks of a region.
func (a *attachBench) bareRegion(to, from func(int) []byte) pass {
	sum := new(blocksum.Sum) // on the heap, which aligns it
	return func(context.Context) (float64, error) {
		begin := time.Now()
		for i := range a.blocks {
			dst, src := to(i), from(i)
			sum.Reset()
			for at := 0; at < len(dst); {
				at += copy(dst[at:min(at+regionStep, len(dst))], src[at:])
				sum.Add(dst[:at])
			}
			_ = sum.Sum()
		}
		return rate(a.blocks*a.payload, time.Since(begin)), nil
	}
}

// compareCalls measures calls that move no bytes.
func (a *attachBench) compareCalls(ctx context.Context) error {
	lent := a.newKeys(1)
	if _, err := a.worker.do("put", append(lent, a.newKeys(a.blocks-1)...), 0); err != nil {
		return err
	}
	r := &callBench{worker: a.worker, what: "lease_read", keys: lent, calls: a.calls}
	if err := a.compare(ctx, "attach.lease_read.1MiB", "us", a.pairs, r.value, r.limit); err != nil {
		return err
	}
	known := a.newKeys(matchKeys)
	if _, err := a.worker.do("small_put", known, 0); err != nil {
		return err
	}
	r = &callBench{worker: a.worker, what: "match", keys: known, calls: a.calls}
	return a.compare(ctx, "attach.match_lease.256", "us", a.pairs, r.value, r.limit)
}

// matchHere makes a function that times a match with a lease in this process.
func (a *attachBench) matchHere(ctx context.Context) (func() (time.Duration, error), error) {
	s, err := a.openStore(ctx, "attach-match", roomFor(matchKeys, 64), 0, 64, false)
	if err != nil {
		return nil, err
	}
	a.add(s.close)
	packed := s.newKeys(matchKeys)
	for i := range matchKeys {
		if err := s.put(ctx, hashAt(packed, i), make([]byte, 64), block.G2); err != nil {
			return nil, err
		}
	}
	var res block.MatchResult
	return func() (time.Duration, error) {
		begin := time.Now()
		err := s.Match(ctx, s.ns, benchHashBytes, packed, block.MatchOptions{Lease: 10 * time.Second}, &res)
		took := time.Since(begin)
		if err == nil && res.Prefix != matchKeys {
			err = fmt.Errorf("found %d of %d keys", res.Prefix, matchKeys)
		}
		if err == nil {
			err = s.ReleaseLease(res.Lease.ID)
		}
		return took, err
	}, nil
}

// callBench takes value and limit call by call: the state of the machine changes
// faster than passes do.
type callBench struct {
	worker *benchWorker
	what   string
	keys   []block.Hash
	calls  int

	taken   bool // the round's figures are there and one was handed out
	figures workerFigures
}

func (c *callBench) value(context.Context) (float64, error) {
	err := c.round()
	return c.figures.Value, err
}

func (c *callBench) limit(context.Context) (float64, error) {
	err := c.round()
	return c.figures.Limit, err
}

// round measures every other time it is called.
func (c *callBench) round() (err error) {
	if c.taken = !c.taken; !c.taken {
		return nil
	}
	c.figures, err = c.worker.do(c.what, c.keys, c.calls)
	return err
}
