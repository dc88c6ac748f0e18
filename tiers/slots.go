package tiers

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvtier/kvtier/index/block"
)

// Slots hands out the room of one device: extents of a fixed size, each given
// to a size class when one first needs it and given back when it is empty, with
// slots of that one size inside. So a device holds blocks of several sizes,
// follows the traffic when their shares change, and never has to move a block
// to make room for another of the same size.
//
// A device may belong to several shares, whose blocks never lie in one extent.
// An extent stays with the share that first took it, also when it is empty, until
// it is withdrawn and returned for another.
//
// It only counts: no I/O, no clock and no lock, so callers hold one of their
// own. Sizes and offsets are in bytes and multiples of 512. Alloc and Free take
// constant time apart from one look at a summary of 1/4096 of an extent's slots.
type Slots struct {
	capacity    int64
	extentBytes int64
	used        int64 // bytes of the slots that are taken
	extents     []slotExtent
	shares      map[uint64]int // extents of each share that has any
	empty       []uint64       // bit per extent: it belongs to no class, and is not withdrawn
	emptyLow    int            // no word of empty below this one has a bit
	emptyCount  int
	classes     map[slotKind]*slotClass
	kinds       []slotKind // of classes, ascending
	spare       slotMaps
}

// slotKind is what slots of one class have in common.
type slotKind struct {
	share uint64
	size  int64
}

func compareKinds(a, b slotKind) int {
	return cmp.Or(cmp.Compare(a.share, b.share), cmp.Compare(a.size, b.size))
}

// slotUnit is what sizes and offsets are multiples of: the smallest logical
// block that a device reads or writes.
const slotUnit = 512

// A slot of a larger class may serve when at most 1/slotWasteShare of it is
// wasted, or more than 1/slotWasteShare of the device is free.
const slotWasteShare = 4

// slotBuckets is how finely the extents of a class are sorted by how full they
// are. Bucket slotBuckets holds those without a slot to give.
const slotBuckets = 64

// slotExtent is one extent. Its zero class means that it is empty, or withdrawn.
type slotExtent struct {
	of         *slotClass // nil: none
	class      int64      // bytes per slot
	share      uint64
	owned      bool // a share has it, be it empty
	slots      int32
	free       int32
	low        int32 // no word of summary below this one has a bit
	bucket     int32
	prev, next int32 // in the list of its bucket, -1 at the ends
	vacating   bool
	passes     bool // to another share, when it is empty
	slotMaps
}

// slotMaps are the arrays of an extent. None holds a pointer, so the garbage
// collector does not look into them.
type slotMaps struct {
	freeBits []uint64 // bit per slot: it is free
	summary  []uint64 // bit per word of freeBits: it has a bit
	owners   []block.Handle
}

// slotClass is the extents of one share and slot size.
type slotClass struct {
	slotKind
	extents int
	taken   int64                  // slots
	current int32                  // extent that was allocated from last, or -1
	mask    uint64                 // bit per bucket below slotBuckets: its list is not empty
	heads   [slotBuckets + 1]int32 // first extent of each bucket, or -1
}

// NewSlots makes an allocator for capacity bytes in extents of extentBytes.
// When capacity is not a multiple, the last extent is short. It panics unless
// both are positive and extentBytes is a multiple of 512 below 1 TiB.
func NewSlots(capacity, extentBytes int64) *Slots {
	if capacity <= 0 || extentBytes <= 0 || extentBytes%slotUnit != 0 || extentBytes >= 1<<40 {
		panic(fmt.Sprintf("tiers: slots of capacity %d in extents of %d", capacity, extentBytes))
	}
	capacity -= capacity % slotUnit
	n := int((capacity + extentBytes - 1) / extentBytes)
	s := &Slots{
		capacity:    capacity,
		extentBytes: extentBytes,
		extents:     make([]slotExtent, n),
		shares:      make(map[uint64]int),
		empty:       make([]uint64, (n+63)/64),
		emptyCount:  n,
		classes:     make(map[slotKind]*slotClass),
	}
	for e := range s.extents {
		s.empty[e/64] |= 1 << (e % 64)
	}
	return s
}

