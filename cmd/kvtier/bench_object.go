package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/backends/s3"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
)

// What target object packs: with headers and footer that is a little over 8 MiB.
const (
	objectBlock  = 64 << 10
	objectBlocks = 128
	objectDepth  = 8
)

// needObject says what is wrong with --object.
func needObject(ctx context.Context, b *bench) error {
	if b.object == "" {
		return usageErrorf("target object: want --object s3://BUCKET/PREFIX")
	}
	backend, err := s3.New(ctx, &s3.Options{URL: b.object})
	if err != nil {
		return fmt.Errorf("--object: %w", err)
	}
	return errors.Join(backend.Check(ctx), backend.Close())
}

// ownPrefix is a URL of a prefix below that of another one, which nobody has.
func ownPrefix(of string) (string, error) {
	u, err := url.Parse(of)
	if err != nil {
		return "", err
	}
	u.Path = strings.TrimSuffix(u.Path, "/") + "/kvtier-bench-" + strings.ToLower(rand.Text())
	return u.String(), nil
}

// benchObject moves packed objects, as an object tier does, and objects of the same size by
// the SDK alone.
func benchObject(ctx context.Context, b *bench) (err error) {
	own, err := ownPrefix(b.object)
	if err != nil {
		return err
	}
	backend, err := s3.New(ctx, &s3.Options{URL: own})
	if err != nil {
		return err
	}
	service := bucketService{backend}
	defer func() { // also when ctx has ended
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, removeAll(clean, service), backend.Close())
	}()
	bare, err := s3.NewBare(ctx, own)
	if err != nil {
		return err
	}
	var writer packed.Writer
	_, _ = rand.Read(writer[:]) // does not fail
	place, err := bucket.Open(ctx, service, "bench", [16]byte{}, writer)
	if err != nil {
		return err
	}
	begun := backend.Stats()
	m := newObjectBench(place, bare, b.objects)
	if err := b.compare(ctx, "object.put.d8", "GB/s", b.pairs, m.put, m.barePut); err != nil {
		return err
	}
	if err := b.compare(ctx, "object.get.d8", "GB/s", b.pairs, m.get, m.bareGet); err != nil {
		return err
	}
	ended := backend.Stats()
	one, value := 1.0, float64(ended.Total()-begun.Total())/float64(m.moved)
	b.note("object.requests_per_block: %s", figure(value))
	b.rows = append(b.rows, benchRow{Name: "object.requests_per_block", Value: value, Unit: "requests", Limit: &one, Ratio: &value})
	return nil
}

// removeAll removes what is below a prefix.
func removeAll(ctx context.Context, s bucketService) error {
	for {
		objects, _, err := s.List(ctx, "", "")
		if err != nil || len(objects) == 0 {
			return err
		}
		keys := make([]string, len(objects))
		for i, o := range objects {
			keys[i] = o.Key
		}
		if err := s.Delete(ctx, keys); err != nil {
			return err
		}
	}
}

// objectBench has what the passes of target object use.
type objectBench struct {
	place *bucket.Bucket
	bare  *s3.Bare
	src   []byte // payloads of one object
	sums  []block.Sum
	dst   chan []byte // memory for one object each
	names []packed.Name
	feet  []*packed.Footer
	bytes int64  // of an object
	whole []byte // an object for the SDK
	moved int    // blocks
	made  atomic.Uint64
}

func newObjectBench(place *bucket.Bucket, bare *s3.Bare, objects int) *objectBench {
	m := &objectBench{place: place, bare: bare, src: make([]byte, objectBlocks*objectBlock), dst: make(chan []byte, objectDepth)}
	_, _ = rand.Read(m.src) // does not fail
	for i := range objectBlocks {
		m.sums = append(m.sums, xxh3.Hash128(m.payload(m.src, i)).Bytes())
	}
	m.names, m.feet = make([]packed.Name, objects), make([]*packed.Footer, objects)
	f, _ := m.pack(0)
	m.bytes = f.Bytes()
	m.whole = make([]byte, m.bytes)
	copy(m.whole, m.src)
	for range objectDepth {
		m.dst <- make([]byte, m.bytes)
	}
	return m
}

