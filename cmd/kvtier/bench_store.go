package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// benchHashBytes is the length of the hashes of the blocks that bench puts.
const benchHashBytes = traceHashBytes

// benchStore is a store in this process, wired as serve wires it.
type benchStore struct {
	*tiers.Store
	agent *xfer.Agent
	ns    block.NamespaceID
	next  uint64 // id of the next block
	closers
}

// openStore opens a store in a directory of that name, with a namespace for
// blocks of payload bytes. slabBytes 0 is no NVMe tier.
func (b *bench) openStore(ctx context.Context, name string, dram, slabBytes int64, payload int, noSync bool) (_ *benchStore, err error) {
	f := &serveFlags{}
	f.add(pflag.NewFlagSet("bench", pflag.ContinueOnError)) // the defaults
	p := &servePlan{data: filepath.Join(b.dir, name), dram: dram, noSlabs: slabBytes == 0}
	if err := p.planPolicy(f); err != nil {
		return nil, err
	}
	if slabBytes > 0 {
		p.slabs = []slab{{b.slabPath(name), slabBytes}}
	}
	s := &benchStore{}
	defer func() {
		if err != nil {
			_ = s.close() // the first failure is the one to tell
		}
	}()
	if s.agent, _, err = newAgent(f.posixEngine, b.log); err != nil {
		return nil, err
	}
	s.add(s.agent.Close)
	o := p.options(f, s.agent, b.log)
	o.NoSync = noSync
	if s.Store, err = tiers.Open(ctx, o); err != nil {
		return nil, err
	}
	s.add(s.Store.Close)
	ns, err := s.OpenNamespace(ctx, block.Descriptor{Name: "bench", BlockBytes: int64(payload)}, 0)
	if err != nil {
		return nil, err
	}
	s.ns = ns.ID
	return s, nil
}

func (b *bench) slabPath(name string) string { return filepath.Join(b.dir, name+".slab") }

// roomFor is the size of a tier that holds so many blocks well below its
// watermarks.
func roomFor(blocks, payload int) int64 {
	slot, _ := tiers.SlotBytes(int64(payload))
	return int64(blocks)*slot*5/4 + 64<<20
}

// buffers is registered memory of the caller's, one piece a block, populated and
// filled with the blocks' bytes.
func (s *benchStore) buffers(ctx context.Context, n, payload int) ([][]byte, error) {
	mem, err := arena.New(int64(n)*int64(payload), &arena.Options{ChunkBytes: arena.MaxChunkBytes})
	if err != nil {
		return nil, err
	}
	s.add(mem.Close)
	l := xfer.DescList{Type: xfer.DRAM}
	for _, c := range mem.Chunks() {
		l.Descs = append(l.Descs, xfer.Desc{Addr: arena.Addr(c), Len: uint64(len(c))})
	}
	if err := s.agent.Register(ctx, l, nil); err != nil {
		return nil, fmt.Errorf("register buffers: %w", err)
	}
	s.add(func() error { return s.agent.Deregister(context.Background(), l) })
	out := make([][]byte, n)
	for i := range out {
		out[i] = mem.Slice(int64(i)*int64(payload), int64(payload))
		fillPattern(out[i], benchHash(uint64(i)))
	}
	return out, nil
}

// benchHash is the hash of block i: uniform, as the hashes of content are.
func benchHash(i uint64) block.Hash {
	var h block.Hash
	binary.LittleEndian.PutUint64(h[:8], mix64(2*i+1))
	binary.LittleEndian.PutUint64(h[8:16], mix64(2*i+2))
	return h
}

// newKeys gives n hashes that were not used before, packed.
func (s *benchStore) newKeys(n int) []byte {
	packed := make([]byte, 0, n*benchHashBytes)
	for range n {
		h := benchHash(s.next)
		s.next++
		packed = append(packed, h[:benchHashBytes]...)
	}
	return packed
}

// hashAt is hash i of a packed list.
func hashAt(packed []byte, i int) (h block.Hash) {
	copy(h[:], packed[i*benchHashBytes:(i+1)*benchHashBytes])
	return h
}

// put puts one block as a caller in the same process does.
func (s *benchStore) put(ctx context.Context, h block.Hash, data []byte, durable block.TierID) error {
	r, _, err := s.Reserve(ctx, s.ns, benchHashBytes, h, int64(len(data)), block.PutOptions{Durable: durable})
	if err != nil {
		return err
	}
	if r.Status == block.Exists {
		return fmt.Errorf("put %s: it is there already", h)
	}
	if err := s.Fill(ctx, r.ID, 0, data); err != nil {
		return err
	}
	return s.Commit(ctx, []uint64{r.ID})[0].Err
}

// read reads one block into dst and checks that it came from a tier.
func (s *benchStore) read(ctx context.Context, h block.Hash, dst []byte, want block.TierID, o block.GetOptions) error {
	r := s.ReadInto(ctx, block.Key{NS: s.ns, Hash: h}, dst, o)
	switch {
	case r.Err != nil:
		return r.Err
	case r.Reason != block.Hit:
		return fmt.Errorf("read %s: miss: %s", h, r.Reason)
	case r.Tier != want:
		return fmt.Errorf("read %s: it came from %s, want %s", h, r.Tier, want)
	}
	return nil
}

// slots leases blocks and gives the memory that they lie in, until done is
// called.
func (s *benchStore) slots(ctx context.Context, packed []byte) (mem [][]byte, done func() error, err error) {
	n := len(packed) / benchHashBytes
	var res block.MatchResult
	if err := s.Match(ctx, s.ns, benchHashBytes, packed, block.MatchOptions{All: true, Lease: maxBenchLease, Quiet: true}, &res); err != nil {
		return nil, nil, err
	}
	want := make([]block.Wanted, n)
	for i := range want {
		want[i].Hash = hashAt(packed, i)
	}
	mem = make([][]byte, n)
	err = s.Get(ctx, s.ns, benchHashBytes, want, block.GetOptions{NoPromote: true, Quiet: true}, func(i int, p block.Payload) error {
		if p.Reason != block.Hit || p.Tier != block.G2 {
			return fmt.Errorf("block %d is not in g2: %s", i, p.Reason)
		}
		mem[i] = p.Bytes // the lease keeps it in place
		return nil
	})
	return mem, func() error { return s.ReleaseLease(res.Lease.ID) }, err
}