// Capacity is the number of bytes that the allocator was given.
func (s *Slots) Capacity() int64 { return s.capacity }

// Used is the number of bytes in slots that are taken.
func (s *Slots) Used() int64 { return s.used }

// ExtentBytes is the length of extents, of which the last may be shorter.
func (s *Slots) ExtentBytes() int64 { return s.extentBytes }

// MaxSlot is the size of the largest slot that Alloc could ever give.
func (s *Slots) MaxSlot() int64 { return min(s.extentBytes, s.capacity) }

// Alloc takes a slot of at least size bytes for owner, in an extent of the share
// or of nobody. It looks in extents of that size first: the lowest free slot of the extent used last, so that blocks
// put together lie together and can be written together, then the fullest
// extent, so that others can run empty. Then an empty extent becomes one of
// this size. Then the next larger class with a free slot serves, if that wastes
// no more than a quarter of it, or while less than three quarters of the device
// are taken: then wasting room is better than evicting. ok is false when there
// is none.
func (s *Slots) Alloc(share uint64, size int64, owner block.Handle) (off int64, ok bool) {
	k := slotKind{share, size}
	c, e := s.find(k)
	if e < 0 {
		if e = s.firstEmpty(k); e < 0 {
			c, e = s.findLarger(k)
		} else {
			c = s.claim(e, k)
		}
	}
	if e < 0 {
		return 0, false
	}
	c.current = int32(e)
	i := s.extents[e].lowestFree()
	s.take(c, e, i, owner)
	return int64(e)*s.extentBytes + int64(i)*c.size, true
}

// CanAlloc reports whether Alloc of that share and size would succeed.
func (s *Slots) CanAlloc(share uint64, size int64) bool {
	k := slotKind{share, size}
	if _, e := s.find(k); e >= 0 {
		return true
	}
	if s.firstEmpty(k) >= 0 {
		return true
	}
	_, e := s.findLarger(k)
	return e >= 0
}

// Free gives a slot back and returns its size. An extent without a taken slot
// belongs to no class any more. It panics when no taken slot begins at off.
func (s *Slots) Free(off int64) (size int64) {
	e, i := s.locate(off)
	x := &s.extents[e]
	c := x.of
	size = c.size
	w := i / 64
	x.freeBits[w] |= 1 << (i % 64)
	x.summary[w/64] |= 1 << (w % 64)
	x.low = min(x.low, int32(w/64))
	x.owners[i] = 0
	x.free++
	c.taken--
	s.used -= size
	if x.free == x.slots {
		s.giveBack(c, e)
	} else {
		s.rebucket(c, e)
	}
	return size
}

// Take claims exactly the slot of size bytes at off, as recovery does for what
// it finds on a device. size is what Class said when the slot was allocated,
// which may be more than the block needs. It fails, naming what is in the way,
// when the slot is outside, misplaced, taken, or in an extent of another size.
// It is for devices that are all one share's, 0. The error wraps block.ErrInvalid.
func (s *Slots) Take(off, size int64, owner block.Handle) error {
	if off < 0 || size <= 0 || size%slotUnit != 0 || size > s.extentBytes || off > s.capacity-size {
		return fmt.Errorf("%w: slot of %d bytes at %d: outside %d bytes in extents of %d", block.ErrInvalid, size, off, s.capacity, s.extentBytes)
	}
	e := int(off / s.extentBytes)
	rel := off % s.extentBytes
	x := &s.extents[e]
	if x.class != 0 && x.class != size {
		return fmt.Errorf("%w: slot of %d bytes at %d: extent %d has slots of %d", block.ErrInvalid, size, off, e, x.class)
	}
	if rel%size != 0 || rel/size >= s.extentLen(e)/size {
		return fmt.Errorf("%w: slot of %d bytes at %d: no slot begins there in extent %d", block.ErrInvalid, size, off, e)
	}
	i := int(rel / size)
	var c *slotClass
	if x.class == 0 {
		c = s.claim(e, slotKind{size: size})
	} else if c = x.of; x.taken(i) {
		return fmt.Errorf("%w: slot of %d bytes at %d: taken by block %d", block.ErrInvalid, size, off, x.owners[i])
	}
	s.take(c, e, i, owner)
	return nil
}

