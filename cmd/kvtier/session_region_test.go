package main

import (
	"bytes"
	"crypto/rand"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// storeMemory maps the store's memory, as a session is given it.
func storeMemory(t *testing.T, socket string) []byte {
	t.Helper()
	c, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	hello := session.HelloMessage{MinVersion: 1, MaxVersion: 1, Features: session.FeatureShared, Message: frame.MaxMessage}
	if err := frame.SendHello(c, hello.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	p, files, err := frame.RecvHello(c)
	if err != nil {
		t.Fatal(err)
	}
	var w session.WelcomeMessage
	if err := w.Decode(p); err != nil || len(files) != 1 {
		t.Fatalf("welcome %+v with %d files, error %v", w, len(files), err)
	}
	mem, err := unix.Mmap(files[0], 0, int(w.Chunks[0]), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	_ = unix.Close(files[0]) // mapped
	return mem
}

// A get into a region is served from both tiers. A block that is spoiled in the store's
// memory is a miss that is counted, once, and comes back from NVMe.
func TestRegionOfDaemon(t *testing.T) {
	const size = 1<<20 + 8192
	args, data := serveArgs(t)
	socket := filepath.Join(data, "session.sock")
	args = append(args[:len(args):len(args)], "--shared-memory", "on")
	args[slices.Index(args, "none")] = filepath.Join(data, "slab") + "=256MiB"
	d := startDaemon(t, args...)
	c := dial(t, d.addr, nil)
	ns, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: "region", BlockBytes: size}, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "region")
	defer f.Close()
	const blocks = 8
	want := make([]byte, blocks*size)
	_, _ = rand.Read(want) // it never fails
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	s, err := session.Dial(t.Context(), "unix", socket, &session.ClientOptions{Regions: []session.Region{{Fd: fd, Length: blocks * size}}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	name := session.Namespace{ID: ns.ID, Tag: ns.Desc.Tag(), HashLen: 16}
	var items []session.RegionItem
	var puts []session.RegionBlock
	for i := range blocks {
		segs := []session.Segment{{Length: size / 2, Offset: uint64(i * size)}, {Length: size / 2, Offset: uint64(i*size + size/2)}}
		items = append(items, session.RegionItem{Hash: testHash(i), Segments: segs})
		puts = append(puts, session.RegionBlock{Hash: testHash(i), Segments: segs})
	}
	put, err := s.RegionPut(t.Context(), name, puts, session.PutOptions{Durable: block.G3})
	if err != nil {
		t.Fatal(err)
	}
	for i := range put {
		if put[i].Err != nil || put[i].Status != block.Stored {
			t.Errorf("put %d: %+v", i, put[i])
		}
	}
	get := func() (reasons []block.MissReason) {
		t.Helper()
		if _, err := f.WriteAt(make([]byte, len(want)), 0); err != nil {
			t.Fatal(err)
		}
		res, err := s.RegionGet(t.Context(), name, items, block.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		there := make([]byte, len(want))
		if _, err := f.ReadAt(there, 0); err != nil {
			t.Fatal(err)
		}
		for i, r := range res {
			if r.Err != nil || r.Reason == block.Hit && !bytes.Equal(there[i*size:][:size], want[i*size:][:size]) {
				t.Errorf("get %d: %+v, or other bytes", i, r)
			}
			reasons = append(reasons, r.Reason)
		}
		return reasons
	}
	if r := get(); !bytes.Equal(kinds(r), make([]byte, blocks)) {
		t.Errorf("get: %v", r)
	}
	mem := storeMemory(t, socket)
	at := bytes.Index(mem, want[3*size:][:100])
	if at < 0 {
		t.Fatal("the block is not in memory")
	}
	mem[at+size-1] ^= 1
	spoiled := make([]byte, blocks)
	spoiled[3] = byte(block.MissCorrupt)
	if r := get(); !bytes.Equal(kinds(r), spoiled) {
		t.Errorf("get of a spoiled block: %v", r)
	}
	st, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Corrupt != 1 || st.Misses[block.MissCorrupt.String()] != 1 {
		t.Errorf("%d copies are corrupt, misses %v", st.Corrupt, st.Misses)
	}
	if r := get(); !bytes.Equal(kinds(r), make([]byte, blocks)) {
		t.Errorf("get from NVMe: %v", r)
	}
	d.wait(t, 0)
}

func kinds(r []block.MissReason) (b []byte) {
	for _, one := range r {
		b = append(b, byte(one))
	}
	return b
}
