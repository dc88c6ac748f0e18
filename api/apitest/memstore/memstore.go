// Package memstore is an api.Store in plain memory, for tests of the API's
// server and client. It keeps every rule of the contract and has none of a real
// store's machinery: no device, one lock, and eviction only where it is asked for.
package memstore

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

var _ api.Store = (*Store)(nil)

// reservationLife is how long a reservation may stay unfilled.
const reservationLife = time.Minute

// Options are what a store may be told.
type Options struct {
	Capacity int64 // bytes of payload, reservations included; 0: 64 MiB
	Durable  bool  // accept puts to G3
	Evict    bool  // make room by dropping the oldest block that nobody holds
	Events   int   // that are kept for watchers at least; 0: 4096
	Shared   int64 // bytes of a memory file that grants lie in, for clients on this host; 0: none
}

type entry struct {
	hash    block.Hash
	parent  block.Hash
	hasPar  bool
	data    []byte
	sum     block.Sum
	expires time.Time
	durable bool
	pinned  bool
	at      place
	leases  int
	born    uint64 // grows from block to block
}

type space struct {
	block.Namespace
	blocks map[block.Hash]*entry
	filled map[block.Hash]int // reservations under way
}

type lease struct {
	until   time.Time
	blocks  []*entry
	session uint64
}

type reservation struct {
	ns      *space
	hash    block.Hash
	data    []byte
	got     int64
	opts    block.PutOptions
	expires time.Time
}

// Store is the store.
type Store struct {
	opts        Options
	started     time.Time
	incarnation uint64

	mu struct {
		sync.Mutex
		byID         map[block.NamespaceID]*space
		byName       map[string]*space
		lastNS       block.NamespaceID
		used         int64
		freed        chan struct{} // closed and replaced when room comes free
		leases       map[uint64]*lease
		reservations map[uint64]*reservation
		grants       map[uint64]*grant
		shared       shared
		prefetches   map[string]context.CancelFunc
		events       events
		pinned       int64 // bytes
		born         uint64
		misses       map[string]int64
		removed      map[string]int64
		stats        block.Stats // the counters that have no other place
		refused      int64
		policy       string // see policies
	}
}

// New makes an empty store. It panics when the host has no memory files, and
// Options.Shared wants one.
func New(o *Options) *Store {
	s := &Store{started: time.Now(), incarnation: rand.Uint64() | 1}
	if o != nil {
		s.opts = *o
	}
	if s.opts.Capacity == 0 {
		s.opts.Capacity = 64 << 20
	}
	if s.opts.Events == 0 {
		s.opts.Events = 4096
	}
	s.mu.byID = make(map[block.NamespaceID]*space)
	s.mu.byName = make(map[string]*space)
	s.mu.freed = make(chan struct{})
	s.mu.leases = make(map[uint64]*lease)
	s.mu.reservations = make(map[uint64]*reservation)
	s.mu.grants = make(map[uint64]*grant)
	s.mu.prefetches = make(map[string]context.CancelFunc)
	s.mu.events.next = make(chan struct{})
	s.mu.misses = make(map[string]int64)
	s.mu.removed = make(map[string]int64)
	s.mu.policy = policies[0]
	if s.opts.Shared > 0 {
		if err := s.share(s.opts.Shared); err != nil {
			panic(err)
		}
	}
	return s
}

// OpenNamespace implements api.Store.
func (s *Store) OpenNamespace(_ context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error) {
	if err := d.Validate(); err != nil {
		return block.Namespace{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok := s.mu.byName[d.Name]; ok {
		if m := n.Desc.Differs(d); m != nil {
			return block.Namespace{}, m
		}
		return n.Namespace, nil
	}
	s.mu.lastNS++
	n := &space{
		Namespace: block.Namespace{ID: s.mu.lastNS, Desc: d, TTL: ttl, Created: time.Now().Truncate(time.Millisecond)},
		blocks:    make(map[block.Hash]*entry), filled: make(map[block.Hash]int),
	}
	s.mu.byID[n.ID], s.mu.byName[d.Name] = n, n
	return n.Namespace, nil
}

// Namespace implements api.Store.
func (s *Store) Namespace(name string) (block.Namespace, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.mu.byName[name]
	if !ok {
		return block.Namespace{}, fmt.Errorf("namespace %q: %w", name, block.ErrNotFound)
	}
	return n.Namespace, nil
}

// NamespaceByID implements api.Store.
func (s *Store) NamespaceByID(id block.NamespaceID) (block.Namespace, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.space(id)
	if err != nil {
		return block.Namespace{}, err
	}
	return n.Namespace, nil
}

func (s *Store) space(id block.NamespaceID) (*space, error) {
	n, ok := s.mu.byID[id]
	if !ok {
		return nil, fmt.Errorf("namespace handle %d: %w", id, block.ErrNotFound)
	}
	return n, nil
}

// keys finds a namespace and splits packed hashes of it.
func (s *Store) keys(id block.NamespaceID, hashLen int, hashes []byte) (*space, []block.Hash, error) {
	n, err := s.space(id)
	if err != nil {
		return nil, nil, err
	}
	if err := n.CheckHashLen(hashLen); err != nil {
		return nil, nil, err
	}
	out := make([]block.Hash, len(hashes)/hashLen)
	for i := range out {
		copy(out[i][:], hashes[i*hashLen:(i+1)*hashLen])
	}
	return n, out, nil
}

// Namespaces implements api.Store.
func (s *Store) Namespaces() []block.NamespaceInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []block.NamespaceInfo
	for _, n := range s.mu.byName {
		i := block.NamespaceInfo{Namespace: n.Namespace, Blocks: int64(len(n.blocks))}
		for _, e := range n.blocks {
			i.Bytes += int64(len(e.data))
		}
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b block.NamespaceInfo) int { return bytes.Compare([]byte(a.Desc.Name), []byte(b.Desc.Name)) })
	return out
}

