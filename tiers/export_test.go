package tiers

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/packed"
)

// TableLen is the number of entries that the resident table knows by key.
func TableLen(s *Store) int { return s.table.Len() }

// Expire is what a sweep does with a block that it found past its time.
func Expire(s *Store, h block.Handle) { s.expire(h) }

// HandleOf is the handle of a block's entry, 0 when there is none.
func HandleOf(s *Store, k block.Key) block.Handle {
	h, _, _ := s.table.Lookup(k)
	return h
}

// EntryOf is a copy of a block's entry.
func EntryOf(s *Store, k block.Key) index.Entry {
	_, e, _ := s.table.Lookup(k)
	return e
}

// HoldCommits keeps the catalog as it is until release is called: what is
// queued meanwhile is neither written nor answered.
func HoldCommits(s *Store) (release func()) {
	held, free := make(chan struct{}), make(chan struct{})
	s.commits.add(catalogOp{key: block.Key{}, hlen: block.HashBytes, fin: func(error) {
		close(held)
		<-free
	}})
	<-held
	return func() { close(free) }
}

// QueuedCommits is how many records wait for the committer.
func QueuedCommits(s *Store) int {
	s.commits.mu.Lock()
	defer s.commits.mu.Unlock()
	return len(s.commits.mu.ops)
}

// Catalog is the store's catalog.
func Catalog(s *Store) *index.Catalog { return s.catalog }

// PinnedSlots is what the slots of pinned blocks take, as it is counted.
func PinnedSlots(s *Store) int64 { return s.pins.slots.Load() }

// SealOf is what the header of a slot of G3 is sealed with.
func SealOf(s *Store, p block.Place) Seal {
	return s.g3.devs[p.Device()].slab.Seal(p.Offset())
}

// MakeV1 makes a slab in which nothing lies one of version 1.
func MakeV1(path string) error {
	s, err := OpenSlab(path, SlabOptions{})
	if err != nil {
		return err
	}
	s.super.version, s.super.salt = 1, [16]byte{}
	return errors.Join(writeSuper(s.f, &s.super), s.Close())
}

// EvictG3 takes a block out of G3 as its evictor does, and answers when the drop
// of its record is queued.
func EvictG3(s *Store, h block.Handle) (begun bool) {
	s.table.Update(h, func(e *index.Entry) {
		if begun = s.mayLeave(s.g3, e); begun {
			s.startLeave(h, e, block.Evicted, nil)
		}
	})
	return begun
}

// DamagedG3 is what a reader does that found a copy in G3 damaged; e is the
// entry as it was when the read began.
func DamagedG3(s *Store, h block.Handle, e *index.Entry) error {
	return s.damagedG3(h, e, block.ErrCorrupt)
}

// Activity is a number that stays as it is only while nothing happens in the
// store, and the number of the event published last.
func Activity(s *Store) (work int64, seq uint64) {
	seq = s.events.stats().Published
	return s.commits.rounds.Load() + int64(Flights(s))<<32 + int64(seq)<<40, seq
}

// Flights is how many copies are under way.
func Flights(s *Store) int {
	s.moves.mu.Lock()
	defer s.moves.mu.Unlock()
	return len(s.moves.mu.m)
}

// CatalogCaughtUp reports whether the catalog works, and nothing waits for it that it
// could not take before.
func CatalogCaughtUp(s *Store) bool {
	return s.catalog.Err() == nil && s.commits.behind.Load() == 0
}

// AwaitCommits waits until all that is queued for the catalog is written.
func AwaitCommits(s *Store) {
	done := make(chan struct{})
	s.commits.add(catalogOp{fin: func(error) { close(done) }})
	<-done
}

// Evict takes a block out of a tier as the tier's evictor does, and returns the
// bytes that came free there.
func Evict(s *Store, t block.TierID, h block.Handle) (freed int64) {
	freed, _ = s.evict(s.tier(index.TierIndex(t)), []block.Handle{h}, true)
	return freed
}

