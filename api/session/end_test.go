package session_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// shared opens a session over the unix socket that shares the store's memory, and
// maps that.
func (r *rig) shared() (*client, []byte) {
	r.t.Helper()
	c := dial(r.t, "unix", r.unix)
	mem := c.share()
	r.t.Cleanup(func() { _ = unix.Munmap(mem) })
	return c, mem
}

func (c *client) share() []byte {
	c.t.Helper()
	if err := c.hello(session.HelloMessage{Features: session.FeatureShared | 1<<40}); err != nil {
		c.t.Fatal(err)
	}
	if c.welcome.Features != session.FeatureShared || len(c.files) != 1 || len(c.welcome.Chunks) != 1 {
		c.t.Fatalf("welcome %+v with %d files", c.welcome, len(c.files))
	}
	mem, err := unix.Mmap(c.files[0], 0, int(c.welcome.Chunks[0]), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := unix.Close(c.files[0]); err != nil {
		c.t.Fatal(err)
	}
	return mem
}

func TestShared(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
	c, mem := r.shared()
	p := pattern(1000, 1)
	g := c.places(r.ns, 1000, 2)
	copy(mem[g[0].Offset:], p)
	if g[0].Chunk != 0 || g[1].Chunk != 0 {
		t.Fatalf("places %+v", g)
	}
	c.fill(g[1].Grant, pattern(1000, 2)) // data frames do as well
	done := c.put(r.keys("ab"), session.FlagRegrant, item(g[0].Grant, p), item(g[1].Grant, pattern(1000, 2)))
	if done.Results[0].Status != session.StatusOK || done.Results[1].Status != session.StatusOK || len(done.Grants.Places) != 2 {
		t.Fatalf("put %+v", done)
	}
	got, msg, err := c.blocks(&session.GetMessage{Keys: r.keys("a")})
	if err != nil || !bytes.Equal(got[0], p) {
		t.Errorf("get: error %v", err)
	}
	if msg.Blocks[0].Chunk != session.NoChunk {
		t.Errorf("get: %+v", msg.Blocks[0])
	}
	var lent session.GotMessage
	if err := c.answer(c.send(session.CodeGet, &session.GetMessage{Keys: r.keys("aXb"), Flags: session.FlagInPlace}), session.CodeGot, &lent); err != nil {
		t.Fatal(err)
	}
	a, x, b := lent.Blocks[0], lent.Blocks[1], lent.Blocks[2]
	if x.Reason != block.MissAbsent || x.Chunk != session.NoChunk || lent.Lease == 0 || lent.LeaseMS == 0 {
		t.Errorf("lent %+v", lent)
	}
	if !bytes.Equal(mem[a.Offset:][:a.Len], p) || !bytes.Equal(mem[b.Offset:][:b.Len], pattern(1000, 2)) || a.Sum != item(0, p).Sum {
		t.Error("what is lent is not what was put")
	}
	var res session.ReleasedMessage
	if err := c.answer(c.send(session.CodeRelease, &session.ReleaseMessage{Leases: []uint64{lent.Lease}}), session.CodeReleased, &res); err != nil || res.Results[0] != session.StatusOK {
		t.Errorf("release: %v, error %v", res.Results, err)
	}
	if n := r.store.Stats().Leases; n != 0 {
		t.Errorf("%d leases are left", n)
	}
	// Another client sees it over TCP.
	if got, _, err := r.client().blocks(&session.GetMessage{Keys: r.keys("b")}); err != nil || !bytes.Equal(got[0], pattern(1000, 2)) {
		t.Errorf("over TCP: error %v", err)
	}
}

// TestInPlaceSums shows that the server computes the checksum of what a client writes to
// its memory: a put that says another one is refused, and only that one of its message,
// whether many blocks are hashed side by side or few by one.
func TestInPlaceSums(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 64 << 20}, nil)
	c, mem := r.shared()
	for i, size := range []int{1000, 2 << 20} {
		names := [2]string{"abcd", "efgh"}[i]
		places := c.places(r.ns, uint32(size), 4)
		items := make([]session.PutItem, len(places))
		for j, g := range places {
			p := pattern(size, byte(1+4*i+j))
			items[j] = item(g.Grant, p)
			switch j {
			case 1: // nothing was written there
			case 3:
				p[size-1]++
				fallthrough
			default:
				copy(mem[g.Offset:], p)
			}
		}
		done := c.put(r.keys(names), session.FlagRegrant, items...)
		for j, want := range []session.Status{session.StatusOK, session.StatusCorrupt, session.StatusOK, session.StatusCorrupt} {
			if got := done.Results[j]; got.Status != want || (want != session.StatusOK) != strings.Contains(got.Text, "sum") {
				t.Errorf("block %d of %d bytes: %+v, want status %v", j, size, got, want)
			}
		}
		if len(done.Grants.Places) != 4 {
			t.Errorf("%d new places, want one for each that was used up", len(done.Grants.Places))
		}
		got, msg, err := c.blocks(&session.GetMessage{Keys: r.keys(names)})
		if err != nil {
			t.Fatal(err)
		}
		for j := range items {
			if hit := j%2 == 0; hit != (msg.Blocks[j].Reason == block.Hit) || hit && !bytes.Equal(got[j], pattern(size, byte(1+4*i+j))) {
				t.Errorf("block %d of %d bytes: %+v", j, size, msg.Blocks[j])
			}
		}
		var ids []uint64
		for _, g := range done.Grants.Places {
			ids = append(ids, g.Grant)
		}
		if err := c.answer(c.send(session.CodeRelease, &session.ReleaseMessage{Grants: ids}), session.CodeReleased, new(session.ReleasedMessage)); err != nil {
			t.Fatal(err)
		}
	}
	if st := r.server.Stats(); st.Corrupt != 4 || st.Grants != 0 {
		t.Errorf("%d puts are counted as corrupt, and %d places open", st.Corrupt, st.Grants)
	}
	_ = c.c.Close()
	r.quiet()
}

