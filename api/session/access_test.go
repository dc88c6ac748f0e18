package session_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// teams are identities by token, the test's own user among them when it is told to.
func teams(t *testing.T, user bool) *access.List {
	t.Helper()
	sum := func(token string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(token))) }
	text := fmt.Sprintf(`{"identities": [
		{"name": "team-w", "token_sha256": %q, "write": ["llama*"]},
		{"name": "team-r", "token_sha256": %q, "read": ["llama*"]},
		{"name": "team-rw", "token_sha256": %q, "read": ["llama"], "write": ["llama"]},
		{"name": "auditor", "token_sha256": %q, "read": ["*"]},
		{"name": "other", "token_sha256": %q, "read": ["qwen"], "write": ["qwen"]},
		{"name": "team-all", "token_sha256": %q, "read": ["*"], "write": ["llama"]},
		{"name": "inbox", "token_sha256": %q, "write": ["*"]},
		{"name": "operator", "token_sha256": %q, "read": ["*"], "write": ["*"]}`,
		sum("w"), sum("r"), sum("rw"), sum("audit"), sum("o"), sum("all"), sum("in"), sum("op"))
	if user {
		text += fmt.Sprintf(`, {"name": "me", "uid": %d, "read": ["*"], "write": ["*"]}`, os.Getuid())
	}
	l, err := access.Parse([]byte(text + "]}"))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// as opens a session of whoever has the token.
func (r *rig) as(token string) *client {
	r.t.Helper()
	c := dial(r.t, "tcp", r.tcp)
	if err := c.hello(session.HelloMessage{Token: token, Features: session.FeatureHints}); err != nil {
		r.t.Fatal(err)
	}
	return c
}

// try makes every kind of call that a right is needed for, and returns the errors by
// its name.
func (c *client) try(r *rig) map[string]error {
	c.t.Helper()
	k := r.keys("a")
	errs := map[string]error{}
	call := func(name string, code session.Code, m interface{ Append([]byte) []byte }, want session.Code, into message) {
		c.t.Helper()
		errs[name] = c.answer(c.send(code, m), want, into)
	}
	call("match", session.CodeMatch, &session.MatchMessage{Keys: k}, session.CodeMatched, &session.MatchedMessage{})
	_, _, errs["get"] = c.blocks(&session.GetMessage{Keys: k})
	call("locate", session.CodeLocate, &session.LocateMessage{Keys: k}, session.CodeLocated, &session.LocatedMessage{})
	call("prefetch", session.CodePrefetch, &session.PrefetchMessage{Keys: k}, session.CodePrefetched, &session.PrefetchedMessage{})
	call("match of a conversation", session.CodeMatch, &session.MatchMessage{Keys: k, Flags: session.FlagConversation, Conversation: "x"}, session.CodeMatched, &session.MatchedMessage{})
	call("urgent prefetch", session.CodePrefetch, &session.PrefetchMessage{Keys: k, Flags: session.FlagUrgency, Priority: 9}, session.CodePrefetched, &session.PrefetchedMessage{})
	call("report", session.CodeReportPrefill, &session.ReportPrefillMessage{NS: k.NS, Tokens: 1, Micros: 1}, session.CodeReported, &session.ReportedMessage{})
	if errors.Is(errs["report"], block.ErrUnavailable) {
		errs["report"] = nil // it was let through to a store that makes no plans
	}
	call("watch", session.CodeWatch, &session.WatchMessage{NS: k.NS}, session.CodeEvents, &session.EventsMessage{})
	if errs["watch"] == nil {
		c.cancel(c.last)
		_ = c.answer(c.last, 0, nil)
	}
	call("watch of all", session.CodeWatch, &session.WatchMessage{}, session.CodeEvents, &session.EventsMessage{})
	if errs["watch of all"] == nil {
		c.cancel(c.last)
		_ = c.answer(c.last, 0, nil)
	}
	var g session.GrantedMessage
	call("grant", session.CodeGrant, &session.GrantMessage{NS: k.NS, Size: 5, Count: 1}, session.CodeGranted, &g)
	for _, p := range g.Places {
		_ = c.answer(c.send(session.CodeRelease, &session.ReleaseMessage{Grants: []uint64{p.Grant}}), session.CodeReleased, &session.ReleasedMessage{})
	}
	call("put", session.CodePut, &session.PutMessage{Keys: k, Items: make([]session.PutItem, 1)}, session.CodePutDone, &session.PutDoneMessage{})
	call("pin", session.CodePin, &session.PinMessage{Keys: k}, session.CodePinned, &session.PinnedMessage{})
	call("unpin", session.CodePin, &session.PinMessage{Keys: k, Flags: session.FlagUnpin}, session.CodePinned, &session.PinnedMessage{})
	// Over TCP there is no region: that is said of the key, to who may make the call.
	call("region get", session.CodeRegionGet, &session.RegionGetMessage{Keys: k, Segments: segments([]session.Segment{{}})}, session.CodeGot, &session.GotMessage{})
	call("region put", session.CodeRegionPut, &session.RegionPutMessage{
		Keys: k, HasParent: []bool{false}, Segments: segments([]session.Segment{{}}),
	}, session.CodePutDone, &session.PutDoneMessage{})
	call("open", session.CodeOpen, &session.OpenMessage{
		Flags: session.FlagCreate, Fields: fields("name", "llama", "tokens_per_block", "16", "max_block_bytes", "4194304"),
	}, session.CodeOpened, &session.OpenedMessage{})
	call("find", session.CodeOpen, &session.OpenMessage{Fields: fields("name", "llama")}, session.CodeOpened, &session.OpenedMessage{})
	call("open qwen", session.CodeOpen, &session.OpenMessage{Flags: session.FlagCreate, Fields: fields("name", "qwen", "block_bytes", "5")}, session.CodeOpened, &session.OpenedMessage{})
	call("find qwen", session.CodeOpen, &session.OpenMessage{Fields: fields("name", "qwen")}, session.CodeOpened, &session.OpenedMessage{})
	return errs
}

