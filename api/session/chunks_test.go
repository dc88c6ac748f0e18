package session_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// inChunks is a store in whose memory each grant and each loan is in a chunk of its own,
// the last few of which are not gone. All have the same file, so that offsets stay.
type inChunks struct {
	*memstore.Store
	last atomic.Uint32
}

const chunksKept = 8

func (s *inChunks) Memory() []block.MemoryFile { return nil }

func (s *inChunks) Partitioned() bool { return true }

func (s *inChunks) ChunkGone(number uint32) bool { return number+chunksKept <= s.last.Load() }

func (s *inChunks) OpenChunk(number uint32, write bool) (block.MemoryFile, error) {
	if s.ChunkGone(number) {
		return block.MemoryFile{}, fmt.Errorf("chunk %d: %w", number, block.ErrNotFound)
	}
	f := s.Store.Memory()[0]
	mode := unix.O_RDONLY
	if write {
		mode = unix.O_RDWR
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd), mode|unix.O_CLOEXEC, 0)
	return block.MemoryFile{Fd: fd, Bytes: f.Bytes}, err
}

func (s *inChunks) Grant(ctx context.Context, ns block.NamespaceID, n int64, count int) ([]block.Grant, error) {
	gs, err := s.Store.Grant(ctx, ns, n, count)
	for i := range gs {
		gs[i].Chunk = int(s.last.Add(1))
	}
	return gs, err
}

func (s *inChunks) Lend(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.GetOptions, d time.Duration, id uint64) ([]block.Loan, block.Lease, error) {
	loans, l, err := s.Store.Lend(ctx, ns, hashLen, hashes, o, d, id)
	for i := range loans {
		loans[i].Chunk = int(s.last.Add(1))
	}
	return loans, l, err
}

func newChunks(t *testing.T, o *session.ServerOptions) *rig {
	st := memstore.New(&memstore.Options{Shared: 64 << 20})
	return serve(t, st, &inChunks{Store: st}, o)
}

// mapsOf counts the mappings of the store's memory, the store's own included.
func mapsOf(t *testing.T) int {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "memfd:memstore")
}

// TestChunks: a client works in place in chunks that are passed to it one by one, and
// keeps none that are gone.
func TestChunks(t *testing.T) {
	r := newChunks(t, nil)
	before := mapsOf(t)
	c := r.open("unix", nil)
	if !c.Shared() || c.Welcome().Features&session.FeatureShared != 0 {
		t.Fatalf("features %#x", c.Welcome().Features)
	}
	for i := range 60 {
		n := 1000 + 7000*i
		putBlocks(t, c, r.handle(), map[int]int{i: n})
		into := make([]byte, n)
		res, err := c.Get(t.Context(), r.handle(), []session.GetItem{{Hash: hashOf(i), Into: into}}, block.GetOptions{})
		if err != nil || res[0].Err != nil || res[0].Reason != block.Hit || !bytes.Equal(into, bytesOf(i, n)) {
			t.Fatalf("block %d: %+v, %v", i, res, err)
		}
	}
	if s := c.Stats(); s.InPlace != 120 || s.BytesOut != 60*1000+7000*59*60/2 {
		t.Errorf("of 120 blocks %d were copied in place: %+v", s.InPlace, s)
	}
	if n := mapsOf(t) - before; n < 1 || n > 4*chunksKept {
		t.Errorf("%d chunks are mapped", n)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if n := mapsOf(t); n != before {
		t.Errorf("%d mappings are left, %d before", n, before)
	}
	r.quiet()
}

// TestChunksUntaken: a client that takes no files out of the socket is told of no places
// in memory any more when that is full, puts and gets all the same, and holds up nobody.
func TestChunksUntaken(t *testing.T) {
	r := newChunks(t, nil)
	c := dial(t, "unix", r.unix)
	if err := c.hello(session.HelloMessage{Features: session.FeatureShared | session.FeatureChunks}); err != nil || len(c.files) != 1 || c.welcome.Features != session.FeatureChunks {
		t.Fatalf("%d files, features %#x, error %v", len(c.files), c.welcome.Features, err)
	}
	end := os.NewFile(uintptr(c.files[0]), "files")
	var g session.GrantedPlace
	named := 0
	for g = c.places(r.ns, 5, 1)[0]; g.Chunk != session.NoChunk; g = c.places(r.ns, 5, 1)[0] {
		if named++; named > 10_000 {
			t.Fatal("each place is named")
		}
		if err := c.answer(c.send(session.CodeRelease, &session.ReleaseMessage{Grants: []uint64{g.Grant}}), session.CodeReleased, &session.ReleasedMessage{}); err != nil {
			t.Fatal(err)
		}
	}
	if named == 0 || r.server.Stats().Unpassed == 0 {
		t.Errorf("%d places were named, %d not", named, r.server.Stats().Unpassed)
	}
	if done := c.put(r.keys("a"), 0, item(g.Grant, []byte("hello"))); done.Results[0].Status != session.StatusInvalid {
		t.Errorf("a put without data: %+v", done.Results)
	}
	c.store(r.keys("a"), []byte("hello"))
	var lent session.GotMessage
	if err := c.answer(c.send(session.CodeGet, &session.GetMessage{Keys: r.keys("a"), Flags: session.FlagInPlace}), session.CodeGot, &lent); err != nil || lent.Blocks[0].Reason != block.MissNoRoom || lent.Blocks[0].Chunk != session.NoChunk {
		t.Errorf("got in place %+v, %v", lent.Blocks, err)
	}
	if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || string(got[0]) != "hello" {
		t.Errorf("got %q, %v", got, err)
	}
	other := r.open("unix", nil)
	putBlocks(t, other, r.handle(), map[int]int{1: 1000})
	if s := other.Stats(); s.InPlace != 1 {
		t.Errorf("another client works in place: %+v", s)
	}
	if err := errors.Join(end.Close(), other.Close()); err != nil {
		t.Error(err)
	}
	// Without its end of the socket it is as before.
	if g := c.places(r.ns, 5, 1)[0]; g.Chunk != session.NoChunk {
		t.Errorf("a place in chunk %d, whose file cannot be passed", g.Chunk)
	}
	_ = c.c.Close()
	r.quiet()
}
