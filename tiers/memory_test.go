package tiers_test

import (
	"errors"
	"os"
	"testing"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// mapped is a mapping of a store's file as another process has it.
func mapped(t testing.TB, f block.MemoryFile) []byte {
	t.Helper()
	b, err := unix.Mmap(f.Fd, 0, int(f.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
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

// TestSharedMemory: whoever maps the files of G2 finds there what is lent, and what
// is written there into a grant is put; nobody can change their size. Chunks beyond
// the first count from their own beginnings.
func TestSharedMemory(t *testing.T) {
	withoutRace(t)
	const chunk = 514 << 20
	s := openStore(t, tiers.Options{DRAM: chunk + 32<<20, SharedMemory: tiers.ShareOn, Slabs: slabIn(t, 64<<20)})
	ns := space(t, s, "a", 8<<20)
	files := s.Memory()
	if len(files) != 2 || files[0].Bytes != chunk || files[1].Bytes != 32<<20 {
		t.Fatalf("files %+v", files)
	}
	var mem [2][]byte
	for i, f := range files {
		mem[i] = mapped(t, f)
		for _, n := range []int64{0, f.Bytes - 2<<20, f.Bytes + 2<<20} {
			if err := unix.Ftruncate(f.Fd, n); !errors.Is(err, unix.EPERM) {
				t.Errorf("truncate file %d to %d: %v", i, n, err)
			}
		}
		if seals, err := unix.FcntlInt(uintptr(f.Fd), unix.F_GET_SEALS, 0); err != nil || seals&unix.F_SEAL_SEAL == 0 {
			t.Errorf("file %d has seals %#x, %v", i, seals, err)
		}
	}
	const size = 8 << 20
	var rest []uint64 // reservations of all that is free in the first file
	for i := range files {
		gs, err := s.Grant(t.Context(), ns.ID, size, 1)
		if err != nil || gs[0].Chunk != i {
			t.Fatalf("grant %+v, %v, want one in file %d", gs, err, i)
		}
		copy(mem[i][gs[0].Offset:][:size], payload(i, size))
		if res := putGranted(t, s, ns, gs[0], i, payload(i, size), block.PutOptions{}); res.Err != nil {
			t.Fatal(res.Err)
		}
		wantHit(t, s, ns, i, size)
		loans, _ := lend(t, s, ns, block.GetOptions{Verify: true}, i)
		if l := loans[0]; l.Chunk != i || l.Offset != gs[0].Offset || string(mem[i][l.Offset:][:l.Len]) != string(payload(i, size)) {
			t.Errorf("loan in file %d at %d, put in file %d at %d, or other bytes", l.Chunk, l.Offset, i, gs[0].Offset)
		}
		for i == 0 {
			r, _, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(100+len(rest)), size, block.PutOptions{})
			if err != nil {
				t.Fatal(err)
			}
			rest = append(rest, r.ID)
			if r.Place.Offset() >= chunk {
				break
			}
		}
	}
	s.Abort(rest)
	s.EndSession(lendSession)
	wantEmpty(t, s)
}

// TestSharedMemoryAuto: memory is shared when all of it is on huge pages, and else
// it is as without the option.
func TestSharedMemoryAuto(t *testing.T) {
	s := openStore(t, tiers.Options{DRAM: 16 << 20, SharedMemory: tiers.ShareAuto})
	page := func() int64 { return s.Stats().Tiers[0].Devices[0].PageBytes }
	eventually(t, "memory is populated", func() bool { return page() != 0 })
	if len(s.Memory()) > 0 && page() != 2<<20 {
		t.Errorf("shared on pages of %d bytes", page())
	}
	reserved, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	if err == nil && len(reserved) > 2 && len(s.Memory()) == 0 { // 10 or more were free, and so they were before
		t.Errorf("%s huge pages are free, and memory is not shared", reserved)
	}
	if s := openStore(t, tiers.Options{DRAM: 16 << 20}); s.Memory() != nil {
		t.Errorf("memory that nobody wanted to share: %+v", s.Memory())
	}
	if _, err := tiers.Open(t.Context(), tiers.Options{Dir: t.TempDir(), Agent: newAgent(t), DRAM: 16 << 20, SharedMemory: tiers.ShareOn + 1}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("a mode that is none: %v", err)
	}
}

// TestSharedMemorySpoiled: whoever wants a part of a block, and cannot check it, gets no
// wrong bytes where others have written to the memory, and the block is dropped.
func TestSharedMemorySpoiled(t *testing.T) {
	const size = 300_000
	s := openStore(t, tiers.Options{DRAM: 16 << 20, SharedMemory: tiers.ShareOn, NoSlabs: true})
	ns := space(t, s, "a", 8<<20)
	mustPut(t, s, ns, 1, size, block.PutOptions{})
	part := func() (p block.Payload, got string) {
		t.Helper()
		w := []block.Wanted{{Hash: hashOf(1), Offset: 1000, Length: 500}}
		if err := s.Get(t.Context(), ns.ID, hashLen, w, block.GetOptions{}, func(_ int, q block.Payload) error {
			p, got = q, string(q.Bytes)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return p, got
	}
	if p, got := part(); p.Reason != block.Hit || got != string(payload(1, size)[1000:1500]) {
		t.Fatalf("a part of a sound block: %v, or other bytes", p.Reason)
	}
	loans, _ := lend(t, s, ns, block.GetOptions{}, 1)
	mapped(t, s.Memory()[loans[0].Chunk])[loans[0].Offset+1200]++
	if p, _ := part(); p.Reason != block.MissCorrupt {
		t.Errorf("a part of a spoiled block: %v, want corrupt", p.Reason)
	}
	if p, _ := part(); p.Reason != block.MissAbsent {
		t.Errorf("once more: %v, want absent", p.Reason)
	}
}

// TestSharedMemorySpoiledWhole: a whole block is checked as well, unless whoever takes it
// says that he does, and what others have spoiled does not go down to the device: a put
// that waits for that fails, and the next one of the key is a new block.
func TestSharedMemorySpoiledWhole(t *testing.T) {
	const size = 300_000
	o := tiers.Options{DRAM: 16 << 20, SharedMemory: tiers.ShareOn, Dir: t.TempDir(), Agent: newAgent(t), Slabs: slabIn(t, 64<<20)}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	spoil := func(i int) {
		t.Helper()
		mustPut(t, s, ns, i, size, block.PutOptions{})
		loans, lease := lend(t, s, ns, block.GetOptions{}, i)
		mapped(t, s.Memory()[loans[0].Chunk])[loans[0].Offset+size-1]++
		if err := s.ReleaseLease(lease.ID); err != nil {
			t.Fatal(err)
		}
	}
	get := func(i int, o block.GetOptions) (p block.Payload) {
		t.Helper()
		if err := s.Get(t.Context(), ns.ID, hashLen, []block.Wanted{{Hash: hashOf(i)}}, o, func(_ int, q block.Payload) error {
			p = q
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return p
	}
	spoil(1)
	if p := get(1, block.GetOptions{Pieces: true}); p.Reason != block.Hit {
		t.Errorf("whole, for who checks it: %v", p.Reason)
	}
	if p := get(1, block.GetOptions{}); p.Reason != block.MissCorrupt {
		t.Errorf("whole: %v, want corrupt", p.Reason)
	}
	spoil(2)
	sum := block.Sum(xxh3.Hash128(payload(2, size)).Bytes())
	err := s.CompareExisting(t.Context(), ns.ID, hashOf(2), size, sum, block.PutOptions{Durable: block.G3})
	if !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("a put that waits for the device: error %v, want %v", err, block.ErrCorrupt)
	}
	if got := tiersOf(t, s, ns, 2); got != "" {
		t.Errorf("the spoiled block is in %q", got)
	}
	mustPut(t, s, ns, 2, size, block.PutOptions{Durable: block.G3})
	s = reopen(t, s, o)
	wantHit(t, s, ns, 2, size)
}

// TestSharedMemoryReads: blocks go to the device and come back through memory that
// is shared as through any other.
func TestSharedMemoryReads(t *testing.T) {
	const size = 600_000
	o := tiers.Options{DRAM: 16 << 20, SharedMemory: tiers.ShareOn, Dir: t.TempDir(), Agent: newAgent(t), Slabs: slabIn(t, 64<<20)}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	for i := 1; i <= 8; i++ {
		mustPut(t, s, ns, i, size, block.PutOptions{Durable: block.G3})
	}
	s = reopen(t, s, o)
	for i := 1; i <= 8; i++ {
		wantHit(t, s, ns, i, size)
		if got := tiersOf(t, s, ns, i); got != "g2g3" {
			t.Errorf("block %d is in %s", i, got)
		}
	}
	wantEmpty(t, s)
}