// TestNotShared shows that a client over TCP, or of a store whose memory cannot be
// shared, gets no memory.
func TestNotShared(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
	c := dial(t, "tcp", r.tcp)
	if err := c.hello(session.HelloMessage{Features: session.FeatureShared}); err != nil || c.welcome.Features != 0 || len(c.welcome.Chunks) != 0 {
		t.Errorf("over TCP: welcome %+v, error %v", c.welcome, err)
	}
	r = newRig(t, nil, nil)
	c = dial(t, "unix", r.unix)
	if err := c.hello(session.HelloMessage{Features: session.FeatureShared}); err != nil || c.welcome.Features != 0 || len(c.files) != 0 {
		t.Errorf("plain memory: welcome %+v, error %v", c.welcome, err)
	}
	c.store(r.keys("a"), []byte("hello"))
}

// TestExpired shows that a place that is not used comes back: over TCP at once, and
// data for it is skipped; where memory is shared when the client has answered.
func TestExpired(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, &session.ServerOptions{GrantTTL: 30 * time.Millisecond})
	revoked := func(c *client, g uint64) {
		t.Helper()
		h, p := c.recv(0)
		var m session.RevokeMessage
		if err := m.Decode(p); err != nil || session.Code(h.Flags) != session.CodeRevoke || len(m.Grants) != 1 || m.Grants[0] != g {
			t.Fatalf("frame %+v %+v, error %v, want that grant %d is revoked", h, m, err, g)
		}
	}
	p := pattern(100, 1)
	c := r.client()
	g := c.places(r.ns, 100, 1)[0].Grant
	c.fill(g, p[:50])
	revoked(c, g)
	if n := r.store.Stats().Reservations; n != 0 {
		t.Errorf("%d grants are left", n)
	}
	// What was sent before may have come too late for the place; it has come now.
	if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a")}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
		t.Fatal(err)
	}
	before := r.server.Stats().Skipped
	c.fill(g, p)
	if res := c.put(r.keys("a"), 0, item(g, p)).Results[0]; res.Status != session.StatusLeaseExpired {
		t.Errorf("put by what was revoked: %+v", res)
	}
	if n := r.server.Stats().Skipped - before; n != 100 {
		t.Errorf("%d bytes skipped, want 100", n)
	}

	s, mem := r.shared()
	at := s.places(r.ns, 100, 1)[0]
	revoked(s, at.Grant)
	if st := r.server.Stats(); st.Revoked != 1 || st.Grants != 0 || r.store.Stats().Reservations != 1 {
		t.Errorf("server %+v, store %d grants, want one that is revoked", st, r.store.Stats().Reservations)
	}
	copy(mem[at.Offset:], p) // nobody else's yet
	if res := s.put(r.keys("a"), 0, item(at.Grant, p)).Results[0]; res.Status != session.StatusLeaseExpired {
		t.Errorf("put by what was revoked: %+v", res)
	}
	var res session.ReleasedMessage
	if err := s.answer(s.send(session.CodeRelease, &session.ReleaseMessage{Grants: []uint64{at.Grant}}), session.CodeReleased, &res); err != nil || res.Results[0] != session.StatusOK {
		t.Errorf("release: %v, error %v", res.Results, err)
	}
	if n := r.store.Stats().Reservations; n != 0 {
		t.Errorf("%d grants are left", n)
	}
	if st := r.server.Stats(); st.Expired != 2 || st.Revoked != 0 {
		t.Errorf("server %+v", st)
	}
}

