package session_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// TestSessions shows what is told of sessions, that leases beyond the limit are
// refused, and that what has run out or was given back counts no more.
func TestSessions(t *testing.T) {
	st := memstore.New(&memstore.Options{Shared: 64 << 20})
	r := serve(t, st, st, &session.ServerOptions{Leases: 3, Access: teams(t, true)})
	remote := r.as("rw")
	remote.store(r.keys("a"), []byte("hello"))
	remote.store(r.keys("b"), []byte("hello"))
	local := dial(t, "unix", r.unix)
	if err := local.hello(session.HelloMessage{Name: "worker\xff", Features: session.FeatureShared}); err != nil {
		t.Fatal(err)
	}
	for _, fd := range local.files {
		_ = os.NewFile(uintptr(fd), "memory").Close()
	}
	info := func(i int) session.Info {
		t.Helper()
		all := r.server.Sessions()
		if len(all) != 2 {
			t.Fatalf("sessions %+v, want 2", all)
		}
		return all[i]
	}
	first, second := info(0), info(1)
	if first.ID != remote.welcome.Session || first.Name != "" || first.Identity != "team-rw" || first.Peer != remote.c.LocalAddr().String() ||
		first.Local() || first.PID != 0 || first.Shared || first.Age <= 0 || first.Leases != 0 || first.LeasesLimit != 3 {
		t.Errorf("the first: %+v", first)
	}
	if second.ID != local.welcome.Session || second.Name != "worker\ufffd" || second.Identity != "me" || second.Peer != "unix" || !second.Local() ||
		second.PID != int32(os.Getpid()) || second.UID != uint32(os.Getuid()) || !second.Shared {
		t.Errorf("the second: %+v", second)
	}

	match := func(names string, ms uint32) (session.MatchedMessage, error) {
		var m session.MatchedMessage
		err := remote.answer(remote.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys(names), LeaseMS: ms}), session.CodeMatched, &m)
		return m, err
	}
	lease, err := match("ab", 60000)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := match("a", 60000); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := match("a", 60000); !errors.Is(err, session.ErrBusy) || !strings.Contains(err.Error(), "3 leases, at most 3") {
		t.Errorf("a lease too many: error %v", err)
	}
	if i := info(0); i.Leases != 3 || i.LeasedBlocks != 4 || i.LeasesLimit != 3 {
		t.Errorf("with all leases that it may have: %+v", i)
	}
	var done session.ReleasedMessage
	if err := remote.answer(remote.send(session.CodeRelease, &session.ReleaseMessage{Leases: []uint64{lease.Lease}}), session.CodeReleased, &done); err != nil {
		t.Fatal(err)
	}
	if _, err := match("b", 1); err != nil {
		t.Errorf("a lease for one given back: error %v", err)
	}
	r.await("the short lease has run out", func() bool { i := info(0); return i.Leases == 2 && i.LeasedBlocks == 2 })

	remote.places(r.ns, 1000, 3)
	watch := remote.send(session.CodeWatch, &session.WatchMessage{NS: r.ns.NS})
	if err := remote.answer(watch, session.CodeEvents, &session.EventsMessage{}); err != nil {
		t.Fatal(err)
	}
	if i := info(0); i.Places != 3 || i.PlaceBytes != 3000 || i.Calls != 1 {
		t.Errorf("with places and a watch: %+v", i)
	}
	remote.cancel(watch)
	_ = remote.answer(watch, 0, nil)
	if i := info(0); i.Calls != 0 {
		t.Errorf("after the watch: %+v", i)
	}
	_, _ = remote.c.Close(), local.c.Close()
	r.quiet()
	if all := r.server.Sessions(); len(all) != 0 {
		t.Errorf("sessions %+v, want none", all)
	}
}

// gatedStore lets no get and no durable put begin before its gate is open.
type gatedStore struct {
	*memstore.Store
	gate chan struct{}
}

func (s *gatedStore) Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	<-s.gate
	return s.Store.Get(ctx, ns, hashLen, want, o, use)
}

