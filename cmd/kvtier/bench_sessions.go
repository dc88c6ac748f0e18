package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/tiers"
)

const (
	// manyConns is how many connections the rows with c4 use.
	manyConns = 4
	// batchKeys is how many blocks a batch gets.
	batchKeys = 16
)

// benchSessions measures calls on a daemon through sessions, checksums verified,
// against the bare loop with the same bytes on as many connections.
func benchSessions(ctx context.Context, b *bench) (err error) {
	total := int64(b.blocks * b.payload)
	huge, giveBack := b.reservePages(roomFor(b.blocks, b.payload)*4 + 256<<20)
	defer func() { err = errors.Join(err, giveBack()) }()
	s := &sessionBench{bench: b, huge: huge}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.makeMemory(total); err != nil {
		return err
	}
	if err := s.scoped(ctx, s.compareMemory); err != nil {
		return err
	}
	return s.scoped(ctx, s.compareDisk)
}

// scoped runs fn and closes what it has opened.
func (s *sessionBench) scoped(ctx context.Context, fn func(context.Context) error) (err error) {
	outer := s.closers
	s.closers = closers{}
	defer func() {
		err = errors.Join(err, s.shut())
		s.closers = outer
	}()
	return fn(ctx)
}

// shut ends the daemon and the bare loop, and the connections to them.
func (s *sessionBench) shut() error {
	s.sessions, s.loops = nil, nil
	return s.closers.close()
}

// sessionBench is a daemon, the server of the bare loop, and the connections to
// both.
type sessionBench struct {
	*bench
	closers
	huge     bool
	mem      *arena.Arena // what is sent from and received into
	daemon   *benchDaemon
	admin    *api.Client
	ns       block.Namespace
	handle   session.Namespace // the same
	sessions []*session.Client
	local    *session.Client // over the unix socket
	loop     *benchPeer
	loops    []*loopClient
	localRaw *loopClient
	next     uint64
	puts     []time.Duration // of single puts of 1 MiB over one connection
}

// makeMemory maps the memory of this side.
func (s *sessionBench) makeMemory(total int64) (err error) {
	if s.mem, err = arena.New(total, &arena.Options{NoHugePages: !s.huge}); err != nil {
		return err
	}
	s.add(s.mem.Close)
	for i, c := range s.mem.Chunks() {
		fillPattern(c, benchHash(uint64(i)))
	}
	return nil
}

// piece is the i-th part of n bytes of this side's memory.
func (s *sessionBench) piece(i, n int) []byte {
	return s.mem.Slice(int64(i)*int64(n)%(s.mem.Size()-s.mem.Size()%int64(n)), int64(n))
}

// start starts a daemon and connects to it.
func (s *sessionBench) start(ctx context.Context, dir string, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	socket := filepath.Join(dir, "session.sock")
	addr, err := freePort(ctx)
	if err != nil {
		return err
	}
	s.daemon, err = startBenchDaemon(ctx, self, append([]string{
		"--data", filepath.Join(dir, "data"), "--listen", "127.0.0.1:0",
		"--xfer", addr, "--socket", socket, "--shared-memory", "on", "--log-level", "warn",
	}, args...)...)
	if err != nil {
		return err
	}
	s.add(s.daemon.kill)
	if s.admin, err = api.Dial(ctx, s.daemon.addr, &api.ClientOptions{Inline: true}); err != nil {
		return err
	}
	s.add(s.admin.Close)
	if s.ns, err = s.admin.OpenNamespace(ctx, block.Descriptor{Name: "sessions", MaxBlockBytes: int64(4 * s.payload)}, 0); err != nil {
		return err
	}
	s.ns.HashLen = benchHashBytes
	s.handle = session.Namespace{ID: s.ns.ID, HashLen: benchHashBytes}
	for range manyConns {
		c, err := session.Dial(ctx, "tcp", addr, nil)
		if err != nil {
			return err
		}
		s.add(c.Close)
		s.sessions = append(s.sessions, c)
	}
	if s.local, err = session.Dial(ctx, "unix", socket, nil); err != nil {
		return err
	}
	s.add(s.local.Close)
	if !s.local.Shared() {
		return errors.New("the daemon does not share its memory over the unix socket")
	}
	return s.checkPages(ctx, s.admin, s.mem)
}

