package tiers_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// fakeBucket keeps objects in memory. Real servers are e2e's: here a test says what a bucket
// does, and sees what it is asked for.
type fakeBucket struct {
	mu      sync.Mutex
	objects map[string][]byte
	made    map[string]time.Time
	calls   map[string]int
	// before, if not nil, comes ahead of each call, without the lock; what it fails with, the
	// call fails with.
	before func(op, key string) error
	// spoiled is how many of the next reads of packed objects give wrong bytes; less than 0:
	// all reads, also of what else there is.
	spoiled int
	page    int // objects in a page of a list; 0: all
	// hung, if not nil, has calls wait for its end, or that of their context.
	hung chan struct{}
}

func newFakeBucket() *fakeBucket {
	return &fakeBucket{objects: map[string][]byte{}, made: map[string]time.Time{}, calls: map[string]int{}}
}

func (b *fakeBucket) begin(ctx context.Context, op, key string) error {
	b.mu.Lock()
	b.calls[op]++
	before, hung := b.before, b.hung
	b.mu.Unlock()
	if hung != nil {
		select {
		case <-hung:
		case <-ctx.Done():
		}
	}
	if before != nil {
		if err := before(op, key); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (b *fakeBucket) String() string { return "fake://bucket/" }

func (b *fakeBucket) Check(ctx context.Context) error { return b.begin(ctx, "check", "") }

func (b *fakeBucket) Answers(ctx context.Context) bool {
	_ = b.begin(ctx, "answers", "") // a refusal is an answer
	return ctx.Err() == nil
}

func (b *fakeBucket) Get(ctx context.Context, key string, off int64, dst [][]byte) error {
	if err := b.begin(ctx, "get", key); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	o, ok := b.objects[key]
	if !ok {
		return fmt.Errorf("get %s: %w", key, xfer.ErrNotFound)
	}
	spoiled := b.spoiled < 0
	if b.spoiled > 0 && strings.HasPrefix(key, "blocks/") {
		b.spoiled--
		spoiled = true
	}
	for _, d := range dst {
		if off+int64(len(d)) > int64(len(o)) {
			return fmt.Errorf("get %s: %w", key, xfer.ErrShort)
		}
		off += int64(copy(d, o[off:]))
		if spoiled {
			d[len(d)/2] ^= 1
		}
	}
	return nil
}

func (b *fakeBucket) Put(ctx context.Context, key string, src [][]byte, ifAbsent bool) error {
	if err := b.begin(ctx, "put", key); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, there := b.objects[key]; there && ifAbsent {
		return bucket.ErrExists
	}
	b.objects[key], b.made[key] = bytes.Join(src, nil), time.Now()
	return nil
}

func (b *fakeBucket) Delete(ctx context.Context, keys []string) error {
	for _, k := range keys {
		if err := b.begin(ctx, "delete", k); err != nil {
			return err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range keys {
		delete(b.objects, k)
	}
	return nil
}

func (b *fakeBucket) List(ctx context.Context, prefix, cursor string) (out []bucket.Object, next string, err error) {
	if err := b.begin(ctx, "list", prefix); err != nil {
		return nil, "", err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, o := range b.objects {
		if strings.HasPrefix(k, prefix) && k > cursor {
			out = append(out, bucket.Object{Key: k, Bytes: int64(len(o)), Modified: b.made[k]})
		}
	}
	slices.SortFunc(out, func(a, b bucket.Object) int { return strings.Compare(a.Key, b.Key) })
	if b.page > 0 && len(out) > b.page {
		out = out[:b.page]
		next = out[b.page-1].Key
	}
	return out, next, nil
}

// has reports whether an object is there.
func (b *fakeBucket) has(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.objects[key]
	return ok
}

// drop removes objects behind the store's back, and says how many.
func (b *fakeBucket) drop(which func(key string) bool) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.objects {
		if which(k) {
			delete(b.objects, k)
			n++
		}
	}
	return n
}

// fail has the calls that match fail from now on, or none with nil.
func (b *fakeBucket) fail(before func(op, key string) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.before = before
}

// count is how many objects there are whose keys begin with prefix.
func (b *fakeBucket) count(prefix string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.objects {
		if strings.HasPrefix(k, prefix) {
			n++
		}
	}
	return n
}

func (b *fakeBucket) asked(op string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls[op]
}

// damage changes every packed object.
func (b *fakeBucket) damage(change func(o []byte)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, o := range b.objects {
		if strings.HasPrefix(k, "blocks/") {
			change(o)
		}
	}
}

// hang has calls get no answer until goOn is called.
func (b *fakeBucket) hang() (goOn func()) {
	hung := make(chan struct{})
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hung = hung
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.hung = nil
		close(hung)
	})
}

// spoil has the next n reads of packed objects give wrong bytes, or with -1 all reads.
func (b *fakeBucket) spoil(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spoiled = n
}

// farOptions are those of a small store over a bucket.
func farOptions(t testing.TB, b *fakeBucket) tiers.Options {
	return tiers.Options{
		Dir: t.TempDir(), DRAM: 16 << 20, Slabs: slabIn(t, 32<<20),
		Objects: []bucket.Service{b}, Cluster: "test", ProbeEvery: 20 * time.Millisecond,
	}
}

// sendDown has blocks leave all local tiers.
func sendDown(t testing.TB, s *tiers.Store, ns block.Namespace, is ...int) {
	t.Helper()
	for _, id := range []block.TierID{block.G2, block.G3} {
		for _, i := range is {
			eventually(t, fmt.Sprintf("block %d has left %v", i, id), func() bool {
				if !strings.Contains(tiersOf(t, s, ns, i), id.String()) {
					return true
				}
				if h := tiers.HandleOf(s, keyOf(ns, i)); h != 0 {
					tiers.Evict(s, id, h)
				}
				return false
			})
		}
	}
}

// mustPutDown is mustPut, again while G3 has no room: what leaves it waits for the bucket.
func mustPutDown(t testing.TB, s *tiers.Store, ns block.Namespace, i, n int, o block.PutOptions) {
	t.Helper()
	eventually(t, fmt.Sprintf("there is room for block %d", i), func() bool {
		err := put(s, ns, i, payload(i, n), o)
		if err != nil && !errors.Is(err, block.ErrNoSpace) {
			t.Fatalf("put %d: %v", i, err)
		}
		return err == nil
	})
}

// chain puts blocks, each the next one's parent.
func chain(t testing.TB, s *tiers.Store, ns block.Namespace, n, size int) (is []int) {
	t.Helper()
	for i := range n {
		o := block.PutOptions{Durable: block.G3}
		if i > 0 {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		mustPut(t, s, ns, i, size, o)
		is = append(is, i)
	}
	return is
}

func g4(s *tiers.Store) block.TierStats {
	for _, t := range s.Stats().Tiers {
		if t.Tier == block.G4 {
			return t
		}
	}
	return block.TierStats{}
}

// TestObjectTier: blocks leave the local tiers into objects, are found there, come back as
// they were, also after a restart, and nothing is written twice.
func TestObjectTier(t *testing.T) {
	b := newFakeBucket()
	o := farOptions(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	const n, size = 12, 70_000
	is := chain(t, s, ns, n, size)
	var hs []byte
	for _, i := range is {
		hs = append(hs, pack(hashOf(i))...)
	}
	sendDown(t, s, ns, is...)
	check := func(s *tiers.Store) {
		t.Helper()
		var res block.MatchResult
		if err := s.Match(t.Context(), ns.ID, hashLen, append(slices.Clone(hs), pack(hashOf(99))...), block.MatchOptions{}, &res); err != nil {
			t.Fatal(err)
		}
		if res.Prefix != n || len(res.Blocks) != n+1 || res.Blocks[0] != (block.Found{State: block.Resident, Tier: block.G4, Len: size}) {
			t.Errorf("match %+v", res)
		}
		if st := g4(s); st.Blocks != n || st.Payload != n*size {
			t.Errorf("g4 has %d blocks of %d bytes", st.Blocks, st.Payload)
		}
	}
	check(s)
	s = reopen(t, s, o)
	check(s)
	// Into memory of the caller's, and by a get that leaves them where they are.
	if _, p, err := get(s, ns, 3, block.GetOptions{NoPromote: true}); err != nil || p.Reason != block.Hit || p.Tier != block.G4 {
		t.Errorf("get without promotion: %+v, %v", p, err)
	}
	if got := tiersOf(t, s, ns, 3); got != "g4" {
		t.Errorf("block 3 is in %s", got)
	}
	before := b.asked("get")
	var want []block.Wanted
	for _, i := range is {
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	if err := s.Get(t.Context(), ns.ID, hashLen, want, block.GetOptions{}, func(i int, p block.Payload) error {
		if p.Reason != block.Hit || p.Tier != block.G4 || !bytes.Equal(p.Bytes, payload(i, size)) {
			t.Errorf("block %d: %v from %v", i, p.Reason, p.Tier)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if asked := b.asked("get") - before; b.count("blocks/") == 1 && asked != 1 {
		t.Errorf("%d requests for one object", asked)
	}
	for _, i := range is {
		if got := tiersOf(t, s, ns, i); got != "g2g4" {
			t.Errorf("block %d is in %s", i, got)
		}
		wantHit(t, s, ns, i, size)
	}
	puts := b.asked("put")
	sendDown(t, s, ns, is...)
	s = reopen(t, s, o)
	for _, i := range is {
		wantHit(t, s, ns, i, size)
	}
	sendDown(t, s, ns, is...)
	if again := b.asked("put") - puts; again > 0 {
		t.Errorf("%d objects were written again", again)
	}
	entries, next, err := s.List(t.Context(), ns.ID, "", 100)
	for next != "" && err == nil {
		var more []block.ListEntry
		more, next, err = s.List(t.Context(), ns.ID, next, 5)
		entries = append(entries, more...)
	}
	if err != nil || len(entries) != n {
		t.Errorf("listed %d blocks, %v", len(entries), err)
	}
	// A put of what is there is one of what exists, and one of other bytes a conflict.
	r, ex, err := s.Reserve(t.Context(), ns.ID, hashLen, hashOf(0), size, block.PutOptions{})
	if err != nil || r.Status != block.Exists || ex.Len != size {
		t.Errorf("reserve: %+v, %+v, %v", r, ex, err)
	}
	if err := s.CompareExisting(t.Context(), ns.ID, hashOf(0), size, ex.Sum, block.PutOptions{Durable: block.G3}); err != nil {
		t.Errorf("put again: %v", err)
	}
	if err := s.CompareExisting(t.Context(), ns.ID, hashOf(0), size, block.Sum{1}, block.PutOptions{}); !errors.Is(err, block.ErrConflict) {
		t.Errorf("put with other bytes: %v", err)
	}
}

// imported are the blocks that an import of the bucket would find.
func imported(t testing.TB, b *fakeBucket) (n int) {
	t.Helper()
	v, err := bucket.Open(t.Context(), b, "test", [16]byte{77}, packed.Writer{77})
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Import(t.Context(), nil, func(f *bucket.Found) error {
		for _, dead := range f.Dead {
			if !dead {
				n++
			}
		}
		return f.Err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestObjectDelete: what is deleted is in G4 no more, neither for the store nor for an
// import, and an object goes when nothing lives in it.
func TestObjectDelete(t *testing.T) {
	b := newFakeBucket()
	o := farOptions(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 6, 5000)
	sendDown(t, s, ns, is...)
	mustDelete(t, s, ns, 2, 1, 4, 99)
	wantMiss(t, s, ns, 1, block.MissAbsent)
	wantHit(t, s, ns, 0, 5000)
	if n := imported(t, b); n != 4 {
		t.Errorf("an import finds %d blocks, want 4", n)
	}
	s = reopen(t, s, o)
	wantMiss(t, s, ns, 4, block.MissAbsent)
	// Put anew, it is another one.
	mustPut(t, s, ns, 1, 5000, block.PutOptions{Durable: block.G3})
	sendDown(t, s, ns, 1)
	wantHit(t, s, ns, 1, 5000)
	if n := imported(t, b); n != 5 {
		t.Errorf("an import finds %d blocks, want 5", n)
	}
	mustDelete(t, s, ns, 5, is...)
	eventually(t, "all objects are removed", func() bool { return b.count("blocks/") == 0 })
	for _, i := range is {
		mustPut(t, s, ns, i, 5000, block.PutOptions{Durable: block.G3})
	}
	sendDown(t, s, ns, is...)
	if _, err := s.Clear(within(t, 30*time.Second), ns.ID); err != nil {
		t.Fatal(err)
	}
	for _, i := range is {
		wantMiss(t, s, ns, i, block.MissAbsent)
	}
	if n := imported(t, b); n != 0 {
		t.Errorf("an import finds %d blocks that were cleared", n)
	}
	eventually(t, "all objects are removed", func() bool { return b.count("blocks/") == 0 && g4(s).Blocks == 0 })
	wantEmpty(t, s)
}

// TestObjectFaults: what a bucket does wrong is a miss of that block, or the bucket's state,
// and never wrong bytes; it comes back by itself.
func TestObjectFaults(t *testing.T) {
	b := newFakeBucket()
	s := openStore(t, farOptions(t, b))
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 4, 5000)
	sendDown(t, s, ns, is...)
	refused := errors.New("forbidden")
	b.fail(func(op, _ string) error { return refused })
	wantMiss(t, s, ns, 0, block.MissUnavailable)
	if st := g4(s).Devices[0]; st.State == block.Healthy || !strings.Contains(st.Reason, "forbidden") {
		t.Errorf("bucket is %+v", st)
	}
	// Other tiers do not notice: blocks come and go as if there were no G4.
	for i := 100; i < 160; i++ {
		mustPutDown(t, s, ns, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	wantHit(t, s, ns, 159, 1<<20)
	eventually(t, "the bucket is down", func() bool { return g4(s).Devices[0].State == block.Down })
	// A delete that cannot be told the bucket is not answered as done, and can be tried again.
	if _, err := s.Delete(within(t, 30*time.Second), ns.ID, hashLen, pack(hashOf(1))); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("delete: %v", err)
	}
	b.fail(nil)
	eventually(t, "the bucket is healthy", func() bool { return g4(s).Devices[0].State == block.Healthy })
	if n := imported(t, b); n < 4 {
		t.Errorf("an import finds %d blocks", n)
	}
	before := imported(t, b)
	mustDelete(t, s, ns, 0, 1)
	if n := imported(t, b); n != before-1 {
		t.Errorf("an import finds %d blocks, want %d", n, before-1)
	}
	wantHit(t, s, ns, 0, 5000)
	// An answer that is spoiled on its way, or says that there is nothing, is asked for again.
	b.spoil(1)
	wantHit(t, s, ns, 2, 5000)
	sendDown(t, s, ns, 2)
	var once sync.Once
	b.fail(func(op, key string) (err error) {
		if op == "get" && strings.HasPrefix(key, "blocks/") {
			once.Do(func() { err = xfer.ErrNotFound })
		}
		return err
	})
	wantHit(t, s, ns, 2, 5000)
	sendDown(t, s, ns, 2)
	b.fail(nil)
	// A damaged object.
	b.damage(func(o []byte) { o[300]++ })
	wantMiss(t, s, ns, 2, block.MissCorrupt)
	// An object that is gone takes its blocks with it, and makes no bucket sick.
	b.drop(func(key string) bool { return strings.HasPrefix(key, "blocks/") })
	wantMiss(t, s, ns, 3, block.MissAbsent)
	eventually(t, "both are forgotten", func() bool { return tiersOf(t, s, ns, 2)+tiersOf(t, s, ns, 3) == "" })
	if st := g4(s).Devices[0]; st.State != block.Healthy {
		t.Errorf("bucket is %+v", st)
	}
}

// TestObjectPressure: with more blocks than fit locally all are found, and sequences share
// objects.
func TestObjectPressure(t *testing.T) {
	b := newFakeBucket()
	o := farOptions(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	const seqs, each, size = 64, 24, 64 << 10
	for q := range seqs {
		for i := range each {
			po := block.PutOptions{Durable: block.G3}
			if i > 0 {
				po.Parent, po.HasParent = hashOf(q*each+i-1), true
			}
			mustPutDown(t, s, ns, q*each+i, size, po)
		}
	}
	if n := b.count("blocks/"); n == 0 || g4(s).Payload/int64(n) < 256<<10 {
		t.Errorf("%d bytes are in %d objects", g4(s).Payload, n)
	}
	for i := range seqs * each {
		wantHit(t, s, ns, i, size)
	}
	if got := s.Stats().Removed["evicted"]; got != 0 {
		t.Errorf("%d blocks were lost", got)
	}
	ids := make([]byte, 0, each*hashLen)
	for i := range each {
		ids = append(ids, pack(hashOf(i))...)
	}
	// Where G2 has no room, which is the evictor's, blocks come one by one.
	eventually(t, "a prefetch reads a sequence by few requests", func() bool {
		for i := range each {
			sendDown(t, s, ns, i)
		}
		before := b.asked("get")
		if err := s.Prefetch(t.Context(), ns.ID, hashLen, ids, block.PrefetchOptions{}, func(p block.Progress) error {
			if p.Reason != block.Hit || p.Tier != block.G2 {
				t.Errorf("prefetch %+v", p)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return b.asked("get")-before <= each/2
	})
	mustDelete(t, s, ns, 1, 7)
	wantMiss(t, s, ns, 7, block.MissAbsent)
	wantEmpty(t, s)
}

// TestObjectDeleteAmidUpload: what is deleted while an object with it is on its way is not in
// G4 afterwards, and no import finds it.
func TestObjectDeleteAmidUpload(t *testing.T) {
	b := newFakeBucket()
	s := openStore(t, farOptions(t, b))
	ns := space(t, s, "n", 1<<20)
	mustPut(t, s, ns, 0, 5000, block.PutOptions{})
	mustPut(t, s, ns, 1, 5000, block.PutOptions{Durable: block.G3})
	sendDownG2(t, s, ns, 1)
	var once sync.Once
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "blocks/") {
			once.Do(func() { mustDelete(t, s, ns, 1, 1) })
		}
		return nil
	})
	tiers.Evict(s, block.G3, tiers.HandleOf(s, keyOf(ns, 1)))
	wantMiss(t, s, ns, 1, block.MissAbsent)
	if n := imported(t, b); n != 0 {
		t.Errorf("an import finds %d blocks", n)
	}
	eventually(t, "the object is removed", func() bool { return b.count("blocks/") == 0 })
	wantEmpty(t, s)
}

// sendDownG2 has a block leave G2.
func sendDownG2(t testing.TB, s *tiers.Store, ns block.Namespace, i int) {
	t.Helper()
	eventually(t, "the block has left g2", func() bool {
		tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, i)))
		return tiersOf(t, s, ns, i) == "g3"
	})
}

// TestObjectsWithoutNVMe: blocks go from memory into the bucket, at a stop too.
func TestObjectsWithoutNVMe(t *testing.T) {
	b := newFakeBucket()
	o := farOptions(t, b)
	o.Slabs, o.NoSlabs = nil, true
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	const n, size = 40, 600_000
	for i := range n {
		mustPutDown(t, s, ns, i, size, block.PutOptions{})
	}
	res, err := s.Drain(within(t, time.Minute), nil)
	if err != nil || res.Left != 0 || res.Kept == 0 {
		t.Errorf("drain: %+v, %v", res, err)
	}
	s = reopen(t, s, o)
	for i := range n {
		wantHit(t, s, ns, i, size)
	}
	// Lent in place, they are read where they have come to.
	loans, lease, err := s.Lend(t.Context(), ns.ID, hashLen, pack(hashOf(0), hashOf(99)), block.GetOptions{}, time.Minute, 0)
	if err != nil || loans[0].Reason != block.Hit || !bytes.Equal(loans[0].Mem, payload(0, size)) || loans[1].Reason != block.MissAbsent {
		t.Fatalf("lend: %v, %v, %v", loans[0].Reason, loans[1].Reason, err)
	}
	releaseLease(t, s, lease)
	// An outage while the store is closed is no reason not to open it.
	b.fail(func(string, string) error { return bucket.ErrNoAnswer })
	s = reopen(t, s, o)
	if st := g4(s).Devices[0]; st.State != block.Down {
		t.Errorf("bucket is %+v", st)
	}
	wantMiss(t, s, ns, 5, block.MissUnavailable)
	b.fail(nil)
	eventually(t, "the bucket is back", func() bool { return g4(s).Devices[0].State == block.Healthy })
	wantHit(t, s, ns, 5, size)
	wantEmpty(t, s)
}
