package tiers

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// namespaces are the open namespaces of a store.
type namespaces struct {
	catalog *index.Catalog
	mu      struct {
		sync.RWMutex
		byID   map[block.NamespaceID]*namespace
		byName map[string]*namespace
	}
	change sync.Mutex // held while one is made or changed, over the catalog's sync
}

// namespace is one of them.
type namespace struct {
	id     block.NamespaceID
	digest [32]byte
	// gate is held for reading while a block of the namespace is committed, and
	// for writing while Clear raises the epoch and unlinks everything, so that a
	// block is either cleared or of the new epoch.
	gate          sync.RWMutex
	state         atomic.Pointer[block.Namespace]
	blocks, bytes atomic.Int64
}

func (n *namespace) get() block.Namespace { return *n.state.Load() }

// as is the namespace itself if d is its descriptor.
func (n *namespace) as(d block.Descriptor) (*namespace, error) {
	if m := n.get().Desc.Differs(d); m != nil {
		return nil, fmt.Errorf("open namespace: %w", m)
	}
	return n, nil
}

func (s *namespaces) init(c *index.Catalog) error {
	s.catalog = c
	s.mu.byID = map[block.NamespaceID]*namespace{}
	s.mu.byName = map[string]*namespace{}
	all, err := c.Namespaces()
	if err != nil {
		return fmt.Errorf("read namespaces: %w", err)
	}
	for _, n := range all {
		s.add(n)
	}
	return nil
}

func (s *namespaces) add(n block.Namespace) *namespace {
	ns := &namespace{id: n.ID, digest: n.Desc.Digest()}
	ns.state.Store(&n)
	s.mu.Lock()
	s.mu.byID[n.ID] = ns
	s.mu.byName[n.Desc.Name] = ns
	s.mu.Unlock()
	return ns
}

func (s *namespaces) byID(id block.NamespaceID) (*namespace, error) {
	s.mu.RLock()
	n := s.mu.byID[id]
	s.mu.RUnlock()
	if n == nil {
		return nil, fmt.Errorf("namespace %d: %w", id, block.ErrNotFound)
	}
	return n, nil
}

func (s *namespaces) byName(name string) (*namespace, error) {
	s.mu.RLock()
	n := s.mu.byName[name]
	s.mu.RUnlock()
	if n == nil {
		return nil, fmt.Errorf("namespace %q: %w", name, block.ErrNotFound)
	}
	return n, nil
}

func (s *namespaces) name(id block.NamespaceID) string {
	n, err := s.byID(id)
	if err != nil {
		return ""
	}
	return n.get().Desc.Name
}

func (s *namespaces) tokens(id block.NamespaceID) uint32 {
	n, err := s.byID(id)
	if err != nil {
		return 0
	}
	return n.state.Load().Desc.TokensPerBlock
}

func (s *namespaces) count(id block.NamespaceID, blocks, bytes int64) {
	if n, err := s.byID(id); err == nil {
		n.blocks.Add(blocks)
		n.bytes.Add(bytes)
	}
}

func (s *namespaces) len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.mu.byID)
}

// open finds or makes a namespace. It is in the catalog, synced, before it is
// answered, since slots that carry its digest may follow at once.
func (s *namespaces) open(d block.Descriptor, ttl time.Duration) (*namespace, error) {
	if err := d.Validate(); err != nil {
		return nil, err
	}
	if ttl < 0 {
		return nil, fmt.Errorf("%w: namespace %q: ttl %v", block.ErrInvalid, d.Name, ttl)
	}
	if n, err := s.byName(d.Name); err == nil {
		return n.as(d)
	}
	s.change.Lock()
	defer s.change.Unlock()
	if n, err := s.byName(d.Name); err == nil {
		return n.as(d)
	}
	id, err := s.catalog.NewNamespaceID()
	if err != nil {
		return nil, fmt.Errorf("open namespace %q: %w", d.Name, err)
	}
	epoch, err := s.catalog.FirstEpoch(d)
	if err != nil {
		return nil, fmt.Errorf("open namespace %q: %w", d.Name, err)
	}
	n := block.Namespace{ID: id, Desc: d, Epoch: epoch, TTL: ttl, Created: time.Now()}
	if err := s.catalog.PutNamespace(n); err != nil {
		return nil, fmt.Errorf("open namespace %q: %w", d.Name, err)
	}
	return s.add(n), nil
}

// fixHashLen makes a hash length the namespace's if it has none yet, or checks it.
func (s *namespaces) fixHashLen(n *namespace, hashLen int) error {
	have := n.state.Load()
	if have.HashLen == 0 && block.ValidHashLen(hashLen) {
		s.change.Lock()
		defer s.change.Unlock()
		if have = n.state.Load(); have.HashLen == 0 {
			fixed := *have
			fixed.HashLen = hashLen
			if err := s.catalog.PutNamespace(fixed); err != nil {
				return fmt.Errorf("fix the hash length of namespace %q: %w", fixed.Desc.Name, err)
			}
			n.state.Store(&fixed)
			return nil
		}
	}
	return have.CheckHashLen(hashLen)
}

// OpenNamespace opens or creates a namespace; see api.Store.
func (s *Store) OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error) {
	if err := ctx.Err(); err != nil {
		return block.Namespace{}, err
	}
	n, err := s.names.open(d, ttl)
	if err != nil {
		return block.Namespace{}, err
	}
	return n.get(), nil
}

// Namespace finds an open namespace by name.
func (s *Store) Namespace(name string) (block.Namespace, error) {
	n, err := s.names.byName(name)
	if err != nil {
		return block.Namespace{}, err
	}
	return n.get(), nil
}

// NamespaceByID finds an open namespace by its handle.
func (s *Store) NamespaceByID(id block.NamespaceID) (block.Namespace, error) {
	n, err := s.names.byID(id)
	if err != nil {
		return block.Namespace{}, err
	}
	return n.get(), nil
}

// Namespaces lists the open namespaces by name.
func (s *Store) Namespaces() []block.NamespaceInfo {
	s.names.mu.RLock()
	out := make([]block.NamespaceInfo, 0, len(s.names.mu.byID))
	for _, n := range s.names.mu.byID {
		out = append(out, block.NamespaceInfo{Namespace: n.get(), Blocks: n.blocks.Load(), Bytes: n.bytes.Load()})
	}
	s.names.mu.RUnlock()
	slices.SortFunc(out, func(a, b block.NamespaceInfo) int { return strings.Compare(a.Desc.Name, b.Desc.Name) })
	return out
}