// find is the block of a key, or why there is none.
func (s *Store) find(n *space, h block.Hash) (*entry, block.MissReason) {
	e, ok := n.blocks[h]
	switch {
	case ok && !e.expires.IsZero() && !time.Now().Before(e.expires):
		s.remove(n, e, block.Expired)
		return nil, block.MissExpired
	case ok:
		return e, block.Hit
	case n.filled[h] > 0:
		return nil, block.MissPending
	}
	return nil, block.MissAbsent
}

func (e *entry) tiers() []block.TierID {
	if e.durable {
		return []block.TierID{block.G2, block.G3}
	}
	return []block.TierID{block.G2}
}

func (s *Store) remove(n *space, e *entry, why block.Reason) {
	s.forget(n, e)
	s.mu.removed[why.String()]++
	tiers := e.tiers()
	for i, t := range tiers {
		ev := n.event(block.EventRemoved, e)
		ev.Tier, ev.Reason, ev.Last = t, why, i == len(tiers)-1
		s.tell(ev)
	}
}

// forget takes a block out of its namespace, and its pin with it.
func (s *Store) forget(n *space, e *entry) {
	delete(n.blocks, e.hash)
	s.unpin(e)
	s.free(int64(len(e.data)))
}

func (s *Store) free(n int64) {
	s.mu.used -= n
	close(s.mu.freed)
	s.mu.freed = make(chan struct{})
}

func (n *space) event(k block.EventKind, e *entry) block.Event {
	return block.Event{
		Kind: k, NS: n.Desc.Name, Hash: e.hash, Hlen: uint8(n.HashLen), Parent: e.parent, HasPar: e.hasPar, Len: uint32(len(e.data)),
	}
}

// errNoPlans: what there is is in memory, and nothing is known of how fast that is read.
var errNoPlans = fmt.Errorf("plan: %w: this store does not know how fast it is", block.ErrUnavailable)

// Match implements api.Store.
func (s *Store) Match(_ context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err != nil {
		return err
	}
	if o.Plan != nil {
		return errNoPlans
	}
	*res = block.MatchResult{Blocks: res.Blocks[:0]}
	gap := false
	var hits []*entry
	for _, h := range keys {
		e, why := s.find(n, h)
		var f block.Found
		switch why {
		case block.Hit:
			f = block.Found{State: block.Resident, Tier: block.G2, Len: uint32(len(e.data))}
			hits = append(hits, e)
			if !gap {
				res.Prefix++
			}
		case block.MissPending:
			f.State = block.Pending
		}
		gap = gap || e == nil
		res.Blocks = append(res.Blocks, f)
		if gap && !o.All {
			break
		}
	}
	if o.Lease > 0 && len(hits) > 0 {
		res.Lease = s.lease(hits, o.Lease, o.Session)
	}
	return nil
}