// TestProcessEnds shows that places in shared memory come back when the client's
// process has ended, and not before.
func TestProcessEnds(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
	cmd := exec.Command(os.Args[0], "-test.run=^TestClientProcess$", "-test.v")
	cmd.Env = append(os.Environ(), "SESSION_SOCKET="+r.unix)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.await("its places", func() bool { return r.server.Stats().Grants == 2 })
	// Another session of this process: it ends, the process lives.
	c, _ := r.shared()
	theirs := c.places(r.ns, 100, 3)
	_ = c.c.Close()
	r.await("its end", func() bool { st := r.server.Stats(); return st.Sessions == 1 && st.Orphans == 3 })
	if n := r.store.Stats().Reservations; n != 5 {
		t.Errorf("%d grants, want the 5 that can be written", n)
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	_ = out.Close()
	r.await("its places to come back", func() bool { return r.store.Stats().Reservations == 3 && r.server.Stats().Sessions == 0 })
	if st := r.server.Stats(); st.Orphans != 3 {
		t.Errorf("server %+v", st)
	}
	// Another session of the process, and only one that shares memory, gives them back.
	d, _ := r.shared()
	var res session.ReleasedMessage
	release := &session.ReleaseMessage{Grants: []uint64{theirs[0].Grant, theirs[1].Grant}}
	if err := d.answer(d.send(session.CodeRelease, release), session.CodeReleased, &res); err != nil || res.Results[0] != session.StatusOK || res.Results[1] != session.StatusOK {
		t.Errorf("released: %v, error %v", res.Results, err)
	}
	e := r.client()
	release.Grants = []uint64{theirs[2].Grant}
	if err := e.answer(e.send(session.CodeRelease, release), session.CodeReleased, &res); err != nil || res.Results[0] != session.StatusLeaseExpired {
		t.Errorf("released over TCP: %v, error %v", res.Results, err)
	}
	if n := r.store.Stats().Reservations; n != 1 || r.server.Stats().Orphans != 1 {
		t.Errorf("%d grants, want one that is left", n)
	}
	if err := r.server.Close(); err != nil { // does not wait for this process to end
		t.Error(err)
	}
}

// TestGiveBackEarly shows that places of a session come back by another one of the
// process also before the server has seen the first one's end.
func TestGiveBackEarly(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
	c, _ := r.shared()
	d, _ := r.shared()
	places := c.places(r.ns, 100, 2)
	var res session.ReleasedMessage
	release := &session.ReleaseMessage{Grants: []uint64{places[0].Grant, places[1].Grant}}
	if err := d.answer(d.send(session.CodeRelease, release), session.CodeReleased, &res); err != nil || res.Results[0] != session.StatusOK || res.Results[1] != session.StatusOK {
		t.Errorf("released: %v, error %v", res.Results, err)
	}
	if n := r.store.Stats().Reservations; n != 0 {
		t.Errorf("%d grants are left", n)
	}
	if got := c.put(r.keys("a"), 0, item(places[0].Grant, pattern(100, 1))).Results[0]; got.Status != session.StatusLeaseExpired {
		t.Errorf("put into a place that was given back: %+v", got)
	}
	_ = c.c.Close()
	r.await("its end", func() bool { return r.server.Stats().Sessions == 1 })
	if st := r.server.Stats(); st.Orphans != 0 {
		t.Errorf("%d orphans", st.Orphans)
	}
}

// TestClientProcess is the process that TestProcessEnds kills.
func TestClientProcess(t *testing.T) {
	socket := os.Getenv("SESSION_SOCKET")
	if socket == "" {
		return // it is a part of that test
	}
	c := dial(t, "unix", socket)
	c.share()
	c.places(session.Keys{NS: 1}, 100, 2)
	select {}
}

// TestCutMidPut shows that a client that vanishes in the middle of a put's data
// leaves nothing.
func TestCutMidPut(t *testing.T) {
	r := newRig(t, nil, nil)
	for i := range 20 {
		c := r.client()
		g := c.places(r.ns, 1<<20, 2)
		whole := append(packed(frame.Header{Type: frame.Data, Token: g[0].Grant}, pattern(200000, 1)),
			packed(frame.Header{Type: frame.Data, Token: g[0].Grant, Offset: 200000}, pattern(200000, 1))...)
		c.write(whole[:len(whole)*(i+1)/20-7])
		if i%2 == 0 {
			if err := c.c.(*net.TCPConn).SetLinger(0); err != nil { // as a process that is killed with bytes unread
				t.Fatal(err)
			}
		}
		_ = c.c.Close()
	}
	r.quiet()
}

// TestBusy shows what is refused beyond the limits of calls and bytes.
func TestBusy(t *testing.T) {
	r := newRig(t, &memstore.Options{Capacity: 14000}, &session.ServerOptions{Calls: 2, Bytes: 5000})
	c := r.client()
	for _, name := range []string{"a", "b", "c"} {
		c.store(r.keys(name), pattern(2000, name[0]))
	}
	got, msg, err := c.blocks(&session.GetMessage{Keys: r.keys("aXbc")})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[0], pattern(2000, 'a')) || !bytes.Equal(got[2], pattern(2000, 'b')) || got[3] != nil {
		t.Error("wrong bytes")
	}
	if msg.Blocks[1].Status != session.StatusOK || msg.Blocks[2].Status != session.StatusOK || msg.Blocks[3].Status != session.StatusBusy {
		t.Errorf("answer %+v, want that the last key is busy", msg.Blocks)
	}
	c.store(r.keys("d"), pattern(6000, 1))
	if got, _, err = c.blocks(&session.GetMessage{Keys: r.keys("d")}); err != nil || len(got[0]) != 6000 {
		t.Errorf("a block that is larger than the limit: error %v", err)
	}
	for range 2 { // which wait for room
		c.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 4000, Count: 1})
	}
	if err := c.answer(c.send(session.CodeWatch, &session.WatchMessage{NS: r.ns.NS}), 0, nil); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a call too many: error %v", err)
	}
	got, msg, err = c.blocks(&session.GetMessage{Keys: r.keys("ab")})
	if err != nil || got[0] != nil || msg.Blocks[0].Status != session.StatusBusy || msg.Blocks[1].Status != session.StatusBusy {
		t.Errorf("a get too many: %+v, error %v", msg.Blocks, err)
	}
	if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a")}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
		t.Errorf("a match: error %v", err)
	}
	durable := &session.PutMessage{Keys: r.keys("z"), Durable: block.G3, Items: make([]session.PutItem, 1)}
	var done session.PutDoneMessage
	if err := c.answer(c.send(session.CodePut, durable), session.CodePutDone, &done); err != nil || done.Results[0].Status != session.StatusBusy {
		t.Errorf("a put too many: %+v, error %v", done, err)
	}
	if n := r.server.Stats().Busy; n != 5 {
		t.Errorf("%d refused, want 5", n)
	}
}

