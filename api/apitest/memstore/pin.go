package memstore

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/index/block"
)

// Pin implements api.Store. Half of the capacity may be pinned.
func (s *Store) Pin(_ context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err != nil {
		return nil, err
	}
	out := make([]error, len(keys))
	for i, h := range keys {
		if err := s.pin(n, h); err != nil {
			out[i] = fmt.Errorf("pin %s: %w", h.Hex(hashLen), err)
		}
	}
	return out, nil
}

func (s *Store) pin(n *space, h block.Hash) error {
	e, _ := s.find(n, h)
	if e == nil {
		return block.ErrNotFound
	}
	if e.pinned {
		return nil
	}
	size := int64(len(e.data))
	if s.mu.pinned+size > s.opts.Capacity/2 {
		return fmt.Errorf("%w: %d of %d bytes are pinned, at most half may be", block.ErrNoSpace, s.mu.pinned, s.opts.Capacity)
	}
	e.pinned = true
	s.mu.pinned += size
	if s.opts.Durable {
		s.makeDurable(n, e)
	}
	return nil
}

// Unpin implements api.Store.
func (s *Store) Unpin(_ context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err != nil {
		return 0, err
	}
	count := 0
	for _, h := range keys {
		if e, _ := s.find(n, h); e != nil && s.unpin(e) {
			count++
		}
	}
	return count, nil
}

// unpin reports whether the block was pinned.
func (s *Store) unpin(e *entry) bool {
	if !e.pinned {
		return false
	}
	e.pinned = false
	s.mu.pinned -= int64(len(e.data))
	return true
}

// makeDurable brings a block to G3 as well.
func (s *Store) makeDurable(n *space, e *entry) {
	if e.durable {
		return
	}
	e.durable = true
	s.tellStored(n, e, block.G3)
}

// StartScrub implements api.Store: there is no medium to scrub.
func (s *Store) StartScrub(block.ScrubOptions) error {
	return fmt.Errorf("start scrub: %w: this store keeps nothing on a medium", block.ErrUnavailable)
}

// StopScrub implements api.Store.
func (s *Store) StopScrub() {}

// errNoObjects: there are no buckets.
var errNoObjects = fmt.Errorf("%w: this store has no object tier", block.ErrUnavailable)

// ListObjects implements api.Store, as do the calls below.
func (s *Store) ListObjects(context.Context, string, int) ([]block.ObjectInfo, string, error) {
	return nil, "", errNoObjects
}

// ObjectUsage implements api.Store.
func (s *Store) ObjectUsage(context.Context) ([]block.ObjectUsage, error) { return nil, errNoObjects }

// SweepObjects implements api.Store.
func (s *Store) SweepObjects(context.Context, func(block.ObjectSweep) error) error {
	return errNoObjects
}

// ImportObjects implements api.Store.
func (s *Store) ImportObjects(context.Context, func(block.ObjectImport) error) error {
	return errNoObjects
}
