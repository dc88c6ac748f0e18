package tiers

import (
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// mourning knows what is being deleted or cleared while an import of a bucket runs: the
// import read the tombstones before, and must not raise what has got one since. What was
// under way when it began counts, too: its tombstones may not be there yet.
type mourning struct {
	mu struct {
		sync.Mutex
		keys   map[block.Key]int               // being deleted, each with how many do so
		spaces map[block.NamespaceID]*clearing // being cleared, or without their tombstones
		// deleted are the keys since the import began, nil while there is none; full says
		// that there were too many.
		deleted map[block.Key]struct{}
		full    bool
	}
}

// clearing counts the calls that clear a namespace.
type clearing struct {
	now, begun int // under way, and ever
	// failed, if not 0, is how many had begun when one ended without its tombstones: an import
	// could raise what it cleared until one that begins later succeeds.
	failed int
}

func (m *mourning) init() {
	m.mu.keys, m.mu.spaces = map[block.Key]int{}, map[block.NamespaceID]*clearing{}
}

// begin notes keys that are going to be deleted, before they leave the table.
func (m *mourning) begin(keys []block.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range keys {
		m.mu.keys[k]++
		m.note(k)
	}
}

// note notes a key for the import that runs. The caller holds mu.
func (m *mourning) note(k block.Key) {
	switch {
	case m.mu.deleted == nil:
	case len(m.mu.deleted) < maxMourned:
		m.mu.deleted[k] = struct{}{}
	default:
		m.mu.full = true
	}
}

// end notes that tombstones of keys are written, or owed.
func (m *mourning) end(keys []block.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range keys {
		if m.mu.keys[k]--; m.mu.keys[k] == 0 {
			delete(m.mu.keys, k)
		}
	}
}

// clearing notes that a namespace is going to be cleared, before its epoch is raised. What
// it returns is to be called at the end, with whether the tombstones were written. o may be
// nil.
func (o *objects) clearing(ns block.NamespaceID) func(buried *bool) {
	if o == nil {
		return func(*bool) {}
	}
	m := &o.mourning
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.mu.spaces[ns]
	if c == nil {
		c = &clearing{}
		m.mu.spaces[ns] = c
	}
	c.now++
	c.begun++
	mine := c.begun
	return func(buried *bool) {
		m.mu.Lock()
		defer m.mu.Unlock()
		c.now--
		if !*buried {
			c.failed = c.begun
		} else if mine > c.failed {
			c.failed = 0
		}
		if c.now == 0 && c.failed == 0 {
			delete(m.mu.spaces, ns)
		}
	}
}

// watch begins the time of an import. unclear are the namespaces that it must leave out.
func (m *mourning) watch() (unclear map[block.NamespaceID]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.deleted, m.mu.full = map[block.Key]struct{}{}, false
	for k := range m.mu.keys {
		m.note(k)
	}
	unclear = map[block.NamespaceID]bool{}
	for ns := range m.mu.spaces {
		unclear[ns] = true
	}
	return unclear
}

func (m *mourning) unwatch() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.deleted = nil
}

// mourned reports whether a key was deleted since the import began.
func (m *mourning) mourned(k block.Key) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.mu.deleted[k]
	return ok
}

// lost says why it is not known what was deleted since the import began, if so. What is
// deleted later than it says so is dropped behind what the import does now.
func (m *mourning) lost() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.full {
		return fmt.Errorf("%w: more than %d blocks were deleted while the import ran; import again", block.ErrUnavailable, maxMourned)
	}
	return nil
}