// TestPrefetchWatch shows progress, and events as they come.
func TestPrefetchWatch(t *testing.T) {
	r := newRig(t, nil, nil)
	c, other := r.client(), r.client()
	c.store(r.keys("a"), []byte("hello"))
	var all []session.PrefetchResult
	k := r.ns
	k.Hashes = bytes.Repeat(r.keys("ab").Hashes, 300)
	for id := c.send(session.CodePrefetch, &session.PrefetchMessage{Keys: k}); len(all) < 600; {
		var m session.PrefetchedMessage
		if err := c.answer(id, session.CodePrefetched, &m); err != nil || int(m.First) != len(all) {
			t.Fatalf("from key %d on with %d known, error %v", m.First, len(all), err)
		}
		all = append(all, m.Results...)
	}
	if all[0] != (session.PrefetchResult{Tier: block.G2}) || all[599] != (session.PrefetchResult{Reason: block.MissAbsent}) {
		t.Errorf("results %v and %v", all[0], all[599])
	}
	w := c.send(session.CodeWatch, &session.WatchMessage{Snapshot: true})
	var events []block.Event
	next := func() {
		t.Helper()
		var m session.EventsMessage
		if err := c.answer(w, session.CodeEvents, &m); err != nil {
			t.Fatal(err)
		}
		events = append(events, m.Events...)
	}
	next()
	for len(events) < 2 {
		next()
	}
	other.store(r.keys("b"), []byte("world"))
	for len(events) < 3 {
		next()
	}
	if events[0].Kind != block.EventPresent || events[1].Kind != block.EventSnapshot || events[2].Kind != block.EventStored || events[2].Hash != hash("bbbbbbbb") || events[2].NS != "llama" {
		t.Errorf("events %+v", events)
	}
	if err := r.drain(); err != nil {
		t.Errorf("drain with a watch: %v", err)
	}
	if err := c.answer(w, 0, nil); !errors.Is(err, block.ErrClosed) {
		t.Errorf("the watch ends with %v", err)
	}
}