// startLoop starts the bare loop and connects to it.
func (s *sessionBench) startLoop(ctx context.Context, file string) (err error) {
	socket := filepath.Join(s.dir, "loop.sock")
	if s.loop, err = startLoop(ctx, s.mem.Size(), file, socket, s.huge); err != nil {
		return err
	}
	s.add(s.loop.close)
	for range manyConns {
		l, err := dialLoop(ctx, "tcp", s.loop.ready)
		if err != nil {
			return err
		}
		s.add(l.c.Close)
		s.loops = append(s.loops, l)
	}
	if s.localRaw, err = dialLoop(ctx, "unix", socket); err != nil {
		return err
	}
	s.add(s.localRaw.c.Close)
	return nil
}

// spread runs fn for n pieces on conns goroutines, each with the number of its
// connection.
func spread(ctx context.Context, n, conns int, fn func(ctx context.Context, conn, i int) error) (time.Duration, error) {
	begin := time.Now()
	if conns == 1 {
		for i := range n {
			if err := fn(ctx, 0, i); err != nil {
				return 0, err
			}
		}
		return time.Since(begin), nil
	}
	g, ctx := errgroup.WithContext(ctx)
	for conn := range conns {
		g.Go(func() error {
			for i := conn; i < n; i += conns {
				if err := fn(ctx, conn, i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := g.Wait()
	return time.Since(begin), err
}

// sized is a size of blocks, by the name that rows use. The bench's payload is the
// 1 MiB; tests make it smaller.
type sized struct {
	name  string
	bytes int
}

func (b *bench) sizes() []sized {
	return []sized{{"1MiB", b.payload}, {"64KiB", b.payload / 16}, {"4MiB", 4 * b.payload}}
}

// compareMemory measures what lies in DRAM.
func (s *sessionBench) compareMemory(ctx context.Context) error {
	room := roomFor(s.blocks, s.payload) * 3
	if err := s.start(ctx, s.dir, "--dram", fmt.Sprint(room), "--nvme", noNVMe); err != nil {
		return err
	}
	if err := s.startLoop(ctx, ""); err != nil {
		return err
	}
	for _, size := range s.sizes() {
		n := int(s.mem.Size()) / size.bytes
		for _, conns := range []int{1, manyConns} {
			name := fmt.Sprintf("%s.c%d", size.name, conns)
			if err := s.compare(ctx, "store.put."+name, "GB/s", often*s.pairs, s.put(n, size, conns), s.rawPut(n, size.bytes, conns)); err != nil {
				return err
			}
			keys, err := s.fill(ctx, n, size.bytes, block.G2)
			if err != nil {
				return err
			}
			if err := s.compare(ctx, "store.get."+name, "GB/s", often*s.pairs, s.get(keys, size.bytes, conns, 1), s.rawGet(n, size.bytes, conns)); err != nil {
				return err
			}
			if size.name == "64KiB" && conns == 1 {
				err := s.compare(ctx, "store.get_batch16.64KiB.c1", "GB/s", often*s.pairs, s.get(keys, size.bytes, 1, batchKeys), s.rawGet(s.blocks, s.payload, 1))
				if err != nil {
					return err
				}
			}
			if size.name == "1MiB" && conns == 1 {
				if err := s.compareSingle(ctx, keys); err != nil {
					return err
				}
			}
			if err := s.remove(ctx, keys); err != nil {
				return err
			}
		}
	}
	return nil
}

// compareSingle measures what is measured for 1 MiB over one connection only.
func (s *sessionBench) compareSingle(ctx context.Context, keys []block.Hash) error {
	slices.Sort(s.puts)
	s.once("store.put.1MiB.p99", "p99/p50", float64(s.puts[len(s.puts)*99/100])/float64(s.puts[len(s.puts)/2]))
	err := s.compare(ctx, "store.local_get.1MiB.c1", "GB/s", often*s.pairs, s.getLocal(keys), s.rawLocal)
	if err != nil {
		return err
	}
	get, raw := s.get(keys, s.payload, 1, 1), s.rawGet(len(keys), s.payload, 1)
	gb := float64(len(keys)*s.payload) / 1e9
	cpu := func(pid int, p pass) pass {
		return func(ctx context.Context) (float64, error) {
			t, err := cpuOf(ctx, pid, func(ctx context.Context) error { _, err := p(ctx); return err })
			return t.Seconds() * 1e3 / gb, err
		}
	}
	return s.compare(ctx, "store.cpu.get.1MiB", "ms/GB", often*s.pairs, cpu(s.daemon.cmd.Process.Pid, get), cpu(s.loop.pid(), raw))
}

// newKeys draws hashes that were not used before.
func (s *sessionBench) newKeys(n int) []block.Hash {
	keys := make([]block.Hash, n)
	for i := range keys {
		keys[i] = benchHash(s.next)
		s.next++
	}
	return keys
}

// putOne puts one block through a session.
func (s *sessionBench) putOne(ctx context.Context, c *session.Client, h block.Hash, p []byte, durable block.TierID) error {
	res, err := c.Put(ctx, s.handle, []session.PutBlock{{Hash: h, Bytes: p}}, session.PutOptions{Durable: durable})
	if err == nil {
		err = res[0].Err
	}
	return err
}

// fill puts n blocks for gets.
func (s *sessionBench) fill(ctx context.Context, n, bytes int, durable block.TierID) ([]block.Hash, error) {
	keys := s.newKeys(n)
	_, err := spread(ctx, n, 1, func(ctx context.Context, conn, i int) error {
		return s.putOne(ctx, s.sessions[conn], keys[i], s.piece(i, bytes), durable)
	})
	return keys, err
}

func (s *sessionBench) remove(ctx context.Context, keys []block.Hash) error {
	for part := range slices.Chunk(keys, api.MaxKeys) {
		if _, err := s.admin.Delete(ctx, s.ns, part); err != nil {
			return err
		}
	}
	return nil
}

func (s *sessionBench) put(n int, size sized, conns int) pass {
	timed := size.name == "1MiB" && conns == 1
	passes := 0
	return func(ctx context.Context) (float64, error) {
		keys := s.newKeys(n)
		if passes++; timed && passes <= s.warmups+1 {
			s.puts = s.puts[:0] // those of warm-ups do not count
		}
		took, err := spread(ctx, n, conns, func(ctx context.Context, conn, i int) error {
			begin := time.Now()
			err := s.putOne(ctx, s.sessions[conn], keys[i], s.piece(i, size.bytes), block.G2)
			if timed {
				s.puts = append(s.puts, time.Since(begin))
			}
			return err
		})
		if err != nil {
			return 0, err
		}
		return rate(n*size.bytes, took), s.remove(ctx, keys)
	}
}

func (s *sessionBench) rawPut(n, bytes, conns int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := spread(ctx, n, conns, func(_ context.Context, conn, i int) error {
			return s.loops[conn].put(s.piece(i, bytes), int64(i)*int64(bytes))
		})
		return rate(n*bytes, took), err
	}
}

// getSome gets blocks in one call and wants hits.
func (s *sessionBench) getSome(ctx context.Context, c *session.Client, keys []block.Hash, at, bytes int, o block.GetOptions) error {
	items := make([]session.GetItem, len(keys))
	for k := range items {
		items[k] = session.GetItem{Hash: keys[k], Into: s.piece(at+k, bytes)}
	}
	res, err := c.Get(ctx, s.handle, items, o)
	if err != nil {
		return err
	}
	for k, r := range res {
		if r.Err != nil {
			return r.Err
		}
		if r.Reason != block.Hit || int(r.Len) != bytes {
			return fmt.Errorf("get %s: %v with %d bytes", keys[k], r.Reason, r.Len)
		}
	}
	return nil
}

func (s *sessionBench) get(keys []block.Hash, bytes, conns, batch int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := spread(ctx, len(keys)/batch, conns, func(ctx context.Context, conn, i int) error {
			return s.getSome(ctx, s.sessions[conn], keys[i*batch:(i+1)*batch], i*batch, bytes, block.GetOptions{Quiet: true})
		})
		return rate(len(keys)/batch*batch*bytes, took), err
	}
}

func (s *sessionBench) rawGet(n, bytes, conns int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := spread(ctx, n, conns, func(_ context.Context, conn, i int) error {
			return s.loops[conn].get(loopGet, s.piece(i, bytes), int64(i)*int64(bytes))
		})
		return rate(n*bytes, took), err
	}
}

func (s *sessionBench) getLocal(keys []block.Hash) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := spread(ctx, len(keys), 1, func(ctx context.Context, _, i int) error {
			return s.getSome(ctx, s.local, keys[i:i+1], i, s.payload, block.GetOptions{Quiet: true})
		})
		return rate(len(keys)*s.payload, took), err
	}
}

