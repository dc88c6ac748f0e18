package api_test

import (
	"testing"

	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/api/apitest/memstore"
)

func TestStoreContract(t *testing.T) {
	for _, c := range []struct {
		name    string
		durable bool
	}{{"g2", false}, {"g3", true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // much of it is waiting for blocks to expire
			apitest.RunStore(t, func(*testing.T) apitest.Harness {
				const capacity = 32 << 20
				return apitest.Harness{
					Store:   memstore.New(&memstore.Options{Capacity: capacity, Durable: c.durable, Evict: true, Shared: 4 * capacity}),
					G2Bytes: capacity, Durable: c.durable,
				}
			})
		})
	}
}