// SetOwner gives the slot at off to another owner. It panics when no taken slot
// begins there.
func (s *Slots) SetOwner(off int64, owner block.Handle) {
	e, i := s.locate(off)
	s.extents[e].owners[i] = owner
}

// Class is the size of the slot at off, which may be more than was asked for.
// It panics when no taken slot begins there.
func (s *Slots) Class(off int64) int64 {
	e, _ := s.locate(off)
	return s.extents[e].class
}

// Emptiest is the extent to vacate when slots of size forClass are wanted for a
// share and there are none: the one of another class with the least bytes taken
// that would hold such a slot, the lowest of those. A share that has extents takes them
// only from those that have two more, so that shares in need do not take them from each
// other in turns. An extent already being vacated comes before all others. Those that not, which may be nil, says yes to are left out. ok is false
// when there is none.
func (s *Slots) Emptiest(share uint64, forClass int64, not func(extent int) bool) (extent int, used int64, ok bool) {
	var vacating bool
	for e := range s.extents {
		x := &s.extents[e]
		if x.class == 0 || x.kind() == (slotKind{share, forClass}) || s.extentLen(e) < forClass || not != nil && not(e) {
			continue
		}
		if has := s.shares[share]; x.share != share && has > 0 && s.shares[x.share] < has+2 {
			continue
		}
		u := int64(x.slots-x.free) * x.class
		if !ok || x.vacating && !vacating || x.vacating == vacating && u < used {
			extent, used, ok, vacating = e, u, true, x.vacating
		}
	}
	return extent, used, ok
}

// Vacate says that the slots of an extent are being emptied for a share, so that
// Alloc leaves it alone until it is empty or Vacate is called with false. One of
// another share is withdrawn when it is empty. It does nothing to an empty extent.
func (s *Slots) Vacate(extent int, on bool, share uint64) {
	x := &s.extents[extent]
	if x.class == 0 || x.vacating == on {
		return
	}
	x.vacating, x.passes = on, on && x.share != share
	s.rebucket(x.of, extent)
}

// Withdraw takes an empty extent of another share out, so that nobody gets it before
// Return, for a share that wants a slot of size bytes. ok is false when there is none.
func (s *Slots) Withdraw(share uint64, size int64) (extent int, ok bool) {
	for e := range s.extents {
		x := &s.extents[e]
		if s.isEmpty(e) && x.owned && x.share != share && s.extentLen(e) >= size {
			s.empty[e/64] &^= 1 << (e % 64)
			s.emptyCount--
			return e, true
		}
	}
	return 0, false
}

// Withdrawn reports whether an extent is withdrawn.
func (s *Slots) Withdrawn(extent int) bool {
	return s.extents[extent].class == 0 && !s.isEmpty(extent)
}

// Share is whose an extent is.
func (s *Slots) Share(extent int) uint64 { return s.extents[extent].share }

// Return puts an extent that was withdrawn back. It is the share's now.
func (s *Slots) Return(extent int, share uint64) {
	s.own(extent, share)
	s.setEmpty(extent)
}

// Owners appends to dst who has slots in an extent, in the order of their
// offsets. Slots taken without an owner are left out.
func (s *Slots) Owners(extent int, dst []block.Handle) []block.Handle {
	for _, h := range s.extents[extent].owners {
		if h != 0 {
			dst = append(dst, h)
		}
	}
	return dst
}

// Extent says how large the slots of an extent are, 0 when it belongs to no
// class, and who has each of them, 0 when nobody does.
func (s *Slots) Extent(extent int) (class int64, owners []block.Handle) {
	x := &s.extents[extent]
	return x.class, slices.Clone(x.owners)
}

// kind is that of the extent's class.
func (x *slotExtent) kind() slotKind { return slotKind{x.share, x.class} }

func (s *Slots) isEmpty(e int) bool { return s.empty[e/64]&(1<<(e%64)) != 0 }

