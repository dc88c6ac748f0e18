package tiers_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
)

// atOnce are farOptions by which the sweep judges objects as soon as they are there.
func atOnce(t testing.TB, b *fakeBucket) tiers.Options {
	o := farOptions(t, b)
	o.ObjectGrace = time.Nanosecond
	o.SweepAfter = time.Hour // by itself it does not begin
	return o
}

// sweepObjects sweeps the only bucket, and gives what that has counted.
func sweepObjects(t testing.TB, s *tiers.Store) block.ObjectSweep {
	t.Helper()
	var last block.ObjectSweep
	if err := s.SweepObjects(within(t, time.Minute), func(p block.ObjectSweep) error {
		last = p
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats().ObjectSweeps; len(st) != 1 || st[0] != last || last.Running() || last.Error != "" {
		t.Errorf("sweeps are %+v, told was %+v", st, last)
	}
	return last
}

// importObjects imports the only bucket, and gives what that has counted.
func importObjects(t testing.TB, s *tiers.Store) block.ObjectImport {
	t.Helper()
	var last block.ObjectImport
	if err := s.ImportObjects(within(t, time.Minute), func(p block.ObjectImport) error {
		last = p
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !last.Done {
		t.Errorf("an import has ended with %+v", last)
	}
	return last
}

// plant writes an object with one block behind a store's back.
func plant(t testing.TB, b *fakeBucket, ns block.Namespace, w packed.Writer, number uint64, i int) string {
	t.Helper()
	v, err := bucket.Open(t.Context(), b, "test", [16]byte{78}, w)
	if err != nil {
		t.Fatal(err)
	}
	f := v.New(number, ns.Desc.Digest(), hashLen, ns.Epoch)
	body := payload(i, 3000)
	f.Add(&packed.Member{Hash: hashOf(i), Len: uint32(len(body))})
	name, err := v.Write(t.Context(), f, [][]byte{make([]byte, packed.HeaderBytes), body})
	if err != nil {
		t.Fatal(err)
	}
	return name.String()
}

// TestObjectSweep: orphans go when they are old enough, what another node wrote stays, and
// blocks of objects that are not there are dropped, as are those past their time.
func TestObjectSweep(t *testing.T) {
	b := newFakeBucket()
	o := farOptions(t, b)
	o.SweepAfter = time.Hour
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 6, 5000)
	for _, i := range is {
		sendDown(t, s, ns, i) // an object for each
	}
	mustPut(t, s, ns, 50, 4000, block.PutOptions{Durable: block.G3, TTL: time.Second})
	sendDown(t, s, ns, 50)
	ours := b.count("blocks/")
	orphan := plant(t, b, ns, tiers.WriterOf(s), 1<<62, 90)
	stranger := plant(t, b, ns, packed.Writer{9}, 1, 91)
	b.mu.Lock()
	b.objects["blocks/test/notes.txt"] = []byte("somebody else's")
	b.mu.Unlock()
	if r := sweepObjects(t, s); r.Orphans != 0 || r.Missing != 0 || r.Listed != int64(ours)+2 {
		t.Errorf("a sweep of what is young has found %+v", r)
	}
	o.ObjectGrace = time.Nanosecond
	s = reopen(t, s, o)
	lost := b.drop(func(key string) bool { return strings.Contains(key, hashOf(3).Hex(hashLen)) })
	if lost != 1 {
		t.Fatalf("%d objects are lost", lost)
	}
	eventually(t, "the block's time has passed", func() bool { return tiersOf(t, s, ns, 50) == "" })
	r := sweepObjects(t, s)
	if r.Orphans != 1 || r.OrphanBytes < 3000 || r.Missing != 1 || r.Lost != 1 || r.Expired != 1 {
		t.Errorf("a sweep has found %+v", r)
	}
	for key, want := range map[string]bool{orphan: false, stranger: true, "blocks/test/notes.txt": true} {
		if b.has(key) != want {
			t.Errorf("%s is there: %v", key, !want)
		}
	}
	wantMiss(t, s, ns, 3, block.MissAbsent)
	for _, i := range []int{0, 1, 2, 4, 5} {
		wantHit(t, s, ns, i, 5000)
	}
	eventually(t, "what is dead is removed", func() bool { return b.count("blocks/") == 7 })
	if st := g4(s); st.Blocks != 5 {
		t.Errorf("g4 has %d blocks", st.Blocks)
	}
	if r := sweepObjects(t, s); r.Orphans+r.Missing+r.Lost+r.Expired != 0 {
		t.Errorf("a second sweep has found %+v", r)
	}
	// A bucket that somebody has emptied is not the one that it was.
	b.drop(func(string) bool { return true })
	if err := s.SweepObjects(within(t, time.Minute), nil); err == nil || !strings.Contains(err.Error(), "nothing is dropped") {
		t.Errorf("sweep of an empty bucket: %v", err)
	}
	if st := g4(s); st.Blocks != 5 {
		t.Errorf("g4 has %d blocks", st.Blocks)
	}
}

// onList has call called ahead of the nth page of the next list.
func onList(b *fakeBucket, nth int, call func() error) {
	lists := 0
	b.fail(func(op, key string) error {
		if op == "list" && strings.HasPrefix(key, "blocks/") {
			if lists++; lists == nth {
				return call()
			}
		}
		return nil
	})
}

// inOrder are the keys of the packed objects, as a list gives them.
func inOrder(b *fakeBucket) (keys []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.objects {
		if strings.HasPrefix(k, "blocks/") {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys
}

// muddle gives a sweep to find what one that has listed the first object does not: that is
// gone, and a block in G4 past its time.
func muddle(t testing.TB, b *fakeBucket, s *tiers.Store, ns block.Namespace) {
	t.Helper()
	first := inOrder(b)[0]
	b.drop(func(key string) bool { return key == first })
	for i := 500; ; i++ { // one that was too slow for its time is not uploaded
		putBriefly(t, s, ns, i, 4000)
		sendDown(t, s, ns, i)
		eventually(t, "the block's time has passed", func() bool { return tiersOf(t, s, ns, i) == "" })
		if _, ok, err := tiers.Catalog(s).GetPacked(keyOf(ns, i), hashLen); err != nil {
			t.Fatal(err)
		} else if ok {
			return
		}
	}
}

// TestObjectSweepGoesOn: a sweep that was interrupted goes on where it was, over a restart.
func TestObjectSweepGoesOn(t *testing.T) {
	b := newFakeBucket()
	b.page = 2
	o := atOnce(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	for _, i := range chain(t, s, ns, 6, 5000) {
		sendDown(t, s, ns, i)
	}
	plant(t, b, ns, tiers.WriterOf(s), 1<<62, 90)
	onList(b, 3, func() error { return bucket.ErrNoAnswer })
	if err := s.SweepObjects(within(t, time.Minute), nil); !errors.Is(err, bucket.ErrNoAnswer) {
		t.Fatalf("sweep: %v", err)
	}
	st := s.Stats().ObjectSweeps[0]
	if !st.Running() || st.Listed != 4 || !strings.Contains(st.Error, "no answer") {
		t.Errorf("sweep is %+v", st)
	}
	o.SweepAfter = time.Millisecond
	s = reopen(t, s, o)
	eventually(t, "the sweep is at its end", func() bool { return !s.Stats().ObjectSweeps[0].Running() })
	if r := s.Stats().ObjectSweeps[0]; r.Listed != 7 || r.Orphans != 1 || !r.Started.Equal(st.Started) {
		t.Errorf("the sweep is %+v, was %+v", r, st)
	}
	if r := sweepObjects(t, s); r.Listed != 6 || r.Started.Equal(st.Started) {
		t.Errorf("the next sweep is %+v", r)
	}
	for i := range 6 {
		wantHit(t, s, ns, i, 5000)
	}
}

// TestObjectSweepAnew: a call does not go on with a sweep that was interrupted, since that
// would not see what has come to be behind it; but what it has done counts.
func TestObjectSweepAnew(t *testing.T) {
	for what, again := range map[string]func(t *testing.T, s *tiers.Store, o tiers.Options) *tiers.Store{
		"at once": func(_ *testing.T, s *tiers.Store, _ tiers.Options) *tiers.Store { return s },
		"restart": func(t *testing.T, s *tiers.Store, o tiers.Options) *tiers.Store { return reopen(t, s, o) },
	} {
		t.Run(what, func(t *testing.T) {
			b := newFakeBucket()
			b.page = 2
			o := atOnce(t, b)
			s := openStore(t, o)
			ns := space(t, s, "n", 1<<20)
			for _, i := range chain(t, s, ns, 6, 5000) {
				sendDown(t, s, ns, i)
			}
			plant(t, b, ns, tiers.WriterOf(s), 1<<62, 1<<8) // comes on the first page
			onList(b, 3, func() error { return bucket.ErrNoAnswer })
			if err := s.SweepObjects(within(t, time.Minute), nil); !errors.Is(err, bucket.ErrNoAnswer) {
				t.Fatalf("sweep: %v", err)
			}
			st := s.Stats().ObjectSweeps[0]
			if !st.Running() || st.Listed != 4 || st.Orphans != 1 {
				t.Errorf("sweep is %+v", st)
			}
			s = again(t, s, o)
			eventually(t, "the bucket is healthy", func() bool { return g4(s).Devices[0].State == block.Healthy })
			muddle(t, b, s, ns)
			all := int64(len(inOrder(b)))
			r := sweepObjects(t, s)
			if r.Listed > all || r.Missing != 1 || r.Lost != 1 || r.Expired != 1 || r.Orphans != 1 || r.Started.Equal(st.Started) {
				t.Errorf("of %d objects the sweep is %+v, was %+v", all, r, st)
			}
		})
	}
}

// queuer is a context that tells when it is first waited for.
type queuer struct {
	context.Context
	once  sync.Once
	waits chan struct{}
}

func (q *queuer) Done() <-chan struct{} {
	q.once.Do(func() { close(q.waits) })
	return q.Context.Done()
}

// TestObjectSweepShared: calls that find a sweep under way are answered by one that began
// when they had come; and one is enough for all of them.
func TestObjectSweepShared(t *testing.T) {
	b := newFakeBucket()
	b.page = 2
	s := openStore(t, atOnce(t, b))
	ns := space(t, s, "n", 1<<20)
	for _, i := range chain(t, s, ns, 6, 5000) {
		sendDown(t, s, ns, i)
	}
	stopped, on := make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(on) })
	defer goOn()
	onList(b, 2, func() error {
		close(stopped)
		<-on
		return nil
	})
	type result struct {
		last block.ObjectSweep
		err  error
	}
	call := func() (waits chan struct{}, done chan result) {
		ctx := &queuer{Context: within(t, time.Minute), waits: make(chan struct{})}
		done = make(chan result, 1)
		go func() {
			var r result
			r.err = s.SweepObjects(ctx, func(p block.ObjectSweep) error {
				r.last = p
				return nil
			})
			done <- r
		}()
		return ctx.waits, done
	}
	_, first := call()
	select {
	case <-stopped:
	case r := <-first:
		t.Fatalf("the first sweep: %+v", r)
	}
	muddle(t, b, s, ns)
	var waiting []chan result
	for range 2 {
		waits, done := call()
		<-waits
		waiting = append(waiting, done)
	}
	goOn()
	was := <-first
	if was.err != nil || was.last.Running() || was.last.Missing+was.last.Expired != 0 {
		t.Errorf("the first sweep: %+v", was)
	}
	one, other := <-waiting[0], <-waiting[1]
	if one.err != nil || one != other || one.last.Running() || one.last.Missing != 1 || one.last.Lost != 1 || one.last.Expired != 1 || one.last.Started.Equal(was.last.Started) {
		t.Errorf("calls that waited for %+v: %+v and %+v", was, one, other)
	}
}

// TestObjectImport: another node has what one wrote, and nothing that was deleted, cleared,
// or is past its time; and neither takes from the other what it has.
func TestObjectImport(t *testing.T) {
	b := newFakeBucket()
	o := atOnce(t, b)
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	gone := space(t, s, "cleared", 1<<20)
	is := chain(t, s, ns, 8, 5000)
	sendDown(t, s, ns, is...)
	mustPut(t, s, ns, 50, 4000, block.PutOptions{Durable: block.G3, TTL: time.Second})
	sendDown(t, s, ns, 50)
	mustPut(t, s, gone, 60, 4000, block.PutOptions{Durable: block.G3})
	sendDown(t, s, gone, 60)
	if _, err := s.Clear(within(t, 30*time.Second), gone.ID); err != nil {
		t.Fatal(err)
	}
	mustDelete(t, s, ns, 1, 6)
	eventually(t, "the block's time has passed", func() bool { return tiersOf(t, s, ns, 50) == "" })

	p := openStore(t, atOnce(t, b))
	// Deleted by a call that comes amid the import: its tombstone was not there when it began.
	pns := block.Namespace{}
	var once sync.Once
	b.fail(func(op, key string) error {
		if op == "get" && strings.HasPrefix(key, "blocks/") {
			once.Do(func() {
				pns = space(t, p, "n", 1<<20)
				mustDelete(t, p, pns, 0, 5)
			})
		}
		return nil
	})
	r := importObjects(t, p)
	b.fail(nil)
	if r.Blocks != 6 || r.Bytes != 6*5000 || r.Dead != 2 || r.Failed != 0 || r.Refused != 0 {
		t.Errorf("import %+v", r)
	}
	for _, i := range []int{0, 1, 2, 3, 4, 7} {
		wantHit(t, p, pns, i, 5000)
	}
	for _, i := range []int{5, 6, 50} {
		wantMiss(t, p, pns, i, block.MissAbsent)
	}
	if again := importObjects(t, p); again.Blocks != 0 {
		t.Errorf("a second import: %+v", again)
	}
	// The node that wrote them has nothing to import, and loses nothing by what the other
	// forgets.
	if r := importObjects(t, s); r.Objects != 0 {
		t.Errorf("import of what one wrote: %+v", r)
	}
	mustDelete(t, p, pns, 1, 7)
	sweepObjects(t, p)
	sweepObjects(t, s)
	for _, i := range []int{0, 1, 2, 3, 4, 5} {
		wantHit(t, s, ns, i, 5000)
	}
	// What all of an object's blocks have tombstones for goes, whoever wrote it.
	s.Close()
	mustDelete(t, p, pns, 5, 0, 1, 2, 3, 4)
	for _, i := range is {
		wantMiss(t, p, pns, i, block.MissAbsent)
	}
	sweepObjects(t, p)
	q := openStore(t, atOnce(t, b))
	if r := importObjects(t, q); r.Blocks != 1 { // 5, which only the other has deleted, without knowing it
		t.Errorf("import behind all deletes: %+v", r)
	}
	if _, err := q.Namespace("n"); err != nil {
		t.Error(err)
	}
}

// TestObjectImportRefuses: what disagrees with what is here is left out, and damaged objects
// are told.
func TestObjectImportRefuses(t *testing.T) {
	b := newFakeBucket()
	s := openStore(t, atOnce(t, b))
	ns := space(t, s, "n", 1<<20)
	for _, i := range chain(t, s, ns, 2, 5000) {
		sendDown(t, s, ns, i)
	}
	other := space(t, s, "m", 1<<20)
	mustPut(t, s, other, 7, 5000, block.PutOptions{Durable: block.G3})
	sendDown(t, s, other, 7)
	plant(t, b, ns, packed.Writer{9}, 1, 91)
	b.mu.Lock()
	for k, o := range b.objects {
		if strings.Contains(k, hashOf(91).Hex(hashLen)) {
			o[len(o)-packed.TrailerBytes-8]++
		}
	}
	b.mu.Unlock()
	p := openStore(t, atOnce(t, b))
	pns := space(t, p, "n", 1<<20)
	if err := put(p, pns, 0, payload(77, 5000), block.PutOptions{}); err != nil { // with other bytes
		t.Fatal(err)
	}
	if _, err := p.OpenNamespace(t.Context(), block.Descriptor{Name: "m", MaxBlockBytes: 1 << 21}, 0); err != nil {
		t.Fatal(err)
	}
	r := importObjects(t, p)
	if r.Blocks != 1 || r.Refused != 2 || r.Failed != 1 || len(r.Problems) != 2 {
		t.Errorf("import %+v", r)
	}
	wantHit(t, p, pns, 1, 5000)
}

// sendDownTogether has blocks of G3 go into one object.
func sendDownTogether(t testing.TB, s *tiers.Store, ns block.Namespace, is ...int) {
	t.Helper()
	var hs []block.Handle
	for _, i := range is {
		sendDownG2(t, s, ns, i)
		hs = append(hs, tiers.HandleOf(s, keyOf(ns, i)))
	}
	tiers.TakeOut(s, hs)
	for _, i := range is {
		eventually(t, "the block is in g4 only", func() bool { return tiersOf(t, s, ns, i) == "g4" })
	}
}

// TestRepack: objects that are half dead are rewritten, and what lives in them is read as
// before; what is deleted meanwhile, here or by another node, no import raises.
func TestRepack(t *testing.T) {
	b := newFakeBucket()
	o := atOnce(t, b)
	s := openStore(t, o)
	tiers.RestObjects(s, 0)
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 20, 5000)
	sendDownTogether(t, s, ns, is[:10]...)
	sendDownTogether(t, s, ns, is[10:]...)
	if n := b.count("blocks/"); n != 2 {
		t.Fatalf("there are %d objects", n)
	}
	p := openStore(t, atOnce(t, b))
	importObjects(t, p)
	pns := space(t, p, "n", 1<<20)
	mustDelete(t, p, pns, 1, 4)
	// Alive: 0 to 2, 10 to 13, and 4 for the node that does not know that the other deleted it.
	mustDelete(t, s, ns, 12, 3, 5, 6, 7, 8, 9, 14, 15, 16, 17, 18, 19)
	var once sync.Once
	b.fail(func(op, key string) error {
		if op == "put" && strings.HasPrefix(key, "blocks/") {
			once.Do(func() { mustDelete(t, s, ns, 1, 2) })
		}
		return nil
	})
	r := sweepObjects(t, s)
	b.fail(nil)
	if r.Rewritten != 2 || r.Moved != 6 || r.MovedBytes != 6*5000 {
		t.Errorf("sweep %+v", r)
	}
	alive := []int{0, 1, 10, 11, 12, 13}
	for _, i := range alive {
		wantHit(t, s, ns, i, 5000)
	}
	for _, i := range []int{2, 3, 4, 5, 19} {
		wantMiss(t, s, ns, i, block.MissAbsent)
	}
	eventually(t, "there is one object", func() bool { return b.count("blocks/") == 1 })
	if n := imported(t, b); n != len(alive) {
		t.Errorf("an import finds %d blocks, want %d", n, len(alive))
	}
	if r := sweepObjects(t, s); r.Rewritten != 0 {
		t.Errorf("a second sweep: %+v", r)
	}
	s = reopen(t, s, o)
	for _, i := range alive {
		wantHit(t, s, ns, i, 5000)
	}
	wantEmpty(t, s)
}

// TestObjectCallsWithoutObjects: a store without an object tier says so.
func TestObjectCallsWithoutObjects(t *testing.T) {
	s := openStore(t, tiers.Options{Dir: t.TempDir(), DRAM: 16 << 20, NoSlabs: true})
	_, _, list := s.ListObjects(t.Context(), "", 1)
	_, usage := s.ObjectUsage(t.Context())
	for what, err := range map[string]error{
		"sweep": s.SweepObjects(t.Context(), nil), "import": s.ImportObjects(t.Context(), nil), "list": list, "usage": usage,
	} {
		if !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), "no object tier") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