// TestAccess shows for every kind of call who may make it, that a denial names the
// identity and the namespace, and that one session's rights are not another's.
func TestAccess(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Access: teams(t, false)})
	op := r.as("op")
	op.store(r.keys("a"), []byte("hello"))
	for name, err := range op.try(r) {
		if err != nil {
			t.Errorf("operator: %s: error %v", name, err)
		}
	}
	reads := "match match-of-a-conversation get region-get locate prefetch urgent-prefetch watch find"
	writes := "grant put region-put pin unpin report open find"
	for _, tt := range []struct{ token, identity, may string }{
		{"w", "team-w", writes},
		{"r", "team-r", reads},
		{"rw", "team-rw", reads + " " + writes},
		{"audit", "auditor", reads + " watch-of-all find-qwen"},
		{"o", "other", "open-qwen find-qwen"},
	} {
		c := r.as(tt.token)
		may := map[string]bool{}
		for _, name := range strings.Fields(tt.may) {
			may[strings.ReplaceAll(name, "-", " ")] = true
		}
		for range 2 { // the second time from what the session remembers
			for name, err := range c.try(r) {
				switch {
				case may[name] && err != nil:
					t.Errorf("%s: %s: error %v", tt.identity, name, err)
				case may[name]:
				case !errors.Is(err, block.ErrDenied) || !strings.Contains(err.Error(), tt.identity):
					t.Errorf("%s: %s: error %v, want a denial that names it", tt.identity, name, err)
				case name == "watch of all":
				case tt.identity == "other" && !strings.Contains(name, "open") && !strings.Contains(name, "find"):
					// What it names by number only it is not told the name of.
					if !strings.Contains(err.Error(), fmt.Sprintf("namespace %d", r.ns.NS)) || strings.Contains(err.Error(), "llama") {
						t.Errorf("%s: %s: the denial is %v", tt.identity, name, err)
					}
				case !strings.Contains(err.Error(), `"llama"`) && !strings.Contains(err.Error(), `"qwen"`):
					t.Errorf("%s: %s: the denial names no namespace: %v", tt.identity, name, err)
				}
			}
		}
		_ = c.c.Close()
	}
	w := r.as("w")
	w.store(r.keys("b"), []byte("world"))
	if got, _, err := r.as("r").blocks(&session.GetMessage{Keys: r.keys("b")}); err != nil || !bytes.Equal(got[0], []byte("world")) {
		t.Errorf("what the writer put is read as %q, error %v", got, err)
	}
}

