package tiers_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// newAgent is an agent with the backends that a store needs.
func newAgent(t testing.TB) *xfer.Agent {
	t.Helper()
	return agentWith(t, func(b xfer.Backend) xfer.Backend { return b })
}

// logTo sends a store's log to the test's.
type logTo struct{ t testing.TB }

func (l logTo) Write(p []byte) (int, error) { l.t.Logf("%s", bytes.TrimSpace(p)); return len(p), nil }

// openStore opens a store and closes it with the test.
func openStore(t testing.TB, o tiers.Options) *tiers.Store {
	t.Helper()
	if o.Agent == nil {
		o.Agent = newAgent(t)
	}
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	if o.DRAM == 0 {
		o.DRAM = 64 << 20
	}
	o.Logger = slog.New(slog.NewTextHandler(logTo{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	s, err := tiers.Open(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// withoutRace skips a test under the race detector: it walks through a table of cases one
// after the other, and what they do side by side, the model and others do too. The run
// without the detector does it in a fraction of the time.
func withoutRace(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("runs without the race detector only")
	}
}

// fewer is how often a test does what it does many times: less often with the race
// detector, which needs no more and makes each time as much dearer.
func fewer(all, withRace int) int {
	if raceEnabled {
		return withRace
	}
	return all
}

// slabIn is a slab of n bytes in the test's own directory.
func slabIn(t testing.TB, n int64) []tiers.SlabSpec {
	return []tiers.SlabSpec{{Path: filepath.Join(t.TempDir(), "slab"), Bytes: n}}
}

// hashOf is the hash of a number, 16 bytes that count.
func hashOf(i int) (h block.Hash) {
	binary.LittleEndian.PutUint64(h[:], uint64(i))
	binary.LittleEndian.PutUint64(h[8:], uint64(i)*0x9e3779b97f4a7c15+1)
	return h
}

const hashLen = 16

func pack(hs ...block.Hash) (b []byte) {
	for _, h := range hs {
		b = append(b, h[:hashLen]...)
	}
	return b
}

// noise is what payloads are cut from. To draw the bytes of each took a fifth of the
// processor time of the model, and more with the race detector.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 17<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b) // never fails
	return b
})

// payload is what block i holds: other bytes than any other block, and others at each
// place of it.
func payload(i, n int) []byte {
	b := bytes.Clone(noise()[uint64(i)*0x9e3779b97f4a7c15>>41:][:n]) // begins in the first 8 MiB
	for k := range min(8, n) {
		b[k] ^= byte(i >> (8 * k))
	}
	return b
}

func space(t testing.TB, s *tiers.Store, name string, maxBytes int64) block.Namespace {
	t.Helper()
	ns, err := s.OpenNamespace(context.Background(), block.Descriptor{Name: name, MaxBlockBytes: maxBytes}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

// put puts one block and returns how that ended.
func put(s *tiers.Store, ns block.Namespace, i int, data []byte, o block.PutOptions) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		r, _, err := s.Reserve(ctx, ns.ID, hashLen, hashOf(i), int64(len(data)), o)
		if errors.Is(err, block.ErrNoSpace) && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if err != nil || r.Status == block.Exists {
			return err
		}
		for off := 0; off < len(data); {
			n := min(100_000, len(data)-off)
			if err := s.Fill(ctx, r.ID, int64(off), data[off:off+n]); err != nil {
				return err
			}
			off += n
		}
		return s.Commit(ctx, []uint64{r.ID})[0].Err
	}
}

// get reads one block: its bytes, or why not.
func get(s *tiers.Store, ns block.Namespace, i int, o block.GetOptions) (data []byte, p block.Payload, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err = s.Get(ctx, ns.ID, hashLen, []block.Wanted{{Hash: hashOf(i)}}, o, func(_ int, q block.Payload) error {
		data, p = append([]byte(nil), q.Bytes...), q
		p.Bytes = nil
		return nil
	})
	return data, p, err
}

func TestPutGet(t *testing.T) {
	s := openStore(t, tiers.Options{Slabs: slabIn(t, 256<<20)})
	ns := space(t, s, "a", 8<<20)
	sizes := []int{1, 511, 512, 513, 4096, 16 << 10, 65535, 65536, 65537, 300_001, 1 << 20, 1<<20 + 1, 8 << 20}
	for i, n := range sizes {
		durable := block.G2
		if i%2 == 1 {
			durable = block.G3
		}
		if err := put(s, ns, i, payload(i, n), block.PutOptions{Durable: durable}); err != nil {
			t.Fatalf("put %d bytes: %v", n, err)
		}
	}
	for i, n := range sizes {
		got, p, err := get(s, ns, i, block.GetOptions{Verify: true})
		if err != nil || p.Reason != block.Hit || !bytes.Equal(got, payload(i, n)) {
			t.Errorf("get %d bytes: %v, %v, equal %v", n, err, p.Reason, bytes.Equal(got, payload(i, n)))
		}
	}
}

// TestOffload puts ten times what G2 holds and reads it all back.
func TestOffload(t *testing.T) {
	withoutRace(t)
	s := openStore(t, tiers.Options{Slabs: slabIn(t, 1<<30)})
	ns := space(t, s, "a", 8<<20)
	const n, size = 5000, 128 << 10
	for i := range n {
		o := block.PutOptions{}
		if i%10 != 0 {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		if err := put(s, ns, i, payload(i, size), o); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	for i := range n {
		got, p, err := get(s, ns, i, block.GetOptions{})
		if err != nil || p.Reason != block.Hit || !bytes.Equal(got, payload(i, size)) {
			t.Fatalf("get %d: %v, %v from %v, equal %v", i, err, p.Reason, p.Tier, bytes.Equal(got, payload(i, size)))
		}
	}
	st := s.Stats()
	t.Logf("%+v", st.Tiers)
}

// TestManyAtOnce mixes everything from many goroutines.
func TestManyAtOnce(t *testing.T) {
	s := openStore(t, tiers.Options{Slabs: slabIn(t, 256<<20)})
	ns := space(t, s, "a", 1<<20)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			for range fewer(1500, 200) {
				i := r.IntN(2000)
				size := 1000 + (i%7)*40_000
				switch r.IntN(10) {
				case 0, 1, 2, 3:
					o := block.PutOptions{Durable: block.TierID(2 + r.IntN(2))}
					if i > 0 {
						o.Parent, o.HasParent = hashOf(i/2), true
					}
					if err := put(s, ns, i, payload(i, size), o); err != nil && !errors.Is(err, block.ErrNoSpace) && !errors.Is(err, block.ErrNotFound) {
						t.Errorf("put %d: %v", i, err)
					}
				case 4:
					if _, err := s.Delete(context.Background(), ns.ID, hashLen, pack(hashOf(i))); err != nil {
						t.Errorf("delete %d: %v", i, err)
					}
				default:
					got, p, err := get(s, ns, i, block.GetOptions{Verify: true})
					if err != nil || p.Reason == block.Hit && !bytes.Equal(got, payload(i, size)) {
						t.Errorf("get %d: %v, %v", i, err, p.Reason)
					}
				}
			}
		})
	}
	wg.Wait()
	if st := s.Stats(); st.Corrupt != 0 {
		t.Errorf("%d blocks were corrupt", st.Corrupt)
	}
}

// TestReopen closes a store without draining and finds what was durable.
func TestReopen(t *testing.T) {
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 256<<20), Agent: newAgent(t)}
	s := openStore(t, o)
	ns := space(t, s, "a", 1<<20)
	const n = 100
	for i := range n {
		o := block.PutOptions{Durable: block.TierID(2 + i%2)}
		if i > 0 {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		if err := put(s, ns, i, payload(i, 10_000+i), o); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	o.Slabs = nil // recorded
	s = openStore(t, o)
	ns, err := s.Namespace("a")
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		got, p, err := get(s, ns, i, block.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			if p.Reason != block.MissAbsent {
				t.Errorf("block %d: %v, was only in memory", i, p.Reason)
			}
		} else if p.Reason != block.Hit || !bytes.Equal(got, payload(i, 10_000+i)) {
			t.Errorf("block %d: %v", i, p.Reason)
		}
	}
}
