package api_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// logBuffer is a log that a test reads while others write it.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *logBuffer) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// oneBlock opens a namespace, puts a block and gets it back.
func oneBlock(t *testing.T, c *api.Client, name string) {
	t.Helper()
	ns, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: name, MaxBlockBytes: 4 << 20}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns.HashLen = 16
	data := bytes.Repeat([]byte("block"), 200_000)
	res, err := c.Put(t.Context(), ns, []api.PutItem{{Data: data}}, api.PutOptions{})
	if err != nil || res[0].Err != nil {
		t.Fatal(err, res)
	}
	ns.Desc = block.Descriptor{} // by handle alone, which does not tell how long a block is
	calls := 0
	err = c.Get(t.Context(), ns, []block.Wanted{{Hash: block.Hash{1}}, {}}, block.GetOptions{}, func(i int, p block.Payload) error {
		if calls++; i == 1 && !bytes.Equal(p.Bytes, data) || i == 0 && p.Reason != block.MissAbsent {
			t.Errorf("key %d: %v, %d bytes", i, p.Reason, len(p.Bytes))
		}
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

// Without a session blocks move over gRPC; the client says why, and logs it once.
func TestNoSession(t *testing.T) {
	const nobody = "127.0.0.1:1" // of a service that nobody has had for decades
	other := serveSessions(t, memstore.New(nil))
	for _, tc := range []struct {
		name   string
		places *api.SessionPlaces
		inline bool
		why    string
		level  string
	}{
		{"an old server", nil, false, "the server serves no sessions", "DEBUG"},
		{"nobody answers", &api.SessionPlaces{Address: nobody}, false, "connection refused", "WARN"},
		{"another store answers", &api.SessionPlaces{Address: other}, false, "another store", "WARN"},
		{"no socket", &api.SessionPlaces{Socket: filepath.Join(t.TempDir(), "none")}, false, "is not on this host", "WARN"},
		{"no address", &api.SessionPlaces{Address: "x"}, false, `session address "x"`, "WARN"},
		{"inline", &api.SessionPlaces{Address: other}, true, "Inline", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			addr := serveStore(t, memstore.New(nil), "tcp", "127.0.0.1:0", &api.ServerOptions{Sessions: tc.places}).String()
			var log logBuffer
			c, err := api.Dial(t.Context(), addr, &api.ClientOptions{Logger: log.logger(), Inline: tc.inline})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			oneBlock(t, c, "ns")
			if i := c.SessionInfo(); i.Way != api.WayGRPC || i.Peer != "" || !strings.Contains(i.Why, tc.why) {
				t.Errorf("%+v, want %s", i, tc.why)
			}
			want := 1
			if tc.level == "" {
				want = 0
			}
			if said := log.String(); strings.Count(said, "no session:") != want || want == 1 && !strings.Contains(said, "level="+tc.level) {
				t.Errorf("logged %q", said)
			}
		})
	}
}

// TestManyKeys shows that a call may name any number of keys, whichever way it goes.
func TestManyKeys(t *testing.T) {
	st := memstore.New(nil)
	addr := serveStore(t, st, "tcp", "127.0.0.1:0", &api.ServerOptions{Sessions: &api.SessionPlaces{Address: serveSessions(t, st)}}).String()
	const there, all = api.MaxMatchKeys + 100, api.MaxMatchKeys + 200
	var hashes []block.Hash
	var items []api.PutItem
	for i := range all {
		hashes = append(hashes, block.Hash{byte(i), byte(i >> 8), byte(i >> 16), 1})
		if i < there {
			items = append(items, api.PutItem{Hash: hashes[i], Data: []byte{byte(i), byte(i >> 8)}})
		}
	}
	for _, inline := range []bool{false, true} {
		c, err := api.Dial(t.Context(), addr, &api.ClientOptions{Inline: inline})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ns, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: "many", MaxBlockBytes: 2}, 0)
		if err != nil {
			t.Fatal(err)
		}
		ns.HashLen = 8
		if !inline {
			res, err := c.Put(t.Context(), ns, items, api.PutOptions{})
			if err != nil || res[there-1].Err != nil {
				t.Fatal(err, res[there-1].Err)
			}
		}
		if way := c.SessionInfo().Way; (way == api.WayGRPC) != inline {
			t.Fatalf("inline %v: %s", inline, way)
		}
		for _, all := range []bool{false, true} {
			want := len(hashes)
			if !all {
				want = there + 1
			}
			m, err := c.Match(t.Context(), ns, hashes, block.MatchOptions{All: all})
			if err != nil || m.Prefix != there || len(m.Blocks) != want || m.Blocks[there-1].State != block.Resident || m.Blocks[there].State != block.Absent {
				t.Errorf("inline %v: match with all %v: %d of %d keys, prefix %d, error %v", inline, all, len(m.Blocks), want, m.Prefix, err)
			}
		}
		// The first message ends with a gap.
		hashes[api.MaxMatchKeys-1], hashes[there] = hashes[there], hashes[api.MaxMatchKeys-1]
		for _, all := range []bool{false, true} {
			want := len(hashes)
			if !all {
				want = api.MaxMatchKeys
			}
			if m, err := c.Match(t.Context(), ns, hashes, block.MatchOptions{All: all}); err != nil || m.Prefix != api.MaxMatchKeys-1 || len(m.Blocks) != want {
				t.Errorf("inline %v: match with all %v and a gap: %d of %d keys, prefix %d, error %v", inline, all, len(m.Blocks), want, m.Prefix, err)
			}
		}
		hashes[api.MaxMatchKeys-1], hashes[there] = hashes[there], hashes[api.MaxMatchKeys-1]
		var want []block.Wanted
		for i := range 2*api.MaxKeys + 5 {
			want = append(want, block.Wanted{Hash: hashes[i*7]})
		}
		next := 0
		err = c.Get(t.Context(), ns, want, block.GetOptions{}, func(i int, p block.Payload) error {
			if k := i * 7; i != next || p.Reason != block.Hit || !bytes.Equal(p.Bytes, []byte{byte(k), byte(k >> 8)}) {
				t.Fatalf("inline %v: get: key %d behind %d: %v with %x", inline, i, next, p.Reason, p.Bytes)
			}
			next++
			return nil
		})
		if err != nil || next != len(want) {
			t.Errorf("inline %v: get: %d keys, error %v", inline, next, err)
		}
	}
}

