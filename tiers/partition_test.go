package tiers_test

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// byFirstLetter has a share for each first letter of namespaces' names.
func byFirstLetter(name string) string { return name[:1] }

// partitioned opens a store of so many chunks of 10 MiB.
func partitioned(t testing.TB, chunks int64) (*tiers.Store, tiers.Options) {
	o := tiers.Options{
		DRAM: chunks * 10 << 20, SharedMemory: tiers.ShareOn, Share: byFirstLetter,
		Dir: t.TempDir(), Agent: newAgent(t), Slabs: slabIn(t, 256<<20),
	}
	return openStore(t, o), o
}

// mapChunk maps a chunk as a client does.
func mapChunk(t testing.TB, s *tiers.Store, number int, write bool) []byte {
	t.Helper()
	f, err := s.OpenChunk(uint32(number), write)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(f.Fd)
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	} else if _, err := unix.Mmap(f.Fd, 0, int(f.Bytes), prot|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EACCES) {
		t.Errorf("mapping for writing what is for reading: %v, want %v", err, unix.EACCES)
	}
	for _, n := range []int64{0, f.Bytes + 2<<20} {
		if err := unix.Ftruncate(f.Fd, n); err == nil {
			t.Errorf("a chunk was truncated to %d bytes", n)
		}
	}
	b, err := unix.Mmap(f.Fd, 0, int(f.Bytes), prot, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	return b
}

// chunkOf is the chunk in which a grant of a namespace lies now.
func chunkOf(t testing.TB, s *tiers.Store, ns block.Namespace, n int64) int {
	t.Helper()
	gs, err := s.Grant(t.Context(), ns.ID, n, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.AbortGrants([]uint64{gs[0].ID})
	return gs[0].Chunk
}

// TestPartitioned: blocks of two shares are never in one chunk, and when a chunk passes
// from one to the other, whoever has its old file sees nothing of what comes and changes
// nothing of it, while all blocks stay right.
func TestPartitioned(t *testing.T) {
	const size = 1 << 20
	s, o := partitioned(t, 4)
	a1, a2, b := space(t, s, "a1", size), space(t, s, "a2", size), space(t, s, "b1", size)
	if !s.Partitioned() || s.Memory() != nil {
		t.Fatalf("partitioned %v, memory %v", s.Partitioned(), s.Memory())
	}
	if x, y, z := chunkOf(t, s, a1, size), chunkOf(t, s, a2, size), chunkOf(t, s, b, size); x != y || x == z {
		t.Errorf("chunks %d, %d and %d", x, y, z)
	}
	secret := func(i int) []byte { // of b
		p := bytes.Repeat([]byte("of another share"), size/16)
		copy(p, pack(hashOf(i)))
		return p
	}
	have := map[int][]byte{} // what a was given
	spoil := false
	look := func() {
		t.Helper()
		for n, m := range have {
			if bytes.Contains(m, []byte("of another share")) {
				t.Fatalf("chunk %d, which a was given, has bytes of b", n)
			}
			if spoil && s.ChunkGone(uint32(n)) {
				for i := range m {
					m[i] = 0xee
				}
			}
		}
	}
	for round := range 3 {
		spoil = round > 0
		for j := range 30 {
			i := round*100 + j
			gs, err := s.Grant(t.Context(), a1.ID, size, 1)
			if err != nil {
				t.Fatal(err)
			}
			if have[gs[0].Chunk] == nil {
				have[gs[0].Chunk] = mapChunk(t, s, gs[0].Chunk, true)
			}
			copy(have[gs[0].Chunk][gs[0].Offset:], payload(i, size))
			if r := putGranted(t, s, a1, gs[0], i, payload(i, size), block.PutOptions{Durable: block.G3}); r.Err != nil {
				t.Fatal(r.Err)
			}
		}
		look()
		for j := range 30 {
			i := 1000 + round*100 + j
			if err := put(s, b, i, secret(i), block.PutOptions{Durable: block.G3}); err != nil {
				t.Fatal(err)
			}
			look()
		}
		for j := range 30 {
			wantHit(t, s, a1, round*100+j, size)
			i := 1000 + round*100 + j
			if got, p, err := get(s, b, i, block.GetOptions{Verify: true}); err != nil || p.Reason != block.Hit || !bytes.Equal(got, secret(i)) {
				t.Fatalf("block %d of b: %v, %v", i, p.Reason, err)
			}
			look()
		}
	}
	gone := 0
	for n := range have {
		if s.ChunkGone(uint32(n)) {
			gone++
			if _, err := s.OpenChunk(uint32(n), false); !errors.Is(err, block.ErrNotFound) {
				t.Errorf("open chunk %d, which is gone: %v, want %v", n, err, block.ErrNotFound)
			}
		}
	}
	if gone < 2 {
		t.Errorf("%d chunks of a have passed on, of %d", gone, len(have))
	}
	s = reopen(t, s, o)
	for j := range 30 {
		wantHit(t, s, a1, j, size)
	}
	wantEmpty(t, s)
}

// TestPartitionedStays: a chunk in which something is granted or lent passes to nobody.
func TestPartitionedStays(t *testing.T) {
	const size = 1 << 20
	s, _ := partitioned(t, 2)
	a, b := space(t, s, "a", size), space(t, s, "b", size)
	mustPut(t, s, a, 1, size, block.PutOptions{})
	loans, lease := lend(t, s, a, block.GetOptions{}, 1)
	m := mapChunk(t, s, loans[0].Chunk, false)
	gs, err := s.Grant(t.Context(), b.ID, size, 1)
	if err != nil {
		t.Fatal(err)
	}
	c := space(t, s, "c", size)
	if _, err := s.Grant(within(t, 0), c.ID, size, 1); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("a grant where all chunks are in use: %v, want %v", err, block.ErrNoSpace)
	}
	if got := m[loans[0].Offset:][:size]; !bytes.Equal(got, payload(1, size)) {
		t.Error("what is lent has other bytes")
	}
	if s.ChunkGone(uint32(loans[0].Chunk)) || s.ChunkGone(uint32(gs[0].Chunk)) {
		t.Error("a chunk in use is gone")
	}
	s.AbortGrants([]uint64{gs[0].ID})
	mustPut(t, s, c, 2, size, block.PutOptions{})
	if !s.ChunkGone(uint32(gs[0].Chunk)) || s.ChunkGone(uint32(loans[0].Chunk)) {
		t.Errorf("gone: that of the grant %v, want true; that of the loan %v, want false", s.ChunkGone(uint32(gs[0].Chunk)), s.ChunkGone(uint32(loans[0].Chunk)))
	}
	releaseLease(t, s, lease)
}

// TestPartitionedSpoiled: blocks are checked in chunks that somebody may have written to.
func TestPartitionedSpoiled(t *testing.T) {
	const size = 300_000
	s, _ := partitioned(t, 2)
	ns := space(t, s, "a", 8<<20)
	mustPut(t, s, ns, 1, size, block.PutOptions{})
	loans, lease := lend(t, s, ns, block.GetOptions{}, 1)
	releaseLease(t, s, lease)
	mapChunk(t, s, loans[0].Chunk, true)[loans[0].Offset+1000]++
	if _, p, err := get(s, ns, 1, block.GetOptions{}); err != nil || p.Reason != block.MissCorrupt {
		t.Errorf("a spoiled block: %v, %v, want corrupt", p.Reason, err)
	}
}