func (s *sessionBench) rawLocal(ctx context.Context) (float64, error) {
	n := int(s.mem.Size()) / s.payload
	took, err := spread(ctx, n, 1, func(_ context.Context, _, i int) error {
		return s.localRaw.get(loopGet, s.piece(i, s.payload), int64(i)*int64(s.payload))
	})
	return rate(n*s.payload, took), err
}

// compareDisk measures what lies on NVMe only.
func (s *sessionBench) compareDisk(ctx context.Context) error {
	room := roomFor(s.blocks, s.payload)
	if err := s.needSpace(2*room + 1<<30); err != nil {
		return err
	}
	dataAt, err := s.makeSlab(ctx, "sessions", 2*room)
	if err != nil {
		return err
	}
	dir := filepath.Join(s.dir, "sessions-daemon")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	slabPath := s.slabPath("sessions")
	args := []string{"--dram", fmt.Sprint(room), "--nvme", fmt.Sprintf("%s=%d", slabPath, 2*room)}
	// The store that made the slab knows it: the daemon takes over its directory.
	if err := os.Rename(filepath.Join(s.dir, "sessions"), filepath.Join(dir, "data")); err != nil {
		return err
	}
	if err := s.start(ctx, dir, args...); err != nil {
		return err
	}
	keys, err := s.fill(ctx, s.blocks, s.payload, block.G3)
	if err != nil {
		return err
	}
	// The next daemon finds the blocks in G3 only.
	if err := s.shut(); err != nil {
		return err
	}
	if err := s.start(ctx, dir, args...); err != nil {
		return err
	}
	if err := s.startLoop(ctx, slabPath); err != nil {
		return err
	}
	d := &diskGets{sessionBench: s, keys: keys}
	if err := d.locate(ctx, dataAt); err != nil {
		return err
	}
	file, err := openDirect(slabPath)
	if err != nil {
		return err
	}
	s.add(file.Close)
	for _, conns := range []int{1, manyConns} {
		name := fmt.Sprintf("store.nvme_get.1MiB.c%d", conns)
		if err := s.compare(ctx, name, "GB/s", often*s.pairs, d.get(conns), d.raw(conns)); err != nil {
			return err
		}
		alone := func(ctx context.Context) (float64, error) {
			took, err := spread(ctx, len(keys), conns, func(_ context.Context, _, i int) error {
				_, err := file.ReadAt(s.piece(i, s.payload), d.places[i])
				return err
			})
			return rate(len(keys)*s.payload, took), err
		}
		if err := s.compare(ctx, name+".disk", "GB/s", often*s.pairs, d.get(conns), alone); err != nil {
			return err
		}
	}
	return nil
}

