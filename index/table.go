package index

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math/bits"

	"github.com/kvtier/kvtier/index/block"
)

// Table is the resident table: the blocks that local tiers hold or are about
// to, found by key in a few hundred nanoseconds. It lies outside the Go heap
// and takes about 130 bytes a block.
//
// All methods may be called by many goroutines at once. The callbacks that are
// said to run under a lock must be short and must not call the table; an entry
// they are given is valid until they return. A table that is closed is empty
// and takes nothing.
type Table struct {
	seed   maphash.Seed
	mem    memory
	shards [shardCount]shard
}

// NewTable makes an empty table. It fails when no memory can be mapped.
func NewTable() (*Table, error) {
	// The seed differs from table to table, so that nobody can choose keys that
	// meet in one slot.
	t := &Table{seed: maphash.MakeSeed()}
	for i := range t.shards {
		seg, err := t.mem.segment()
		if err != nil {
			_ = t.mem.close() // the mapping that failed is the error to tell
			return nil, err
		}
		t.shards[i].mu.dir = []*segment{seg}
	}
	return t, nil
}

// Close empties the table and gives its memory back. It is safe twice.
func (t *Table) Close() error {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.dir, s.mu.chunks, s.mu.taken, s.mu.free = nil, nil, 0, 0
		s.linked.Store(0)
	}
	return t.mem.close()
}

// Lookup finds a block by its key and returns a copy of its entry.
func (t *Table) Lookup(k block.Key) (block.Handle, Entry, bool) {
	hash := t.hash(k)
	n := shardOf(hash)
	s := &t.shards[n]
	s.mu.RLock()
	defer s.mu.RUnlock()
	if i, ok := s.find(hash, k); ok {
		return handle(n, i), *s.entry(i), true
	}
	return 0, Entry{}, false
}

// View calls fn with an entry under the shard's read lock, whether it is linked
// or not. It reports false when the handle is free.
func (t *Table) View(h block.Handle, fn func(e *Entry)) bool {
	n, i, ok := split(h)
	if !ok {
		return false
	}
	s := &t.shards[n]
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.life(i) == lifeFree {
		return false
	}
	fn(s.entry(i))
	return true
}

// Update is View under the shard's write lock: fn may change the entry.
func (t *Table) Update(h block.Handle, fn func(e *Entry)) bool {
	n, i, ok := split(h)
	if !ok {
		return false
	}
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life(i) == lifeFree {
		return false
	}
	fn(s.entry(i))
	return true
}

// UpdateKey finds a block by its key and calls fn under the shard's write lock.
// It reports whether the block was found.
func (t *Table) UpdateKey(k block.Key, fn func(h block.Handle, e *Entry)) bool {
	hash := t.hash(k)
	n := shardOf(hash)
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.find(hash, k)
	if ok {
		fn(handle(n, i), s.entry(i))
	}
	return ok
}

// Upsert finds or creates the entry of a key, whose hash is hashLen bytes long,
// and calls fn under the shard's write lock; a created entry is zero but for NS,
// Hash and HashLen. It returns the entry's handle, or 0 without calling fn when
// the table is full or closed or no memory can be mapped. Handles of freed
// entries are used again.
func (t *Table) Upsert(k block.Key, hashLen int, fn func(h block.Handle, e *Entry, created bool)) block.Handle {
	hash := t.hash(k)
	n := shardOf(hash)
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	i, found := s.find(hash, k)
	if !found {
		if !s.room(t, hash) || !s.take(t, &i) {
			return 0
		}
		e := s.entry(i)
		e.NS, e.Hash, e.HashLen = k.NS, k.Hash, uint8(hashLen)
		s.insert(hash, i)
		s.setLife(i, lifeLinked)
		s.linked.Add(1)
	}
	fn(handle(n, i), s.entry(i), !found)
	return handle(n, i)
}

// Settle is Update for the last step of an entry's life: when fn returns true,
// the entry is freed under the same lock, so that nobody can take it up in
// between. It reports whether the handle was known.
func (t *Table) Settle(h block.Handle, fn func(e *Entry) (free bool)) bool {
	n, i, ok := split(h)
	if !ok {
		return false
	}
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life(i) == lifeFree {
		return false
	}
	if fn(s.entry(i)) {
		s.unlink(t, i)
		s.give(i)
	}
	return true
}

// Detach is UpdateKey for taking a key away: when fn returns true, the entry is
// unlinked under the same lock, and stays known by its handle until it is freed.
// When the block is not found, which Detach reports, fn is called with 0 and nil.
func (t *Table) Detach(k block.Key, fn func(h block.Handle, e *Entry) (unlink bool)) bool {
	hash := t.hash(k)
	n := shardOf(hash)
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.find(hash, k)
	if !ok {
		fn(0, nil)
		return false
	}
	if fn(handle(n, i), s.entry(i)) {
		s.unlink(t, i)
	}
	return true
}