// TestDrain shows that calls under way end, others do not begin, and that those that
// take too long are broken off.
func TestDrain(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	c.places(r.ns, 4<<20, 16)
	waiting := r.client()
	g := waiting.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 4 << 20, Count: 1})
	r.await("the call", func() bool { return r.server.Stats().Calls[session.CodeGrant] == 2 })
	done := make(chan error, 1)
	go func() { done <- r.drain() }()
	if bye := c.ended(); bye != "the server is closing" {
		t.Errorf("last words %q", bye)
	}
	if err := waiting.answer(g, session.CodeGranted, &session.GrantedMessage{}); err != nil {
		t.Errorf("a call under way: error %v", err)
	}
	waiting.ended()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("tcp", r.tcp); err == nil {
		t.Error("it still accepts connections")
	}
	r.quiet()

	r = newRig(t, nil, nil)
	r.client().places(r.ns, 4<<20, 16)
	waiting = r.client()
	c = r.client()
	c.send(session.CodeWatch, &session.WatchMessage{})
	waiting.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 4 << 20, Count: 1})
	r.await("the calls", func() bool {
		st := r.server.Stats()
		return st.Calls[session.CodeGrant] == 2 && st.Calls[session.CodeWatch] == 1
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.server.Drain(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("drain without time: error %v", err)
	}
	r.quiet()
}