func (s *Slots) setEmpty(e int) {
	s.empty[e/64] |= 1 << (e % 64)
	s.emptyLow = min(s.emptyLow, e/64)
	s.emptyCount++
}

// own gives an extent to a share.
func (s *Slots) own(e int, share uint64) {
	x := &s.extents[e]
	if x.owned {
		if s.shares[x.share]--; s.shares[x.share] == 0 {
			delete(s.shares, x.share)
		}
	}
	x.share, x.owned = share, true
	s.shares[share]++
}

// find returns the class of that kind and its extent to allocate from, or -1.
func (s *Slots) find(k slotKind) (*slotClass, int) {
	if k.size <= 0 || k.size%slotUnit != 0 {
		panic(fmt.Sprintf("tiers: slot of %d bytes", k.size))
	}
	c := s.classes[k]
	if c == nil {
		return nil, -1
	}
	return c, c.pick(s)
}

// findLarger returns the smallest larger class of the share that may serve k.size and
// has a free slot, and its extent to allocate from, or -1.
func (s *Slots) findLarger(k slotKind) (*slotClass, int) {
	i, found := slices.BinarySearchFunc(s.kinds, k, compareKinds)
	if found {
		i++
	}
	roomy := s.used < s.capacity-s.capacity/slotWasteShare
	for ; i < len(s.kinds) && s.kinds[i].share == k.share && (roomy || (s.kinds[i].size-k.size)*slotWasteShare <= s.kinds[i].size); i++ {
		c := s.classes[s.kinds[i]]
		if e := c.pick(s); e >= 0 {
			return c, e
		}
	}
	return nil, -1
}

// pick returns the extent of the class to allocate from, or -1.
func (c *slotClass) pick(s *Slots) int {
	if c.current >= 0 && s.extents[c.current].bucket < slotBuckets {
		return int(c.current)
	}
	if c.mask == 0 {
		return -1
	}
	return int(c.heads[63-bits.LeadingZeros64(c.mask)])
}

// firstEmpty returns the lowest empty extent of the share or of nobody that holds a
// slot of that size, or -1. Only the last extent can be too short, and it is asked for
// last.
func (s *Slots) firstEmpty(k slotKind) int {
	for s.emptyLow < len(s.empty) && s.empty[s.emptyLow] == 0 {
		s.emptyLow++
	}
	for i := s.emptyLow; i < len(s.empty); i++ {
		for w := s.empty[i]; w != 0; w &= w - 1 {
			e := i*64 + bits.TrailingZeros64(w)
			if x := &s.extents[e]; x.owned && x.share != k.share {
				continue
			}
			if s.extentLen(e) < k.size {
				return -1
			}
			return e
		}
	}
	return -1
}

// extentLen is the length of an extent in bytes.
func (s *Slots) extentLen(e int) int64 {
	return min(s.extentBytes, s.capacity-int64(e)*s.extentBytes)
}

// claim gives an empty extent to a class, which is made when it is new.
func (s *Slots) claim(e int, k slotKind) *slotClass {
	c := s.classes[k]
	if c == nil {
		c = &slotClass{slotKind: k, current: -1}
		for i := range c.heads {
			c.heads[i] = -1
		}
		s.classes[k] = c
		i, _ := slices.BinarySearchFunc(s.kinds, k, compareKinds)
		s.kinds = slices.Insert(s.kinds, i, k)
	}
	n := int(s.extentLen(e) / k.size)
	x := &s.extents[e]
	s.own(e, k.share)
	x.of, x.class, x.slots, x.free, x.low = c, k.size, int32(n), int32(n), 0
	x.slotMaps = s.newMaps(n)
	s.empty[e/64] &^= 1 << (e % 64)
	s.emptyCount--
	c.extents++
	s.link(c, e, 0)
	return c
}

// giveBack takes an extent without taken slots from its class.
func (s *Slots) giveBack(c *slotClass, e int) {
	s.unlink(c, e)
	x := &s.extents[e]
	s.spare = x.slotMaps
	passes := x.passes
	*x = slotExtent{share: x.share, owned: true}
	if !passes {
		s.setEmpty(e)
	}
	if c.current == int32(e) {
		c.current = -1
	}
	if c.extents--; c.extents == 0 {
		delete(s.classes, c.slotKind)
		i, _ := slices.BinarySearchFunc(s.kinds, c.slotKind, compareKinds)
		s.kinds = slices.Delete(s.kinds, i, i+1)
	}
}