// TestAccessHello shows who gets a session, and who is given the store's memory.
func TestAccessHello(t *testing.T) {
	st := memstore.New(&memstore.Options{Shared: 64 << 20})
	for _, tt := range []struct {
		name, network, token string
		user                 bool // the test's user is one of the list
		want                 error
		text                 string
		shared               bool
	}{
		{"no token", "tcp", "", true, block.ErrDenied, "token absent", false},
		{"unknown token", "tcp", "x", true, block.ErrDenied, "token absent or wrong", false},
		{"digest as a token", "tcp", fmt.Sprintf("%x", sha256.Sum256([]byte("op"))), false, block.ErrDenied, "token", false},
		{"token", "tcp", "op", false, nil, "", false},
		{"user", "unix", "", true, nil, "", true},
		{"no users are known", "unix", "", false, block.ErrDenied, "token absent or wrong", false},
		{"wrong token of a known user", "unix", "x", true, block.ErrDenied, "token absent or wrong", false},
		{"token over the socket", "unix", "op", false, nil, "", true},
		{"less than all over the socket", "unix", "rw", true, nil, "", false},
		{"reads all", "unix", "audit", true, nil, "", true},
		{"reads all over TCP", "tcp", "audit", true, nil, "", false},
		{"writes all", "unix", "in", true, nil, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := serve(t, st, st, &session.ServerOptions{Access: teams(t, tt.user)})
			addr := r.tcp
			if tt.network == "unix" {
				addr = r.unix
			}
			c := dial(t, tt.network, addr)
			err := c.hello(session.HelloMessage{Token: tt.token, Features: session.FeatureShared})
			if !errors.Is(err, tt.want) || err != nil && !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
			if shared := c.welcome.Features&session.FeatureShared != 0; shared != tt.shared || shared != (len(c.files) > 0) {
				t.Errorf("shared %v with %d files, want %v", shared, len(c.files), tt.shared)
			}
			for _, fd := range c.files {
				_ = os.NewFile(uintptr(fd), "memory").Close()
			}
			if err != nil {
				return
			}
			k := r.keys("z")
			if err := c.answer(c.send(session.CodeGet, &session.GetMessage{Keys: k, Flags: session.FlagInPlace}), session.CodeGot, &session.GotMessage{}); (err == nil) != tt.shared {
				t.Errorf("get in place: error %v", err)
			}
			_ = c.c.Close()
			r.quiet()
		})
	}
}

// TestAccessReadOnly shows that who may read everything, and not write everything, is
// given the memory for reading only. What he may put comes as data.
func TestAccessReadOnly(t *testing.T) {
	st := memstore.New(&memstore.Options{Shared: 1 << 20})
	r := serve(t, st, st, &session.ServerOptions{Access: teams(t, false)})
	c := dial(t, "unix", r.unix)
	if err := c.hello(session.HelloMessage{Token: "all", Features: session.FeatureShared}); err != nil || len(c.files) != 1 {
		t.Fatalf("%d files, error %v", len(c.files), err)
	}
	n := int(c.welcome.Chunks[0])
	if _, err := unix.Mmap(c.files[0], 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EACCES) {
		t.Errorf("mapped for writing: error %v", err)
	}
	if _, err := unix.Pwrite(c.files[0], []byte{1}, 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("written to: error %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(c.files[0]), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(err, unix.EPERM) {
		t.Errorf("sealed: error %v", err)
	}
	mem, err := unix.Mmap(c.files[0], 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err := errors.Join(err, unix.Close(c.files[0])); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	if g := c.places(r.ns, 5, 1)[0]; g.Chunk != session.NoChunk {
		t.Errorf("a place in memory that the client cannot write: %+v", g)
	} else if done := c.put(r.keys("x"), 0, item(g.Grant, []byte("hello"))); done.Results[0].Status != session.StatusInvalid {
		t.Errorf("a put without data: %+v", done.Results)
	}
	c.store(r.keys("a"), []byte("hello"))
	var lent session.GotMessage
	if err := c.answer(c.send(session.CodeGet, &session.GetMessage{Keys: r.keys("a"), Flags: session.FlagInPlace}), session.CodeGot, &lent); err != nil {
		t.Fatal(err)
	}
	if b := lent.Blocks[0]; b.Reason != block.Hit || b.Chunk != 0 || string(mem[b.Offset:][:b.Len]) != "hello" {
		t.Errorf("lent %+v", b)
	}
	if all := r.server.Sessions(); len(all) != 1 || !all[0].Shared {
		t.Errorf("listed as %+v", all)
	}
	_ = c.c.Close()
	r.quiet()

	// The client finds out by the files.
	k, err := session.Dial(t.Context(), "unix", r.unix, &session.ClientOptions{Token: "all"})
	if err != nil {
		t.Fatal(err)
	}
	ns := session.Namespace{ID: r.ns.NS, Tag: r.ns.Tag, HashLen: 8}
	into := make([]byte, 5)
	res, err := k.Get(t.Context(), ns, []session.GetItem{{Hash: block.Hash([]byte("aaaaaaaa" + string(make([]byte, 24)))), Into: into}}, block.GetOptions{})
	if err != nil || res[0].Reason != block.Hit || string(into) != "hello" {
		t.Errorf("got %+v, error %v", res, err)
	}
	put, err := k.Put(t.Context(), ns, []session.PutBlock{{Hash: block.Hash{1}, Bytes: []byte("data")}}, session.PutOptions{})
	if err != nil || put[0].Err != nil {
		t.Errorf("put %+v, error %v", put, err)
	}
	if s := k.Stats(); !k.Shared() || s.InPlace != 1 || s.Gets != 1 || s.Puts != 1 {
		t.Errorf("shared %v, %+v", k.Shared(), s)
	}
	if err := k.Close(); err != nil {
		t.Error(err)
	}
	r.quiet()
}

// dialAs connects to a unix socket as another user, which only root can.
func dialAs(t *testing.T, uid int, path string) *client {
	t.Helper()
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "it takes that to be another user")
	}
	type result struct {
		fd  int
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and it ends with the goroutine, whose user nobody else may be
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			done <- result{err: errno}
			return
		}
		// The directories of a test are root's: files are looked up as such.
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0)
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		done <- result{fd, err}
	}()
	res := <-done
	if res.err != nil {
		t.Fatal(res.err)
	}
	f := os.NewFile(uintptr(res.fd), path)
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &client{t: t, c: c}
}