// Range calls fn with a copy of each linked entry from a handle on, in the order
// of handles, until fn returns false. No lock is held while fn runs, so it may
// call the table; what is created or unlinked meanwhile may be missed or seen.
func (t *Table) Range(from block.Handle, fn func(h block.Handle, e *Entry) bool) {
	first, row, ok := split(from)
	if !ok {
		first, row = 0, 0
	}
	var e Entry
	for more := true; more; row++ {
		more = false
		for n := first; n < shardCount; n++ {
			s := &t.shards[n]
			s.mu.RLock()
			linked := s.life(row) == lifeLinked
			more = more || row < s.mu.taken
			if linked {
				e = *s.entry(row)
			}
			s.mu.RUnlock()
			if linked && !fn(handle(n, row), &e) {
				return
			}
		}
		// The first row may be a part of one that says nothing of the others.
		more = more || first > 0
		first = 0
	}
}

// Len is the number of linked entries.
func (t *Table) Len() int {
	var n int64
	for i := range t.shards {
		n += t.shards[i].linked.Load()
	}
	return int(n)
}

// Bytes is the memory taken from the system for entries and hash index, which
// is touched up to less than one huge page more.
func (t *Table) Bytes() int64 { return t.mem.bytes() }

// window is how many keys LookupAll works on at a time. Each window takes the
// locks of its shards once and overlaps the cache misses of its keys.
const window = 64

// LookupAll looks up many hashes of one namespace, packed one behind the other
// with hashLen bytes each, and calls fn for each in order with its number and
// entry, nil when it is absent, until fn returns false. fn runs under the read
// locks of several shards. It panics when hashLen is not 1 to 32.
func (t *Table) LookupAll(ns block.NamespaceID, hashLen int, hashes []byte, fn func(i int, h block.Handle, e *Entry) bool) {
	if hashLen < 1 || hashLen > block.HashBytes {
		panic(fmt.Sprintf("index: hash length %d", hashLen))
	}
	n := len(hashes) / hashLen
	// Many matches end at their first keys: begin with a small window.
	for i, size := 0, window/8; i < n; size = min(2*size, window) {
		size = min(size, n-i)
		if !t.lookupWindow(ns, hashLen, hashes[i*hashLen:(i+size)*hashLen], i, fn) {
			return
		}
		i += size
	}
}

// lookupWindow looks up at most window hashes. Its loops are apart so that the
// loads of one key do not wait for those of the key before it.
func (t *Table) lookupWindow(ns block.NamespaceID, hashLen int, hashes []byte, base int, fn func(i int, h block.Handle, e *Entry) bool) bool {
	var (
		n     = len(hashes) / hashLen
		key   = block.Key{NS: ns}
		hash  [window]uint64
		at    [window]*segment
		slot  [window]uint32 // first of the probe sequence, then the first with the right tag
		tail  [window]byte
		locks uint32
	)
	for i := range n {
		copy(key.Hash[:hashLen], hashes[i*hashLen:])
		hash[i] = t.hash(key)
		locks |= 1 << shardOf(hash[i])
	}
	// Locks are taken in the order of shards, and a writer holds one lock only,
	// so nobody waits in a circle.
	for l := locks; l != 0; l &= l - 1 {
		t.shards[bits.TrailingZeros32(l)].mu.RLock()
	}
	defer func() {
		for l := locks; l != 0; l &= l - 1 {
			t.shards[bits.TrailingZeros32(l)].mu.RUnlock()
		}
	}()
	for i := range n {
		if at[i] = t.shards[shardOf(hash[i])].segment(hash[i]); at[i] != nil {
			slot[i] = at[i].slots[homeOf(hash[i])]
		}
	}
	for i := range n {
		if slot[i] == 0 {
			continue
		}
		tag := tagOf(hash[i])
		for p := homeOf(hash[i]); slot[i] != 0 && slot[i]&tagMask != tag; slot[i] = at[i].slots[p] {
			p = (p + 1) % segmentSlots
		}
		if slot[i] != 0 {
			e := t.shards[shardOf(hash[i])].entry(slot[i]&^tagMask - 1)
			tail[i] = e.HashLen | e.Hash[block.HashBytes-1] // loads both of its cache lines
		}
	}
	for i := range n {
		var (
			h block.Handle
			e *Entry
		)
		if slot[i] != 0 {
			copy(key.Hash[:hashLen], hashes[i*hashLen:])
			s := &t.shards[shardOf(hash[i])]
			if j, ok := s.find(hash[i], key); ok {
				h, e = handle(shardOf(hash[i]), j), s.entry(j)
			}
		}
		if !fn(base+i, h, e) {
			return false
		}
	}
	return true
}

func (t *Table) hash(k block.Key) uint64 {
	var b [block.HashBytes + 4]byte
	copy(b[:], k.Hash[:])
	binary.LittleEndian.PutUint32(b[block.HashBytes:], uint32(k.NS))
	return maphash.Bytes(t.seed, b[:])
}

// handle numbers entry i of shard n. Handles are dense as long as shards fill
// evenly, which the hash sees to.
func handle(n, i uint32) block.Handle { return block.Handle(i*shardCount + n + 1) }

// split is the reverse of handle; 0 is no handle.
func split(h block.Handle) (n, i uint32, ok bool) {
	if h == 0 {
		return 0, 0, false
	}
	return uint32(h-1) % shardCount, uint32(h-1) / shardCount, true
}

func (t *Table) hashOf(e *Entry) uint64 { return t.hash(block.Key{NS: e.NS, Hash: e.Hash}) }