// serveSessions serves sessions of a store over TCP until the test ends.
func serveSessions(t *testing.T, s session.Store) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := session.NewServer(s, nil)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	t.Cleanup(func() {
		if err := errors.Join(srv.Close(), <-done); err != nil {
			t.Error(err)
		}
	})
	return lis.Addr().String()
}

// A wildcard that the server announces stands for the host that was dialled.
func TestSessionWildcard(t *testing.T) {
	s := memstore.New(nil)
	_, port, err := net.SplitHostPort(serveSessions(t, s))
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"", "0.0.0.0", "::"} {
		addr := serveStore(t, s, "tcp", "127.0.0.1:0", &api.ServerOptions{Sessions: &api.SessionPlaces{Address: net.JoinHostPort(host, port)}}).String()
		c, err := api.Dial(t.Context(), addr, nil)
		if err != nil {
			t.Fatal(err)
		}
		oneBlock(t, c, "ns"+host)
		if i := c.SessionInfo(); i.Way != api.WayTCP || i.Peer != "tcp 127.0.0.1:"+port {
			t.Errorf("%q: %+v", host, i)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A session that is lost is dialled again, where the server says that it is now.
func TestSessionLost(t *testing.T) {
	s := memstore.New(&memstore.Options{Shared: 64 << 20})
	path := filepath.Join(t.TempDir(), "s")
	start := func() (srv *session.Server, done chan error) {
		lis, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		srv, done = session.NewServer(s, nil), make(chan error, 1)
		go func() { done <- srv.Serve(lis) }()
		return srv, done
	}
	srv, done := start()
	addr := serveStore(t, s, "tcp", "127.0.0.1:0", &api.ServerOptions{Sessions: &api.SessionPlaces{Socket: path}}).String()
	c, err := api.Dial(t.Context(), addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	oneBlock(t, c, "a")
	if i := c.SessionInfo(); i.Way != api.WayShared || i.Peer != "unix "+path {
		t.Fatalf("%+v", i)
	}
	if err := errors.Join(srv.Close(), <-done); err != nil {
		t.Fatal(err)
	}
	// Meanwhile blocks move over gRPC, once the client has seen that the session ended.
	eventually(t, func() bool { return c.SessionInfo().Way == api.WayGRPC })
	oneBlock(t, c, "b")
	srv, done = start()
	defer func() {
		if err := errors.Join(srv.Close(), <-done); err != nil {
			t.Error(err)
		}
	}()
	ns, err := c.Namespace(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool {
		if _, err := c.Match(t.Context(), ns, []block.Hash{{}}, block.MatchOptions{}); err != nil {
			t.Fatal(err)
		}
		return c.SessionInfo().Way == api.WayShared
	})
	oneBlock(t, c, "c")
}

// A client without any call does not keep the memory of a store that has ended.
func TestSessionLostIsUnmapped(t *testing.T) {
	s := memstore.New(&memstore.Options{Shared: 64 << 20})
	lis, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	srv, done := session.NewServer(s, nil), make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	addr := serveStore(t, s, "tcp", "127.0.0.1:0", &api.ServerOptions{Sessions: &api.SessionPlaces{Socket: lis.Addr().String()}}).String()
	c, err := api.Dial(t.Context(), addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	maps := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return bytes.Count(b, []byte("/memfd:"))
	}
	before := maps() // the store's own
	oneBlock(t, c, "a")
	if i := c.SessionInfo(); i.Way != api.WayShared || maps() <= before {
		t.Fatalf("%+v, %d memory files mapped, %d before", i, maps(), before)
	}
	if err := errors.Join(srv.Close(), <-done); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return maps() == before })
}

// matched is a store that notes what it is asked with.
type matched struct {
	*memstore.Store
	mu    sync.Mutex
	asked []block.MatchOptions
}

func (s *matched) Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	s.mu.Lock()
	s.asked = append(s.asked, o)
	s.mu.Unlock()
	return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
}