// EvictAll takes blocks out of a tier together, as Evict does one.
func EvictAll(s *Store, t block.TierID, keys []block.Key) {
	var hs []block.Handle
	for _, k := range keys {
		if h := HandleOf(s, k); h != 0 {
			hs = append(hs, h)
		}
	}
	s.evict(s.tier(index.TierIndex(t)), hs, true)
}

// CatalogReaders is how many reads of the catalog calls have under way at once.
const CatalogReaders = catalogReaders

// StagingSlots is how many staging buffers there are, and StagingFree how many nobody has.
const StagingSlots = stagingSlots

func StagingFree(s *Store) int { return len(s.staging.slots) }

// MaxLease is the longest lease.
const MaxLease = maxLease

// Used reports whether a block is known to be used since it came into G2.
func Used(s *Store, k block.Key) bool { return EntryOf(s, k).Flags&flagUsed != 0 }

// SetSpeed has plans take a tier to be that fast, until it is read from.
func SetSpeed(s *Store, t block.TierID, bytesPerSecond float64) {
	v := &s.tier(index.TierIndex(t)).speed
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.bandwidth, v.mu.latency, v.mu.at = bytesPerSecond, 0, time.Now()
}

// WrapFlush has wrap called in the place of each flush of a slab, which it is
// given. What wrap fails with, the device has failed with. It comes before the
// first put.
func WrapFlush(s *Store, wrap func(device int, path string, flush func() error) error) {
	for i, slab := range s.slabs {
		flush := slab.sync
		slab.sync = s.g3.devs[i].health.watchFlush(func() error { return wrap(i, slab.Path(), flush) })
	}
}

// CloseUnclean closes a store as if it had not been in order.
func CloseUnclean(t testing.TB, s *Store) {
	t.Helper()
	s.opened = false
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// Unswept reports whether free room may have headers of blocks that have left.
func Unswept(s *Store) bool {
	return slices.ContainsFunc(s.g3.devs, func(d *device) bool { return d.unswept.Load() })
}

// FlushSlabs flushes the slabs beside the committer.
func FlushSlabs(s *Store) error {
	var errs []error
	for _, slab := range s.slabs {
		errs = append(errs, slab.Flush())
	}
	return errors.Join(errs...)
}

// Sweep gives back the reservations whose time is over, as the sweeper does.
func Sweep(s *Store) {
	now := s.reservations.now()
	for _, r := range s.reservations.takeIf(func(r *reservation) bool { return r.expires.Load() < now }) {
		s.giveBack(r)
	}
}

// PaddingOf is what lies behind a block's payload in its slot.
func PaddingOf(s *Store, l block.Located) []byte {
	size, header := SlotBytes(int64(l.Len))
	b := make([]byte, size-header-int64(l.Len))
	if l.Tier == block.G2 {
		copy(b, s.g2.slot(l.Place, size)[size-int64(len(b)):])
	} else if _, err := s.slabs[l.Place.Device()].f.ReadAt(b, s.slabs[l.Place.Device()].DataOffset()+l.Place.Offset()+size-int64(len(b))); err != nil {
		panic(err)
	}
	return b
}

// RestObjects sets how long objects stay that were rewritten.
func RestObjects(s *Store, d time.Duration) { s.objects.rest = d }

// WriterOf is by which name a store writes objects into its first bucket.
func WriterOf(s *Store) packed.Writer { return s.objects.buckets[0].sweeps.get().Writer }

// TakeOut is what G3's evictor does with blocks that it takes out.
func TakeOut(s *Store, hs []block.Handle) { s.takeOut(s.g3, hs, true) }

// Suspect reports whether a slab may have a header that no record claims.
func Suspect(s *Store, device int) bool { return s.suspect(device) }

// Owed is how many tombstones the store owes its first bucket.
func Owed(t testing.TB, s *Store) (n int) {
	t.Helper()
	if err := s.catalog.ScanOwed(s.objects.buckets[0].no, func(*index.OwedRecord) error { n++; return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}