// Locate implements api.Store.
func (s *Store) Locate(_ context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([][]block.Located, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err != nil {
		return nil, err
	}
	out := make([][]block.Located, len(keys))
	for i, h := range keys {
		e, _ := s.find(n, h)
		if e == nil {
			continue
		}
		for _, t := range e.tiers() {
			out[i] = append(out[i], block.Located{Tier: t, Place: block.PlaceAt(uint8(t), 512), Len: uint32(len(e.data))})
		}
	}
	return out, nil
}

// Get implements api.Store.
func (s *Store) Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	if o.Plan != nil {
		return errNoPlans
	}
	for i, w := range want {
		p, err := s.payload(ctx, ns, hashLen, w)
		if err != nil {
			return err
		}
		p.Held = i+1 < len(want)
		if err := use(i, p); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) payload(ctx context.Context, ns block.NamespaceID, hashLen int, w block.Wanted) (block.Payload, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, _, err := s.keys(ns, hashLen, nil)
	if err != nil {
		return block.Payload{}, err
	}
	if ctx.Err() != nil {
		s.mu.misses[block.MissDeadline.String()]++
		return block.Payload{Reason: block.MissDeadline}, nil
	}
	e, why := s.find(n, w.Hash)
	if e == nil {
		s.mu.misses[why.String()]++
		return block.Payload{Reason: why}, nil
	}
	total := int64(len(e.data))
	if w.Length == 0 {
		w.Length = max(total-w.Offset, 0)
	}
	if w.Offset < 0 || w.Length < 0 || w.Offset > total || w.Length > total-w.Offset {
		return block.Payload{}, fmt.Errorf("%w: range %d:%d of block %s: it has %d bytes", block.ErrInvalid, w.Offset, w.Length, w.Hash.Hex(hashLen), total)
	}
	// Blocks are immutable and never reused here, so the bytes stay right when
	// the lock is gone.
	return block.Payload{Tier: block.G2, Total: uint32(total), Sum: e.sum, Bytes: e.data[w.Offset : w.Offset+w.Length]}, nil
}

// ReportPrefill implements api.Store.
func (s *Store) ReportPrefill(ns block.NamespaceID, reports []block.PrefillReport) error {
	if _, err := s.NamespaceByID(ns); err != nil {
		return err
	}
	for _, r := range reports {
		if err := r.Check(); err != nil {
			return err
		}
	}
	return errNoPlans
}

// Prefetch implements api.Store.
func (s *Store) Prefetch(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error {
	if err := o.Check(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	id := o.ID
	s.mu.Lock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err == nil && id != "" {
		if _, taken := s.mu.prefetches[id]; taken {
			err = fmt.Errorf("%w: prefetch request id %q: in use", block.ErrInvalid, id)
		} else {
			s.mu.prefetches[id] = cancel
		}
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if id != "" {
			delete(s.mu.prefetches, id)
		}
	}()
	for i, h := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.mu.Lock()
		e, why := s.find(n, h)
		s.mu.stats.Prefetch.Done++
		s.mu.Unlock()
		p := block.Progress{Index: i, Reason: why}
		if e != nil {
			p.Tier = block.G2
		}
		if err := progress(p); err != nil {
			return err
		}
	}
	return nil
}

// CancelPrefetch implements api.Store.
func (s *Store) CancelPrefetch(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	cancel, ok := s.mu.prefetches[id]
	if !ok {
		return fmt.Errorf("prefetch %q: %w", id, block.ErrNotFound)
	}
	cancel()
	return nil
}

// Delete implements api.Store.
func (s *Store) Delete(_ context.Context, ns block.NamespaceID, hashLen int, hashes []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, keys, err := s.keys(ns, hashLen, hashes)
	if err != nil {
		return 0, err
	}
	count := 0
	for _, h := range keys {
		if e, _ := s.find(n, h); e != nil {
			s.remove(n, e, block.Deleted)
			count++
		}
	}
	return count, nil
}

// Clear implements api.Store.
func (s *Store) Clear(_ context.Context, ns block.NamespaceID) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.space(ns)
	if err != nil {
		return 0, err
	}
	count := int64(len(n.blocks))
	for _, e := range n.blocks {
		s.forget(n, e)
	}
	n.Epoch++
	s.mu.removed[block.Deleted.String()] += count
	s.tell(block.Event{Kind: block.EventCleared, NS: n.Desc.Name, Count: count})
	return count, nil
}

// List implements api.Store. The order is that of the hashes, and the cursor
// the last one listed.
func (s *Store) List(_ context.Context, ns block.NamespaceID, cursor string, limit int) ([]block.ListEntry, string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.space(ns)
	if err != nil {
		return nil, "", err
	}
	after, err := hex.DecodeString(cursor)
	if err != nil {
		return nil, "", fmt.Errorf("%w: cursor %q: not one that a listing gave", block.ErrInvalid, cursor)
	}
	var out []block.ListEntry
	for _, e := range n.blocks {
		if cursor != "" && bytes.Compare(e.hash[:], after) <= 0 {
			continue
		}
		out = append(out, block.ListEntry{
			Hash: e.hash, Parent: e.parent, HasPar: e.hasPar, Len: uint32(len(e.data)), Sum: e.sum, Tiers: e.tiers(), Expires: e.expires,
			Pinned: e.pinned,
		})
	}
	slices.SortFunc(out, func(a, b block.ListEntry) int { return bytes.Compare(a.Hash[:], b.Hash[:]) })
	if len(out) <= limit {
		return out, "", nil
	}
	out = out[:limit]
	return out, out[limit-1].Hash.String(), nil
}

// Corrupt flips a byte of a stored block, for tests of what checks it.
func (s *Store) Corrupt(ns block.NamespaceID, h block.Hash) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.mu.byID[ns].blocks[h]
	e.data = bytes.Clone(e.data)
	e.data[len(e.data)/2] ^= 1
}

func sumOf(p []byte) block.Sum { return xxh3.Hash128(p).Bytes() }