// newMaps returns the arrays of an extent with n free slots. It uses those of
// the extent given back last when they have that length, so that an extent that
// comes and goes costs no garbage.
func (s *Slots) newMaps(n int) slotMaps {
	m := s.spare
	s.spare = slotMaps{}
	if len(m.owners) != n {
		words := (n + 63) / 64
		m = slotMaps{
			freeBits: make([]uint64, words),
			summary:  make([]uint64, (words+63)/64),
			owners:   make([]block.Handle, n),
		}
	}
	fillBits(m.freeBits, n)
	fillBits(m.summary, len(m.freeBits))
	return m
}

// fillBits sets the first n bits and clears the rest.
func fillBits(words []uint64, n int) {
	for i := range words {
		words[i] = ^uint64(0)
	}
	if r := n % 64; r != 0 {
		words[n/64] = 1<<r - 1
	}
}

// take marks slot i of extent e as taken.
func (s *Slots) take(c *slotClass, e, i int, owner block.Handle) {
	x := &s.extents[e]
	w := i / 64
	x.freeBits[w] &^= 1 << (i % 64)
	if x.freeBits[w] == 0 {
		x.summary[w/64] &^= 1 << (w % 64)
	}
	x.owners[i] = owner
	x.free--
	c.taken++
	s.used += c.size
	s.rebucket(c, e)
}

// lowestFree returns the first free slot of an extent that has one.
func (x *slotExtent) lowestFree() int {
	for x.summary[x.low] == 0 {
		x.low++
	}
	w := int(x.low)*64 + bits.TrailingZeros64(x.summary[x.low])
	return w*64 + bits.TrailingZeros64(x.freeBits[w])
}

// taken reports whether slot i is taken.
func (x *slotExtent) taken(i int) bool { return x.freeBits[i/64]&(1<<(i%64)) == 0 }

// locate returns extent and number of the taken slot at off.
func (s *Slots) locate(off int64) (e, i int) {
	if off < 0 || off >= s.capacity {
		panic(fmt.Sprintf("tiers: slot at %d of %d bytes", off, s.capacity))
	}
	e = int(off / s.extentBytes)
	rel := off % s.extentBytes
	x := &s.extents[e]
	if x.class == 0 || rel%x.class != 0 || rel/x.class >= int64(x.slots) || !x.taken(int(rel/x.class)) {
		panic(fmt.Sprintf("tiers: no taken slot at %d (extent %d, slots of %d)", off, e, x.class))
	}
	return e, int(rel / x.class)
}

// rebucket puts an extent into the list that its number of free slots says.
func (s *Slots) rebucket(c *slotClass, e int) {
	x := &s.extents[e]
	b := int32(slotBuckets)
	if x.free > 0 && !x.vacating {
		b = int32(int64(x.slots-x.free) * slotBuckets / int64(x.slots))
	}
	if b != x.bucket {
		s.unlink(c, e)
		s.link(c, e, b)
	}
}

// link puts an extent first into the list of a bucket.
func (s *Slots) link(c *slotClass, e int, b int32) {
	x := &s.extents[e]
	x.bucket, x.prev, x.next = b, -1, c.heads[b]
	if x.next >= 0 {
		s.extents[x.next].prev = int32(e)
	}
	c.heads[b] = int32(e)
	if b < slotBuckets {
		c.mask |= 1 << b
	}
}

// unlink takes an extent out of the list of its bucket.
func (s *Slots) unlink(c *slotClass, e int) {
	x := &s.extents[e]
	if x.next >= 0 {
		s.extents[x.next].prev = x.prev
	}
	if x.prev >= 0 {
		s.extents[x.prev].next = x.next
		return
	}
	c.heads[x.bucket] = x.next
	if x.next < 0 && x.bucket < slotBuckets {
		c.mask &^= 1 << x.bucket
	}
}
