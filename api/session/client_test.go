package session_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// ways are the kinds of session that the tests of the client run over.
var ways = []struct {
	name, network string
	o             session.ClientOptions
}{
	{"tcp", "tcp", session.ClientOptions{}},
	{"unix", "unix", session.ClientOptions{NoShared: true}},
	{"shared", "unix", session.ClientOptions{}},
	{"no grants", "tcp", session.ClientOptions{NoGrants: true}},
}

// open opens a session with the server of a rig until the test ends.
func (r *rig) open(network string, o *session.ClientOptions) *session.Client {
	r.t.Helper()
	addr := r.tcp
	if network == "unix" {
		addr = r.unix
	}
	c, err := session.Dial(r.t.Context(), network, addr, o)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			r.t.Error(err)
		}
	})
	return c
}

// handle is the rig's namespace.
func (r *rig) handle() session.Namespace {
	return session.Namespace{ID: r.ns.NS, Tag: r.ns.Tag, HashLen: 8}
}

func hashOf(i int) (h block.Hash) {
	binary.LittleEndian.PutUint64(h[:], uint64(i)+1)
	return h
}

func packedFrom(from, to int) []byte {
	var b []byte
	for i := from; i < to; i++ {
		h := hashOf(i)
		b = append(b, h[:8]...)
	}
	return b
}

// bytesOf is the payload of block i, n bytes.
func bytesOf(i, n int) []byte {
	b := make([]byte, n)
	for at := range b {
		b[at] = byte(i*37 + at + at>>8*11 + at>>16*5)
	}
	return b
}

func putBlocks(t *testing.T, c *session.Client, ns session.Namespace, sizes map[int]int) {
	t.Helper()
	var blocks []session.PutBlock
	for i, n := range sizes {
		blocks = append(blocks, session.PutBlock{Hash: hashOf(i), Bytes: bytesOf(i, n)})
	}
	res, err := c.Put(t.Context(), ns, blocks, session.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range res {
		if r.Err != nil || r.Status != block.Stored {
			t.Fatalf("put %d: %v, %v", i, r.Status, r.Err)
		}
	}
}

// Blocks of many lengths, around all borders that there are, come back as they were.
func TestClientRoundTrip(t *testing.T) {
	sizes := []int{1, 7, 4095, 4096, 65536, 65537, 262143, 262144, 262145, 524288, 589824, 589825, 1<<20 + 1, 4 << 20}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Capacity: 256 << 20, Shared: 256 << 20}, nil)
			c := r.open(way.network, &way.o)
			if c.Shared() != (way.name == "shared") {
				t.Fatalf("shared %v", c.Shared())
			}
			ns := r.handle()
			for round := range 2 { // the later ones with places that were granted before
				var blocks []session.PutBlock
				for i, n := range sizes {
					b := session.PutBlock{Hash: hashOf(round*100 + i), Bytes: bytesOf(round*100+i, n)}
					if i > 0 {
						b.Parent, b.HasParent = hashOf(round*100+i-1), true
					}
					blocks = append(blocks, b)
				}
				for _, want := range []block.PutStatus{block.Stored, block.Exists} {
					var res []block.CommitResult
					for part := range slices.Chunk(blocks, []int{len(blocks), 1}[round]) {
						one, err := c.Put(t.Context(), ns, part, session.PutOptions{})
						if err != nil {
							t.Fatal(err)
						}
						res = append(res, one...)
					}
					for i := range res {
						if res[i].Err != nil || res[i].Status != want {
							t.Fatalf("put %d: %+v, want %v", i, res[i], want)
						}
					}
				}
				var items []session.GetItem
				for i, n := range sizes {
					items = append(items, session.GetItem{Hash: hashOf(round*100 + i), Into: make([]byte, n+round)})
				}
				items = append(items, session.GetItem{Hash: hashOf(9999), Into: make([]byte, 10)})
				res, err := c.Get(t.Context(), ns, items, block.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				for i, n := range sizes {
					want := bytesOf(round*100+i, n)
					if g := res[i]; g.Err != nil || g.Reason != block.Hit || g.Len != n || int(g.Total) != n || g.Sum != block.Sum(xxh3.Hash128(want).Bytes()) || !bytes.Equal(items[i].Into[:n], want) {
						t.Fatalf("get of %d bytes: %+v", n, g)
					}
				}
				if g := res[len(sizes)]; g.Err != nil || g.Reason != block.MissAbsent || g.Len != 0 {
					t.Fatalf("get of no block: %+v", g)
				}
			}
			if st := c.Stats(); (st.InPlace > 0) != c.Shared() {
				t.Errorf("%d blocks in place", st.InPlace)
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			r.quiet()
		})
	}
}