func (m *objectBench) payload(b []byte, i int) []byte { return b[i*objectBlock:][:objectBlock] }

// seal binds the slot header of a member to its place.
func seal(f *packed.Footer, off int64) tiers.Seal {
	return tiers.Seal{Version: 2, Salt: f.ID, Offset: off}
}

// pack makes the footer of object n and the slot headers of its members. The sums of the
// payloads are known since they were put.
func (m *objectBench) pack(n int) (*packed.Footer, [][]byte) {
	f := m.place.New(m.made.Add(1), [32]byte{}, 32, 0)
	heads := make([]byte, objectBlocks*packed.HeaderBytes)
	var parts [][]byte
	for i := range objectBlocks {
		p := packed.Member{Hash: block.Hash{byte(n), byte(n >> 8), byte(i)}, Len: objectBlock, Gen: uint64(i), Sum: m.sums[i]}
		if !f.Add(&p) {
			panic("bench: the blocks do not fit into one object")
		}
		head := heads[i*packed.HeaderBytes:][:packed.HeaderBytes]
		tiers.EncodeHeader(head, &tiers.SlotHeader{Hash: p.Hash, HashLen: 32, Len: p.Len, Gen: p.Gen, Sum: p.Sum}, seal(f, p.Offset))
		parts = append(parts, head, m.payload(m.src, i))
	}
	return f, parts
}

// pass moves every object once, several at a time.
func (m *objectBench) pass(ctx context.Context, move func(ctx context.Context, i int) error) (float64, error) {
	took, err := side(ctx, len(m.names), objectDepth, move)
	return rate(len(m.names)*int(m.bytes), took), err
}

func (m *objectBench) put(ctx context.Context) (float64, error) {
	m.moved += len(m.names) * objectBlocks
	return m.pass(ctx, func(ctx context.Context, i int) (err error) {
		f, parts := m.pack(i)
		m.names[i], err = m.place.Write(ctx, f, parts)
		m.feet[i] = f
		return err
	})
}

func (m *objectBench) get(ctx context.Context) (float64, error) {
	m.moved += len(m.names) * objectBlocks
	return m.pass(ctx, func(ctx context.Context, i int) error {
		mem := <-m.dst
		defer func() { m.dst <- mem }()
		f := m.feet[i]
		var parts [][]byte
		for j := range f.Members {
			p := &f.Members[j]
			b := mem[p.Offset:][:packed.HeaderBytes+int64(p.Len)]
			parts = append(parts, b[:packed.HeaderBytes], b[packed.HeaderBytes:])
		}
		if err := m.place.Read(ctx, m.names[i], 0, parts); err != nil {
			return err
		}
		for j := range f.Members {
			p := &f.Members[j]
			h, err := tiers.DecodeHeader(parts[2*j], seal(f, p.Offset))
			if err != nil {
				return err
			}
			if h.Hash != p.Hash || xxh3.Hash128(parts[2*j+1]).Bytes() != h.Sum {
				return fmt.Errorf("block %d of %s: %w", j, m.names[i], block.ErrCorrupt)
			}
		}
		return nil
	})
}

func bareKey(i int) string { return fmt.Sprintf("bare-%d", i) }

func (m *objectBench) barePut(ctx context.Context) (float64, error) {
	return m.pass(ctx, func(ctx context.Context, i int) error { return m.bare.Put(ctx, bareKey(i), m.whole) })
}

func (m *objectBench) bareGet(ctx context.Context) (float64, error) {
	return m.pass(ctx, func(ctx context.Context, i int) error {
		mem := <-m.dst
		defer func() { m.dst <- mem }()
		return m.bare.Get(ctx, bareKey(i), mem)
	})
}