// A match of a conversation goes over a session as others do: without a lease.
func TestSessionConversation(t *testing.T) {
	s := &matched{Store: memstore.New(nil)}
	c := apitest.ServeSessions(t, s, s, false, nil)()
	ns, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: "ns", BlockBytes: 5}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns.HashLen = 16
	if res, err := c.Put(t.Context(), ns, []api.PutItem{{Data: []byte("block")}}, api.PutOptions{}); err != nil || res[0].Err != nil {
		t.Fatal(err, res)
	}
	for _, lease := range []time.Duration{0, time.Minute} {
		o := block.MatchOptions{Conversation: "agent", Lease: lease}
		if _, err := c.Match(t.Context(), ns, []block.Hash{{}}, o); err != nil {
			t.Fatal(err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.asked) != 2 || s.asked[0].Conversation != "agent" || s.asked[1].Conversation != "agent" {
		t.Fatalf("asked %+v", s.asked)
	}
	// Over gRPC a match without a lease is no session's.
	if way := c.SessionInfo().Way; way != api.WayTCP || s.asked[0].Session == 0 || s.asked[0].Session == s.asked[1].Session {
		t.Errorf("over %s asked %+v", way, s.asked)
	}
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatal("waited in vain")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Places that are kept for puts to come are given back with the client.
func TestSessionGivesBack(t *testing.T) {
	s := memstore.New(&memstore.Options{Shared: 64 << 20})
	c := apitest.ServeSessions(t, s, s, true, nil)()
	ns, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: "ns", BlockBytes: 1000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns.HashLen = 16
	for i := range 4 {
		res, err := c.Put(t.Context(), ns, []api.PutItem{{Hash: block.Hash{byte(i)}, Data: make([]byte, 1000)}}, api.PutOptions{})
		if err != nil || res[0].Err != nil {
			t.Fatal(err, res)
		}
	}
	if s.Stats().Reservations == 0 {
		t.Error("no place is kept after puts in a row")
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if n := s.Stats().Reservations; n != 0 {
		t.Errorf("%d places are held by a client that has closed", n)
	}
}