func TestClientRanges(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Shared: 64 << 20}, nil)
			c := r.open(way.network, &way.o)
			const n = 700_001
			putBlocks(t, c, r.handle(), map[int]int{1: n})
			all := bytesOf(1, n)
			var items []session.GetItem
			want := [][2]int{{0, 1}, {0, n}, {1, 0}, {513, 300_000}, {n - 1, 1}}
			for _, w := range want {
				items = append(items, session.GetItem{Hash: hashOf(1), Offset: int64(w[0]), Length: int64(w[1]), Into: make([]byte, n)})
			}
			res, err := c.Get(t.Context(), r.handle(), items, block.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for i, w := range want {
				length := w[1]
				if length == 0 {
					length = n - w[0]
				}
				if g := res[i]; g.Err != nil || g.Reason != block.Hit || g.Len != length || !bytes.Equal(items[i].Into[:length], all[w[0]:w[0]+length]) {
					t.Errorf("range %v: %+v", w, g)
				}
			}
			bad := []session.GetItem{{Hash: hashOf(1), Offset: n, Length: 1, Into: make([]byte, 1)}}
			if res, err := c.Get(t.Context(), r.handle(), bad, block.GetOptions{}); !errors.Is(err, block.ErrInvalid) && (err != nil || !errors.Is(res[0].Err, block.ErrInvalid)) {
				t.Errorf("range behind the end: %+v, %v", res, err)
			}
			bad[0].Offset = -1
			if _, err := c.Get(t.Context(), r.handle(), bad, block.GetOptions{}); !errors.Is(err, block.ErrInvalid) {
				t.Errorf("negative offset: %v", err)
			}
		})
	}
}

// A place that is too short is its key's error, says how long the block is, and is
// left alone behind its end.
func TestClientShortPlace(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Shared: 64 << 20}, nil)
			c := r.open(way.network, &way.o)
			const n = 300_000
			putBlocks(t, c, r.handle(), map[int]int{1: n, 2: 100})
			mem := bytes.Repeat([]byte{0xa5}, n)
			small := make([]byte, 100)
			items := []session.GetItem{{Hash: hashOf(1), Into: mem[: n/2 : n/2]}, {Hash: hashOf(2), Into: small}}
			res, err := c.Get(t.Context(), r.handle(), items, block.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if g := res[0]; !errors.Is(g.Err, block.ErrInvalid) || g.Total != n {
				t.Errorf("%+v", g)
			}
			if g := res[1]; g.Err != nil || g.Reason != block.Hit || !bytes.Equal(small, bytesOf(2, 100)) {
				t.Errorf("%+v", g)
			}
			if !bytes.Equal(mem[n/2:], bytes.Repeat([]byte{0xa5}, n-n/2)) {
				t.Error("written behind the end of a place")
			}
		})
	}
}

// Many goroutines share a session; each sees its own blocks only, and the limits of
// the session make nobody fail.
func TestClientConcurrent(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Capacity: 256 << 20, Shared: 256 << 20}, &session.ServerOptions{Calls: 3, Bytes: 2 << 20, Grants: 5, GrantBytes: 1 << 20})
			c := r.open(way.network, &way.o)
			ns := r.handle()
			var wg sync.WaitGroup
			for g := range 8 {
				wg.Go(func() {
					for round := range 10 {
						if err := putAndGet(t.Context(), c, ns, g*1000+round*10, 4, 50_000+g*10_000); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			r.quiet()
		})
	}
}

