package api_test

import (
	"context"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
)

func benchHash(i int) (h block.Hash) {
	binary.BigEndian.PutUint64(h[:], uint64(i)*0x9e3779b97f4a7c15)
	return h
}

// dialTCP is a client over loopback TCP, with a namespace.
func dialTCP(b *testing.B, s api.Store) *api.Client {
	b.Helper()
	c, err := api.Dial(context.Background(), listenStore(b, s), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return c
}

// BenchmarkMatch256 compares a match of 256 keys with what it cannot do without:
// an empty call (Ping) and 256 lookups in the same store. The three run in turn;
// the ratio is of medians. It is the one of kvtier bench's grpc.match.256, with a
// plain map for a store.
func BenchmarkMatch256(b *testing.B) {
	for _, way := range []string{"bufconn", "tcp"} {
		b.Run(way, func(b *testing.B) {
			const keys = 256
			s := memstore.New(nil)
			var c *api.Client
			if way == "tcp" {
				c = dialTCP(b, s)
			} else {
				c = apitest.Serve(b, s, nil)()
			}
			ctx := context.Background()
			ns, err := c.OpenNamespace(ctx, block.Descriptor{Name: "ns", Model: "m", MaxBlockBytes: 1 << 20}, 0)
			if err != nil {
				b.Fatal(err)
			}
			ns.HashLen = 16
			var packed []byte
			var items []api.PutItem
			for i := range keys {
				h := benchHash(i)
				packed = append(packed, h[:16]...)
				items = append(items, api.PutItem{Hash: h, Data: []byte("payload")})
			}
			if _, err := c.Put(ctx, ns, items, api.PutOptions{}); err != nil {
				b.Fatal(err)
			}
			var pings, bare, matches []time.Duration
			var res, own block.MatchResult
			b.ReportAllocs()
			for b.Loop() {
				t0 := time.Now()
				if _, err := c.Ping(ctx); err != nil {
					b.Fatal(err)
				}
				t1 := time.Now()
				if err := s.Match(ctx, ns.ID, 16, packed, block.MatchOptions{}, &own); err != nil || own.Prefix != keys {
					b.Fatal(own.Prefix, err)
				}
				t2 := time.Now()
				if err := c.MatchPacked(ctx, ns, packed, block.MatchOptions{}, &res); err != nil || res.Prefix != keys {
					b.Fatal(res.Prefix, err)
				}
				t3 := time.Now()
				pings, bare, matches = append(pings, t1.Sub(t0)), append(bare, t2.Sub(t1)), append(matches, t3.Sub(t2))
			}
			median := func(d []time.Duration) float64 {
				slices.Sort(d)
				return float64(d[len(d)/2]) / 1e3
			}
			p, l, m := median(pings), median(bare), median(matches)
			b.ReportMetric(p, "empty-us")
			b.ReportMetric(l, "lookups-us")
			b.ReportMetric(m, "match-us")
			b.ReportMetric(m/(p+l), "ratio")
		})
	}
}

func BenchmarkBlocks1MiB(b *testing.B) {
	s := memstore.New(&memstore.Options{Capacity: 1 << 30})
	c := dialTCP(b, s)
	ctx := context.Background()
	ns, err := c.OpenNamespace(ctx, block.Descriptor{Name: "ns", BlockBytes: 1 << 20}, 0)
	if err != nil {
		b.Fatal(err)
	}
	ns.HashLen = 16
	const n = 16
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i)
	}
	items, want, hs := make([]api.PutItem, n), make([]block.Wanted, n), make([]block.Hash, n)
	for i := range n {
		hs[i] = benchHash(i)
		items[i], want[i] = api.PutItem{Hash: hs[i], Data: data}, block.Wanted{Hash: hs[i]}
	}
	b.Run("put", func(b *testing.B) {
		b.SetBytes(n << 20)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Clear(ctx, ns); err != nil {
				b.Fatal(err)
			}
			res, err := c.Put(ctx, ns, items, api.PutOptions{})
			if err != nil || res[0].Err != nil {
				b.Fatal(err, res)
			}
		}
	})
	b.Run("get", func(b *testing.B) {
		b.SetBytes(n << 20)
		b.ReportAllocs()
		for b.Loop() {
			err := c.Get(ctx, ns, want, block.GetOptions{}, func(i int, p block.Payload) error {
				if p.Reason != block.Hit || len(p.Bytes) != 1<<20 {
					b.Fatal(i, p.Reason)
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}