// diskGets are gets of blocks that lie on NVMe only.
type diskGets struct {
	*sessionBench
	keys   []block.Hash
	places []int64 // of their payloads in the slab's file
}

// locate finds where the blocks lie.
func (d *diskGets) locate(ctx context.Context, dataAt int64) error {
	_, header := tiers.SlotBytes(int64(d.payload))
	for part := range slices.Chunk(d.keys, api.MaxKeys) {
		found, err := d.admin.Locate(ctx, d.ns, part)
		if err != nil {
			return err
		}
		for i, places := range found {
			if len(places) != 1 || places[0].Tier != block.G3 {
				return fmt.Errorf("block %d is in %v, want g3 only", i, places)
			}
			d.places = append(d.places, dataAt+places[0].Place.Offset()+header)
		}
	}
	return nil
}

func (d *diskGets) get(conns int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := spread(ctx, len(d.keys), conns, func(ctx context.Context, conn, i int) error {
			return d.getSome(ctx, d.sessions[conn], d.keys[i:i+1], i, d.payload, block.GetOptions{NoPromote: true, Quiet: true})
		})
		return rate(len(d.keys)*d.payload, took), err
	}
}

func (d *diskGets) raw(conns int) pass {
	return func(ctx context.Context) (float64, error) {
		took, err := spread(ctx, len(d.keys), conns, func(_ context.Context, conn, i int) error {
			return d.loops[conn].get(loopDisk, d.piece(i, d.payload), d.places[i])
		})
		return rate(len(d.keys)*d.payload, took), err
	}
}
