package session_test

import (
	"fmt"
	"testing"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// BenchmarkClient moves blocks between a client and a store in memory, in one process.
func BenchmarkClient(b *testing.B) {
	for _, way := range ways[:3] {
		for _, size := range []int{64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/get/%dKiB", way.name, size>>10), func(b *testing.B) {
				c, ns := benchClient(b, way.network, &way.o)
				putOne(b, c, ns, 1, bytesOf(1, size))
				items := []session.GetItem{{Hash: hashOf(1), Into: make([]byte, size)}}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					res, err := c.Get(b.Context(), ns, items, block.GetOptions{})
					if err != nil || res[0].Err != nil || res[0].Reason != block.Hit {
						b.Fatal(res, err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/put/%dKiB", way.name, size>>10), func(b *testing.B) {
				c, ns := benchClient(b, way.network, &way.o)
				data := bytesOf(1, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					i++
					putOne(b, c, ns, i, data)
				}
			})
		}
	}
}

func benchClient(b *testing.B, network string, o *session.ClientOptions) (*session.Client, session.Namespace) {
	b.Helper()
	r := newRig(b, &memstore.Options{Capacity: 256 << 20, Evict: true, Shared: 8 << 30}, nil)
	addr := r.tcp
	if network == "unix" {
		addr = r.unix
	}
	c, err := session.Dial(b.Context(), network, addr, o)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	return c, r.handle()
}

func putOne(b testing.TB, c *session.Client, ns session.Namespace, i int, data []byte) {
	b.Helper()
	res, err := c.Put(b.Context(), ns, []session.PutBlock{{Hash: hashOf(i), Bytes: data}}, session.PutOptions{})
	if err != nil || res[0].Err != nil {
		b.Fatal(res, err)
	}
}
