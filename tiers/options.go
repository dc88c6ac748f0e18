package tiers

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/xfer"
)

// SlabSpec asks for a slab: a preallocated regular file, made when absent, or a
// block device.
type SlabSpec struct {
	Path  string
	Bytes int64 // length; 0 takes an existing slab as long as it is
}

// Options say where a store keeps its blocks. Dir, Agent and DRAM are required.
type Options struct {
	Dir   string      // data directory: the catalog, and slabs made by default
	Agent *xfer.Agent // moves the bytes; it needs backends for DRAM to DRAM and DRAM to FILE (and BLK)
	DRAM  int64       // bytes of G2
	// SharedMemory says whether other processes may map G2: see Store.Memory.
	SharedMemory Sharing
	// Share tells apart the namespaces whose blocks never share a piece of memory that
	// others may map: those for which it answers the same may. Then G2 is partitioned,
	// when it is shared: see Store.OpenChunk. nil: all are one share.
	Share func(namespace string) string

	Slabs       []SlabSpec // of G3; empty: those that the data directory records
	NoSlabs     bool       // no G3, even when the data directory records slabs
	DefaultSlab *SlabSpec  // made when Slabs is empty and the data directory records none

	// Objects are the buckets of G4, or the parts of them below a prefix, and Cluster the
	// name of whose they are: see bucket.Open. New objects go to the first that works.
	// Empty: no G4. They are the caller's to close, after the store.
	Objects []bucket.Service
	Cluster string
	// ObjectGrace is how old an object must be before the sweep of a bucket judges it.
	ObjectGrace time.Duration
	// SweepObjectsEvery is how long a bucket's sweep rests behind its end.
	SweepObjectsEvery time.Duration

	// ObjectRule, if not nil, says what becomes in G4 of the blocks of a namespace, by its
	// name. It is asked once for each.
	ObjectRule func(namespace string) ObjectRule
	// UploadBytes bounds the blocks that wait to go into objects, or are on their way, and
	// are in a local tier still, by the bytes of their slots; UploadAge is how long one waits
	// before it is given back to its tier, which may choose others then.
	UploadBytes int64
	UploadAge   time.Duration

	// High and Low are the watermarks of each tier, as shares of its capacity:
	// the evictor starts above High and ends below Low.
	High, Low float64
	// Policy makes the eviction policy of a tier, with which it begins: see SetPolicy.
	// nil: lru-leaf, which has the least state.
	Policy func(block.TierID) (policy.Policy, error)
	// Grace is how long a block that was just committed is kept from being
	// dropped for good; moving it down is not dropping.
	Grace time.Duration
	// ReserveTTL is how long a reservation may stay without a Fill.
	ReserveTTL time.Duration
	// MaxReservations bounds the reservations that are open at once, and the grants.
	MaxReservations int
	// MaxLeases bounds the leases that are out at once.
	MaxLeases int
	// PrefetchBytes bounds what prefetches may have under way.
	PrefetchBytes int64
	// StallAfter is how long a transfer to or from a device of G3 may go on without
	// any of its blocks being done, or a flush, before the device counts as down. A
	// bucket of which nothing is heard for half as long is asked for something small, and
	// is down when there is no answer to that in the other half.
	StallAfter time.Duration
	// ProbeEvery is how often a device that is not healthy is probed; the pauses
	// grow while probes fail. A device that only failed now and then is healthy
	// again when nothing has failed for that long. It is also how often the store looks
	// whether its catalog has failed, and tries to bring it back.
	ProbeEvery time.Duration
	// SweepAfter is how long after an opening that followed a stop out of order the
	// free room of the slabs is swept of headers that no record claims: the first to
	// be served are those who wait for their blocks. It is also how often the store
	// looks whether there is something to sweep since.
	SweepAfter time.Duration
	// NoSync leaves out every flush and sync: for measuring what they cost. A
	// crash then loses blocks that were answered as durable.
	NoSync bool
	// Catalog is how the catalog is opened; nil: on the host's file system.
	Catalog *index.CatalogOptions

	// WriteBudgets are how much may be written to G3 and G4, to begin with: see
	// SetWriteBudget. Blocks that they are not enough for are dropped: see
	// policy.Admission. None: all is written.
	WriteBudgets []block.WriteBudget

	// Prefill, if not nil, says what prefill costs the engines of a namespace, by its name;
	// the zero value: that is not known, but for what they report.
	Prefill func(namespace string) block.Prefill

	// OnRequest, if not nil, is told of what the policies are told of: a request's keys
	// in a namespace, root first, hashLen bytes each. It must not wait, and hashes are
	// the caller's again when it returns.
	OnRequest func(ns block.Namespace, hashLen int, hashes []byte)

	Logger *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.High == 0 && o.Low == 0 {
		o.High, o.Low = 0.98, 0.96
	}
	if o.Policy == nil {
		o.Policy = func(block.TierID) (policy.Policy, error) { return policy.NewLRULeaf(), nil }
	}
	if o.ReserveTTL == 0 {
		o.ReserveTTL = 30 * time.Second
	}
	if o.MaxReservations == 0 {
		o.MaxReservations = 1 << 16
	}
	if o.MaxLeases == 0 {
		o.MaxLeases = 1 << 16
	}
	if o.PrefetchBytes == 0 {
		o.PrefetchBytes = 256 << 20
	}
	if o.UploadBytes == 0 {
		o.UploadBytes = 256 << 20
	}
	if o.UploadAge == 0 {
		o.UploadAge = 30 * time.Second
	}
	if o.StallAfter == 0 {
		o.StallAfter = 5 * time.Second
	}
	if o.ProbeEvery == 0 {
		o.ProbeEvery = time.Second
	}
	if o.SweepAfter == 0 {
		o.SweepAfter = 10 * time.Second
	}
	if o.ObjectGrace == 0 {
		o.ObjectGrace = time.Hour
	}
	if o.SweepObjectsEvery == 0 {
		o.SweepObjectsEvery = 6 * time.Hour
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	var c index.CatalogOptions
	if o.Catalog != nil {
		c = *o.Catalog
	}
	if c.Logger == nil {
		c.Logger = o.Logger
	}
	o.Catalog = &c
	return o
}

// minDRAM is the least that G2 may have: it holds the largest block.
const minDRAM = 16 << 20

// minSlab is the least that a slab may have, for the same reason.
const minSlab = 32 << 20

func (o Options) validate() error {
	switch {
	case o.Dir == "":
		return fmt.Errorf("%w: data directory: empty", block.ErrInvalid)
	case o.Agent == nil:
		return fmt.Errorf("%w: agent: none", block.ErrInvalid)
	case o.DRAM < minDRAM:
		return fmt.Errorf("%w: dram: %d bytes, at least %d", block.ErrInvalid, o.DRAM, int64(minDRAM))
	case o.SharedMemory > ShareOn:
		return fmt.Errorf("%w: shared memory: %d, want ShareOff, ShareAuto or ShareOn", block.ErrInvalid, o.SharedMemory)
	case !(o.Low > 0 && o.Low <= o.High && o.High <= 1):
		return fmt.Errorf("%w: watermarks: high %v, low %v, want 0 < low <= high <= 1", block.ErrInvalid, o.High, o.Low)
	case o.NoSlabs && len(o.Slabs) > 0:
		return fmt.Errorf("%w: slabs: %d given and none wanted", block.ErrInvalid, len(o.Slabs))
	case o.Grace < 0:
		return fmt.Errorf("%w: grace: %v", block.ErrInvalid, o.Grace)
	case o.UploadBytes < 0:
		return fmt.Errorf("%w: upload bytes: %d", block.ErrInvalid, o.UploadBytes)
	case o.UploadAge < 0:
		return fmt.Errorf("%w: upload age: %v", block.ErrInvalid, o.UploadAge)
	case o.StallAfter < 0:
		return fmt.Errorf("%w: stall after: %v", block.ErrInvalid, o.StallAfter)
	case o.ProbeEvery < 0:
		return fmt.Errorf("%w: probe every: %v", block.ErrInvalid, o.ProbeEvery)
	case o.SweepAfter < 0:
		return fmt.Errorf("%w: sweep after: %v", block.ErrInvalid, o.SweepAfter)
	case o.ObjectGrace < 0:
		return fmt.Errorf("%w: object grace: %v", block.ErrInvalid, o.ObjectGrace)
	case o.SweepObjectsEvery < 0:
		return fmt.Errorf("%w: sweep objects every: %v", block.ErrInvalid, o.SweepObjectsEvery)
	}
	if err := o.checkBudgets(); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, s := range o.Slabs {
		if s.Path == "" {
			return fmt.Errorf("%w: slab path: empty", block.ErrInvalid)
		}
		if s.Bytes != 0 && s.Bytes < minSlab {
			return fmt.Errorf("%w: slab %s: %d bytes, at least %d", block.ErrInvalid, s.Path, s.Bytes, int64(minSlab))
		}
		if seen[s.Path] {
			return fmt.Errorf("%w: slab %s: given twice", block.ErrInvalid, s.Path)
		}
		seen[s.Path] = true
	}
	return nil
}

// Extents hold a whole number of slots of 1 MiB blocks, header block included:
// 64 of them as a rule, and 16 or 8 on small devices, so that a few sizes of
// blocks can share one. That is a little over 64, 16 and 8 MiB, and leaves nothing
// over for blocks of 1, 2, 4 and 8 MiB either.
const (
	tinyExtent  = 8 * (1<<20 + 4096)
	smallExtent = 16 * (1<<20 + 4096)
	largeExtent = 64 * (1<<20 + 4096)
	// arenaChunk is a whole number of extents of each size and of huge pages, so
	// that no slot crosses from one mapping to the next.
	arenaChunk = 514 << 20
)

// chunkFor is the extent size of a partitioned G2 of n bytes: whole huge pages, with
// little left over for blocks of 1 to 8 MiB, and a few hundred of them, so that neither
// a share that has few blocks takes much nor the host runs out of descriptors.
func chunkFor(n int64) int64 {
	switch {
	case n < 256<<20:
		return 10 << 20
	case n < 4<<30:
		return 18 << 20
	case n < 64<<30:
		return 66 << 20
	}
	return min(1+n>>40, 3) * (258 << 20)
}

// extentFor is the extent size of a device of n bytes.
func extentFor(n int64) int64 {
	switch {
	case n < 256<<20:
		return tinyExtent
	case n < 4<<30:
		return smallExtent
	}
	return largeExtent
}