// Puts that need several places each, of few that there are, do not wait for each
// other.
func TestClientFewGrants(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Grants: 5})
	c := r.open("tcp", nil)
	ns := r.handle()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			for round := range 20 {
				if err := putAndGet(ctx, c, ns, g*1000+round*10, 3, 1000); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// putAndGet puts n blocks of size bytes from block first on, and reads them again.
func putAndGet(ctx context.Context, c *session.Client, ns session.Namespace, first, n, size int) error {
	var blocks []session.PutBlock
	var items []session.GetItem
	for i := first; i < first+n; i++ {
		blocks = append(blocks, session.PutBlock{Hash: hashOf(i), Bytes: bytesOf(i, size)})
		items = append(items, session.GetItem{Hash: hashOf(i), Into: make([]byte, size)})
	}
	res, err := c.Put(ctx, ns, blocks, session.PutOptions{})
	if err != nil {
		return err
	}
	for i := range res {
		if res[i].Err != nil {
			return res[i].Err
		}
	}
	got, err := c.Get(ctx, ns, items, block.GetOptions{})
	if err != nil {
		return err
	}
	for i, g := range got {
		if g.Err != nil || g.Reason != block.Hit || !bytes.Equal(items[i].Into, blocks[i].Bytes) {
			return fmt.Errorf("block %d: %+v, or other bytes", first+i, g)
		}
	}
	return nil
}

func TestClientMatchAndLeases(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
	c := r.open("tcp", nil)
	ns := r.handle()
	putBlocks(t, c, ns, map[int]int{0: 10, 1: 20, 3: 30})
	var res block.MatchResult
	if err := c.Match(t.Context(), ns, packedFrom(0, 4), block.MatchOptions{All: true, Lease: time.Minute}, &res); err != nil {
		t.Fatal(err)
	}
	if res.Prefix != 2 || len(res.Blocks) != 4 || res.Blocks[3].Len != 30 || res.Blocks[2].State != block.Absent || res.Lease.ID == 0 || res.Lease.Count != 3 {
		t.Fatalf("%+v", res)
	}
	if err := c.Renew(t.Context(), res.Lease.ID, time.Minute); err != nil {
		t.Error(err)
	}
	other := r.open("unix", nil)
	if err := other.Release(t.Context(), res.Lease.ID); !errors.Is(err, block.ErrLeaseExpired) && !errors.Is(err, block.ErrNotFound) {
		t.Errorf("another session's lease: %v", err)
	}
	if err := c.Release(t.Context(), res.Lease.ID); err != nil {
		t.Error(err)
	}
	if err := c.Release(t.Context(), res.Lease.ID); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("a lease released twice: %v", err)
	}
	// More keys than one message takes.
	if err := c.Match(t.Context(), ns, packedFrom(0, 20_000), block.MatchOptions{All: true}, &res); err != nil || res.Prefix != 2 || len(res.Blocks) != 20_000 || res.Lease.ID != 0 {
		t.Errorf("%d blocks, prefix %d, %v", len(res.Blocks), res.Prefix, err)
	}
	if err := c.Match(t.Context(), ns, packedFrom(0, 20_000), block.MatchOptions{}, &res); err != nil || res.Prefix != 2 || len(res.Blocks) > 3 {
		t.Errorf("%d blocks, prefix %d, %v", len(res.Blocks), res.Prefix, err)
	}
	places, err := c.Locate(t.Context(), ns, packedFrom(0, 3))
	if err != nil || len(places) != 3 || len(places[0]) == 0 || places[0][0].Len != 10 || len(places[2]) != 0 {
		t.Errorf("%v, %v", places, err)
	}
	var told []block.Progress
	err = c.Prefetch(t.Context(), ns, packedFrom(0, 4), block.PrefetchOptions{}, func(p block.Progress) error {
		told = append(told, p)
		return nil
	})
	if err != nil || len(told) != 4 || told[3].Index != 3 || told[0].Reason != block.Hit || told[2].Reason != block.MissAbsent {
		t.Errorf("%+v, %v", told, err)
	}
	stop := errors.New("stop")
	if err := c.Prefetch(t.Context(), ns, packedFrom(0, 4), block.PrefetchOptions{}, func(block.Progress) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
}

// TestClientMatchLeasesMany shows that a match of more keys than one message takes leases
// them as one, up to the first message with a gap unless all are wanted, and that what it
// leased is given back as a whole, also when it fails.
func TestClientMatchLeasesMany(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Keys: 4, Leases: 6})
	c := r.open("tcp", nil)
	ns := r.handle()
	sizes := map[int]int{}
	for i := range 30 {
		if i != 21 {
			sizes[i] = 10 + i
		}
	}
	putBlocks(t, c, ns, sizes)
	match := func(o block.MatchOptions) (res block.MatchResult, err error) {
		t.Helper()
		err = c.Match(t.Context(), ns, packedFrom(0, 30), o, &res)
		return res, err
	}
	leases := func() int64 { return r.store.Stats().Leases }
	res, err := match(block.MatchOptions{Lease: time.Minute})
	if err != nil || res.Prefix != 21 || len(res.Blocks) != 22 || res.Lease.Count != 21 || res.Lease.Left != time.Minute {
		t.Fatalf("%+v, error %v", res, err)
	}
	if n := leases(); n != 6 {
		t.Errorf("%d leases, want one for each of 6 messages", n)
	}
	if err := c.Renew(t.Context(), res.Lease.ID, time.Hour); err != nil {
		t.Error(err)
	}
	// There is no room for more, so that a match fails in the end, and holds nothing.
	if res, err := match(block.MatchOptions{Lease: time.Minute}); !errors.Is(err, session.ErrBusy) || res.Lease.ID != 0 {
		t.Errorf("beyond the leases of the session: %+v, error %v", res.Lease, err)
	}
	if err := c.Release(t.Context(), res.Lease.ID); err != nil {
		t.Error(err)
	}
	if n := leases(); n != 0 {
		t.Errorf("%d leases are left", n)
	}
	if err := c.Release(t.Context(), res.Lease.ID); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("released twice: %v", err)
	}
	if _, err := match(block.MatchOptions{All: true, Lease: time.Minute}); !errors.Is(err, session.ErrBusy) {
		t.Errorf("8 messages for 6 leases: error %v", err)
	}
	r.await("the leases of a match that failed", func() bool { return leases() == 0 })
	// A lease of which a part has run out is none.
	if res, err = match(block.MatchOptions{Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if err := r.store.ReleaseLease(res.Lease.ID); err != nil {
		t.Fatal(err)
	}
	if err := c.Renew(t.Context(), res.Lease.ID, time.Minute); !errors.Is(err, block.ErrLeaseExpired) {
		t.Errorf("without its first part: %v", err)
	}
	r.await("the other parts", func() bool { return leases() == 0 })
}

func TestClientWatch(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.open("tcp", nil)
	ns := r.handle()
	enough := errors.New("enough")
	ready := make(chan struct{})
	watched := make(chan error, 1)
	var seen []block.Event
	go func() {
		watched <- c.Watch(t.Context(), ns, block.WatchOptions{Ready: func(s block.WatchStart) {
			if s.Incarnation == c.Welcome().Incarnation {
				close(ready)
			}
		}}, func(e block.Event) error {
			if seen = append(seen, e); len(seen) == 3 {
				return enough
			}
			return nil
		})
	}()
	select {
	case <-ready:
	case <-time.After(patience):
		t.Fatal("no start")
	}
	putBlocks(t, c, ns, map[int]int{0: 10, 1: 20, 2: 30})
	if err := <-watched; !errors.Is(err, enough) {
		t.Fatal(err)
	}
	for _, e := range seen {
		if e.Kind != block.EventStored || e.Hlen != 8 {
			t.Errorf("%+v", e)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := c.Watch(ctx, ns, block.WatchOptions{Ready: func(block.WatchStart) { cancel() }}, func(block.Event) error { return nil })
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// What is wrong with a hello, or who answers it, is told by class.
func TestClientDial(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Token: "secret", Name: "test 1"})
	if _, err := session.Dial(t.Context(), "tcp", r.tcp, &session.ClientOptions{Token: "wrong"}); !errors.Is(err, block.ErrDenied) {
		t.Errorf("wrong token: %v", err)
	}
	c := r.open("tcp", &session.ClientOptions{Token: "secret", Calls: 2})
	if w := c.Welcome(); w.Name != "test 1" || w.Session == 0 || w.Calls != 2 {
		t.Errorf("%+v", w)
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := session.Dial(ctx, "tcp", lis.Addr().String(), nil); !errors.Is(err, block.ErrDisconnected) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a mute server: %v", err)
	}
	if _, err := session.Dial(t.Context(), "unix", r.unix+"-none", nil); !errors.Is(err, block.ErrDisconnected) {
		t.Errorf("no socket: %v", err)
	}
}

// When the connection ends every call fails, those under way and those to come.
func TestClientServerGone(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
			c := r.open(way.network, &way.o)
			ns := r.handle()
			watched := make(chan error, 1)
			ready := make(chan struct{})
			go func() {
				watched <- c.Watch(t.Context(), ns, block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}, func(block.Event) error { return nil })
			}()
			<-ready
			if err := r.server.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-watched; !errors.Is(err, block.ErrDisconnected) && !errors.Is(err, block.ErrClosed) && !errors.Is(err, context.Canceled) {
				t.Errorf("watch: %v", err)
			}
			if err := putAndGet(t.Context(), c, ns, 1, 1, 100); !errors.Is(err, block.ErrDisconnected) {
				t.Errorf("put: %v", err)
			}
			if err := c.Match(t.Context(), ns, packedFrom(0, 1), block.MatchOptions{}, new(block.MatchResult)); !errors.Is(err, block.ErrDisconnected) || c.Err() == nil {
				t.Errorf("match: %v, %v", err, c.Err())
			}
		})
	}
}