func (s *gatedStore) PutGranted(ctx context.Context, puts []block.GrantPut) []block.CommitResult {
	if puts[0].Durable == block.G3 {
		<-s.gate
	}
	return s.Store.PutGranted(ctx, puts)
}

// TestSessionsInFlight shows how many calls of a session are in flight, and how many bytes
// of blocks they move.
func TestSessionsInFlight(t *testing.T) {
	st := memstore.New(&memstore.Options{Durable: true})
	gated := &gatedStore{Store: st, gate: make(chan struct{})}
	r := serve(t, st, gated, nil)
	c := r.client()
	is := func(calls int, bytes int64) {
		t.Helper()
		if i := r.server.Sessions()[0]; i.Calls != calls || i.CallBytes != bytes {
			t.Errorf("%d calls of %d bytes, want %d of %d", i.Calls, i.CallBytes, calls, bytes)
		}
	}
	stored := pattern(300_000, 1)
	c.store(r.keys("a"), stored)
	places := c.places(r.ns, 200_000, 2)
	is(0, 0)
	c.fill(places[0].Grant, stored[:200_000])
	c.fill(places[1].Grant, stored[:100_000])
	c.send(session.CodeGet, &session.GetMessage{Keys: r.keys("az")})
	// What is answered at once shows that the server has read what was sent before it.
	read := func() {
		t.Helper()
		if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a")}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
			t.Fatal(err)
		}
	}
	read()
	is(1, 300_000)
	c.send(session.CodePut, &session.PutMessage{
		Keys: r.keys("bc"), Durable: block.G3,
		Items: []session.PutItem{item(places[0].Grant, stored[:200_000]), item(places[1].Grant, stored[:100_000])},
	})
	read()
	is(2, 600_000)
	close(gated.gate)
	r.await("the end of both", func() bool { i := r.server.Sessions()[0]; return i.Calls == 0 && i.CallBytes == 0 })
	_ = c.c.Close()
	r.quiet()
}

// TestLeasesDefault shows the limit that a server has when it is told none: 65536.
func TestLeasesDefault(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("long")
	}
	r := newRig(t, nil, nil)
	c := r.open("tcp", nil)
	ns := r.handle()
	putBlocks(t, c, ns, map[int]int{0: 1})
	const most = 65536
	var res block.MatchResult
	match := func() error {
		return c.Match(t.Context(), ns, packedFrom(0, 1), block.MatchOptions{Lease: time.Hour}, &res)
	}
	for range most {
		if err := match(); err != nil {
			t.Fatal(err)
		}
	}
	if i := r.server.Sessions()[0]; i.Leases != most || i.LeasesLimit != most {
		t.Errorf("%d of %d leases, want %d", i.Leases, i.LeasesLimit, most)
	}
	if n := r.store.Stats().Leases; n != most {
		t.Errorf("the store has %d leases", n)
	}
	if err := match(); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a lease too many: error %v", err)
	}
}

// TestSessionsEnding lists sessions with regions while they end.
func TestSessionsEnding(t *testing.T) {
	r := newRig(t, nil, nil)
	f, _ := unsealed(t, 4096)
	var lister sync.WaitGroup
	stop := make(chan struct{})
	lister.Go(func() {
		for {
			for _, i := range r.server.Sessions() {
				if i.Regions > 1 || i.RegionBytes != int64(i.Regions)*4096 {
					t.Errorf("listed %d regions of %d bytes", i.Regions, i.RegionBytes)
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	const sessions = 20
	for range 5 {
		var clients []*client
		for range sessions {
			c := dial(t, "unix", r.unix)
			if err := c.withRegions([]int{int(f.Fd())}, session.HelloRegion{Length: 4096}); err != nil {
				t.Fatal(err)
			}
			clients = append(clients, c)
		}
		if n := len(r.server.Sessions()); n != sessions {
			t.Errorf("%d sessions are listed, want %d", n, sessions)
		}
		for _, c := range clients {
			_ = c.c.Close()
		}
		r.quiet()
	}
	close(stop)
	lister.Wait()
}
