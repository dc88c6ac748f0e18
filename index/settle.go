package index

import "github.com/kvtier/kvtier/index/block"

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
// It reports whether the block was found.
func (t *Table) Detach(k block.Key, fn func(h block.Handle, e *Entry) (unlink bool)) bool {
	hash := t.hash(k)
	n := shardOf(hash)
	s := &t.shards[n]
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.find(hash, k)
	if ok && fn(handle(n, i), s.entry(i)) {
		s.unlink(t, i)
	}
	return ok
}
