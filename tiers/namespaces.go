package tiers

import (
	"context"
	"fmt"
	"maps"
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
		// Of a partitioned G2: see Options.Share. nil: all are one share's.
		share  func(namespace string) string
		shares map[string]uint64 // numbers, by what share answered
	}
	change changing
}

// changing is held while a namespace is made or changed, over the catalog's sync.
// That may take as long as the disk wants, and a caller has a deadline.
type changing chan struct{}

func (c changing) lock(ctx context.Context) error {
	select {
	case c <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c changing) unlock() { <-c }

// do runs f, held. When ctx ends before f does, f goes on.
func (c changing) do(ctx context.Context, f func() error) error {
	if err := c.lock(ctx); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		defer c.unlock()
		done <- f()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// namespace is one of them.
type namespace struct {
	id     block.NamespaceID
	digest [32]byte
	share  uint64 // in which chunks of G2 its blocks lie
	// gate is held for reading while a block of the namespace is committed, and
	// for writing while Clear raises the epoch and unlinks everything, so that a
	// block is either cleared or of the new epoch.
	gate          sync.RWMutex
	state         atomic.Pointer[block.Namespace]
	blocks, bytes atomic.Int64
	lookups       lookups
	prefill       learnedPrefill
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
	s.change = make(changing, 1)
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
	s.shareLocked(ns)
	s.mu.byID[n.ID] = ns
	s.mu.byName[n.Desc.Name] = ns
	s.mu.Unlock()
	return ns
}

// partition tells namespaces apart by what share says of their names. It is for those
// of which nobody has blocks yet.
func (s *namespaces) partition(share func(namespace string) string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.share, s.mu.shares = share, map[string]uint64{}
	for _, ns := range s.mu.byID {
		s.shareLocked(ns)
	}
}

func (s *namespaces) shareLocked(ns *namespace) {
	if s.mu.share == nil {
		return
	}
	k := s.mu.share(ns.get().Desc.Name)
	if s.mu.shares[k] == 0 {
		s.mu.shares[k] = uint64(len(s.mu.shares)) + 1
	}
	ns.share = s.mu.shares[k]
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
func (s *namespaces) open(ctx context.Context, d block.Descriptor, ttl time.Duration) (*namespace, error) {
	if err := d.Validate(); err != nil {
		return nil, err
	}
	if ttl < 0 {
		return nil, fmt.Errorf("%w: namespace %q: ttl %v", block.ErrInvalid, d.Name, ttl)
	}
	if n, err := s.byName(d.Name); err == nil {
		return n.as(d)
	}
	err := s.change.do(ctx, func() error { return s.make(d, ttl) })
	if err != nil {
		return nil, fmt.Errorf("open namespace %q: %w", d.Name, err)
	}
	n, err := s.byName(d.Name)
	if err != nil {
		return nil, err
	}
	return n.as(d)
}

// make makes a namespace, unless there is one of that name. Only one call runs at
// a time.
func (s *namespaces) make(d block.Descriptor, ttl time.Duration) error {
	if _, err := s.byName(d.Name); err == nil {
		return nil
	}
	id, err := s.catalog.NewNamespaceID()
	if err != nil {
		return err
	}
	epoch, err := s.catalog.FirstEpoch(d)
	if err != nil {
		return err
	}
	n := block.Namespace{ID: id, Desc: d, Epoch: epoch, TTL: ttl, Created: time.Now()}
	if err := s.catalog.PutNamespace(n); err != nil {
		return err
	}
	s.add(n)
	return nil
}

// fixHashLen makes a hash length the namespace's if it has none yet, or checks it.
func (s *namespaces) fixHashLen(ctx context.Context, n *namespace, hashLen int) error {
	have := n.state.Load()
	if have.HashLen == 0 && block.ValidHashLen(hashLen) {
		err := s.change.do(ctx, func() error {
			fixed := *n.state.Load()
			if fixed.HashLen != 0 {
				return nil
			}
			fixed.HashLen = hashLen
			if err := s.catalog.PutNamespace(fixed); err != nil {
				return err
			}
			n.state.Store(&fixed)
			return nil
		})
		if err != nil {
			return fmt.Errorf("fix the hash length of namespace %q: %w", have.Desc.Name, err)
		}
		have = n.state.Load()
	}
	return have.CheckHashLen(hashLen)
}

// OpenNamespace opens or creates a namespace; see api.Store.
func (s *Store) OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error) {
	if err := ctx.Err(); err != nil {
		return block.Namespace{}, err
	}
	n, err := s.names.open(ctx, d, ttl)
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

// all lists them by name.
func (s *namespaces) all() []*namespace {
	s.mu.RLock()
	out := slices.Collect(maps.Values(s.mu.byID))
	s.mu.RUnlock()
	slices.SortFunc(out, func(a, b *namespace) int {
		return strings.Compare(a.state.Load().Desc.Name, b.state.Load().Desc.Name)
	})
	return out
}

// Namespaces lists the open namespaces by name.
func (s *Store) Namespaces() []block.NamespaceInfo {
	all := s.names.all()
	out := make([]block.NamespaceInfo, len(all))
	for i, n := range all {
		out[i] = block.NamespaceInfo{Namespace: n.get(), Blocks: n.blocks.Load(), Bytes: n.bytes.Load()}
	}
	return out
}
