package tiers_test

import (
	"testing"

	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/tiers"
)

// TestContract holds the store to the contract of api.Store, bare and through
// gRPC and sessions, with a durable tier and shared memory, and without either.
func TestContract(t *testing.T) {
	t.Parallel()
	const dram = 32 << 20 // extents for as many sizes of blocks as the suite has
	t.Run("g2", func(t *testing.T) {
		t.Parallel()
		apitest.RunStore(t, func(t *testing.T) apitest.Harness {
			return apitest.Harness{Store: openStore(t, tiers.Options{DRAM: dram}), G2Bytes: dram}
		})
	})
	t.Run("g3", func(t *testing.T) {
		t.Parallel()
		apitest.RunStore(t, func(t *testing.T) apitest.Harness {
			s := openStore(t, tiers.Options{DRAM: dram, Slabs: slabIn(t, 64<<20), SharedMemory: tiers.ShareOn})
			return apitest.Harness{Store: s, G2Bytes: dram, Durable: true}
		})
	})
}