// TestAccessUsers shows that users of this host are told apart.
func TestAccessUsers(t *testing.T) {
	l, err := access.Parse([]byte(`{"identities": [
		{"name": "alice", "uid": 12345, "read": ["llama"], "write": ["llama"]},
		{"name": "bob", "uid": 12346, "read": ["llama"]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, nil, &session.ServerOptions{Access: l})
	alice, bob, carol := dialAs(t, 12345, r.unix), dialAs(t, 12346, r.unix), dialAs(t, 12347, r.unix)
	for _, c := range []*client{alice, bob} {
		if err := c.hello(session.HelloMessage{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := carol.hello(session.HelloMessage{}); !errors.Is(err, block.ErrDenied) || !strings.Contains(err.Error(), "user 12347") {
		t.Errorf("carol: error %v", err)
	}
	alice.store(r.keys("a"), []byte("hello"))
	if got, _, err := bob.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || !bytes.Equal(got[0], []byte("hello")) {
		t.Errorf("bob reads %q, error %v", got, err)
	}
	err = bob.answer(bob.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 5, Count: 1}), 0, nil)
	if !errors.Is(err, block.ErrDenied) || !strings.Contains(err.Error(), `identity "bob" may not write namespace "llama"`) {
		t.Errorf("bob writes: error %v", err)
	}
}

// TestAccessFrames shows that a client that is not given the store's memory works by
// frames over the same socket.
func TestAccessFrames(t *testing.T) {
	st := memstore.New(&memstore.Options{Shared: 64 << 20})
	r := serve(t, st, st, &session.ServerOptions{Access: teams(t, true)})
	c := r.open("unix", &session.ClientOptions{Token: "rw"})
	if c.Shared() {
		t.Error("it has the store's memory")
	}
	putBlocks(t, c, r.handle(), map[int]int{1: 1000, 2: 300000})
	got := [][]byte{make([]byte, 1000), make([]byte, 300000)}
	res, err := c.Get(t.Context(), r.handle(), []session.GetItem{{Hash: hashOf(1), Into: got[0]}, {Hash: hashOf(2), Into: got[1]}}, block.GetOptions{})
	if err != nil || res[0].Err != nil || !bytes.Equal(got[0], bytesOf(1, 1000)) || !bytes.Equal(got[1], bytesOf(2, 300000)) {
		t.Errorf("got %+v, error %v", res, err)
	}
	if me := r.open("unix", nil); !me.Shared() {
		t.Error("whoever may do everything is not given the store's memory")
	}
}
